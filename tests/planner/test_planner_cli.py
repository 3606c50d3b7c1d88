"""The contract of the command line: exit codes, JSON fields, one clear line for what cannot be done."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import Done, dsplan
from dsplan.schemas.validation import schema_errors

ROOT = Path(__file__).parent.parent.parent
GPT = str(ROOT / "examples/gpt.py")
SMALL = [
    *("--set", "layers=2"),
    *("--set", "width=64"),
    *("--set", "heads=4"),
    *("--set", "vocab=128"),
    *("--set", "positions=32"),
]

ROW = {
    *("engine", "level", "zero_stage", "precision", "dp", "dp_replicate", "tp", "pp", "sp", "micro_batch"),
    *("accumulation", "global_batch", "seq_len", "recompute", "offload", "optimizer", "memory", "time", "verdict"),
    "runnable",
}
MEMORY = {
    *("params_bytes", "grads_bytes", "optimizer_bytes", "activations_bytes", "gathered_params_bytes", "buckets_bytes"),
    *("temporary_bytes", "allocated_bytes", "reserved_bytes", "device_bytes", "device_bytes_low", "device_bytes_high"),
    "host_bytes",
}
TIME = {
    *("step_seconds", "compute_seconds", "exposed_communication_seconds", "bubble_seconds", "samples_per_second"),
    *("tokens_per_second_per_gpu", "model_flops_per_second_per_gpu", "mfu"),
}


def refused(done: Done, *words: str) -> None:
    """Exit 2, nothing on stdout, and one line on stderr (after the user's own traceback) that holds the words."""
    assert done.code == 2, done
    assert done.out == ""
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("dsplan: error: "), done.err
    for word in words:
        assert word in last, last
    assert "a fault of dsplan itself" not in last


def test_estimate_has_the_contracts_fields() -> None:
    done = dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--cluster", "4xA100-80GB", "--format", "json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert schema_errors("estimate", report) == []
    assert set(report) == {"version", "model", "cluster", "rows", "skipped", "explain"}
    assert report["version"] == 1
    counted = {"forward_flops", "backward_flops", "recompute_flops", "flops_source"}
    assert set(report["model"]) == {"source", "params", "trainable_params"} | counted
    for row in report["rows"]:
        assert set(row) == ROW
        assert set(row["memory"]) == MEMORY
        assert set(row["time"]) == TIME
        categories = [name for name in MEMORY if name.split("_")[0] not in ("allocated", "reserved", "device", "host")]
        assert sum(row["memory"][name] for name in categories) == row["memory"]["allocated_bytes"]
        assert row["dp"] * row["tp"] * row["pp"] == 4
        assert row["global_batch"] == row["micro_batch"] * row["accumulation"] * row["dp"]
        assert row["runnable"] == (row["tp"] == row["pp"] == 1)
        if row["pp"] > 1:
            assert row["zero_stage"] < 2
    assert {skipped["reason"].split(":")[0] for skipped in report["skipped"]} == {"pp > 1 with zero 2 or 3"}


def test_items_add_up_in_json_for_every_row_phase_and_rank() -> None:
    options = ("--seq-len", "32", "--cluster", "4xT4", "--precision", "fp16", "--accumulation", "3")
    done = dsplan("estimate", GPT, *SMALL, *options, "--engine", "both", "--formulas", "--per-rank", "--format", "json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert schema_errors("estimate", told) == []
    assert {(one["engine"], one["pp"]) for one in told["rows"]} == set(
        itertools.product(("native", "deepspeed"), (1, 2))
    )
    assert len(told["per_rank"]) > len({tuple(one["row"].items()) for one in told["per_rank"]})  # several ranks of some
    for one in (*told["rows"], *told["per_rank"]):
        assert {moment["phase"] for moment in one["moments"]} >= {"load", "forward", "backward", "step", "eval"}
        for moment in one["moments"]:
            assert sum(item["bytes"] for item in moment["items"]) == moment["allocated_bytes"]
            assert all(item["why"] for item in moment["items"])
        peak = max(one["moments"], key=lambda moment: moment["allocated_bytes"])
        memory = one["memory"]
        assert peak["allocated_bytes"] == memory["allocated_bytes"]
        for category in ("params", "grads", "optimizer", "activations", "gathered_params", "buckets", "temporary"):
            held = sum(item["bytes"] for item in peak["items"] if item["category"] == category)
            assert held == memory[f"{category}_bytes"]


def test_a_batch_of_the_arguments_that_is_not_the_configurations_is_said(tmp_path: Path) -> None:
    args, config = tmp_path / "args.yaml", tmp_path / "ds.json"
    args.write_text("output_dir: x\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    config.write_text('{"train_batch_size": 8, "gradient_accumulation_steps": 4}')
    options = ("--seq-len", "32", "--cluster", "2xT4", "--config", str(config), "--args", str(args))
    done = dsplan("estimate", GPT, *SMALL, *options)
    assert "global 16 = micro_batch 2 x accumulation 4 x dp 2" in done.out
    assert f"global batch 16 with --args {args}, not the train_batch_size 8 of {config}" in done.err


def test_times_say_that_they_leave_offload_out() -> None:
    options = ("--seq-len", "32", "--precision", "fp16", "--zero", "2", "--tp", "1", "--pp", "1")

    def notes(*flags: str) -> str:
        done = dsplan("estimate", GPT, *SMALL, *options, *flags)
        assert done.code == 0, done.err
        return done.err

    said = notes("--cluster", "2xT4", "--offload", "optimizer")
    assert all(word in said for word in ("times leave offload out", "host", "optimizer", "tokens/s", "MFU"))
    assert "offload" not in notes("--cluster", "2xT4")
    assert "offload" not in notes("--cluster", "2", "--offload", "optimizer"), "without a GPU no time is shown"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--schedule", "gpipe"), ("--schedule gpipe has no effect", "--pp")),
        (("--sequence-parallel",), ("--sequence-parallel has no effect", "--tp")),
        (("--dp-replicate", "2", "--zero", "0"), ("--dp-replicate 2 has no effect", "--zero 1")),
    ],
)
def test_what_changes_nothing_is_said(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    options = ("--seq-len", "32", "--cluster", "2xT4", "--precision", "fp16", "--tp", "1", "--pp", "1")
    done = dsplan("estimate", GPT, *SMALL, *options, *flags)
    assert done.code == 0, done.err
    assert all(word in done.err for word in words), done.err


def test_a_batch_that_is_not_whole_names_file_and_remedy(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"train_batch_size": 7, "bf16": {"enabled": true}}')
    words = (str(config), "train_batch_size 7", "multiple of 4")
    refused(dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--cluster", "4xT4", "--config", str(config)), *words)


def test_markdown_holds_what_was_asked(tmp_path: Path) -> None:
    """Answers, ranks and formulas stand below the table, as in text."""
    (tmp_path / "lengths.txt").write_text("8\n32\n")
    asked = ("--max", "micro-batch", "--lengths", str(tmp_path / "lengths.txt"), "--per-rank", "--formulas")
    options = ("--seq-len", "32", "--cluster", "1xT4", "--precision", "fp16", "--zero", "2", "--reserve", "14GiB")
    text, markdown = (
        dsplan("estimate", GPT, *SMALL, *options, *asked, "--format", form).out for form in ("text", "markdown")
    )
    for words in (
        "max micro-batch, zero 2",
        "per pipeline stage",
        "the best row",
        "each line is a micro-batch",
        "peak in",
    ):
        assert words in text
        assert words in markdown
    assert markdown.count("```") == 10


def test_every_row_of_a_named_range_is_there() -> None:
    options = ("--zero", "0,1,2,3", "--precision", "fp32,fp16,bf16", "--tp", "1", "--pp", "1", "--format", "json")
    report = json.loads(dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--cluster", "2", *options).out)
    cells = [(row["zero_stage"], row["precision"]) for row in report["rows"]]
    assert sorted(cells) == sorted((z, p) for z in range(4) for p in ("fp32", "fp16", "bf16"))
    assert {row["verdict"] for row in report["rows"]} == {"unknown"}
    assert {row["time"]["step_seconds"] for row in report["rows"]} == {None}


def test_text_says_for_what_in_two_lines() -> None:
    done = dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--cluster", "2xH100-80GB")
    first, second = done.out.splitlines()[:2]
    for word in ("engine native", "formula", "gpt.py", "parameters"):
        assert word in first
    for word in ("micro_batch 1", "accumulation 1", "sequence 32", "recompute none", "adamw", "2 x H100-80GB"):
        assert word in second


def test_a_config_makes_its_own_row_the_first_and_decides_the_exit_code(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    options = ("--config", str(config), "--zero", "0,1", "--cluster", "2xA100-80GB", "--seq-len", "32")
    report = json.loads(dsplan("estimate", GPT, *SMALL, *options, "--format", "json").out)
    assert [row["engine"] for row in report["rows"]] == ["deepspeed", "deepspeed"]
    assert [row["micro_batch"] for row in report["rows"]] == [4, 4]
    text = dsplan("estimate", GPT, *SMALL, "--config", str(config), "--cluster", "2xA100-80GB", "--seq-len", "32").out
    assert "> 1" in text


def test_what_does_not_fit_is_exit_1() -> None:
    done = dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--micro-batch", "2000000", "--cluster", "1xT4")
    assert done.code == 1, done.out
    assert "oom" in done.out


@pytest.mark.parametrize(
    ("expression", "code"), [("device_bytes <= 16GB", 0), ("device_bytes <= 1MB", 1), ("mfu >= 2", 1)]
)
def test_assertions_decide_the_exit_code(expression: str, code: int) -> None:
    """Of several each must hold."""
    done = dsplan(
        "estimate",
        GPT,
        *SMALL,
        "--seq-len",
        "32",
        "--cluster",
        "1xT4",
        "--precision",
        "fp16",
        "--assert",
        expression,
        "--assert",
        "params_bytes >= 1",
    )
    assert done.code == code, done.err


@pytest.mark.parametrize("expression", ["", "device_bytes", "device_bytes <= lots", "height <= 3", "mfu <= 1GB"])
def test_an_assertion_that_cannot_be_read_is_refused(expression: str) -> None:
    refused(dsplan("estimate", GPT, "--assert", expression), "--assert")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cluster", "8xH10O-80GB"), ("H10O-80GB", "known")),
        (("--cluster", "lots"), ("lots", "8xH100-80GB")),
        (("--cluster", "8", "--tp", "3"), ("--tp 3", "does not divide the 8 GPUs")),
        (("--cluster", "8", "--pp", "16"), ("--pp 16", "does not divide the 8 GPUs")),
        (("--zero", "4"), ("--zero", "0, 1, 2 or 3")),
        (("--zero", "1,,2"), ("--zero",)),
        (("--precision", "fp8"), ("fp8", "bf16")),
        (("--tp", "x"), ("--tp",)),
        (("--optimizer", "magic"), ("magic", "adamw")),
        (("--set", "layers"), ("--set layers", "name=value")),
        (("--recompute", "some"), ("some", "selective", "full")),
        (("--packed",), ("--packed is for the config of a Hugging Face model",)),
        (("--micro-batch", "1000000000000000"), ("more than 2**63 bytes", "--micro-batch")),
        (("--", "--epochs", "3"), ("--epochs", "training script", "--set")),
        (("--schedule", "zigzag"), ("--schedule zigzag", "1f1b")),
        (("--config", "none.json"), ("none.json",)),
        (("--args", "none.yaml"), ("none.yaml",)),
        (("--cluster", "2", "--world-size", "2"), ("--cluster", "--world-size")),
    ],
)
def test_what_estimate_cannot_do_is_one_line(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(dsplan("estimate", GPT, *SMALL, "--seq-len", "32", *options), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build_model():\n    return 1 / 0\n", ("model.py:2", "division by zero")),
        ("def build_model():\n    return None\n", ("model.py", "Module")),
        ("import nowhere_to_be_found\ndef build_model(): ...\n", ("model.py:1", "nowhere_to_be_found")),
        ("def build_model(:\n", ("model.py:1",)),
        ("x = 1\n", ("model.py", "initialize")),
    ],
)
def test_a_model_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    refused(dsplan("estimate", str(path)), *words)


def test_the_users_own_traceback_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def build_model():\n    return 1 / 0\n")
    err = dsplan("estimate", str(path)).err
    assert "Traceback (most recent call last)" in err and "ZeroDivisionError" in err
    assert "load.py" not in err, "frames of dsplan are not the user's"


@pytest.mark.parametrize("name", ["none.py", "none/config.json", "none"])
def test_a_missing_model_is_one_line(name: str) -> None:
    refused(dsplan("estimate", name), name)


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", '{"model_type": 3}', '{"architectures": ["NoSuchModel"]}'])
def test_a_hf_config_that_cannot_be_used_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    refused(dsplan("estimate", str(path)), "config.json")


def test_tune_writes_a_plan_and_a_config_that_lints_clean(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = str(ROOT / "examples/ds_config.json")
    options = ("--seq-len", "32", "--config", config, "--cluster", "2xA100-80GB", "-o", str(out))
    done = dsplan("tune", GPT, *SMALL, *options)
    assert done.code == 0, done.err
    plan = json.loads((out / "plan.json").read_text())
    assert set(plan) == {
        *("version", "model", "cluster", "engine", "layout", "zero_stage", "precision", "micro_batch", "accumulation"),
        *("recompute", "offload", "ds_config", "predicted"),
    }
    assert schema_errors("plan", plan) == []
    assert set(plan["model"]) == {"source", "params", "shapes_sha256"}
    assert set(plan["predicted"]) == ROW
    assert plan["predicted"]["runnable"] is True
    written = json.loads((out / "ds_config.json").read_text())
    assert written == plan["ds_config"]
    before = json.loads(Path(config).read_text())
    assert written["optimizer"] == before["optimizer"]
    assert written["gradient_clipping"] == before["gradient_clipping"]
    assert written["train_batch_size"] == 4 * 1 * 2  # what the config means on two ranks
    said = (written["bf16"]["enabled"], written["fp16"]["enabled"], written["dsplan"]["recompute"])
    assert said == (True, False, "none"), (
        "a plan says all that it decides, so that nothing of a script's stays beside it"
    )
    linted = dsplan("lint", str(out / "ds_config.json"), "--cluster", "2", "--engine", "native", "--format", "json")
    findings = json.loads(linted.out)["files"][0]["findings"]
    assert (linted.code, [f for f in findings if f["severity"] != "info"]) == (0, [])


def test_tune_where_nothing_fits_is_exit_1_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    big = (
        "--set",
        "layers=100",
        "--set",
        "width=8192",
        "--set",
        "heads=64",
        "--set",
        "vocab=128",
        "--set",
        "positions=32",
    )
    done = dsplan("tune", GPT, *big, "--seq-len", "32", "--cluster", "1xT4", "-o", str(out))
    assert done.code == 1
    assert "nothing fits" in done.out
    assert not out.exists()


def test_tune_writes_the_optimizer_that_the_arguments_name(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("output_dir: x\nper_device_train_batch_size: 2\noptim: adagrad\n")
    out = tmp_path / "out"
    options = ("--cluster", "2xT4", "--args", str(tmp_path / "args.yaml"), "-o", str(out))
    done = dsplan("tune", GPT, *SMALL, "--seq-len", "32", *options)
    assert done.code == 0, done.err
    assert json.loads((out / "ds_config.json").read_text())["optimizer"]["type"] == "Adagrad"
    assert "takes adagrad" in done.err


TUNED = (GPT, *SMALL, "--seq-len", "32", "--cluster", "2xT4", "--global-batch", "4")


def test_flags_narrow_down_what_tune_tries(tmp_path: Path) -> None:
    """And what a flag says stands in the files that are written, whatever the configuration said."""
    config = tmp_path / "ds_config.json"
    config.write_text(
        json.dumps(
            {
                "train_batch_size": 4,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
            }
        )
    )
    flags = ("--zero", "1,3", "--precision", "fp16", "--recompute", "full", "--build", "meta", "--offload", "optimizer")
    asked = ("--engine", "deepspeed", "--config", str(config), *flags)
    done = dsplan("tune", *TUNED, *asked, "--format", "json", "-o", str(tmp_path))
    assert done.code == 0, done.err
    told = json.loads(done.out)
    tried = {(row["zero_stage"], row["precision"], row["recompute"], row["offload"]) for row in told["rows"]}
    assert tried == {(1, "fp16", "full", "optimizer"), (3, "fp16", "full", "optimizer")}
    assert (told["same_model"], told["same_model_why"]) == (False, "precision is fp16, the configuration's bf16")
    written = json.loads((tmp_path / "ds_config.json").read_text())
    assert written["zero_optimization"] == {
        "stage": told["rows"][0]["zero_stage"],
        "offload_optimizer": {"device": "cpu"},
    }


def test_what_is_not_offloaded_stays_so_at_any_stage_that_tune_chooses(tmp_path: Path) -> None:
    """DeepSpeed takes an offload block as without effect at stage 0; at the chosen stage it would have one."""
    config = tmp_path / "ds_config.json"
    idle = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    config.write_text(json.dumps({"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": idle}))
    asked = ("--engine", "deepspeed", "--config", str(config), "--zero", "2")
    done = dsplan("tune", *TUNED, *asked, "--format", "json", "-o", str(tmp_path))
    assert done.code == 0, done.err
    assert {row["offload"] for row in json.loads(done.out)["rows"]} == {"none"}
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"] == {"stage": 2}


def test_a_split_that_the_engine_does_not_carry_out_is_not_left_out_of_the_numbers(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_batch_size": 4, "dsplan": {"pipeline_stages": 2}}))
    refused(dsplan("tune", *TUNED, "--config", str(config), "--zero", "0"), "does not carry it out", "pp 2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("--cluster",)),
        (("--cluster", "2xT4", "--optimizer", "lion", "--config", "CONFIG"), ("--optimizer lion", "AdamW")),
        (("--cluster", "2xT4", "--zero", "2", "--offload", "param"), ("offload param", "zero below 3")),
        (("--cluster", "8"), ("unknown kind", "8xA100-80GB")),
        (("--cluster", "2xT4", "--free", "everything"), ("everything", "global_batch")),
        (("--cluster", "2xT4", "--free", "optimizer"), ("--free optimizer", "--args")),
        (("--cluster", "2xT4", "--global-batch", "3"), ("global batch 3", "2 GPUs")),
    ],
)
def test_what_tune_cannot_do_is_one_line(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    options = tuple(option.replace("CONFIG", str(ROOT / "examples/ds_config.json")) for option in options)
    refused(dsplan("tune", GPT, *SMALL, "--seq-len", "32", *options), *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.json", "train.py"), ("none.json",)),
        (("CONFIG", "none.py"), ("none.py",)),
        (("--engine", "deepspeed", "CONFIG", "x.py"), ("deepspeed",)),
        (("--nproc", "2", "CONFIG", "x.py"), ("launch has no option --nproc", "--ranks")),
    ],
)
def test_what_launch_cannot_start_is_one_line(words: tuple[str, ...], said: tuple[str, ...]) -> None:
    config = str(ROOT / "examples/ds_config.json")
    refused(dsplan("launch", *(config if word == "CONFIG" else word for word in words)), *said)


def test_an_unknown_rule_is_one_line() -> None:
    refused(dsplan("explain", "DSP999"), "DSP999", "dsplan rules")


def test_explain_and_rules() -> None:
    page = dsplan("explain", "dsp102")
    assert page.code == 0 and "DSP102" in page.out
    listing = dsplan("rules")
    assert listing.code == 0 and "DSP102" in listing.out


def test_lint_codes(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    bad = tmp_path / "bad.json"
    bad.write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}')
    assert dsplan("lint", str(good)).code == 0
    assert dsplan("lint", str(bad)).code == 1
    refused(dsplan("lint", str(tmp_path / "none.json")), "none.json")


def test_lint_json_has_the_contracts_fields(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2}\n}')
    report = json.loads(dsplan("lint", str(bad), "--format", "json").out)
    assert report["version"] == 1
    (file,) = report["files"]
    assert set(file) == {"file", "read_as", "findings", "skipped_rules"}
    (error,) = [finding for finding in file["findings"] if finding["severity"] == "error"]
    assert set(error) == {
        *("rule", "name", "severity", "pointer", "line", "column", "end_line", "end_column", "message", "about", "fix"),
        "raises",
    }
    assert (error["pointer"], error["line"], error["column"], error["end_column"]) == ("/zero_optimisation", 3, 3, 22)
    assert all(set(skipped) == {"rule", "needs"} for skipped in file["skipped_rules"])


def test_lint_fix_corrects_what_diff_shows(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{\n  // kept\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2}\n}')
    shown = dsplan("lint", str(bad), "--diff").out
    assert '+  "zero_optimization": {"stage": 2}' in shown
    assert "zero_optimisation" in bad.read_text()
    assert dsplan("lint", str(bad), "--fix").code == 0
    assert bad.read_text() == '{\n  // kept\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2}\n}'


def test_lint_with_a_model_says_what_does_not_fit(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "def build_model():\n    return torch.nn.Linear(1000, 1000)\n"
        "def sample_batch(micro_batch, seq_len=None):\n    return (torch.zeros(micro_batch, 1000),)\n"
    )
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 5000000, "gradient_clipping": 1.0}')
    done = dsplan("lint", str(config), "--model", str(model), "--cluster", "1xT4", "--format", "json")
    (finding,) = json.loads(done.out)["files"][0]["findings"]
    assert (done.code, finding["rule"], finding["severity"]) == (1, "DSP901", "error")
    config.write_text('{"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 1.0}')
    assert dsplan("lint", str(config), "--model", str(model), "--cluster", "1xT4").code == 0
    (file,) = json.loads(dsplan("lint", str(config), "--model", str(model), "--format", "json").out)["files"]
    assert {"rule": "DSP901", "needs": "--cluster with a kind of GPU, as 8xA100-80GB"} in file["skipped_rules"]
    refused(dsplan("lint", str(config), "--model", "none.py", "--cluster", "1xT4"), "none.py")


def test_lint_says_the_bytes_that_estimate_says(tmp_path: Path) -> None:
    """A node of 1 GB: the model of 1 GiB that each of 2 ranks builds is too much for it, whatever the GPUs have."""
    cluster, config, model = tmp_path / "c.json", tmp_path / "ds.json", tmp_path / "model.py"
    cluster.write_text(json.dumps({"nodes": 1, "gpus_per_node": 2, "host_memory_gb": 1, "gpu": "A100-80GB"}))
    model.write_text(
        "import torch\n"
        "def build_model():\n    return torch.nn.Linear(16384, 16384, bias=False)\n"
        "def sample_batch(micro_batch, seq_len=None):\n    return (torch.zeros(micro_batch, 16384),)\n"
    )
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    config.write_text(json.dumps({**batch, "zero_optimization": {"stage": 3}}))
    options = ("--cluster", str(cluster), "--format", "json")
    done = dsplan("lint", str(config), "--model", str(model), *options)
    (finding,) = [one for one in json.loads(done.out)["files"][0]["findings"] if one["severity"] == "error"]
    assert (done.code, finding["rule"]) == (1, "DSP903")
    assert "takes 2.00 GiB of a node's host memory while it loads, but it has 0.931 GiB" in finding["message"]
    told = dsplan("estimate", str(model), "--config", str(config), *options)
    report = json.loads(told.out)
    (why,) = report["explain"]
    assert (told.code, report["rows"][0]["verdict"], why["verdict"]) == (1, "host_oom", "host_oom")
    assert why["host_phases"][0] == {"phase": "load", "bytes": 2 * 4 * 16384**2}
    assert [change["what"] for change in why["changes"]] == ["the model made on meta (zero.Init)"]
    assert dsplan("estimate", str(model), "--config", str(config), "--build", "meta", *options).code == 0


def test_a_pipelines_schedule_is_asked_for_by_flag_and_by_key(tmp_path: Path) -> None:
    """GPipe keeps every micro-batch of the first stage, 1F1B as many as there are stages. Huang et al. 2019, Narayanan et al. 2021."""
    options = (
        "estimate",
        "examples/gpt.py",
        "--set",
        "layers=4",
        "--seq-len",
        "128",
        "--cluster",
        "2xA100-80GB",
        "--format",
        "json",
    )
    split = ("--zero", "0", "--tp", "1", "--pp", "2", "--accumulation", "8")

    def activations(*more: str) -> int:
        (row,) = json.loads(dsplan(*options, *more).out)["rows"]
        return row["memory"]["activations_bytes"]

    plain = activations(*split)
    assert activations(*split, "--schedule", "1f1b") == plain < activations(*split, "--schedule", "gpipe")
    config = tmp_path / "ds.json"
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": True}}
    config.write_text(json.dumps({**batch, "dsplan": {"pipeline_stages": 2, "pipeline_schedule": "gpipe"}}))
    native = ("--config", str(config), "--engine", "native")
    assert activations(*native) == activations(*split, "--schedule", "gpipe")
    refused(dsplan(*options, *split, "--schedule", "gpipe:2"), "--schedule gpipe:2 cannot be read")
    refused(
        dsplan(*options, *split, "--schedule", "interleaved:3"), "pp 2 x 3 virtual stages are more than the 4 blocks"
    )


def test_what_cannot_be_rehearsed_is_said_and_its_formula_stands() -> None:
    options = ("--cluster", "2xA100-40GB", "--zero", "1", "--rehearse", "--format", "json")
    done = dsplan("estimate", GPT, *SMALL, "--seq-len", "32", *options)
    levels = {(row["tp"], row["pp"]): row["level"] for row in json.loads(done.out)["rows"]}
    assert levels == {(1, 1): "rehearsal", (2, 1): "formula", (1, 2): "formula"}
    assert "tp 2" in done.err and "the formula stands" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", GPT, "--micro-batch", "0"),
        ("estimate", GPT, "--micro-batch", "x"),
        ("estimate", GPT, "--world-size", "0"),
        ("estimate", GPT, "--format", "xml"),
        ("estimate",),
        ("lint", "--foo"),
        ("explain",),
        ("rules", "x"),
        ("nonsense",),
        ("estimate", GPT, "--set", "layers=1", "--set", "layers=2"),
        ("lint", "-", "--select", "DSP001", "--ignore", "DSP001"),
    ],
)
def test_a_call_that_cannot_be_read_is_one_line(words: tuple[str, ...]) -> None:
    done = dsplan(*words)
    refused(done)
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_estimate_says_what_lint_says_of_the_config_and_what_is_not_in_its_numbers(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_batch_size": 8, "zero_optimisation": {"stage": 3}, "sequence_parallel_size": 2,\n'
        ' "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}, "data_types": {"grad_accum_dtype": "fp32"},\n'
        ' "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}'
    )
    done = dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--cluster", "8xA100-80GB", "--config", str(config))
    assert done.code == 0
    for words in (
        'ds.json:1:25: error: unknown key "zero_optimisation"',
        "zero_optimization.zero_quantized_gradients true is not in these numbers",
        "torch_autocast is not in these numbers",
    ):
        assert words in done.err
    assert "dp 4; sequence 32; recompute none; offload none; optimizer adamw (fused); sp 2;" in done.out


def test_estimate_takes_splits_from_the_config(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "dsplan": {"pipeline_stages": 2}}'
    )
    options = ("--cluster", "8xA100-80GB", "--config", str(config), "--format", "json")
    (row,) = json.loads(dsplan("estimate", GPT, *SMALL, "--seq-len", "32", *options).out)["rows"]
    assert (row["dp"], row["tp"], row["pp"], row["micro_batch"]) == (2, 2, 2, 4)


@pytest.mark.parametrize("text", ["{}", '{"train_batch_size": "auto"}'])
def test_a_config_without_a_batch_is_asked_for_one(tmp_path: Path, text: str) -> None:
    config = tmp_path / "ds.json"
    config.write_text(text)
    refused(dsplan("estimate", GPT, *SMALL, "--config", str(config)), "ds.json", "--micro-batch")


def test_an_assertion_on_what_is_not_known_is_refused() -> None:
    done = dsplan("estimate", GPT, *SMALL, "--seq-len", "32", "--cluster", "8", "--zero", "1", "--assert", "mfu >= 0.1")
    assert (done.code, done.err.strip().splitlines()[-1].startswith("dsplan: error: --assert: mfu is not known")) == (
        2,
        True,
    )


def test_parameters_that_are_no_floats_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        "        self.table = torch.nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)\n"
        "def build_model():\n    return Net()\n"
        "def sample_batch(micro_batch, seq_len=None):\n    return (torch.zeros(micro_batch, 4),)\n"
    )
    command = ("estimate", str(model), "--engine", "deepspeed", "--zero")
    assert "1 of the parameters, such as table, hold no floats" in dsplan(*command, "3").err
    assert "hold no floats" not in dsplan(*command, "1").err


def test_tune_knows_that_batch_normalisation_sees_the_micro_batch(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "def build_model():\n    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))\n"
        "def sample_batch(micro_batch, seq_len=None):\n    return (torch.zeros(micro_batch, 64),)\n"
    )
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": true}}'
    )
    options = ("--config", str(config), "--cluster", "2xA100-40GB", "-o", str(tmp_path / "out"), "--format", "json")
    told = json.loads(dsplan("tune", str(model), *options).out)
    assert (told["plan"]["micro_batch"] == 8) == told["same_model"]
    assert told["same_model"] or "batch normalisation" in told["same_model_why"]
    assert any("micro_batch 1" in left_out["reason"] for left_out in told["skipped"]), (
        "a batch of one has no statistics"
    )


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    command = [sys.executable, "-m", "dsplan.planner.cli", "lint", "ds.json"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, env=plain, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr == b"dsplan: error: the output cannot be written (No space left on device)\n"
    shell = f'"{sys.executable}" -m dsplan.planner.cli lint ds.json >&-'
    closed = subprocess.run(shell, shell=True, cwd=tmp_path, env=plain, stderr=subprocess.PIPE, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_fix_refuses_what_is_no_file_to_rewrite(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "dsplan.planner.cli", "lint", str(pipe), "--fix"]
    lint = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipe.write_text('{"train_batch_siz": 8}')
    _, err = lint.communicate(timeout=60)
    assert (lint.returncode, err) == (
        2,
        f"dsplan: error: --fix rewrites files, and {pipe} is a pipe or a device; use --diff\n",
    )


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Typer answers Ctrl-C with exit code 130 and no word."""
    from dsplan.planner.cli import main

    monkeypatch.setattr("dsplan.planner.cli.app", lambda *_, **__: 130)
    monkeypatch.setattr(sys, "argv", ["dsplan", "estimate", "model.py"])
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "dsplan: error: interrupted\n"
