"""Carries out requests of the run's owner to a running training, on each rank where a step ends."""
