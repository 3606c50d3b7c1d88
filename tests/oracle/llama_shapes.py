"""A Hugging Face Llama of any shape, with grouped-query attention, for deepspeed_rehearsals.py: `"sets": {"width": 512}`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build_model(layers=1, width=96, ffn=256, heads=4, kv_heads=2, vocab=800, positions=64, tied=False):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocab,
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def sample_batch(micro_batch=1, seq_len=32):
    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}
