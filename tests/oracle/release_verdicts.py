"""Asks real releases whether they take configurations: `python tests/oracle/release_verdicts.py FOLDER`

FOLDER is that of ask_releases.py, which installs the releases there. Each configuration is handed to DeepSpeedConfig on one
rank; release_verdicts.json holds, for each, the releases that take it.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from ask_releases import PYDANTIC_1, RELEASES


def with_zero(**zero: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "zero_optimization": zero}


def with_block(**blocks: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **blocks}


CONFIGS = [
    with_block(amp={"enabled": True}),
    with_block(amp={"enabled": False}),
    with_block(sparse_gradients=True),
    with_block(nebula={"enabled": False}),
    with_block(curriculum_learning={"enabled": False}),
    with_block(progressive_layer_drop={"enabled": False}),
    with_block(eigenvalue={"enabled": False}),
    with_block(compression_training={}),
    with_block(elasticity={"enabled": False}),
    with_block(graph_harvesting=True),
    with_block(quantize_training={"enabled": False}),
    with_block(sparse_attention={"mode": "fixed"}),
    with_zero(stage=2, mics_shard_size=2),
    with_zero(stage=2, mics_hierarchical_params_gather=False),
    with_zero(stage=3, zeropp_loco_param={"err_beta": 0.8}),
    with_zero(stage=2, zenflow={}),
    with_zero(stage=3, zero_quantized_weights=True),
    with_zero(stage=3, zero_hpz_partition_size=1),
    with_zero(stage=3, log_trace_cache_warnings=True),
    with_zero(stage=3, stage3_module_granularity_threshold=5),
    with_zero(stage=3, stage3_use_all_reduce_for_fetch_params=True),
    with_zero(stage=2, use_multi_rank_bucket_allreduce=False),
    with_zero(stage=2, compute_grad_norm=True),
    with_zero(stage=2, leaf_module={}),
    with_zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    with_zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}),
    with_zero(stage=2, offload_optimizer={"device": "cpu", "cpuadam_cores_perc": 0.5}),
    with_zero(stage=2, cpu_offload=True),
    with_zero(stage=4),
    with_zero(stag=2),
    with_zero(stage=2, overlap_comm="maybe"),
    with_block(fp16={"enabled": True, "opt_level": "O2"}),
    with_block(fp16={"enabled": True}, bf16={"enabled": True}),
    with_block(bf16={"enabled": True, "check_grad_overflow": True}),
    with_block(bf16={"enabled": True, "immediate_grad_update": True}),
    with_block(bf16={"enabled": True, "bf16_optimizer_states": False}),
    with_block(bf16=None),
    with_block(gradient_allreduce_op="sum", zero_optimization={"stage": 3}),
    with_block(torch_autocast={"enabled": True, "dtype": "nothing"}),
    with_block(compile={"enabled": True, "backend": "inductor"}),
    with_block(compile={"deepcompile": True}),
    with_block(tensor_parallel={"autotp_size": 1, "autotp": 1}),
    with_block(tensor_parallel={"autotp_size": 1}),
    with_block(seq_parallel_comm_data_type="fp32"),
    with_block(communication_data_type="bf16"),
    with_block(communication_data_type="bfloat16"),
    with_block(hybrid_engine={"enabled": False, "enable_cuda_graph": True}),
    with_block(wandb={"enabled": False, "entity": "us"}),
    with_block(comet={"enabled": False, "nothing": 1}),
    with_block(tensorboard={"enabled": False, "folder": "x"}),
    with_block(comms_logger={"enabled": False, "level": 2}),
    with_block(timers={"throughput": {"enabled": False, "nothing": 1}}),
    with_block(weight_quantization={"nothing": 1}),
    with_block(checkpoint={"tag_validation": "Sometimes"}),
    with_block(expert_parallel={"enabled": False}),
    with_block(data_types={"grad_accum_dtype": "fp32"}),
    with_block(aio={"thread_count": 2}),
]


def ask(to: Any, folder: Path, release: str) -> None:
    path = [str(folder / release), str(folder / "stand_ins")]
    sys.path[:0] = [str(folder / "pydantic1"), *path] if release in PYDANTIC_1 else path
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    import logging

    import stand_ins  # noqa: F401

    logging.disable(logging.CRITICAL)
    from deepspeed.runtime.config import DeepSpeedConfig

    def takes(config: dict[str, Any]) -> bool:
        try:
            DeepSpeedConfig(json.loads(json.dumps(config)))
        except Exception:
            return False
        return True

    to.send([takes(config) for config in CONFIGS])
    to.close()


def main() -> None:
    import torch  # noqa: F401

    context = multiprocessing.get_context("fork")
    taken: list[list[str]] = [[] for _ in CONFIGS]
    for release in RELEASES:
        mine, theirs = context.Pipe(duplex=False)
        child = context.Process(target=ask, args=(theirs, Path(sys.argv[1]), release))
        child.start()
        theirs.close()
        for accepted, takes in zip(taken, mine.recv(), strict=True):
            accepted += [release] if takes else []
        child.join()
    rows = ",\n".join(
        f"  {json.dumps({'config': config, 'taken_by': accepted})}"
        for config, accepted in zip(CONFIGS, taken, strict=True)
    )
    sys.stderr.write(f"{len(CONFIGS)} configurations, {len(RELEASES)} releases\n")
    Path(__file__).with_name("release_verdicts.json").write_text(f"[\n{rows}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
