"""Formulas for the peak memory of a rank in a step: no torch, no processes."""
