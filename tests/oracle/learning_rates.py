"""Asks real DeepSpeed for its schedules' learning rates: `python tests/oracle/learning_rates.py learning_rates.json`

Needs deepspeed (recorded with 0.19.8: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed==0.19.8). Each case is a
schedule over an optimizer of one or two groups; written is what the groups hold before the first step and after each one,
and what get_lr and get_mom answer there. A case that raises is written with the error's type.
"""

import json
import sys
from pathlib import Path

GROUPS = {"one": [1e-3], "two": [3e-3, 1e-4]}
BASE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
STEPS = 24

CASES = [
    ("WarmupLR", {}, "one"),
    ("WarmupLR", {"warmup_num_steps": 7}, "two"),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 7e-4, "warmup_num_steps": 9}, "two"),
    ("WarmupLR", {"warmup_min_lr": [0, 1e-5], "warmup_max_lr": [1e-3, 3e-4], "warmup_num_steps": 5}, "two"),
    ("WarmupLR", {"warmup_max_lr": 6e-4, "warmup_num_steps": 11, "warmup_type": "linear"}, "one"),
    ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-5, "warmup_num_steps": 6}, "one"),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 0.01}, "one"),
    ("WarmupLR", {"warmup_num_steps": 8, "warmup_max_lr": 0.01, "warmup_type": "cosine"}, "one"),
    ("WarmupLR", {"warmup_num_steps": 8, "warmup_max_lr": 0.01, "last_batch_iteration": 4}, "two"),
    ("WarmupLR", {"warmup_num_steps": 0}, "one"),
    ("WarmupLR", {"warmup_num_steps": 10.0}, "one"),
    ("WarmupLR", {"warmup_min_lr": [0, 0]}, "one"),
    ("WarmupLR", {"peak": 1}, "one"),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 5}, "one"),
    ("WarmupDecayLR", {"total_num_steps": 17, "warmup_num_steps": 6, "warmup_type": "linear"}, "two"),
    ("WarmupDecayLR", {"total_num_steps": 15, "warmup_max_lr": None, "warmup_min_lr": 1e-6, "warmup_num_steps": 3}, "two"),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_max_lr": [2e-3, 5e-4], "warmup_num_steps": 13}, "two"),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 8}, "one"),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4, "last_batch_iteration": 6}, "one"),
    ("WarmupDecayLR", {}, "one"),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5}, "one"),
    ("WarmupCosineLR", {"total_num_steps": 16, "warmup_num_steps": 3, "warmup_type": "linear"}, "two"),
    (
        "WarmupCosineLR",
        {"total_num_steps": 18, "warmup_num_steps": 6, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.25},
        "two",
    ),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 9, "cos_min_ratio": 0.3}, "one"),
    ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 8}, "one"),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": -1}, "one"),
    ("LRRangeTest", {}, "one"),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}, "one"),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": [1e-4, 3e-5], "lr_range_test_step_size": 5, "lr_range_test_staircase": True},
        "two",
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "last_batch_iteration": 10}, "one"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "one"),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4]}, "two"),
    ("OneCycle", BASE, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 6}, "two"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 6, "cycle_second_step_size": 8, "decay_step_size": 2, "decay_lr_rate": 0.1}, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 7, "cycle_second_step_size": 3, "decay_step_size": 3, "decay_lr_rate": 0.3, "decay_mom_rate": 0.02}, "two"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 9, "cycle_second_step_size": 6, "cycle_first_stair_count": 3}, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 7, "cycle_second_step_size": 5, "cycle_first_stair_count": 4, "cycle_second_stair_count": 2}, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 5, "cycle_second_stair_count": 3}, "one"),
    ("OneCycle", {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": [1e-3, 3e-3], "cycle_first_step_size": 5, "cycle_min_mom": [0.7, 0.75], "cycle_max_mom": [0.9, 0.95]}, "two"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 4, "cycle_momentum": False, "decay_step_size": 1, "decay_lr_rate": 0.5}, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 5, "cycle_second_step_size": 0}, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 5, "last_batch_iteration": 3}, "one"),
    ("OneCycle", {**BASE, "cycle_first_step_size": 0}, "one"),
    ("OneCycle", {"cycle_min_lr": 1e-4}, "one"),
    ("OneCycle", {**BASE, "cycle_max_mom": [0.9]}, "two"),
]  # fmt: skip


def answer(kind, params, groups):
    import torch
    from deepspeed.runtime import lr_schedules

    members = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in GROUPS[groups]]
    optimizer = torch.optim.Adam(members)
    try:
        schedule = getattr(lr_schedules, kind)(optimizer, **params)
    except Exception as error:
        return {"raises": type(error).__name__}
    seen = {"lr": [], "get_lr": [], "betas": [], "get_mom": []}
    for step in range(STEPS + 1):
        if step:
            schedule.step()
        seen["lr"].append([group["lr"] for group in optimizer.param_groups])
        seen["get_lr"].append(list(schedule.get_lr()))
        seen["betas"].append([list(group["betas"]) for group in optimizer.param_groups])
        seen["get_mom"].append([list(pair) for pair in schedule.get_mom() or []] if kind == "OneCycle" else [])
    for key in ("betas", "get_mom") if kind != "OneCycle" else ():
        del seen[key]
    return {"last_batch_iteration": schedule.state_dict()["last_batch_iteration"], **seen}


def main():
    answers = [
        {"type": kind, "params": params, "groups": GROUPS[groups], **answer(kind, params, groups)}
        for kind, params, groups in CASES
    ]
    lines = ",\n".join(json.dumps(each) for each in answers)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
