"""A plan: the predicted memory per rank and step time of a training run, before anything is launched."""

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
from labkit.planner.data_sheets import Device, devices_named
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
from labkit.planner.speed.speed_model import SpeedModel, measure_speed
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
TOLERANCE = 0.1  # of the rehearsed peak; larger known deviations of a strategy's formulas are reported
MOST_RANKS_WRITTEN = 64
TENSOR_RANKS = 8  # they communicate in every layer, so more than one box has are not considered


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
    """Predict the memory per rank and the step time of a script, what fits the device, and what is fastest.

    `script`, `nproc_per_node` and `parameters` are those of `launch`. `device` is a preset ("T4", "2xT4", "A100 80");
    None means this machine. `nodes` is the number of hosts, each with `nproc_per_node` ranks, and `network` the link
    between them: "100GbE", "InfiniBand NDR", "8 x InfiniBand HDR", or bits/s per host, one way.

    It takes about 5 seconds: one process counts the model, another rehearses a step of the script, both on tensors
    without data; nothing is launched. With `measure=True`, ranks on this machine compute and communicate for about 15
    seconds, so that the speed is measured instead of assumed; the result is cached.

    Raises ScriptError or LaunchError for what `launch` would refuse. `.problems` lists what could not be planned.
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
        problems.append("compile is not planned: figures are for eager mode; a compiled model often holds less")

    def result_of(future: Future[Any], what: str) -> Any:
        try:
            return future.result()
        except Unplannable as error:
            why = str(error).rstrip(".")
            if any(why.partition("): ")[0] in problem for problem in problems):  # the same line again
                problems[:] = [f"cannot be planned: {why}"]
            else:
                problems.append(f"{what}: {why}")

    if measure and not kind.is_this_machine:
        problems.append(f"nothing was measured: this machine has no {kind.name}; the speed is from its data sheet")
    with asking() as threads:
        precisions = [variant_of(layout).precision]
        counted = threads.submit(facts_of, script, parameters, _splits(layout), path=path, precisions=precisions)
        play = partial(rehearse, script, ranks, parameters, path=path)
        alike = layout.pipeline == 1 and layout.strategy != "zero1"
        playing = {0: threads.submit(play)} if alike else {}
        facts, formulas, rank = result_of(counted, "not planned by formulas"), None, None
        if facts and (reason := refusal(facts, layout)):
            raise LaunchError(reason)
        try:
            rank, formulas = worst(facts, layout, on_gpu=not kind.shared) if facts else (None, None)
        except UnknownToFormulas as error:
            problems.append(f"not planned by formulas: {error}")
        ends = {0, ranks - ranks // layout.pipeline}  # the first or the last stage of a pipeline holds most
        planned = sorted(ends if rank is None else {rank})
        playing = playing or {each: threads.submit(play, rank=each) for each in planned}
        peaks = {each: peak for each, future in playing.items() if (peak := result_of(future, "not rehearsed"))}
        rank = max(peaks, key=lambda each: peaks[each].bytes, default=rank or 0) if rank is None else rank
        rehearsed, advice, states = peaks.get(rank), None, None
        if facts:
            if measure and kind.is_this_machine:  # nothing else may run while ranks are timed
                measure_speed(script, ranks // kind.nodes, parameters, again=False, nodes=kind.nodes)
            alone = rehearsed if facts.layers or not formulas else None
            speed_model = SpeedModel(script, facts, kind, ranks, parameters)
            advice = advise(script, facts, kind, ranks, parameters, speed_model, alone)
            if facts.looked_at:
                problems.append(
                    f"samples differ in length: batches are planned at the longest of the first {facts.looked_at}"
                )
        if not formulas and not rehearsed:
            future = threads.submit(states_alone, script, layout, parameters, path=path)
            states = result_of(future, "nothing more is known about the model")
    if formulas and rehearsed:
        one_by_one = peak_of(facts, layout, rank)
        problems += _disagreement(facts, one_by_one, rehearsed)
        if more := formulas.bytes - one_by_one.bytes:
            problems.append(
                f"on a GPU torch's AdamW updates all parameters at once, so the formulas add {gib(more)} to the peak; "
                "the rehearsal updates one at a time, as with fused=True"
            )
    if rehearsed and layout.options.get("cpu_offload") and not kind.shared:
        problems.append(f"the rehearsed {gib(rehearsed.bytes)} include what is offloaded to the host: use the formulas")
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
    """The result of `labkit.plan`. It displays itself; `labkit.launch(plan)` runs it and stores the prediction with the
    run.

    `formulas` and `rehearsed` are the peak of rank `rank`, the one that holds most, determined independently; None if
    that failed, as `problems` explains. If both failed, `states` are the bytes of parameters, gradients and optimizer
    state alone.
    """

    script: Script
    path: str  # of the script's file; "" unless it is the user's own
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
        """The peaks by method: "formulas" and "rehearsed"."""
        peaks = {"formulas": self.formulas, "rehearsed": self.rehearsed}
        return {name: peak for name, peak in peaks.items() if peak}

    @property
    def bytes(self) -> int | None:
        """The peak of the rank that holds most, by the method with the larger result; by the rehearsal for a model
        that the formulas treat as one unit."""
        if self.rehearsed and self.facts and self.facts.layers:
            return self.rehearsed.bytes
        return max((peak.bytes for peak in self.peaks.values()), default=None)

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a rank's share of the device; None if unknown."""
        usable = self.device.usable_by(self.ranks)
        if unfit(self.device, self.layout):
            return False
        if self.bytes is not None:
            return self.bytes <= usable
        # only labkit's strategies have a known division of states
        return False if self.layout.strategy and self.states and sum(self.states.values()) > usable else None

    @property
    def step(self) -> StepTime | None:
        """Duration of an optimizer step; None if the device's speed is unknown."""
        return self.advice.asked.step if self.advice else None

    def figures(self) -> dict[str, Figure]:
        """Plotly figures by name: "memory", "scaling" (tokens/s over ranks) and "break-even" (the speed-up by a second
        device); without those that lack data."""
        rows = [*(bar_of(row) for row in self.advice.rows)] if self.advice else []
        name, shown = self.layout.strategy or self.script.name, self.advice.asked.peak if self.advice else None
        rows[1:1] = [Bar(name, peak.categories, source=how) for how, peak in self.peaks.items() if peak is not shown]
        if not rows:
            return {}
        figures = {"memory": memory_planned(rows, self.device.usable_by(self.ranks), self.device.name)}
        if self.advice is None or self.facts is None:
            return figures
        speed_model = SpeedModel(self.script, self.facts, self.device, self.ranks, self.parameters)
        if curves := scaling_curves(self.advice.rows, speed_model):
            figures["scaling"] = scaling_planned(curves, self.device.box, self.device.name)
        if points := break_even_curve(self.layout, speed_model):
            figures["break-even"] = break_even(points)
        return figures

    def record(self) -> dict[str, Any]:
        """The record that is written into the folder of a run before it starts."""
        step, facts = self.step, self.facts
        ranks = range(min(self.ranks, MOST_RANKS_WRITTEN)) if self.formulas else ()
        peaks = {rank: peak_of(facts, self.layout, rank, on_gpu=not self.device.shared) for rank in ranks if facts}
        return {
            "format": 1,
            "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "device": self.device.name,
            "nodes": self.device.nodes,
            "framework": self.device.outside,
            "formulas": {str(rank): peak._asdict() for rank, peak in peaks.items()},
            "rehearsed": {str(self.rank): self.rehearsed._asdict()} if self.rehearsed else {},
            "step_seconds": [step.seconds, step.low, step.high] if step else None,
            "assumed": list(step.assumed) if step else [],
            "problems": list(self.problems),
        }

    def launched_with(self, nproc_per_node: int | str, more: Mapping[str, Any]) -> dict[str, Any]:
        """The launch parameters: the plan's, plus others that do not affect it, such as steps=100.

        Raises LaunchError if the launch would differ from the plan.
        """
        parameters = {**self.parameters, **more}
        if self.device.nodes > 1:
            raise LaunchError(
                f"this plan is for {self.device.nodes} hosts with {self.device.box} ranks each, but a plan can be "
                "launched on one host only; pass the script, its parameters and the hosts to launch or submit"
            )
        same = nproc_per_node in ("auto", self.ranks) and layout_of(self.script, self.ranks, parameters) == self.layout
        if not same:
            ranks = {} if nproc_per_node == "auto" else {"nproc_per_node": nproc_per_node}
            requested = ", ".join(f"{name}={value!r}" for name, value in {**ranks, **more}.items())
            raise LaunchError(
                f"this plan is for {self.ranks} ranks with {self._parameters() or 'the defaults'}, not {requested}; "
                "make another with labkit.plan"
            )
        return parameters

    def _parameters(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())

    def __str__(self) -> str:
        verdict, rows, assumed = self._texts()
        return plan_text(verdict, self.peaks, rows, assumed)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        verdict, rows, assumed = self._texts()
        asked = self.advice.asked.strategy if self.advice else ""
        drawn = [bar_of(row, chosen=row.strategy == asked) for row in (self.advice.rows if self.advice else ())]
        limit = self.device.usable_by(self.ranks)
        html = plan_html(verdict, self.peaks, rows, assumed, drawn, limit, self.device.name)
        return {"text/plain": str(self), "text/html": as_image(html)}

    def _texts(self) -> tuple[list[str], list[dict[str, str]], list[str]]:
        verdict = list(self.advice.sentences) if self.advice else []
        if self.advice and self.step is None and self.device.is_this_machine:
            verdict.append("To measure the step time on this machine, use labkit.plan(…, measure=True) or --measure.")
        if not self.peaks:
            verdict = [f"{problem}." for problem in self.problems] + verdict
        else:
            what = "Python and torch" if self.device.shared else "CUDA's context and NCCL, assumed"
            verdict.append(
                f"{gib(self.device.usable_by(self.ranks))} are left for each rank after the framework's own "
                f"{gib(self.device.outside)} ({what})."
            )
        if self.states:
            each = ", ".join(f"{name} {gib(size)}" for name, size in self.states.items())
            verdict.append(
                f"A rank needs {gib(sum(self.states.values()))} of {gib(self.device.usable_by(self.ranks))} for its "
                f"states alone ({each}); its activations need more, but that is unknown."
            )
        verdict += [f"{problem}." for problem in self.problems] if self.peaks else []
        rows = [row.row() for row in self.advice.rows] if self.advice else []
        steps = [row.step for row in self.advice.rows if row.step] if self.advice else []
        return verdict, rows, list(dict.fromkeys(text for step in steps for text in step.assumed))


def _script(script: Script | str | os.PathLike[str]) -> tuple[Script, str]:
    """The script, and its path if it is the user's own, because it may import modules next to it."""
    if isinstance(script, Script):
        return script, ""
    if isinstance(script, str) and script in script_names():
        return Script.load(script), ""
    return Script.load(script), str(Path(script).absolute())


def _ranks(count: Any, devices: int | None, kind: Device) -> int:
    """The requested number of ranks, by default one per device."""
    if count == "auto":
        return devices or hardware().default_ranks
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
        raise LaunchError(f"nproc_per_node must be 'auto' or a whole number from 1 to {MOST_RANKS:,}, got {count!r}")
    here = kind.box if kind.is_this_machine and not kind.shared else None
    if (most := devices or here) and count > most:
        raise LaunchError(f"{count} ranks need {count} devices, but the plan is for {most} x {kind.name}")
    return count


def _on_hosts(nodes: Any, each: int, kind: Device, network: Any) -> tuple[int, Device]:
    """(total ranks, device) for `nodes` hosts with `each` ranks."""
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MOST_RANKS // each:
        raise LaunchError(
            f"nodes must be a whole number from 1 to {MOST_RANKS // each:,} with {each} ranks each, got {nodes!r}"
        )
    if nodes == 1:
        raise LaunchError("network connects hosts: set nodes to 2 or more")
    joined = kind.network if network is None else bandwidth_of(network)
    return nodes * each, replace(kind, nodes=nodes, box=each, network=joined)


def _disagreement(facts: ModelFacts, formulas: Peak, rehearsed: Peak) -> list[str]:
    """A message if the two methods disagree by more than the tolerance."""
    if abs(formulas.bytes / rehearsed.bytes - 1) <= TOLERANCE:
        return []
    model = (
        f"all {facts.layers} layers of this model as one unit" if facts.layers else "embed, blocks and unembed in turn"
    )
    return [
        f"formulas give {gib(formulas.bytes)}, the rehearsal of the script {gib(rehearsed.bytes)}: trust the "
        f"rehearsal; the other strategies' figures are rough. The formulas assume {model}, all of it trained by AdamW, "
        "and the script's own step"
    ]


def _splits(layout: Layout) -> list[tuple[int, bool]]:
    """(ranks, whether the sequence is split too) for every split of layers by this or another strategy."""
    within_a_box = [n for n in range(2, TENSOR_RANKS + 1) if layout.ranks % n == 0]
    requested = (layout.tensor, bool(layout.options.get("sequence_parallel")))
    return sorted({(n, False) for n in within_a_box} | ({requested} if layout.tensor > 1 else set()))
