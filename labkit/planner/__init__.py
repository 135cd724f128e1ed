"""Predicts the memory and time of a training run before it is launched."""
