"""Draws how a batch, a model or a machine is divided among ranks."""
