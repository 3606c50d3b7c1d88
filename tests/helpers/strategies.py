"""Hypothesis strategies: valid DeepSpeed configurations of many blocks with one thing wrong in them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "ds_config.schema.json").read_text("utf-8"))

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2}
    },
    "fp16 off": {"fp16": {"enabled": False, "auto_cast": False, "consecutive_hysteresis": True, "min_loss_scale": 2}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 128.5, "fp16_master_weights_and_grads": False}},
    "bf16": {"bf16": {"enabled": True, "immediate_grad_update": False, "check_grad_overflow": True}},
    "bf16 off": {"bf16": {"enabled": False, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}},
    "bfloat16": {"bfloat16": {"enabled": True}},
    "both off": {"fp16": {"enabled": False}, "bf16": {"enabled": False}},
    "autocast": {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    },
}
ZEROS: dict[str, dict[str, Any]] = {
    "none": {},
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 200000000,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
        }
    },
    "stage 2": {
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "overlap_comm": False,
            "round_robin_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "ignore_unused_parameters": False,
        }
    },
    "stage 3": {
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 30000000,
            "stage3_param_persistence_threshold": 10000,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e9,
            "offload_param": {
                "device": "cpu",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4, "ratio": 0.5},
        }
    },
    "stage 3, plus plus": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 4,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "memory_efficient_linear": False,
            "leaf_module": {"classes": ["models.Block"], "names": ["mlp"], "name_suffixes": ["experts"]},
            "stage3_module_granularity_threshold": 0,
        }
    },
    "short names": {
        "zero_optimization": {
            "stage": 3,
            "prefetch_bucket_size": 1000,
            "max_live_parameters": 1000,
            "gather_16bit_weights_on_model_save": False,
        }
    },
    "old names": {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}},
    "zenflow": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {
                "topk_ratio": 0.2,
                "select_strategy": "step",
                "select_interval": 8,
                "update_interval": 4,
                "overlap_step": True,
            },
        }
    },
}
BLOCKS: dict[str, dict[str, Any]] = {
    "scalars": {
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
        "prescale_gradients": False,
        "gradient_clipping": 0.5,
        "dump_state": True,
    },
    "reduction": {
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "bf16",
        "gradient_predivide_factor": 2.0,
        "gradient_allreduce_op": "mean",
        "disable_allgather": False,
    },
    "odds": {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "memory_breakdown": True,
        "dataloader_drop_last": True,
        "log_level": "info",
        "vocabulary_size": 32000,
        "use_data_before_expert_parallelism": False,
        "managed_gradient_accumulation": True,
        "disable_python_gc": False,
    },
    "sequence": {"sequence_parallel_size": 1, "data_parallel_size": 1},
    "optimizer": {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            "legacy_fusion": False,
        }
    },
    "scheduler": {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 1000},
        },
    },
    "data types": {
        "data_types": {
            "grad_accum_dtype": "fp32",
            "param_dtype": "fp32",
            "buffer_dtype": "fp32",
            "keep_in_fp32_modules": ["norm"],
        }
    },
    "recompute": {
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": 4,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    },
    "comms": {
        "comms_logger": {
            "enabled": True,
            "verbose": False,
            "prof_all": True,
            "debug": False,
            "prof_ops": ["all_reduce"],
        }
    },
    "monitors": {
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"},
        "wandb": {"enabled": False, "team": "us", "group": "all", "project": "training"},
        "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "run"},
        "comet": {"enabled": False, "project": "training", "samples_log_interval": 50},
    },
    "profiler": {
        "flops_profiler": {
            "enabled": True,
            "profile_step": 5,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        }
    },
    "timers": {"timers": {"throughput": {"enabled": True, "synchronized": False}}},
    "autotuning": {
        "autotuning": {
            "enabled": False,
            "fast": True,
            "results_dir": "results",
            "metric": "throughput",
            "tuner_type": "gridsearch",
            "tuner_num_trials": 20,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
            "model_info": {"num_params": 1000, "hidden_size": 64, "num_layers": 2},
        }
    },
    "aio": {
        "aio": {
            "block_size": 1048576,
            "queue_depth": 16,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    },
    "checkpoint": {
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": True,
            "parallel_write": {"pipeline_stage": True},
            "writer": {
                "type": "FAST",
                "io_buffer_size": 1048576,
                "io_buffer_double": True,
                "data_parallel": "REPLICA",
                "decoupled": False,
            },
        }
    },
    "sampling": {
        "data_efficiency": {
            "enabled": True,
            "seed": 7,
            "data_sampling": {
                "enabled": True,
                "num_workers": 0,
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": "/clusters",
                    "curriculum_metrics": {
                        "seqlen": {
                            "index_to_sample_path": "/a",
                            "difficulty_type": "value",
                            "min_difficulty": 8,
                            "max_difficulty": 64,
                        }
                    },
                },
                "dynamic_batching": {
                    "enabled": True,
                    "max_tokens": 4096,
                    "lr_scaling_method": "sqrt",
                    "min_batch_size": 1,
                },
            },
        }
    },
    "routing": {
        "data_efficiency": {
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 4,
                    "random_ltd_layer_num": 2,
                    "random_ltd_layer_id": [1, 2],
                    "model_type": "decoder",
                    "random_ltd_schedule": {
                        "min_value": 8,
                        "max_value": 64,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
                    },
                    "layer_token_lr_schedule": {"enabled": False},
                },
            }
        }
    },
    "pipeline": {
        "pipeline": {
            "stages": 2,
            "partition": "best",
            "seed_layers": False,
            "activation_checkpoint_interval": 1,
            "pipe_partitioned": True,
            "grad_partitioned": True,
        }
    },
    "tensor parallel": {
        "tensor_parallel": {
            "autotp_size": 2,
            "tp": {"tp_size": 2, "tp_grain_size": 1},
            "tp_overlap_comm": False,
            "keep_module_on_host": True,
            "preset_model": "llama",
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [{"patterns": ["q_proj"], "partition_type": "column"}],
            },
        }
    },
    "expert parallel": {
        "expert_parallel": {
            "enabled": True,
            "autoep_size": 2,
            "expert_tensor_parallel_size": 1,
            "score_func": "softmax",
            "top_k": 2,
            "route_scale": 1.0,
            "comm_backend": "comm",
            "load_balance_coeff": None,
        }
    },
    "compile": {
        "compile": {
            "deepcompile": True,
            "free_activation": False,
            "double_buffer": True,
            "free_activation_threshold": 1000,
            "passes": ["z3"],
        }
    },
    "hybrid engine": {
        "hybrid_engine": {"enabled": False, "max_out_tokens": 256, "inference_tp_size": 1, "pin_parameters": True}
    },
    "quantisation": {
        "weight_quantization": {
            "enabled": False,
            "num_bits": 8,
            "q_type": "symmetric",
            "q_groups": 1,
            "quantized_initialization": {},
            "post_init_quant": {},
        }
    },
    "no effect": {"inference": {}, "allgather_size": 1000, "datastates_ckpt": False},
}
"""Parts that a configuration may have. Each is accepted, alone and beside any others."""

BATCHES: dict[str, dict[str, Any]] = {
    "micro": {"train_micro_batch_size_per_gpu": 2},
    "global": {"train_batch_size": 16},
    "two": {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "global and steps": {"train_batch_size": 32, "gradient_accumulation_steps": 2},
}
"""Accepted on 1, 2, 4 and 8 ranks."""

WORLD_SIZES = (1, 2, 4, 8)
PARTS = {"batch": BATCHES, "precision": PRECISIONS, "zero": ZEROS, "block": BLOCKS}
_MISSING = object()


@dataclass(frozen=True)
class Mutant:
    """A valid configuration and what is done to it: a key goes, a value is put somewhere; either may be absent ("")."""

    parts: tuple[tuple[str, str], ...]
    world_size: int
    remove: str
    put: str
    value: Any

    @property
    def base(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for kind, name in self.parts:
            _merge(config, copy.deepcopy(PARTS[kind][name]))
        return config

    @property
    def config(self) -> dict[str, Any]:
        config = self.base
        if self.remove:
            _holder(config, self.remove).pop(_last(self.remove), None)
        if self.put:
            _holder(config, self.put)[_last(self.put)] = copy.deepcopy(self.value)
        return config


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _last(pointer: str) -> str:
    return pointer.rpartition("/")[2]


def _holder(config: dict[str, Any], pointer: str) -> dict[str, Any]:
    """The block of the pointer's last key; blocks that are not there are made."""
    for step in pointer.split("/")[1:-1]:
        inner = config.setdefault(step, {})
        if not isinstance(inner, dict):
            inner = config[step] = {}
        config = inner
    return config


def _pointers(config: dict[str, Any], at: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        found.append(f"{at}/{key}")
        if isinstance(value, dict):
            found += _pointers(value, f"{at}/{key}")
    return found


def _node(pointer: str) -> dict[str, Any]:
    node = SCHEMA
    for step in pointer.split("/")[1:]:
        node = node.get("properties", {}).get(step, {})
        if "$ref" in node:
            node = _node(node["$ref"].replace("/properties", "").removeprefix("#"))
    return node


def _schema_keys(node: dict[str, Any], at: str = "") -> list[str]:
    found = []
    for name, member in node.get("properties", {}).items():
        if name not in ("$schema", "dsplan"):
            found += [f"{at}/{name}", *_schema_keys(member, f"{at}/{name}")]
    return found


KEYS = _schema_keys(SCHEMA)
"""Every key that the schema knows, as a pointer."""
HOMES = sorted({pointer.rpartition("/")[0] for pointer in KEYS})
NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    -1,
    -2,
    100,
    2**31,
    10**12,
    10**20,
    -(10**9),
    0.0,
    0.5,
    1.5,
    2.0,
    -0.5,
    1e-8,
    1e9,
    1e10,
    3e10,
    1e30,
]
TEXTS = [
    "",
    "auto",
    "none",
    "null",
    "true",
    "false",
    "True",
    "yes",
    "off",
    "0",
    "1",
    "2",
    "4",
    "-1",
    "1.0",
    "1.5",
    "1e3",
    "5e8",
    "5_000",
    " 3 ",
    "inf",
]
WORDS = [
    "cpu",
    "CPU",
    "nvme",
    "fp16",
    "FP32",
    "bfloat16",
    "half",
    "sum",
    "Mean",
    "warn",
    "FAIL",
    "adamw",
    "SGD",
    "LION",
    "WarmupLR",
    "step",
    "fast",
    "mock",
    "no_such_word",
]
SHAPES: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [1],
    ["a"],
    ["auto"],
    [None],
    {"enabled": True},
    {"enabled": False},
    {"device": "cpu"},
    {"a": 1},
    [{}],
]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, *WORDS, *SHAPES])


def _range(node: dict[str, Any]) -> list[Any]:
    """Values about the edges of what the schema allows there."""
    found: list[Any] = []
    for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if word in node:
            edge = node[word]
            found += [edge, edge - 1, edge + 1, edge / 2 + 0.25]
    for word in node.get("enum", []):
        found += [word, word.upper(), word + "s", word.capitalize()] if isinstance(word, str) else [word]
    if "default" in node:
        found.append(node["default"])
    return found or [0, -1, 10**12, 1e30]


@st.composite
def mutants(draw: st.DrawFn) -> Mutant:
    """A valid configuration with one key renamed, moved, retyped, out of range or new; seldom with nothing done to it."""
    parts = [("batch", draw(st.sampled_from(sorted(BATCHES))))]
    parts += [("precision", draw(st.sampled_from(sorted(PRECISIONS)))), ("zero", draw(st.sampled_from(sorted(ZEROS))))]
    blocks = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=0, max_size=3, unique=True))
    parts += [("block", name) for name in blocks]
    base = Mutant(tuple(parts), draw(st.sampled_from(WORLD_SIZES)), "", "", None)
    there = _pointers(base.base)
    kind = draw(st.sampled_from(("renamed", "moved", "retyped", "range", "new", "retyped", "range", "new", "nothing")))
    if kind == "nothing":
        return base
    if kind == "new":
        pointer = draw(st.sampled_from(KEYS))
        value = draw(st.one_of(VALUES, st.sampled_from(_range(_node(pointer)))))
        return Mutant(base.parts, base.world_size, "", pointer, value)
    pointer = draw(st.sampled_from(there))
    home, _, name = pointer.rpartition("/")
    old = _holder(base.base, pointer)[name]
    if kind == "retyped":
        return Mutant(base.parts, base.world_size, "", pointer, draw(VALUES))
    if kind == "range":
        return Mutant(base.parts, base.world_size, "", pointer, draw(st.sampled_from(_range(_node(pointer)))))
    if kind == "moved":
        return Mutant(base.parts, base.world_size, pointer, f"{draw(st.sampled_from(HOMES))}/{name}", old)
    return Mutant(base.parts, base.world_size, pointer, f"{home}/{draw(_misspelt(name))}", old)


def _misspelt(name: str) -> st.SearchStrategy[str]:
    at = st.integers(0, len(name) - 1)
    return st.one_of(
        at.map(lambda i: name[:i] + name[i + 1 :] or "x"),
        at.map(lambda i: name[:i] + name[i : i + 2][::-1] + name[i + 2 :]),
        at.map(lambda i: name[:i] + name[i] + name[i:]),
        st.sampled_from(
            [
                name.upper(),
                name.capitalize(),
                name + "s",
                name + " ",
                "use_" + name,
                name.replace("_", "-"),
                "no_such_key",
            ]
        ),
    )
