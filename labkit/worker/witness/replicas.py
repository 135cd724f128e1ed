"""Writes what must be equal on the ranks that share parameters: digests of these after checked steps, and how the
optimizers step them.

A check line of `witness.jsonl` has one digest of each set that torch declares (`declared` lines), so that judges read
little: those of single parameters are in `digests.jsonl`. What may be the cause of a difference is a line of its own,
written when it is seen, or a count in the check line. Neither buffers nor optimizer states are compared: the former may
differ between forward passes, the latter show in the weights one step later.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.worker.reach.evaluate import names_around
from labkit.worker.recorder import Recorder
from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.digest import Scrubber, read_digests
from labkit.worker.witness.models import DistributedModel, Stepped

# More bytes are first checked at step 20. A check reads each once, a step at least eight times: so all checks together
# take less than 1 % of the training. All ranks have equally many.
LARGE, FIRST_OF_LARGE = 64 << 20, 20
SCRUB_EVERY = 16  # steps
Sets = dict[tuple[Any, ...], list[tuple[str, Any]]]  # parameters with their names, by what is declared of them
SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps")


class Replicas(Area):
    """Checks one rank's parameters; `witness` writes the lines, `details` is for those of single parameters."""

    def __init__(self, witness: Observed, details: Path):
        super().__init__(witness)
        self._path = details
        self._names: dict[int, dict[int, str]] = {}  # by optimizer, of parameters that DDP does not have
        self._declared: dict[tuple[Any, ...], int] = {}  # sets that have been written
        self._told: set[int] = set()  # parameters of which it is known that DDP does not average them
        self._scrubber: Scrubber | None = None
        self._scrubbed: DistributedModel

    def scrub(self, turn: int) -> int:
        """The sum of some of the parameters' bits, another part at each turn; 0 if there are none."""
        return 0 if self._scrubber is None or self._scrubbed.is_local else self._scrubber.sum(turn)

    def wrapped(self, number: int) -> None:
        """Compare what DDP has just made equal: the `number`-th model."""
        model = self._witness.models[number].reference()
        named = [(n, p) for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore]
        ranks = tuple(self._witness.models[number].ranks)
        if len(ranks) > 1 and _bytes(p for _, p in named) <= LARGE:
            with self._witness.unseen():
                self._digest(("wrapped", number, ranks), named, {"opt": None, "at": 0}, None)

    def loaded(self, module: Any) -> None:
        """Note that the script has loaded weights into a DDP model, or into what it wraps."""
        for number, model in enumerate(self._witness.models):
            wrapped = model.reference()
            if wrapped is not None and module in (wrapped, wrapped.module):
                self._witness.write("loaded", n=number)

    def forked(self) -> None:
        self._details.file.let_go()

    @cached_property
    def _details(self) -> Recorder:
        return Recorder(self._path)

    def before_check(self, optimizer: Any, stepped: Stepped) -> None:
        """Write what DTensors, and what is beside them, were before the first step: nothing has made them equal."""
        if stepped.steps == 0:
            sets = self._sets_of(optimizer, stepped)
            if any(kind in ("shard", "mesh") for kind, *_ in sets):
                self._write({key: named for key, named in sets.items() if key[0] != "ddp"}, optimizer, stepped, at=0)

    def after_check(self, optimizer: Any, stepped: Stepped) -> None:
        """Write the digests of what this optimizer has stepped, and how."""
        sets = self._sets_of(optimizer, stepped)
        if sets and stepped.steps == 1:
            self._prepare_scrubber()
        self._write(sets, optimizer, stepped, at=stepped.steps)

    def _sets_of(self, optimizer: Any, stepped: Stepped) -> Sets:
        """Empty if there is only one rank."""
        distributed = self._torch.distributed
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return {}
        return self._sets([p for group in optimizer.param_groups for p in group["params"]], stepped)

    def _write(self, sets: Sets, optimizer: Any, stepped: Stepped, *, at: int) -> None:
        if at < FIRST_OF_LARGE and _bytes(p for named in sets.values() for _, p in named) > LARGE:
            return
        common = {
            "opt": stepped.number,
            "at": at,
            "calls": self._witness.calls(),
            "settings": [
                {name: _number(group[name]) for name in SETTINGS if name in group} for group in optimizer.param_groups
            ],
        }
        for key, named in sets.items():
            self._digest(key, named, common, optimizer)

    def _sets(self, parameters: list[Any], stepped: Stepped) -> Sets:
        """The parameters by what torch declares of them: `(kind, which model, ranks)`."""
        of_models: dict[int, tuple[int, str | None]] = {}
        members = set()
        for number, model in enumerate(self._witness.models):
            if (wrapped := model.reference()) is not None:
                for name, p in wrapped.module.named_parameters():
                    of_models[id(p)] = number, None if name in wrapped.parameters_to_ignore else name
        sets: Sets = {}
        for place, p in enumerate(parameters):
            if id(p) in of_models:
                number, name = of_models[id(p)]
                model = self._witness.models[number]
                members.add(number)
                if name is not None and len(model.ranks) > 1 and model.is_plain():
                    sets.setdefault(("ddp", number, tuple(model.ranks)), []).append((name, p))
            elif type(p).__name__ != "FlatParameter":  # FSDP1's, whose parts differ
                key, p = _placed(p) if hasattr(p, "placements") else (("plain", 0, ()), p)
                sets.setdefault(key, []).append((f"parameter {place}", p))
        stepped.models = [self._witness.models[number] for number in sorted(members)]
        for number in members:
            self._find_unreduced(number, sets.get(("ddp", number, tuple(self._witness.models[number].ranks)), []))
        return sets

    def _find_unreduced(self, number: int, named: Iterable[tuple[str, Any]]) -> None:
        """Write which parameters of a DDP model have gradients that it does not average."""
        model = self._witness.models[number]
        new = [(n, p) for n, p in named if p.requires_grad and p.grad is not None and id(p) not in model.reduced]
        new = [(n, p) for n, p in new if id(p) not in self._told]
        if new:
            self._told |= {id(p) for _, p in new}
            names = [[n for n, p in new if (id(p) in model.frozen) == was_frozen] for was_frozen in (True, False)]
            self._witness.write("unreduced", n=number, unfrozen=names[0], added=names[1])

    def _digest(
        self, key: tuple[Any, ...], named: list[tuple[str, Any]], common: dict[str, Any], optimizer: Any
    ) -> None:
        """Write a check of a set of parameters, as soon as their digests are there."""
        described = [(name, tuple(p.shape), str(p.dtype)) for name, p in named]
        of = _hash(repr(described).encode())
        known = self._declared.get((*key, of))
        if known is None:
            known = self._declared[(*key, of)] = len(self._declared)
            kind, number, ranks = key
            device = _device(self._witness.torch, named[0][1])
            called = self._called(number, optimizer) if kind == "ddp" else ""
            declared = {"what": kind, "n": number, "ranks": ranks, "of": of, "device": device, "called": called}
            self._witness.write("declared", set=known, **declared)
            names = self._module_names(common["opt"], named) if kind not in ("ddp", "wrapped") else {}
            self._details.write({"k": "names", "set": known, "names": [names.get(id(p), n) for n, p in named]})
        model = self._witness.models[key[1]] if key[0] in ("ddp", "wrapped") else None
        line = common | {
            "set": known,
            "step": self._witness.step,
            "number": self._witness.number,
            "writes": sum(p._version for _, p in named),
            "scalings": sum(p.grad._version for _, p in named if p.grad is not None),
            "forwards": model.forwards() if model else None,
            "passes": [model.passes, model.synchronized, model.is_synchronized] if model else [],
            "local": model is not None and model.is_left_local(),
        }
        graded = "".join("01"[p.grad is not None] for _, p in named)

        def write(sums: list[int]) -> None:
            given = _hash(repr(sums[count:]).encode()) if gradients else ""
            sums = sums[:count]
            self._witness.write("check", **line, sum=_hash(repr(sums).encode()), gradients=given)
            self._details.write({"k": "digests", "set": known, "at": line["at"], "sums": sums, "graded": graded})

        tensors = [getattr(p, "_local_tensor", p) for _, p in named] if key[0] != "shard" else []
        gradients, count = _gradients(named) if key[0] in ("plain", "mesh") else [], len(tensors)
        read_digests(self._witness.torch, [*tensors, *gradients], self._later, write)

    def _called(self, number: int, optimizer: Any) -> str:
        """What the script calls a DDP model, where the step of this optimizer was called; empty if that is unknown."""
        model = self._witness.models[number].reference()
        names = names_around(optimizer, asked=False)
        attributes = {f"self.{name}": value for name, value in getattr(names.get("self"), "__dict__", {}).items()}
        return next((name for name, value in (names | attributes).items() if value is model), "")

    def _module_names(self, which: int, named: list[tuple[str, Any]]) -> dict[int, str]:
        """The names of parameters that no DDP model has, from the modules that are there."""
        if which not in self._names:
            module = self._witness.torch.nn.Module
            modules = [thing for thing in gc.get_objects() if issubclass(type(thing), module)]
            inner = {id(child) for each in modules for child in (vars(each).get("_modules") or {}).values()}
            roots = [each for each in modules if id(each) not in inner]
            self._names[which] = {id(p): name for root in roots for name, p in root.named_parameters()}
        return self._names[which]

    def _prepare_scrubber(self) -> None:
        """Scrub the newest DDP model."""
        for number, model in reversed(list(enumerate(self._witness.models))):
            if model.reference() is not None and len(model.ranks) > 1 and model.is_plain():
                self._scrubber, self._scrubbed = Scrubber(model.shared), model
                pieces, is_whole = len(self._scrubber.pieces), self._scrubber.is_whole
                self._witness.write("scrub", n=number, pieces=pieces, whole=is_whole)
                return


def _placed(p: Any) -> tuple[tuple[Any, ...], Any]:
    """The ranks of a DTensor's mesh that have the same part of it, or if none has, those that share it."""
    mesh, coordinate = p.device_mesh, p.device_mesh.get_coordinate()
    if coordinate is None:
        return ("shard", 0, ()), p
    place = tuple(slice(None) if how.is_replicate() else at for how, at in zip(p.placements, coordinate, strict=True))
    same = mesh.mesh[place].flatten().tolist()
    return ("mesh", 0, tuple(same)) if len(same) > 1 else ("shard", 0, tuple(mesh.mesh.flatten().tolist())), p


def _gradients(named: list[tuple[str, Any]]) -> list[Any]:
    """Those of all of these parameters; none if one has none, a sparse one, or one that is yet to be added up."""
    gradients = [p.grad for _, p in named]
    if any(each is None or each.is_sparse for each in gradients):
        return []
    if any(how.is_partial() for each in gradients for how in getattr(each, "placements", ())):
        return []
    return [getattr(each, "_local_tensor", each) for each in gradients]


def _bytes(parameters: Iterable[Any]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)  # of the whole of a DTensor


def _number(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_number(each) for each in value]
    if hasattr(value, "numel"):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, int | float) else None


def _device(torch: Any, p: Any) -> str:
    return str(torch.cuda.get_device_name(p.device)) if p.device.type == "cuda" else p.device.type


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
