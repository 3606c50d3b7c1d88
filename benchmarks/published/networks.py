"""Decoder models to trace: Hugging Face's classes for runs on them, and a plain one with fused kernels for the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from dsplan.runtime.sharding.blocks import find_blocks
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .architectures import Architecture

Style = Literal["hf", "fused", "megatron"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What decides the activations. dropout and eager attention are Megatron's of 2021, fused_loss is Liger's."""

    architecture: Architecture
    style: Style
    attention: Literal["sdpa", "eager"] = "sdpa"
    dropout: float = 0.0
    positions: int = 0
    fused_loss: bool = False
    shifted_loss: bool = False
    """fp32 logits are shifted by a copy, as Hugging Face's models did until their loss function shifted the labels (4.46)."""
    chunked_loss: Literal["no", "eager", "compiled"] = "no"
    """Head and loss over eight chunks of the sequence, embedding and head apart from the blocks, as torchtune's."""
    checkpointed: bool = False
    """The model computes its own blocks again, and nothing else."""
    selective: bool = False
    """Blocks keep attention and every second product, and compute the rest again, as torchtitan's do."""
    lora_rank: int = 0
    lora_targets: Literal["attention", "all"] = "attention"
    trained_layers: int | None = None
    """Only the last so many blocks are trained; None: everything, or the adapters."""


def build(network: Network) -> nn.Module:
    """The module, on whatever device is the default."""
    arch = network.architecture
    hf = network.style == "hf" and (arch.gated or arch.family != "llama") and not network.fused_loss
    module = _hugging_face(network) if hf else Decoder(network)
    if network.lora_rank:
        _add_lora(module, network)
    if network.trained_layers is not None:
        module.requires_grad_(False)
        for _, block in find_blocks(module)[-network.trained_layers :]:
            block.requires_grad_(True)
    return module


class ShiftedLoss(nn.Module):
    """Source: transformers 4.31, models/llama/modeling_llama.py, LlamaForCausalLM.forward."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=input_ids).logits.float()
        shifted = logits[..., :-1, :].contiguous()
        return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].contiguous().view(-1))


def _hugging_face(network: Network) -> nn.Module:
    """The class of its family; of Llama's, Qwen2's where query, key and value have biases."""
    import transformers

    arch = network.architecture
    family = "qwen2" if arch.family == "llama" and arch.attention_bias else arch.family
    kind, model, table, own = _FAMILIES[family]
    settings = {
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "vocab_size": arch.vocab,
        "tie_word_embeddings": arch.tied,
        "max_position_embeddings": max(table, network.positions) if table else 1 << 20,
        "use_cache": False,
        **own(arch),
    }
    config = getattr(transformers, kind)(**settings)
    try:
        made = getattr(transformers, model)._from_config(config, attn_implementation=network.attention)
    except ValueError:  # a class with one way of attention alone
        made = getattr(transformers, model)._from_config(config, attn_implementation="eager")
    return ShiftedLoss(made) if network.shifted_loss else made


def _grouped(arch: Architecture) -> dict[str, Any]:
    head = {"head_dim": arch.head_dim} if arch.head_dim else {}
    return {"intermediate_size": arch.ffn, "num_key_value_heads": arch.kv_heads, "pad_token_id": 0, **head}


def _wide(name: str) -> Callable[[Architecture], dict[str, Any]]:
    return lambda arch: {name: arch.ffn}


def _falcon(arch: Architecture) -> dict[str, Any]:
    several = 1 < arch.kv_heads < arch.heads
    return {
        "ffn_hidden_size": arch.ffn,
        "num_kv_heads": arch.kv_heads,
        "multi_query": arch.kv_heads == 1,
        "new_decoder_architecture": several,
        "parallel_attn": True,
        "bias": False,
    }


_FAMILIES: dict[str, tuple[str, str, int, Callable[[Architecture], dict[str, Any]]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", 0, _grouped),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", 0, _grouped),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", 1024, _wide("n_inner")),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", 2048, _wide("n_inner")),
    "opt": ("OPTConfig", "OPTForCausalLM", 2048, _wide("ffn_dim")),
    "bloom": ("BloomConfig", "BloomForCausalLM", 0, lambda arch: {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", 0, _wide("intermediate_size")),
    "falcon": ("FalconConfig", "FalconForCausalLM", 0, _falcon),
    "phi": ("PhiConfig", "PhiForCausalLM", 0, _grouped),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", 4096, _grouped),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", 0, _grouped),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", 0, _grouped),
    "bert": ("BertConfig", "BertForMaskedLM", 512, _wide("intermediate_size")),
}
"""Family: configuration, class, length of its table of positions (0: none), what its configuration calls otherwise."""


class Decoder(nn.Module):
    """Norm, attention, norm, feed-forward, with fused norms and activation. Returns the loss."""

    def __init__(self, network: Network):
        super().__init__()
        arch = network.architecture
        self.network = network
        embed, head = nn.Embedding(arch.vocab, arch.hidden), nn.Linear(arch.hidden, arch.vocab, bias=False)
        if arch.tied:
            head.weight = embed.weight
        apart = network.chunked_loss != "no" and not arch.tied
        self.ends = nn.ModuleList([Apart(embed), Apart(head)] if apart else [embed, head])
        self.positions = nn.Embedding(network.positions, arch.hidden) if network.positions else None
        self.drop = nn.Dropout(network.dropout)
        self.blocks = nn.ModuleList(Block(network) for _ in range(arch.layers))
        self.norm = _norm(arch)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embed, head = self.ends
        x = embed(input_ids)
        if self.positions is not None:
            x = x + self.positions.weight[: input_ids.shape[1]]
        x = self.drop(x)
        rope = None if self.positions is not None else _angles(x, self.blocks[0].per_head)
        for block in self.blocks:
            if self.network.selective:
                x = checkpoint(block, x, rope, use_reentrant=False, context_fn=_selective)
            elif self.network.checkpointed:
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope)
        x = self.norm(x)
        if self.network.fused_loss:
            return FusedLinearLoss.apply(x.flatten(0, 1), head.weight, labels.flatten())
        if self.network.chunked_loss != "no":
            return self.by_chunks(head, x, labels)
        return F.cross_entropy(head(x).float().flatten(0, 1), labels.flatten())

    def by_chunks(self, head: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Source: torchtune/modules/loss/ce_chunked_output_loss.py, and transformer.py, chunked_output."""
        logits = [head(chunk) for chunk in x.chunk(CHUNKS, dim=1)]
        pairs = zip(logits, labels.chunk(CHUNKS, dim=1), strict=True)
        if self.network.chunked_loss == "compiled":
            return torch.stack([CompiledLoss.apply(chunk) for chunk, _ in pairs]).sum()
        losses = [
            F.cross_entropy(chunk.float().flatten(0, 1), said.flatten(), reduction="sum") for chunk, said in pairs
        ]
        return torch.stack(losses).sum()


CHUNKS = 8


class Apart(nn.Module):
    """A module that is sharded on its own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class CompiledLoss(torch.autograd.Function):
    """Cross entropy in one kernel, which keeps the logits alone, as they came."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return torch.zeros((), dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return torch.empty_like(logits)


def _selective() -> Any:
    """Source: torchtitan, models/llama/parallelize_llama.py, _apply_ac_to_transformer_block with selective_ac_option "op"."""
    seen: Counter[bool] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        if name.startswith(("aten.mm", "aten.addmm")):
            seen[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        kept = "scaled_dot_product" in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Block(nn.Module):
    def __init__(self, network: Network):
        super().__init__()
        arch = network.architecture
        self.network, self.heads, self.kv_heads = network, arch.heads, arch.kv_heads
        self.per_head = arch.head_dim or arch.hidden // arch.heads
        wide = self.per_head * arch.heads
        kv = self.per_head * arch.kv_heads
        bias = arch.attention_bias or not arch.gated
        self.norm1, self.norm2 = _norm(arch), _norm(arch)
        self.q_proj = nn.Linear(arch.hidden, wide, bias=bias)
        self.k_proj = nn.Linear(arch.hidden, kv, bias=bias)
        self.v_proj = nn.Linear(arch.hidden, kv, bias=bias)
        self.o_proj = nn.Linear(wide, arch.hidden, bias=not arch.gated)
        self.up_proj = nn.Linear(arch.hidden, arch.ffn, bias=not arch.gated)
        self.gate_proj = nn.Linear(arch.hidden, arch.ffn, bias=False) if arch.gated else None
        self.down_proj = nn.Linear(arch.ffn, arch.hidden, bias=not arch.gated)
        self.drop = nn.Dropout(network.dropout)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        x = x + self.drop(self.o_proj(self.attend(self.norm1(x), rope)))
        h = self.norm2(x)
        if self.gate_proj is not None:
            h = FusedSwiGlu.apply(self.gate_proj(h), self.up_proj(h))
        else:
            h = F.gelu(self.up_proj(h))
        return x + self.drop(self.down_proj(h))

    def attend(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.per_head)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.per_head)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.per_head).transpose(1, 2)
        if rope is not None:
            q, k = Rotate.apply(q, rope), Rotate.apply(k, rope)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.network.attention == "sdpa":
            grouped = self.heads != self.kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
            softmax = _softmax if self.network.style == "hf" else FusedSoftmax.apply
            weights = softmax(q @ k.transpose(2, 3))
            out = F.dropout(weights, self.network.dropout, self.training) @ v
        return out.transpose(1, 2).reshape(batch, length, -1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """In fp32, which autograd keeps beside the copy in the scores' dtype. Source: ChatGLM-6B, modeling_chatglm.py, attention_fn."""
    return F.softmax(scores.float() * 1.0, dim=-1).to(scores.dtype)


def _norm(arch: Architecture) -> nn.Module:
    return nn.RMSNorm(arch.hidden) if arch.gated else nn.LayerNorm(arch.hidden)


def _angles(x: torch.Tensor, per_head: int) -> torch.Tensor:
    return torch.empty(x.shape[1], per_head, dtype=x.dtype, device=x.device)


class Rotate(torch.autograd.Function):
    """Rotary positions in one kernel: saves the angles alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rope)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(grad), None


class FusedSwiGlu(torch.autograd.Function):
    """silu(gate) * up in one kernel: saves both inputs, and gives their gradients in place. Source: Liger, swiglu.py."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class FusedSoftmax(torch.autograd.Function):
    """Scale, mask and softmax in one kernel: saves its result. Source: Megatron-LM, scaled_upper_triang_masked_softmax."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(scores)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad)


class FusedLinearLoss(torch.autograd.Function):
    """The head and cross entropy by chunks of rows, with all gradients made in forward.

    Source: Liger-Kernel, ops/fused_linear_cross_entropy.py: chunks of next_power_of_2(rows / ceil(vocab / hidden)) rows.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, (vocab, hidden) = x.shape[0], weight.shape
        wanted = -(-rows // -(-vocab // hidden))
        chunk = 1 << max(0, wanted - 1).bit_length()
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        loss = torch.empty(rows, dtype=torch.float32, device=x.device)
        for start in range(0, rows, chunk):
            logits = x[start : start + chunk] @ weight.t()
            grad_x[start : start + chunk] = logits @ weight
            grad_weight += logits.t() @ x[start : start + chunk]
        ctx.save_for_backward(grad_x, grad_weight)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x, grad_weight, None


class Lora(nn.Module):
    """A frozen linear and two thin ones. Source: peft, tuners/lora/layer.py."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.05)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x))) * 2.0


_ATTENTION_LINEARS = re.compile("(q|k|v|qkv)_proj|query_key_value|query|key|value")
_BLOCK_LINEARS = re.compile(r".*_proj|query_key_value|query|key|value|dense(_.*)?|fc\d|fc_(in|out)")


def _add_lora(module: nn.Module, network: Network) -> None:
    module.requires_grad_(False)
    wanted = _ATTENTION_LINEARS if network.lora_targets == "attention" else _BLOCK_LINEARS
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and wanted.fullmatch(name)
    ]
    for parent, name, child in places:
        setattr(parent, name, Lora(child, network.lora_rank))
