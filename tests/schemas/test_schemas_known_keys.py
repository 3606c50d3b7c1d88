"""Which keys DeepSpeed does not know, and what it does about them (tried with DeepSpeed 0.19.8)."""

import pytest
from dsplan.schemas.known_keys import unknown_keys


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimisation": {"stage": 3}}, [("/zero_optimisation", False)]),
        ({"zero_optimization": {"stge": 3}}, [("/zero_optimization/stge", True)]),
        ({"zero_optimization": {"stge": "auto"}}, [("/zero_optimization/stge", False)]),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            [("/zero_optimization/offload_param/devise", True)],
        ),
        ({"fp16": {"enable": True}, "bf16": {"enabled": True}}, [("/fp16/enable", True)]),
        ({"optimizer": {"name": "Adam"}}, [("/optimizer/name", False)]),
        ({"optimizer": {"type": "X", "params": {"own": 1}}, "scheduler": {"params": {"own": 1}}}, []),
        ({"zero_stage": 3, "fp32_allreduce": True}, [("/zero_stage", False), ("/fp32_allreduce", False)]),
        ({"amp": {"whatever": 1}, "dsplan": {"recompute": "full"}}, []),
        ({"a/b": 1}, [("/a~1b", False)]),
    ],
)
def test_unknown_keys(config, expected):
    assert [(pointer, refused) for pointer, refused, _ in unknown_keys(config)] == expected


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"gradient_cliping": 1}, 'not a key of DeepSpeed, has no effect; did you mean "gradient_clipping"?'),
        ({"zero_stage": 1}, "not a key of DeepSpeed, has no effect; write zero_optimization.stage"),
        ({"note": "mine"}, "not a key of DeepSpeed, has no effect"),
    ],
)
def test_the_meant_key_is_named(config, text):
    assert [said for _, _, said in unknown_keys(config)] == [text]
