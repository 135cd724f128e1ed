"""Determines facts about a model before training, on tensors without data."""
