"""What a run really held, moved and took: the meter, and what watches tensors live and die."""
