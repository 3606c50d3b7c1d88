"""The engine runs on fake tensors in a fake group, and is then found to hold and send what it does on two gloo ranks."""

import pytest
from ranks import run_ranks
from test_runtime_watching import watched_step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_fake_step_equals_a_real_one_to_the_byte(zero_stage, precision):
    [fake] = run_ranks(1, fake_step, zero_stage, 2, precision)
    real = run_ranks(2, watched_step, zero_stage, 2, precision)[0]
    assert _bytes(fake) == _bytes(real)
    assert fake["collectives"] == real["collectives"]
    assert fake["resident_bytes"] == real["resident_bytes"]


def _bytes(ledger):
    return {moment["phase"]: sum(item["bytes"] for item in moment["items"]) for moment in ledger["moments"]}


def fake_step(zero_stage, accumulation, precision):
    """watched_step as rank 0 of two, of which the other does not exist."""
    import torch
    import torch.distributed as dist
    from dsplan.runtime.measuring import watching
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Answering(watching.CountingTracker):
        """Gives a normal number where the engine asks a fake tensor for its value."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1.0
            return super().__torch_dispatch__(func, types, args, kwargs)

    plain, watching.CountingTracker = watching.CountingTracker, Answering
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return watched_step(zero_stage, accumulation, precision)
    finally:
        watching.CountingTracker = plain
