"""What scripts import from deepspeed.runtime."""
