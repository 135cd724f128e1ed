"""What a training will cost, before it is run."""
