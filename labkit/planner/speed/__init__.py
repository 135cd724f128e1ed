"""Predicts the step time: computation, collectives, and their overlap."""
