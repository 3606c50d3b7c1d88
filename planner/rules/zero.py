"""DSP3xx: ZeRO stages and what each of them reads, reduction of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import members
from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.number_types import by_bf16_optimizer
from dsplan.planner.rules.precision import number_at, on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.config import DsConfig
    from dsplan.schemas.finding import Severity
    from dsplan.schemas.positions import Document

ZERO = "/zero_optimization"


@rule("DSP301", "key-of-another-stage", severity=WARNING, keys=[ZERO])
def key_of_another_stage(document: Document, zero_stage: int) -> Iterator[Hit]:
    """Keys of one ZeRO stage have no effect at another.

    Why:    DeepSpeed accepts them silently. Warning for those of stage 3, which say that more was meant; else info.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 0}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_zero_optimizer
    """
    idle: dict[Severity, list[str]] = {WARNING: [], INFO: []}
    for member in members(document):
        stages, value = (member.node or {}).get("x-stages"), member.value
        if member.block_pointer != ZERO or not stages or zero_stage in stages:
            continue
        if value == "auto" or value is None or value is False or value == {}:
            continue
        if member.node and member.value == member.node.get("default") and member.node.get("default") is True:
            continue
        idle[WARNING if stages == [3] else INFO].append(member.name)
    for severity, names in idle.items():
        if names:
            rest = f" (nor {'has' if len(names) == 2 else 'have'} {', '.join(names[1:])})" if len(names) > 1 else ""
            yield Hit(
                f"{ZERO}/{names[0]}",
                f"{names[0]} has no effect at zero_stage {zero_stage}{rest}",
                on_key=True,
                severity=severity,
            )


@rule(
    "DSP302",
    "division-before-reduce-scatter",
    severity=ERROR,
    keys=["/prescale_gradients", "/gradient_predivide_factor"],
    raises="init",
)
def division_before_reduce_scatter(document: Document, zero_stage: int) -> Iterator[Hit]:
    """prescale_gradients and gradient_predivide_factor do not go with reduce_scatter at stages 2 and 3.

    Why:    DeepSpeed asserts it when the engine starts (where gradients are averaged).
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "prescale_gradients": true, "zero_optimization": {"stage": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "prescale_gradients": true, "zero_optimization": {"stage": 2, "reduce_scatter": false}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage_1_and_2.py; deepspeed/runtime/zero/stage3.py
    """
    scatter = document.at(f"{ZERO}/reduce_scatter", True)
    operation = document.at("/gradient_allreduce_op", "mean")
    if zero_stage < 2 or (scatter != "auto" and not on(document, f"{ZERO}/reduce_scatter") and scatter is not True):
        return
    if isinstance(operation, str) and operation.lower() == "sum":
        return
    factor = number_at(document, "/gradient_predivide_factor", 1.0)
    wrong = (
        [("/prescale_gradients", "prescale_gradients is true")] if document.at("/prescale_gradients") is True else []
    )
    if factor is not None and factor != 1.0:
        wrong.append(("/gradient_predivide_factor", f"gradient_predivide_factor is {factor:g}"))
    for pointer, said in wrong:
        yield Hit(
            pointer,
            f"{said}, but zero_stage {zero_stage} with reduce_scatter refuses it",
            remedy="remove it, or set zero_optimization.reduce_scatter to false",
        )


@rule("DSP303", "no-gradient-norm", severity=ERROR, keys=[f"{ZERO}/compute_grad_norm"], raises="init")
def no_gradient_norm(document: Document, zero_stage: int, config: DsConfig) -> Iterator[Hit]:
    """compute_grad_norm false needs zero_stage 1 or 2, gradient_clipping 0, no offload and no ZenFlow.

    Why:    DeepSpeed refuses it at start-up. Mind that gradient_clipping is 1.0 where it is absent. At zero_stage 1 bf16 with
            fp32 accumulation does not take it either.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 0, "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py; deepspeed/runtime/engine.py
    """
    value = document.at(f"{ZERO}/compute_grad_norm")
    if value is None or value == "auto" or on(document, f"{ZERO}/compute_grad_norm"):
        return
    said, pointer = "compute_grad_norm is false, but", f"{ZERO}/compute_grad_norm"
    if zero_stage not in (1, 2):
        yield Hit(
            pointer,
            f"{said} zero_stage {zero_stage} refuses that; only 1 and 2 take it",
            remedy="remove it",
            raises="parse",
        )
    elif config.gradient_clipping > 0:
        clip = f"{config.gradient_clipping:g}" + ("" if document.has("/gradient_clipping") else " by default")
        yield Hit(
            pointer,
            f"{said} gradient_clipping is {clip}, and clipping needs the norm",
            remedy="set gradient_clipping to 0",
        )
    elif config.offload != "none":
        yield Hit(pointer, f"{said} an offloaded optimizer needs the norm", remedy="remove it")
    elif isinstance(document.at(f"{ZERO}/zenflow"), dict):
        yield Hit(pointer, f"{said} zenflow needs the norm", remedy="remove it")
    elif by_bf16_optimizer(document, config, zero_stage):
        yield Hit(
            pointer,
            f"{said} zero_stage 1 of bf16 with gradients added up in fp32 needs the norm",
            remedy="remove it, or set zero_optimization.stage to 2",
        )


@rule("DSP304", "odd-allgather-bucket", severity=ERROR, keys=[f"{ZERO}/allgather_bucket_size"], raises="init")
def odd_allgather_bucket(document: Document, zero_stage: int) -> Iterator[Hit]:
    """allgather_bucket_size must be even at stages 1 and 2.

    Why:    DeepSpeed asserts it when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "allgather_bucket_size": 99999}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "allgather_bucket_size": 100000}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage_1_and_2.py
    """
    size = document.at(f"{ZERO}/allgather_bucket_size")
    if zero_stage in (1, 2) and isinstance(size, int) and not isinstance(size, bool) and size % 2:
        yield Hit(
            f"{ZERO}/allgather_bucket_size",
            f"allgather_bucket_size is {size}, but must be even",
            remedy=f"set {size + 1}",
        )


@rule("DSP305", "sum-of-gradients", severity=ERROR, keys=["/gradient_allreduce_op"], raises="parse")
def sum_of_gradients(document: Document, zero_stage: int) -> Iterator[Hit]:
    """gradient_allreduce_op sum does not go with stage 3, ZenFlow or DeepCompile.

    Why:    DeepSpeed refuses it at start-up.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: deepspeed/runtime/config.py, _do_error_check
    """
    operation = document.at("/gradient_allreduce_op")
    if not isinstance(operation, str) or operation.lower() != "sum":
        return
    zenflow = document.at(f"{ZERO}/zenflow")
    reason = (
        "zero_stage 3"
        if zero_stage == 3
        else "zenflow"
        if isinstance(zenflow, dict)
        else "compile.deepcompile"
        if on(document, "/compile/deepcompile")
        else None
    )
    if reason:
        yield Hit(
            "/gradient_allreduce_op", f'gradient_allreduce_op is "sum", which {reason} refuses', remedy='write "mean"'
        )


@rule("DSP306", "unmanaged-accumulation", severity=ERROR, keys=["/managed_gradient_accumulation"], raises="init")
def unmanaged_accumulation(document: Document, zero_stage: int) -> Iterator[Hit]:
    """managed_gradient_accumulation false does not go with overlap_comm below stage 2, nor with DeepCompile.

    Why:    DeepSpeed asserts it when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "managed_gradient_accumulation": false, "zero_optimization": {"stage": 1, "overlap_comm": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "managed_gradient_accumulation": false, "zero_optimization": {"stage": 2, "overlap_comm": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py
    """
    if document.at("/managed_gradient_accumulation") is not False:
        return
    if zero_stage < 2 and on(document, f"{ZERO}/overlap_comm"):
        yield Hit(
            "/managed_gradient_accumulation",
            f"managed_gradient_accumulation is false, which overlap_comm at zero_stage {zero_stage} refuses",
            remedy="set overlap_comm to false",
        )
    elif on(document, "/compile/deepcompile"):
        yield Hit(
            "/managed_gradient_accumulation",
            "managed_gradient_accumulation is false, which compile.deepcompile refuses",
            remedy="set it to true",
        )


@rule("DSP307", "partition-beyond-cluster", severity=ERROR, keys=[f"{ZERO}/zero_hpz_partition_size"], raises="init")
def partition_beyond_cluster(document: Document, zero_stage: int, cluster: Cluster) -> Iterator[Hit]:
    """zero_hpz_partition_size must divide the number of GPUs.

    Why:    DeepSpeed asserts it when it makes the process groups. More than there are GPUs counts as all of them: warning.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    Fix:    none
    Source: deepspeed/utils/groups.py, _create_zero_param_parallel_group
    """
    size = document.at(f"{ZERO}/zero_hpz_partition_size")
    if zero_stage != 3 or isinstance(size, bool) or not isinstance(size, int) or size < 2:
        return
    said, ranks = f"zero_hpz_partition_size is {size}", cluster.ranks
    if size > ranks:
        yield Hit(
            f"{ZERO}/zero_hpz_partition_size",
            f"{said}, more than the {ranks} GPU{'s' if ranks > 1 else ''}; it counts as {ranks}",
            severity=WARNING,
        )
    elif ranks % size:
        yield Hit(f"{ZERO}/zero_hpz_partition_size", f"{said}, which does not divide {ranks} GPUs")


@rule(
    "DSP308", "autocast-with-quantized-weights", severity=ERROR, keys=[f"{ZERO}/zero_quantized_weights"], raises="init"
)
def autocast_with_quantized_weights(document: Document, zero_stage: int) -> Iterator[Hit]:
    """zero_quantized_weights does not go with torch_autocast.

    Why:    DeepSpeed asserts it when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "torch_autocast": {"enabled": true, "dtype": "bf16"}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py
    """
    if (
        zero_stage == 3
        and on(document, f"{ZERO}/zero_quantized_weights")
        and document.at("/torch_autocast/enabled") is True
    ):
        yield Hit(
            f"{ZERO}/zero_quantized_weights",
            "zero_quantized_weights is on, which torch_autocast refuses",
            remedy="set false",
        )
