"""What is known of a model before it is trained, counted on tensors that hold no data."""
