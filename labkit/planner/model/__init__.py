"""Facts about a model, determined before training on tensors without data."""
