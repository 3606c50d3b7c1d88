"""What a DeepSpeed JSON means. Expected values: DeepSpeed 0.19.8's own constants and batch arithmetic."""

import pytest
from dsplan.schemas.config import ConfigError, optimizer_spec, read_config


def test_defaults_are_those_of_0_19_8() -> None:
    config = read_config({})
    assert (config.zero_stage, config.precision, config.gradient_clipping) == (0, "fp32", 1.0)
    assert config.knobs.reduce_bucket_size == 5 * 10**8
    assert config.knobs.prefetch_bucket_size == 5 * 10**7
    assert config.knobs.param_persistence_threshold == 10**5
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.hysteresis) == (16, 1000, 2)


def test_all_reasons_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read_config({"train_batch_size": "8", "fp16": True, "zero_optimization": {"stage": 4}}, "ds.json")
    pointers = {pointer for pointer, _ in refused.value.reasons}
    assert pointers == {"/train_batch_size", "/fp16", "/zero_optimization/stage"}
    assert str(refused.value).startswith("ds.json: ")


def test_both_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="only one precision"):
        read_config({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


def test_auto_is_kept_for_batches_and_dropped_in_strict_blocks() -> None:
    config = read_config(
        {"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}}
    )
    assert config.train_batch_size == "auto"
    assert (config.zero_stage, config.precision) == (0, "fp32")
    assert set(config.unfilled) == {"/train_batch_size", "/zero_optimization/stage", "/bf16/enabled"}


def test_bfloat16_counts_only_without_bf16() -> None:
    assert read_config({"bfloat16": {"enabled": True}}).precision == "bf16"
    assert read_config({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}).precision == "fp32"


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "param"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "none"),  # DeepSpeed ignores it below stage 3
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "none"),
    ],
)
def test_offload_is_what_deepspeed_really_does(zero: dict[str, object], offload: str) -> None:
    assert read_config({"zero_optimization": zero}).offload == offload


def test_sgd_keeps_a_state_only_with_momentum() -> None:
    plain = optimizer_spec(read_config({"optimizer": {"type": "SGD", "params": {"lr": 1}}}))
    heavy = optimizer_spec(read_config({"optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}}))
    assert plain is not None and heavy is not None
    assert (plain.states, heavy.states) == (0, 1)
