"""The trace against hand-computed bytes, and against the same step on real tensors."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from dsplan.planner.estimating import estimate
from dsplan.planner.models.load import load_subject
from dsplan.planner.settings import Flags
from dsplan.planner.tracing.kernels import GpuKernels
from dsplan.planner.tracing.recording import undominated
from dsplan.planner.tracing.splitting import splitting
from dsplan.planner.tracing.timeline import Timeline
from dsplan.planner.tracing.tracer import inputs_of, trace
from dsplan.runtime.recompute import apply_recompute
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.problem import Problem
from dsplan.schemas.trace import Point, Trace
from hypothesis import given
from hypothesis import strategies as st
from models import FED, LAYERS, WIDTH, Residual, Tied, residual, subject, tied
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 8


def peak(segment):
    return max(point.activation_bytes for point in segment.points)


def test_units_are_the_rest_and_the_blocks():
    traced = trace(residual(), precision="fp32", micro_batch=BATCH)
    assert [unit.name for unit in traced.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [unit.numel for unit in traced.units] == [Residual.root_params] + LAYERS * [Residual.block_params]


def test_segments_run_through_the_blocks_and_back_without_gaps():
    segments = trace(residual(), precision="fp32", micro_batch=BATCH).segments
    assert [(s.phase, s.unit) for s in segments] == [
        *(("forward", unit) for unit in (0, 1, 2, 3, 0)),
        *(("backward", unit) for unit in (0, 3, 2, 1, 0)),
    ]
    for before, after in itertools.pairwise(segments):
        assert before.end.activation_bytes == after.start.activation_bytes


def test_forward_bytes_are_those_counted_by_hand():
    segments = trace(residual(), precision="fp32", micro_batch=BATCH).segments
    inputs, entered = 4 * BATCH * FED, 4 * BATCH * WIDTH
    assert segments[0].start == Point(inputs, 0, 0)
    assert segments[0].end == Point(inputs + entered, 0, 0)
    for index, segment in enumerate(segments[1:4]):
        assert segment.start.activation_bytes == inputs + entered + index * BATCH * Residual.saved_per_block
        assert peak(segment) == segment.start.activation_bytes + BATCH * Residual.peak_in_block
        assert segment.end.activation_bytes == segment.start.activation_bytes + BATCH * Residual.saved_per_block


def test_backward_frees_what_forward_saved_and_makes_all_gradients_of_its_unit():
    segments = trace(residual(), precision="fp32", micro_batch=BATCH).segments
    for segment in segments[6:9]:
        assert segment.start.grad_bytes == 0
        assert segment.end.grad_bytes == 4 * Residual.block_params
        assert segment.start.activation_bytes - segment.end.activation_bytes == BATCH * Residual.saved_per_block
    last = segments[-1].end
    assert last.activation_bytes == 4 * BATCH * FED + 4 + 4, "the inputs, the loss and its gradient"


def test_recompute_keeps_only_the_inputs_of_blocks():
    segments = trace(residual(), precision="fp32", recompute="full", micro_batch=BATCH).segments
    for segment in segments[1:4]:
        assert segment.end.activation_bytes - segment.start.activation_bytes == 4 * BATCH * WIDTH
    plain = trace(residual(), precision="fp32", micro_batch=BATCH).segments
    assert peak(segments[6]) < peak(plain[6])


def test_gradients_are_in_the_compute_dtype():
    segments = trace(residual(), precision="bf16", micro_batch=BATCH).segments
    assert segments[6].end.grad_bytes == 2 * Residual.block_params


def test_frozen_parameters_have_no_gradient():
    frozen = residual()
    for param in frozen.module.blocks[1].parameters():
        param.requires_grad_(False)
    traced = trace(frozen, precision="fp32", micro_batch=BATCH)
    assert traced.trainable_params == traced.params - Residual.block_params
    assert [s.end.grad_bytes for s in traced.segments if s.phase == "backward" and s.unit == 2] == [0]


def test_tied_parameters_count_once_under_their_first_name():
    traced = trace(tied(), precision="fp32")
    assert traced.params == Tied.params
    assert [param.name for unit in traced.units for param in unit.params if param.numel == 64_000] == ["emb.weight"]


def test_half_a_tied_gradient_waits_as_a_gradient_not_as_an_activation():
    segments = trace(tied(), precision="fp32", micro_batch=1).segments
    backward = [segment for segment in segments if segment.phase == "backward"]
    assert backward[-1].unit == 0
    assert backward[-1].start.grad_bytes == 4 * 64_000, "the head's part, until the embedding's comes"
    assert max(peak(segment) for segment in backward[1:]) < 4 * 64_000


def test_a_model_of_blocks_alone_keeps_their_names():
    class Stack(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    traced = trace(subject(Stack, lambda batch, seq: (torch.zeros(batch, 4),)), precision="fp32")
    assert [unit.name for unit in traced.units] == ["", "0", "1"]
    assert traced.notes == ("Stack has no loss(output, batch): the mean of the output stands for it",)


def test_the_loss_is_part_of_the_trace():
    """GPT in bf16: logits [1, 63, vocab] are cast to fp32 and log_softmax makes as much again."""
    vocab, length = 4000, 64
    sets = {"layers": "2", "width": "32", "heads": "4", "vocab": str(vocab), "positions": "64"}
    gpt = load_subject(str(EXAMPLES / "gpt.py"), sets=sets, seq_len=length)
    segments = trace(gpt, precision="bf16").segments
    forward = [segment for segment in segments if segment.phase == "forward"][-1]
    assert forward.unit == 0
    logits, floats = 2 * length * vocab, 4 * (length - 1) * vocab
    assert peak(forward) - forward.start.activation_bytes >= logits + 2 * floats


def test_tensor_parallel_divides_what_lies_between_column_and_row_linears():
    """GPT block, bf16: qkv, attention's output and its fp32 log-sum-exp per head, up and gelu."""
    width, heads, length = 64, 4, 32
    sets = {"layers": "2", "width": str(width), "heads": str(heads), "vocab": "512", "positions": "32"}
    traced = trace(load_subject(str(EXAMPLES / "gpt.py"), sets=sets, seq_len=length), precision="bf16")
    block = traced.segments[1]
    assert block.end.split_bytes - block.start.split_bytes == 2 * length * width * (3 + 1 + 4 + 4) + 4 * heads * length
    assert traced.tp_limit == heads
    dims = {param.name: param.tp_dim for unit in traced.units for param in unit.params}
    assert dims["blocks.0.qkv.weight"] == 0 and dims["blocks.0.qkv.bias"] == 0
    assert dims["blocks.0.proj.weight"] == 1 and dims["blocks.0.proj.bias"] is None
    assert dims["blocks.0.norm1.weight"] is None
    assert dims["tokens.weight"] == 0


@pytest.mark.parametrize(
    ("vocab", "split", "limit"),
    [(480, True, 12), (500, True, 4), (502, False, 12)],  # of 12 heads: tp 4 divides 500, but not 502
)
def test_a_vocabulary_is_split_where_every_power_of_two_that_divides_the_heads_divides_it(vocab, split, limit):
    sets = {"layers": "2", "width": "48", "heads": "12", "vocab": str(vocab), "positions": "32"}
    traced = trace(load_subject(str(EXAMPLES / "gpt.py"), sets=sets, seq_len=8), precision="bf16")
    dims = {param.name: param.tp_dim for unit in traced.units for param in unit.params}
    assert (dims["tokens.weight"] == 0) is split
    assert traced.tp_limit == limit
    assert any(f"vocabulary of {vocab} is not divisible by 12" in note for note in traced.notes) is not split


def test_without_heads_a_model_is_not_split():
    traced = trace(residual(), precision="fp32")
    assert traced.tp_limit == 1
    assert {param.tp_dim for unit in traced.units for param in unit.params} == {None}
    assert "number of heads" in traced.no_tp_rule and "num_attention_heads" in traced.no_tp_rule


def test_a_split_that_no_rule_was_found_for_says_what_is_looked_for():
    model = residual()
    refused = _tp_2_refused(model)
    assert "no rule was found" in refused and "num_attention_heads" in refused and "split dims" not in refused
    said = [note for note in estimate(model, cluster="2xT4").notes if "no row with tp above 1" in note]
    assert len(said) == 1
    assert not any("tp above 1" in note for note in estimate(model, cluster="2xT4", flags=Flags(tp=(1,))).notes)
    assert not any("tp above 1" in note for note in estimate(model, cluster="1xT4").notes)


def test_linears_that_are_in_no_group_are_said_so():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.num_heads = 2
    said = splitting(nn.Sequential(layer), [("layers.0", layer)]).no_rule
    assert "the linears of block layers.0" in said and "MultiheadAttention" in said


def _tp_2_refused(model) -> str:
    with pytest.raises(Problem) as refused:
        estimate(model, cluster="2xT4", flags=Flags(tp=(2,)))
    return str(refused.value)


def test_without_a_sample_batch_only_the_state_is_known():
    traced = trace(subject(Residual), precision="bf16")
    assert traced.params == Residual.root_params + LAYERS * Residual.block_params
    assert (traced.segments, traced.forward_flops, traced.micro_batch) == ((), None, None)


def test_the_same_arguments_give_the_same_trace():
    model = residual()
    assert trace(model, precision="bf16") is trace(model, precision="bf16")
    assert trace(model, precision="bf16") is not trace(model, precision="fp32")


def test_the_model_is_as_it_was_afterwards():
    model = residual()
    before = {name: id(param) for name, param in model.module.named_parameters()}
    trace(model, precision="bf16", recompute="full")
    assert {name: id(param) for name, param in model.module.named_parameters()} == before
    assert all(param.is_meta and param.dtype is torch.float32 for param in model.module.parameters())
    assert not any("forward" in module.__dict__ for module in model.module.modules())


def test_a_trace_survives_json():
    traced = trace(residual(), precision="bf16", micro_batch=2)
    assert Trace.from_json(traced.to_json()) == traced
    assert Trace.from_json(traced.to_json()).segments[1].first_event == traced.segments[1].first_event > 0


def test_a_loss_without_parameters_is_a_problem():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    broken = subject(lambda: Detached(2, 2), lambda batch, seq: (torch.zeros(batch, 2),))
    with pytest.raises(Problem, match="depends on no trainable parameter"):
        trace(broken, precision="fp32")


class Norms(nn.Module):
    """RMS norm, dropout and attention with dropout, as a GPU runs them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):  # [2, 3, 64, 16]
        y = self.dropout(self.norm(x))
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.1).sum()


def test_fused_kernels_keep_what_they_keep_on_a_gpu():
    elements, rows = 2 * 3 * 64 * 16, 2 * 3 * 64
    norms = subject(Norms, lambda batch, seq: (torch.zeros(2, 3, 64, 16),))
    (forward, _) = trace(norms, precision="bf16").segments
    kept = (
        4 * rows + 2 * elements + elements + 4 * rows + 2 * elements
    )  # root, dropout and its mask, log-sum-exp, output
    assert forward.end.activation_bytes == 2 * elements + kept + 2


def real_segments(module, batch, loss, precision, recompute):
    """The same step on real cpu tensors."""
    module = module.to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    blocks = find_blocks(module)
    timeline = Timeline(module, [block for _, block in blocks], splitting(module, blocks).roles)
    apply_recompute(module, recompute)
    inputs = inputs_of(batch)
    with GpuKernels(), timeline:
        timeline.start(inputs.tensors)
        output = inputs.feed(module)
        value = loss(output, batch)
        del output
        timeline.run_backward(value)
    return timeline.segments()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fake_bytes_are_real_bytes(precision, recompute):
    sets = {"layers": "3", "width": "64", "heads": "4", "vocab": "1000", "positions": "64"}
    gpt = load_subject(str(EXAMPLES / "gpt.py"), sets=sets, seq_len=64)
    traced = trace(gpt, precision=precision, recompute=recompute, micro_batch=2)
    namespace = sys.modules["dsplan_model_gpt"]
    module = namespace.build_model(3, 64, 4, 1000, 64)
    batch = (torch.zeros(2, 64, dtype=torch.long),)
    assert real_segments(module, batch, namespace.loss, precision, recompute) == traced.segments


@given(st.lists(st.builds(Point, st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)), min_size=1))
def test_no_peak_is_lost_under_any_tp(points):
    kept = undominated(points)

    def highest(some, tp):
        return max((p.activation_bytes - p.split_bytes) * tp + p.split_bytes + p.grad_bytes * tp for p in some)

    for tp in (1, 2, 4, 1000):
        assert highest(kept, tp) == highest(points, tp)


def test_a_hugging_face_model_with_grouped_heads_is_traced_to_the_byte(tmp_path):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    traced = trace(load_subject(str(tmp_path)), precision="bf16", micro_batch=2)
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = {name: torch.zeros(2, 32, dtype=torch.long) for name in ("input_ids", "labels")}
    module = LlamaForCausalLM(LlamaConfig.from_dict(config)).train()
    assert real_segments(module, tokens, lambda output, batch: output.loss, "bf16", "none") == traced.segments
    assert traced.tp_limit == 2
    dims = {param.name.removeprefix("model.layers.0."): param.tp_dim for param in traced.units[1].params}
    assert dims == {
        "self_attn.q_proj.weight": 0,
        "self_attn.k_proj.weight": 0,
        "self_attn.v_proj.weight": 0,
        "self_attn.o_proj.weight": 1,
        "mlp.gate_proj.weight": 0,
        "mlp.up_proj.weight": 0,
        "mlp.down_proj.weight": 1,
        "input_layernorm.weight": None,
        "post_attention_layernorm.weight": None,
    }


def test_parameters_are_of_the_size_that_they_have(tmp_path):
    """Floats take the compute dtype, as `.bfloat16()` makes them; whole numbers and complex ones stay as they are."""
    (tmp_path / "model.py").write_text(
        """
import torch
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        for name in ("int8", "uint8", "int64", "bool", "float64", "bfloat16", "float16", "complex64"):
            data = torch.zeros(3, dtype=getattr(torch, name))
            self.register_parameter(f"p_{name}", nn.Parameter(data, requires_grad=False))
build_model = Net
def sample_batch(micro_batch):
    return (torch.zeros(micro_batch, 4),)
"""
    )
    loaded = load_subject(str(tmp_path / "model.py"))
    kept = {"p_int8": 1, "p_uint8": 1, "p_int64": 8, "p_bool": 1, "p_complex64": 8}
    for precision, size in {"bf16": 2, "fp16": 2, "fp32": 4}.items():
        found = {param.name: param.dtype_bytes for param in trace(loaded, precision=precision).units[0].params}
        assert found == kept | dict.fromkeys(("weight", "bias", "p_float64", "p_bfloat16", "p_float16"), size)


def test_events_tell_the_same_story_as_the_segments():
    """What is live by the events at each border of segments is what the segment says; each gradient is one parameter's."""
    traced = trace(
        load_subject("examples/gpt.py", sets={"layers": "2", "width": "32", "heads": "2", "vocab": "50"}),
        precision="bf16",
    )
    events, params = traced.events, traced.all_params
    for segment in traced.segments:
        live = sum(
            delta
            for storage, delta in zip(
                events.storage[: segment.first_event], events.delta_bytes[: segment.first_event], strict=True
            )
            if events.label[storage] < 0
        )
        assert live == segment.start.activation_bytes
    made = {}
    for storage, delta in zip(events.storage, events.delta_bytes, strict=True):
        if events.label[storage] >= 0 and delta > 0:
            made.setdefault(events.label[storage], []).append(delta)
    trained = {index for index, param in enumerate(params) if param.trainable}
    assert set(made) == trained
    for index, sizes in made.items():
        assert set(sizes) == {2 * params[index].numel}
    assert Trace.from_json(traced.to_json()) == traced
    assert Trace.from_json(traced.to_json()).segments[1].first_event == traced.segments[1].first_event > 0


class WideValues(nn.Module):
    """Attention whose values are wider than its keys, as in latent attention."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x):  # [2, 3, 64, 16]
        keys, values = self.keys(x), self.values(x)
        return nn.functional.scaled_dot_product_attention(keys, keys, values, is_causal=True).sum()


def test_attention_with_wide_values_writes_no_scores():
    """Kept in bf16: keys, values, output and an fp32 log-sum-exp per query and head; 64 x 64 scores are not."""
    rows = 2 * 3 * 64
    wide = subject(WideValues, lambda batch, seq: (torch.zeros(2, 3, 64, 16),))
    (forward, _) = trace(wide, precision="bf16").segments
    inputs, loss = 2 * rows * 16, 2
    assert forward.end.activation_bytes == inputs + 2 * rows * (16 + 32 + 32) + 4 * rows + loss


def test_compiled_blocks_are_traced_as_they_are_written():
    def make(wrap):
        def build():
            model = Residual()
            for index, block in enumerate(model.blocks):
                model.blocks[index] = wrap(block)
            return model

        return trace(subject(build, lambda batch, seq: (torch.zeros(batch, FED),)), precision="fp32").segments

    assert make(torch.compile) == make(lambda block: block)


def test_events_name_the_innermost_module_forth_and_back():
    traced = trace(residual(), precision="fp32", micro_batch=BATCH)
    events = traced.events
    for segment, following in itertools.pairwise(traced.segments):
        if segment.unit:
            ran = range(segment.first_event, following.first_event)
            made = {events.modules[events.module[index]] for index in ran if events.delta_bytes[index] > 0}
            block = traced.units[segment.unit].name
            assert made == {f"{block}.up", block, f"{block}.down"}
