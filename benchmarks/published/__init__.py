"""Published training runs as plans of ours: reading them, their models, and how far off the prediction is."""
