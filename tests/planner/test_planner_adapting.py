"""Adapters, quantised and frozen weights, losses, attention and packing: what they hold, by hand and by PEFT and bitsandbytes."""

import json

import pytest
import torch
from dsplan.planner.models.adapting import Lora, Loss, adapting_of, parse_lora, parse_loss
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.problem import Problem

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 1000,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "loss_type": "ForCausalLM",
}
LINEARS = [(64, 64), (32, 64), (32, 64), (64, 64), (176, 64), (176, 64), (64, 176)]
"""(out, in) of one Llama layer: q, k, v, o, gate, up, down."""

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.tok, self.pos = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 50)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        h = self.tok(x) + self.pos(places[None])
        return self.second(self.first(h))

def build_model():
    return Net()

def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, seq_len or 16, dtype=torch.long),)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return name

    return write


def traced(path, micro_batch=2, precision="bf16", **options):
    return trace(load_subject(path, adapting=adapting_of(**options)), precision=precision, micro_batch=micro_batch)


def activation_peak(made):
    return max(point.activation_bytes for segment in made.segments for point in segment.points)


def saved(made):
    """Bytes that live on when forward is over."""
    return [segment for segment in made.segments if segment.phase == "forward"][-1].end.activation_bytes


def refusal(action):
    with pytest.raises(Problem) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What the options say


def test_lora_is_read():
    assert parse_lora("r=16,targets=all-linear") == Lora(r=16)
    assert parse_lora("r=4,alpha=8,targets=q_proj,v_proj,dropout=0.1,modules_to_save=lm_head") == Lora(
        r=4, alpha=8, dropout=0.1, targets=("q_proj", "v_proj"), modules_to_save=("lm_head",)
    )
    assert parse_lora("lora_r=4,target_modules=c_attn") == Lora(r=4, targets=("c_attn",)), "PEFT's own names"
    assert (parse_loss("chunked:8"), parse_loss("fused")) == (Loss(kind="chunked", chunks=8), Loss(kind="fused"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lora": "rnk=4"}, "--lora rnk=4: rnk is not known"),
        ({"lora": "r=0"}, "r is 0, but must be a whole number of at least 1"),
        ({"lora": "r=4,dropout=2"}, "dropout is 2, but must be at least 0 and below 1"),
        ({"lora": "16"}, "16 cannot be read; write --lora r=16"),
        ({"lora": "r=4,r=8"}, "r is given twice"),
        ({"lora": "targets="}, "targets is empty"),
        ({"loss": "chunked"}, "needs a whole number of chunks: --loss chunked:8"),
        ({"loss": "liger"}, "choose from plain, fused, chunked:N"),
        ({"quantize": "fp4"}, "choose from nf4, int8"),
        ({"packed": True, "attention": "eager"}, "leave it out, or choose --attention flash"),
        ({"freeze": [""]}, "--freeze is empty"),
    ],
)
def test_options_that_cannot_be_read(options, expected):
    assert expected in refusal(lambda: adapting_of(**options))


# Adapters


def test_lora_beside_all_linears(write):
    made = traced(write("config.json", LLAMA), lora="r=8,targets=all-linear")
    assert made.trainable_params == 2 * sum(8 * (wide_in + wide_out) for wide_out, wide_in in LINEARS)
    assert all(param.dtype_bytes == 2 for param in made.all_params), "the engine casts adapters as it does all else"
    assert any("LoRA r 8 beside 14 modules" in note for note in made.notes)


@pytest.mark.parametrize(
    ("config", "lora", "params", "trainable", "peak"),
    [  # peft 0.21.2 on the same config, traced on its own model: get_peft_model(model, LoraConfig(...))
        (GPT2, "r=4,targets=all-linear", 180480, 8192, 5005320),
        (GPT2, "r=4,targets=c_attn", 174336, 2048, 4665352),
    ],
)
def test_lora_is_that_of_peft(write, config, lora, params, trainable, peak):
    made = traced(write("config.json", config), lora=lora)
    assert (made.params, made.trainable_params, activation_peak(made)) == (params, trainable, peak)


def test_lora_modules_to_save_are_copied(write):
    made = traced(write("config.json", LLAMA), lora="r=4,targets=q_proj,modules_to_save=lm_head")
    assert made.trainable_params == 2 * 4 * (64 + 64) + 64 * 1000
    assert made.params == traced("config.json").params + made.trainable_params


def test_frozen_weights_save_no_inputs(write):
    path = write("config.json", LLAMA)
    assert saved(traced(path, lora="r=4,targets=q_proj,v_proj")) < saved(traced(path))


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("r=4,targets=q_prj", "--lora targets=q_prj names no module; did you mean q_proj?"),
        ("r=4,targets=self_attn", "names model.layers.0.self_attn, a LlamaAttention, but adapters are for linear"),
        (
            "r=4,targets=q_proj,modules_to_save=head",
            "--lora modules_to_save=head names no module; did you mean lm_head?",
        ),
    ],
)
def test_targets_that_the_model_lacks(write, lora, expected):
    path = write("config.json", LLAMA)
    assert expected in refusal(lambda: load_subject(path, adapting=adapting_of(lora=lora)))


def test_lora_and_freeze_for_a_model_file(write):
    path = write("model.py", MODEL)
    assert traced(path, lora="r=2,targets=first").trainable_params == 2 * (8 + 8)
    assert traced(path, freeze=["tok", "pos*", "second.weight"]).trainable_params == 8 * 8 + 8 + 50


# Quantised weights


def test_nf4_takes_half_a_byte_and_its_scales(write):
    made = traced(write("config.json", LLAMA), lora="r=8", quantize="nf4")
    plain = traced("config.json", lora="r=8")
    stored = [param.stored_bytes for param in made.all_params if param.stored_bytes is not None]
    assert stored == [wide_out * wide_in // 2 for _ in range(2) for wide_out, wide_in in LINEARS]
    assert (made.params, made.trainable_params) == (plain.params, plain.trainable_params)
    # of 64 elements one byte; of 256 of those an fp32; an offset, and two tables of 16 and 256 fp32
    scales = sum(out * wide // 64 + 4 * (1 + 1 + 16 + 256) for out, wide in LINEARS)
    assert made.buffer_bytes == plain.buffer_bytes + 2 * scales


def test_int8_takes_a_byte_and_a_scale_a_row(write):
    made = traced(write("config.json", LLAMA), lora="r=8", quantize="int8")
    plain = traced("config.json", lora="r=8")
    assert [p.stored_bytes for p in made.all_params if p.stored_bytes] == [out * wide for out, wide in LINEARS] * 2
    assert made.buffer_bytes == plain.buffer_bytes + 2 * sum(4 * out for out, _ in LINEARS)
    assert made.forward_flops == plain.forward_flops


def test_what_cannot_be_quantised(write):
    path = write("config.json", GPT2)
    text = refusal(lambda: load_subject(path, adapting=adapting_of(quantize="nf4")))
    assert text.endswith("finds no linear layer to quantise: Conv1D (as in GPT-2) is not replaced; leave it out")


# Frozen weights


def test_frozen_modules_and_parameters(write):
    made = traced(write("config.json", LLAMA), freeze=["model.layers.0", "*.norm.weight"])
    frozen = {param.name for param in made.all_params if not param.trainable}
    assert {name for name in frozen if not name.startswith("model.layers.0.")} == {"model.norm.weight"}
    assert made.params - made.trainable_params == sum(out * wide for out, wide in LINEARS) + 3 * 64


def test_globs_that_match_nothing_or_all(write):
    path = write("config.json", LLAMA)
    text = refusal(lambda: load_subject(path, adapting=adapting_of(freeze=["model.layer.0"])))
    assert "--freeze model.layer.0 matches no parameter and no module; did you mean model.layers.0?" in text
    text = refusal(lambda: load_subject(path, adapting=adapting_of(freeze=["*"])))
    assert text.endswith("--freeze * freezes every parameter: nothing to train")


# The loss


def test_a_fused_loss_keeps_no_logits(write):
    path = write("config.json", LLAMA)
    plain, fused = traced(path), traced(path, loss="fused")
    logits = 2 * 128 * 1000
    assert activation_peak(plain) - activation_peak(fused) > 2 * 4 * logits, "log_softmax and its gradient, in fp32"
    assert fused.forward_flops == plain.forward_flops
    assert fused.loss_inside


def test_more_chunks_hold_less(write):
    path = write("config.json", LLAMA)
    peaks = [activation_peak(traced(path, loss=loss)) for loss in ("chunked:1", "chunked:4", "chunked:8")]
    assert peaks == sorted(peaks, reverse=True)
    # chunk by chunk in backward: its logits in bf16 and fp32, their logarithms, and gradients of both kinds
    assert peaks[1] - peaks[2] >= (4 + 4) * (64 - 32) * 1000


def test_losses_are_of_models_that_have_them(write):
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0}
    path = write("config.json", config)
    text = refusal(lambda: load_subject(path, adapting=adapting_of(loss="fused")))
    assert "--loss fused is for causal language models, but LlamaForSequenceClassification is none" in text


# Attention and packing


def test_eager_attention_keeps_its_scores(write):
    path = write("config.json", LLAMA)
    eager, flash = saved(traced(path, attention="eager")), saved(traced(path, attention="flash"))
    scores = 2 * 2 * 4 * 128 * 128  # layers x batch x heads x square
    assert eager - flash > 2 * 2 * scores, "softmax's and its copy, in bf16"


def test_flash_attention_saves_its_inputs_output_and_a_logarithm(write):
    from dsplan.planner.models.adapting_attention import _FlashAttention

    query = torch.empty(2, 128, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(2, 128, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.nbytes) or tensor, lambda tensor: tensor
    ):
        made = _FlashAttention.apply(query, key, key, 0)
    one = 2 * 128 * 4 * 16 * 2
    assert kept == [one, one // 2, one // 2, one, 2 * 128 * 4 * 4, 16]
    made.sum().backward()
    assert (query.grad.shape, key.grad.shape) == (query.shape, key.shape)


def test_packed_sequences_attend_to_themselves(write):
    path = write("config.json", LLAMA)
    packed, rows = traced(path, packed=True), traced(path, attention="flash")
    assert packed.forward_flops == rows.forward_flops, "each sequence by itself, not one square of both"
    assert (packed.seq_len, packed.micro_batch) == (128, 2)
    # positions for every token (int64), a cosine and a sine for each where rows share them, and the ends of the sequences
    more = 256 * 8 + 2 * 128 * 16 * 2 + 2 * 3 * 4
    assert saved(packed) - saved(rows) == pytest.approx(more, abs=16)
    assert not [note for note in packed.notes if "rows along dim 0" in note]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"attention": "flash"}, "--attention flash is not what T5ForConditionalGeneration can take"),
        ({"packed": True}, "choose from sdpa, eager"),
    ],
)
def test_attention_that_a_class_lacks(write, options, expected):
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "num_layers": 1}
    path = write("config.json", config)
    assert expected in refusal(lambda: load_subject(path, adapting=adapting_of(**options)))


@pytest.mark.parametrize("option", ["quantize", "loss", "attention", "packed"])
def test_options_that_a_model_file_decides_itself(write, option):
    value = {"quantize": "nf4", "loss": "fused", "attention": "flash", "packed": True}[option]
    path = write("model.py", MODEL)
    text = refusal(lambda: load_subject(path, adapting=adapting_of(**{option: value})))
    assert "is for the config of a Hugging Face model, but model.py is a model file" in text


def test_a_script_decides_itself(write):
    path = write("train.py", "import torch\n")
    text = refusal(lambda: load_subject(path, adapting=adapting_of(lora="r=4")))
    assert text.startswith("--lora changes a model before it is traced, but train.py is a script")
