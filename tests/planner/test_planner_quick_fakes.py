"""Against torch's own FakeTensorMode, whose words QuickFakes shortens."""

import torch
from dsplan.planner.tracing.quick_fakes import QuickFakes
from torch._subclasses.fake_tensor import FakeTensorMode


def worked() -> list[object]:
    """What operations give whose arguments differ in one respect each, twice: the second answer comes out of the cache."""
    told: list[object] = []
    square, other = torch.ones(4, 4), torch.ones(4, 5)
    for _ in range(2):
        for tensor in (square, other, square.half(), square.t(), other[:, 1:], square.int(), square[:1].expand(4, 4)):
            made = (
                *(tensor + number for number in (1, 1.0, True)),
                tensor.sum(),
                tensor.sum(0),
                tensor.sum((0,), keepdim=True),
                torch.cat([tensor, tensor]),
                *tensor.split([1, 3]),
                tensor.to(torch.float64),
                torch.empty_like(tensor, memory_format=torch.contiguous_format),
                tensor.clone().requires_grad_(tensor.is_floating_point()) * 2,
                tensor.new_zeros(3),
            )
            told += [(one.shape, one.stride(), one.dtype, one.device, one.requires_grad) for one in made]
            told += [(one.storage_offset(), one.untyped_storage().nbytes()) for one in made]
    return told


def test_operations_give_what_they_give_under_torchs_own_mode():
    with FakeTensorMode():
        own = worked()
    with QuickFakes():
        assert worked() == own


def test_two_devices_and_complex_views_are_told_apart():
    with QuickFakes():
        here, there = torch.ones(2, device="cpu"), torch.ones(2, device="meta")
        assert [(tensor * 2).device.type for tensor in (here, there, here, there)] == ["cpu", "meta", "cpu", "meta"]
        number = torch.ones(2, dtype=torch.complex64)
        assert [one[:1].is_conj() for one in (number, number.conj(), number)] == [False, True, False]
