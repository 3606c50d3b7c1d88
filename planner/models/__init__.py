"""The MODEL argument: a model file, a training script or a Hugging Face config -> a subject, without a weight."""
