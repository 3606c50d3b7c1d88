"""DSP33x: numbers of ZeRO out of all proportion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.number_types import accumulation_type
from dsplan.planner.rules.precision import number_at, on
from dsplan.schemas.units import gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.config import DsConfig
    from dsplan.schemas.positions import Document

ZERO = "/zero_optimization"
FEWEST_ELEMENTS = 10_000
"""Below it each parameter of a layer is a collective of its own.

HF fills reduce_bucket_size with hidden_size**2: 16,384 for the smallest BERT that is published (hidden size 128).
Source: transformers/integrations/deepspeed.py, trainer_config_finalize.
"""
_BUCKETS = {
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "sub_group_size": (3,),
}
"""To the stages that read them. 0 in sub_group_size and allgather_bucket_size is left alone: it is taken on purpose."""
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@rule("DSP330", "tiny-bucket", severity=WARNING, keys=[f"{ZERO}/{name}" for name in _BUCKETS])
def tiny_bucket(document: Document, zero_stage: int) -> Iterator[Hit]:
    """Sizes of buckets and sub-groups are numbers of elements, not megabytes or pieces.

    Why:    With a size of a few elements each parameter is reduced, gathered or updated alone, and a step takes many times as
            long. DeepSpeed does not say a word.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "sub_group_size": 8}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "sub_group_size": 1000000000}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py (defaults 5e8 and 1e9 elements)
    """
    for name, stages in _BUCKETS.items():
        size = number_at(document, f"{ZERO}/{name}", FEWEST_ELEMENTS)
        if document.at(f"{ZERO}/{name}") is True:
            continue  # another rule
        if zero_stage in stages and size is not None and 1 <= size < FEWEST_ELEMENTS and size.is_integer():
            yield Hit(
                f"{ZERO}/{name}",
                f"{name} is {size:g} elements, so each parameter goes by itself",
                remedy="set 5e8, or what the GPU's memory allows" if name != "sub_group_size" else "set 1e9",
            )


@rule("DSP331", "bucket-beyond-gpu", severity=ERROR, keys=[f"{ZERO}/reduce_bucket_size"], raises="step")
def bucket_beyond_gpu(document: Document, config: DsConfig, zero_stage: int, cluster: Cluster) -> Iterator[Hit]:
    """The reduce bucket must fit into the GPU.

    Why:    With contiguous_gradients DeepSpeed allocates the whole bucket, whatever the model's size: once at zero_stage 3,
            and at 1 and 2 in the first backward, twice with overlap_comm.
    Given:  dp 8xA100-40GB
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 20000000000}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 500000000}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage_1_and_2.py, setup_buckets; deepspeed/runtime/zero/stage3.py, __setup_grad_partition
    """
    contiguous = document.at(f"{ZERO}/contiguous_gradients", True)
    whole = contiguous in (True, "auto") or on(document, f"{ZERO}/contiguous_gradients")
    if cluster.gpu is None or zero_stage == 0 or not whole:
        return
    kind = accumulation_type(document, config.precision) if zero_stage == 1 else config.precision
    copies = 2 if zero_stage < 3 and config.knobs.overlap_comm else 1
    size = min(config.knobs.reduce_bucket_size, 10**18)  # more fits no GPU either, and can be too long to print
    taken = size * _BYTES.get(kind or config.precision, 4) * copies
    if taken > cluster.gpu.usable_bytes:
        twice = " in two copies" if copies == 2 else ""
        yield Hit(
            f"{ZERO}/reduce_bucket_size",
            f"reduce_bucket_size {size:g} takes {gib(taken)} GiB{twice}, but {cluster.gpu.name} has "
            f"{gib(cluster.gpu.usable_bytes)} GiB",
            remedy="set 5e8",
        )
