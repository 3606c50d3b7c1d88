"""Stand-ins for packages that need a GPU: bytes and FLOPs against sums by hand, from what those packages save."""

import importlib.util
import sys

import pytest
import torch
from dsplan.planner.capturing.standing import stand_ins
from dsplan.planner.capturing.standing.functions import chunk_rows
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.tracer import trace

BATCH, LENGTH, HEADS, DIM = 2, 256, 4, 64
WIDTH = HEADS * DIM
TOKENS = BATCH * LENGTH


@pytest.fixture
def traced(tmp_path):
    """The trace, in bf16, of a model file that holds this body of a forward over x [2, 256, 256]."""

    def traced(imports, init, forward, inputs="torch.zeros(micro_batch, 256, 256)", micro_batch=BATCH):
        indent = "\n        "
        text = (
            f"import torch\nfrom torch import nn\nimport torch.nn.functional as F\n{imports}\n"
            f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__(){indent}{init}\n"
            f"    def forward(self, x):{indent}{forward.replace(chr(10), indent)}\n"
            f"def build_model():\n    return Net()\ndef sample_batch(micro_batch, seq_len=None):\n    return ({inputs},)\n"
            "def loss(output, batch):\n    return output.mean()\n"
        )
        (tmp_path / "model.py").write_text(text)
        return trace(load_subject(str(tmp_path / "model.py")), precision="bf16", micro_batch=micro_batch)

    return traced


def kept(traced):
    """Bytes of activations between forward and backward."""
    return next(segment for segment in reversed(traced.segments) if segment.phase == "forward").end.activation_bytes


def peak(traced):
    return max(point.activation_bytes for segment in traced.segments for point in segment.points)


IMPORT = "from flash_attn import *\nfrom flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func\n"
IMPORT += "from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func\n"
IMPORT += "import xformers.ops as xops\nfrom xformers.ops import fmha"
HEADED = "qkv = self.qkv(x).view(2, 256, 3, 4, 64)\n"
STARTS = "starts = torch.tensor([0, 256, 512], dtype=torch.int32, device=x.device)\n"


@pytest.mark.parametrize(
    ("call", "package"),
    [
        ("flash_attn_func(*qkv.unbind(2), causal=True)", "flash_attn 2"),
        ("flash_attn_qkvpacked_func(qkv, 0.0)", "flash_attn 2"),
        ("flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])", "flash_attn 2"),
        ("flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 256)", "flash_attn 2"),
        (
            "flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), cu_seqlens_q=starts, cu_seqlens_k=starts, "
            "max_seqlen_q=256, max_seqlen_k=256)",
            "flash_attn 2",
        ),
        ("xops.memory_efficient_attention(*qkv.unbind(2), attn_bias=xops.LowerTriangularMask(), p=0.1)", "xformers"),
        (
            "xops.memory_efficient_attention(*(part.reshape(1, 512, 4, 64) for part in qkv.unbind(2)), "
            "attn_bias=fmha.attn_bias.BlockDiagonalMask.from_seqlens([256, 256]).make_causal())",
            "xformers",
        ),
    ],
)
def test_attention_keeps_its_inputs_its_output_and_a_float_per_query(traced, call, package):
    """Kept: x, qkv, the output, sums in fp32, a seed of 16 bytes, the mean. FLOPs: two products of each query and key."""
    starts = STARTS if "starts" in call else ""
    found = traced(
        IMPORT, "self.qkv = nn.Linear(256, 768, bias=False)", f"{HEADED}{starts}return {call}.reshape(2, 256, 256)"
    )
    extra = 12 if starts else 0  # the starts themselves, while backward may need them
    copied = (
        3 * 2 * TOKENS * WIDTH if "reshape(1, 512" in call else 0
    )  # xformers' row of all sequences: contiguous copies
    packed = 2 * TOKENS * 3 * WIDTH if not copied else 0
    assert kept(found) - extra <= 2 * TOKENS * WIDTH * 2 + packed + copied + 4 * HEADS * TOKENS + 16 + 2 + extra
    assert kept(found) >= 2 * TOKENS * WIDTH * 2 + packed + copied + 4 * HEADS * TOKENS + 16 + 2
    assert found.forward_flops == 2 * TOKENS * WIDTH * 3 * WIDTH + 2 * BATCH * HEADS * LENGTH**2 * 2 * DIM
    assert any(note.startswith(f"{package} is not installed: ") for note in found.notes)
    assert "stood in for" in " ".join(found.notes)


def test_grouped_queries_expand_their_gradients(traced):
    """flash_api.cpp, mha_bwd: dq, dk, dv, an fp32 accumulator of dq, a float per query, and dk, dv of all heads."""
    found = traced(
        IMPORT,
        "self.q, self.kv = nn.Linear(256, 256, bias=False), nn.Linear(256, 2 * 2 * 64, bias=False)",
        "k, v = self.kv(x).view(2, 256, 2, 2, 64).unbind(2)\n"
        "return flash_attn_func(self.q(x).view(2, 256, 4, 64), k, v).sum()",
    )
    queries, keys = TOKENS * WIDTH, TOKENS * 2 * DIM
    in_kernel = 2 * queries + 2 * 2 * keys + 4 * queries + 4 * HEADS * TOKENS + 2 * 2 * queries
    before = 2 * (queries + queries + 2 * keys + queries) + 4 * HEADS * TOKENS + 16
    gradient_of_sum = 2 * queries  # expanded, then made contiguous for the kernel
    scalars = 4
    assert abs(peak(found) - (before + in_kernel)) <= gradient_of_sum + 3 * scalars


def test_heads_of_odd_size_are_padded(traced):
    """60 -> 64: copies of q, k, v and the output."""
    found = traced(
        IMPORT,
        "self.qkv = nn.Linear(256, 3 * 240, bias=False)",
        "return flash_attn_func(*self.qkv(x).view(2, 256, 3, 4, 60).unbind(2)).flatten(2)",
    )
    assert kept(found) == 2 * TOKENS * (256 + 4 * 256) + 4 * HEADS * TOKENS + 16 + 2
    assert found.forward_flops == 2 * TOKENS * 256 * 720 + 2 * BATCH * HEADS * LENGTH**2 * 2 * 60


def test_unpadding_counts_every_token(traced):
    found = traced(
        "from flash_attn.bert_padding import unpad_input, pad_input",
        "self.out = nn.Linear(256, 8, bias=False)",
        "tokens, indices, starts, longest, used = unpad_input(x, torch.ones(2, 256, device=x.device))\n"
        "assert tuple(tokens.shape) == (512, 256) and tuple(starts.shape) == (3,) and longest == 256\n"
        "return pad_input(self.out(tokens), indices, 2, 256)",
    )
    assert found.forward_flops == 2 * TOKENS * 256 * 8
    assert any("all tokens count as there, padding too" in note for note in found.notes)


LIGER = (
    "from liger_kernel.transformers import *\nfrom liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, "
)
LIGER += "LigerCrossEntropyLoss, LigerRMSNorm, LigerSwiGLUMLP, LigerLayerNorm\nfrom types import SimpleNamespace"


def test_the_fused_linear_loss_never_holds_all_logits(traced):
    """32,000 classes over 512 tokens of 256: 125 parts, so 8 rows of logits at a time (5 rounded up to a power of two)."""
    assert chunk_rows(512, 256, 32_000) == 8
    assert chunk_rows(4 * 4096, 4096, 32_000) == 2048  # the example in liger's own comment
    labels = "torch.zeros(512, dtype=torch.long, device=x.device)"
    fused = traced(
        LIGER,
        "self.head = nn.Linear(256, 32_000, bias=False); self.loss = LigerFusedLinearCrossEntropyLoss()",
        f"return self.loss(self.head.weight, x.flatten(0, 1), {labels})",
    )
    plain = traced(
        "",
        "self.head = nn.Linear(256, 32_000, bias=False)",
        f"return F.cross_entropy(self.head(x).flatten(0, 1), {labels})",
    )
    assert fused.forward_flops == plain.forward_flops == 2 * TOKENS * 256 * 32_000
    logits = 2 * TOKENS * 32_000
    weight = 2 * 256 * 32_000
    x = 2 * TOKENS * 256
    assert peak(plain) >= 2 * logits
    # x, its gradient, the weight's gradient, 8 rows of logits, losses, mask, labels
    assert x + x + weight + 2 * 8 * 32_000 <= peak(fused) + weight <= 2 * x + 2 * weight + 2 * 8 * 32_000 + 14 * TOKENS


@pytest.mark.parametrize(
    ("init", "forward", "saved"),
    [
        # beside x: what the kernel makes (the mean's backward needs nothing but a shape)
        ("self.layer = LigerRMSNorm(256)", "return self.layer(x)", 4 * TOKENS),
        ("self.layer = LigerLayerNorm(256, bias=True)", "return self.layer(x)", 2 * 4 * TOKENS),
        (
            "self.layer = LigerSwiGLUMLP(SimpleNamespace(hidden_size=256, intermediate_size=512))",
            "return self.layer(x)",
            2 * TOKENS * 3 * 512,
        ),
        (
            "self.head = nn.Linear(256, 1000, bias=False)",
            "return LigerCrossEntropyLoss()(self.head(x).flatten(0, 1), torch.zeros(512, dtype=torch.long))",
            2 * TOKENS * 1000,
        ),
    ],
)
def test_what_ligers_layers_keep(traced, init, forward, saved):
    found = traced(LIGER, init, forward)
    assert kept(found) - 2 * TOKENS * 256 - saved in (2, 4, 4 + 2)
    assert any(note.startswith("liger_kernel is not installed: ") for note in found.notes)


def test_ligers_cross_entropy_makes_no_second_logits(traced):
    labels = "torch.zeros(512, dtype=torch.long)"
    init = "self.head = nn.Linear(256, 32_000, bias=False)"
    found = traced(LIGER, init, f"return LigerCrossEntropyLoss()(self.head(x).flatten(0, 1), {labels})")
    assert peak(found) < 2 * TOKENS * 32_000 * 1.1


@pytest.fixture
def llama_as_it_was(monkeypatch):
    """A patch is for good, as Liger's own is."""
    from transformers.models.llama import modeling_llama

    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", modeling_llama.LlamaForCausalLM.forward)


def test_a_patch_of_llama_takes_its_loss_and_layers(tmp_path, llama_as_it_was):
    text = """
from transformers import LlamaConfig, LlamaForCausalLM
import torch
def build_model(patched="yes"):
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=8000)
    config.use_cache = False
    model = LlamaForCausalLM(config)
    if patched == "yes":
        from liger_kernel.transformers import apply_liger_kernel_to_llama
        apply_liger_kernel_to_llama(model=model)
    return model
def sample_batch(micro_batch, seq_len=128):
    tokens = torch.zeros(micro_batch, seq_len or 128, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}
"""
    (tmp_path / "model.py").write_text(text)
    plain = trace(load_subject(str(tmp_path / "model.py"), sets={"patched": "no"}), precision="bf16", micro_batch=4)
    patched = trace(load_subject(str(tmp_path / "model.py")), precision="bf16", micro_batch=4)
    assert patched.params == plain.params
    assert patched.forward_flops == plain.forward_flops
    assert peak(plain) > 3 * 512 * 8000 * 4 > 3 * peak(patched)
    assert any("LigerSwiGLUMLP" in note and "LigerRMSNorm" in note for note in patched.notes)


def test_quantised_linears_hold_packed_weights(traced):
    """4 bits: half a byte a weight; 8 bits: a byte. No input is kept by the first, the input by the second."""
    bits4 = traced(
        "import bitsandbytes as bnb",
        "self.a = bnb.nn.Linear4bit(256, 512, bias=False, quant_type='nf4'); self.b = nn.Linear(512, 8, bias=False)",
        "return self.b(self.a(x))",
    )
    first = bits4.all_params[0]
    assert (first.shape, first.stored_bytes, first.trainable) == ((512, 256), 256 * 512 // 2, False)
    # a scale of one byte per 64, one of four per 256 of these, two tables of 16 and 256 floats, an offset
    assert bits4.buffer_bytes == 2048 + 8 * 4 + 4 * (16 + 256) + 4
    assert kept(bits4) == 2 * TOKENS * (256 + 512) + 2  # x is the batch itself
    assert bits4.forward_flops == 2 * TOKENS * (256 * 512 + 512 * 8)
    bits8 = traced(
        "import bitsandbytes as bnb",
        "self.a = bnb.nn.Linear8bitLt(256, 512, bias=False, has_fp16_weights=False); self.b = nn.Linear(512, 8, bias=False)",
        "return self.b(self.a(x))",
    )
    assert bits8.all_params[0].stored_bytes == 256 * 512
    assert bits8.buffer_bytes == 4 * 512


def test_what_was_importable_is_as_it_was(tmp_path):
    before = dict(sys.modules)
    with stand_ins() as notes:
        import flash_attn
        import flash_attn.layers.rotary as rotary

        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.metadata.version("flash-attn") == flash_attn.__version__
        q = torch.zeros(1, 8, 2, 16)
        assert flash_attn.flash_attn_func(q, q, q).shape == q.shape
        assert rotary.apply_rotary_emb(q, q, q).shape == q.shape
        with pytest.raises(ImportError, match="dsplan's stand-in for flash_attn 2"):
            from flash_attn import flash_attn_of_tomorrow  # noqa: F401
    assert notes == ["flash_attn 2 is not installed: flash_attn_func, apply_rotary_emb stood in for"]
    assert importlib.util.find_spec("flash_attn") is None
    assert [name for name in sys.modules if name not in before and name.startswith("flash_attn")] == []
