"""DSP82x and DSP83x: monitors, the log of collectives, and blocks that are off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import INFO, WARNING, Hit, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.planner.rules.precision import on
from dsplan.planner.rules.reading import block
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = "/comms_logger"
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""What a monitor imports. Source: deepspeed/monitor/{tensorboard,wandb,comet}.py."""
OFF_BY_DEFAULT = (
    "/tensorboard", "/wandb", "/csv_monitor", "/comet", LOGGER, "/flops_profiler", "/autotuning",
    "/hybrid_engine", "/expert_parallel", "/torch_autocast", "/data_efficiency/data_sampling/curriculum_learning",
    "/data_efficiency/data_sampling/dynamic_batching", "/data_efficiency/data_routing/random_ltd",
)  # fmt: skip
"""Blocks that do nothing unless their own enabled is true."""
OPERATIONS = (
    "broadcast", "broadcast_object_list", "all_gather", "all_gather_object", "reduce_scatter_tensor",
    "all_gather_into_tensor", "all_to_all_single", "all_to_all", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    "gather", "scatter", "barrier", "monitored_barrier", "reduce", "reduce_scatter", "all_reduce", "inference_all_reduce",
    "all_reduce_coalesced",
)  # fmt: skip
"""What can be logged. Source: deepspeed/comm/comm.py of 0.19.8, the functions under @timed_op."""


@rule("DSP821", "block-not-enabled", severity=WARNING, keys=list(OFF_BY_DEFAULT))
def block_not_enabled(document: Document) -> Iterator[Hit]:
    """A block with settings should say whether it is enabled.

    Why:    These blocks are off unless enabled is true, and DeepSpeed does not say that their settings go unused.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "csv_monitor": {"output_path": "logs"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "csv_monitor": {"enabled": true, "output_path": "logs"}}
    Fix:    none
    Source: deepspeed/monitor/config.py; deepspeed/comm/config.py; deepspeed/profiling/config.py
    """
    for pointer in OFF_BY_DEFAULT:
        settings = block(document, pointer)
        known = (lookup(pointer) or {})["properties"]
        idle = [name for name in settings if name in known]
        if idle and len(idle) == len(settings) and "enabled" not in settings:
            yield Hit(
                pointer,
                f"{title(pointer)} has {idle[0]}{f' and {len(idle) - 1} more' if len(idle) > 1 else ''} but no enabled, "
                "so it is off",
                remedy='add "enabled": true, or remove the block',
                on_key=True,
            )


@rule("DSP822", "monitor-needs-package", severity=INFO, keys=[f"/{name}" for name in PACKAGES])
def monitor_needs_package(document: Document) -> Iterator[Hit]:
    """A monitor needs the package that it writes with.

    Why:    Where it is not installed, DeepSpeed raises a ModuleNotFoundError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "wandb": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "csv_monitor": {"enabled": true}}
    Fix:    none
    Source: deepspeed/monitor/utils.py
    """
    for name, package in PACKAGES.items():
        if on(document, f"/{name}/enabled"):
            yield Hit(f"/{name}/enabled", f"{name} needs the package {package}; without it the engine does not start")


@rule("DSP823", "secret-in-file", severity=WARNING, keys=["/comet/api_key"])
def secret_in_file(document: Document) -> Iterator[Hit]:
    """comet.api_key should not stand in a file.

    Why:    Configurations are shared, committed and printed to logs. Comet reads COMET_API_KEY too.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "comet": {"enabled": true, "api_key": "0123456789abcdef"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "comet": {"enabled": false}}
    Fix:    none
    Source: deepspeed/monitor/config.py, CometConfig; deepspeed/runtime/config.py, print_user_config
    """
    key = document.at("/comet/api_key")
    if isinstance(key, str) and key not in ("", "auto") and "{" not in document.raw("/comet/api_key"):
        yield Hit(
            "/comet/api_key",
            "comet.api_key holds a secret, and DeepSpeed prints the file to its log",
            remedy="remove it, and set COMET_API_KEY",
        )


@rule("DSP831", "nothing-to-log", severity=WARNING, keys=[f"{LOGGER}/prof_all", f"{LOGGER}/prof_ops"])
def nothing_to_log(document: Document) -> Iterator[Hit]:
    """comms_logger with prof_all false needs prof_ops.

    Why:    It then logs only the operations of prof_ops, and there are none. With prof_all true, the default, prof_ops in
            turn has no effect.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "comms_logger": {"enabled": true, "prof_all": false}}
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "comms_logger": {"enabled": true, "prof_ops": ["all_reduce"]}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["all_reduce"]}}
    Fix:    none
    Source: deepspeed/comm/comm.py, timed_op
    """
    if not on(document, f"{LOGGER}/enabled"):
        return
    operations = document.at(f"{LOGGER}/prof_ops")
    everything = document.at(f"{LOGGER}/prof_all", True) == "auto" or on(document, f"{LOGGER}/prof_all")
    if not document.has(f"{LOGGER}/prof_all") or everything:
        if isinstance(operations, list) and operations:
            default = "" if document.has(f"{LOGGER}/prof_all") else ", its default"
            yield Hit(
                f"{LOGGER}/prof_ops",
                f"comms_logger.prof_ops has no effect where prof_all is true{default}",
                remedy="set prof_all to false",
                on_key=True,
            )
    elif not operations:
        yield Hit(f"{LOGGER}/prof_all", "comms_logger logs nothing: prof_all is false and prof_ops names no operation")


@rule("DSP832", "unknown-operation", severity=WARNING, keys=[f"{LOGGER}/prof_ops"])
def unknown_operation(document: Document) -> Iterator[Hit]:
    """prof_ops should name functions of deepspeed.comm.

    Why:    Another name is never met, and nothing says so.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["allreduce"]}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["all_reduce"]}}
    Fix:    none
    Source: deepspeed/comm/comm.py
    """
    operations = document.at(f"{LOGGER}/prof_ops")
    for index, name in enumerate(operations if isinstance(operations, list) else ()):
        if isinstance(name, str) and name not in OPERATIONS:
            meant = nearest(name, OPERATIONS)
            yield Hit(
                f"{LOGGER}/prof_ops/{index}",
                f"{shape(name)} is no operation that DeepSpeed logs" + (f'; did you mean "{meant}"?' if meant else ""),
            )
