"""What things are called in a checkpoint."""

STATE = "state.json"
"""The file of all that is no tensor."""
MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
"""Begin the names of tensors."""
