"""The schema of DeepSpeed's configuration: valid as such, true of PyTorch's names, and of use to an editor as it is."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

SCHEMA: dict[str, Any] = json.loads(
    resources.files("dsplan.schemas").joinpath("ds_config.schema.json").read_text("utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def nodes(node: Any) -> Any:
    if isinstance(node, dict):
        yield node
        for name, member in node.items():
            if name not in ("if", "then"):  # conditions speak of keys that are described elsewhere
                yield from nodes(member)


def test_it_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_key_is_described() -> None:
    for node in nodes(SCHEMA["properties"]):
        for name, member in node.get("properties", {}).items():
            if isinstance(member, dict):
                assert member.get("description") or "$ref" in member, name


def test_defaults_are_valid_values() -> None:
    for node in nodes(SCHEMA["properties"]):
        if "default" in node and isinstance(node.get("type"), (str, list)) and "$ref" not in node:
            jsonschema.validate(node["default"], node)


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"reduce_bucket_size": "auto"}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}}, "$schema": "x", "dsplan": {}},
        {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 0, "offload_param": {"device": "nvme"}}},
        {"bfloat16": {"enabled": True}, "my_own_key": 1},
        {"fp16": {"enabled": False, "loss_scale_window": 0}},
        {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}},
        {"dsplan": {"ignore": ["DSP202"]}},
    ],
)
def test_an_editor_accepts_what_is_right(config: dict[str, Any]) -> None:
    VALIDATOR.validate(config)


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stagee": 1}},
        {"fp16": {"enabled": "auto", "opt_level": "O2"}},
        {"amp": {"enabled": False}},
        {"train_batch_size": 0},
        {"train_batch_size": "eight"},
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"partition_type": "diagonal"}]}}},
        {"dsplan": {"ignore": "DSP202"}},
    ],
)
def test_an_editor_marks_what_is_wrong(config: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(config)


def test_our_examples_are_valid() -> None:
    VALIDATOR.validate(json.loads((Path(__file__).parents[2] / "examples" / "ds_config.json").read_text("utf-8")))


def test_names_and_arguments_of_torch_optimizers_are_those_of_pytorch() -> None:
    optimizer = SCHEMA["properties"]["optimizer"]["properties"]
    for name in optimizer["type"]["x-names"]["torch"]:
        accepted = inspect.signature(getattr(torch.optim, name).__init__).parameters
        if name not in optimizer["type"]["x-names"]["deepspeed"]:
            assert set(optimizer["params"]["x-takes"][name]) <= set(accepted)


def test_names_and_arguments_of_torch_schedules_are_those_of_pytorch() -> None:
    scheduler = SCHEMA["properties"]["scheduler"]["properties"]
    for name in scheduler["type"]["x-names"]["torch"]:
        accepted = inspect.signature(getattr(torch.optim.lr_scheduler, name).__init__).parameters
        assert set(scheduler["params"]["x-takes"][name]) <= set(accepted)
        needed = [
            key for key, entry in accepted.items() if entry.default is entry.empty and key not in ("self", "optimizer")
        ]
        assert scheduler["params"]["x-needs"].get(name, []) == needed
