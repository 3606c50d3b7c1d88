"""What lies in a folder of checkpoints, and what was made of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["native", "deepspeed", "universal", "model"]
"""Who wrote it: dsplan's engine; DeepSpeed; its ds_to_universal; or a model alone, in safetensors."""
Precision = Literal["fp32", "fp16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One tag. None where the files do not tell."""

    tag: str
    kind: Kind
    version: str
    """Of what wrote it: the format's for native, the release for DeepSpeed."""
    latest: bool
    faults: tuple[str, ...]
    """What is wrong with it, as far as names, lengths and headers tell: none where it is complete."""
    file_bytes: int
    num_files: int
    global_steps: int | None = None
    skipped_steps: int | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    precision: Precision | None = None
    train_batch_size: int | None = None
    micro_batch: int | None = None
    num_tensors: int | None = None
    num_parameters: int | None = None
    """Numbers in the model's tensors, parameters and buffers."""
    optimizer: tuple[str, ...] = ()
    """The states that it keeps of each parameter, by name."""
    groups: tuple[dict[str, object], ...] = ()
    """Of the optimizer: lr, weight_decay and the number of parameters."""
    schedule: dict[str, object] | None = None
    loss_scale: float | None = None
    client_state: tuple[str, ...] = ()
    """Its keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A folder of checkpoints, or of one. leftovers: names of what killed saves left aside."""

    folder: str
    latest: str | None
    newest_complete: str | None
    checkpoints: tuple[Checkpoint, ...]
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Of every byte of a folder's checkpoints. faults: by tag, none where it is whole; remarks: what could not be checked."""

    folder: str
    faults: dict[str, tuple[str, ...]]
    latest_fault: str | None
    newest_complete: str | None
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.latest_fault is None and not any(self.faults.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a conversion wrote. notes: what was left out or changed."""

    source: str
    path: str
    kind: Kind
    files: tuple[str, ...]
    num_tensors: int
    tensor_bytes: int
    precision: Precision | None = None
    global_steps: int | None = None
    notes: tuple[str, ...] = field(default=())
