"""A training script, run unchanged in a child process up to its first backward -> the same Trace."""
