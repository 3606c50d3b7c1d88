"""What is derived from other traces is what a trace of its own gives, event by event."""

import json

import pytest
import torch
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.deriving import between
from dsplan.planner.tracing.half_types import names_half_types
from dsplan.planner.tracing.recording import Recording
from dsplan.planner.tracing.tracer import trace

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 96,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 2,
    "vocab_size": 300,
    "n_positions": 96,
    "attn_implementation": "eager",
}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 300,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
NET = """
import torch
from torch import nn
import torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)
        self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3))
    def forward(self, image):
        x = F.max_pool2d(F.relu(self.norm(self.stem(image))), 3, 2, 1)
        for block in self.body:
            x = x + block(x)
        return self.head(x.mean((2, 3)))
build_model = Net
def sample_batch(micro_batch):
    return (torch.zeros(micro_batch, 3, 32, 32),)
def loss(output, batch):
    return output.float().logsumexp(-1).mean()
"""


def twice(tmp_path, model):
    """The same model, loaded twice."""
    path = tmp_path / ("config.json" if isinstance(model, dict) else "net.py")
    path.write_text(json.dumps(model) if isinstance(model, dict) else model)
    return load_subject(str(path)), load_subject(str(path))


def traced_again(*_):
    pytest.fail("derived sizes are not traced")


@pytest.mark.parametrize(
    ("model", "varied", "traced", "wanted"),
    [
        (LLAMA, "micro_batch", (1, 2, 8, 3), 5),  # a batch of one runs otherwise
        (LLAMA, "seq_len", (16, 88, 40), 51),
        (GPT2, "seq_len", (16, 88, 40, 63), 51),  # scores are square in it
        (T5, "micro_batch", (2, 8, 3), 5),
        (NET, "micro_batch", (2, 8, 3), 5),
    ],
    ids=["llama-rows", "llama-length", "gpt2-length", "t5-rows", "net-rows"],
)
def test_sizes_between_others_are_derived_to_the_event(model, varied, traced, wanted, tmp_path, monkeypatch):
    subject, other = twice(tmp_path, model)
    fixed = {"micro_batch": 2, "seq_len": None if model is NET else 32}
    for value in traced:
        trace(subject, precision="bf16", **{**fixed, varied: value}, count_flops=False)
    asked = {**fixed, varied: wanted}
    with monkeypatch.context() as patched:
        patched.setattr("dsplan.planner.tracing.tracer._record", traced_again)
        derived = trace(subject, precision="bf16", **asked)
    assert derived == trace(other, precision="bf16", **asked)
    assert derived.segments


@pytest.mark.parametrize(("config", "told"), [(LLAMA, False), (T5, True), (MIXTRAL, False)])
def test_one_trace_serves_both_16_bit_types_unless_the_model_tells_them_apart(tmp_path, config, told):
    """T5 clamps its hidden states in fp16 alone."""
    subject, other = twice(tmp_path, config)
    assert names_half_types(subject.module) is told
    shared = trace(subject, precision="bf16"), trace(subject, precision="fp16")
    assert (shared[0].events is shared[1].events) is not told
    assert shared[1] == trace(other, precision="fp16")


def recording(*deltas):
    return Recording(
        events=[(index, delta, 0) for index, delta in enumerate(deltas)],
        labels=["other"] * len(deltas),
        cuts=[(0, 0, "forward"), (len(deltas), -1, "backward")],
        uses=[set(), set()],
        flops=[],
        modules=[""],
        owners=[],
    )


def test_what_does_not_lie_on_a_polynomial_of_the_second_degree_is_traced():
    line = {size: recording(10 * size) for size in (1, 4, 2)}
    assert [delta for _, delta, _ in between(line, 3).events] == [30]
    assert between(line, 5) is None  # beyond what was traced
    window = {size: recording(10 * min(size, 5)) for size in (1, 8, 4, 6)}
    assert between(window, 3) is None
    square = {size: recording(3 * size * size) for size in (1, 8, 4, 6)}
    assert [delta for _, delta, _ in between(square, 5).events] == [75]
    assert between({size: recording(8 * -(-size // 8)) for size in (1, 16, 9)}, 12) is None  # rounded up


def test_positions_that_the_model_counts_itself_need_no_mask(tmp_path):
    """With values, transformers sees consecutive positions and leaves causality to the kernel."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    traced = trace(load_subject(str(tmp_path)), precision="fp32", seq_len=93)
    assert not {93 * 93, 4 * 93 * 93} & set(traced.events.delta_bytes)
    assert torch.long.itemsize * 93 in traced.events.delta_bytes
