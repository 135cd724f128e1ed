"""What is known of a model before it is trained: counted once, on tensors that hold no data. Floats of a batch are
lines, because memory is one: bytes that do not depend on the batch, and bytes per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from labkit.planner.layout import able_to
from labkit.planner.model.child import ask
from labkit.write import Script, command_line

__all__ = ["ModelFacts", "ByteCount", "Moment", "Profile", "Unit", "Variant", "facts_of"]


class ByteCount(NamedTuple):
    """Bytes, as a function of the samples in a micro-batch."""

    fixed: int = 0
    per_sample: int = 0

    def at(self, samples: int) -> int:
        """Bytes with so many samples."""
        return self.fixed + self.per_sample * samples


class Moment(NamedTuple):
    """Of a unit's forward or backward: bytes held since it began, those of them that autograd keeps, and the bytes
    of this unit's gradients that are complete (not among the bytes held: strategies do different things with them).
    """

    held: ByteCount
    kept: ByteCount
    settled: int


class Variant(NamedTuple):
    """In which way units were computed. `half_parameters`: parameters in 16 bits, and autocast around them."""

    precision: str = "fp32"  # "fp32", "16" (autocast) or "fp64"
    half_parameters: bool = False
    recomputed: bool = False
    tensor: int = 1
    sequence: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the parameters that compute."""
        return 2 if self.half_parameters else 8 if self.precision == "fp64" else 4


@dataclass(frozen=True)
class Profile:
    """What computing a unit holds, beside its parameters and its gradients.

    The unit's input is counted here while forward runs, and afterwards when the unit keeps it or `input_kept`: the
    unit before it does. Its output is counted where it is an input.
    """

    parameters: tuple[int, ...]  # elements of each trained parameter on one tensor rank
    rows: tuple[int, ...]  # the first dimension of each of them: along it FSDP cuts
    input: ByteCount
    output: ByteCount
    forward: tuple[Moment, ...]
    saved: ByteCount  # kept from forward to backward
    keeps_input: bool
    keeps_output: bool
    cached: int  # bytes kept until forward of the whole model ends: autocast's casts that nobody else keeps
    backward: tuple[Moment, ...]
    # gradients kept when backward has computed those of inputs, and not yet those of weights
    between: ByteCount = ByteCount()


@dataclass(frozen=True)
class Unit:
    """A part of the model that strategies handle as one: "embed", "blocks.0" …, "unembed"; or the whole "model"."""

    name: str
    parameters: tuple[int, ...]  # elements of each trained parameter; a shared one belongs to the first unit
    frozen: int  # elements of parameters that are not trained
    buffers: int  # bytes
    flops: int  # of forward, per sample
    output: int  # elements per sample handed on to the next unit


@dataclass(frozen=True)
class ModelFacts:
    """`itemsize`: bytes of a parameter's element. `predictions` (losses: a language model's tokens) and `inputs` (bytes
    of a batch) are per sample. `profiles` has one for each unit, and the loss as the last; of a model that is one unit
    the loss is in it. `unsplit` says, by tensor ranks, why the layers do not split over so many, `uncut` why they do
    not make stages of a pipeline. `layers`: how many are repeated in a model that is one unit. `looked_at`: among how
    many samples the longest was looked for, if they differ.
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

    @property
    def elements(self) -> int:
        """Of all trained parameters."""
        return sum(sum(unit.parameters) for unit in self.units)

    def to_json(self) -> dict[str, Any]:
        """What from_json reads; alike profiles are written once."""
        profiles = []
        for variant, each in self.profiles.items():
            distinct = list(dict.fromkeys(each))
            profiles.append([variant, [asdict(p) for p in distinct], [distinct.index(p) for p in each]])
        return asdict(self) | {"profiles": profiles, "unsplit": [*self.unsplit.items()]}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> ModelFacts:
        """ModelFacts as to_json wrote them."""
        units = [Unit(**unit | {"parameters": tuple(unit["parameters"])}) for unit in written["units"]]
        profiles = {}
        for variant, distinct, which in written["profiles"]:
            each = [_profile(**profile) for profile in distinct]
            profiles[Variant(*variant)] = tuple(each[i] for i in which)
        unsplit = dict(written["unsplit"])
        return cls(**dict(written) | {"units": tuple(units), "profiles": profiles, "unsplit": unsplit})


def facts_of(
    script: Script,
    parameters: Mapping[str, Any],
    tensor: Iterable[tuple[int, bool]] = (),
    *,
    path: str = "",
    precisions: Iterable[str] = (),
) -> ModelFacts:
    """Count them in a process of its own. `tensor`: of layers split over so many ranks, with sequence parallel or not;
    in all precisions of a Variant, or in `precisions`.

    Raises LaunchError when the script refuses its options, Unplannable when its model cannot be built without data.
    """
    script = script if path else able_to(script, parameters)
    argv = command_line(script, parameters)
    return ModelFacts.from_json(
        ask(
            "counting",
            {"text": str(script), "argv": argv, "path": path, "tensor": [*tensor], "precisions": [*precisions]},
        )
    )


def _profile(**written: Any) -> Profile:
    lines = {name: ByteCount(*written[name]) for name in ("input", "output", "saved", "between")}
    moments = {
        name: tuple(Moment(ByteCount(*held), ByteCount(*kept), settled) for held, kept, settled in written[name])
        for name in ("forward", "backward")
    }
    return Profile(**written | lines | moments | {name: tuple(written[name]) for name in ("parameters", "rows")})
