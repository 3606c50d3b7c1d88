"""The engine itself, run on fake tensors in a fake process group -> a ledger at level rehearsal."""
