"""Splits backward into input gradients and weight gradients: a zero-bubble pipeline computes the former first and keeps
the intermediate gradients from which it computes the latter.

Source: torch/distributed/pipelining/_backward.py of torch 2.13 (get_param_groups, stage_backward_input).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["Between", "parting"]


def parting(end: Any, begin: Any, parameters: Iterable[torch.Tensor]) -> set[Any]:
    """Nodes of autograd's graph between `end` and `begin` at which a parameter's branch joins."""
    wanted = set(parameters)
    used_by: dict[Any, list[Any]] = defaultdict(list)
    visited, waiting, leaves = {end}, [end], []
    while waiting:
        node = waiting.pop()
        if getattr(node, "variable", None) in wanted:
            leaves.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                used_by[following].append(node)
                if following not in visited:
                    visited.add(following)
                    waiting.append(following)
    on_the_way = _above([begin], used_by, set())
    return {
        node for leaf in leaves for below in _above([leaf], used_by, on_the_way) for node in used_by[below]
    } & on_the_way


def _above(nodes: list[Any], used_by: dict[Any, list[Any]], stop: set[Any]) -> set[Any]:
    """All nodes that lead to `nodes`, without passing through those in `stop`."""
    reached, waiting = set(nodes), list(nodes)
    while waiting:
        for node in used_by.get(waiting.pop(), []):
            if node not in reached and node not in stop:
                reached.add(node)
                waiting.append(node)
    return reached


class Between:
    """Sums the bytes of the gradients that arrive at nodes."""

    def __init__(self, nodes: Iterable[Any]):
        self.bytes = 0
        self._handles = [node.register_prehook(self._count) for node in nodes]

    def _count(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        local = (getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None)
        self.bytes += sum(gradient.numel() * gradient.element_size() for gradient in local)
