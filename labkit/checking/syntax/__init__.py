"""A script's syntax tree, and what rules ask of it."""
