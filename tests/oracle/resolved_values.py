"""Asks real DeepSpeed what it holds of a configuration: `python tests/oracle/resolved_values.py > resolved_values.json`

Needs deepspeed (recorded with 0.19.8: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed==0.19.8). Each text is read with
DeepSpeed's own loader and handed to its DeepSpeedConfig; only the number of ranks that deepspeed.comm tells is replaced.
Written: what DeepSpeed holds of the first text, by JSON pointer; of each other one, what it holds otherwise and not at all.
"""

import contextlib
import enum
import io
import json
import os
import sys
import tempfile

RANKS = 4
B = '"train_micro_batch_size_per_gpu": 1'
TEXTS = [
    '{"train_batch_size": 8}',
    '{"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}',
    '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}',
    '{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}',
    '{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}',
    '{"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "gradient_clipping": 0}',
    f'{{{B}, "zero_optimization": {{"stage": 1}}}}',
    f'{{{B}, "zero_optimization": {{"stage": "2", "reduce_bucket_size": 5e8, "overlap_comm": "no"}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 2.0, "allgather_bucket_size": "200_000_000", "contiguous_gradients": "false"}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "overlap_comm": false, "stage3_max_live_parameters": 1e8}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "overlap_comm": null, "prefetch_bucket_size": 1000, "sub_group_size": 1e9}}}}',
    f'{{{B}, "zero_optimization": {{"stage": "auto", "reduce_bucket_size": "auto"}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": "auto", "typo_here": "auto"}}}}',
    f'{{{B}, "zero_optimization": true}}',
    f'{{{B}, "zero_optimization": false}}',
    f'{{{B}, "zero_optimization": {{"stage": true, "round_robin_gradients": 1}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 2, "cpu_offload": true}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 2, "cpu_offload": false}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "cpu_offload_param": true, "stage3_gather_fp16_weights_on_model_save": true}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}, "offload_param": {{"device": "cpu"}}}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "offload_optimizer": {{"device": "nvme", "nvme_path": "/scratch", "buffer_count": "8",'
    ' "pin_memory": "off", "ratio": 1}, "offload_param": {"device": "auto"}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "offload_param": {{}}, "offload_optimizer": null}}}}',
    f'{{{B}, "zero_optimization": {{"stage": 3, "leaf_module": {{"classes": "Moe", "names": ["mlp"]}}}}}}',
    f'{{{B}, "fp16": {{"enabled": true}}}}',
    f'{{{B}, "fp16": {{"enabled": "true", "loss_scale": "128", "initial_scale_power": 12.0, "loss_scale_window": 500}}}}',
    f'{{{B}, "fp16": {{"enabled": 0, "auto_cast": "yes", "hysteresis": "auto"}}}}',
    f'{{{B}, "bf16": {{"enabled": true}}}}',
    f'{{{B}, "bf16": {{"enabled": "on", "immediate_grad_update": 0}}}}',
    f'{{{B}, "bf16": null, "bfloat16": {{"enabled": true}}}}',
    f'{{{B}, "bf16": {{"enabled": false}}, "bfloat16": {{"enabled": true}}}}',
    f'{{{B}, "bfloat16": {{"enabled": true}}}}',
    f'{{{B}, "optimizer": {{"type": "AdamW", "params": {{"lr": 3e-4, "betas": [0.9, 0.95]}}}}, "scheduler": {{"type": "WarmupLR", "params": {{"warmup_num_steps": 10}}}}}}',
    f'{{{B}, "optimizer": {{"type": "SGD", "lr": 0.1}}, "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false}}',
    f'{{{B}, "activation_checkpointing": {{"partition_activations": true, "number_checkpoints": 4, "partitioned_activations": true}}}}',
    f'{{{B}, "flops_profiler": {{"enabled": true, "profile_step": 5}}, "wall_clock_breakdown": false, "steps_per_print": 50}}',
    f'{{{B}, "tensorboard": {{"enabled": "true", "job_name": "a"}}, "wandb": {{"enabled": false, "project": "p"}}, "csv_monitor": {{}}}}',
    f'{{{B}, "aio": {{"block_size": 262144, "thread_count": 2}}, "data_types": {{"grad_accum_dtype": "fp32"}}}}',
    f'{{{B}, "checkpoint": {{"load_universal": true, "tag_validation": "Ignore"}}, "comms_logger": {{"enabled": true, "verbose": 1}}}}',
    f'{{{B}, "prescale_gradients": "false", "memory_breakdown": true, "dump_state": 1, "zero_optimisation": {{"stage": 3}}}}',
    "{\n  # hjson\n  train_micro_batch_size_per_gpu: 2\n  prescale_gradients: False,\n  gradient_predivide_factor: 2.0\n}",
    f'{{{B}, "pipeline": {{"activation_checkpoint_interval": 1}}, "gradient_allreduce_op": "MEAN", "dataloader_drop_last": true}}',
    f'{{{B}, "compile": {{"deepcompile": "1"}}, "torch_autocast": {{"enabled": true, "dtype": "bf16"}}}}',
    f'{{{B}, "gradient_clipping": null, "vocabulary_size": 32000, "log_level": "info"}}',
]
TOP = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "steps_per_print",
    "dump_state",
    "disable_python_gc",
    "disable_allgather",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "memory_breakdown",
    "dataloader_drop_last",
    "log_level",
]
"""Keys whose attribute bears their name."""
CHECKPOINTING = [
    "partition_activations",
    "contiguous_memory_optimization",
    "cpu_checkpointing",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
]


def plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def flat(value: object, pointer: str) -> dict[str, object]:
    if isinstance(value, dict) and value:
        found: dict[str, object] = {}
        for key, entry in value.items():
            found |= flat(entry, f"{pointer}/{key}")
        return found
    return {pointer: value}


def held(config: object) -> dict[str, object]:
    """What a DeepSpeedConfig holds, by the pointers of the file."""
    values: dict[str, object] = {f"/{name}": plain(getattr(config, name)) for name in TOP}
    models = {
        "zero_optimization": config.zero_config,
        "fp16": config.float16_config,
        "bf16": config.bfloat16_config,
        "tensorboard": config.monitor_config.tensorboard,
        "wandb": config.monitor_config.wandb,
        "csv_monitor": config.monitor_config.csv_monitor,
        "compile": config.compile_config,
        "hybrid_engine": config.hybrid_engine,
    }
    for name, model in models.items():
        values |= flat(plain(model.model_dump(by_alias=True)), f"/{name}")
    checkpointing = config.activation_checkpointing_config
    values |= {f"/activation_checkpointing/{name}": plain(getattr(checkpointing, name)) for name in CHECKPOINTING}
    values |= flat(plain(config.aio_config), "/aio") | flat(plain(config.pipeline), "/pipeline")
    profiler = vars(config.flops_profiler_config)
    values |= {f"/flops_profiler/{name}": plain(entry) for name, entry in profiler.items()}
    values["/optimizer/type"] = config.optimizer_name
    values["/scheduler/type"] = config.scheduler_name
    values |= flat(plain(config.optimizer_params), "/optimizer/params") if config.optimizer_params else {}
    values |= flat(plain(config.scheduler_params), "/scheduler/params") if config.scheduler_params else {}
    values["/data_types/grad_accum_dtype"] = config.grad_accum_dtype
    values["/checkpoint/load_universal"] = config.load_universal_checkpoint
    values["/checkpoint/use_node_local_storage"] = config.use_node_local_storage
    values["/torch_autocast/enabled"] = config.torch_autocast_enabled
    return values


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter):
        from deepspeed.runtime import config as ds
        from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
    ds.dist.get_world_size = lambda group=None: RANKS
    ds.dist.get_rank = lambda group=None: 0
    answers: list[dict] = []
    for text in TEXTS:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file, contextlib.redirect_stdout(chatter):
            file.write(text)
            file.flush()
            values = held(ds.DeepSpeedConfig(load_ds_config(file.name)))
        first = answers[0]["held"] if answers else {}
        changed = {key: value for key, value in values.items() if key not in first or first[key] != value}
        answers.append({"text": text, "held": changed, "not_held": [key for key in first if key not in values]})
    json.dump({"ranks": RANKS, "answers": answers}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
