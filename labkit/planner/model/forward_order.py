"""Divides a model into units by recording how its forward calls its blocks: everything before the first block is one
unit, everything after the last another. Of blocks with the same computation only the first computes. Runs in the
planner's child process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from labkit.planner.model.unit_costs import SAMPLES, Flow, Take


class NotFollowedError(Exception):
    """The blocks are not a chain in which each takes the previous block's output, or gradients bypass them."""

    def __str__(self) -> str:
        return "the layers are not a chain in which each takes the previous layer's output"


class _Reached(Exception):
    """The first block was called, with these arguments."""

    def __init__(self, leaves: list[Any]):
        super().__init__()
        self.leaves = leaves


@dataclass
class Call:
    """A call of a block: its inputs and outputs besides the tensor that flows, and the position of that tensor."""

    samples: int
    block: nn.Module
    block_kind: str
    inputs: list[Any]
    inputs_spec: TreeSpec
    outputs: list[Any] = field(default_factory=list)
    outputs_spec: TreeSpec | None = None
    input_at: int = -1
    output_at: int = -1
    flow: Flow | None = None  # of the output

    @property
    def kind(self) -> str:
        """Equal for blocks with the same computation."""
        return f"{self.block_kind} {[_described(leaf) for leaf in self.inputs]}"

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the other inputs."""
        return [leaf for leaf in self.inputs if torch.is_tensor(leaf)]


class Followed:
    """`run` calls the model on a batch as the script does; `make` makes a batch of a number of samples. Raises
    NotFollowedError."""

    def __init__(self, run: Callable[[Any], Any], make: Callable[[int], Any], blocks: Sequence[nn.Module]):
        self._run, self._make, self.blocks = run, make, list(blocks)
        if len(self.blocks) < 2:
            raise NotFollowedError
        self._kinds = {block: kind_of(block) for block in self.blocks}
        self.calls = {samples: self._recorded(samples) for samples in SAMPLES}
        self._beside_first: list[Any] = []

    def alike(self) -> dict[nn.Module, nn.Module]:
        """For each block the first one that does the same."""
        first: dict[Any, nn.Module] = {}
        return {call.block: first.setdefault((call.kind, call.flow), call.block) for call in self.calls[SAMPLES[0]]}

    def embed(self, take: Take, batch: Any) -> torch.Tensor:
        """The part before the first block. Its other outputs for blocks are held until the next call."""
        self._beside_first = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(tree_flatten((args, kwargs))[0])

        try:
            with _replaced({self.blocks[0]: stop}):
                self._run(batch)
        except _Reached as reached:
            leaves = reached.leaves
        x: torch.Tensor = leaves.pop(self.calls[SAMPLES[0]][0].input_at)
        self._beside_first = leaves
        return x

    def block(self, number: int, cast: Callable[[Any], Any] | None) -> Callable[..., torch.Tensor]:
        """A function that computes a block; it takes the block's call in addition to its input and casts all inputs."""

        def compute(take: Take, call: Call) -> torch.Tensor:
            leaves = list(call.inputs)
            leaves[call.input_at] = x = take()  # held during the computation, as by the model's loop over blocks
            args, kwargs = tree_unflatten([cast(leaf) for leaf in leaves] if cast else leaves, call.inputs_spec)
            del leaves
            out: torch.Tensor = tree_flatten(self.blocks[number](*args, **kwargs))[0][call.output_at]
            del x
            return out

        return compute

    def unembed(self, take: Take, batch: Any, calls: list[Call]) -> torch.Tensor:
        """The part after the last block. It also computes the part before the first block."""

        following = iter(calls)  # a block may be called several times

        def instead(*args: Any, **kwargs: Any) -> Any:
            call = next(following)
            leaves = list(call.outputs)
            assert call.flow and call.outputs_spec
            leaves[call.output_at] = take() if call is calls[-1] else call.flow.make(call.samples)
            return tree_unflatten(leaves, call.outputs_spec)

        with _replaced(dict.fromkeys(self.blocks, instead)):
            return self._tensor_of(self._run(batch))

    def outputs(self, logits: torch.Tensor) -> Any:
        """The model's outputs with this tensor."""
        leaves = list(self._returned)
        leaves[self._returned_at] = logits
        return tree_unflatten(leaves, self._returned_spec)

    def _recorded(self, samples: int) -> list[Call]:
        calls: list[Call] = []
        computed: dict[str, Any] = {}  # the outputs of the first block of each kind

        def once(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = calls[-1]
            kind = f"{call.kind} {[tensor.requires_grad for tensor in call.tensors()]}"
            if kind in computed:
                return _like(computed[kind])
            computed[kind] = forward(*args, **kwargs)
            return computed[kind]

        def before(block: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append(Call(samples, block, self._kinds[block], *tree_flatten((args, kwargs))))

        def after(block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            calls[-1].outputs, calls[-1].outputs_spec = tree_flatten(out)

        hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in self._kinds]
        hooks += [block.register_forward_hook(after, with_kwargs=True) for block in self._kinds]
        try:
            with _replaced({block: partial(once, block.forward) for block in self._kinds}):
                returned = self._run(self._make(samples))
        finally:
            for hook in hooks:
                hook.remove()
        if [id(call.block) for call in calls] != [id(block) for block in self.blocks]:
            raise NotFollowedError
        for one, following in pairwise(calls):
            handed_on = [
                (i, j)
                for i, out in enumerate(one.outputs)
                for j, into in enumerate(following.inputs)
                if torch.is_tensor(out) and out is into
            ]
            if len(handed_on) != 1:
                raise NotFollowedError
            [(one.output_at, following.input_at)] = handed_on
        calls[0].input_at, calls[-1].output_at = calls[1].input_at, calls[-2].output_at
        for call in calls:
            _check(call)
        self._tensor_of(returned)
        self._returned, self._returned_spec = tree_flatten(returned)
        self._returned_at = next(i for i, leaf in enumerate(self._returned) if torch.is_tensor(leaf))
        self._returned[self._returned_at] = None
        return calls

    def _tensor_of(self, returned: Any) -> torch.Tensor:
        """The only tensor among the model's outputs."""
        tensors = [leaf for leaf in tree_flatten(returned)[0] if torch.is_tensor(leaf)]
        if len(tensors) != 1:
            raise NotFollowedError
        return tensors[0]


def _check(call: Call) -> None:
    """Check that only the tensor that flows has a gradient, and remove it from the recorded inputs and outputs."""
    if call.input_at >= len(call.inputs) or call.output_at >= len(call.outputs):
        raise NotFollowedError
    into, out = call.inputs[call.input_at], call.outputs[call.output_at]
    if not all(
        torch.is_tensor(x) and x.is_floating_point() and x.dim() and len(x) == call.samples for x in (into, out)
    ):
        raise NotFollowedError
    call.flow = Flow.of(out)
    call.inputs[call.input_at] = call.outputs[call.output_at] = None
    if any(torch.is_tensor(leaf) and leaf.requires_grad for leaf in (*call.inputs, *call.outputs)):
        raise NotFollowedError


def kind_of(block: nn.Module) -> str:
    """Equal for blocks that compute the same with the same inputs."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return f"{block} {parameters} {[(name, b.shape, b.dtype) for name, b in block.named_buffers()]}"


def _like(outputs: Any) -> Any:
    """New outputs of another block that does the same."""

    def make(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        made = torch.empty_like(leaf)
        return made.requires_grad_().clone() if leaf.requires_grad else made  # no leaf, which may not be changed

    return tree_map(make, outputs)


def _described(leaf: Any) -> str:
    if torch.is_tensor(leaf):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replace the forward of blocks."""
    before = {block: vars(block).get("forward") for block in forwards}
    for block, forward in forwards.items():
        block.forward = forward
    try:
        yield
    finally:
        for block, own in before.items():
            if own is None:
                del block.forward
            else:
                block.forward = own
