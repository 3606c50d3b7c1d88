"""Which combinations exist. Expected sets are worked out by hand from the contract."""

import pytest
from dsplan.planner.candidates import candidates
from dsplan.planner.settings import Flags, settle
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.config import read_config
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem


def found(
    flags: Flags, cluster: str, *, tp_limit: int = 8, num_blocks: int = 4, config: dict[str, object] | None = None
) -> tuple[tuple[Plan, ...], dict[str, int]]:
    machine = parse_cluster(cluster)
    settings = settle(flags, cluster=machine, config=read_config(config) if config else None)
    result = candidates(settings, machine, tp_limit=tp_limit, num_blocks=num_blocks)
    return result.plans, result.skipped


def splits(plans: tuple[Plan, ...], zero_stage: int) -> set[tuple[int, int, int]]:
    return {(p.layout.dp, p.layout.tp, p.layout.pp) for p in plans if p.zero_stage == zero_stage}


def test_the_default_range_on_four_gpus() -> None:
    plans, skipped = found(Flags(), "4xA100-80GB", tp_limit=2, num_blocks=4)
    assert splits(plans, 0) == {(4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 2, 2)}
    assert splits(plans, 1) == splits(plans, 0)
    assert splits(plans, 2) == splits(plans, 3) == {(4, 1, 1), (2, 2, 1)}
    assert sum(skipped.values()) == 6  # the three splits with pp > 1, at stages 2 and 3


def test_one_gpu_has_one_split() -> None:
    plans, skipped = found(Flags(), "1")
    assert len(plans) == 4 and not skipped


def test_tp_stays_within_a_node() -> None:
    plans, _ = found(Flags(zero=(1,), pp=(1,)), "2x4xA100-80GB", tp_limit=8)
    assert splits(plans, 1) == {(8, 1, 1), (4, 2, 1), (2, 4, 1)}


@pytest.mark.parametrize("flags", [Flags(tp=(3,)), Flags(pp=(16,)), Flags(tp=(1, 5))])
def test_a_named_split_that_does_not_divide_the_gpus_is_refused(flags: Flags) -> None:
    with pytest.raises(Problem, match="does not divide the 8 GPUs"):
        found(flags, "8")


def test_nothing_left_says_why() -> None:
    with pytest.raises(Problem, match="heads"):
        found(Flags(tp=(4,)), "8", tp_limit=2)


def test_micro_batch_follows_from_the_global_batch() -> None:
    config: dict[str, object] = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
    }
    plans, _ = found(Flags(tp=(1, 2)), "8", config=config)
    assert [(p.layout.dp, p.micro_batch, p.global_batch) for p in plans] == [(8, 4, 64), (4, 8, 64)]


def test_a_batch_that_is_not_whole_is_refused() -> None:
    with pytest.raises(Problem, match="not whole"):
        found(Flags(), "8", config={"train_batch_size": 12})
    with pytest.raises(Problem, match="train_batch_size is 64, but micro_batch 4 x accumulation 1 x dp 8 = 32"):
        config: dict[str, object] = {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
        }
        found(Flags(), "8", config=config)


def test_offload_is_left_out_where_the_engine_does_none() -> None:
    plans, skipped = found(Flags(offload="param"), "1")
    assert [plan.zero_stage for plan in plans] == [3]
    assert sum(skipped.values()) == 3
    plans, skipped = found(Flags(offload="optimizer", engine="deepspeed"), "1")
    assert [plan.zero_stage for plan in plans] == [1, 2, 3]
    assert list(skipped) == ["offload optimizer with zero 0: DeepSpeed leaves the optimizer on the device there"]
    plans, skipped = found(Flags(offload="optimizer", engine="native"), "1")
    assert [plan.zero_stage for plan in plans] == [0, 1, 2, 3]


@pytest.mark.parametrize(("engine", "offload"), [("native", "optimizer"), ("deepspeed", "none")])
def test_a_file_that_offloads_at_stage_0_is_read_as_its_engine_reads_it(engine, offload) -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    plans, _ = found(Flags(engine=engine), "1", config=config)
    assert [plan.offload for plan in plans] == [offload]
