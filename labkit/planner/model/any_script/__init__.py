"""Runs any script up to its second optimizer step, on tensors without data where that is possible."""
