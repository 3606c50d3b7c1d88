"""What one watched step is found to hold and to send, against counts by hand from the placement table."""

import pytest
from dsplan.schemas.ledger import Ledger
from ranks import run_ranks

WORLD = 2
BLOCKS = 3
PARAMS = 11 * 16 + 2 * 16 + BLOCKS * (2 * 16 + 16 * 48 + 48 + 48 * 16 + 16)
BUFFERS = 16
TENSORS = 3 + 6 * BLOCKS
"""Parameters of the model in helpers/training.py: the tied embedding counts once. All but the 11 rows split evenly."""
SHARD = PARAMS // WORLD + 8
"""On rank 0: 6 of the embedding's 11 rows, which is half a row of 16 more than half."""


def watched_step(zero_stage, accumulation, precision="fp32", world=None):
    """The second step's ledger, as JSON."""
    import torch
    from dsplan.runtime import initialize
    from dsplan.runtime.measuring.meter import Meter
    from training import Net, batches

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW"},
        precision: {"enabled": True},
    }
    engine, _, _, _ = initialize(model=Net(), config=config)
    meter = Meter(engine)
    engine.observers.append(meter)
    [tokens] = batches(1)
    for _ in range(2 * accumulation):
        engine.backward(engine(tokens[:2]).float().square().mean())
        engine.step()
    assert torch.UntypedStorage.resize_.__name__ == "resize_"
    return meter.ledger.to_json()


def rank0_ledger(*args):
    return Ledger.from_json(run_ranks(WORLD, watched_step, *args)[0])


@pytest.mark.parametrize(
    ("accumulation", "zero_stage", "all_gathers", "reduce_scatters", "all_reduces"),
    [
        (1, 0, 0, 0, 4), (1, 1, 4, 4, 0), (1, 2, 4, 4, 0), (1, 3, 7, 4, 0),
        (4, 0, 0, 0, 4), (4, 1, 4, 4, 0), (4, 2, 4, 16, 0), (4, 3, 25, 16, 0),
    ],
)  # fmt: skip
def test_collectives_follow_the_placement_table(accumulation, zero_stage, all_gathers, reduce_scatters, all_reduces):
    """3 blocks and the root. Stage 3 gathers each block in both directions of each micro-batch, the root once; gradients
    leave their rank once a step at stages 0 and 1, in each micro-batch at 2 and 3."""
    kinds = {collective.kind: collective.count for collective in rank0_ledger(zero_stage, accumulation).collectives}
    assert kinds.pop("scalar_all_reduce", 0) == (zero_stage > 0)  # the gradient norm
    expected = {"all_gather": all_gathers, "reduce_scatter": reduce_scatters, "all_reduce": all_reduces}
    assert kinds == {kind: count for kind, count in expected.items() if count}


def test_payloads_are_those_of_the_zero_paper():
    """Of each full tensor: gradients once, and parameters twice at stage 3 but for the root's. 12 rows, with padding."""
    padded = PARAMS + 16
    root = 12 * 16 + 2 * 16
    payloads = {item.kind: item.payload_bytes for item in rank0_ledger(3, 1).collectives}
    assert payloads["reduce_scatter"] == 4 * padded
    assert payloads["all_gather"] == 4 * (2 * padded - root)


@pytest.mark.parametrize(
    ("zero_stage", "params", "states"),
    [(0, PARAMS, PARAMS), (1, SHARD, SHARD), (2, SHARD, SHARD), (3, SHARD, SHARD)],
)
def test_states_are_counted_to_the_byte(zero_stage, params, states):
    """fp32 masters, two Adam states in fp32 and one step count per parameter; nothing else stays between steps."""
    ledger = rank0_ledger(zero_stage, 1)
    step = next(moment for moment in ledger.moments if moment.phase == "step")
    buffers = 4 * BUFFERS
    assert step.category_bytes("params") == 4 * params + buffers
    assert step.category_bytes("optimizer") == 2 * 4 * states + 4 * TENSORS
    assert step.category_bytes("grads") == 4 * params
    assert step.category_bytes("gathered_params") == 0
    assert ledger.resident_bytes == 4 * params + buffers + 2 * 4 * states + 4 * TENSORS


def test_bf16_gathers_half_the_bytes_and_keeps_masters_in_fp32():
    """Stage 2 holds all parameters gathered at its peak, in the compute dtype; the shards stay fp32."""
    ledger = rank0_ledger(2, 1, "bf16")
    forward = next(moment for moment in ledger.moments if moment.phase == "forward")
    assert forward.category_bytes("params") == 4 * SHARD + 4 * BUFFERS  # as they come
    assert 2 * PARAMS <= forward.category_bytes("gathered_params") <= 2 * (2 * PARAMS + 16)


def slow_backend_step(zero_stage):
    """watched_step, where a thread lets go of the gradients only some time after the engine does, as gloo's may."""
    import threading

    import torch
    from torch.distributed.tensor import DTensor

    zero_grad = torch.optim.AdamW.zero_grad

    def held_a_moment(optimizer, *args, **kwargs):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held = [(grad._local_tensor if isinstance(grad, DTensor) else grad).untyped_storage() for grad in grads]
        assert held
        threading.Timer(0.3, held.clear).start()
        return zero_grad(optimizer, *args, **kwargs)

    torch.optim.AdamW.zero_grad = held_a_moment
    try:
        return watched_step(zero_stage, 1)
    finally:
        torch.optim.AdamW.zero_grad = zero_grad


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_what_a_backends_thread_still_holds_for_a_moment_is_not_resident(zero_stage):
    slow = run_ranks(WORLD, slow_backend_step, zero_stage)[0]
    assert slow["resident_bytes"] == run_ranks(WORLD, watched_step, zero_stage, 1)[0]["resident_bytes"]
