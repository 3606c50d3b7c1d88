"""A subject -> its Trace: FLOPs, and every byte of one forward and backward, on fake tensors."""
