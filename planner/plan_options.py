"""Options that say which plans are asked for, of estimate and of tune alike, and how they become Flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from dsplan.planner.options import VARIED_GROUP, BuildName, OffloadName, RecomputeName
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.planner.settings import Flags


def varied(name: str, help: str, **more: Any) -> Any:
    """An option under the heading of what is estimated."""
    return typer.Option(name, help=help, rich_help_panel=VARIED_GROUP, **more)


ZeroOption = Annotated[str | None, varied("--zero", "ZeRO stages, by comma: 0,1,2,3.", metavar="STAGES")]
PrecisionOption = Annotated[str | None, varied("--precision", "By comma: fp32,fp16,bf16.", metavar="NAMES")]
TpOption = Annotated[str | None, varied("--tp", "Tensor-parallel degrees, by comma.", metavar="DEGREES")]
PpOption = Annotated[str | None, varied("--pp", "Pipeline-parallel degrees, by comma.", metavar="DEGREES")]
MicroBatchOption = Annotated[int | None, varied("--micro-batch", "Samples per GPU per forward.", min=1)]
AccumulationOption = Annotated[int | None, varied("--accumulation", "Micro-batches per step.", min=1)]
SeqLenOption = Annotated[int | None, varied("--seq-len", "Tokens per sample.", min=1)]
RecomputeOption = Annotated[
    RecomputeName | None,
    varied("--recompute", "Activation checkpointing of each block; selective keeps its products and fused attention."),
]
OffloadOption = Annotated[OffloadName | None, varied("--offload", "What lives on the host.")]
OptimizerOption = Annotated[str | None, varied("--optimizer", "adamw, sgd, adamw-8bit, ...", metavar="NAME")]
SpOption = Annotated[int | None, varied("--sp", "GPUs that share each sequence (Ulysses).", min=1)]
DpReplicateOption = Annotated[int | None, varied("--dp-replicate", "Copies of the shards: hybrid sharding.", min=1)]
ScheduleOption = Annotated[
    str | None, varied("--schedule", "Of a pipeline: 1f1b, gpipe, interleaved:N.", metavar="NAME")
]
SequenceParallelOption = Annotated[
    bool | None,
    varied("--sequence-parallel/--no-sequence-parallel", "With tp: what it leaves whole is split too."),
]
BuildOption = Annotated[
    BuildName | None,
    varied("--build", "Where the script makes the model: whole on each rank's host, or in shards (meta, zero.Init)."),
]


def flags_of(
    *,
    zero: str | None = None,
    precision: str | None = None,
    tp: str | None = None,
    pp: str | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    seq_len: int | None = None,
    recompute: RecomputeName | None = None,
    offload: OffloadName | None = None,
    optimizer: str | None = None,
    sp: int | None = None,
    dp_replicate: int | None = None,
    schedule: str | None = None,
    sequence_parallel: bool | None = None,
    built: BuildName | None = None,
) -> Flags:
    """What the flags of estimate and tune name. Problem where a list cannot be read."""
    from dsplan.planner.settings import Flags, named_optimizer, read_schedule
    from dsplan.schemas.units import PRECISIONS

    def numbers(option: str, text: str | None, allowed: range) -> tuple[int, ...] | None:
        if text is None:
            return None
        values = []
        for part in text.split(","):
            if not part.strip().isdigit() or int(part) not in allowed:
                what = "0, 1, 2 or 3" if allowed.stop == 4 else "whole numbers of at least 1"
                raise Problem(f"{option} {text} cannot be read: {part.strip() or 'nothing'} is not one of {what}")
            values.append(int(part))
        return tuple(dict.fromkeys(values))

    precisions = None
    if precision is not None:
        precisions = tuple(dict.fromkeys(part.strip().lower() for part in precision.split(",")))
        for name in precisions:
            if name not in PRECISIONS:
                raise Problem(
                    f"--precision {precision} cannot be read: {name or 'nothing'} is not one of {', '.join(PRECISIONS)}"
                )
    flags = Flags(
        zero=numbers("--zero", zero, range(4)),
        precision=precisions,
        tp=numbers("--tp", tp, range(1, 1 << 20)),
        pp=numbers("--pp", pp, range(1, 1 << 20)),
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=seq_len,
        recompute=recompute.value if recompute else None,
        offload=offload.value if offload else None,
        optimizer=optimizer,
        sp=sp,
        dp_replicate=dp_replicate,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        built=built.value if built else None,
    )
    named_optimizer(optimizer)  # before a script has run for them
    read_schedule(flags, {})
    return flags
