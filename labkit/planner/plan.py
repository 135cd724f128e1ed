"""A plan: what a training will hold on each rank and how long its steps take, before anything is launched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LaunchError
from labkit.launcher.hardware import hardware
from labkit.planner.advice import Advice, advise
from labkit.planner.candidate import unfit
from labkit.planner.constraints import refusal
from labkit.planner.devices import Device, devices_named
from labkit.planner.layout import Layout, able_to, layout_of
from labkit.planner.memory.peak import UnknownToFormulas, variant_of, worst
from labkit.planner.memory.peak import peak as peak_of
from labkit.planner.model.child import Unplannable, asking
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.model.rehearsal import rehearse
from labkit.planner.model.sizes import states_alone
from labkit.planner.networks import bandwidth_of
from labkit.planner.overview import bar_of
from labkit.planner.scaling import break_even_curve, scaling_curves
from labkit.planner.speed.speed_model import Pace, measure_pace
from labkit.planner.speed.step_time import StepTime
from labkit.record.peak import Peak
from labkit.record.units import gib
from labkit.view.charts.bars import Bar
from labkit.view.charts.images import as_image
from labkit.view.charts.plan_figures import break_even, memory_planned, scaling_planned
from labkit.view.plan_tables import plan_html, plan_text
from labkit.write import Script, script_names

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Plan", "plan"]

MOST_RANKS = 16384
AGREEING = (
    0.1  # of the rehearsed peak; where a strategy's formulas are known to be off, they are by less, or it is said
)
MOST_RANKS_WRITTEN = 64
TENSOR_RANKS = 8  # they talk in every layer: more than a box has are worth no thought


def plan(
    script: Script | str | Path,
    *,
    nproc_per_node: int | str = "auto",
    nodes: int = 1,
    device: str | None = None,
    network: str | float | None = None,
    measure: bool = False,
    **parameters: Any,
) -> Plan:
    """What training a script would hold on each rank and how long a step would take; what fits, and what is fastest.

    `script`, `nproc_per_node` and `parameters` are those of `launch`. `device` is one of the presets ("T4", "2xT4",
    "A100 80"), or this machine when it is None. `nodes` is how many hosts there are, with so many ranks on each, and
    `network` what joins them: "100GbE", "InfiniBand NDR", "8 x InfiniBand HDR", or bits/s of one host, one way.

    Takes some five seconds: one process counts the model, another rehearses a step of the script, both on tensors that
    hold no data; nothing is launched. With `measure=True` ranks on this machine compute and talk for some fifteen
    seconds, so that the speed is not assumed; that is remembered.

    Raises ScriptError or LaunchError for what `launch` would refuse. What cannot be planned is among `.problems`.
    """
    script, path = _script(script)
    script.check()
    script = script if path else able_to(script, parameters)
    count, kind = devices_named(device)
    ranks = _ranks(nproc_per_node, count, kind)
    if nodes != 1 or network is not None:
        ranks, kind = _on_hosts(nodes, ranks, kind, network)
    layout = layout_of(script, ranks, parameters)
    problems: list[str] = []
    if parameters.get("compile"):
        problems.append("compile is not planned: figures are of the model as it is; compiled it often holds less")

    def found(asked: Future[Any], what: str) -> Any:
        try:
            return asked.result()
        except Unplannable as error:
            why = str(error).rstrip(".")
            if any(why.partition("): ")[0] in problem for problem in problems):  # the same line: once is enough
                problems[:] = [f"cannot be planned: {why}"]
            else:
                problems.append(f"{what}: {why}")

    if measure and not kind.is_this_machine:
        problems.append(f"nothing was measured: {kind.name} is not here, its data sheet is all there is")
    with asking() as threads:
        precisions = [variant_of(layout).precision]
        counted = threads.submit(facts_of, script, parameters, _splits(layout), path=path, precisions=precisions)
        play = partial(threads.submit, rehearse, script, ranks, parameters, path=path)
        playing = {0: play()} if layout.pipeline == 1 and layout.strategy != "zero1" else {}  # all ranks are alike
        facts, formulas, rank = found(counted, "not planned by formulas"), None, None
        if facts and (reason := refusal(facts, layout)):
            raise LaunchError(reason)
        try:
            rank, formulas = worst(facts, layout, on_gpu=not kind.shared) if facts else (None, None)
        except UnknownToFormulas as error:
            problems.append(f"not planned by formulas: {error}")
        ends = {0, ranks - ranks // layout.pipeline}  # of a pipeline: one of them holds most
        playing = playing or {each: play(rank=each) for each in sorted(ends if rank is None else {rank})}
        peaks = {each: peak for each, asked in playing.items() if (peak := found(asked, "not rehearsed"))}
        rank = max(peaks, key=lambda each: peaks[each].bytes, default=rank or 0) if rank is None else rank
        rehearsed, advice, states = peaks.get(rank), None, None
        if facts:
            if measure and kind.is_this_machine:  # while ranks are timed nothing else may run
                measure_pace(script, ranks // kind.nodes, parameters, again=False, nodes=kind.nodes)
            alone = rehearsed if facts.layers or not formulas else None
            pace = Pace(script, facts, kind, ranks, parameters)
            advice = advise(script, facts, kind, ranks, parameters, pace, alone)
            if facts.looked_at:
                problems.append(
                    f"samples differ in length: batches are planned with the longest of the first {facts.looked_at}"
                )
        if not formulas and not rehearsed:
            asked = threads.submit(states_alone, script, layout, parameters, path=path)
            states = found(asked, "nothing more is known of the model")
    if formulas and rehearsed:
        one_by_one = peak_of(facts, layout, rank)
        problems += _disagreement(facts, one_by_one, rehearsed)
        if more := formulas.bytes - one_by_one.bytes:
            problems.append(
                f"on a GPU torch's AdamW steps all parameters at once, for which formulas add {gib(more)} to the peak; "
                "the rehearsal steps one after the other, as with fused=True"
            )
    if rehearsed and layout.options.get("cpu_offload") and not kind.shared:
        problems.append(f"rehearsed {gib(rehearsed.bytes)} with what is offloaded to the host, so only formulas count")
        rehearsed = None
    return Plan(
        script,
        path,
        ranks,
        parameters,
        kind,
        layout,
        rank,
        facts,
        formulas,
        rehearsed,
        states,
        advice,
        tuple(problems),
    )


@dataclass(frozen=True)
class Plan:
    """What `labkit.plan` found. It shows itself; `labkit.launch(plan)` runs it and keeps the prediction with the run.

    `formulas` and `rehearsed` are the peak of rank `rank`, the one that holds most, found in two independent ways;
    None for what could not be planned: `problems` says why. When neither could, `states` are the bytes of parameters,
    gradients and optimizer state alone.
    """

    script: Script
    path: str  # of the script's file; "" when it has none of the user's own
    ranks: int
    parameters: Mapping[str, Any]
    device: Device
    layout: Layout
    rank: int
    facts: ModelFacts | None
    formulas: Peak | None
    rehearsed: Peak | None
    states: Mapping[str, int] | None
    advice: Advice | None
    problems: tuple[str, ...]

    @property
    def peaks(self) -> dict[str, Peak]:
        """By the way they were found."""
        found = {"formulas": self.formulas, "rehearsed": self.rehearsed}
        return {name: peak for name, peak in found.items() if peak}

    @property
    def bytes(self) -> int | None:
        """Of the rank that holds most, at its peak, by the way that says more; of a model that formulas take as one
        unit, by the rehearsal."""
        if self.rehearsed and self.facts and self.facts.layers:
            return self.rehearsed.bytes
        return max((peak.bytes for peak in self.peaks.values()), default=None)

    @property
    def fits(self) -> bool | None:
        """Whether a rank's share of the device can hold that; None when it is not known."""
        usable = self.device.usable_by(self.ranks)
        if unfit(self.device, self.layout):
            return False
        if self.bytes is not None:
            return self.bytes <= usable
        # how the states are divided is known of labkit's strategies only
        return False if self.layout.strategy and self.states and sum(self.states.values()) > usable else None

    @property
    def step(self) -> StepTime | None:
        """How long an optimizer step takes; None where nothing is known of the device's speed."""
        return self.advice.asked.step if self.advice else None

    def figures(self) -> dict[str, Figure]:
        """Plotly figures by name: "memory", "scaling" (tokens/s over ranks) and "break-even" (what a second device is
        worth); those of which nothing is known are left out."""
        rows = [*(bar_of(row) for row in self.advice.rows)] if self.advice else []
        name, shown = self.layout.strategy or self.script.name, self.advice.asked.peak if self.advice else None
        rows[1:1] = [Bar(name, peak.categories, source=how) for how, peak in self.peaks.items() if peak is not shown]
        if not rows:
            return {}
        found = {"memory": memory_planned(rows, self.device.usable_by(self.ranks), self.device.name)}
        if self.advice is None or self.facts is None:
            return found
        pace = Pace(self.script, self.facts, self.device, self.ranks, self.parameters)
        if curves := scaling_curves(self.advice.rows, pace):
            found["scaling"] = scaling_planned(curves, self.device.box, self.device.name)
        if points := break_even_curve(self.layout, pace):
            found["break-even"] = break_even(points)
        return found

    def record(self) -> dict[str, Any]:
        """What is written into the folder of a run before it starts."""
        step = self.step
        ranks = range(min(self.ranks, MOST_RANKS_WRITTEN)) if self.facts and self.formulas else ()
        peaks = {rank: peak_of(self.facts, self.layout, rank, on_gpu=not self.device.shared) for rank in ranks}
        return {
            "format": 1,
            "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "device": self.device.name,
            "nodes": self.device.nodes,
            "framework": self.device.outside,
            "formulas": {str(rank): found._asdict() for rank, found in peaks.items()},
            "rehearsed": {str(self.rank): self.rehearsed._asdict()} if self.rehearsed else {},
            "step_seconds": [step.seconds, step.low, step.high] if step else None,
            "assumed": list(step.assumed) if step else [],
            "problems": list(self.problems),
        }

    def launched_with(self, nproc_per_node: int | str, more: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a launch: the plan's, and others that it does not depend on, such as steps=100.

        Raises LaunchError when the launch would not be what was planned.
        """
        parameters = {**self.parameters, **more}
        if self.device.nodes > 1:
            raise LaunchError(
                f"this is a plan for {self.device.nodes} hosts with {self.device.box} ranks each, and a plan is "
                "launched on one; give the script and its parameters to launch or submit, and the hosts"
            )
        same = nproc_per_node in ("auto", self.ranks) and layout_of(self.script, self.ranks, parameters) == self.layout
        if not same:
            ranks = {} if nproc_per_node == "auto" else {"nproc_per_node": nproc_per_node}
            asked = ", ".join(f"{name}={value!r}" for name, value in {**ranks, **more}.items())
            raise LaunchError(
                f"this is a plan for {self.ranks} ranks with {self._asked() or 'the defaults'}, not for {asked}; "
                "make another with labkit.plan"
            )
        return parameters

    def _asked(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())

    def __str__(self) -> str:
        verdict, rows, assumed = self._told()
        return plan_text(verdict, self.peaks, rows, assumed)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        verdict, rows, assumed = self._told()
        asked = self.advice.asked.strategy if self.advice else ""
        drawn = [bar_of(row, chosen=row.strategy == asked) for row in (self.advice.rows if self.advice else ())]
        limit = self.device.usable_by(self.ranks)
        html = plan_html(verdict, self.peaks, rows, assumed, drawn, limit, self.device.name)
        return {"text/plain": str(self), "text/html": as_image(html)}

    def _told(self) -> tuple[list[str], list[dict[str, str]], list[str]]:
        verdict = list(self.advice.sentences) if self.advice else []
        if self.advice and self.step is None and self.device.is_this_machine:
            verdict.append("How fast a step is here, labkit.plan(…, measure=True) or --measure finds out.")
        if not self.peaks:
            verdict = [f"{problem}." for problem in self.problems] + verdict
        else:
            what = "Python and torch" if self.device.shared else "CUDA's context and NCCL, assumed"
            verdict.append(
                f"{gib(self.device.usable_by(self.ranks))} are left to a rank when the framework has taken its own "
                f"{gib(self.device.outside)} ({what})."
            )
        if self.states:
            each = ", ".join(f"{name} {gib(size)}" for name, size in self.states.items())
            verdict.append(
                f"Of {gib(self.device.usable_by(self.ranks))} a rank needs {gib(sum(self.states.values()))} for its "
                f"states alone ({each}); activations come on top, and are not known."
            )
        verdict += [f"{problem}." for problem in self.problems] if self.peaks else []
        rows = [row.row() for row in self.advice.rows] if self.advice else []
        steps = [row.step for row in self.advice.rows if row.step] if self.advice else []
        return verdict, rows, list(dict.fromkeys(text for step in steps for text in step.assumed))


def _script(script: Script | str | os.PathLike[str]) -> tuple[Script, str]:
    """The script, and where it is when it is the user's own: it may import what is beside it."""
    if isinstance(script, Script):
        return script, ""
    if isinstance(script, str) and script in script_names():
        return Script.load(script), ""
    return Script.load(script), str(Path(script).absolute())


def _ranks(asked: Any, devices: int | None, kind: Device) -> int:
    """As many as are asked for, or as there are devices."""
    if asked == "auto":
        return devices or hardware().default_ranks
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= MOST_RANKS:
        raise LaunchError(f"nproc_per_node must be 'auto' or a whole number from 1 to {MOST_RANKS:,}, got {asked!r}")
    here = kind.box if kind.is_this_machine and not kind.shared else None
    if (most := devices or here) and asked > most:
        raise LaunchError(f"{asked} ranks need {asked} devices; {most} x {kind.name} are planned for")
    return asked


def _on_hosts(nodes: Any, each: int, kind: Device, network: Any) -> tuple[int, Device]:
    """Ranks in all, and the device as it is found on so many hosts with `each` ranks."""
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MOST_RANKS // each:
        raise LaunchError(
            f"nodes must be a whole number from 1 to {MOST_RANKS // each:,} with {each} ranks each, got {nodes!r}"
        )
    if nodes == 1:
        raise LaunchError("network joins hosts: say how many with nodes, 2 or more")
    joined = kind.network if network is None else bandwidth_of(network)
    return nodes * each, replace(kind, nodes=nodes, box=each, network=joined)


def _disagreement(facts: ModelFacts, formulas: Peak, rehearsed: Peak) -> list[str]:
    """What to say when the two ways are too far apart for both to be right."""
    if abs(formulas.bytes / rehearsed.bytes - 1) <= AGREEING:
        return []
    take = (
        f"all {facts.layers} layers of this model as one unit" if facts.layers else "embed, blocks and unembed in turn"
    )
    return [
        f"formulas give {gib(formulas.bytes)}, the rehearsal of the script {gib(rehearsed.bytes)}: believe the "
        f"rehearsal, and other strategies' figures only roughly. Formulas take {take}, all of it trained by AdamW, and "
        "the script's own step"
    ]


def _splits(layout: Layout) -> list[tuple[int, bool]]:
    """Over how many ranks layers may be split, by this or another strategy, and whether the sequence is, too."""
    within_a_box = [n for n in range(2, TENSOR_RANKS + 1) if layout.ranks % n == 0]
    asked = (layout.tensor, bool(layout.options.get("sequence_parallel")))
    return sorted({(n, False) for n in within_a_box} | ({asked} if layout.tensor > 1 else set()))
