"""Draws the pictures of the labs, and plays those that have frames."""

from labkit_labs.draw.charts import bars, cells, choice, curves, exponents, formats, gradients, speedups
from labkit_labs.draw.decisions import decision
from labkit_labs.draw.over_ranks import hosts, replicas, ring
from labkit_labs.draw.over_time import buckets, calls, filled, loader, step
from labkit_labs.draw.picture import Picture, stacked
from labkit_labs.draw.player import Film
from labkit_labs.draw.strategies import ddp, mesh, shards, split, zero
from labkit_labs.draw.timelines import grid, grids, lanes, pipeline, schedules

__all__ = [
    "Film",
    "Picture",
    "bars",
    "buckets",
    "calls",
    "cells",
    "choice",
    "curves",
    "ddp",
    "decision",
    "exponents",
    "filled",
    "formats",
    "gradients",
    "grid",
    "grids",
    "hosts",
    "lanes",
    "loader",
    "mesh",
    "pipeline",
    "replicas",
    "ring",
    "schedules",
    "shards",
    "speedups",
    "split",
    "stacked",
    "step",
    "zero",
]
