"""What the engine does beside training right: skipping, schedules, refusals, notes."""

import pytest
from ranks import run_ranks

FP16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    for weights_equal, scales, skipped, lrs in run_ranks(2, one_rank_overflows):
        assert weights_equal == [True, False]  # the first step changes nothing, the second does
        assert scales == [8.0, 8.0]
        assert skipped == 1
        assert lrs == pytest.approx([0.1, 0.1, 0.2])  # the schedule does not move on a skipped step


def one_rank_overflows():
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import Net, batches

    torch.manual_seed(0)
    engine, _, _, schedule = initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "fp16": FP16,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "scheduler": SCHEDULE,
        },
    )
    [tokens] = batches(1)
    equal, scales, lrs = [], [], []
    for step in range(2):
        before = [parameter.to_local().clone() for parameter in engine.parameters()]
        factor = float("inf") if step == 0 and dist.get_rank() == 1 else 1.0
        engine.backward(engine(tokens).float().square().mean() * factor)
        engine.step()
        lrs.append(engine.get_lr()[0])
        after = [parameter.to_local() for parameter in engine.parameters()]
        equal.append(all(map(torch.equal, before, after)))
        scales.append(engine.loss_scale)
    schedule.step()
    return equal, scales, engine.skipped_steps, [*lrs, engine.get_lr()[0]][:3]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_are_not_numbers_never_reach_the_weights(precision):
    assert run_ranks(1, weights_stay_finite, precision) == [(True, 1)]


def weights_stay_finite(precision):
    import torch
    from dsplan.runtime import initialize
    from training import Net, batches

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW"},
        precision: {"enabled": True},
    }
    engine, _, _, _ = initialize(model=Net(), config=config)
    [tokens] = batches(1)
    engine.backward(engine(tokens).sum() * float("nan"))
    engine.step()
    return all(
        torch.isfinite(parameter.to_local()).all().item() for parameter in engine.parameters()
    ), engine.skipped_steps


def test_a_model_in_half_precision_gets_masters_in_fp32_and_keeps_its_buffers_as_they_are():
    assert run_ranks(1, dtypes) == [({"torch.float32"}, "torch.float16", "torch.bfloat16")]


def dtypes():
    from dsplan.runtime import initialize
    from training import Net, batches

    engine, _, _, _ = initialize(
        model=Net().half(), config={"train_batch_size": 8, "bf16": {"enabled": True}, "optimizer": {"type": "SGD"}}
    )
    [tokens] = batches(1)
    output = engine(tokens)
    engine.backward(output.sum())
    return {str(parameter.dtype) for parameter in engine.parameters()}, str(engine.offset.dtype), str(output.dtype)


def test_ranks_that_hold_different_models_are_refused_with_the_rank_and_the_tensor():
    for message in run_ranks(2, different_models):
        assert message == (
            "rank 1 holds another model than rank 0: weight is float32 [3, 5] there and float32 [3, 4] on rank 0; "
            "build the same model on every rank"
        )


def different_models():
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem

    with pytest.raises(Problem) as caught:
        initialize(model=torch.nn.Linear(4 + dist.get_rank(), 3), config={"train_batch_size": 2})
    return str(caught.value)


def test_every_key_that_is_not_carried_out_is_refused_at_once():
    [message] = run_ranks(1, refusals)
    assert "zero_optimization.offload_optimizer" in message
    assert "optimizer.type: OneBitAdam" in message
    assert "train_batch_size is 2, but micro_batch 2 x accumulation 3 x dp 1 = 6" in message
    assert "scheduler.params: WarmupDecayLR needs total_num_steps" in message


def test_zero_without_an_optimizer_is_refused_where_deepspeed_does():
    assert run_ranks(1, without_optimizer) == [[None, 1, 2, None]]


def without_optimizer():
    import torch
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem

    refused = []
    for zero_stage in range(4):
        try:
            engine, optimizer, _, _ = initialize(
                model=torch.nn.Linear(4, 3), config={"train_batch_size": 1, "zero_optimization": {"stage": zero_stage}}
            )
            assert optimizer is None
            engine(torch.ones(1, 4))
            refused.append(None)
        except Problem as problem:
            assert f"zero stage {zero_stage} requires an optimizer" in str(problem)
            refused.append(zero_stage)
    return refused


def test_what_cannot_be_sharded_or_stepped_is_one_line():
    twice, engine, adafactor = run_ranks(2, refused_at_once)[0]
    for message in (twice, engine):
        assert message.endswith(
            "is sharded already, by an earlier initialize or by FSDP; call initialize once, with the plain model"
        )
    assert adafactor.startswith("the first step of optimizer Whole failed (RuntimeError: ")


def refused_at_once():
    import torch
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem

    class Whole(torch.optim.SGD):
        """Needs the whole matrix in plain tensors, and mixes them with the shards."""

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(torch.ones(parameter.shape))

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    model = torch.nn.Linear(4, 3)
    engine, _, _, _ = initialize(model=model, optimizer=Whole(model.parameters(), lr=0.1), config=config)
    messages = []
    for given in (model, engine):
        with pytest.raises(Problem) as caught:
            initialize(model=given, config=config)
        messages.append(str(caught.value))
    engine.backward(engine(torch.ones(2, 4)).sum())
    with pytest.raises(Problem) as caught:
        engine.step()
    return [*messages, str(caught.value)]


def test_states_in_blocks_of_8_bits_are_refused_before_the_first_step():
    [message] = run_ranks(1, with_8_bits)
    assert message == (
        "optimizer bitsandbytes.AdamW8bit steps over plain tensors alone, not over shards; use "
        "AdamW with bf16.bf16_optimizer_states and bf16.bf16_master_weights_and_grads for states of 2 bytes, or --engine deepspeed"
    )


def with_8_bits():
    """A stand-in by the library's name: the library itself is no part of the suite."""
    import torch
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem

    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    model = torch.nn.Linear(4, 3)
    with pytest.raises(Problem) as caught:
        initialize(model=model, optimizer=kind(model.parameters()), config={"train_micro_batch_size_per_gpu": 2})
    return str(caught.value)


def test_running_statistics_of_another_type_than_the_weights_name_the_key():
    [(message, finite)] = run_ranks(1, with_batch_norm)
    assert message == (
        "1 (BatchNorm1d) computes in bf16, but its running statistics are float32, which torch does not take on CPUs; set "
        "data_types.buffer_dtype to bf16"
    )
    assert finite


def with_batch_norm():
    import torch
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem
    from torch import nn

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    with pytest.raises(Problem) as caught:
        initialize(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), config=config)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))  # what the message says works
    engine, _, _, _ = initialize(model=model, config={**config, "data_types": {"buffer_dtype": "bf16"}})
    loss = engine(torch.randn(2, 4)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return str(caught.value), loss.isfinite().item()


def test_what_the_file_says_of_an_optimizer_that_the_script_brings_does_not_count():
    assert run_ranks(1, with_own_optimizer) == [True]


def with_own_optimizer():
    import torch
    from dsplan.runtime import initialize

    model = torch.nn.Linear(4, 3)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_batch_size": 1, "optimizer": {"type": "Lamb", "params": {"max_coeff": 1.0}}}
    return initialize(model=model, optimizer=own, config=config)[1] is own


def refusals():
    import torch
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem

    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
        "optimizer": {"type": "OneBitAdam"},
        "scheduler": {"type": "WarmupDecayLR"},
    }
    with pytest.raises(Problem) as caught:
        initialize(model=torch.nn.Linear(4, 3), config=config)
    return str(caught.value)


@pytest.mark.parametrize(("shared", "units"), [("up.weight", 2), ("up", 2), ("", 3)])
def test_what_two_blocks_share_stays_shared(shared, units):
    """A parameter, a module, or the whole block; its gradient is the sum of both uses, as in plain torch.

    The blocks that share a part stay in the root, so that of three blocks one is a unit of its own; a block that is
    there twice is one unit.
    """
    for engine_loss, plain_loss, num_units in run_ranks(2, shared_part, shared):
        assert engine_loss == pytest.approx(plain_loss, rel=1e-5)
        assert num_units == units


def shared_part(shared):
    import torch
    from dsplan.runtime import initialize
    from training import Net, batches, loss_of

    def make():
        torch.manual_seed(0)
        net = Net()
        if shared == "":
            net.blocks[2] = net.blocks[0]
        elif shared == "up":
            net.blocks[2].up = net.blocks[0].up
        else:
            net.blocks[2].up.weight = net.blocks[0].up.weight
        return net

    [tokens] = batches(1)
    engine, _, _, _ = initialize(
        model=make(),
        config={
            "train_batch_size": 16,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        },
    )
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        plain_loss = loss_of(plain(tokens), tokens)
        plain_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), plain_loss.item(), len(engine.units)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_gives_the_same_losses(recompute):
    from training import engine_losses

    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    plain = run_ranks(2, engine_losses, config, "sgd", 5)
    assert run_ranks(2, engine_losses, {**config, "dsplan": {"recompute": recompute}}, "sgd", 5) == plain


def test_an_evaluation_between_backward_and_step_does_not_freeze_what_it_gathered():
    for before, after in run_ranks(2, evaluate_between):
        assert after != before


def evaluate_between():
    import torch
    from dsplan.runtime import initialize
    from training import Net, batches

    engine, _, _, _ = initialize(
        model=Net(),
        config={
            "train_batch_size": 16,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        },
    )
    [tokens] = batches(1)
    engine.backward(engine(tokens).square().mean())
    with torch.no_grad():
        before = engine(tokens).square().mean().item()
    engine.step()
    with torch.no_grad():
        return before, engine(tokens).square().mean().item()
