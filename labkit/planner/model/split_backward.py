"""Where gradients of inputs and of weights part: a zero-bubble pipeline computes the one first and the other later, and
keeps in between the gradients from which those of the weights will follow.

Source: torch/distributed/pipelining/_backward.py of torch 2.13 (get_param_groups, stage_backward_input).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["Between", "parting"]


def parting(end: Any, begin: Any, parameters: Iterable[torch.Tensor]) -> set[Any]:
    """Nodes of autograd's graph between `end` and `begin` into which a parameter's own branch leads."""
    wanted = set(parameters)
    used_by: dict[Any, list[Any]] = defaultdict(list)
    seen, waiting, leaves = {end}, [end], []
    while waiting:
        node = waiting.pop()
        if getattr(node, "variable", None) in wanted:
            leaves.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                used_by[following].append(node)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
    on_the_way = _above([begin], used_by, set())
    return {
        node for leaf in leaves for below in _above([leaf], used_by, on_the_way) for node in used_by[below]
    } & on_the_way


def _above(nodes: list[Any], used_by: dict[Any, list[Any]], stop: set[Any]) -> set[Any]:
    """All that lead to them, but for those at which to stop."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for node in used_by.get(waiting.pop(), []):
            if node not in found and node not in stop:
                found.add(node)
                waiting.append(node)
    return found


class Between:
    """Counts the bytes of the gradients that arrive at nodes."""

    def __init__(self, nodes: Iterable[Any]):
        self.bytes = 0
        self._handles = [node.register_prehook(self._count) for node in nodes]

    def _count(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        local = (getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None)
        self.bytes += sum(gradient.numel() * gradient.element_size() for gradient in local)
