"""What ranks do in the course of a step."""
