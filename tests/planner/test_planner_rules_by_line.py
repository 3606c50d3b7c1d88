"""What DeepSpeed 0.19.8 does with optimizers, schedules, pipelines and the other sections, line by line, beside the rule
that says so.

Each expectation was tried with DeepSpeed itself (its parser, or an engine on one CPU rank that made steps), or read in its
source where more than one rank or a GPU is needed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from dsplan.planner.auditing.linting import lint_text
from dsplan.schemas.cluster import parse_cluster

Config = dict[str, Any]


def optimizer(kind: str = "AdamW", **params: Any) -> Config:
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind: str, **params: Any) -> Config:
    return {**optimizer(lr=0.001), "scheduler": {"type": kind, "params": params}}


def zero(stage: int, **more: Any) -> Config:
    return {"zero_optimization": {"stage": stage, **more}}


def experts(**more: Any) -> Config:
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, **more}}


def found(config: Config, cluster: str | None = None) -> list[tuple[str, str]]:
    """The worst rules that speak, and how bad: errors alone where there are any, else warnings, else infos."""
    whole = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, **config}
    findings = lint_text(
        json.dumps(whole), reader="deepspeed", cluster=parse_cluster(cluster) if cluster else None
    ).findings
    for severity in ("error", "warning", "info"):
        if any(finding.severity == severity for finding in findings):
            return sorted({(finding.rule, severity) for finding in findings if finding.severity == severity})
    return []


OPTIMIZERS: dict[str, tuple[Config, str, str]] = {
    "torch's name in the wrong case raises": (optimizer("sgd", lr=0.1), "DSP601", "error"),
    "a removed one raises": (optimizer("OneBitAdam", lr=0.001), "DSP601", "error"),
    "lr beside type is ignored": ({"optimizer": {"type": "AdamW", "lr": 0.01, "params": {}}}, "DSP002", "error"),
    "max_grad_norm raises, 0 too": (optimizer(max_grad_norm=0), "DSP604", "error"),
    "an unknown argument raises": (optimizer(momentum=0.9), "DSP603", "error"),
    "Muon drops an unknown argument": (optimizer("Muon", lr=0.01, foo=1), "DSP603", "warning"),
    "auto raises": (optimizer(lr="auto"), "DSP007", "error"),
    "a number as text raises": (optimizer(lr="1e-3"), "DSP003", "error"),
    "Adam is AdamW": (optimizer("Adam", lr=0.001, weight_decay=0.1), "DSP605", "warning"),
    "AdamW stays AdamW": (optimizer(lr=0.001, adam_w_mode=False), "DSP616", "warning"),
    "Muon at stage 3 raises": ({**optimizer("Muon", lr=0.01), **zero(3)}, "DSP607", "error"),
    "SGD with ZeRO raises": ({**optimizer("SGD", lr=0.1), **zero(1)}, "DSP606", "error"),
    "Lamb with a fixed loss scale raises": (
        {**optimizer("Lamb", lr=0.001), "fp16": {"enabled": False, "loss_scale": 128}}, "DSP615", "error",
    ),
    "a Mu optimizer needs mup": (optimizer("MuAdamW", lr=0.001), "DSP618", "info"),
    "torch refuses a negative lr": (optimizer("SGD", lr=-0.1), "DSP608", "error"),
    "torch refuses a beta of 1": (optimizer(lr=0.001, torch_adam=True, betas=[0.9, 1.0]), "DSP608", "error"),
    "FusedAdam takes a negative lr": (optimizer(lr=-0.001), "DSP609", "warning"),
    "FusedAdam takes a negative decay": (optimizer(lr=0.001, weight_decay=-0.1), "DSP609", "warning"),
    "FusedAdam with a beta of 1 gives NaN": (optimizer(lr=0.001, betas=[0.9, 1.0]), "DSP609", "error"),
    "three betas raise": (optimizer(lr=0.001, betas=[0.9, 0.99, 0.999]), "DSP610", "error"),
    "one beta raises": (optimizer(lr=0.001, betas=0.9), "DSP003", "error"),
    "betas as texts raise": (optimizer(lr=0.001, betas=["0.9", "0.99"]), "DSP610", "error"),
    "lr 10 learns nothing": (optimizer(lr=10), "DSP611", "warning"),
    "lr 0 moves nothing": (optimizer(lr=0), "DSP611", "warning"),
    "foreach belongs to torch's": (optimizer(lr=0.001, foreach=True), "DSP612", "error"),
    "set_grad_none belongs to DeepSpeed's": (optimizer(lr=0.001, torch_adam=True, set_grad_none=True), "DSP612", "error"),
    "FusedAdam refuses amsgrad": (optimizer(lr=0.001, amsgrad=True), "DSP613", "error"),
    "CPUAdam refuses amsgrad": (
        {**optimizer(lr=0.001, amsgrad=True), **zero(2, offload_optimizer={"device": "cpu"})}, "DSP613", "error",
    ),
    "fp32_optimizer_states is dropped": (optimizer(lr=0.001, fp32_optimizer_states=False), "DSP617", "warning"),
    "torch's Adam is slow on the CPU": (
        {**optimizer(lr=0.001, torch_adam=True), **zero(2, offload_optimizer={"device": "cpu"})}, "DSP614", "warning",
    ),
    "LBFGS cannot step": (optimizer("LBFGS", lr=0.1), "DSP619", "error"),
    "nesterov needs momentum": (optimizer("SGD", lr=0.1, nesterov=True), "DSP620", "error"),
}  # fmt: skip

SCHEDULES: dict[str, tuple[Config, str, str]] = {
    "the wrong case raises": (schedule("warmuplr"), "DSP701", "error"),
    "without params it raises": ({**optimizer(lr=0.001), "scheduler": {"type": "WarmupLR"}}, "DSP702", "error"),
    "without type it is ignored": ({**optimizer(lr=0.001), "scheduler": {"params": {}}}, "DSP720", "error"),
    "no warm-up at all raises": (schedule("WarmupLR", warmup_num_steps=0), "DSP004", "error"),
    "a text raises": (schedule("WarmupLR", warmup_num_steps="100"), "DSP003", "error"),
    "auto raises": (schedule("WarmupLR", warmup_num_steps="auto"), "DSP007", "error"),
    "a total as text raises": (schedule("WarmupDecayLR", total_num_steps="5000"), "DSP003", "error"),
    "the decay's default peak wins": (
        {**optimizer(lr=0.01), "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}, "DSP704", "warning",
    ),
    "the cosine takes no warmup_max_lr": (
        schedule("WarmupCosineLR", total_num_steps=5000, warmup_max_lr=0.1), "DSP703", "error",
    ),
    "a total below the warm-up warns": (schedule("WarmupDecayLR", total_num_steps=10), "DSP708", "warning"),
    "a total of 0 warns": (schedule("WarmupCosineLR", total_num_steps=0), "DSP708", "warning"),
    "a warm-up may fall": (schedule("WarmupLR", warmup_min_lr=0.01, warmup_max_lr=0.001), "DSP709", "warning"),
    "a cycle may be upside down": (schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.01), "DSP710", "warning"),
    "a cycle does not decay by a rate alone": (
        schedule("OneCycle", cycle_min_lr=0.01, cycle_max_lr=0.1, decay_lr_rate=0.5), "DSP711", "warning",
    ),
    "a cycle of nothing raises": (schedule("OneCycle"), "DSP702", "error"),
    "a cycle step of 0 raises": (
        schedule("OneCycle", cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=0), "DSP004", "error",
    ),
    "torch's with ZeRO raises": ({**schedule("StepLR", step_size=3), **zero(1)}, "DSP706", "error"),
    "torch's with bf16 raises": ({**schedule("StepLR", step_size=3), "bf16": {"enabled": True}}, "DSP706", "error"),
    "a function cannot be written": (schedule("LambdaLR", lr_lambda="lambda step: 1"), "DSP713", "error"),
    "OneCycleLR needs a length": (schedule("OneCycleLR", max_lr=0.1), "DSP714", "error"),
    "a ratio above 1": (schedule("WarmupCosineLR", total_num_steps=5000, cos_min_ratio=2), "DSP715", "warning"),
    "it may start late": (schedule("WarmupLR", last_batch_iteration=5), "DSP716", "warning"),
    "a range test goes below 0": (schedule("LRRangeTest", lr_range_test_min_lr=-0.1), "DSP717", "warning"),
    "two rates need two groups": (schedule("WarmupLR", warmup_max_lr=[0.1, 0.2]), "DSP719", "info"),
    "without an optimizer it is not read": ({"scheduler": {"type": "WarmupLR", "params": {}}}, "DSP705", "info"),
}  # fmt: skip

SECTIONS: dict[str, tuple[Config, str, str]] = {
    "partitioned_activations is ignored": (
        {"activation_checkpointing": {"partitioned_activations": True}}, "DSP001", "error",
    ),
    "pipeline.seed_layers has no effect": ({"pipeline": {"seed_layers": True}}, "DSP018", "warning"),
    "a text for pipe_partitioned raises": ({"pipeline": {"pipe_partitioned": "true"}}, "DSP014", "error"),
    "null for grad_partitioned raises": ({"pipeline": {"grad_partitioned": None}}, "DSP003", "error"),
    "a text for the interval raises": ({"pipeline": {"activation_checkpoint_interval": "1"}}, "DSP003", "error"),
    "a pipeline refuses ZeRO-2": (
        {**zero(2), "gradient_accumulation_steps": 32, "dsplan": {"pipeline_stages": 2}}, "DSP502", "error",
    ),
    "a pipeline refuses unmanaged accumulation": (
        {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 32, "dsplan": {"pipeline_stages": 2}},
        "DSP504", "error",
    ),
    "a bubble of 60 %": ({"gradient_accumulation_steps": 2, "dsplan": {"pipeline_stages": 4}}, "DSP501", "warning"),
    "the outer switch switches nothing off": (
        {"data_efficiency": {"enabled": False, "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 9}}}},
        "DSP817", "warning",
    ),
    "a curriculum without metrics raises": (
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}, "DSP811", "error",
    ),
    "dynamic batching without tokens raises": (
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}}, "DSP813", "error",
    ),
    "a maximum of null raises": (
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"max_batch_size": None, "enabled": False}}}},
        "DSP003", "error",
    ),
    "token dropping without layers raises": (
        {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, "DSP814", "error",
    ),
    "aio.thread_count was renamed": ({"aio": {"thread_count": 2}}, "DSP010", "error"),
    "a bad tag_validation raises": ({"checkpoint": {"tag_validation": "Never"}}, "DSP004", "error"),
    "load_universal takes any text for true": ({"checkpoint": {"load_universal": "false"}}, "DSP014", "error"),
    "the fast writer may fail": ({"checkpoint": {"writer": {}}}, "DSP842", "info"),
    "a writer of another type raises": ({"checkpoint": {"writer": {"type": "SLOW"}}}, "DSP004", "error"),
    "datastates_ckpt null is on": ({"datastates_ckpt": None}, "DSP841", "error"),
    "wandb.entity is refused": ({"wandb": {"enabled": True, "entity": "us"}}, "DSP001", "error"),
    "a block without enabled is off": ({"csv_monitor": {"output_path": "logs"}}, "DSP821", "warning"),
    "a monitor needs its package": ({"tensorboard": {"enabled": True}}, "DSP822", "info"),
    "tensor_parallel.dtype is refused": ({"tensor_parallel": {"dtype": "bf16"}}, "DSP004", "error"),
    "tp_size alone does nothing": ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "DSP512", "warning"),
    "two sizes raise": ({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}, "DSP513", "error"),
    "a size as text raises": ({"tensor_parallel": {"autotp_size": "2"}}, "DSP517", "error"),
    "an unknown preset is ignored": ({"tensor_parallel": {"preset_model": "mine"}}, "DSP515", "warning"),
    "load_balance_coeff raises where it is off too": (
        {"expert_parallel": {"enabled": False, "load_balance_coeff": 0.1}}, "DSP003", "error",
    ),
    "an unknown key of expert_parallel": (experts(foo=1), "DSP001", "warning"),
    "a bad score_apply raises": (experts(score_apply="never"), "DSP004", "error"),
    "a bad score_apply that is off does not": (
        {"expert_parallel": {"enabled": False, "score_apply": "never"}}, "DSP004", "warning",
    ),
    "autoep_size 0 raises": (experts(autoep_size=0), "DSP004", "error"),
    "autoep_size 1 warns": (experts(autoep_size=1), "DSP523", "warning"),
    "experts are not split": (experts(expert_tensor_parallel_size=2), "DSP522", "error"),
    "an unknown expert preset raises": (experts(preset_model="mine"), "DSP524", "error"),
    "deepep needs a limit": (experts(comm_backend="deepep"), "DSP526", "error"),
    "fused rows need deepep": (experts(row_weighting_impl="fused"), "DSP527", "error"),
    "fused gates need grouped_mm": (experts(gate_up_impl="fused", use_grouped_mm=False), "DSP527", "error"),
    "limited groups above the groups": (experts(num_expert_groups=2, num_limited_groups=4), "DSP529", "error"),
    "a dotted attribute raises": (experts(expert_w1="a.b"), "DSP530", "error"),
    "compile.enabled is gone": ({"compile": {"enabled": True}}, "DSP001", "error"),
    "DeepCompile at stage 0 falls back": ({"compile": {"deepcompile": True}}, "DSP861", "warning"),
    "a vocabulary that is not aligned": ({"vocabulary_size": 50257}, "DSP884", "warning"),
    "a vocabulary as text raises": ({"vocabulary_size": "50304"}, "DSP003", "error"),
    "a bad log_level raises": ({"log_level": "warn"}, "DSP004", "error"),
    "autotuning ends the run": ({"autotuning": {"enabled": True}}, "DSP873", "warning"),
    "autotuning that ends before it starts": (
        {"autotuning": {"enabled": True, "start_profile_step": 9}}, "DSP874", "error",
    ),
    "a profile step as text raises": ({"flops_profiler": {"enabled": True, "profile_step": "3"}}, "DSP003", "error"),
    "a profile step that never comes": ({"flops_profiler": {"enabled": True, "profile_step": -1}}, "DSP871", "warning"),
}  # fmt: skip

SILENT: dict[str, Config] = {
    "the nine names match in any case": optimizer("ADAMW", lr=0.001),
    "params may be null": {"optimizer": {"type": "AdamW", "params": None}},
    "torch's Adam takes amsgrad": optimizer(lr=0.001, torch_adam=True, amsgrad=True),
    "one step of warm-up": schedule("WarmupLR", warmup_num_steps=1),
    "whole floats in a file are whole numbers": schedule("WarmupLR", warmup_num_steps=100.0),
    "torch's schedule at stage 0": schedule("StepLR", step_size=3),
    "a pipeline block beside a plain model": {"pipeline": {"activation_checkpoint_interval": 1}},
    "tag_validation in any case": {"checkpoint": {"tag_validation": "warn"}},
    "comms_logger {}": {"comms_logger": {}},
    "log_level in any case": {"log_level": "INFO"},
    "the hybrid engine at any stage": {"hybrid_engine": {"enabled": True}},
}

CLUSTERS: dict[str, tuple[Config, str, str, str]] = {
    "a bubble": ({**zero(1), "gradient_accumulation_steps": 2, "dsplan": {"pipeline_stages": 4}}, "4", "DSP501", "warning"),
    "stages": ({"gradient_accumulation_steps": 32, "dsplan": {"pipeline_stages": 3}}, "8", "DSP505", "error"),
    "autotp_size does not divide": ({"tensor_parallel": {"autotp_size": 3}}, "8", "DSP511", "error"),
    "autotp_size above the world": ({"tensor_parallel": {"autotp_size": 16}}, "8", "DSP511", "error"),
    "autotp_size and the batch": ({"tensor_parallel": {"autotp_size": 4}}, "8", "DSP516", "info"),
    "autoep_size": (experts(autoep_size=3), "8", "DSP521", "error"),
    "sequence_parallel_size": ({"sequence_parallel_size": 3}, "8", "DSP105", "error"),
    "a mesh": ({"sequence_parallel_size": 4, "data_parallel_size": 4}, "8", "DSP531", "error"),
    "inference_tp_size": ({"hybrid_engine": {"enabled": True, "inference_tp_size": 3}}, "8", "DSP881", "error"),
}  # fmt: skip


@pytest.mark.parametrize("line", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(line: tuple[Config, str, str]) -> None:
    config, rule, severity = line
    assert found(config) == [(rule, severity)]


@pytest.mark.parametrize("line", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(line: tuple[Config, str, str]) -> None:
    config, rule, severity = line
    assert found(config) == [(rule, severity)]


@pytest.mark.parametrize("line", SECTIONS.values(), ids=SECTIONS)
def test_other_sections(line: tuple[Config, str, str]) -> None:
    config, rule, severity = line
    assert found(config) == [(rule, severity)]


@pytest.mark.parametrize("line", CLUSTERS.values(), ids=CLUSTERS)
def test_what_a_cluster_decides(line: tuple[Config, str, str, str]) -> None:
    config, cluster, rule, severity = line
    assert found(config, cluster) == [(rule, severity)]


@pytest.mark.parametrize("config", SILENT.values(), ids=SILENT)
def test_what_deepspeed_takes_as_it_is_meant(config: Config) -> None:
    assert found(config) == []


def test_the_bubble_is_told_in_figures_with_what_would_shrink_it() -> None:
    text = json.dumps(
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "dsplan": {"pipeline_stages": 4}}
    )
    bubble = next(finding for finding in lint_text(text).findings if finding.rule == "DSP501")
    assert "(4 - 1) / (2 + 4 - 1) = 60%" in bubble.message
    assert bubble.remedy == "set 32 or more (8 x stages: 8.6%)"  # 3 / 35
