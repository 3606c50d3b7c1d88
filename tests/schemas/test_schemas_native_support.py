"""What the native engine says of a config before it starts."""

import pytest
from dsplan.schemas.native_support import reasons


def levels(config):
    return {pointer: level for pointer, level, _ in reasons(config)}


def test_what_is_carried_out_needs_no_word():
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "communication_data_type": "fp32",
        "dsplan": {"recompute": "full"},
    }
    assert reasons(config) == []


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": {}}},
        {"flops_profiler": {"enabled": False, "profile_step": 3}},
        {"wall_clock_breakdown": False, "tensor_parallel": {"autotp_size": 1}},
        {"zero_optimization": {"reduce_bucket_size": "auto", "zero_hpz_partition_size": 1}},
        {"a_key_that_nobody_knows": {"enabled": True}},
    ],
)
def test_what_is_switched_off_or_unknown_needs_no_word(config):
    assert reasons(config) == []


@pytest.mark.parametrize(
    ("config", "pointer"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "/zero_optimization/offload_optimizer/device",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "/zero_optimization/offload_optimizer/ratio",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "/zero_optimization/offload_optimizer/super_offload",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "/zero_optimization/zero_quantized_weights"),
        ({"tensor_parallel": {"autotp_size": 2}}, "/tensor_parallel"),
        ({"optimizer": {"type": "OneBitAdam"}}, "/optimizer/type"),
        ({"scheduler": {"type": "LambdaLR"}}, "/scheduler/type"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "/bf16/bf16_master_weights_and_grads"),
        ({"compile": {"deepcompile": True}}, "/compile"),
        ({"torch_autocast": {"enabled": True}}, "/torch_autocast/dtype"),
        ({"data_types": {"param_dtype": "bf16"}}, "/data_types/param_dtype"),
        ({"data_types": {"buffer_dtype": "int8"}}, "/data_types/buffer_dtype"),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, "/data_types/keep_in_fp32_modules"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "/fp16/fp16_master_weights_and_grads"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "/bf16/bf16_optimizer_states"),
        ({"sparse_gradients": True}, "/sparse_gradients"),
    ],
)
def test_what_would_train_or_hold_something_else_is_an_error(config, pointer):
    assert levels(config) == {pointer: "error"}


def test_what_only_tunes_deepspeeds_own_parts_is_a_warning():
    config = {
        "zero_optimization": {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 5},
        "disable_allgather": True,
    }
    assert set(levels(config).values()) == {"warning"}
    assert len(reasons(config)) == 3


def test_reasons_come_in_the_order_of_the_file():
    config = {"disable_allgather": True, "zero_optimization": {"sub_group_size": 1}, "aio": {"block_size": 5}}
    assert [pointer for pointer, _, _ in reasons(config)] == [
        "/disable_allgather",
        "/zero_optimization/sub_group_size",
        "/aio",
    ]
