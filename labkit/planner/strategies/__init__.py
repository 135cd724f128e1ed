"""Describes each strategy in a file of its own, named as its script in scripts/strategies: the axes of its mesh, what
it shards, the options worth trying, why it refuses a model, and the memory, the traffic and the waits of its step.

known.py has them all. Nothing else in the planner names a strategy.
"""
