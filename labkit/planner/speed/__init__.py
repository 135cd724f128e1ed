"""How long a step takes: computing, collectives, and what of them overlaps."""
