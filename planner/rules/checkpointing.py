"""DSP84x and DSP85x: checkpoints of the training, checkpoints of activations, and what reads from NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.reading import block, truthy
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

STATES, WRITER = "/datastates_ckpt", "/checkpoint/writer"
ACTIVATIONS = "/activation_checkpointing"
OFFLOADS = ("/zero_optimization/offload_param/device", "/zero_optimization/offload_optimizer/device")


@rule("DSP841", "datastates-switched-on", severity=ERROR, keys=[STATES])
def datastates_switched_on(document: Document) -> Iterator[Hit]:
    """datastates_ckpt is on by anything but false: by null and {} too.

    Why:    Where the package datastates is not installed, DeepSpeed raises a RuntimeError when the engine starts. Error for
            null and {}, which look like off; info for what is meant.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "datastates_ckpt": null}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "datastates_ckpt": false}
    Fix:    none
    Source: deepspeed/datastates/config.py; deepspeed/runtime/checkpoint_engine/utils.py
    """
    value = document.at(STATES, False)
    if value is None or (value is not False and value != "auto"):
        yield Hit(
            STATES,
            f"datastates_ckpt {shape(value)} switches the DataStates engine on; without the package datastates it fails",
            remedy="write false, or remove it" if not value else "",
            severity=INFO if value else ERROR,
        )


@rule("DSP842", "fast-writer-on", severity=INFO, keys=[WRITER])
def fast_writer_on(document: Document) -> Iterator[Hit]:
    """checkpoint.writer changes how checkpoints are written, {} too.

    Why:    It replaces torch.save by DeepSpeed's fast writer. A plain run of one rank has failed with it in 0.19.8
            (AttributeError when the engine starts).
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "checkpoint": {"writer": {}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "checkpoint": {"tag_validation": "Fail"}}
    Fix:    none
    Source: deepspeed/runtime/checkpoint_engine/utils.py, create_checkpoint_engine
    """
    if isinstance(document.at(WRITER), dict):
        yield Hit(
            WRITER,
            "checkpoint.writer switches the fast writer on, which has failed in plain data-parallel runs",
            remedy="try it before a long run, or remove it",
            on_key=True,
        )


@rule("DSP843", "contiguous-checkpoints-refused", severity=WARNING, keys=[f"{ACTIVATIONS}/number_checkpoints"])
def contiguous_checkpoints_refused(document: Document) -> Iterator[Hit]:
    """contiguous_memory_optimization needs partition_activations and number_checkpoints.

    Why:    deepspeed.checkpointing.configure asserts both. A warning, since the script may pass them itself, and without
            that call the block is not read.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "activation_checkpointing": {"contiguous_memory_optimization": true, "number_checkpoints": 24}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "activation_checkpointing": {"contiguous_memory_optimization": false}}
    Fix:    none
    Source: deepspeed/runtime/activation_checkpointing/checkpointing.py, configure
    """
    pointer = f"{ACTIVATIONS}/contiguous_memory_optimization"
    if not truthy(document, pointer):
        return
    missing = [
        name for name in ("partition_activations", "number_checkpoints") if not document.at(f"{ACTIVATIONS}/{name}")
    ]
    if missing:
        yield Hit(
            pointer,
            f"contiguous_memory_optimization needs {' and '.join(missing)}: configure() refuses it without",
            remedy=f"set {missing[0]}, or false here",
        )


@rule("DSP851", "aio-without-nvme", severity=INFO, keys=["/aio"])
def aio_without_nvme(document: Document) -> Iterator[Hit]:
    """aio is read only where something is offloaded to NVMe, or by the fast writer.

    Why:    Without a device nvme its sizes have no effect.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "aio": {"block_size": 1048576}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, "aio": {"block_size": 1048576}}
    Fix:    none
    Source: deepspeed/runtime/swap_tensor/aio_config.py; deepspeed/runtime/zero/stage3.py
    """
    used = any(document.at(device) in ("nvme", "auto") for device in OFFLOADS) or document.has(WRITER)
    if block(document, "/aio") and not used:
        yield Hit("/aio", "aio has no effect: nothing is offloaded to NVMe", remedy="remove it", on_key=True)


@rule("DSP852", "aio-out-of-range", severity=WARNING, keys=["/aio/block_size", "/aio/queue_depth"])
def aio_out_of_range(document: Document) -> Iterator[Hit]:
    """The sizes of aio should be above 0.

    Why:    DeepSpeed checks none of them before the first access to the drive.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, "aio": {"queue_depth": 0}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, "aio": {"queue_depth": 8}}
    Fix:    none
    Source: deepspeed/runtime/swap_tensor/aio_config.py, get_aio_config
    """
    for name in ("block_size", "queue_depth", "intra_op_parallelism"):
        value = document.at(f"/aio/{name}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield Hit(f"/aio/{name}", f"aio.{name} is {value}, but should be at least 1")
