"""Sweeps: many runs of one script from a queue that survives the kernel."""
