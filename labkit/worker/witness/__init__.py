"""Writes down what ranks must have in common, for the judgement of the run's supervisor (labkit.witness)."""
