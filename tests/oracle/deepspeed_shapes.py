"""A GPT with an untied head or frozen parameters, for deepspeed_rehearsals.py: `"sets": {"frozen": "tokens,blocks.0"}`."""

import importlib.util
from pathlib import Path

import torch

_found = importlib.util.spec_from_file_location("gpt_example", Path(__file__).parents[2] / "examples" / "gpt.py")
gpt = importlib.util.module_from_spec(_found)
_found.loader.exec_module(gpt)


def build_model(layers=2, width=128, heads=4, vocab=1000, positions=64, untied=True, frozen=""):
    """frozen: beginnings of names, comma between."""
    model = gpt.build_model(layers, width, heads, vocab, positions)
    if untied:
        model.head.weight = torch.nn.Parameter(torch.zeros(vocab, width))
    for name, param in model.named_parameters():
        if frozen and name.startswith(tuple(frozen.split(","))):
            param.requires_grad = False
    return model


sample_batch = gpt.sample_batch
loss = gpt.loss
