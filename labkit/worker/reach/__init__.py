"""Requests of the run's owner to a running training, carried out on each rank where a step ends."""
