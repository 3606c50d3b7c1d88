"""Trains examples/gpt.py with DeepSpeed's API on made-up tokens. Run it as it is under `dsplan launch`."""

import argparse
from pathlib import Path

import deepspeed
import torch
from gpt import build_model, loss

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--seq-len", type=int, default=128)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=320)
parser.add_argument("--heads", type=int, default=5)
parser.add_argument("--vocab", type=int, default=8000)
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()

torch.manual_seed(0)
model = build_model(args.layers, args.width, args.heads, args.vocab, args.seq_len)
engine, _, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config=str(Path(__file__).with_name("ds_config.json")),
)
for step in range(args.steps * engine.gradient_accumulation_steps()):
    tokens = torch.randint(args.vocab, (args.micro_batch, args.seq_len), device=engine.device)
    value = loss(engine(tokens), (tokens,))
    engine.backward(value)
    engine.step()
    if engine.global_rank == 0:
        print(f"micro-batch {step}: loss {value.item():.4f}", flush=True)
