"""DSP86x: the compile block (DeepCompile). Most of it is checked only when the script calls engine.compile()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.parallel import tensor_parallel
from dsplan.planner.rules.precision import on
from dsplan.planner.rules.reading import block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.positions import Document

BLOCK, ZERO = "/compile", "/zero_optimization"
DEEP, PASSES = f"{BLOCK}/deepcompile", f"{BLOCK}/passes"
NEED_DEEP = (
    "free_activation", "offload_activation", "offload_opt_states", "offload_parameters", "symmetric_memory", "debug_log",
    "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather", "keep_all_input_tensors",
)  # fmt: skip
"""Switches that only DeepCompile reads. Source: deepspeed/compile/{config,init_z1_and_2,init_z3}.py."""


def _passes(document: Document) -> list[str]:
    passes = document.at(PASSES)
    return [name for name in passes if isinstance(name, str)] if isinstance(passes, list) else []


def _offloaded(document: Document, name: str) -> bool:
    return document.at(f"{ZERO}/{name}/device") in ("cpu", "nvme")


@rule("DSP861", "deepcompile-without-zero", severity=WARNING, keys=[DEEP])
def deepcompile_without_zero(document: Document, zero_stage: int) -> Iterator[Hit]:
    """compile.deepcompile acts at zero_stage 1, 2 and 3.

    Why:    At stage 0 engine.compile() falls back to torch.compile, and says so only in an info line.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "compile": {"deepcompile": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "compile": {"deepcompile": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_deepcompile_backend
    """
    if zero_stage == 0 and on(document, DEEP) and not {"autosp", "autotp"} & set(_passes(document)):
        yield Hit(DEEP, "compile.deepcompile has no effect at zero_stage 0: torch.compile is used", "set a stage")


@rule("DSP862", "compile-offloads-exclude", severity=ERROR, keys=[BLOCK])
def compile_offloads_exclude(document: Document, zero_stage: int) -> Iterator[Hit]:
    """Of offload_activation, offload_opt_states and offload_parameters only one may be on.

    Why:    engine.compile() raises a ValueError at stage 3. Nor does offload_opt_states go with ZeRO's offload_optimizer.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "compile": {"deepcompile": true, "offload_activation": true, "offload_parameters": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "compile": {"deepcompile": true, "offload_activation": true}}
    Fix:    none
    Source: deepspeed/compile/init_z3.py, init_z3
    """
    if zero_stage != 3 or not on(document, DEEP):
        return
    names = ("offload_activation", "offload_opt_states", "offload_parameters")
    given = [name for name in names if on(document, f"{BLOCK}/{name}")]
    if len(given) > 1:
        yield Hit(f"{BLOCK}/{given[1]}", f"compile.{given[0]} and {given[1]} exclude each other", "keep one of them")
    elif given == ["offload_opt_states"] and _offloaded(document, "offload_optimizer"):
        yield Hit(
            f"{BLOCK}/offload_opt_states",
            "compile.offload_opt_states does not go with zero_optimization.offload_optimizer",
            remedy="keep one of them",
        )


@rule("DSP863", "compile-offload-implied", severity=INFO, keys=[DEEP])
def compile_offload_implied(document: Document, zero_stage: int) -> Iterator[Hit]:
    """With both ZeRO offloads on cpu, DeepCompile offloads parameters by itself.

    Why:    engine.compile() sets compile.offload_parameters to true, whatever the file says.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, "compile": {"deepcompile": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "compile": {"deepcompile": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_deepcompile_backend
    """
    both = all(document.at(f"{ZERO}/{name}/device") == "cpu" for name in ("offload_param", "offload_optimizer"))
    if zero_stage == 3 and both and on(document, DEEP) and not on(document, f"{BLOCK}/offload_parameters"):
        yield Hit(DEEP, "compile.offload_parameters becomes true, since both ZeRO offloads are on cpu")


@rule("DSP864", "compile-passes-refused", severity=ERROR, keys=[PASSES])
def compile_passes_refused(document: Document) -> Iterator[Hit]:
    """The pass autotp goes with no other pass.

    Why:    engine.compile() raises NotImplementedError.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}, "compile": {"deepcompile": true, "passes": ["z1", "autotp"]}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}, "compile": {"deepcompile": true, "passes": ["autotp"]}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_deepspeed_compile_backend
    """
    others = [name for name in _passes(document) if name in ("z1", "z3", "autosp")]
    if "autotp" in _passes(document) and others:
        yield Hit(PASSES, f"the pass autotp does not go with {others[0]}", remedy="keep one of them")


@rule("DSP865", "compile-pass-idle", severity=WARNING, keys=[PASSES])
def compile_pass_idle(document: Document, zero_stage: int) -> Iterator[Hit]:
    """The pass autosp needs zero_stage 0 or 1, the pass autotp needs tensor parallelism.

    Why:    Else engine.compile() falls back to torch.compile, and says so only in an info line.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "compile": {"deepcompile": true, "passes": ["autosp"]}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "compile": {"deepcompile": true, "passes": ["autosp"]}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_autosp_backend and get_autotp_backend
    """
    passes = _passes(document)
    if "autosp" in passes and zero_stage > 1:
        yield Hit(PASSES, f"the pass autosp has no effect at zero_stage {zero_stage}: torch.compile is used")
    if "autotp" in passes and tensor_parallel(document) == 1:
        yield Hit(PASSES, "the pass autotp has no effect without tensor_parallel.autotp_size above 1")


@rule("DSP866", "compile-without-deepcompile", severity=WARNING, keys=[BLOCK])
def compile_without_deepcompile(document: Document) -> Iterator[Hit]:
    """The switches of the compile block need deepcompile.

    Why:    Only DeepCompile reads them; torch.compile does not.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "compile": {"offload_activation": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "compile": {"deepcompile": true, "offload_activation": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, compile
    """
    if on(document, DEEP) or not block(document, BLOCK):
        return
    idle = [name for name in NEED_DEEP if on(document, f"{BLOCK}/{name}")] + ["passes"] * bool(_passes(document))
    if idle:
        yield Hit(
            f"{BLOCK}/{idle[0]}",
            f"compile.{idle[0]} has no effect without deepcompile",
            remedy="set deepcompile to true",
            on_key=True,
        )


@rule("DSP867", "two-ways-to-compile", severity=ERROR, keys=[f"{BLOCK}/autoep_non_moe"])
def two_ways_to_compile(document: Document) -> Iterator[Hit]:
    """compile.autoep_non_moe goes neither with deepcompile nor with tensor parallelism.

    Why:    engine.compile() raises a ValueError. It goes neither with comm_backend deepep of expert_parallel.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "compile": {"deepcompile": true, "autoep_non_moe": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "compile": {"autoep_non_moe": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, compile
    """
    pointer = f"{BLOCK}/autoep_non_moe"
    if not on(document, pointer):
        return
    sequence = document.at("/sequence_parallel_size")
    refused = {
        "compile.deepcompile": on(document, DEEP),
        "expert_parallel.comm_backend deepep": document.at("/expert_parallel/comm_backend") == "deepep",
        "tensor parallelism": tensor_parallel(document) > 1,
        "sequence parallelism": isinstance(sequence, int) and sequence > 1,
    }
    for name, given in refused.items():
        if given:
            yield Hit(pointer, f"compile.autoep_non_moe does not go with {name}", remedy="keep one of them")
