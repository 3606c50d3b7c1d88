"""DSP6xx, continued: the values in optimizer.params, and which class takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.optimizer import PARAMS, TYPE, names, optimizer_type, params
from dsplan.planner.rules.precision import number_at
from dsplan.planner.rules.reading import number
from dsplan.planner.rules.structure import one_of
from dsplan.schemas.positions import Document, escape, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

OFFLOAD = "/zero_optimization/offload_optimizer/device"
ADAMS = ("Adam", "AdamW")
_TORCH_ADAM = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
ONLY: dict[str, dict[str, tuple[str, ...]]] = {
    "Adam": {
        "torch.optim.AdamW": _TORCH_ADAM,
        "DeepSpeedCPUAdam": ("bias_correction", "amsgrad"),
        "FusedAdam": ("bias_correction", "amsgrad", "set_grad_none"),
    },
    "Lion": {"DeepSpeedCPULion": ("fp32_optimizer_states",), "FusedLion": ("set_grad_none",)},
    "Adagrad": {
        "torch.optim.Adagrad": (
            "lr_decay", "initial_accumulator_value", "foreach", "maximize", "differentiable", "fused",
        ),
        "DeepSpeedCPUAdagrad": ("amsgrad", "fp32_optimizer_states"),
    },
}  # fmt: skip
"""By type, the classes that stand behind it, with the arguments that not all of them take. Source: deepspeed/ops, torch.optim."""
NO_USUAL_RATE = ("SGD", "MuSGD", "Adadelta", "Rprop", "LBFGS", "ASGD", "Muon")
"""Types whose steps are not of the size of lr, so that 1 may be meant."""


def offloaded(document: Document) -> bool:
    """DeepSpeed takes its CPU optimizers, at whatever stage."""
    return document.at(OFFLOAD) in ("cpu", "nvme") or document.at("/zero_optimization/cpu_offload") is True


def running_class(document: Document) -> str | None:
    """The class that DeepSpeed makes of an Adam, Lion or Adagrad; None for other types, which have one class."""
    kind = optimizer_type(document)
    if kind in ADAMS:
        if params(document).get("torch_adam"):
            return "torch.optim.AdamW"
        return "DeepSpeedCPUAdam" if offloaded(document) else "FusedAdam"
    if kind == "Lion":
        return "DeepSpeedCPULion" if offloaded(document) else "FusedLion"
    if kind == "Adagrad":
        return "DeepSpeedCPUAdagrad" if offloaded(document) else "torch.optim.Adagrad"
    return None


def of_torch(document: Document) -> bool:
    """PyTorch's own class runs, which checks its numbers."""
    kind = optimizer_type(document)
    own = running_class(document)
    return own.startswith("torch.") if own else kind is not None and kind not in names("/optimizer")["deepspeed"]


def _wrong_numbers(document: Document) -> Iterator[tuple[str, str]]:
    """(pointer, what it must be) for each number that no optimizer can mean."""
    values = params(document)
    for name in ("lr", "weight_decay", "eps", "momentum", "muon_lr", "adam_lr"):
        value = number(values.get(name))
        if value is not None and value < 0:
            yield f"{PARAMS}/{name}", "at least 0"
    betas = values.get("betas")
    for index, beta in enumerate(betas if isinstance(betas, list) else ()):
        value = number(beta)
        if value is not None and not 0 <= value < 1:
            yield f"{PARAMS}/betas/{index}", "at least 0 and below 1"


def _said(document: Document, pointer: str, must: str) -> str:
    name = pointer.removeprefix("/").replace("/", ".")
    return f"{name} is {shape(document.at(pointer))}, but must be {must}"


@rule("DSP608", "optimizer-number-refused", severity=ERROR, keys=[PARAMS], raises="init")
def optimizer_number_refused(document: Document) -> Iterator[Hit]:
    """lr, weight_decay, eps and momentum of PyTorch's optimizers may not be negative, betas must be from 0 to below 1.

    Why:    PyTorch raises a ValueError when the engine makes the optimizer.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": -0.9}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    Fix:    none
    Source: torch/optim
    """
    if of_torch(document):
        for pointer, must in _wrong_numbers(document):
            yield Hit(pointer, f"{_said(document, pointer, must)}; PyTorch refuses it")


@rule("DSP609", "optimizer-number-unchecked", severity=WARNING, keys=[PARAMS])
def optimizer_number_unchecked(document: Document) -> Iterator[Hit]:
    """lr, weight_decay, eps and momentum should not be negative, and betas should be from 0 to below 1.

    Why:    DeepSpeed's own optimizers check none of them: a negative lr climbs, a negative weight_decay lets weights grow.
            A beta of 1 divides by zero, and the weights are NaN after one step: error.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": -0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    Fix:    none
    Source: deepspeed/ops/adam/fused_adam.py, FusedAdam; deepspeed/ops/adam/cpu_adam.py, DeepSpeedCPUAdam
    """
    if optimizer_type(document) and not of_torch(document):
        for pointer, must in _wrong_numbers(document):
            nan = "betas" in pointer and document.at(pointer) == 1
            fate = "the first step makes the weights NaN" if nan else "DeepSpeed does not check it"
            yield Hit(pointer, f"{_said(document, pointer, must)}; {fate}", severity=ERROR if nan else None)


@rule("DSP610", "betas-not-two-numbers", severity=ERROR, keys=[f"{PARAMS}/betas"], raises="step")
def betas_not_two_numbers(document: Document) -> Iterator[Hit]:
    """betas must be a list of two numbers.

    Why:    The first step unpacks two, and multiplies by them.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9]}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.999]}}}
    Fix:    none
    Source: deepspeed/ops/adam/fused_adam.py, FusedAdam.step; torch/optim/adam.py
    """
    betas = params(document).get("betas")
    if not isinstance(betas, list):
        return
    if len(betas) != 2:
        yield Hit(f"{PARAMS}/betas", f"optimizer.params.betas has {len(betas)} entries, but must have 2")
    for index, beta in enumerate(betas):
        if number(beta) is None:
            yield Hit(f"{PARAMS}/betas/{index}", f"optimizer.params.betas.{index} is {shape(beta)}, no number")


@rule("DSP611", "learning-rate-out-of-proportion", severity=WARNING, keys=[f"{PARAMS}/lr"])
def learning_rate_out_of_proportion(document: Document) -> Iterator[Hit]:
    """lr should be above 0, and for an optimizer of Adam's kind below 1.

    Why:    Adam, Lion, Lamb and their kin move each weight by about lr in a step, whatever the gradient: from 1 on nothing
            is learned. With 0 nothing moves, unless a schedule writes another.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 10}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Fix:    none
    Source: Kingma and Ba 2015 (arXiv:1412.6980), section 2.1
    """
    kind, lr = optimizer_type(document), number(params(document).get("lr"))
    scheduled = document.at("/scheduler/type") is not None
    if kind is None or lr is None or (scheduled and lr == 0):
        return
    if lr == 0:
        yield Hit(f"{PARAMS}/lr", "optimizer.params.lr is 0: no weight ever changes")
    elif lr >= 1 and kind not in NO_USUAL_RATE:
        yield Hit(f"{PARAMS}/lr", f"optimizer.params.lr is {lr:g}: {kind} moves each weight by about that in a step")


@rule("DSP612", "argument-of-another-class", severity=ERROR, keys=[PARAMS], raises="init")
def argument_of_another_class(document: Document) -> Iterator[Hit]:
    """An argument must be one of the class that really runs: DeepSpeed's fused one, its CPU one, or PyTorch's.

    Why:    torch_adam and an offloaded optimizer change the class behind the type. Another one's arguments make Python
            raise a TypeError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "fused": true}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": true, "fused": true}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_optimizer_configuration
    """
    kind, runs = optimizer_type(document), running_class(document)
    classes = ONLY.get("Adam" if kind in ADAMS else kind or "", {})
    for name in params(document):
        takers = [other for other, only in classes.items() if name in only]
        if takers and runs is not None and runs not in takers:
            torch = ", or set torch_adam" if takers == ["torch.optim.AdamW"] else ""
            yield Hit(
                f"{PARAMS}/{escape(name)}",
                f"{name} is an argument of {one_of(takers)}, but {runs} runs here",
                remedy=f"remove it{torch}",
                on_key=True,
            )


@rule("DSP613", "amsgrad-refused", severity=ERROR, keys=[f"{PARAMS}/amsgrad"], raises="init")
def amsgrad_refused(document: Document) -> Iterator[Hit]:
    """amsgrad true needs PyTorch's Adam.

    Why:    DeepSpeed's Adam and Lamb raise a RuntimeError, when the engine starts or at the first step.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "amsgrad": true}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "amsgrad": true, "torch_adam": true}}}
    Fix:    none
    Source: deepspeed/ops/adam/fused_adam.py; deepspeed/ops/adam/cpu_adam.py; deepspeed/ops/lamb/fused_lamb.py
    """
    refusing = running_class(document) in ("FusedAdam", "DeepSpeedCPUAdam") or optimizer_type(document) == "Lamb"
    if refusing and params(document).get("amsgrad") is True:
        yield Hit(
            f"{PARAMS}/amsgrad",
            f"amsgrad is true, which {running_class(document) or 'FusedLamb'} refuses",
            remedy="set false" if optimizer_type(document) == "Lamb" else "set false, or set torch_adam",
            raises="step" if running_class(document) == "DeepSpeedCPUAdam" else None,
        )


@rule("DSP614", "slow-offloaded-optimizer", severity=WARNING, keys=[TYPE, OFFLOAD])
def slow_offloaded_optimizer(document: Document, zero_stage: int) -> Iterator[Hit]:
    """An optimizer that is offloaded to the CPU should be Adam, AdamW, Adagrad or Lion, and not PyTorch's.

    Why:    Only for those DeepSpeed has kernels for the CPU. The step of another is many times slower, and DeepSpeed checks
            only optimizers that the script brings.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": true}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer; deepspeed/ops/adam/cpu_adam.py
    """
    kind = optimizer_type(document)
    if kind is None or zero_stage == 0 or not offloaded(document) or kind == "Muon":
        return
    if of_torch(document) or kind not in (*ADAMS, "Adagrad", "Lion"):
        what = "torch_adam" if kind in ADAMS else f"optimizer {kind}"
        yield Hit(
            f"{PARAMS}/torch_adam" if kind in ADAMS else TYPE,
            f"{what} has no kernel for the CPU: each step of the offloaded optimizer is slow",
            remedy="remove it" if kind in ADAMS else "write AdamW, Adagrad or Lion",
        )


@rule("DSP615", "lamb-with-loss-scale", severity=ERROR, keys=[TYPE, "/fp16/loss_scale"], raises="init")
def lamb_with_loss_scale(document: Document) -> Iterator[Hit]:
    """Lamb needs dynamic loss scaling: fp16.loss_scale 0.

    Why:    DeepSpeed asserts it when the engine starts, even where fp16 is off.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Lamb", "params": {"lr": 0.001}}, "fp16": {"enabled": false, "loss_scale": 128}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Lamb", "params": {"lr": 0.001}}, "fp16": {"enabled": false, "loss_scale": 0}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _do_sanity_check
    """
    scale = number_at(document, "/fp16/loss_scale", 0.0)
    if optimizer_type(document) == "Lamb" and scale:
        yield Hit("/fp16/loss_scale", f"fp16.loss_scale is {scale:g}, but Lamb needs dynamic scaling", remedy="set 0")


@rule("DSP616", "adamw-stays-adamw", severity=WARNING, keys=[f"{PARAMS}/adam_w_mode"])
def adamw_stays_adamw(document: Document) -> Iterator[Hit]:
    """Type AdamW takes no notice of adam_w_mode.

    Why:    Its decay is AdamW's, adam_w_mode false or not. Only type Adam can be switched.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "adam_w_mode": false}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 0.001, "adam_w_mode": false}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer
    """
    if optimizer_type(document) == "AdamW" and params(document).get("adam_w_mode") is False:
        yield Hit(
            f"{PARAMS}/adam_w_mode",
            "adam_w_mode false has no effect on type AdamW",
            remedy="write type Adam for L2 decay",
        )


@rule("DSP617", "states-of-no-cpu-optimizer", severity=WARNING, keys=[f"{PARAMS}/fp32_optimizer_states"])
def states_of_no_cpu_optimizer(document: Document) -> Iterator[Hit]:
    """fp32_optimizer_states acts on the CPU's Adam only.

    Why:    Without an offloaded optimizer DeepSpeed takes it out of params and drops it.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "fp32_optimizer_states": false}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "fp32_optimizer_states": false}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_optimizer_configuration
    """
    idle = running_class(document) in ("FusedAdam", "torch.optim.AdamW")
    if idle and params(document).get("fp32_optimizer_states") is False:
        yield Hit(
            f"{PARAMS}/fp32_optimizer_states",
            f"fp32_optimizer_states has no effect on {running_class(document)}",
            remedy="remove it, or offload the optimizer",
        )


@rule("DSP618", "optimizer-needs-mup", severity=INFO, keys=[TYPE])
def optimizer_needs_mup(document: Document) -> Iterator[Hit]:
    """MuAdam, MuAdamW and MuSGD need the package mup.

    Why:    Where it is not installed, DeepSpeed logs that, and then fails with an UnboundLocalError.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "MuAdam", "params": {"lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer
    """
    kind = optimizer_type(document)
    if kind in ("MuAdam", "MuAdamW", "MuSGD"):
        yield Hit(TYPE, f"optimizer {kind} needs the package mup; without it the engine does not start")


@rule("DSP619", "optimizer-cannot-step", severity=ERROR, keys=[TYPE], raises="step")
def optimizer_cannot_step(document: Document) -> Iterator[Hit]:
    """LBFGS and SparseAdam cannot be stepped by DeepSpeed.

    Why:    LBFGS wants a closure, which step() is not given; SparseAdam refuses gradients that are dense. The first step
            raises.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "LBFGS", "params": {"lr": 0.1}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    Fix:    none
    Source: torch/optim/lbfgs.py; torch/optim/sparse_adam.py; deepspeed/runtime/engine.py, _take_model_step
    """
    kind = optimizer_type(document)
    if kind in ("LBFGS", "SparseAdam"):
        reason = "needs a closure" if kind == "LBFGS" else "takes sparse gradients only"
        yield Hit(TYPE, f"optimizer {kind} {reason}, so the first step fails")


@rule("DSP620", "nesterov-without-momentum", severity=ERROR, keys=[PARAMS], raises="init")
def nesterov_without_momentum(document: Document) -> Iterator[Hit]:
    """nesterov needs a momentum above 0 and no dampening.

    Why:    PyTorch's SGD raises a ValueError when the engine makes it. Its momentum is 0 by default.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true}}}
    Fix:    none
    Source: torch/optim/sgd.py
    """
    values = params(document)
    still, damped = values.get("momentum", 0) == 0, values.get("dampening", 0) != 0
    if optimizer_type(document) == "SGD" and values.get("nesterov") is True and (still or damped):
        wrong = "momentum is 0" if still else "dampening is not 0"
        yield Hit(f"{PARAMS}/nesterov", f"nesterov is true, but {wrong}, which PyTorch refuses", "set momentum")
