"""Determines the facts of a script's model: sizes, FLOPs, and the memory of each unit during computation. Runs in a
child process. Identical units are computed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from labkit.planner.model.facts import ByteCount, Capability, ModelFacts, Profile, Unit, Variant, facts_to_json
from labkit.planner.model.fake.fake_run import FakeRun
from labkit.planner.model.forward_order import NotFollowedError
from labkit.planner.model.unit_costs import SAMPLES, Computed, profile
from labkit.planner.model.units import Experts, Model, Part, mesh_of

NOTHING = Profile((), (), ByteCount(), ByteCount(), (), ByteCount(), False, False, 0, ())


def count(
    text: str,
    argv: Sequence[str],
    path: str = "",
    tensor: Sequence[tuple[int, bool]] = (),
    precisions: Sequence[str] = (),
    recomputed: bool | None = None,
    capability: Capability | None = None,
) -> dict[str, Any]:
    """ModelFacts as JSON. If `precisions` is not empty, layers are counted in these only, except whole ones in 16 bits,
    which are a remedy. `recomputed`: only recomputed layers, or no such layers. If the model fails in all of these, its
    sizes are counted in fp32."""
    fake_run = FakeRun(text, argv, path, capability)
    mesh_of(1)  # a task may gather from all ranks
    batches = fake_run.batches()
    model = Model(fake_run, batches)
    # every variant in labkit's scripts
    ways = sorted(
        [("fp32", False), ("16", False), ("16", True), ("fp64", False)], key=lambda way: way[0] not in precisions
    )
    recompute = sorted({False, bool(model.layers)}, key=lambda again: again != bool(recomputed))
    variants = [Variant(precision, half, again) for (precision, half), again in itertools.product(ways, recompute)]
    units: list[Unit] = []
    profiles: dict[Variant, tuple[Profile, ...]] = {}
    unsplit: dict[int, str] = {}
    uncounted: dict[tuple[str, bool], str] = {}
    for (ranks, sequence), variant in itertools.product([(1, False), *tensor], variants):
        is_asked = not precisions or variant.precision in (precisions if ranks > 1 else [*precisions, "16"])
        is_asked = is_asked and recomputed in (None, variant.recomputed)
        if ranks not in unsplit and (is_asked or (variant == Variant() and not units)):
            variant = variant._replace(tensor=ranks, sequence=sequence)
            try:
                parts = model.variant(variant, mesh_of(ranks) if ranks > 1 else None)
                with fake_run.fake, model.watching_attention():
                    computed = _computed(model, parts, variant)
            except (SystemExit, NotFollowedError) as error:
                if ranks == 1:
                    raise
                unsplit[ranks] = str(error)  # other strategies can still be planned
                continue
            except Exception as error:
                if variant.precision == "fp32":
                    raise
                message = str(error).partition("\n")[0]
                uncounted[variant.precision, variant.half_parameters] = f"{type(error).__name__}: {message}"
                continue
            if ranks > 1 or variant.recomputed:
                computed = [each._replace(profile=replace(each.profile, work=())) for each in computed]
            if not units:
                units, keys = _units(parts, computed, model.experts, model.halved), model.keys
                divides, undivided = model.divides(), model.undivided()
            loss = NOTHING if model.is_one_unit else computed[-1].profile
            profiles[variant] = (*_each_once(parts[: len(units)], computed), loss)
    itemsize = 8 if fake_run.option("precision") == "fp64" else 4
    predictions = int(fake_run.script.count_of(batches.real))
    layers = model.layers if model.is_one_unit else 0
    facts = ModelFacts(
        tuple(units),
        itemsize,
        predictions,
        batches.bytes(),
        batches.samples,
        profiles,
        unsplit,
        model.uncut,
        layers,
        batches.looked_at,
        uncounted,
        tuple(sorted(fake_run.fake.corrected)),
        tuple(sorted(fake_run.fake.assumed)),
        fake_run.fake.experts if fake_run.fake.assumed else 0,
        divides,
        undivided,
        model.positions(),
        keys,
        next((name for name, parameter in model.module.named_parameters() if not parameter.dim()), ""),
        recomputed is not False or not model.layers,
    )
    return facts_to_json(facts)


def _computed(model: Model, parts: list[Part], variant: Variant) -> list[Computed]:
    """The profile of each unit and of the loss."""
    flow, kept, trained = model.first(variant), False, False
    known: dict[Any, Computed] = {}
    computed: list[Computed] = []
    for part in parts:
        key = part.kind, flow, kept, trained
        if key not in known:
            known[key] = profile(
                part.compute,
                part.parameters,
                flow,
                part.context,
                data=not computed,
                input_kept=kept,
                input_trained=trained,
                beside=part.beside,
            )
        computed.append(known[key])
        flow, kept, trained = known[key].out, known[key].profile.keeps_output, known[key].has_gradient
    if not model.names_its_parts:  # the first unit takes the batch, which is counted elsewhere
        more: dict[str, Any] = {"input": ByteCount(0, model.input_bytes(variant)), "keeps_input": False}
        more |= {"output": ByteCount(), "keeps_output": False} if model.is_one_unit else {}
        computed[0] = computed[0]._replace(profile=replace(computed[0].profile, **more))
    return computed


def _each_once(parts: list[Part], computed: list[Computed]) -> list[Profile]:
    """Assign a shared parameter to the last unit that trains it, where its gradient is created."""
    taken: set[torch.Tensor] = set()
    profiles = []
    for part, each in reversed([*zip(parts, computed, strict=False)]):
        own = [i for i, p in enumerate(each.trained) if part.is_block or p not in taken]
        taken |= {*each.trained} if not part.is_block else set()
        once = {name: tuple(getattr(each.profile, name)[i] for i in own) for name in ("parameters", "rows")}
        profiles.append(replace(each.profile, **once))
    return profiles[::-1]


def _units(
    parts: list[Part], computed: list[Computed], experts: Mapping[torch.Tensor, Experts], halved: set[torch.Tensor]
) -> list[Unit]:
    """Sizes and FLOPs. Parameters that no unit trains belong to the first unit."""
    trained_somewhere = {p for each in computed for p in each.trained}
    units: list[Unit] = []
    taken: set[torch.Tensor] = set()
    known: dict[int, list[torch.Tensor]] = {}
    for part, each in zip(parts, computed, strict=True):
        if part.name == "loss":
            break
        parameters = known.setdefault(id(each), part.parameters)  # of the first identical unit
        own = each.trained if part.is_block else [p for p in each.trained if p not in taken]
        idle = [p for p in parameters if p not in trained_somewhere and p not in taken]
        taken |= {*own, *([] if part.is_block else idle)}
        forward = [work for work in each.profile.work if work.phase == "forward"]
        of_experts = [i for i, p in enumerate(own) if p in experts]
        units.append(
            Unit(
                name=part.name,
                parameters=tuple(p.numel() for p in own),
                frozen=sum(p.numel() for p in idle if p.is_floating_point() and p not in halved),
                buffers=sum(b.numel() * b.element_size() for b in part.buffers),
                flops=sum(work.calls * work.flops.per_sample for work in forward),
                output=each.profile.output.per_sample // each.out.dtype.itemsize,
                experts=tuple(of_experts),
                expert_sizes=tuple({(own[i].shape[0], own[i].shape[1]) for i in of_experts}),
                routed=sum(module.elements // SAMPLES[-1] for module in {experts[own[i]] for i in of_experts}),
                halved=sum(p.numel() for p in idle if p in halved),
                packed=sum(p.nbytes for p in idle if not p.is_floating_point()),
            )
        )
    return units
