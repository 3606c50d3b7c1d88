"""Learning rates to the bit as DeepSpeed's (tests/oracle/learning_rates.py asked 0.19.8); torch's schedules by name."""

import json
from pathlib import Path

import pytest
import torch
from dsplan.runtime.optimizing.schedules import advance, bound_schedule, build_schedule, wrong_params
from dsplan.schemas.config import Named
from dsplan.schemas.problem import Problem

ANSWERS = json.loads((Path(__file__).parents[1] / "oracle" / "learning_rates.json").read_text("utf-8"))


def optimizer_of(lrs, kind=torch.optim.Adam):
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer['type']}-{json.dumps(answer['params'])}")
def test_rates_and_momentum_are_deepspeeds(answer):
    named = Named(type=answer["type"], params=answer["params"])
    optimizer = optimizer_of(answer["groups"])
    if "raises" in answer:
        with pytest.raises(Problem, match="scheduler.params"):
            build_schedule(named, optimizer)
        return
    schedule = build_schedule(named, optimizer)
    for step, lr in enumerate(answer["lr"]):
        if step:
            schedule.step()
            assert schedule.get_last_lr() == lr
        assert [group["lr"] for group in optimizer.param_groups] == lr
        assert schedule.get_lr() == answer["get_lr"][step]
        if "betas" in answer:
            assert [list(group["betas"]) for group in optimizer.param_groups] == answer["betas"][step]
            assert [list(pair) for pair in schedule.get_mom() or []] == answer["get_mom"][step]
    assert schedule.state_dict() == {"last_batch_iteration": answer["last_batch_iteration"]}


def test_a_loaded_state_goes_on_where_it_was():
    named = Named(type="WarmupDecayLR", params={"total_num_steps": 9, "warmup_num_steps": 3})
    first, second = optimizer_of([1e-3]), optimizer_of([1e-3])
    whole, resumed = build_schedule(named, first), build_schedule(named, second)
    for _ in range(4):
        whole.step()
    resumed.load_state_dict(whole.state_dict())
    whole.step(), resumed.step()
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] > 0


def test_one_cycle_leaves_the_momentum_of_an_optimizer_without_betas_alone(capsys):
    optimizer = optimizer_of([0.1], torch.optim.SGD)
    schedule = build_schedule(Named(type="OneCycle", params={"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}), optimizer)
    schedule.step()
    assert schedule.get_mom() is None
    assert optimizer.param_groups[0]["momentum"] == 0


def test_torchs_schedules_go_by_their_names():
    optimizer = optimizer_of([0.8])
    schedule = build_schedule(Named(type="StepLR", params={"step_size": 2, "gamma": 0.5}), optimizer)
    seen = []
    for _ in range(4):
        optimizer.step()
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [0.8, 0.4, 0.4, 0.2]


def test_a_schedule_of_another_optimizer_is_refused():
    mine, other = optimizer_of([0.1]), optimizer_of([0.1])
    with pytest.raises(Problem, match="moves the learning rates of another optimizer than the engine's"):
        bound_schedule(torch.optim.lr_scheduler.StepLR(other, 1), mine, None)


def test_a_function_makes_the_schedule_of_the_engines_optimizer():
    mine = optimizer_of([0.1])
    schedule = bound_schedule(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5), mine, None)
    assert schedule.optimizer is mine
    assert mine.param_groups[0]["lr"] == 0.05


def test_a_schedule_that_needs_the_loss_says_how_it_is_told():
    optimizer = optimizer_of([1.0])
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    with pytest.raises(Problem, match="lr_kwargs"):
        advance(schedule, {})
    for loss in (1.0, 2.0):
        advance(schedule, {"metrics": loss})
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1}, ["OneCycle needs cycle_max_lr"]),
        ("LRRangeTest", {"rate": 1}, ["LRRangeTest does not take rate"]),
        (
            "WarmupLR",
            {"warmup_num_steps": 1.5},
            ["WarmupLR: warmup_num_steps is 1.5, but must be a whole number"],
        ),
        ("StepLR", {}, ["StepLR needs step_size"]),
        ("WarmupLR", {"warmup_num_steps": "auto"}, []),
    ],
)
def test_wrong_parameters_are_told_before_the_ranks_start(kind, params, said):
    assert wrong_params(Named(type=kind, params=params), whole=True) == said
