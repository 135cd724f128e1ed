"""Computes the peak memory of a rank in a step by formulas, without torch and without processes."""
