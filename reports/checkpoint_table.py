"""What checkpoints hold, whether they are whole, and what was made of one: as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from dsplan.schemas.units import count, size

if TYPE_CHECKING:
    from dsplan.schemas.checkpoint import Checkpoint, Contents, Verified, Written

WRITERS = {
    "native": "dsplan",
    "deepspeed": "DeepSpeed",
    "universal": "DeepSpeed (universal)",
    "model": "a model alone, safetensors",
}


def contents_text(contents: Contents) -> str:
    """A block for each checkpoint, in the order of their steps."""
    blocks = ["\n".join(_block(each)) for each in contents.checkpoints]
    ends, tags = [], {each.tag for each in contents.checkpoints}
    if contents.latest is not None and contents.latest not in tags:
        ends.append(f"latest names {contents.latest[:60]!r}, which is no checkpoint there")
    for name in contents.leftovers:
        ends.append(f"{name}: left by a save that was cut off")
    if len(contents.checkpoints) > 1 or (contents.latest is not None and contents.latest not in tags):
        ends.append(f"newest complete: {contents.newest_complete or 'none'}")
    return "\n\n".join([*blocks, *(["\n".join(ends)] if ends else [])])


def contents_json(contents: Contents) -> str:
    entries = [{**asdict(each), "complete": not each.faults} for each in contents.checkpoints]
    return json.dumps({"version": 1, **asdict(contents), "checkpoints": entries}, indent=2)


def verified_text(verified: Verified) -> str:
    """A line for each checkpoint, and one for each thing that is wrong with it."""
    lines = []
    for tag, faults in verified.faults.items():
        lines.append(f"{tag}: {'damaged' if faults else 'complete'}")
        lines += [f"  {fault}" for fault in faults]
    if verified.latest_fault is not None:
        lines.append(verified.latest_fault)
    if not verified.whole:
        lines.append(f"newest complete: {verified.newest_complete or 'none'}")
    return "\n".join(lines)


def verified_json(verified: Verified) -> str:
    entries = [{"tag": tag, "complete": not faults, "faults": list(faults)} for tag, faults in verified.faults.items()]
    return json.dumps(
        {
            "version": 1,
            "folder": verified.folder,
            "checkpoints": entries,
            "latest_fault": verified.latest_fault,
            "newest_complete": verified.newest_complete,
            "remarks": list(verified.remarks),
        },
        indent=2,
    )


def written_text(written: Written) -> str:
    in_precision = f" in {written.precision}" if written.precision is not None else ""
    tensors = f"{written.num_tensors} tensors, {size(written.tensor_bytes)}{in_precision}"
    return f"{written.source} -> {written.path}: {tensors}, {_files(len(written.files))}"


def written_json(written: Written) -> str:
    return json.dumps({"version": 1, **asdict(written)}, indent=2)


def _block(each: Checkpoint) -> list[str]:
    """Lines of "what  value", for what the files tell."""
    by = f"{WRITERS[each.kind]} {each.version}" if each.kind in ("native", "deepspeed") else WRITERS[each.kind]
    rows = [("written by", by), ("complete", "no: " + each.faults[0] if each.faults else "yes")]
    if each.global_steps is not None:
        skipped = f", {each.skipped_steps} of them skipped" if each.skipped_steps else ""
        rows.append(("steps", f"{each.global_steps}{skipped}"))
    if each.world_size is not None:
        rows.append(("ranks", f"{each.world_size}, ZeRO stage {each.zero_stage}"))
    if each.precision is not None:
        scale = f", loss scale {each.loss_scale:g}" if each.loss_scale is not None else ""
        rows.append(("precision", f"{each.precision}{scale}"))
    if each.train_batch_size is not None:
        rows.append(("batch", f"{each.train_batch_size}, micro-batch {each.micro_batch}"))
    if each.num_parameters is not None:
        rows.append(("model", f"{count(each.num_parameters)} numbers in {each.num_tensors} tensors"))
    if each.kind != "model" and not each.faults:
        rows.append(("optimizer", ", ".join(each.optimizer) or "no state"))
    for index, group in enumerate(each.groups):
        told = ", ".join(f"{key} {_number(value)}" for key, value in group.items() if key != "params")
        rows.append((f"group {index}", f"{group['params']} parameters" + (f", {told}" if told else "")))
    if each.schedule is not None:
        told = ", ".join(f"{key} {_number(value)}" for key, value in list(each.schedule.items())[:4])
        rows.append(("schedule", told))
    if each.client_state:
        rows.append(("client_state", ", ".join(each.client_state)))
    rows.append(("on disk", f"{size(each.file_bytes)}, {_files(each.num_files)}"))
    head = f"{each.tag} (latest)" if each.latest else each.tag
    return [head, *(f"  {name:<12}  {value}" for name, value in rows)]


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _files(number: int) -> str:
    return f"{number} file" + ("" if number == 1 else "s")
