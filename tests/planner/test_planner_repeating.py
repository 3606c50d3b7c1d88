"""A trace of few repeated blocks, written out for all, is the trace of all of them: segments and events."""

import json

import pytest
import torch
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing import tracer
from dsplan.planner.tracing.repeating import KEPT, Run, find_runs, left_out
from dsplan.planner.tracing.tracer import trace
from dsplan.runtime.sharding.blocks import find_blocks
from models import subject
from torch import nn

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 32}
CONFIGS = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 8,
        **HEADS,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 7,
        "num_decoder_layers": 7,
        "num_heads": 4,
        "vocab_size": 100,
        "decoder_start_token_id": 0,
    },
    "dense and experts by turns": {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        **HEADS,
    },
}


def hugging_face(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    return load_subject(str(tmp_path), seq_len=32)


def gpt(layers=8):
    sets = {"layers": str(layers), "width": "32", "heads": "4", "vocab": "100", "positions": "16"}
    return load_subject("examples/gpt.py", sets=sets, seq_len=16)


def whole(make, **asked):
    """The trace with every block run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracer, "find_runs", lambda _: [])
        return trace(make(), **asked)


def is_whole(make, **asked):
    few, all_of_them = trace(make(), **asked), whole(make, **asked)
    assert few.segments == all_of_them.segments
    assert few.events == all_of_them.events
    assert few == all_of_them
    assert [s.first_event for s in few.segments] == [s.first_event for s in all_of_them.segments]


def runs_of(loaded):
    return find_runs(find_blocks(loaded.module))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpt(recompute):
    assert runs_of(gpt()) == [Run(0, 1, 8)]
    is_whole(gpt, precision="bf16", recompute=recompute)


@pytest.mark.parametrize(
    "name, runs, recompute",
    [
        ("llama", [Run(0, 1, 8)], "none"),
        ("llama", [Run(0, 1, 8)], "full"),
        ("t5", [Run(1, 1, 6), Run(8, 1, 6)], "none"),
        ("t5", [Run(1, 1, 6), Run(8, 1, 6)], "full"),
        ("dense and experts by turns", [Run(0, 2, 6)], "none"),
    ],
)
def test_hugging_face_models(tmp_path, name, runs, recompute):
    assert runs_of(hugging_face(tmp_path, name)) == runs
    is_whole(lambda: hugging_face(tmp_path, name), precision="bf16", recompute=recompute)


def test_few_blocks_run(monkeypatch):
    """What the tests above compare is not the same thing twice."""
    ran = []
    loaded = gpt(9)
    block = type(loaded.module.blocks[0])
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda self, x: ran.append(self) or forward(self, x))
    trace(loaded, precision="bf16")
    assert len(set(ran)) == KEPT
    assert len(loaded.module.blocks) == 9, "all are back"


class Stack(nn.Module):
    """Blocks that a loop over their number runs, or whose outputs are all kept to the end."""

    def __init__(self, layers=8, *, counted=False, kept=False, widths=None):
        super().__init__()
        widths = widths or [16] * layers
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for width in widths
        )
        self.layers, self.counted, self.kept = layers, counted, kept

    def forward(self, x):
        outputs = []
        for index in range(self.layers) if self.counted else range(len(self.blocks)):
            x = (self.blocks[index] if self.counted else list(self.blocks)[index])(x)
            outputs.append(x)
        return sum(outputs).sum() if self.kept else x.sum()


def stack(**options):
    return subject(lambda: Stack(**options), lambda batch, seq: (torch.zeros(batch, 8),))


@pytest.mark.parametrize("options", [{"counted": True}, {"kept": True}], ids=str)
def test_a_model_that_cannot_do_without_its_blocks_is_traced_whole(options):
    assert len(runs_of(stack(**options))) == 1
    is_whole(lambda: stack(**options), precision="fp32", micro_batch=4)


def test_blocks_of_other_sizes_are_no_run():
    assert runs_of(stack(widths=[16, 16, 24, 16, 16, 24, 16, 16])) == []
    assert runs_of(stack(layers=7, widths=[24, *[16] * 6])) == [Run(1, 1, 6)]


def test_frozen_blocks_and_dropout_tell_blocks_apart():
    loaded = stack(layers=8)
    for param in loaded.module.blocks[4].parameters():
        param.requires_grad_(False)
    assert runs_of(loaded) == []
    loaded = stack(layers=8)
    for index, block in enumerate(loaded.module.blocks):
        block.append(nn.Dropout(0.1 * index))
    assert runs_of(loaded) == [Run(1, 1, 7)], "a rate of zero keeps no mask"


def test_blocks_that_share_a_parameter_are_no_run():
    loaded = stack(layers=8)
    for block in loaded.module.blocks:
        block[0].bias = loaded.module.blocks[0][0].bias
    assert runs_of(loaded) == []


def test_frozen_models_with_trained_heads_have_no_backward_in_their_blocks():
    def make():
        loaded = stack(layers=8)
        for param in loaded.module.parameters():
            param.requires_grad_(False)
        loaded.module.head = nn.Linear(1, 1, device="meta")
        loaded.loss = lambda output, batch: loaded.module.head(output.reshape(1)).sum()
        return loaded

    assert {s.unit for s in trace(make(), precision="fp32").segments if s.phase == "backward"} == {0}
    is_whole(make, precision="fp32")


def test_leaving_out_is_undone_where_the_model_raises():
    loaded = stack(layers=8)
    blocks = find_blocks(loaded.module)
    with pytest.raises(ZeroDivisionError), left_out(loaded.module, blocks, find_runs(blocks)):
        assert [name for name, _ in loaded.module.blocks.named_children()] == ["0", "1", "2", "6", "7"]
        raise ZeroDivisionError
    assert find_blocks(loaded.module) == blocks
