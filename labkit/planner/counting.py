"""Counts the facts of a script's model: sizes, FLOPs, and what each unit holds while it computes. Runs in a process of
its own. Blocks that are alike are counted once.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from labkit.planner.child import answer
from labkit.planner.facts import Facts, Line, Profile, Unit, Variant
from labkit.planner.profiling import Beside, Computed, Flow, profile
from labkit.planner.scene import Batches, Scene
from labkit.planner.splitting import mesh_of, split
from labkit.write import Script


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


# torch's counter knows attention on GPUs only
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by their bytes


class Part(NamedTuple):
    """A unit of a model's copy. Parts of one kind compute the same; `parameters` are those it may use."""

    name: str
    kind: int
    compute: Callable[..., Any]
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    is_block: bool


class Model:
    """A model of which alike blocks are one module: what can be done in a while to one with a thousand.

    A model that does not say how to embed one tensor, or to unembed, is one unit together with its loss: which part of
    what it holds is a block's is not known. Strategies that free blocks hold less than that.
    """

    def __init__(self, scene: Scene, batches: Batches):
        self.scene, self.batches = scene, batches
        self.module = whole = scene.model()
        self.own_parts = all(hasattr(whole, name) for name in ("embed", "blocks", "unembed"))
        self.in_units = self.own_parts and len(scene.inputs_of(batches.make(2))) == 1
        self.layers, self.uncut = len(scene.script.blocks_of(whole)), self._uncut()
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

    def _uncut(self) -> str:
        """Why it makes no stages of a pipeline, by the pipeline's own check."""
        pipeline = ModuleType("pipeline")
        exec(Script.load("pipeline").cells["step"].text, vars(pipeline))
        check = getattr(self.scene.script, "check_model", pipeline.check_model)
        try:
            blocks = self.scene.script.blocks_of(self.module, needed_by="a pipeline")
            check(self.module, blocks, 1, self.own_parts)
        except SystemExit as error:
            return str(error)
        return ""

    def variant(self, variant: Variant, mesh: DeviceMesh | None = None) -> list[Part]:
        """The parts, in the order of forward, of a copy with parameters of the variant's type."""
        script = self.scene.script
        # deepcopy alone would also copy the mode, of which each tensor without data knows: torch then corrupts its heap
        with self.scene.fake, FakeCopyMode(self.scene.fake):
            module, which = copy.deepcopy(self.module), self.which
            if variant.sequence and self.in_units:  # the first block and the last have more to do
                ends = [(kind, i == 0, i == len(which) - 1) for i, kind in enumerate(which)]
                kinds = list(dict.fromkeys(ends))
                which = [kinds.index(end) for end in ends]
                module.blocks = nn.ModuleList(copy.deepcopy(module.blocks[kind]) for kind, *_ in kinds)
            module.to(TYPES[variant.itemsize])
        module.train()
        blocks = script.blocks_of(module) if self.layers else []
        for block in blocks if variant.recomputed else []:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if mesh:
            split(script, module, blocks, mesh, variant.sequence)
        if not self.in_units:
            return [Part("model", 0, module, list(module.parameters()), list(module.buffers()), False)]
        parts = [
            Part(f"blocks.{i}", kind, block, list(block.parameters()), list(block.buffers()), True)
            for i, kind in enumerate(which)
            for block in [module.blocks[kind]]
        ]
        in_blocks = {*module.blocks.parameters(), *module.blocks.buffers()}
        rest = [p for p in module.parameters() if p not in in_blocks]
        others = [b for b in module.buffers() if b not in in_blocks]
        first = Part("embed", -1, module.embed, rest, others, False)
        return [first, *parts, Part("unembed", -2, module.unembed, rest, [], False)]

    def computed(self, parts: list[Part], variant: Variant) -> list[Computed]:
        """Of each unit, and of the loss."""
        half = partial(torch.autocast, "cpu", torch.bfloat16) if variant.precision == "16" else nullcontext
        dtype = torch.float64 if variant.precision == "fp64" else torch.float32
        if not self.in_units:
            return self._whole(parts[0], variant, half, dtype)
        flow, kept, known, computed = self.input(dtype), False, {}, []
        for part in parts:
            key = part.kind, flow, kept
            if key not in known:
                call = partial(_call, part.compute, variant)
                known[key] = profile(call, part.parameters, flow, half, data=not computed, input_kept=kept)
            computed.append(known[key])
            flow, kept = known[key].out, known[key].profile.keeps_output
        loss = profile(self._loss, [], flow, nullcontext, input_kept=kept, beside=partial(self._beside, dtype))
        return [*computed, loss]

    def _whole(self, part: Part, variant: Variant, half: Any, dtype: torch.dtype) -> list[Computed]:
        """The model as the script calls it, with the loss; and a loss of which nothing is left."""

        def compute(take: Any, batch: Any, count: torch.Tensor) -> torch.Tensor:
            return self._loss(None, batch, count, partial(_cast_call, part.compute, variant, half))

        beside = partial(self._beside, dtype)
        found = profile(compute, part.parameters, Flow((), dtype), nullcontext, data=True, beside=beside)
        bytes_ = self.bytes(dtype)
        whole = replace(found.profile, input=Line(0, bytes_), output=Line(), keeps_input=False, keeps_output=False)
        nothing = Profile((), (), Line(), Line(), (), Line(), False, False, 0, ())
        return [found._replace(profile=whole), Computed(nothing, found.out, [])]

    def _loss(self, take: Any, batch: Any, count: torch.Tensor, model: Callable[..., Any] | None = None) -> Any:
        """As the step cell computes it, of what the model, or else a unit, has put out."""
        script = self.scene.script
        outputs = script.outputs_of(model or (lambda *args, **others: take()), batch)
        return script.loss_of(outputs, batch) / count.clamp(min=1) * 1

    def _beside(self, dtype: torch.dtype, samples: int) -> Beside:
        batch = self.batches.make(samples, dtype)
        with self.scene.fake:
            count = self.scene.script.count_of(batch)
        return (batch, count), [*self.batches.tensors(batch), count]

    def input(self, dtype: torch.dtype) -> Flow:
        """The tensor that the first unit takes."""
        return Flow.of(self.scene.inputs_of(self.batches.make(2, dtype))[0])

    def bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Of a batch, per sample."""
        two, three = (sum(t.numel() * t.element_size() for t in self.batches.tensors(self.batches.make(n, dtype)))
                      for n in (2, 3))  # fmt: skip
        return three - two

    def units(self, parts: list[Part], computed: list[Computed]) -> list[Unit]:
        """Sizes and FLOPs. What no unit trains is the first unit's."""
        trained_somewhere = {p for each in computed for p in each.trained}
        units, taken, flops_of = [], set(), {}
        value = self.batches.make(2) if not self.in_units else self.input(torch.float32).make(2)
        for part, each in zip(parts, computed, strict=False):
            key = part.kind, getattr(value, "shape", None)
            if key not in flops_of:
                with FlopCounterMode(display=False, custom_mapping=ATTENTION) as flops, torch.no_grad():
                    put_out = (
                        part.compute(value) if self.in_units else self.scene.script.outputs_of(part.compute, value)
                    )
                    flops_of[key] = put_out, flops
            value, flops = flops_of[key]
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
                    output=value[0].numel() if self.in_units else 0,
                )
            )
        return units


def count(
    text: str,
    argv: Sequence[str],
    path: str = "",
    tensor: Sequence[tuple[int, bool]] = (),
    precisions: Sequence[str] = (),
) -> dict[str, Any]:
    """Facts, as JSON. Split layers are counted in `precisions` only, if any are given, as is fp64 of a model in one
    unit."""
    scene = Scene(text, argv, path)
    batches = scene.batches()
    model = Model(scene, batches)
    # every way in which labkit's scripts compute
    recompute = [False, True] if model.layers else [False]
    ways = itertools.product([("fp32", False), ("16", False), ("16", True), ("fp64", False)], recompute)
    variants = [Variant(precision, half, recomputed) for (precision, half), recomputed in ways]
    profiles: dict[Variant, tuple[Profile, ...]] = {}
    unsplit: dict[int, str] = {}
    for (ranks, sequence), variant in itertools.product([(1, False), *map(tuple, tensor)], variants):
        seldom = ranks > 1 or (variant.precision == "fp64" and not model.in_units)
        skipped = seldom and precisions and variant.precision not in precisions
        if ranks not in unsplit and not skipped:
            variant = variant._replace(tensor=ranks, sequence=sequence)
            try:
                parts = model.variant(variant, mesh_of(ranks) if ranks > 1 else None)
            except SystemExit as error:  # the strategy's own words; other strategies can still be planned
                unsplit[ranks] = str(error)
                continue
            with scene.fake:
                computed = model.computed(parts, variant)
                if variant == Variant():
                    units = model.units(parts, computed)
            profiles[variant] = (*_each_once(parts, computed), computed[-1].profile)
    itemsize = 8 if scene.option("precision") == "fp64" else 4
    predictions = int(scene.script.count_of(batches.real))
    layers = 0 if model.in_units else model.layers
    return Facts(tuple(units), itemsize, predictions, model.bytes(), batches.samples, profiles, unsplit, model.uncut,
                 layers, batches.looked_at).to_json()  # fmt: skip


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


def _cast_call(model: nn.Module, variant: Variant, half: Any, *args: Any, **others: Any) -> Any:
    """What the model puts out, called as the precision cell has it be called."""
    if variant.half_parameters:  # FSDP casts what comes in
        args, others = tree_map(lambda x: x.to(torch.bfloat16) if _is_floating(x) else x, (args, others))
    with half():
        return model(*args, **others)


def _is_floating(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


if __name__ == "__main__":
    answer(count)
