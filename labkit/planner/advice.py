"""Which strategy to use: what fits the device, what is fastest among that, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.planner.alternatives import ways
from labkit.planner.candidate import ALIKE, Candidate, fastest, held_by, when
from labkit.planner.devices import Device
from labkit.planner.facts import Facts
from labkit.planner.largest import largest_micro_batch, largest_model
from labkit.planner.layout import Layout, layout_of, strategy_of
from labkit.planner.pace import Pace
from labkit.planner.search import Search
from labkit.planner.variants import own_parameters, variants
from labkit.record.units import gib
from labkit.view import words
from labkit.view.plan_tables import band
from labkit.write import Script

__all__ = ["Advice", "advise"]

SUPERSEDED = (
    "fsdp1",
)  # by fsdp: PyTorch's tutorials call FullyShardedDataParallel deprecated (pytorch/tutorials #3358)


@dataclass(frozen=True)
class Advice:
    """`asked` is the script as it was given; `rows` has it first, then the best of every other strategy."""

    device: Device
    asked: Candidate
    rows: tuple[Candidate, ...]
    best: Candidate | None
    largest: int
    sentences: tuple[str, ...]


def advise(
    script: Script,
    facts: Facts,
    device: Device,
    ranks: int,
    parameters: Mapping[str, Any],
    pace: Pace | None = None,
) -> Advice:
    """What to do with this model on so many of these devices. Pure: formulas only, no torch, no process.

    Raises LabError when the script itself cannot be laid out: then there is nothing to compare with.
    """
    layout = layout_of(script, ranks, parameters)
    scripts = variants(script)
    search = Search(scripts, facts, device, pace)
    name = strategy_of(script) or script.name
    asked = search.look(name, ranks, parameters)
    rows = [asked, *([] if asked.fits else search.rescue(asked))]
    for other in (other for other in scripts if other != name):
        options = own_parameters(scripts[other], parameters)
        at = 1 if other == "single" else ranks  # the others have to be faster than one device alone
        found = [
            search.look(other, at, {**options, **more}, said) for more, said in ways(other, ranks, layout.accumulate)
        ]
        if not found:
            rows.append(Candidate(other, scripts[other], ranks, options, said=f"{ranks} ranks do not split two ways"))
            continue
        row = fastest(found) or min((one for one in found if one.peak), key=held_by, default=found[0])
        rows += [row] if row.fits else (search.rescue(row) or [_hopeless(row)])
    at_hand = [row for row in rows if row.ranks <= ranks and (row.strategy == name or row.strategy not in SUPERSEDED)]
    alike = [row for row in at_hand if row.layout and row.layout.precision == layout.precision]
    best = fastest(alike) or fastest(at_hand)  # another precision is another training, if there is a choice
    rows = [_beside(row, best) for row in rows]
    largest = largest_micro_batch(facts, layout, device) if asked.peak else 0
    told = _sentences(rows, best, layout, device, largest)
    return Advice(device, asked, tuple(rows), best, largest, tuple(told))


def _hopeless(row: Candidate) -> Candidate:
    return replace(row, said=f"{row.said}; nothing that was tried makes it fit") if row.peak else row


def _beside(row: Candidate, best: Candidate | None) -> Candidate:
    """A row that fits also says how its step compares with the fastest's."""
    if not (row.fits and best and row.step and best.step):
        return row
    if row == best:
        return replace(row, said=f"{row.said}: the choice")
    same = row.layout and best.layout and row.layout.precision == best.layout.precision
    if not row.said.startswith("fits") or not same:  # it needs more ranks, or another precision
        return row
    ratio = row.step.seconds / best.step.seconds
    said = "as fast" if ratio <= ALIKE else f"a step takes {ratio:.1f} times as long"
    return replace(row, said=f"{row.said}; {said}")


def _sentences(
    rows: list[Candidate], best: Candidate | None, layout: Layout, device: Device, largest: int
) -> Iterator[str]:
    asked, rescued = rows[0], [row for row in rows[1:] if row.strategy == rows[0].strategy]
    where = f"{asked.name} on {asked.ranks} x {device.name}"
    if asked.peak:
        usable = gib(device.usable_by(asked.ranks))
        verdict = "fits" if asked.fits else "does not fit"
        yield f"{where} holds {gib(asked.peak.bytes)} of {usable} per rank {when(asked.peak)}: {verdict}."
    else:
        yield f"{where} cannot be planned: {asked.said}."
    if not asked.fits:
        yield from (f"It {row.said.replace('fits', 'would fit')}." for row in rescued[:1])
    if best and best.step:
        assumed = " (assumed, see below)" if best.step.assumed else ""
        time = band(best.step.seconds, best.step.low, best.step.high)
        yield f"Fastest that fits: {best.name}, {time} a step{assumed}."
    elif best:
        yield f"Of those that fit, {best.name} leaves most room; how fast they are is not known here."
    else:
        yield f"Nothing fits on {asked.ranks} of these devices."
    if asked.peak and asked.layout:
        most = words.quantity(largest_model(layout, device) / 1e6)
        yield (
            f"{asked.strategy} fits up to {largest:,} samples in a rank's micro-batch (now {layout.micro_batch:,}); "
            f"states alone would fill the device at {most} million parameters."
        )
