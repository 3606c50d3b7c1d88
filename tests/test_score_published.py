"""The scorer of published runs: which plan a row stands for, and what is counted."""

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.units import GIB

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
spec = importlib.util.spec_from_file_location("score_published", BENCHMARKS / "score_published.py")
assert spec is not None and spec.loader is not None
scorer = importlib.util.module_from_spec(spec)
sys.modules["score_published"] = scorer
spec.loader.exec_module(scorer)

from published.architectures import KNOWN, Architecture, named  # noqa: E402
from published.cells import COLUMNS, Unmapped  # noqa: E402
from published.networks import Network, build  # noqa: E402
from published.runs import run_of  # noqa: E402

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
        ({"model": "Llama-2-7B-AWQ"}, "quantised weights"),
        ({"source": "github:a/b examples/train/qlora/bnb/train.sh"}, "quantised weights"),
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


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen-1_8b-chat", "qwen-1.8b"),
        ("Qwen1half-7B-Chat", "qwen1.5-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama 2 7 B", "llama-2-7b"),
        ("LLaMA2-13B-hf", "llama-2-13b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("Gemma2 9B", "gemma-2-9b"),
        ("facebook/opt-6.7b", "opt-6.7b"),
        ("bigscience/bloomz-7b1", "bloom-7b1"),
        ("EleutherAI/gpt-neox-20b", "gpt-neox-20b"),
        ("bert-large-uncased", "bert-large"),
        ("tiiuae/Falcon-40B", "falcon-40b"),
        ("GPT-2 XL", "gpt2-xl"),
    ],
)
def test_models_are_known_by_name_however_it_is_spelt(name, usual):
    assert named(name) == KNOWN[usual]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("ViT-L/16", "a vision model: the schema has no size of images"),
        ("google/t5-11b", "an encoder and a decoder: the length of the targets is not said"),
        ("Mixtral-8x7B-v0.1", "a mixture of experts"),
        ("Unheard-7B", "architecture is not in the row, and the model's name is not known"),
    ],
)
def test_models_that_are_not_of_this_kind_say_so(model, reason):
    shapes = dict.fromkeys(("params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    with pytest.raises(Unmapped, match=f"^{reason}$"):
        run_of(row(**shapes, model=model))


@pytest.mark.parametrize(
    ("said", "engine", "zero_stage", "style"),
    [
        ({"framework": "Accelerate DeepSpeed ZeRO-3", "zero_stage": ""}, "deepspeed", 3, "hf"),
        ({"framework": "LLaMA-Factory", "sharding": "DeepSpeed ZeRO-2", "zero_stage": ""}, "deepspeed", 2, "hf"),
        ({"framework": "axolotl", "sharding": "FSDP2", "zero_stage": ""}, "native", 3, "hf"),
        ({"framework": "axolotl", "sharding": "deepspeed_zero3", "zero_stage": ""}, "deepspeed", 3, "hf"),
        ({"framework": "PyTorch FSDP", "sharding": "FULL_SHARD", "zero_stage": ""}, "native", 3, "hf"),
        ({"framework": "torch_titan", "sharding": "FSDP2", "zero_stage": "3.0"}, "native", 3, "fused"),
        ({"framework": "MS_Swift (HF-Trainer) + Deep Speed", "zero_stage": "ZeRO-3"}, "deepspeed", 3, "hf"),
        ({"framework": "Megatron-DeepSpeed", "zero_stage": "1"}, "deepspeed", 1, "megatron"),
        ({"framework": "PyTorch DDP", "zero_stage": ""}, "deepspeed", 0, "hf"),
    ],
)
def test_frameworks_are_known_however_they_are_spelt(said, engine, zero_stage, style):
    run = run_of(row(**said))
    assert (run.plan.engine, run.plan.zero_stage, run.network.style) == (engine, zero_stage, style)


@pytest.mark.parametrize(
    ("gpu_type", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "", "A100-80GB"),
        ("8x A100 40GB", "", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "32", "V100-32GB"),
        ("GeForce RTX 4090", "24", "RTX4090-24GB"),
        ("H100 PCIe 80 GB", "", "H100-PCIe-80GB"),
        ("Frobnicator 9000", "64", "unknown"),
    ],
)
def test_gpus_are_known_however_they_are_spelt(gpu_type, memory, name):
    run = run_of(row(gpu_type=gpu_type, gpu_mem_gb=memory))
    assert run.gpu == name
    assert run.fits is (None if name == "unknown" else True)


def test_what_the_global_batch_leaves_is_accumulation_or_micro_batch():
    """1024 samples a step over dp 2 x pp 4, 2 at a time: 256 micro-batches, of which 4 are in flight."""
    shared = {"global_batch": "1024", "gpus": "8", "pp": "4", "zero_stage": "1"}
    assert run_of(row(**shared, micro_batch="2")).plan.accumulation == 256
    told = run_of(row(**shared, micro_batch="", grad_accum="256")).plan
    assert (told.micro_batch, told.accumulation) == (2, 256)


@pytest.mark.parametrize(
    ("said", "sp", "split"),
    [
        ({"sp": "4"}, 4, False),
        ({"sp": "true", "tp": "2", "framework": "Megatron-DeepSpeed", "zero_stage": "1"}, 1, True),
        ({"tp": "2", "framework": "torchtitan (FSDP2)"}, 1, True),
        ({"tp": "2"}, 1, False),
    ],
)
def test_the_sequence_is_split_by_ulysses_or_beside_tp(said, sp, split):
    plan = run_of(row(**said)).plan
    assert (plan.layout.sp, plan.layout.ranks, plan.sequence_parallel) == (sp, 8, split)


def test_a_file_may_lack_columns():
    needed = (
        "row_id",
        "model",
        "seq",
        "micro_batch",
        "gpus",
        "framework",
        "zero_stage",
        "precision",
        "mem_value",
        "kind",
    )
    run = run_of({name: LLAMA[name] for name in needed} | {"mem_unit": "GB"})
    assert (run.network.architecture, run.gpu, run.kind) == (KNOWN["llama-2-7b"], "unknown", "reserved")
    assert run.measured_bytes == 40e9


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "no", "abc", "8,192", "1.5", "nan", "1e99", "½", "1/0", "8x", "(", "[x"]
)
def test_no_cell_can_make_it_fail_otherwise_than_with_a_reason(value):
    for column in COLUMNS:
        try:
            run_of(row(**{column: value}))
        except Unmapped as reason:
            assert str(reason)


def test_torchtunes_ends_are_sharded_apart_from_its_blocks():
    """Source: torchtune, recipes/configs/llama3/70B_full.yaml, custom_sharded_layers."""
    small = {"layers": "2", "hidden": "64", "heads": "4", "kv_heads": "", "ffn": "96", "vocab": "128", "params_b": ""}
    run = run_of(
        row(**small, framework="torchtune", zero_stage="", sharding="FSDP2", act_ckpt="", mem_kind="peak per GPU")
    )
    assert (run.kind, run.plan.recompute, run.network.checkpointed) == ("allocated", "none", True)
    assert [name for name, _ in find_blocks(build(run.network))] == ["ends.0", "ends.1", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    "family", ["gpt2", "gptj", "opt", "bloom", "gpt_neox", "falcon", "phi", "phi3", "gemma", "gemma2", "bert"]
)
def test_every_family_is_built_with_the_parameters_of_its_shapes(family):
    """Against the sum by hand of matrices alone: norms, biases and positions are below a tenth at this size."""
    gated = family in ("phi3", "gemma", "gemma2")
    arch = Architecture(
        layers=2, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=8000, gated=gated,
        tied=family not in ("gptj", "gpt_neox", "phi", "phi3"), family=family, head_dim=64,
    )  # fmt: skip
    with torch.device("meta"):
        made = build(Network(architecture=arch, style="hf"))
    assert sum(param.numel() for param in made.parameters()) == pytest.approx(arch.params, rel=0.15)


def test_only_the_last_blocks_are_trained_where_a_row_says_so():
    small = {"layers": "3", "hidden": "64", "heads": "4", "kv_heads": "", "ffn": "96", "vocab": "128", "params_b": ""}
    for model in ("GPT", "Llama"):
        run = run_of(row(**small, model=model, method="freeze (layers 1-2 trainable)"))
        trained = [name for name, param in build(run.network).named_parameters() if param.requires_grad]
        assert trained and all(re.search(r"\.[12]\.", name) for name in trained)


def test_a_row_that_fails_is_named_and_stops_none_of_the_others(capsys, monkeypatch):
    monkeypatch.setattr(scorer, "subject_of", lambda network: 1 / 0)
    scores, reasons = scorer.score([row(), row(row_id="made-002", precision="float8")])
    assert scores == []
    assert reasons == {"8-bit floats": 1, "its model could not be built or traced: ZeroDivisionError": 1}
    assert "made-001: ZeroDivisionError" in capsys.readouterr().err


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


def test_reasons_that_begin_alike_are_listed_as_one():
    reasons = {"8-bit floats": 4, "way of training: adapter": 1, "way of training: adapter_v2": 2, "excluded: wrong": 1}
    assert list(scorer.gathered(reasons).items()) == [
        ("8-bit floats", 4),
        ("way of training: adapter_v2 2, adapter 1", 3),
        ("excluded: wrong", 1),
    ]


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
