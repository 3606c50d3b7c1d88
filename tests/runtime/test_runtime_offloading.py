"""Offload changes where bytes are, and no number."""

import pytest
from ranks import run_ranks

CPU = {"device": "cpu"}


def config_of(zero, **more):
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
        **more,
    }


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        ({"stage": 0, "offload_optimizer": CPU}, "bf16"),
        ({"stage": 1, "offload_optimizer": CPU}, "fp32"),
        ({"stage": 2, "cpu_offload": True}, "bf16"),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.4}}, "bf16"),
        ({"stage": 3, "offload_param": CPU, "offload_optimizer": {**CPU, "pin_memory": True}}, "fp32"),
    ],
)
def test_losses_are_those_without_offload_to_the_bit(zero, precision):
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    without = {"stage": zero["stage"]}
    assert run_ranks(2, trained, config_of(zero, **more)) == run_ranks(2, trained, config_of(without, **more))


def trained(config):
    from training import engine_losses

    return engine_losses(config, None, 3)
