"""A strategy cell that a user wrote: it is rehearsed, but nothing else is known about it."""

from __future__ import annotations

from labkit.planner.strategies.strategy import Strategy


class Custom(Strategy):
    unknown = "the strategy cell is not one of labkit's"
