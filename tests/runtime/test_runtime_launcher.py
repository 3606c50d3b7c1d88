"""Launches on two ranks: scripts as they are, failures named, nobody left behind."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from dsplan.runtime.launching.launcher import Restarts, _record, launch, next_ranks
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.problem import Problem
from launching import start_launch

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = """
import os, sys, time
import deepspeed, torch
from importlib.metadata import version
rank = int(os.environ["RANK"])
engine, optimizer, _, _ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={CONFIG})
"""


def write_script(folder, body, config="{'train_batch_size': 4, 'optimizer': {'type': 'Adam'}}"):
    script = folder / "script.py"
    script.write_text(HEAD.replace("{CONFIG}", config) + body)
    return script


WITHOUT_TORCH = """
import os, sys, time
rank = int(os.environ["RANK"])
def meet():
    open(f"FOLDER/here_{rank}", "w").close()
    while not all(os.path.exists(f"FOLDER/here_{other}") for other in (0, 1)):
        time.sleep(0.01)
"""


def write_script_without_torch(folder, body):
    """For what the launcher does by itself: its ranks start in a tenth of the time."""
    script = folder / "script.py"
    script.write_text(WITHOUT_TORCH.replace("FOLDER", str(folder)) + body)
    return script


def write_config(folder, config):
    target = folder / "ds_config.json"
    target.write_text(json.dumps(config))
    return target


@pytest.fixture
def launched(capfd, monkeypatch):
    """launch() on two ranks -> exit code, stdout, stderr."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(target, script, *script_args, **options):
        code = launch(target, script, list(script_args), ranks=2, run_dir=target.parent, **options)
        return code, *capfd.readouterr()

    return run


def test_an_unmodified_deepspeed_script_trains_and_is_measured(launched, tmp_path):
    """examples/simple_model.py: fp16, stage 2, a client Adam, and batches in float32.

    Keys that DeepSpeed does not know are told, and not as if they had been applied.
    """
    target = write_config(tmp_path, {"train_batch_size": 64, "zero_optimisation": {"stage": 3}, "mine": 1})
    code, out, err = launched(target, EXAMPLES / "simple_model.py")
    assert code == 0, err
    assert len(re.findall(r"epoch 4, loss \d", out)) == 2
    told = [line.removeprefix(f"dsplan: {target}") for line in err.splitlines() if str(target) in line]
    assert told == [
        " over the script's config: train_batch_size 32 -> 64",
        ': zero_optimisation: not a key of DeepSpeed, has no effect; did you mean "zero_optimization"?',
        ": mine: not a key of DeepSpeed, has no effect",
    ]

    run = json.loads((tmp_path / "run.json").read_text())
    assert run["version"] == 1 and run["predicted"] is None
    ledgers = [Ledger.from_json(record["ledger"]) for record in run["ranks"]]
    assert [record["rank"] for record in run["ranks"]] == [0, 1]
    measured = Ledger.from_json(run["measured"])
    assert measured.level == "measurement"
    assert measured.allocated_bytes == max(ledger.allocated_bytes for ledger in ledgers)
    # Linear(10, 1): 10 weights lie as [1, 10] on rank 0 alone, padded on rank 1; the bias likewise; all in fp32.
    assert ledgers[0].peak.category_bytes("params") == 4 * (10 + 1)
    # Adam: two states in fp32, and a step count in fp32 for each of the two parameters.
    assert ledgers[0].peak.category_bytes("optimizer") == 2 * 4 * (10 + 1) + 2 * 4


def test_the_script_finds_its_arguments_its_folder_and_deepspeeds_version(launched, tmp_path):
    (tmp_path / "beside.py").write_text("here = True")
    body = """
import beside
print(rank, __name__, sys.argv[1:], version("deepspeed"), deepspeed.__version__, engine.train_micro_batch_size_per_gpu())
"""
    script = write_script(tmp_path, body)
    code, out, err = launched(write_config(tmp_path, {}), script, "--steps", "3", script_config=True)
    assert code == 0, err
    assert "0 __main__ ['--steps', '3'] 0.19.8 0.19.8 2\n" in out
    assert "nothing was measured" in out


def test_lines_of_two_ranks_never_mix(launched, tmp_path, monkeypatch):
    """Where Python does not buffer, each argument of a print and the line's end would leave by themselves."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    body = """
for stream in (sys.stdout, sys.stderr):
    for line in range(2000):
        print("rank", rank, "line", line, "of", 2000, file=stream)
meet()
"""
    _, out, err = launched(write_config(tmp_path, {}), write_script_without_torch(tmp_path, body), script_config=True)
    for shown in (out, err):
        lines = [line for line in shown.splitlines() if line.startswith("rank")]
        assert sorted(lines) == sorted(f"rank {rank} line {line} of 2000" for rank in (0, 1) for line in range(2000))


def test_a_script_sees_what_plain_python_shows_it(launched, tmp_path, monkeypatch):
    """Its annotations, __file__, argv[0] and module path; the folder it is started from shadows nothing."""
    folder, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    for name in ("json", "signal", "config_of_mine"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('a stray file of the working folder was imported')")
    (folder / "config_of_mine.py").write_text("")
    script = folder / "script.py"
    script.write_text(
        """
import os, sys
def noted(x: int): ...
shown = [noted.__annotations__, __file__, sys.argv, [part for part in sys.path if "stand_in" not in part]]
if "RANK" not in os.environ or os.environ["RANK"] == "0":
    print(f"shown {shown}")
import json, config_of_mine
"""
    )
    monkeypatch.chdir(elsewhere)
    relative = Path("../scripts/script.py")
    alone = subprocess.run([sys.executable, str(relative), "a"], capture_output=True, text=True, check=True).stdout
    code, out, err = launched(write_config(tmp_path, {}), relative, "a", script_config=True)
    assert (code, "ended without calling deepspeed.initialize" in err) == (2, True), err
    assert re.findall("shown.*", out) == re.findall("shown.*", alone)


def test_a_folder_for_the_record_that_cannot_be_is_refused_before_any_rank_starts(tmp_path):
    target, script = write_config(tmp_path, {"train_batch_size": 4}), write_script(tmp_path, "")
    with pytest.raises(Problem, match="ds_config.json: is no folder, so run.json cannot be written there"):
        launch(target, script, [], ranks=2, run_dir=target)


def test_a_dead_rank_ends_the_launch_with_its_code_its_traceback_and_what_it_started(launched, tmp_path):
    """What was started is in a session of its own, where no signal to the rank's group reaches it."""
    body = """
import subprocess
print("pid", os.getpid(), flush=True)
if rank == 1:
    child = subprocess.Popen(["sleep", "777"], start_new_session=True)
    print("pid", child.pid, flush=True)
meet()
if rank == 1:
    raise KeyError("lost on purpose")
time.sleep(600)
"""
    code, out, err = launched(write_config(tmp_path, {}), write_script_without_torch(tmp_path, body))
    assert code == 1
    assert "rank 1 failed:\nTraceback" in err
    assert "KeyError: 'lost on purpose'\ndsplan: error: rank 1 ended with exit code 1\n" in err
    assert "bootstrap" not in err
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", out)]
    assert len(pids) == 3 and not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("death", "expected", "told"),
    [
        ("sys.exit(7)", 7, "rank 1 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(launched, tmp_path, death, expected, told):
    body = f"if rank == 1:\n    {death}\ntime.sleep(600)\n"
    code, out, err = launched(write_config(tmp_path, {}), write_script_without_torch(tmp_path, body))
    assert (code, told in err) == (expected, True), err


def test_a_rank_that_leaves_while_others_wait_is_named(launched, tmp_path):
    body = "\nif rank == 1:\n    sys.exit(0)\nfor _ in range(9):\n    torch.distributed.barrier()\n"
    code, out, err = launched(write_config(tmp_path, {}), write_script(tmp_path, body))
    assert code == 1
    assert re.search(
        r"Traceback \(of the script alone\):\n  File .*script.py\", line 11, in <module>\n[^\n]*\nRuntimeError: [^\n]*\n"
        r"dsplan: error: rank 0 ended with exit code 1, after rank 1 had left with code 0; all ranks must make the same "
        r"steps: rank 1 did not arrive where rank 0 waits \(step 0, before its first step, script.py:11\): "
        r"rank 1 has ended after 0 steps\n$",
        err,
    ), err


def test_a_collective_that_waits_too_long_names_the_rank_that_does_not_come(launched, tmp_path):
    body = """
for step in range(9):
    if (rank, step) == (1, 2):
        time.sleep(600)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
"""
    code, out, err = launched(write_config(tmp_path, {}), write_script(tmp_path, body), timeout_seconds=3)
    assert code == 1
    assert re.search(
        r"\ndsplan: error: rank 0 ended with exit code 1: rank 1 did not arrive where rank 0 waits \(step 2, \w+, "
        r"script.py:1[12]\): rank 1 is at step 2, between steps, script.py:10\n$",
        err,
    ), err
    assert "dsplan: no record of rank 1\n" in err


def test_after_a_kill_the_ranks_start_again_from_the_newest_checkpoint(launched, tmp_path):
    """With one rank fewer: train_batch_size and micro-batch stay, accumulation doubles."""
    body = """
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
engine.load_checkpoint("FOLDER")
print("start", start, "rank", rank, "step", engine.global_steps, "accumulation", engine.gradient_accumulation_steps(), flush=True)
while engine.global_steps < 3:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.save_checkpoint("FOLDER")
    if (start, rank, engine.global_steps) == ("0", 1, 2):
        os.kill(os.getpid(), 9)
""".replace("FOLDER", str(tmp_path / "checkpoints"))
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
    }
    script = write_script(tmp_path, body)
    code, out, err = launched(write_config(tmp_path, config), script, restarts=Restarts(most=2, min_ranks=1))
    assert code == 0, err
    starts = sorted(line for line in out.splitlines() if line.startswith("start"))
    assert starts == [
        "start 0 rank 0 step 0 accumulation 2",
        "start 0 rank 1 step 0 accumulation 2",
        "start 1 rank 0 step 2 accumulation 4",
    ]
    assert "rank 1 was killed by SIGKILL (out of memory on the host, perhaps); restart 1 of 2, with 1 rank\n" in err
    run = json.loads((tmp_path / "run.json").read_text())
    assert [record["rank"] for record in run["ranks"]] == [0]
    assert run["failure"] is None


def test_what_is_refused_is_not_started_again(launched, tmp_path):
    script = write_script_without_torch(tmp_path, "print('started', flush=True)\nmeet()\n")
    target = write_config(tmp_path, {"train_batch_size": 4})
    code, out, err = launched(target, script, restarts=Restarts(most=3))
    assert (code, out.count("started")) == (2, 2), err


@pytest.mark.parametrize(
    ("count", "killed", "gpus", "min_ranks", "batch", "expected"),
    [
        (8, 1, None, None, (64, 1), 8),  # a killed rank is replaced
        (8, 1, 8, None, (64, 1), 8),
        (8, 1, None, 4, (64, 1), 4),  # 7, 6 and 5 do not divide 64
        (8, 1, None, 4, (56, 1), 7),
        (8, 0, None, 4, (64, 1), 8),  # an exception is no lost rank
        (8, 1, 6, 2, (24, 4), 6),
        (8, 3, None, 7, None, 7),
        (8, 0, 7, 1, (64, 2), 4),
        (2, 2, None, 1, (6, 3), 1),
        (8, 1, None, 6, (64, 1), 8),  # none from 6 on divides, so with as many as before
    ],
)
def test_how_many_ranks_start_again(count, killed, gpus, min_ranks, batch, expected):
    """batch: (global, micro); accumulation = global / (micro x ranks) must be whole."""
    assert next_ranks(count, killed, gpus, min_ranks, batch) == expected


def test_orders_that_no_rank_could_follow_are_refused_before_any_starts(tmp_path):
    target, script = write_config(tmp_path, {"train_batch_size": 4}), write_script(tmp_path, "")
    with pytest.raises(Problem, match="--min-ranks is 3, but 2 ranks would be started; at most 2"):
        launch(target, script, [], ranks=2, restarts=Restarts(most=1, min_ranks=3))
    with pytest.raises(Problem, match="built without MPI"):
        launch(target, script, [], ranks=2, backend="mpi")


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_neither_ranks_nor_what_they_started_outlive_the_launcher(tmp_path, death):
    body = """
import subprocess
subprocess.Popen(["sleep", "777"], start_new_session=True)
print("ready", os.environ["DSPLAN_ORDERS"], flush=True)
time.sleep(600)
"""
    process = start_launch(write_config(tmp_path, {}), write_script_without_torch(tmp_path, body))
    try:
        for _ in range(2):
            ready, _, orders = process.stdout.readline().partition(" ")
            assert ready == "ready", process.stderr.read()
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert [rank.name() for rank in ranks].count("sleep") == 2
        process.send_signal(death)
        _, alive = psutil.wait_procs(ranks, timeout=15)
        assert not alive
        process.wait(15)
        assert not Path(orders.strip()).parents[1].exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("text", [None, "", '{"ledger": {"it'])
def test_a_record_that_a_killed_rank_left_half_written_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "record_1.json").write_text(text)
    assert _record(tmp_path, 1) == {"rank": 1, "ledger": None, "note": "no record of rank 1"}


def test_a_script_that_never_calls_initialize_is_an_error(launched, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('trained elsewhere')")
    code, out, err = launched(write_config(tmp_path, {"train_batch_size": 4}), script)
    assert code == 2
    assert f"dsplan: error: {script} ended without calling deepspeed.initialize" in err
    assert "Traceback" not in err


def test_strict_refuses_a_script_that_feeds_another_batch(launched, tmp_path):
    script = write_script(tmp_path, "\nengine.backward(engine(torch.ones(3, 4)).sum())\n")
    target = write_config(tmp_path, {"train_batch_size": 4})
    code, out, err = launched(target, script, strict=True)
    assert code == 2
    assert "feeds 3 samples per rank and micro-batch, but the config says 2: the global batch is 6" in err


@pytest.mark.parametrize(
    ("config", "reasons"),
    [
        (
            {
                "zero_optimization": {"stage": 7, "offload_param": {"device": "nvme"}},
                "gradient_accumulation_steps": 0,
                "optimizer": {"type": "OneBitAdam"},
                "scheduler": {"type": "LambdaLR"},
            },
            [
                "zero_optimization.stage is 7, but must be 0 to 3",
                "gradient_accumulation_steps is 0, but must be",
                "zero_optimization.offload_param.device: ",
                "optimizer.type: OneBitAdam is not carried out",
                "scheduler.type: LambdaLR is not carried out",
            ],
        ),
        (
            {
                "communication_data_type": "int8",
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "beta1": 0.9, "beta2": 0.95}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"foo": 1}},
                "fp16": {"enable": True},
            },
            [
                "communication_data_type is 'int8', but must be one of fp32, fp16, bf16",
                "optimizer.params: AdamW does not take beta1, beta2",
                "scheduler.params: WarmupDecayLR does not take foo",
                'fp16.enable: not a key of DeepSpeed, which it refuses; did you mean "enabled"?',
            ],
        ),
    ],
)
def test_all_that_the_engine_cannot_carry_out_is_said_at_once_before_any_rank_starts(tmp_path, config, reasons):
    """total_num_steps may still come from the script, and so is not missed here."""
    with pytest.raises(Problem) as caught:
        launch(write_config(tmp_path, config), write_script(tmp_path, ""), [], ranks=2)
    _, *said = str(caught.value).splitlines()
    pairs = zip(sorted(said), sorted(reasons), strict=True)
    assert [line for line, reason in pairs if not line.startswith(f"  {reason}")] == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dp_shard": 4}, "plan for dp 4 = 4 ranks, but 2 would be started"),
        ({"tp": 2, "dp_shard": 1}, "tp is 2, but the native engine carries out tp 1 only"),
        ({"engine": "deepspeed"}, "is a plan for engine deepspeed"),
        (
            {"offload": "param", "ds_config": {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}},
            "zero_stage is 2, but ds_config says 3; accumulation is 1, but ds_config says 4; "
            "offload is param, but ds_config says none",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_as_it_is_is_refused(tmp_path, changes, why):
    plan = {
        "version": 1,
        "model": {"source": "model.py", "params": 10, "shapes_sha256": ""},
        "cluster": {},
        "engine": "native",
        "layout": {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "pp": 1, "sp": 1},
        "zero_stage": 2,
        "precision": "bf16",
        "micro_batch": 1,
        "accumulation": 1,
        "recompute": "none",
        "offload": "none",
        "ds_config": {},
        "predicted": {},
    }
    for key, value in changes.items():
        (plan if key in plan else plan["layout"])[key] = value
    target = write_config(tmp_path, plan)
    with pytest.raises(Problem, match=why):
        launch(target, write_script(tmp_path, ""), [], ranks=2)
