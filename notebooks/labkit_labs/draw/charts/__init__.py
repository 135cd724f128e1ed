"""Draws measured and predicted numbers."""
