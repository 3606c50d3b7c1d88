"""Parts that a valid configuration of DeepSpeed may have: batch sizes, precision, ZeRO, other blocks."""

from __future__ import annotations

from typing import Any

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
