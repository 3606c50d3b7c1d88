"""DSP9xx: whether the model fits into the GPUs under this configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.schemas.units import gib

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What estimate says of the file's own configuration on a named GPU."""

    gpu: str
    device_bytes: int
    device_bytes_high: int
    usable_bytes: int
    host_phase: str = ""
    """load, train or save: when a node's host is the fullest."""
    host_bytes: int = 0
    """Then, on a node."""
    host_memory_bytes: int | None = None
    """Of a node; None: not known."""


@rule("DSP901", "does-not-fit", severity=ERROR, keys=[])
def does_not_fit(fit: Fit) -> Iterator[Hit]:
    """What the model takes under this configuration must fit into a GPU.

    Why:    The job queues, starts, and runs out of memory in its first steps.
    Given:  gib_per_sample 10, usable_gib 79
    Bad:    {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}
    Good:   {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    Fix:    none
    Source: dsplan estimate --config
    """
    if fit.device_bytes > fit.usable_bytes:
        yield Hit(
            "",
            f"takes {gib(fit.device_bytes)} GiB per GPU, but {fit.gpu} has {gib(fit.usable_bytes)} GiB",
            "see dsplan estimate for the parts, dsplan tune for what fits",
        )


@rule("DSP902", "barely-fits", severity=WARNING, keys=[])
def barely_fits(fit: Fit) -> Iterator[Hit]:
    """What the model takes at most should fit into a GPU as well.

    Why:    What the allocator reserves depends on fragmentation; the upper end of the estimate exceeds the GPU.
    Given:  gib_per_sample 10, usable_gib 81
    Bad:    {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}
    Good:   {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    Fix:    none
    Source: dsplan estimate --config
    """
    if fit.device_bytes <= fit.usable_bytes < fit.device_bytes_high:
        yield Hit(
            "",
            f"takes {gib(fit.device_bytes)} GiB per GPU and up to {gib(fit.device_bytes_high)} GiB, "
            f"but {fit.gpu} has {gib(fit.usable_bytes)} GiB",
            "leave more room, or measure",
        )


@rule("DSP903", "host-does-not-fit", severity=ERROR, keys=[])
def host_does_not_fit(fit: Fit) -> Iterator[Hit]:
    """What a node's ranks hold on their host must fit into its memory.

    Why:    The kernel ends a rank of a node whose memory is full, without a message; the others wait for it.
    Given:  gib_offloaded 900, host_gib 512
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: dsplan estimate --config, with a --cluster file that names host_memory_gb
    """
    if fit.host_memory_bytes is not None and fit.host_bytes > fit.host_memory_bytes:
        yield Hit(
            "",
            f"takes {gib(fit.host_bytes)} GiB of a node's host memory{_WHEN[fit.host_phase]}, but it has "
            f"{gib(fit.host_memory_bytes)} GiB",
            "see dsplan estimate for what would make it fit",
        )


_WHEN = {"": "", "load": " while it loads", "train": "", "save": " while it saves"}
