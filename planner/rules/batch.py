"""DSP1xx: the batch equation, train_batch_size = micro_batch x accumulation x dp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, replaced, rule
from dsplan.schemas.batch import resolve_batch
from dsplan.schemas.config import BATCH_KEYS, DsConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.positions import Document

GLOBAL, MICRO, STEPS = BATCH_KEYS


@rule("DSP101", "no-batch-size", severity=WARNING, keys=[f"/{key}" for key in BATCH_KEYS], raises="parse")
def no_batch_size(document: Document) -> Iterator[Hit]:
    """train_batch_size or train_micro_batch_size_per_gpu must be there.

    Why:    DeepSpeed asserts it at start-up. A warning only, since many scripts lay the keys over the file.
    Bad:    {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Good:   {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, _set_batch_related_parameters
    """
    value = document.value
    if isinstance(value, dict) and value and all(value.get(key) is None for key in (GLOBAL, MICRO)):
        yield Hit(
            "",
            f"neither {GLOBAL} nor {MICRO} is there; DeepSpeed refuses the file unless the script adds one",
            remedy="add one of them",
        )


def _numbers(config: DsConfig, document: Document) -> tuple[int | None, int | None, int | None] | None:
    """The three numbers; None where one of them is no number (that is another finding, or the reader fills it)."""
    values = [config.train_batch_size, config.micro_batch, config.accumulation]
    for index, key in enumerate(BATCH_KEYS):
        if document.at(f"/{key}") is True:  # counts as 1
            values[index] = 1
        elif isinstance(values[index], str) or (values[index] is None and document.at(f"/{key}") is not None):
            return None
    return tuple(values)  # type: ignore[return-value]


def _share(document: Document) -> int:
    """How many GPUs see the same samples, as far as the batch equation knows: sequence, pipeline and dsplan's tensor parallel.

    DeepSpeed does not count tensor_parallel.autotp_size here (DSP516 tells what that means).
    """
    share = 1
    for pointer in ("/sequence_parallel_size", "/dsplan/pipeline_stages", "/dsplan/tensor_parallel"):
        size = document.at(pointer, 1)
        share *= size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1
    return share


def _dp(cluster: Cluster, document: Document) -> int | None:
    """dp as the batch equation sees it. None where it is not whole: another finding."""
    share = _share(document)
    return cluster.ranks // share if cluster.ranks % share == 0 else None


_MOST_GPUS = 4096
"""No larger number of GPUs is proposed."""


def _or_run_on(total: int, per: int, share: int, dp: int) -> str:
    """The numbers of GPUs, next to those there are, that the batch sizes would fit: `per` samples a step on each dp."""
    if total % per:
        return ""
    fits = [size for size in range(1, min(total // per, _MOST_GPUS // share) + 1) if total // per % size == 0]
    near = sorted(sorted(fits, key=lambda size: abs(size - dp))[:4])
    names = [str(size * share) for size in near]
    if not names:
        return ""
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    return f", or run on {listed} GPU{'' if names == ['1'] else 's'}"


@rule("DSP102", "batch-product-mismatch", severity=ERROR, keys=[f"/{key}" for key in BATCH_KEYS], raises="parse")
def batch_product_mismatch(document: Document, config: DsConfig, cluster: Cluster) -> Iterator[Hit]:
    """train_batch_size must equal micro_batch x accumulation x dp.

    Why:    DeepSpeed asserts this at start-up, after the job has waited in the queue. What is absent is derived, rounding
            down, and then checked.
    Given:  dp 8
    Bad:    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Fix:    unsafe
    Source: deepspeed/runtime/config.py, _set_batch_related_parameters and _batch_assertion
    """
    numbers = _numbers(config, document)
    dp, share = _dp(cluster, document), _share(document)
    if numbers is None or dp is None or numbers[0] is None:
        return
    total, micro, steps = numbers[0], numbers[1], numbers[2]
    try:
        resolve_batch(total, micro, steps, dp)
        return
    except ValueError:
        pass
    if _starved(total, micro, steps, dp):
        return  # another rule
    if micro is None and steps is None:
        yield Hit(
            f"/{GLOBAL}",
            f"{GLOBAL} is {total}, which dp {dp} does not divide",
            remedy=f"set {_multiple(total, dp)}{_or_run_on(total, 1, share, dp)}",
        )
        return
    if micro is not None and steps is not None:
        product = micro * steps * dp
        said = f"{GLOBAL} is {total}, but micro_batch {micro} x accumulation {steps} x dp {dp} = {product}"
        other = ""
        if total % (micro * dp) == 0:
            other = f", or set {STEPS} to {total // (micro * dp)}"
        elif total % (steps * dp) == 0:
            other = f", or set {MICRO} to {total // (steps * dp)}"
        if total % (micro * steps) == 0 and total // (micro * steps) * share <= _MOST_GPUS:
            fitting = total // (micro * steps) * share
            other += f", or run on {fitting} GPU{'s' if fitting > 1 else ''}"
        fix = replaced(document.values_at[f"/{GLOBAL}"], str(product), safe=False)
        yield Hit(f"/{GLOBAL}", said, remedy=f"set {product}{other}", fix=fix)
        return
    name, value = (MICRO, micro) if micro is not None else (STEPS, steps)
    assert value is not None
    short = "micro_batch" if name == MICRO else "accumulation"
    per = value * dp
    yield Hit(
        f"/{GLOBAL}",
        f"{GLOBAL} is {total}, which {short} {value} x dp {dp} = {per} does not divide",
        remedy=f"set {_multiple(total, per)}{_or_run_on(total, value, share, dp)}",
    )


def _starved(total: int, micro: int | None, steps: int | None, dp: int) -> bool:
    """train_batch_size is too small for one sample per GPU and micro-batch: what is derived from it would be 0."""
    return (micro is None or steps is None) and total < (micro or 1) * (steps or 1) * dp


def _multiple(total: int, of: int) -> int:
    """The multiple that is nearest, and at least one."""
    return max(round(total / of) if total < 10**15 else total // of, 1) * of


@rule("DSP103", "batch-fits-no-world-size", severity=ERROR, keys=[f"/{key}" for key in BATCH_KEYS], raises="parse")
def batch_fits_no_world_size(document: Document, config: DsConfig, world_size_unknown: bool) -> Iterator[Hit]:
    """train_batch_size must be a multiple of micro_batch x accumulation, or no number of GPUs satisfies the equation.

    Why:    DeepSpeed asserts train_batch_size = micro_batch x accumulation x dp at start-up. Where a cluster is given,
            DSP102 says what its GPUs need.
    Bad:    {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, _batch_assertion
    """
    numbers = _numbers(config, document)
    if numbers is None or numbers[0] is None:
        return
    total, product = numbers[0], (numbers[1] or 1) * (numbers[2] or 1)
    if total % product:
        parts = [f"micro_batch {numbers[1]}"] * (numbers[1] is not None)
        parts += [f"accumulation {numbers[2]}"] * (numbers[2] is not None)
        of = " x ".join(parts) + (f" = {product}" if len(parts) > 1 else "")
        yield Hit(
            f"/{GLOBAL}",
            f"{GLOBAL} is {total}, no multiple of {of}, so no number of GPUs fits",
            remedy=f"set {_multiple(total, product)}",
        )


@rule("DSP104", "batch-fixes-world-size", severity=INFO, keys=[f"/{key}" for key in BATCH_KEYS])
def batch_fixes_world_size(document: Document, config: DsConfig, world_size_unknown: bool) -> Iterator[Hit]:
    """Where all three batch keys are there, only one number of data-parallel GPUs fits.

    Why:    DeepSpeed asserts train_batch_size = micro_batch x accumulation x dp. Said only where no cluster is given.
    Bad:    {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Good:   {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, _batch_assertion
    """
    numbers = _numbers(config, document)
    if numbers is None or None in numbers:
        return
    total, micro, steps = (number or 1 for number in numbers)
    if total % (micro * steps) == 0:
        dp = total // (micro * steps)
        yield Hit(
            f"/{GLOBAL}",
            f"{GLOBAL} {total} / (micro_batch {micro} x accumulation {steps}) fits dp {dp} only",
            remedy=f"check with --cluster {dp * _share(document)}",
        )


@rule("DSP105", "sequence-parallel-uneven", severity=ERROR, keys=["/sequence_parallel_size"])
def sequence_parallel_uneven(document: Document, cluster: Cluster) -> Iterator[Hit]:
    """sequence_parallel_size must divide the number of GPUs.

    Why:    DeepSpeed does not check, and goes on with batch sizes that are not whole.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "sequence_parallel_size": 3}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "sequence_parallel_size": 4}
    Fix:    none
    Source: deepspeed/runtime/config.py, DeepSpeedConfig.__init__
    """
    share = document.at("/sequence_parallel_size")
    if isinstance(share, int) and not isinstance(share, bool) and share > 0 and cluster.ranks % share:
        yield Hit(
            "/sequence_parallel_size", f"sequence_parallel_size is {share}, which does not divide {cluster.ranks} GPUs"
        )


@rule("DSP106", "batch-below-world-size", severity=ERROR, keys=[f"/{GLOBAL}"], raises="parse")
def batch_below_world_size(document: Document, config: DsConfig, cluster: Cluster) -> Iterator[Hit]:
    """train_batch_size must give each data-parallel GPU at least one sample.

    Why:    What is absent is derived by floor division, and becomes 0, which DeepSpeed refuses at start-up.
    Given:  dp 8
    Bad:    {"train_batch_size": 4, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, _set_batch_related_parameters and _batch_assertion
    """
    numbers, dp = _numbers(config, document), _dp(cluster, document)
    if numbers is None or dp is None or numbers[0] is None:
        return
    total, micro, steps = numbers[0], numbers[1], numbers[2]
    if _starved(total, micro, steps, dp):
        least = (micro or 1) * (steps or 1) * dp
        derived = "micro-batch of a GPU" if micro is None else "accumulation"
        parts = [f"micro_batch {micro}"] * (micro is not None) + [f"accumulation {steps}"] * (steps is not None)
        yield Hit(
            f"/{GLOBAL}",
            f"{GLOBAL} is {total}, but {' x '.join([*parts, f'dp {dp}'])} needs at least {least}: the {derived} would be 0",
            remedy=f"set {least}{_or_run_on(total, (micro or 1) * (steps or 1), _share(document), dp)}",
        )


@rule("DSP108", "accumulation-added-by-hf", severity=ERROR, keys=[f"/{key}" for key in BATCH_KEYS], raises="init")
def accumulation_added_by_hf(document: Document, config: DsConfig, cluster: Cluster, hf_reader: str) -> Iterator[Hit]:
    """Under HF, gradient_accumulation_steps must be there where it is not 1.

    Why:    DeepSpeed by itself derives it from the other two. Accelerate, which the Trainer goes through, first puts a 1 in the
            place of a key that is absent, and DeepSpeed then refuses a train_batch_size that is not micro_batch x dp.
    Given:  reader trainer, dp 4
    Bad:    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__; deepspeed/runtime/config.py, _batch_assertion
    """
    numbers, dp = _numbers(config, document), _dp(cluster, document)
    if numbers is None or dp is None or document.has(f"/{STEPS}"):
        return
    total, micro = numbers[0], numbers[1]
    if total and micro and total != micro * dp and total % (micro * dp) == 0:
        yield Hit(
            f"/{GLOBAL}",
            f"{GLOBAL} is {total}, but micro_batch {micro} x accumulation 1 x dp {dp} = {micro * dp}; Accelerate adds the 1",
            remedy=f'add "{STEPS}": {total // (micro * dp)}',
        )


@rule("DSP107", "batch-before-the-ranks", severity=INFO, keys=[f"/{GLOBAL}"])
def batch_before_the_ranks(document: Document, config: DsConfig, zero_stage: int, hf_reader: str) -> Iterator[Hit]:
    """Under HF and zero_stage 3, train_batch_size is best left "auto" or out.

    Why:    Where a model is made before the ranks have met, deepspeed.zero.Init checks the batch equation with one GPU.
    Given:  reader trainer
    Bad:    {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}
    Good:   {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}
    Fix:    none
    Source: deepspeed/runtime/zero/partition_parameters.py, Init; deepspeed/runtime/config.py, _batch_assertion
    """
    numbers = _numbers(config, document)
    if zero_stage != 3 or numbers is None or None in numbers or document.at(f"/{GLOBAL}") == "auto":
        return
    total, micro, steps = (number or 1 for number in numbers)
    if total != micro * steps:
        yield Hit(
            f"/{GLOBAL}",
            f"{GLOBAL} {total} is not micro_batch {micro} x accumulation {steps} on one GPU, which is what zero.Init asks where "
            "the model is made before the ranks have met",
            remedy='write "auto", or remove it',
        )
