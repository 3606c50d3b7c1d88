"""The loss of a causal language model without its logits: fused with the output layer, or in chunks."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.models.adapting import Loss
from dsplan.schemas.problem import Problem
from torch import nn
from torch.utils.checkpoint import checkpoint


def change_loss(source: str, module: nn.Module, loss: Loss) -> list[str]:
    """Let the output layer hand on its input, from which the loss makes the logits itself. Notes.

    Problem for a model whose forward does not pass its logits from its output layer to `loss_function`.
    """
    if loss.kind == "plain":
        return []
    head = _output_layer(source, module, loss)
    config = module.config
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        config.final_logit_softcapping = None  # type: ignore[union-attr]
    head.forward = lambda input: input  # type: ignore[method-assign]

    def loss_function(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        hidden = logits.reshape(-1, logits.shape[-1])
        wanted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        if not torch.is_grad_enabled():
            return _plain(hidden, wanted, head, softcap)
        if loss.kind == "fused":
            return _FusedLoss.apply(hidden, head.weight, head.bias, wanted)  # type: ignore[no-any-return, no-untyped-call]
        sums = [
            checkpoint(_plain, part, own, head, softcap, use_reentrant=False)
            for part, own in zip(hidden.chunk(loss.chunks), wanted.chunk(loss.chunks), strict=True)
        ]
        return torch.stack(sums).sum() / wanted.numel()

    module.loss_function = loss_function  # type: ignore[assignment]
    if loss.kind == "fused":
        return ["loss fused with the output layer, as Liger's: no logits are kept, and gradients are made in forward"]
    return [f"loss in {loss.chunks} chunks: the logits of one at a time, computed again in backward"]


def _output_layer(source: str, module: nn.Module, loss: Loss) -> nn.Linear:
    option = f"--loss {loss.kind}" + (f":{loss.chunks}" if loss.kind == "chunked" else "")
    kind = type(module).__name__
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    name = next((name for name, held in module.named_modules() if head is not None and held is head), None)
    if not kind.endswith(("ForCausalLM", "LMHeadModel")) or name is None:
        raise Problem(f"{source}: {option} is for causal language models, but {kind} is none; leave it out")
    text = inspect.getsource(type(module).forward)
    if type(head) is not nn.Linear or f"self.{name}(" not in text or "self.loss_function(" not in text:
        raise Problem(
            f"{source}: {option} cannot be laid over {kind}, which does not hand the logits of its output layer to a loss of its "
            "own; leave it out, or write a model.py with the loss as you have it"
        )
    return head


def _plain(hidden: torch.Tensor, labels: torch.Tensor, head: nn.Linear, softcap: float | None) -> torch.Tensor:
    """The sum over tokens, by logits in fp32."""
    logits = F.linear(hidden, head.weight, head.bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits.float(), labels, reduction="sum")


class _FusedLoss(torch.autograd.Function):
    """Makes the gradients of the hidden states and of the output layer in forward, a chunk of logits at a time.

    A chunk's logits take about as many bytes as all hidden states. Source: Hsu et al. 2024 (arXiv:2410.10989), section 3.2;
    liger_kernel/ops/fused_linear_cross_entropy.py for the size of a chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor) -> torch.Tensor:
        tokens, width = hidden.shape
        vocabulary = weight.shape[0]
        parts = math.ceil(vocabulary / width)
        rows = min(tokens, 1 << (math.ceil(tokens / parts) - 1).bit_length())
        _, wants_weight, wants_bias, _ = ctx.needs_input_grad
        to_hidden = torch.zeros_like(hidden)
        to_weight = torch.zeros_like(weight) if wants_weight else None
        to_bias = torch.zeros_like(bias) if bias is not None and wants_bias else None
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        logits = hidden.new_empty(rows, vocabulary)
        for start in range(0, tokens, rows):
            part = logits[: min(rows, tokens - start)]
            torch.mm(hidden[start : start + rows], weight.t(), out=part)
            torch.mm(part, weight, out=to_hidden[start : start + rows])
        del logits
        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any, Any, None]:
        return *ctx.saved_tensors, None
