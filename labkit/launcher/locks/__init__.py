"""Locks what only one run may have at a time: a GPU, a folder of checkpoints."""
