"""Draws the pictures of the labs."""

from labkit_labs.draw.charts import bars, cells, choice, curves, exponents, formats, gradients
from labkit_labs.draw.over_ranks import hosts, mesh, replicas, ring, shards, split
from labkit_labs.draw.over_time import buckets, calls, filled, grid, lanes, loader, step
from labkit_labs.draw.picture import Picture, stacked

__all__ = [
    "Picture",
    "bars",
    "buckets",
    "calls",
    "cells",
    "choice",
    "curves",
    "exponents",
    "filled",
    "formats",
    "gradients",
    "grid",
    "hosts",
    "lanes",
    "loader",
    "mesh",
    "replicas",
    "ring",
    "shards",
    "split",
    "stacked",
    "step",
]
