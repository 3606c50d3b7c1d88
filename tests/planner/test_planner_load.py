"""MODEL told apart, loaded, and refused in one clear line."""

import json
import re

import pytest
from dsplan.planner.models.load import load_subject, parse_set, told_apart
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.problem import Problem

MODEL = """
import torch
from torch import nn

def build_model(width=4, depth=1, name="net"):
    print("building", name)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

class Wide(nn.Linear):
    def __init__(self, width=8):
        super().__init__(width, width)

def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, 4),)

number = 3
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return name

    return write


def refusal(action):
    with pytest.raises(Problem) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text, caught.value.user_traceback


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_told_apart_without_running(write, tmp_path):
    bomb = "raise SystemExit('ran')\n"
    write("config.json", LLAMA)
    assert told_apart(write("model.py", bomb + "def build_model(): ...\n"))[0] == "file"
    assert told_apart(write("named.py", bomb + "build_model = make\n"))[0] == "file"
    assert told_apart(write("train.py", bomb + "from model import build_model\n"))[0] == "script"
    assert told_apart("train.py:NAME")[0] == "file"
    assert told_apart("config.json")[0] == "hf"
    assert told_apart(str(tmp_path))[0] == "hf"


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("2.5", 2.5), ("True", True), ("(1, 2)", (1, 2)), ("gelu", "gelu"), ("'3'", "3")]
)
def test_set_values_are_literals_else_text(text, value):
    assert parse_set(text) == value


def test_build_model_with_keywords(write, capsys):
    subject = load_subject(write("model.py", MODEL), sets={"width": "6", "depth": "2", "name": "big"})
    assert [tuple(param.shape) for param in subject.module.parameters()] == [(6, 6), (6,), (6, 6), (6,)]
    assert all(param.is_meta for param in subject.module.parameters())
    out, err = capsys.readouterr()
    assert (out, err) == ("", "building big\n"), "stdout is the report's"


def test_another_name_of_the_file(write):
    subject = load_subject(write("model.py", MODEL) + ":Wide", sets={"width": "5"})
    assert tuple(subject.module.weight.shape) == (5, 5)
    assert subject.source == "model.py:Wide"


def test_a_model_that_reads_values_while_it_is_built(write):
    rates = "[rate.item() for rate in torch.linspace(0, 0.2, 3)]"
    text = (
        MODEL.replace("range(depth)", rates)
        .replace("nn.Linear(", "nn.Linear(bias=True, *")
        .replace("*width, width", "*(width, width)")
    )
    subject = load_subject(write("model.py", text))
    assert len(subject.module) == 3
    assert all(param.is_meta for param in subject.module.parameters())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def build_model(:\n    pass\n", r"model\.py:1: not valid Python: .*; correct it and try again"),
        (
            "x = 1\nimport missing_thing\ndef build_model(): ...\n",
            r"model\.py:2: imports missing_thing, which is not installed here; install it",
        ),
        ("def build_model():\n    return 1 / 0\n", r"model\.py:2: build_model\(\) raised ZeroDivisionError"),
        ("def build_model():\n    return [1]\n", r"build_model\(\) returned a list, but must return a torch.nn.Module"),
        ("def build_model():\n    ...\n", r"build_model\(\) returned None, but must return a torch.nn.Module"),
        ("build_model = 3\n", r"build_model is an int, but must be a function or class"),
        (
            "def build_model(width): ...\n",
            r"model\.py:1: build_model needs width; pass --set width=\.\.\.$",
        ),
    ],
)
def test_a_model_file_that_cannot_be_used(write, text, expected):
    message, _ = refusal(lambda: load_subject(write("model.py", text)))
    assert re.search(expected, message)


def test_the_users_own_traceback_comes_along(write):
    _, text = refusal(lambda: load_subject(write("model.py", "def build_model():\n    return 1 / 0\n")))
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'model.py", line 2, in build_model' in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_wrong_keyword_is_named(write):
    message, _ = refusal(lambda: load_subject(write("model.py", MODEL), sets={"widht": "6"}))
    assert message == "model.py:5: build_model takes no widht; it takes width, depth, name"


def test_a_name_that_the_file_lacks(write):
    message, _ = refusal(lambda: load_subject(write("model.py", MODEL) + ":Nothing"))
    assert message == "model.py has no Nothing; name a function or class in it that makes the model"


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        ("torch.zeros(micro_batch, 4)", "a Tensor"),
        ("None", "None"),
        ("(1, 2)", "a tuple"),
        ("[torch.zeros(1, 4)]", "a list"),
    ],
)
def test_a_sample_batch_of_the_wrong_shape(write, returned, seen):
    subject = load_subject(write("model.py", MODEL.replace("(torch.zeros(micro_batch, 4),)", returned)))
    message, _ = refusal(lambda: trace(subject, precision="bf16"))
    assert f"sample_batch returned {seen}, but must return a tuple" in message and "return (tokens,)" in message


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "def loss(output, batch):\n    return output",
            r"loss\(output, batch\) returned a tensor of shape \[1, 4\], but must return a scalar",
        ),
        (
            "def loss(output, batch):\n    return output.nothing",
            r"model\.py:\d+: loss\(output, batch\) raised AttributeError",
        ),
        (
            "build_model = lambda: type('M', (nn.Linear,), {'forward': lambda self, x: 'text'})(4, 4)",
            r"output is a str, but must hold a float tensor",
        ),
        (
            "def sample_batch(micro_batch):\n    return (torch.zeros(micro_batch, 5),)",
            r"the model raised RuntimeError",
        ),
        (
            "def sample_batch(micro_batch):\n    return 1 / 0",
            r"model\.py:\d+: sample_batch\(1\) raised ZeroDivisionError",
        ),
    ],
)
def test_a_model_that_does_not_run(write, extra, expected):
    subject = load_subject(write("model.py", MODEL + extra))
    message, _ = refusal(lambda: trace(subject, precision="bf16"))
    assert re.search(expected, message)


def test_without_sample_batch_a_note_says_what_to_add(write):
    subject = load_subject(write("model.py", MODEL.replace("def sample_batch", "def other")))
    assert "add one that returns the model's inputs" in trace(subject, precision="bf16").notes[0]


def test_a_length_that_sample_batch_does_not_take(write):
    subject = load_subject(write("model.py", MODEL.replace(", seq_len=None", "")), seq_len=7)
    message, _ = refusal(lambda: trace(subject, precision="bf16"))
    assert "takes no seq_len" in message


def test_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "missing.py: no such file" in refusal(lambda: load_subject("missing.py"))[0]
    assert (
        "missing/thing: no such file or folder, and no model of that name"
        in refusal(lambda: load_subject("missing/thing"))[0]
    )
    (tmp_path / "folder").mkdir()
    assert "the folder holds no config.json" in refusal(lambda: load_subject("folder"))[0]


def test_settings_need_a_model_file(write):
    assert (
        "--set width=... goes to build_model()"
        in refusal(lambda: load_subject(write("config.json", LLAMA), sets={"width": "1"}))[0]
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, r"transformers [\d.]+ has no NoSuchForCausalLM; write a model.py"),
        (
            {"architectures": "LlamaForCausalLM"},
            r"architectures is 'LlamaForCausalLM', but must be a list that names a class",
        ),
        ({"architectures": None}, r"names no class; add \"architectures\""),
        ({"model_type": "gpt2"}, r'model_type is "gpt2", but LlamaForCausalLM takes "llama"'),
        ({"hidden_size": "big"}, r"config\.json: "),
    ],
)
def test_a_config_that_names_no_model(write, change, expected):
    message, _ = refusal(lambda: load_subject(write("config.json", {**LLAMA, **change})))
    assert re.search(expected, message) and "config.json" in message


def test_a_config_of_something_else(write):
    assert "holds neither" in refusal(lambda: load_subject(write("ds.json", {"fp16": {"enabled": True}})))[0]
    assert re.search(r"bad\.json:1:\d+: not valid JSON", refusal(lambda: load_subject(write("bad.json", "{]")))[0])


def test_the_length_of_a_config_says_where_it_comes_from(write):
    subject = load_subject(write("config.json", LLAMA))
    assert subject.notes == ("seq_len 40 (max_position_embeddings of the config); --seq-len changes it",)
    assert load_subject("config.json", seq_len=9).notes == ()
    assert trace(load_subject("config.json", seq_len=9), precision="bf16").seq_len == 9


NEEDY = """
from torch import nn
class Net(nn.Linear):
    size = 3

    def __init__(self, width, depth, *, bias=True):
        super().__init__(width, depth, bias)
def only(x, /):
    return Net(x, x)
ready = nn.Linear(2, 2)
anything = lambda **options: nn.Linear(2, 2)
"""


@pytest.mark.parametrize(
    ("name", "sets", "expected"),
    [
        ("Net", {}, "model.py:6: Net needs width and depth; pass --set width=... --set depth=..."),
        ("Net", {"width": "2"}, "model.py:6: Net needs depth; pass --set depth=..."),
        ("Net", {"foo": "2"}, "model.py:6: Net takes no foo; it takes width, depth, bias"),
        ("only", {}, "model.py:8: only takes x by position alone, which --set cannot give; drop the / there"),
        ("ready", {"width": "2"}, "model.py: ready is a model already, so --set width=... has nowhere to go"),
    ],
)
def test_what_a_maker_needs_and_takes(write, name, sets, expected):
    message, text = refusal(lambda: load_subject(write("model.py", NEEDY) + ":" + name, sets=sets))
    assert (message, text) == (expected, None)


def test_a_maker_that_takes_anything(write):
    assert load_subject(write("model.py", NEEDY) + ":anything", sets={"foo": "1"}).module.in_features == 2


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "def sample_batch():\n    return (torch.zeros(1, 4),)",
            r"model\.py:17: sample_batch takes no arguments, but is called with micro_batch; write def sample_batch\(micro",
        ),
        (
            "def sample_batch(micro_batch, width):\n    return (torch.zeros(1, 4),)",
            r"model\.py:17: sample_batch takes \(micro_batch, width\), but is called with micro_batch; write def",
        ),
        ("sample_batch = 3", r"model\.py: sample_batch is an int, but must be a function: def sample_batch"),
        (
            "def loss(output):\n    return output.mean()",
            r"model\.py:17: loss takes \(output\), but is called with the model's output and the batch; write def loss",
        ),
        ("loss = 3", r"model\.py: loss is an int, but must be a function loss\(output, batch\)"),
        (
            "def sample_batch(micro_batch):\n    return {1: torch.zeros(1, 4)}",
            r"model\.py:17: sample_batch returned a dict with the key 1, but its keys must be the names",
        ),
        (
            "def sample_batch(micro_batch):\n    return {'x': torch.zeros(1, 4)}",
            r"model\.py: sample_batch gives x, but Sequential.forward takes \(input\): missing a required argument",
        ),
        (
            "def sample_batch(micro_batch):\n    return torch.zeros(1, 4), torch.zeros(1, 4)",
            r"model\.py: sample_batch gives 2 inputs by position, but Sequential.forward takes \(input\): too many",
        ),
    ],
)
def test_functions_that_cannot_be_called(write, extra, expected):
    message, text = refusal(lambda: trace(load_subject(write("model.py", MODEL + extra)), precision="bf16"))
    assert re.match(expected, message)
    assert text is None


def test_lazy_parameters_are_named(write):
    text = MODEL.replace("return nn.Sequential(", "return nn.Sequential(nn.LazyLinear(3), ")
    message, text = refusal(lambda: load_subject(write("model.py", text)))
    assert message.startswith(
        "model.py: build_model() returned a model with lazy parameters, whose sizes are not known: 0.weight, 0.bias; run a"
    )
    assert "batch through it in build_model()" in message


def test_lazy_parameters_that_met_a_batch(write):
    text = """
import torch
from torch import nn
def build_model():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    model(torch.zeros(1, 4))
    return model
def sample_batch(micro_batch):
    return (torch.zeros(micro_batch, 4),)
"""
    traced = trace(load_subject(write("model.py", text)), precision="bf16")
    assert (traced.params, traced.forward_flops) == (15 + 8, 2 * (12 + 6))


def test_a_model_without_parameters(write):
    message, _ = refusal(lambda: load_subject(write("model.py", "import torch\nbuild_model = torch.nn.ReLU\n")))
    assert message == "model.py: build_model() returned a ReLU without parameters: nothing to train"


@pytest.mark.parametrize("model", ["", "  ", "model.py:", "model.py: "])
def test_an_empty_name(write, model):
    write("model.py", MODEL)
    message, _ = refusal(lambda: load_subject(model))
    assert message.startswith(
        "MODEL is empty; give a model file"
        if not model.strip()
        else f"{model} names nothing after the colon; write model.py:"
    )


NOISY = """
from torch import nn
print("import")
def build_model():
    print("build")
    model = Net(4, 4)
    model.register_forward_hook(lambda *_: print("hook"))
    return model
class Net(nn.Linear):
    def train(self, mode=True):
        print("train")
        return super().train(mode)
    def forward(self, x):
        print("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: print("backward"))
        return y
def sample_batch(micro_batch):
    print("sample")
    import torch
    return (torch.zeros(micro_batch, 4),)
def loss(output, batch):
    print("loss")
    return output.mean()
"""


def test_what_the_users_code_prints_is_not_ours(write, capfd):
    trace(load_subject(write("model.py", NOISY)), precision="bf16")
    out, err = capfd.readouterr()
    assert out == ""
    assert set(err.split()) == {"import", "build", "hook", "backward", "train", "forward", "sample", "loss"}


def test_a_neighbour_that_is_imported_late(write):
    write("neighbour.py", "WIDTH = 7")
    text = "from torch import nn\ndef build_model():\n    from neighbour import WIDTH\n    return nn.Linear(WIDTH, 1)\n"
    assert load_subject(write("model.py", text)).module.in_features == 7


GPU = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(10**6, 10**6, bias=False, device="cuda").cuda()
        self.two = nn.Linear(10**6, 4).to("cuda:0", torch.bfloat16)
        self.register_buffer("scale", torch.ones(4, device=torch.device("cuda", 0)).cuda(non_blocking=True))
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.two(self.one(x.cuda()))
        return (y * self.scale.to(0) + torch.zeros(4, device="cuda")).to("cuda", non_blocking=True)
def build_model():
    torch.cuda.set_device(0)
    with torch.device("cuda"):
        return Net().cuda()
def sample_batch(micro_batch):
    return (torch.zeros(micro_batch, 10**6, device="cuda", pin_memory=True),)
def loss(output, batch):
    return output.mean().cuda()
"""


def test_a_model_file_written_for_gpus(write):
    import torch

    before = (torch.Tensor.to, torch.nn.Module.cuda, torch.cuda.device_count, torch.amp.autocast.__init__)
    traced = trace(load_subject(write("model.py", GPU)), precision="bf16", micro_batch=2)
    assert traced.params == 10**12 + 4 * 10**6 + 4
    assert traced.forward_flops == 2 * 2 * (10**12 + 4 * 10**6)
    assert traced.notes == ()
    assert (torch.Tensor.to, torch.nn.Module.cuda, torch.cuda.device_count, torch.amp.autocast.__init__) == before


BLIND = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        BUILT
    def forward(self, x):
        y = self.linear(x)
        MET
        return y.mean()
def build_model():
    return Net()
def sample_batch(micro_batch):
    return (torch.zeros(micro_batch, 4),)
"""


@pytest.mark.parametrize(
    ("met", "expected"),
    [
        (
            "y = y[y > 0]",
            "Net.forward makes a tensor whose shape depends on the values of the data (aten.nonzero), but",
        ),
        (
            "torch.unique(x)",
            "Net.forward makes a tensor whose shape depends on the values of the data (aten._unique2), but",
        ),
        (
            "nn.utils.rnn.pack_padded_sequence(y[None], torch.ones(1))",
            "Net.forward makes a tensor whose shape depends on the values of the data (aten._pack_padded_sequence), but",
        ),
        ("y.detach().cpu().numpy()", "Net.forward needs the values of a tensor on the host (.numpy() is not supported"),
        ("torch.equal(x, y)", "Net.forward needs the values of a tensor on the host (aten.equal), but dsplan runs the"),
        (
            "x.split(x[0, :2].long().tolist(), dim=1)",
            "the model raised RuntimeError: split_with_sizes expects split_sizes to sum exactly to 4",
        ),
    ],
)
def test_what_tensors_without_values_cannot_do(write, met, expected):
    subject = load_subject(write("model.py", BLIND.replace("MET", met).replace("BUILT", "")))
    message, text = refusal(lambda: trace(subject, precision="bf16"))
    assert message.startswith(f"model.py:11: {expected}")
    assert "without values; " in message and "leave out sample_batch for state bytes alone" in message
    assert "correct it" not in message
    assert 'model.py", line 11, in forward' in text and "dsplan" not in text.replace("model.py", "")


def test_values_of_a_parameter_that_is_being_built(write):
    text = BLIND.replace("MET", "").replace("BUILT", "self.linear.weight[0, 0].item()")
    message, _ = refusal(lambda: load_subject(write("model.py", text)))
    assert message.startswith(
        "model.py:8: Net.__init__ reads the values of a parameter while it is built (Tensor.item()"
    )
    assert "correct it" not in message and "take them from a plain number" in message


def test_a_batch_that_is_not_of_micro_batch_samples(write):
    text = MODEL.replace("torch.zeros(micro_batch, 4)", "torch.zeros(8, 4)")
    subject = load_subject(write("model.py", text))
    notes = trace(subject, precision="bf16", micro_batch=1).notes
    assert any(note.startswith("sample_batch(1) returned 8 rows along dim 0: ") for note in notes)
    assert not any("rows along" in note for note in trace(subject, precision="bf16", micro_batch=8).notes)


def test_no_frame_of_ours_in_the_users_traceback(write):
    text = BLIND.replace("MET", "y.nothing").replace("BUILT", "")
    _, text = refusal(lambda: trace(load_subject(write("model.py", text)), precision="bf16"))
    assert re.findall(r'File "(.*?)"', text)[-1].endswith("model.py")
    assert not any("planner/" in name for name in re.findall(r'File "(.*?)"', text))


POSITIONS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos, self.out = nn.Embedding(50, 8), nn.Embedding(16, 8), nn.Linear(8, 50)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.out(self.tok(x) + self.pos(places.unsqueeze(0)))

def build_model():
    return Net()

def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, seq_len or 16, dtype=torch.long),)
"""


def test_a_sequence_longer_than_the_table_of_a_model_file(write):
    path = write("model.py", POSITIONS)
    trace(load_subject(path), precision="bf16")
    text, _ = refusal(lambda: trace(load_subject(path, seq_len=32), precision="bf16"))
    assert text.startswith("model.py:12: position 31 is read of pos.weight, which has 16 rows; feed a shorter sequence")


@pytest.mark.parametrize(
    ("made", "read", "named"),
    [
        ("self.register_buffer('ids', torch.arange(16))", "self.pos(self.ids[:length])", "ids and pos.weight have"),
        ("pass", "self.pos.weight[:length]", "pos.weight has"),
        ("self.pos = nn.Parameter(torch.zeros(1, 16, 8))", "self.pos[:, :length]", "pos has"),
    ],
)
def test_a_table_that_is_cut_to_the_sequence(write, made, read, named):
    """Slices of what is too short are short in silence; the sum then does not go together."""
    text = POSITIONS.replace("\n    def forward", f"        {made}\n\n    def forward")
    text = text.replace("places = torch.arange(x.shape[1], device=x.device)", "length = x.shape[1]")
    path = write("model.py", text.replace("self.pos(places.unsqueeze(0))", read))
    trace(load_subject(path), precision="bf16")
    text, _ = refusal(lambda: trace(load_subject(path, seq_len=32), precision="bf16"))
    assert text.startswith("model.py:13: the model raised RuntimeError")
    assert f"{named} length 16 where 32 is needed: feed a shorter sequence (--seq-len 16)" in text


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("torch.zeros(0, 4)", "sample_batch(1) returned tensors without elements"),
        ("torch.zeros(micro_batch, 4, dtype=torch.long)", "0.weight of bfloat16 gets an input of int64"),
        ("torch.zeros(micro_batch, 4, dtype=torch.complex64)", "0.weight of bfloat16 gets an input of complex64"),
        ("torch.zeros(micro_batch, 4, device='xpu')", "asks for a device that torch does not know here"),
        ("torch.zeros(micro_batch, 5)", "in Linear.forward"),
    ],
)
def test_a_batch_that_no_kernel_takes(write, batch, expected):
    path = write("model.py", MODEL.replace("torch.zeros(micro_batch, 4)", batch))
    text, _ = refusal(lambda: trace(load_subject(path), precision="bf16"))
    assert expected in text


def test_a_weight_larger_than_the_hosts_memory(write):
    whole = "class Big(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter({})\n"
    lines = "import torch\nfrom torch import nn\n" + whole + "def build_model():\n    return Big()\n"
    text, _ = refusal(lambda: load_subject(write("model.py", lines.format("torch.ones(2**24, 2**24, device='cpu')"))))
    assert text.startswith("model.py:6: Big.__init__ makes a tensor larger than this host's free memory (1024 TiB")
    subject = load_subject(write("small.py", lines.format("torch.ones(2**24, 2**24)")))
    assert subject.module.w.numel() == 2**48, "on device meta it costs nothing"


@pytest.mark.parametrize(
    ("changes", "seq_len", "expected"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 40, "n_embd": 32},
            41,
            "seq_len 41 is longer than n_positions 40 of the config, the rows of transformer.wpe; give --seq-len 40 or less",
        ),
        ({"architectures": None}, None, 'names no class; add "architectures": ["LlamaForCausalLM"]'),
        (
            {"architectures": ["MyModel"], "auto_map": {"AutoModel": "my.MyModel"}},
            None,
            "MyModel is code that comes with the weights (auto_map), which dsplan does not run; write a model.py",
        ),
    ],
)
def test_a_config_that_cannot_be_used_says_the_way_round(write, changes, seq_len, expected):
    path = write("config.json", {**LLAMA, **changes})
    text, _ = refusal(lambda: load_subject(path, seq_len=seq_len))
    assert expected in text


def test_a_model_file_that_asks_for_weights_is_built_from_the_config(write, tmp_path):
    (tmp_path / "folder").mkdir()
    write("folder/config.json", LLAMA)
    load = "from transformers import AutoModelForCausalLM\ndef build_model():\n"
    path = write("model.py", load + "    return AutoModelForCausalLM.from_pretrained('folder')\n")
    subject = load_subject(path)
    assert all(param.is_meta for param in subject.module.parameters())
    assert type(subject.module).__name__ == "LlamaForCausalLM"


LOST = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        FORWARD

def build_model():
    return Net()FROZEN

def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, 4),)
"""


@pytest.mark.parametrize(
    ("forward", "frozen", "expected"),
    [
        (
            "return self.layer(x).detach().sum()",
            "",
            "model.py:10: Net.forward: the loss depends on no trainable .* detach",
        ),
        ("with torch.no_grad(): return self.layer(x).sum()", "", "model.py:10: Net.forward: .*without gradients here"),
        ("return self.layer(x).argmax(-1).float().sum()", "", "model.py:10: Net.forward: .* argmax ends the gradient"),
        (
            "return self.layer(x).sum()",
            ".requires_grad_(False)",
            "model.py:13: no parameter of Net is trained: .* all 2",
        ),
    ],
)
def test_the_line_that_loses_the_gradient_is_named(write, forward, frozen, expected):
    subject = load_subject(write("model.py", LOST.replace("FORWARD", forward).replace("FROZEN", frozen)))
    with pytest.raises(Problem, match=expected):
        trace(subject, precision="fp32")


def test_a_kernel_of_ones_own_is_to_tell_its_shapes(write):
    text = LOST.replace("FORWARD", "return torch.ops.dsplan_test.fused(self.layer(x)).sum()").replace("FROZEN", "")
    defined = 'LIB = torch.library.Library("dsplan_test", "DEF")\nLIB.define("fused(Tensor x) -> Tensor")\n'
    subject = load_subject(write("model.py", text + defined))
    with pytest.raises(Problem, match="model.py:10: Net.forward calls dsplan_test.fused") as raised:
        trace(subject, precision="fp32")
    assert '@torch.library.register_fake("dsplan_test::fused")' in str(raised.value)
    assert raised.value.user_traceback.count("File ") == 1, "the user's frame alone"
