"""Which attention a Hugging Face model runs, and sequences packed into one row."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.models.adapting import Attention
from dsplan.schemas.problem import Problem

FLASH = "dsplan_fused"
"""Its name among transformers' implementations of attention; one with "flash" in it asks for the package."""


def choose_attention(source: str, config: Any, model_class: Any, attention: Attention) -> list[str]:
    """Set it in the config, before the model is built. Notes; Problem where the class does not have it."""
    name = model_class.__name__
    if attention != "eager":
        flag = "_supports_flash_attn" if attention == "flash" else "_supports_sdpa"
        if not getattr(model_class, flag, False):
            raise Problem(
                f"{source}: --attention {attention} is not what {name} can take: transformers has no such attention for it; "
                f"choose from {', '.join(_known(model_class))}"
            )
    if attention == "flash":
        if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise Problem(
                f"{source}: --attention flash cannot be laid over {name}, which chooses its attention by a table of its own; "
                "leave it out, or choose --attention sdpa"
            )
        from transformers import AttentionInterface

        AttentionInterface.register(FLASH, _attend)  # with no mask of its own: sequences without padding need none
    config._attn_implementation = FLASH if attention == "flash" else attention
    notes = [f"attention: {attention}, as asked for"]
    if attention == "flash":
        notes.append(
            "flash attention takes 16-bit tensors alone: at fp32 its bytes are those that a like kernel would take"
        )
    return notes


def _known(model_class: Any) -> list[str]:
    flash = ["flash"] if getattr(model_class, "_supports_flash_attn", False) else []
    return [*flash, *(["sdpa"] if getattr(model_class, "_supports_sdpa", False) else []), "eager"]


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """[batch, heads, length, dim] -> [batch, length, heads, dim]. Source: transformers/integrations/flash_attention.py."""
    ends = kwargs.get("cu_seq_lens_q")
    if not torch.is_grad_enabled():
        return _counted(query, key, value, 1 if ends is None else ends.shape[0] - 1), None
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = F.pad(value, [0, query.shape[-1] - width])
    made = _FlashAttention.apply(query, key, value, 0 if ends is None else ends.shape[0] - 1)  # type: ignore[no-untyped-call]
    return made[..., :width], None


def _counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: int) -> torch.Tensor:
    """The same by torch's operator, whose FLOPs are known; each of the packed sequences attends to itself alone."""
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if sequences == 1:
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    query, key, value = (
        tensor.reshape(batch * heads, sequences, -1, tensor.shape[-1]) for tensor in (query, key, value)
    )
    made = F.scaled_dot_product_attention(query, key, value)
    return made.reshape(batch, heads, length, -1).transpose(1, 2)


class _FlashAttention(torch.autograd.Function):
    """Saves its inputs, its output, an fp32 logarithm per head and token, and the state of its random numbers.

    Backward takes an fp32 gradient of the query, and keys' and values' gradients for each head of the query.
    sequences: packed ones, or 0. Source: Dao 2023 (arXiv:2307.08691), algorithms 1 and 2; flash_attn 2.7,
    csrc/flash_attn/flash_api.cpp, mha_fwd, mha_bwd and mha_varlen_bwd (lengths in 128, widths in 32).
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: int) -> torch.Tensor:
        made = query.new_empty(query.shape)
        logarithms = query.new_empty(query.shape[:3], dtype=torch.float32)
        random = torch.empty(2, dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, made, logarithms, random)
        ctx.sequences = sequences
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, _, _, _ = ctx.saved_tensors
        batch, length, heads, width = query.shape
        rows = batch * (-(-length // 128) * 128) if not ctx.sequences else batch * length + 128 * ctx.sequences
        to_query = query.new_empty(query.shape)
        to_key, to_value = key.new_empty(key.shape), value.new_empty(value.shape)
        sums = query.new_empty(rows, heads, dtype=torch.float32)
        wide = query.new_empty(rows, heads, -(-width // 32) * 32, dtype=torch.float32)
        if key.shape[2] != heads:
            by_head = [tensor.new_empty(batch, length, heads, width) for tensor in (key, value)]
            to_key, to_value = (whole.view(batch, length, key.shape[2], -1, width).sum(3) for whole in by_head)
        del sums, wide
        return to_query, to_key, to_value, None


Sampler = Callable[[int, "int | None"], "dict[str, Any]"]


def packed(source: str, module: Any, sample: Sampler | None) -> Sampler:
    """micro_batch sequences of seq_len one after the other in one row, with their ends. Problem where a model takes no ends.

    Source: transformers/data/data_collator.py, DataCollatorWithFlattening (return_flash_attn_kwargs).
    """
    kind = type(module).__name__
    parameters = inspect.signature(module.forward).parameters.values()
    takes_ends = any(item.kind is item.VAR_KEYWORD for item in parameters)
    if sample is None or not kind.endswith(("ForCausalLM", "LMHeadModel")) or not takes_ends:
        raise Problem(
            f"{source}: --packed is for causal language models whose forward takes the ends of sequences, which {kind} is not; "
            "leave it out"
        )

    def row(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        length = seq_len or 1
        tokens = torch.zeros(1, micro_batch * length, dtype=torch.long)
        ends = torch.zeros(micro_batch + 1, dtype=torch.int32)
        return {
            "input_ids": tokens,
            "labels": tokens.clone(),
            "position_ids": tokens.clone(),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends.clone(),
            "max_length_q": length,
            "max_length_k": length,
        }

    return row
