"""DSP91x: the configuration beside the model, and the script, that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.positions import Document

ZERO = "/zero_optimization"
DEVICE = f"{ZERO}/offload_optimizer/device"
_SIZES = (
    (f"{ZERO}/reduce_bucket_size", "h x h", lambda h: h * h),
    (f"{ZERO}/stage3_prefetch_bucket_size", "0.9 x h x h", lambda h: int(0.9 * h * h)),
    (f"{ZERO}/stage3_param_persistence_threshold", "10 x h", lambda h: 10 * h),
)
"""Source: transformers/integrations/deepspeed.py, trainer_config_finalize."""
_OF_THE_HOST = ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "ZenFlowCPUAdam")
"""Source: deepspeed/runtime/engine.py, _configure_zero_optimizer (zero_force_ds_cpu_optimizer) of 0.19.8."""
_TESTED = (
    "Adam",
    "AdamW",
    "Adagrad",
    "FusedAdam",
    "FusedLion",
    "DeepSpeedCPUAdagrad",
    "MuonWithAuxAdam",
    *_OF_THE_HOST,
)
"""Source: deepspeed/runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What lint asks of a model. hidden_size: what its config has; None where it has none."""

    source: str
    hidden_known: bool
    """The model was built, so that its config could be looked at."""
    hidden_size: int | None
    widest: int | None
    """Inputs of its widest linear layer."""
    client_optimizer: str | None
    """The class of the optimizer that the file makes itself."""


@rule(
    "DSP911",
    "hidden-size-unknown",
    severity=ERROR,
    keys=[pointer for pointer, _, _ in _SIZES],
    raises="init",
)
def hidden_size_unknown(document: Document, model: ModelFacts, hf_reader: str) -> Iterator[Hit]:
    """Sizes that follow the model's hidden size may be "auto" only where its config has one.

    Why:    The Trainer and Accelerate fill them from hidden_size or hidden_sizes of model.config (of its text_config too),
            and raise a ValueError where there is neither.
    Given:  reader trainer, model.hidden_known 1, model.widest 1024
    Bad:    {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    Good:   {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "zero_optimization": {"stage": 2, "reduce_bucket_size": 1048576}}
    Fix:    none
    Source: transformers/integrations/deepspeed.py, trainer_config_finalize; accelerate/accelerator.py, _prepare_deepspeed
    """
    if not model.hidden_known or model.hidden_size is not None:
        return
    for pointer, formula, size in _SIZES:
        if document.at(pointer) == "auto":
            advice = "write a whole number"
            if model.widest:
                advice = f"write {size(model.widest)} ({formula} for the widest linear layer, h {model.widest})"
            yield Hit(
                pointer,
                f'{title(pointer)} is "auto", but the config of {model.source} has no hidden_size to fill it from',
                remedy=advice,
            )


@rule("DSP912", "client-optimizer-with-offload", severity=ERROR, keys=[DEVICE], raises="init")
def client_optimizer_with_offload(document: Document, model: ModelFacts, zero_stage: int, reader: str) -> Iterator[Hit]:
    """An optimizer of the script's own must be one of DeepSpeed's for the host where its state is offloaded.

    Why:    DeepSpeed raises a ZeRORuntimeException, unless zero_force_ds_cpu_optimizer is false. Accelerate replaces the
            optimizer, so under it and the Trainer there is no error.
    Given:  model.client_optimizer torch.optim.AdamW
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_zero_optimizer
    """
    device, forced = document.at(DEVICE), document.at("/zero_force_ds_cpu_optimizer", True)
    name = (model.client_optimizer or "").rpartition(".")[2]
    refused = name and name not in _OF_THE_HOST and device in ("cpu", "nvme") and zero_stage > 0 and forced
    if refused and reader == "deepspeed":
        yield Hit(
            DEVICE,
            f"{model.source} makes a {model.client_optimizer}, but with offload_optimizer DeepSpeed takes only its own for the host",
            remedy="use DeepSpeedCPUAdam, an optimizer block, or zero_force_ds_cpu_optimizer false",
        )


@rule("DSP913", "client-optimizer-untested", severity=ERROR, keys=["/zero_allow_untested_optimizer"], raises="init")
def client_optimizer_untested(document: Document, model: ModelFacts, zero_stage: int, reader: str) -> Iterator[Hit]:
    """With ZeRO, an optimizer of the script's own that DeepSpeed does not test needs zero_allow_untested_optimizer.

    Why:    DeepSpeed asserts that its class is one of a short list. Accelerate sets the key by itself.
    Given:  model.client_optimizer torch.optim.SGD
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": true}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_optimizer; deepspeed/runtime/zero/utils.py, is_zero_supported_optimizer
    """
    name = (model.client_optimizer or "").rpartition(".")[2]
    allowed = document.at("/zero_allow_untested_optimizer")
    offloaded = document.at(DEVICE) in ("cpu", "nvme")
    if reader == "deepspeed" and name and name not in _TESTED and zero_stage > 0 and not allowed and not offloaded:
        yield Hit(
            ZERO,
            f"{model.source} makes a {model.client_optimizer}, which zero_stage {zero_stage} refuses as untested",
            remedy="set zero_allow_untested_optimizer to true",
            on_key=True,
        )


@rule("DSP914", "client-optimizer-wins", severity=WARNING, keys=["/optimizer"])
def client_optimizer_wins(document: Document, model: ModelFacts, reader: str) -> Iterator[Hit]:
    """Where the script hands over an optimizer, the file should have no optimizer block.

    Why:    DeepSpeed takes the script's, and the block has no effect. Accelerate raises a ValueError where both are there.
    Given:  model.client_optimizer torch.optim.AdamW
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_optimizer; accelerate/accelerator.py, _prepare_deepspeed
    """
    if model.client_optimizer and document.at("/optimizer/type") is not None and reader != "trainer":
        yield Hit(
            "/optimizer",
            f"{model.source} makes a {model.client_optimizer}, which goes before this block",
            remedy="remove the block",
            on_key=True,
            severity=ERROR if reader == "accelerate" else None,
        )
