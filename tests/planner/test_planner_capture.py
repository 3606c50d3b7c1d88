"""Training scripts, run unchanged up to their first backward. One child process per script and setting."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dsplan.planner.capturing.confining import Refused
from dsplan.planner.capturing.explaining import why_stopped
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.problem import Problem

EXAMPLES = Path(__file__).parents[2] / "examples"


def refusal(action):
    with pytest.raises(Problem) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.user_traceback


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def script(text, *arguments, **options):
        (tmp_path / "train.py").write_text(text)
        return load_subject("train.py", script_args=arguments, **options)

    return script


def test_the_simplest_script(capfd):
    subject = load_subject(str(EXAMPLES / "simple_model.py"))
    assert subject.config == {
        "train_batch_size": 32,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    assert subject.optimizer == OptimizerSpec(name="adam", kernel="foreach")
    assert subject.micro_batch == 32
    traced = trace(subject, precision="fp16")
    assert (traced.params, traced.micro_batch, traced.precision) == (11, 32, "fp16")
    assert traced.forward_flops == 2 * 32 * 10
    # x [32, 10] and output [32, 1] in fp16; labels [32, 1] as the data set holds them, in fp32; the loss in fp32
    assert traced.segments[0].end.activation_bytes == 2 * 320 + 2 * 32 + 4 * 32 + 4
    assert capfd.readouterr().out == ""


def test_a_script_traces_like_the_model_file_it_trains():
    arguments = [
        "--micro-batch",
        "2",
        "--seq-len",
        "32",
        "--layers",
        "2",
        "--width",
        "40",
        "--heads",
        "5",
        "--vocab",
        "100",
    ]
    subject = load_subject(str(EXAMPLES / "train_gpt.py"), script_args=arguments)
    sets = {"layers": "2", "width": "40", "heads": "5", "vocab": "100", "positions": "32"}
    model = load_subject(str(EXAMPLES / "gpt.py"), sets=sets, seq_len=32)
    for settings in (
        {"precision": "bf16", "recompute": "none", "micro_batch": 2},
        {"precision": "fp32", "recompute": "full", "micro_batch": 6},
    ):
        script, file = trace(subject, **settings), trace(model, **settings)
        assert script.segments == file.segments
        assert script.units == file.units
        assert script.forward_flops == file.forward_flops
    assert subject.optimizer == OptimizerSpec(name="adamw", kernel="fused")


GPU_SCRIPT = """
import sys, argparse, deepspeed, torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from helper import WIDTH

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--giant", action="store_true")
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="nccl")
torch.cuda.set_device(args.local_rank)
device = torch.device("cuda", 0)
layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(100 if args.giant else 2)]
model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
print("a line on stdout")
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
for step in range(3):
    x = torch.randn(4, WIDTH, device="cuda")
    y = torch.randint(10, (4,)).cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
        loss = nn.functional.cross_entropy(engine(x), y)
    assert torch.isfinite(loss).all()
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
    engine.backward(loss)
    sys.exit("one backward is enough")
"""


def test_a_script_written_for_gpus_with_ten_billion_parameters(script, tmp_path):
    """100 x 10,000 x 10,000 parameters would be 40 GB."""
    (tmp_path / "helper.py").write_text("WIDTH = 10_000\n")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, // hjson\n "bf16": {"enabled": true}}')
    subject = script(GPU_SCRIPT, "--deepspeed_config", "ds.json", "--giant")
    assert trace(subject, precision="bf16").params == 100 * 10**8 + 100_010
    assert subject.optimizer == OptimizerSpec(name="sgd", momentum=True, kernel="for-loop")
    assert subject.config["train_micro_batch_size_per_gpu"] == 4


def test_dsplans_own_initialize(script):
    text = """
import torch
from dsplan.runtime import initialize
engine, _, loader, _ = initialize(
    model=torch.nn.Linear(4, 1),
    model_parameters=None,
    training_data=[torch.zeros(4) for _ in range(12)],
    config={"train_batch_size": 6, "gradient_accumulation_steps": 2},
)
for x in loader:
    engine.backward(engine(x).mean())
"""
    assert script(text).micro_batch == 3


BATCH_SCRIPT = """
import torch, deepspeed
engine, _, _, _ = deepspeed.initialize(model=torch.nn.Linear(4, 5), config={"train_micro_batch_size_per_gpu": 2})
x, y = torch.zeros(2, 3, 4), torch.zeros(6, dtype=torch.long)
engine.backward(torch.nn.functional.cross_entropy(engine(x).flatten(0, 1), y))
"""


def test_a_batch_that_cannot_be_resized_is_refused_by_name(script):
    subject = script(BATCH_SCRIPT)
    assert subject.micro_batch == 2
    message, _ = refusal(lambda: trace(subject, precision="fp32", micro_batch=8))
    assert "micro_batch 8" in message and "y of shape [6]" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "print('hello')",
            "train.py: neither build_model() nor a call of deepspeed.initialize() was found (it ends without); add one of",
        ),
        ("", "train.py: neither build_model() nor a call of deepspeed.initialize() was found"),
        (
            "import deepspeed, torch\ndeepspeed.initialize(model=torch.nn.LazyLinear(2), config={})",
            "train.py: initialize() was given a model with lazy parameters, whose sizes are not known: weight, bias; run a",
        ),
        (
            "import deepspeed, torch\ndeepspeed.initialize(model=torch.nn.ReLU(), config={})",
            "train.py: initialize() was given a ReLU without parameters",
        ),
        (
            "import deepspeed, torch\nengine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={})\n"
            "y = engine(torch.zeros(3, 2))\ny = y[y > 0]",
            "train.py:4: it makes a tensor whose shape depends on the values of the data (aten.nonzero), but dsplan runs",
        ),
        ("x = 1\nraise KeyError('lost')", "train.py:2: the script raised KeyError: 'lost'"),
        ("import sys\nsys.exit(3)", "train.py:2: the script exits with code 3"),
        (
            "import deepspeed, torch\ndeepspeed.initialize(model=torch.nn.Linear(2, 2), config={})",
            "train.py ends after deepspeed.initialize() without a call of engine.backward()",
        ),
        (
            "import deepspeed\ndeepspeed.initialize(model=3, config={})",
            "initialize() was given int as model, but needs a torch.nn.Module",
        ),
        ("import os\nos.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_script_that_does_not_get_there(script, text, expected):
    message, _ = refusal(lambda: script(text).config)
    assert expected in message


def test_a_script_that_takes_too_long(script):
    message, _ = refusal(lambda: script("while True: pass", trace_timeout_seconds=0.5).config)
    assert "no engine.backward() within 0.5 s" in message and "or more time by --trace-timeout" in message


def test_the_scripts_own_traceback_comes_along(script):
    _, text = refusal(lambda: script("def go():\n    return 1 / 0\n\ngo()\n").config)
    assert 'train.py", line 4, in <module>' in text.splitlines()[1]
    assert "capture_child" not in text


def test_a_script_takes_no_length(script):
    with pytest.raises(Problem, match="pass its own option after --"):
        script("import deepspeed", seq_len=3)


def test_from_pretrained_loads_no_weights(script, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = (
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, '
        '"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}'
    )
    (folder / "config.json").write_text(config)
    text = """
import torch, deepspeed
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model")
model.config.use_cache = False
engine, *_ = deepspeed.initialize(model=model, config={"bf16": {"enabled": True}})
tokens = torch.randint(100, (3, 16))
engine.backward(engine(input_ids=tokens, labels=tokens.clone()).loss)
"""
    traced = trace(script(text), precision="bf16")
    from_config = trace(load_subject(str(folder), seq_len=16), precision="bf16", micro_batch=3)
    assert (traced.units, traced.segments[1:-1]) == (from_config.units, from_config.segments[1:-1])
    assert "train" not in sys.modules


def test_the_working_folder_shadows_nothing(tmp_path, monkeypatch):
    """As under `python script.py`: the script's own folder is on the import path, the working folder is not."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("WIDTH = 3\n")
    text = f"from helper import WIDTH\n{BATCH_SCRIPT}"
    (tmp_path / "code" / "train.py").write_text(text)
    for name in ("json", "numpy", "runpy", "torch", "dsplan", "typing", "helper"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    assert load_subject("code/train.py").micro_batch == 2


LAPTOP_SCRIPT = """
import os, subprocess
import torch, wandb, deepspeed
from flash_attn import flash_attn_func
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

assert torch.cuda.is_available() and torch.cuda.is_bf16_supported()
assert torch.cuda.get_device_capability()[0] >= 8
torch.cuda.manual_seed_all(1)
torch.cuda.nvtx.range_push("start")
torch.cuda.reset_peak_memory_stats()
wandb.init(project="x", config={"a": 1})
writer = SummaryWriter("runs")
os.makedirs("out", exist_ok=True)
subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
    def forward(self, x):
        return flash_attn_func(*self.qkv(x).view(*x.shape[:2], 3, 2, 16).unbind(2)).flatten(2)

with deepspeed.zero.Init():
    model = Net()
torch.save(model.state_dict(), "out/model.pt")
model.load_state_dict({"other": torch.zeros(1)})
model = torch.compile(model.to("cuda"))
loader = DataLoader([torch.zeros(8, 32) for _ in range(12)], batch_size=3, num_workers=4, pin_memory=True)
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(),
    config={"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
)
engine.eval()
with torch.no_grad():
    seen = engine(torch.zeros(5, 8, 32))
    assert seen.shape == (5, 8, 32) and seen.float().numpy().sum() == 0 and seen.mean().item() == 0
engine.train()
for x in loader:
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    loss = engine(x.cuda(non_blocking=True)).float().mean()
    wandb.log({"loss": loss.item(), "peak": torch.cuda.max_memory_allocated()})
    with open("out/log.txt", "a") as file:
        file.write("x" * 3_000_000)
    print("x" * 3_000_000)
    engine.backward(loss)
    engine.step()
"""


def test_a_script_of_a_cluster_on_a_laptop(script, tmp_path):
    """GPUs, kernels, trackers, workers, files and weights that are not there, or that tracing does not touch."""
    traced = trace(script(LAPTOP_SCRIPT), precision="bf16")
    assert (traced.params, traced.micro_batch) == (32 * 96 + 96, 3)
    # x, q k v, the output in bf16; sums of the softmax in fp32; a seed; the output and its mean in fp32
    forward = [segment for segment in traced.segments if segment.phase == "forward"]
    assert forward[-1].end.activation_bytes == 2 * 3 * 8 * (32 + 96 + 32) + 4 * 3 * 2 * 8 + 16 + 4
    assert traced.forward_flops == 2 * 3 * 8 * 32 * 96 + 2 * 3 * 2 * 8 * 8 * 2 * 16
    notes = "\n".join(traced.notes)
    assert "flash_attn 2 is not installed: flash_attn_func stood in for" in notes
    assert "weights that the script loads are left out" in notes
    assert "the script wrote a file (out/log.txt), kept nowhere" in notes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_the_network_is_refused_by_its_line(script):
    message, text = refusal(
        lambda: script("import urllib.request\nurllib.request.urlopen('http://example.org')").config
    )
    assert message == (
        "train.py:2: the network (example.org) is refused while the script is traced; fetch what it needs before and give a "
        "local path, or let the script skip it"
    )
    assert text is None


def chained(error, cause):
    error.__cause__ = cause
    return error


OFFLINE = type("OfflineModeIsEnabled", (ConnectionError,), {})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ModuleNotFoundError("No module named 'trl'", name="trl"),
            "trl is not installed where dsplan runs; install it here",
        ),
        (
            ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine.pytorch"),
            "transformer_engine.pytorch is not installed, and its kernels have no stand-in; let the script go without it",
        ),
        (
            chained(OSError("We couldn't connect"), OFFLINE("offline")),
            "without network; fetch it once (hf download NAME",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "a function of CUDA that has no stand-in"),
        (chained(RuntimeError("retried 3 times"), Refused("the network (x)", "skip it")), "the network (x) is refused"),
        (ValueError("of the script's own"), None),
    ],
)
def test_what_stops_a_script_here_and_not_on_its_cluster(error, expected):
    told = why_stopped(error)
    assert told is None if expected is None else expected in told


def test_a_parent_that_is_killed_leaves_no_child(tmp_path):
    """SIGTERM by an exception, SIGKILL by the kernel: the script's connection ends, since its process is gone."""
    (tmp_path / "train.py").write_text(
        "import socket, sys\nheld = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\nheld.send(b'1')\nwhile True: pass\n"
    )
    start = (
        "import sys\nfrom dsplan.planner.models.load import load_subject\n"
        "load_subject(sys.argv[1], script_args=sys.argv[2:]).config\n"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            parent = subprocess.Popen([sys.executable, "-c", start, str(tmp_path / "train.py"), port])
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1) == b"1"
                os.kill(parent.pid, number)
                assert parent.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
                connection.settimeout(60)
                assert connection.recv(1) == b""
