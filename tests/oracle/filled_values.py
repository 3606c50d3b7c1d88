"""Asks transformers and Accelerate what they make of a configuration: `python tests/oracle/filled_values.py > filled_values.json`

Needs transformers (recorded with 5.24.0), accelerate (1.15.0) and deepspeed (0.19.8, DS_ACCELERATOR=cpu). The Trainer's
HfTrainerDeepSpeedConfig is given the fields of TrainingArguments at their defaults but for those of the case, and Accelerate's
DeepSpeedPlugin its own fields. Written: the configuration that comes of it, or the keys that the reader names in its refusal.
"""

import contextlib
import copy
import dataclasses
import io
import json
import os
import re
import sys
from types import SimpleNamespace

AUTO = "auto"
OPTIMIZER = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO, "total_num_steps": AUTO},
}
BATCH = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO}
ALL = {
    **BATCH,
    "gradient_clipping": AUTO,
    "fp16": {"enabled": AUTO},
    "bf16": {"enabled": AUTO},
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
}


def adam(**params: object) -> dict:
    return {"optimizer": {"type": "AdamW", "params": {"lr": AUTO, **params}}}


def warmup(**params: object) -> dict:
    return {"scheduler": {"type": "WarmupDecayLR", "params": {**SCHEDULER["params"], **params}}}


TRAINER = [
    (ALL, {}, 1),
    (ALL, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, 4),
    (ALL, {"bf16": True, "learning_rate": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "warmup_steps": 50}, 8),
    (ALL, {"fp16": True, "max_steps": 1000, "warmup_steps": 0.03}, 2),
    (ALL, {"bf16_full_eval": True}, 2),
    ({**ALL, "train_batch_size": 32}, {"per_device_train_batch_size": 1}, 4),
    ({**ALL, "train_batch_size": 4}, {"per_device_train_batch_size": 1}, 4),
    ({**ALL, "train_micro_batch_size_per_gpu": 2}, {}, 1),
    ({**ALL, "gradient_accumulation_steps": 4}, {}, 1),
    ({**ALL, "gradient_clipping": 0.5}, {}, 1),
    ({**ALL, "gradient_clipping": 1}, {}, 1),
    ({**ALL, **adam(lr=1e-4)}, {}, 1),
    ({**ALL, **adam(lr=5e-5)}, {}, 1),
    ({**ALL, **adam(betas=[0.9, 0.95], eps=1e-6, weight_decay=0.01)}, {}, 1),
    ({**ALL, **adam(betas=[0.9, 0.95])}, {"adam_beta2": 0.95}, 1),
    ({**ALL, **warmup(warmup_max_lr=1e-3, warmup_num_steps=100)}, {}, 1),
    ({**ALL, **warmup(warmup_num_steps=1)}, {}, 1),
    ({**ALL, **warmup(warmup_num_steps=100, total_num_steps=500)}, {"warmup_steps": 100, "max_steps": 1000}, 1),
    ({**ALL, **warmup(warmup_min_lr=1e-6)}, {}, 1),
    ({**ALL, "fp16": {"enabled": True}}, {}, 1),
    ({**ALL, "bf16": {"enabled": False}}, {"bf16": True}, 1),
    ({**ALL, "bf16": {"enabled": True}}, {"bf16": True}, 1),
    ({**ALL, "bf16": {"enabled": True}}, {"fp16": True}, 1),
    ({**BATCH, "train_micro_batch_size_per_gpu": None}, {}, 1),
]
"""(configuration, fields of TrainingArguments, ranks)."""

ZERO = {"stage": AUTO, "offload_optimizer": {"device": AUTO, "nvme_path": AUTO}, "offload_param": {"device": AUTO}}
ACCELERATE = [
    ({"gradient_accumulation_steps": AUTO, "zero_optimization": {"stage": AUTO}}, {}, "no"),
    (
        {"gradient_accumulation_steps": AUTO, "zero_optimization": ZERO},
        {"zero_stage": 3, "offload_param_device": "cpu"},
        "bf16",
    ),
    ({"gradient_clipping": AUTO, "zero_optimization": {"stage": 2}}, {"gradient_clipping": 0.5, "zero_stage": 3}, "no"),
    ({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}, {}, "bf16"),
    ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, {}, "fp16"),
    ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": AUTO}}, {}, "bf16"),
    ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}, {}, "bf16"),
    ({"zero_optimization": {"stage": 2}}, {}, "fp16"),
    ({"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}, {"gradient_accumulation_steps": 2}, "no"),
    ({"fp16": {"enabled": True}}, {}, "no"),
]
"""(configuration, fields of DeepSpeedPlugin, mixed_precision)."""


def by_trainer(config: dict, fields: dict, ranks: int) -> dict:
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    defaults = {
        field.name: field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.default is not dataclasses.MISSING
    }
    args = SimpleNamespace(**{**defaults, **fields}, world_size=ranks)
    args.get_warmup_steps = lambda steps: TrainingArguments.get_warmup_steps(args, steps)
    steps = args.max_steps if args.max_steps > 0 else 777
    made = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    made.trainer_config_process(args)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    try:
        made.trainer_config_finalize(args, model, steps)
    except ValueError as error:
        return {"refused": re.findall(r"^- ds (\S+?)=", str(error), re.M)}
    return {"config": made.config}


def by_accelerate(config: dict, fields: dict, mixed: str) -> dict:
    from accelerate.utils import DeepSpeedPlugin

    try:
        plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config), **fields)
        plugin.set_mixed_precision(mixed)
    except ValueError as error:
        return {"refused": str(error).splitlines()[0]}
    made = plugin.deepspeed_config
    made["steps_per_print"] = str(made["steps_per_print"])
    return {"config": made}


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = [
            {"given": config, "args": fields, "ranks": ranks, **by_trainer(config, fields, ranks)}
            for config, fields, ranks in TRAINER
        ]
        accelerate = [
            {"given": config, "args": fields, "mixed_precision": mixed, **by_accelerate(config, fields, mixed)}
            for config, fields, mixed in ACCELERATE
        ]
    json.dump({"trainer": trainer, "accelerate": accelerate}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
