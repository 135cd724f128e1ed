"""Holds the facts about a model, which are determined once, on tensors without data. Memory is linear in the batch: a
fixed number of bytes plus bytes per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from labkit.arguments import Parameters
from labkit.planner.contract import able_to
from labkit.planner.model.child import ask
from labkit.write import Script, command_line

Capability = tuple[int, int]  # CUDA's compute capability, (7, 5) for a T4


class ByteCount(NamedTuple):
    """Bytes, as a function of the samples in a micro-batch."""

    fixed: int = 0
    per_sample: int = 0

    def at(self, samples: float) -> int:
        """Bytes for this number of samples, of which one may be a part."""
        return self.fixed + round(self.per_sample * samples)


class Moment(NamedTuple):
    """A moment in a unit's forward or backward: bytes held since its start, those of them that autograd keeps, and the
    bytes of this unit's complete gradients (not included in `held`, because strategies treat them differently).
    """

    held: ByteCount
    kept: ByteCount
    settled: int


class Work(NamedTuple):
    """`calls` operators of a unit that do the same: each computes `flops` FLOPs and reads and writes `bytes`, both as
    functions of the samples. `kind` is "matmul", "convolution", "depthwise" (convolution), "attention", "recurrent", or
    "memory" for all that only move data; `phase` is "forward" or "backward".
    """

    kind: str
    phase: str
    flops: ByteCount
    bytes: ByteCount
    calls: int


class Variant(NamedTuple):
    """How units were computed. With `half_parameters`, parameters were in 16 bits, under autocast."""

    precision: str = "fp32"  # "fp32", "16" (autocast) or "fp64"
    half_parameters: bool = False
    recomputed: bool = False
    tensor: int = 1
    sequence: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element of the parameters used in computation."""
        return 2 if self.half_parameters else 8 if self.precision == "fp64" else 4


@dataclass(frozen=True)
class Profile:
    """The memory of a unit's computation, excluding its parameters and gradients.

    The unit's input is counted here while forward runs, and afterwards if this unit or (`input_kept`) the previous one
    keeps it. Its output is counted in the unit whose input it is.
    """

    parameters: tuple[int, ...]  # elements of each trained parameter on one tensor rank
    rows: tuple[int, ...]  # the first dimension of each, along which FSDP shards
    input: ByteCount
    output: ByteCount
    forward: tuple[Moment, ...]
    saved: ByteCount  # kept from forward to backward, without the output
    keeps_input: bool
    keeps_output: bool
    cached: int  # bytes kept until the whole model's forward ends: casts held only by autocast's cache
    backward: tuple[Moment, ...]
    backward_in_stage: tuple[Moment, ...] = ()  # without what a stage holds: output and its gradient
    work: tuple[Work, ...] = ()  # without recomputation or split layers only


@dataclass(frozen=True)
class Unit:
    """A part of the model that strategies treat as a unit: "embed", "blocks.0" …, "unembed"; or the whole "model"."""

    name: str
    parameters: tuple[int, ...]  # elements of each trained parameter; a shared one belongs to the first unit
    frozen: int  # elements of floating-point parameters that are not trained, without `halved`
    buffers: int  # bytes
    flops: int  # of forward, per sample
    output: int  # elements per sample passed to the next unit
    experts: tuple[int, ...] = ()  # which of `parameters` are those of experts, along their first dimension
    expert_sizes: tuple[tuple[int, int], ...] = ()  # number of experts and features, which replicas of them divide
    routed: int = 0  # elements per sample that are sent to experts
    halved: int = 0  # elements of those that the script keeps in 16 bits if it computes in these
    packed: int = 0  # bytes of all other parameters, such as weights in 4 bits

    @property
    def is_block(self) -> bool:
        return self.name.startswith("blocks.")

    @property
    def trained(self) -> int:
        """Elements of its trained parameters."""
        return sum(self.parameters)

    def frozen_bytes(self, itemsize: int, computed_itemsize: int) -> int:
        """Bytes of all parameters that are not trained, at these bytes per element as kept and as computed with."""
        return self.packed + itemsize * self.frozen + computed_itemsize * self.halved

    @property
    def of_experts(self) -> int:
        """Elements of the parameters of experts."""
        return sum(self.parameters[i] for i in self.experts)


@dataclass(frozen=True)
class ModelFacts:
    """`itemsize`: bytes per element of a parameter. `predictions` (losses; for a language model, tokens) and `inputs`
    (bytes of a batch) are per sample. `profiles` has one for each unit and the loss as the last; if the model is one
    unit, it includes the loss. `unsplit`: by number of tensor ranks, why the layers do not split; `uncut`: why they do
    not form pipeline stages. `uncounted`: by precision and whether parameters are in 16 bits, how the model fails in
    it. `layers`: the number of repeated layers if the model is one unit. `looked_at`: the number
    of samples among which the longest was chosen, if they differ. `corrected`: operators whose fake kernels return too
    little, and whose results therefore have the sizes that they have on this CPU. `assumed`: sentences on what depends
    on values. `experts`: among which a router chooses. `divides`: of the strategies that suit some models only
    (context_parallel, expert_parallel), those whose cells accept this one. `undivided`: why ranks cannot divide its
    experts. `positions` of each sample, 0 if the tensors of a batch differ in them; `keys`: elements of the keys and
    values of one attention, per sample. `scalar`: the name of a parameter without dimensions, which FSDP refuses.
    `recomputed`: whether recomputed layers were counted, too, if there are layers.
    """

    units: tuple[Unit, ...]
    itemsize: int
    predictions: int
    inputs: int
    samples: int  # in the training data
    profiles: Mapping[Variant, tuple[Profile, ...]]
    unsplit: Mapping[int, str] = field(default_factory=dict)
    uncut: str = ""
    layers: int = 0
    looked_at: int = 0
    uncounted: Mapping[tuple[str, bool], str] = field(default_factory=dict)
    corrected: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    experts: int = 0
    divides: tuple[str, ...] = ()
    undivided: str = ""
    positions: int = 0
    keys: int = 0
    scalar: str = ""
    recomputed: bool = True

    @property
    def elements(self) -> int:
        """Elements of all trained parameters."""
        return sum(unit.trained for unit in self.units)

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        """The repeated layers."""
        return tuple(unit for unit in self.units if unit.is_block)

    @cached_property
    def ends(self) -> tuple[Unit, ...]:
        """All other units."""
        return tuple(unit for unit in self.units if not unit.is_block)

    def inputs_at(self, variant: Variant, samples: int) -> int:
        """Bytes of the inputs and targets of `samples` samples."""
        usual = next((each for each in self.profiles if each.precision != "fp64"), variant)
        wider = self.profiles[variant][0].input.at(1) - self.profiles[usual][0].input.at(1)
        return samples * (self.inputs + wider)

    def with_recomputed(self, others: ModelFacts) -> ModelFacts:
        """These facts with the recomputed layers of others about the same model."""
        return replace(self, profiles={**others.profiles, **self.profiles}, recomputed=True)


def facts_to_json(facts: ModelFacts) -> dict[str, Any]:
    """The format that facts_from_json reads; identical profiles are written once."""
    profiles = []
    for variant, each in facts.profiles.items():
        distinct = list(dict.fromkeys(each))
        profiles.append([variant, [asdict(p) for p in distinct], [distinct.index(p) for p in each]])
    lists = {"unsplit": [*facts.unsplit.items()], "uncounted": [*facts.uncounted.items()]}
    return asdict(facts) | lists | {"profiles": profiles}


def facts_from_json(written: Mapping[str, Any]) -> ModelFacts:
    """ModelFacts from the output of facts_to_json."""
    units = [
        Unit(**unit | {name: tuple(unit[name]) for name in ("parameters", "experts", "expert_sizes")})
        for unit in written["units"]
    ]
    profiles = {}
    for variant, distinct, which in written["profiles"]:
        each = [_profile(**profile) for profile in distinct]
        profiles[Variant(*variant)] = tuple(each[i] for i in which)
    by_key = {
        "unsplit": dict(written["unsplit"]),
        "uncounted": {tuple(key): why for key, why in written["uncounted"]},
    }
    divides = {"divides": tuple(written["divides"])}
    return ModelFacts(**dict(written) | by_key | divides | {"units": tuple(units), "profiles": profiles})


def facts_of(
    script: Script,
    parameters: Parameters,
    tensor: Iterable[tuple[int, bool]] = (),
    *,
    path: str = "",
    precisions: Iterable[str] = (),
    recomputed: bool | None = None,
    capability: Capability | None = None,
) -> ModelFacts:
    """Determine the facts in a child process. `tensor` lists splits of layers as (ranks, with sequence parallel);
    `precisions`: those that will be asked for; empty for all. `recomputed`: only recomputed layers, without
    their FLOPs, for ModelFacts.with_recomputed; or no such layers. `capability`: as a GPU of this compute capability
    computes, instead of a CPU.

    Raises LaunchError if the script refuses its options, Unplannable if its model cannot be built without data.
    """
    halves = {"precision": "fp32"} if "adapter" in script.cells else {}  # in which adapters keep what they freeze
    script = script if path else able_to(script, {**halves, **parameters})
    argv = command_line(script, parameters)
    which = {"tensor": [*tensor], "precisions": [*precisions], "recomputed": recomputed, "capability": capability}
    return facts_from_json(ask("counting.count", {"text": str(script), "argv": argv, "path": path, **which}))


def _profile(**written: Any) -> Profile:
    lines = {name: ByteCount(*written[name]) for name in ("input", "output", "saved")}
    moments = {
        name: tuple(Moment(ByteCount(*held), ByteCount(*kept), settled) for held, kept, settled in written[name])
        for name in ("forward", "backward", "backward_in_stage")
    }
    work = tuple(
        Work(kind, phase, ByteCount(*flops), ByteCount(*moved), calls)
        for kind, phase, flops, moved, calls in written["work"]
    )
    return Profile(
        **written | lines | moments | {"work": work} | {name: tuple(written[name]) for name in ("parameters", "rows")}
    )
