"""Checkpoints: safetensors by PyTorch's distributed checkpoint, and all that is no tensor in one JSON."""
