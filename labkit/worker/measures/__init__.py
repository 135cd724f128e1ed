"""Measures a rank: the loss, memory, and when it computes or waits for other ranks."""
