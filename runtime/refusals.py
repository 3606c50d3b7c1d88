"""What of a configuration the native engine cannot carry out, every reason at once: before the ranks start, and in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsplan.runtime.measuring.asked import wrong_values
from dsplan.runtime.optimizing.naming import wrong_options
from dsplan.runtime.optimizing.schedules import wrong_params
from dsplan.schemas import native_support
from dsplan.schemas.batch import Batch, fitting_ranks, resolve_batch
from dsplan.schemas.config import AUTO, BATCH_KEYS, ConfigError, DsConfig, named_block, read_config
from dsplan.schemas.known_keys import unknown_keys
from dsplan.schemas.problem import Problem

REDUCE_TYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}


@dataclass(frozen=True)
class Verdict:
    """config is None where it cannot be read. Reasons are lines that begin with their key."""

    source: str
    config: DsConfig | None
    refusals: list[str]
    warnings: list[str]
    without_effect: list[str]
    """The keys that DeepSpeed does not know."""

    def accepted(self) -> DsConfig:
        """Problem with every reason where there is one; several stand on a line each."""
        if self.refusals or self.config is None:
            said = f" {self.refusals[0]}" if len(self.refusals) == 1 else "".join(f"\n  {why}" for why in self.refusals)
            raise Problem(f"{self.source}: the native engine cannot carry this out:{said}")
        return self.config


def judge(raw: Mapping[str, Any], source: str, *, whole: bool, given: tuple[str, ...] = ()) -> Verdict:
    """whole: nothing is laid over it any more, so that what is missing stays so. given: blocks in whose place the script
    hands over an object of its own."""
    found: list[tuple[str, bool, str]] = []  # pointer, refused, text
    config = None
    try:
        config = read_config(raw, source)
    except ConfigError as error:
        found += [(pointer, True, text) for pointer, text in error.reasons]
    found += [(pointer, level == "error", f": {text}") for pointer, level, text in native_support.reasons(raw)]
    said = {pointer for pointer, refused, _ in found if refused}
    found += [reason for reason in wrong_values(raw) if reason[0] not in said]
    unknown = list(unknown_keys(raw))
    found += [(pointer, refused, f": {text}") for pointer, refused, text in unknown]
    wanted = raw.get("communication_data_type")
    if isinstance(wanted, str) and wanted != "auto" and wanted.lower() not in REDUCE_TYPES:
        found.append(("/communication_data_type", True, f" is {wanted!r}, but must be one of fp32, fp16, bf16"))
    optimizer, scheduler = named_block(raw, "optimizer"), named_block(raw, "scheduler")
    if optimizer is not None:
        found += [("/optimizer/params", True, f": {text}") for text in wrong_options(optimizer)]
    if scheduler is not None:
        found += [("/scheduler/params", True, f": {text}") for text in wrong_params(scheduler, whole=whole)]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for pointer, refused, text in found:
        if not any(pointer == f"/{block}" or pointer.startswith(f"/{block}/") for block in given):
            lines[refused].append(f"{_title(pointer)}{text if text[0] in ': ' else ' ' + text}")
    return Verdict(source, config, lines[True], lines[False], [_title(pointer) for pointer, _, _ in unknown])


def judge_whole(
    raw: Mapping[str, Any], source: str, *, dp: int, has_optimizer: bool, has_scheduler: bool
) -> tuple[Verdict, Batch]:
    """The verdict on what is really to run, with the batch equation solved. Problem with every reason."""
    given = [name for name, has in (("optimizer", has_optimizer), ("scheduler", has_scheduler)) if has]
    verdict = judge(raw, source, whole=True, given=tuple(given))
    batch = None
    if verdict.config is not None:
        config = verdict.config
        try:
            batch = resolve_batch(
                _known(config.train_batch_size), _known(config.micro_batch), _known(config.accumulation), dp
            )
        except ValueError as error:
            verdict.refusals.append(f"{error}{_rank_counts(config, dp)}{_autos(raw)}")
        # DeepSpeed lets stage 3 alone go without, for inference.
        if config.zero_stage in (1, 2) and not has_optimizer and config.optimizer is None:
            verdict.refusals.append(
                f"zero stage {config.zero_stage} requires an optimizer; name one in the optimizer block, or pass one to "
                "initialize"
            )
    verdict.accepted()
    assert batch is not None
    return verdict, batch


def _autos(raw: Mapping[str, Any]) -> str:
    names = [name for name in BATCH_KEYS if raw.get(name) == AUTO]
    return f'; {" and ".join(names)}: "auto" is filled in by the HF Trainer and Accelerate alone' if names else ""


def _rank_counts(config: DsConfig, dp: int) -> str:
    """For a run that goes on with more or fewer ranks: on how many the file's batches can stay as they are."""
    total, micro_batch = _known(config.train_batch_size), _known(config.micro_batch)
    if not total or not micro_batch:
        return ""
    if total % (micro_batch * dp) == 0:
        return "; leave out gradient_accumulation_steps, which then follows from the number of ranks"
    return f"; train_batch_size {total} goes with micro_batch {micro_batch} on {fitting_ranks(total, micro_batch)}"


def _known(size: int | str | None) -> int | None:
    return size if isinstance(size, int) else None


def _title(pointer: str) -> str:
    return pointer.strip("/").replace("/", ".").replace("~1", "/").replace("~0", "~")
