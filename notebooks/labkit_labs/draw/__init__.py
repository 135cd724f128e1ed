"""Draws the pictures of the labs."""

from labkit_labs.draw.cells import cells
from labkit_labs.draw.charts.bars import bars
from labkit_labs.draw.charts.curves import curves
from labkit_labs.draw.charts.float_formats import exponents, formats, gradients
from labkit_labs.draw.charts.strategy_map import choice
from labkit_labs.draw.over_ranks.fsdp_shards import shards
from labkit_labs.draw.over_ranks.hosts import hosts
from labkit_labs.draw.over_ranks.mesh import mesh
from labkit_labs.draw.over_ranks.replicas import replicas
from labkit_labs.draw.over_ranks.ring_all_reduce import ring
from labkit_labs.draw.over_ranks.tensor_parallel import split
from labkit_labs.draw.over_time.collective_calls import calls
from labkit_labs.draw.over_time.data_loader import loader
from labkit_labs.draw.over_time.ddp_buckets import buckets, filled
from labkit_labs.draw.over_time.lanes import lanes
from labkit_labs.draw.over_time.pipeline import grid
from labkit_labs.draw.over_time.step_memory import step
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
