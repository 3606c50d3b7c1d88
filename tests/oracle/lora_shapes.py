"""The Llama of llama_shapes.py with low-rank adapters or frozen parts, for deepspeed_rehearsals.py: `"sets": {"r": 8}`."""

import importlib.util
from pathlib import Path

from dsplan.planner.models.adapting import Lora
from dsplan.planner.models.adapting_weights import add_lora

_found = importlib.util.spec_from_file_location("llama_shapes", Path(__file__).with_name("llama_shapes.py"))
llama = importlib.util.module_from_spec(_found)
_found.loader.exec_module(llama)


def build_model(r=0, targets="all-linear", dropout=0.0, frozen="", **shape):
    """r: rank of the adapters; 0: none. targets: names of linears, + between. frozen: beginnings of names, comma between."""
    model = llama.build_model(**shape)
    if r:
        add_lora("lora_shapes.py", model, Lora(r=r, dropout=dropout, targets=tuple(targets.split("+"))))
    for name, param in model.named_parameters():
        if frozen and name.startswith(tuple(frozen.split(","))):
            param.requires_grad = False
    return model


sample_batch = llama.sample_batch
