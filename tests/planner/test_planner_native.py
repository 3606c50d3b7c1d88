"""With --engine native every key that the bundled runtime does not carry out is spoken of: all paths of the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from dsplan.planner.auditing.linting import lint_text
from dsplan.schemas.known_keys import Node, resolved, schema
from dsplan.schemas.positions import escape

ASKING: dict[str, Any] = {
    "/zero_optimization/offload_param": {"device": "cpu"},
    "/zero_optimization/offload_optimizer": {"device": "cpu"},
    "/tensor_parallel": {"autotp_size": 2},
    "/compile": {"deepcompile": True},
    "/data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 9}}},
}
"""Blocks that ask for nothing unless this stands in them."""

TYPES = {"/optimizer": "Lamb", "/scheduler": "OneCycle"}
"""Types that the runtime does not carry out, for arguments that only such types take."""

CARRIED_OUT = {
    # what is trained. Source: runtime/initializing.py, runtime/engine.py
    "/train_batch_size", "/train_micro_batch_size_per_gpu", "/gradient_accumulation_steps", "/gradient_clipping",
    "/communication_data_type", "/dataloader_drop_last", "/zero_optimization/stage",
    # what DeepSpeed must be allowed, the runtime does anyway
    "/zero_allow_untested_optimizer", "/zero_force_ds_cpu_optimizer",
    "/zero_optimization/stage3_gather_16bit_weights_on_model_save",
    "/zero_optimization/stage3_gather_fp16_weights_on_model_save",
    "/zero_optimization/gather_16bit_weights_on_model_save",
    # runtime/optimizing/loss_scale.py, runtime/sharding/stages.py (cast_forward_inputs)
    "/fp16/enabled", "/fp16/auto_cast", "/fp16/loss_scale", "/fp16/initial_scale_power", "/fp16/loss_scale_window",
    "/fp16/hysteresis", "/fp16/consecutive_hysteresis", "/fp16/min_loss_scale", "/bf16/enabled",
    "/bf16/check_grad_overflow", "/bfloat16/enabled", "/bfloat16/check_grad_overflow",
    *(f"/{block}/{name}" for block in ("bf16", "bfloat16") for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")),
    # runtime/sharding/precision.py
    "/torch_autocast/enabled", "/data_types/grad_accum_dtype", "/data_types/param_dtype", "/data_types/buffer_dtype",
    # runtime/sharding/offloading.py
    "/zero_optimization/offload_optimizer/device", "/zero_optimization/offload_optimizer/pin_memory",
    "/zero_optimization/cpu_offload", "/zero_optimization/cpu_offload_param",
    # runtime/optimizing: building.py, adam.py, lamb.py, muon.py, schedules.py
    *(f"/optimizer/params/{name}" for name in ("bias_correction", "ns_method", "muon_lr", "adam_lr")),
    *(f"/optimizer/params/{name}" for name in ("max_coeff", "min_coeff", "eps_inside_sqrt")),
    *(f"/scheduler/params/lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")),
    *(f"/scheduler/params/cycle_{name}" for name in ("min_lr", "max_lr", "momentum", "min_mom", "max_mom")),
    *(f"/scheduler/params/cycle_{part}_{name}" for part in ("first", "second") for name in ("step_size", "stair_count")),
    *(f"/scheduler/params/decay_{name}" for name in ("lr_rate", "step_size", "mom_rate")),
    "/optimizer/type", "/optimizer/params/lr", "/optimizer/params/betas", "/optimizer/params/eps",
    "/optimizer/params/weight_decay", "/optimizer/params/torch_adam", "/optimizer/params/adam_w_mode",
    "/optimizer/params/amsgrad", "/optimizer/params/foreach", "/optimizer/params/momentum", "/scheduler/type",
    "/scheduler/params/warmup_min_lr", "/scheduler/params/warmup_max_lr", "/scheduler/params/warmup_num_steps",
    "/scheduler/params/warmup_type", "/scheduler/params/total_num_steps", "/scheduler/params/warmup_min_ratio",
    "/scheduler/params/cos_min_ratio", "/scheduler/params/last_batch_iteration",
    # how FSDP2 goes about it whatever is asked
    "/zero_optimization/overlap_comm", "/bf16/immediate_grad_update", "/bfloat16/immediate_grad_update",
    # runtime/measuring/attaching.py
    "/steps_per_print", "/dump_state", "/wall_clock_breakdown", "/memory_breakdown",
    *(f"/flops_profiler/{name}" for name in ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file")),
    *(f"/comms_logger/{name}" for name in ("enabled", "prof_all", "prof_ops", "verbose", "debug")),
    *(f"/{block}/{name}" for block in ("tensorboard", "csv_monitor") for name in ("enabled", "output_path", "job_name")),
    *(f"/wandb/{name}" for name in ("enabled", "group", "team", "project")),
    *(f"/comet/{name}" for name in ("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name")),
    *(f"/comet/{name}" for name in ("experiment_key", "online", "mode")),
    # runtime/checkpointing.py
    *(f"/activation_checkpointing/{name}" for name in ("cpu_checkpointing", "synchronize_checkpoint_boundary", "profile")),
    # runtime/checkpoints, runtime/data.py
    "/checkpoint/tag_validation", "/checkpoint/writer/decoupled", "/dsplan/checkpoint/keep_last", "/dsplan/checkpoint/async",
    "/dsplan/dataloader_workers",
    # our own
    "/dsplan/ignore", "/dsplan/recompute", "/$schema", "/dsplan/meter_steps", "/dsplan/stop_on_nan_loss",
    "/dsplan/halve_gradients_at_scale_growth",
    *(f"/dsplan/compile/{name}" for name in ("backend", "mode", "fullgraph", "dynamic", "options")),
}  # fmt: skip


def _leaves(node: Node, pointer: str = "") -> Iterator[tuple[str, Node]]:
    for name, member in node.get("properties", {}).items():
        member, inner = resolved(member), f"{pointer}/{escape(name)}"
        within = list(_leaves(member, inner))
        if isinstance(member.get("additionalProperties"), dict):
            within += _leaves(resolved(member["additionalProperties"]), f"{inner}/any")
        yield from within or [(inner, member)]


LEAVES = dict(_leaves(schema()))


def _value(node: Node) -> Any:
    """A value that is not the default."""
    types = node.get("type", "object")
    types = [types] if isinstance(types, str) else types
    if "boolean" in types:
        return node.get("default") is not True
    if "integer" in types or "number" in types:
        return 2 if node.get("enum") or node.get("maximum", 9) < 9 else 7
    if "string" in types:
        return next((word for word in node.get("enum", ()) if word not in (node.get("default"), None)), "word")
    return ["word"] if "array" in types else {"enabled": True}


def _config(pointer: str, value: Any) -> dict[str, Any]:
    """The value at its pointer, in blocks that are switched on."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    here, block, node = "", config, schema()
    *blocks, last = pointer.split("/")[1:]
    for name in blocks:
        here = f"{here}/{name}"
        node = resolved(node.get("properties", {}).get(name) or node.get("additionalProperties") or {})
        block[name] = json.loads(json.dumps(ASKING.get(here, {}))) if name not in block else block[name]
        block = block[name]
        if "enabled" in node.get("properties", {}) and here not in ("/fp16", "/bf16", "/bfloat16"):
            block["enabled"] = True
        if here in TYPES and pointer not in CARRIED_OUT:
            block["type"] = TYPES[here]
    block[last] = value
    return config


def _spoken_of(pointer: str, config: dict[str, Any]) -> bool:
    findings = lint_text(json.dumps(config), reader="deepspeed", engine="native").findings
    told = [found.pointer for found in findings if found.rule in ("DSP801", "DSP010")]
    blocks = ("/optimizer", "/scheduler")
    typed = any(pointer.startswith(block) and f"{block}/type" in told for block in blocks)
    return typed or any(pointer == where or pointer.startswith(f"{where}/") for where in told)


def test_the_list_of_what_is_carried_out_holds_keys_of_the_schema() -> None:
    assert CARRIED_OUT - LEAVES.keys() == set()


@pytest.mark.parametrize("pointer", [pointer for pointer in LEAVES if pointer not in CARRIED_OUT])
def test_what_is_not_carried_out_is_spoken_of(pointer: str) -> None:
    assert _spoken_of(pointer, _config(pointer, _value(LEAVES[pointer])))


@pytest.mark.parametrize("pointer", sorted(CARRIED_OUT - {"/optimizer/type", "/scheduler/type", "/dsplan/recompute"}))
def test_what_is_carried_out_needs_no_word(pointer: str) -> None:
    assert not _spoken_of(pointer, _config(pointer, _value(LEAVES[pointer])))


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/optimizer/type", "AdamW"),
        ("/scheduler/type", "WarmupLR"),
        ("/dsplan/recompute", "full"),
        ("/managed_gradient_accumulation", True),
        ("/zero_optimization/contiguous_gradients", True),
        ("/zero_optimization/overlap_comm", False),
    ],
)
def test_what_happens_anyway_needs_no_word(pointer: str, value: Any) -> None:
    assert not _spoken_of(pointer, _config(pointer, value))
