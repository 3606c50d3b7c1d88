"""The scorer of published runs: which plan a row stands for, and what is counted."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from dsplan.schemas.units import GIB

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
spec = importlib.util.spec_from_file_location("score_published", BENCHMARKS / "score_published.py")
assert spec is not None and spec.loader is not None
scorer = importlib.util.module_from_spec(spec)
sys.modules["score_published"] = scorer
spec.loader.exec_module(scorer)

from published.architectures import KNOWN, named  # noqa: E402
from published.runs import Unmapped, run_of  # noqa: E402

COLUMNS = [
    "row_id",
    "model",
    "params_b",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "micro_batch",
    "grad_accum",
    "gpus",
    "gpu_type",
    "gpu_mem_gb",
    "framework",
    "method",
    "zero_stage",
    "sharding",
    "tp",
    "pp",
    "cp",
    "ep",
    "precision",
    "act_ckpt",
    "attn",
    "compile",
    "offload",
    "optimizer",
    "mem_value",
    "mem_unit",
    "mem_kind",
    "mem_scope",
    "outcome",
    "kind",
    "notes",
]
LLAMA = {
    "row_id": "made-001", "model": "Llama-2-7B", "params_b": "6.738", "layers": "32", "hidden": "4096", "heads": "32",
    "kv_heads": "32", "ffn": "11008", "vocab": "32000", "seq": "4096", "micro_batch": "1", "gpus": "8",
    "gpu_type": "A100-SXM4-80GB", "gpu_mem_gb": "80", "framework": "DeepSpeed + HF", "method": "full", "zero_stage": "3",
    "precision": "bf16", "act_ckpt": "full", "attn": "flash2", "optimizer": "AdamW", "mem_value": "40", "mem_unit": "GiB",
    "mem_kind": "nvidia-smi", "outcome": "ok", "kind": "measured",
}  # fmt: skip


def row(**changes: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | LLAMA | changes


def test_a_row_becomes_a_plan():
    run = run_of(row(notes="prefetch 1e7, reduce bucket 2e6", offload="optimizer cpu"))
    plan = run.plan
    assert (plan.engine, plan.zero_stage, plan.layout.dp_shard, plan.precision) == ("deepspeed", 3, 8, "bf16")
    assert (plan.recompute, plan.offload, plan.seq_len, plan.micro_batch) == ("full", "optimizer", 4096, 1)
    assert (plan.knobs.prefetch_bucket_size, plan.knobs.reduce_bucket_size) == (10_000_000, 2_000_000)
    assert run.network.architecture == KNOWN["llama-2-7b"]
    assert (run.kind, run.measured_bytes, run.gpu, run.fits) == ("device", 40 * GIB, "A100-80GB", True)


def test_units_kinds_and_sums():
    summed = run_of(row(mem_value="80", mem_kind="torch max_memory_allocated", mem_scope="sum over 2 GPUs"))
    assert (summed.kind, summed.measured_bytes) == ("allocated", 40 * GIB)
    assert run_of(row(mem_value="1024", mem_unit="MiB")).measured_bytes == GIB
    assert run_of(row(mem_value="3", mem_unit="GB", mem_kind="torch max_memory_reserved")).measured_bytes == 3e9
    assert run_of(row(mem_value="3", mem_unit="GB", mem_kind="nvidia-smi")).measured_bytes == 3 * GIB  # it counts MiB
    assert run_of(row(outcome="OOM", mem_value="")).fits is False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "analytic"}, "not measured: analytic"),
        ({"precision": "float8"}, "8-bit floats"),
        ({"precision": "bf16 + nf4"}, "quantised weights"),
        ({"framework": "nanotron v0.5"}, "an engine of its own: nanotron"),
        ({"seq": "<=1304 (longest example)"}, "seq is not one number"),
        ({"micro_batch": ""}, "micro_batch is not said"),
        ({"method": "rlhf dpo full"}, "a second model beside the trained one"),
        ({"cp": "2"}, "context or expert parallel"),
        ({"layers": "", "model": "Unheard-7B"}, "architecture is not in the row, and the model's name is not known"),
        ({"params_b": "13"}, "the columns' shapes give other parameters than params_b (more than 10 %)"),
        ({"optimizer": "adamw_8bit"}, "optimizer with other than fp32 states"),
        ({"row_id": "bigscience_a100_bloom_tuning-052"}, "excluded: inconsistent by a factor of 4"),
    ],
)
def test_rows_without_a_plan_have_a_reason(changes, reason):
    with pytest.raises(Unmapped, match=f"^{reason.replace('(', '.').replace(')', '.').replace('+', '.')}"):
        run_of(row(**changes))


def test_gated_and_tied_are_told_by_the_number_of_parameters():
    gpt = row(
        model="GPT", params_b="1.558", layers="48", hidden="1600", heads="25", kv_heads="", ffn="6400", vocab="50257"
    )
    found = run_of(gpt).network.architecture
    assert (found.gated, found.tied) == (False, True)
    assert found.params == pytest.approx(1.558e9, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-2-7B", "Qwen/Qwen2.5-7B-Instruct", "qwen-7b-chat", "Llama-3-8B", "Yi-34B"])
def test_models_known_by_name(name):
    assert named(name) is not None


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-3-8b", 8.03), ("qwen2.5-7b", 7.616), ("llama-3.1-405b", 405.9)],
)
def test_known_architectures_have_the_parameters_they_are_published_with(name, billions):
    assert KNOWN[name].params == pytest.approx(billions * 1e9, rel=2e-3)


def test_percentiles_are_of_sizes():
    assert scorer.percentile([-0.4, 0.1, 0.2, -0.3], 0.5) == pytest.approx(0.25)
    assert scorer.percentile([0.1, -0.2], 0.9) == pytest.approx(0.19)
    assert scorer.percentile([], 0.5) is None


def test_the_whole_of_it_on_a_small_model(tmp_path, capsys, monkeypatch):
    """The estimator's figures by hand: 18 B x parameters / 8, and 4 B x the embedding, its largest tensor."""
    small = {
        "layers": "2",
        "hidden": "256",
        "heads": "4",
        "kv_heads": "4",
        "ffn": "512",
        "vocab": "1000",
        "params_b": "",
    }
    made = row(**small, seq="64", framework="torchtitan (FSDP2)")
    rows = [made, made | {"row_id": "made-002", "precision": "float8"}]
    with (tmp_path / "made.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(sys, "argv", ["score_published.py", "--data", str(tmp_path), "--json", "--workers", "1"])
    scorer.main()
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["mapped"], report["measured"]) == (2, 1, 1)
    assert report["unmapped"] == {"8-bit floats": 1}
    params = 2 * 1000 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
    assert report["rows_scored"][0]["estimator_bytes"] == 4 * 1000 * 256 + 18 * params // 8
    assert report["by_group"]["full, zero 2-3"]["rows"] == 1
    assert report["fit"] == {"fits": {"fits": 1}, "oom": {}}
    monkeypatch.setattr(sys, "argv", ["score_published.py", "--data", str(tmp_path), "--workers", "1"])
    scorer.main()
    text = capsys.readouterr().out
    assert "2 rows, 1 have a plan, 1 of them a measured memory" in text
    assert "worst rows:" in text
