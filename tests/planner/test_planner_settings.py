"""Which source wins for each value, and that an "auto" without a source is asked for by name."""

import pytest
from dsplan.planner.settings import Flags, Settings, settle
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.config import read_config
from dsplan.schemas.problem import Problem


def settled(flags: Flags | None = None, **sources: object) -> Settings:
    return settle(flags or Flags(), cluster=parse_cluster("8"), **sources)  # type: ignore[arg-type]


CONFIG = read_config(
    {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}},
        "dsplan": {"recompute": "full"},
    },
    "ds.json",
)


def test_without_anything_the_contracts_defaults_hold() -> None:
    got = settled()
    assert (got.engine, got.zero, got.precision, got.tp, got.pp) == ("native", (0, 1, 2, 3), ("bf16",), None, None)
    assert (got.optimizer.name, got.recompute, got.offload, got.has_config) == ("adamw", "none", "none", False)
    assert settled(Flags(zero=(1,))).own_zero is None, "a flag alone is no configuration of the user's"


def test_a_config_fixes_what_no_flag_names_and_speaks_of_deepspeed() -> None:
    got = settled(config=CONFIG)
    assert (got.engine, got.zero, got.precision, got.tp, got.pp) == ("deepspeed", (2,), ("bf16",), (1,), (1,))
    assert (got.global_batch, got.accumulation, got.recompute) == (64, 2, "full")
    assert (got.optimizer.name, got.optimizer.momentum) == ("sgd", True)


def test_flag_beats_args_beats_config() -> None:
    told = Companion(kind="trainer", source="args.json", precision="fp16", accumulation=4)
    got = settled(Flags(accumulation=8), companion=told, config=CONFIG)
    assert (got.accumulation, got.precision) == (8, ("fp16",))
    assert ("accumulation", "8", "flag") in got.origins
    assert ("precision", "('fp16',)", "--args") in got.origins


def test_a_script_is_estimated_over_all_stages_with_its_own_row_known() -> None:
    script = read_config({"train_batch_size": 32, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    got = settled(
        script_config=script, script_micro_batch=32, script_optimizer=OptimizerSpec(name="adam", kernel="for-loop")
    )
    assert (got.engine, got.zero, got.precision) == ("native", (0, 1, 2, 3), ("fp16",))
    assert (got.own_zero, got.own_precision, got.micro_batch, got.global_batch) == (2, "fp16", 32, None)
    assert got.optimizer.kernel == "for-loop"


def test_every_auto_without_a_source_is_named() -> None:
    config = read_config(
        {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": "auto"},
        },
        "ds.json",
    )
    with pytest.raises(Problem) as refused:
        settled(config=config)
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "bf16.enabled",
        "zero_optimization.stage",
    ):
        assert name in str(refused.value)
    got = settled(Flags(micro_batch=2, accumulation=1, precision=("bf16",), zero=(3,)), config=config)
    assert (got.micro_batch, got.accumulation, got.zero) == (2, 1, (3,))


def test_autos_that_trainer_fills_by_hidden_size() -> None:
    """transformers' trainer_config_finalize: h*h, 0.9*h*h, 10*h; figures for h = 4096 worked out by hand."""
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    config = read_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    knobs = settled(config=config, hidden_size=4096).knobs
    assert (knobs.reduce_bucket_size, knobs.prefetch_bucket_size, knobs.param_persistence_threshold) == (
        16_777_216,
        15_099_494,
        40_960,
    )


def test_an_unknown_optimizer_is_asked_for() -> None:
    config = read_config({"train_batch_size": 8, "optimizer": {"type": "Mystery"}}, "ds.json")
    with pytest.raises(Problem, match="Mystery"):
        settled(config=config)
    assert settled(Flags(optimizer="lion"), config=config).optimizer.name == "lion"


def test_where_args_and_config_differ_both_are_named_and_which_is_used() -> None:
    config = read_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2},
        },
        "ds.json",
    )
    told = Companion(kind="trainer", source="args.yaml", micro_batch=2, accumulation=4, precision="bf16")
    got = settled(companion=told, config=config)
    assert (got.micro_batch, got.accumulation) == (2, 4)
    assert got.notes == (
        "micro_batch 2 from --args args.yaml, not 1 from ds.json (the Trainer refuses such a pair: dsplan lint --args says so)",
    )
    assert settled(Flags(micro_batch=8), companion=told, config=config).notes == (), "a flag decides"
    half = Companion(kind="trainer", source="args.yaml", precision="bf16")
    off = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": False}}
    assert "precision bf16 from --args args.yaml, not fp32" in settled(companion=half, config=read_config(off)).notes[0]
    del off["bf16"]
    assert settled(companion=half, config=read_config(off)).notes == (), "the file says nothing of it"


def test_accelerate_itself_takes_what_the_config_says() -> None:
    """DeepSpeedPlugin.__post_init__ fills with must_match=False: "auto" alone is filled."""
    config = read_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}, "ds.json")
    told = Companion(kind="accelerate", source="acc.yaml", zero_stage=3)
    assert settled(companion=told, config=config).notes == (
        "zero_stage 3 from --args acc.yaml, not 2 from ds.json (Accelerate itself takes ds.json's: dsplan lint --args says so)",
    )
