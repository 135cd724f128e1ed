"""Counts the facts of a script's model: sizes, FLOPs, and what each unit holds while it computes. Runs in a process of
its own. Blocks that are alike are counted once.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from labkit.planner.child import answer
from labkit.planner.facts import Facts, Profile, Unit, Variant
from labkit.planner.profiling import Computed, Flow, profile
from labkit.planner.scene import Scene
from labkit.planner.splitting import mesh_of, split


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


# torch's counter knows attention on GPUs only
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """What module.to(dtype) does; tensors without data cannot be converted in place."""
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if parameter not in converted:
                    new = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                    converted[parameter] = new
                owner._parameters[name] = converted[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(dtype)


class Part(NamedTuple):
    """A unit of a model's copy. Parts of one kind compute the same; `parameters` are those it may use."""

    name: str
    kind: int
    compute: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    is_block: bool


class Model:
    """A model of which alike blocks are one module: what can be done in a while to one with a thousand.

    A model that does not say how to embed, or to unembed, is one unit: which part of what it holds is a block's is not
    known. Strategies that free blocks hold less than that.
    """

    def __init__(self, whole: nn.Module):
        self.in_units = all(hasattr(whole, name) for name in ("embed", "blocks", "unembed"))
        self.which: list[int] = []  # of the kept blocks each block is
        if self.in_units:
            kinds: dict[str, int] = {}
            kept = []
            for block in whole.blocks:
                kind = f"{block} {[(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]}"
                if kind not in kinds:
                    kinds[kind] = len(kept)
                    kept.append(block)
                self.which.append(kinds[kind])
            whole.blocks = nn.ModuleList(kept)
        self.module = whole

    def variant(self, scene: Scene, variant: Variant, mesh: DeviceMesh | None = None) -> list[Part]:
        """The parts, in the order of forward, of a copy with parameters of the variant's type."""
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[variant.itemsize]
        with scene.fake:
            module, which = copy.deepcopy(self.module), self.which
            if variant.sequence:  # the first block and the last have more to do
                ends = [(kind, i == 0, i == len(which) - 1) for i, kind in enumerate(which)]
                kinds = list(dict.fromkeys(ends))
                which = [kinds.index(end) for end in ends]
                module.blocks = nn.ModuleList(copy.deepcopy(module.blocks[kind]) for kind, *_ in kinds)
            _convert(module, dtype)
        module.train()
        if variant.recomputed:
            scene.script.recompute_blocks(module)
        if mesh:
            split(scene.script, getattr(module, "blocks", nn.ModuleList()), mesh, variant.sequence)
        if not self.in_units:
            return [Part("model", 0, module, list(module.parameters()), list(module.buffers()), False)]
        blocks = [
            Part(f"blocks.{i}", kind, block, list(block.parameters()), list(block.buffers()), True)
            for i, kind in enumerate(which)
            for block in [module.blocks[kind]]
        ]
        in_blocks = {*module.blocks.parameters(), *module.blocks.buffers()}
        rest = [p for p in module.parameters() if p not in in_blocks]
        others = [b for b in module.buffers() if b not in in_blocks]
        first = Part("embed", -1, module.embed, rest, others, False)
        return [first, *blocks, Part("unembed", -2, module.unembed, rest, [], False)]


def count(
    text: str,
    argv: Sequence[str],
    path: str = "",
    tensor: Sequence[tuple[int, bool]] = (),
    precisions: Sequence[str] = (),
) -> dict[str, Any]:
    """Facts, as JSON. Split layers are counted in `precisions` only, if any are given."""
    scene = Scene(text, argv, path)
    model = Model(scene.model())
    torch.set_default_dtype(torch.float32)
    *sample, samples = scene.sample()
    x, y = (Flow(tuple(t.shape[1:]), torch.float32 if t.is_floating_point() else t.dtype) for t in sample)
    # every way in which labkit's scripts compute
    recompute = [False, True] if hasattr(model.module, "blocks") else [False]
    ways = itertools.product([("fp32", False), ("16", False), ("16", True), ("fp64", False)], recompute)
    variants = [Variant(precision, half, recomputed) for (precision, half), recomputed in ways]
    profiles: dict[Variant, tuple[Profile, ...]] = {}
    unsplit: dict[int, str] = {}
    for (ranks, sequence), variant in itertools.product([(1, False), *map(tuple, tensor)], variants):
        skipped = ranks > 1 and precisions and variant.precision not in precisions
        if ranks not in unsplit and not skipped:
            variant = variant._replace(tensor=ranks, sequence=sequence)
            try:
                parts = model.variant(scene, variant, mesh_of(ranks) if ranks > 1 else None)
            except SystemExit as error:  # the strategy's own words; other strategies can still be planned
                unsplit[ranks] = str(error)
                continue
            with scene.fake:
                computed = _computed(scene, parts, variant, x, y)
                if variant == Variant():
                    units = _units(parts, computed, x)
            profiles[variant] = (*_each_once(parts, computed), computed[-1].profile)
    itemsize = 8 if scene.args.precision == "fp64" else 4
    predictions = math.prod(y.shape)
    return Facts(tuple(units), itemsize, predictions, x.bytes + y.bytes, samples, profiles, unsplit).to_json()


def _computed(scene: Scene, parts: list[Part], variant: Variant, x: Flow, y: Flow) -> list[Computed]:
    """Of each unit, and of the loss."""
    context = partial(torch.autocast, "cpu", torch.bfloat16) if variant.precision == "16" else nullcontext
    if variant.precision == "fp64":
        x, y = (flow._replace(dtype=torch.float64) if flow.dtype.is_floating_point else flow for flow in (x, y))
    flow, kept, known, computed = x, False, {}, []
    for part in parts:
        key = part.kind, flow, kept
        if key not in known:
            call = partial(_call, part.compute, variant)
            known[key] = profile(call, part.parameters, flow, context, data=not computed, input_kept=kept)
        computed.append(known[key])
        flow, kept = known[key].out, known[key].profile.keeps_output
    loss = partial(_loss, scene.script.losses_of)
    return [*computed, profile(loss, [], flow, nullcontext, input_kept=kept, target=y)]


def _each_once(parts: list[Part], computed: list[Computed]) -> list[Profile]:
    """A shared parameter is of the last unit that trains it: there its gradient comes to be."""
    taken: set[torch.Tensor] = set()
    profiles = []
    for part, each in reversed([*zip(parts, computed, strict=False)]):
        own = [i for i, p in enumerate(each.trained) if part.is_block or p not in taken]
        taken |= {*each.trained} if not part.is_block else set()
        once = {name: tuple(getattr(each.profile, name)[i] for i in own) for name in ("parameters", "rows")}
        profiles.append(replace(each.profile, **once))
    return profiles[::-1]


def _call(compute: Callable[..., torch.Tensor], variant: Variant, take: Callable[[], torch.Tensor]) -> torch.Tensor:
    x = take()  # held while it computes, as by the model that calls its blocks in turn
    if variant.half_parameters and x.is_floating_point():  # FSDP casts what comes in
        x = x.to(torch.bfloat16)
    return compute(x)


def _loss(losses_of: Any, take: Callable[[], torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return losses_of(take(), target).mean() / 1


def _units(parts: list[Part], computed: list[Computed], x: Flow) -> list[Unit]:
    """Sizes and FLOPs. What no unit trains is the first unit's."""
    trained_somewhere = {p for each in computed for p in each.trained}
    units, taken, flops_of, value = [], set(), {}, x.make(2)
    for part, each in zip(parts, computed, strict=False):
        if (part.kind, value.shape) not in flops_of:
            with FlopCounterMode(display=False, custom_mapping=ATTENTION) as flops, torch.no_grad():
                flops_of[part.kind, value.shape] = part.compute(value), flops
        value, flops = flops_of[part.kind, value.shape]
        own = each.trained if part.is_block else [p for p in each.trained if p not in taken]
        idle = [p for p in part.parameters if p not in trained_somewhere and p not in taken]
        taken |= {*own, *([] if part.is_block else idle)}
        units.append(
            Unit(
                name=part.name,
                parameters=tuple(p.numel() for p in own),
                frozen=sum(p.numel() for p in idle),
                buffers=sum(b.numel() * b.element_size() for b in part.buffers),
                flops=flops.get_total_flops() // 2,
                output=value[0].numel(),
            )
        )
    return units


if __name__ == "__main__":
    answer(count)
