"""Measured and predicted numbers."""
