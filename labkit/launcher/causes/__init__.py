"""Explains why a run failed or makes no progress, from the records of its ranks and from what they are doing now."""
