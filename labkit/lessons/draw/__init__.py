"""The drawings of the labs."""

from labkit.lessons.draw.bars import bars
from labkit.lessons.draw.buckets import buckets, filled
from labkit.lessons.draw.calls import calls
from labkit.lessons.draw.cells import cells
from labkit.lessons.draw.choice import choice
from labkit.lessons.draw.curves import curves
from labkit.lessons.draw.formats import exponents, formats, gradients
from labkit.lessons.draw.grid import grid
from labkit.lessons.draw.hosts import hosts
from labkit.lessons.draw.lanes import lanes
from labkit.lessons.draw.loader import loader
from labkit.lessons.draw.mesh import mesh
from labkit.lessons.draw.picture import Picture, stacked
from labkit.lessons.draw.replicas import replicas
from labkit.lessons.draw.ring import ring
from labkit.lessons.draw.shards import shards
from labkit.lessons.draw.split import split
from labkit.lessons.draw.step import step

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
