"""What optimizers keep and make, against torch's own step on real tensors; 8-bit states by hand."""

import pytest
import torch
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.schemas.optimizer import (
    OPTIMIZERS,
    OptimizerSpec,
    optimizer_named,
    product,
    state_bytes,
    step_temporary_elements,
)

SHAPES = {
    "equal": [(64, 64)] * 4,
    "one": [(64, 64)],
    "falling": [(64, 64), (32, 64), (16, 64)],
    "rising": [(16, 64), (32, 64), (64, 64)],
}
MADE = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
}
SMALL = 20
"""Numbers of rows and scalars: what a step makes of them is left out."""


def step(make, shapes):
    """(bytes of states, bytes that its second step makes at most)."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = make(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    peak = 0

    def grew():
        nonlocal peak
        peak = max(peak, tracker.total_bytes)

    tracker = StorageTracker(grew)
    states = [value for param in params for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    for tensor in [*params, *(param.grad for param in params), *states]:
        tracker.add(tensor.detach(), "there")
    before = tracker.total_bytes
    with tracker:
        optimizer.step()
    return sum(state.nbytes for state in states), max(0, peak - before)


CASES = [(name, kernel, {}) for name in MADE for kernel in ("foreach", "for-loop")]
CASES += [(name, "fused", {}) for name in ("adam", "adamw", "sgd", "adagrad")]
CASES += [("sgd", kernel, {"momentum": 0.9}) for kernel in ("foreach", "for-loop", "fused")]
CASES += [(name, kernel, {"weight_decay": 0.1}) for name in ("sgd", "adam") for kernel in ("foreach", "for-loop")]
CASES += [("rmsprop", "for-loop", {"momentum": 0.9}), ("adam", "for-loop", {"amsgrad": True})]


@pytest.mark.parametrize(("name", "kernel", "options"), CASES)
def test_states_and_temporaries_are_those_of_torch(name, kernel, options):
    spec = OptimizerSpec(name=name, kernel=kernel, **{key: bool(value) for key, value in options.items()})
    flags = {"fused": True} if kernel == "fused" else {"foreach": kernel == "foreach"}
    for shapes in SHAPES.values():
        states, temporary = step(lambda params: MADE[name](params, lr=1e-3, **flags, **options), shapes)
        few = 4 * len(shapes) if name == "nadam" else 0  # its product of momenta, a number a tensor
        assert state_bytes(spec, shapes) == states - few
        said = 4 * step_temporary_elements(spec, [product(shape) for shape in shapes])
        assert said == pytest.approx(temporary, abs=4 * 64 * SMALL if name == "adafactor" else 64)


def test_muon_keeps_one_state_of_a_matrix_and_two_of_the_rest():
    shapes = [(64, 64), (64, 64)]
    states, temporary = step(lambda params: torch.optim.Muon(params), shapes)
    spec = OptimizerSpec(name="muon")
    assert state_bytes(spec, shapes) == states
    assert 4 * step_temporary_elements(spec, [64 * 64] * 2) == pytest.approx(temporary, rel=0.01)
    assert state_bytes(spec, [(10,)]) == 4 * 2 * 10 + 4


def test_8_bit_states_are_a_byte_and_a_maximum_per_256():
    """bitsandbytes: from 4096 elements on; smaller tensors stay fp32."""
    spec = OptimizerSpec(name="adamw", state_dtype="8bit")
    assert state_bytes(spec, [(4096,)]) == 2 * (4096 + 4 * 16) + 4
    assert state_bytes(spec, [(4097,)]) == 2 * (4097 + 4 * 17) + 4
    assert state_bytes(spec, [(4095,)]) == 2 * 4 * 4095 + 4
    assert state_bytes(OptimizerSpec(name="lion", state_dtype="8bit"), [(64, 64)]) == 4096 + 64


def test_bf16_states_are_half():
    assert state_bytes(OptimizerSpec(state_dtype="bf16"), [(100,)]) == 2 * 2 * 100 + 4


def test_a_rank_without_elements_keeps_nothing():
    for name in OPTIMIZERS:
        assert state_bytes(OptimizerSpec(name=name), [(0,), (0, 5)]) == 0


@pytest.mark.parametrize(
    ("written", "name", "dtype"),
    [
        ("AdamW", "adamw", "fp32"),
        ("FusedAdam", "adam", "fp32"),
        ("DeepSpeedCPUAdam", "adam", "fp32"),
        ("DeepSpeedCPUAdagrad", "adagrad", "fp32"),
        ("FusedLamb", "lamb", "fp32"),
        ("MuAdamW", "adamw", "fp32"),
        ("AdamW8bit", "adamw", "8bit"),
        ("PagedAdamW8bit", "adamw", "8bit"),
        ("paged_adamw_8bit", "adamw", "8bit"),
        ("adamw_bnb_8bit", "adamw", "8bit"),
        ("paged_lion_32bit", "lion", "fp32"),
        ("adamw_torch_fused", "adamw", "fp32"),
        ("adamw-bf16", "adamw", "bf16"),
        ("adamw-8bit", "adamw", "8bit"),
        ("Muon", "muon", "fp32"),
        ("adafactor", "adafactor", "fp32"),
    ],
)
def test_names_of_torch_deepspeed_bitsandbytes_and_hugging_face(written, name, dtype):
    spec = optimizer_named(written)
    assert spec is not None and (spec.name, spec.state_dtype) == (name, dtype)


def test_labels_are_names():
    for spec in (
        OptimizerSpec(),
        OptimizerSpec(name="sgd", momentum=True),
        OptimizerSpec(name="lion", state_dtype="8bit"),
    ):
        assert optimizer_named(spec.label) == spec
    for name in ("shampoo", "adamw_anyprecision", "", "momentum"):
        assert optimizer_named(name) is None
