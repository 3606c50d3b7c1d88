"""DeepSpeed's own checkpoints, read without running anything that is in them, and written as ours."""
