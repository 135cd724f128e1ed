"""`plan`: predicts a training run before anything is launched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.arguments import Parameters, checked
from labkit.errors import LaunchError
from labkit.hardware import hardware
from labkit.planner.advice import Advice, advise
from labkit.planner.candidate import RecomputedNotCountedError, lacks, refusal, unsupported
from labkit.planner.contract import able_to, has_cells, parameters_in
from labkit.planner.data_sheets import Device, devices_named
from labkit.planner.layout import layout_of
from labkit.planner.memory.ledger import UnknownToFormulas
from labkit.planner.memory.peak import worst
from labkit.planner.model.child import Unplannable, WillFail, asking
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.model.rehearsal import rehearse, states_alone
from labkit.planner.networks import bandwidth_of
from labkit.planner.planned import Plan
from labkit.planner.progress import telling
from labkit.planner.script_plan import ScriptPlan, plan_script
from labkit.planner.search import half_of
from labkit.planner.speed.speed_model import SpeedModel, measure_speed
from labkit.planner.strategies.strategy import Layout
from labkit.record import Peak
from labkit.text import gib
from labkit.write import Script, check_flags, command_line, completed, script_names

MOST_RANKS = 16384
TENSOR_RANKS = 8  # they communicate in every layer, so no more than one box has are considered


@telling
@checked(LaunchError)
def plan(
    script: Script | str | os.PathLike[str],
    *,
    nproc_per_node: int | str = "auto",
    nodes: int = 1,
    device: str | None = None,
    network: str | float | None = None,
    measure: bool = False,
    args: Sequence[Any] = (),
    **parameters: Any,
) -> Plan | ScriptPlan:
    """Predict the memory per rank and the step time of a script, what fits the device, and what is fastest.

    `script`, `nproc_per_node` and `parameters` are as for `launch`. `device` is a preset ("T4", "2xT4", "A100 80");
    without a number it means as many as this machine would run ranks. None means this machine. `nodes` is the number of
    hosts, each with `nproc_per_node` ranks, and `network` the link between them: "100GbE", "InfiniBand NDR", "8 x
    InfiniBand HDR", or bits/s per host, one way.

    The first plan takes a few seconds: one process analyzes the model, another rehearses a step of the script, both on
    tensors without data; nothing is launched. Later plans take half as long, or less if the options that changed
    affect neither. With `measure=True`, ranks on this machine compute and communicate for about 15 seconds, so that the
    speed is measured instead of assumed; the result is cached.

    Any other script, for example with a loop of accelerate, Lightning or transformers.Trainer, is run up to its second
    optimizer step, with parameters that have no data, and the result is a ScriptPlan: the memory of rank 0, and what
    is derived from it for DDP, ZeRO-1, ZeRO-2 and FSDP. `args` are the script's arguments, as for `launch`. What it
    writes is kept in a temporary folder. Where it needs values, that step is computed on this machine's CPU.

    Raises ScriptError or LaunchError for anything that `launch` would reject. `.problems` lists what could not be
    planned.
    """
    script, path = _script(script)
    is_own = not has_cells(script)
    if is_own:
        script.check_syntax()
    else:
        script, parameters = _with_arguments(script, path, args, parameters)
        script.check()
        script = script if path else able_to(script, parameters)
        if reason := unsupported(script):
            raise LaunchError(reason)
    count, kind = devices_named(device)
    ranks = _ranks(nproc_per_node, count, kind)
    if nodes != 1 or network is not None:
        ranks, kind = _on_hosts(nodes, ranks, kind, network)
    if is_own:
        return plan_script(script, path, ranks, [*command_line(script, parameters), *map(str, args)], kind, measure)
    layout = layout_of(script, ranks, parameters)
    with asking() as threads:
        questions = _Questions(threads, script, path, ranks, parameters, kind, layout)
        facts, rank, peak = questions.memory()
        skewed = questions.rehearsal(rank=rank, skewed=True) if facts and facts.experts and peak else None
        advice = None
        if facts:
            if measure and kind.is_this_machine:  # nothing else may run while ranks are timed
                measure_speed(script, ranks // kind.nodes, parameters, again=False, nodes=kind.nodes)
            try:
                advice = _advice(script, facts, kind, ranks, parameters, peak, questions.failure)
            except RecomputedNotCountedError:  # which takes as long again, and most plans do not need it
                facts = questions.with_recomputed(facts)
                advice = _advice(script, facts, kind, ranks, parameters, peak, questions.failure)
        is_known = peak or questions.failure or (advice and advice.requested.peak)
        states = None if is_known else questions.states()
        problems = questions.problems
        if measure and not kind.is_this_machine:
            problems.append(f"nothing was measured: this machine has no {kind.name}; the speed is from its data sheet")
        if count is None and nproc_per_node == "auto" and not kind.is_this_machine:
            problems.append(
                f"device={device!r} has no count, so the plan assumes as many as this machine would run ranks, "
                f"{ranks // kind.nodes}; for one, pass '1x{kind.name}'"
            )
        problems += _about_facts(facts, kind) if facts else []
        if skewed and (most := questions.answer(skewed, "not rehearsed with all tokens at the same experts")):
            fits = "fits" if most.peak.bytes <= kind.usable_by(ranks) else "does not fit"
            problems.append(f"if all tokens go to the same experts, a rank holds {gib(most.peak.bytes)}, which {fits}")
    return Plan(
        script=script,
        path=path,
        ranks=ranks,
        parameters=parameters,
        device=kind,
        layout=layout,
        rank=rank,
        facts=facts,
        peak=peak,
        states=states,
        advice=advice,
        problems=tuple(problems),
        failure=questions.failure,
    )


def _advice(
    script: Script, facts: ModelFacts, kind: Device, ranks: int, parameters: Parameters, peak: Peak | None, failure: str
) -> Advice:
    speed_model = SpeedModel(script, facts, kind, ranks, parameters)
    return advise(script, facts, kind, ranks, parameters, speed_model, peak, failure)


class _Questions:
    """Asks the planning processes about one script; what they cannot answer is added to `problems`."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        script: Script,
        path: str,
        ranks: int,
        parameters: Parameters,
        kind: Device,
        layout: Layout,
    ):
        self._threads, self._script, self._path, self._ranks = threads, script, path, ranks
        self._parameters, self._kind, self._layout = parameters, kind, layout
        self.problems: list[str] = []
        self.failure = ""  # of the script itself
        if parameters.get("compile"):
            self.problems.append(
                "compile is not planned: figures are for eager mode; a compiled model often holds less"
            )

    def answer(self, future: Future[Any], what: str) -> Any:
        """The result, or None with a line in `problems` that starts with `what`."""
        try:
            return future.result()
        except WillFail as error:
            self.failure = f"this will fail: {str(error).rstrip('.')}"
            self.problems[:] = [self.failure]
        except Unplannable as error:
            why = str(error).rstrip(".")
            if any(why.partition("): ")[0] in problem for problem in self.problems):  # the same line again
                self.problems[:] = [f"cannot be planned: {why}"]
            else:
                self.problems.append(f"{what}: {why}")

    def memory(self) -> tuple[ModelFacts | None, int, Peak | None]:
        """The model's facts, the rank that holds most, and its peak.

        Raises LaunchError if the strategy cannot train this model."""
        layout = self._layout
        counted = self._facts(recomputed=None if layout.variant.recomputed else False)
        rehearsals = {0: self.rehearsal()}
        wait([counted, rehearsals[0]], return_when=FIRST_EXCEPTION)
        if rehearsals[0].done() and isinstance(error := rehearsals[0].exception(), LaunchError):
            raise error  # without waiting for the count, which may take longer
        facts = self.answer(counted, "other strategies are not planned")
        if facts and (reason := refusal(facts, layout)):
            raise LaunchError(reason)
        rehearsals = {rank: rehearsals.get(rank) or self.rehearsal(rank=rank) for rank in self._ranks_with_most(facts)}
        steps = {rank: step for rank, future in rehearsals.items() if (step := self.answer(future, "not rehearsed"))}
        self.problems += dict.fromkeys(note for step in steps.values() for note in step.notes)
        rank = max(steps, key=lambda rank: steps[rank].peak.bytes, default=min(rehearsals))
        return facts, rank, steps[rank].peak if rank in steps else None

    def _ranks_with_most(self, facts: ModelFacts | None) -> set[int]:
        """The rank that holds most by the formulas; if they cannot tell, those of the first and the last stage."""
        layout = self._layout
        with suppress(UnknownToFormulas):
            if facts:
                rank, _ = worst(facts, layout, on_gpu=not self._kind.shared)
                return {rank}
        return {0, self._ranks - self._ranks // layout.pipeline}

    def with_recomputed(self, facts: ModelFacts) -> ModelFacts:
        others = self.answer(self._facts(recomputed=True), "activation checkpointing is not planned")
        return facts.with_recomputed(others or facts)

    def _facts(self, recomputed: bool | None) -> Future[Any]:
        kind, layout = self._kind, self._layout
        precision = "fp32" if lacks(kind, layout) and not half_of(kind) else layout.variant.precision
        return self._threads.submit(
            facts_of,
            self._script,
            self._parameters,
            _splits(layout),
            precisions=[precision],
            recomputed=recomputed,
            path=self._path,
            capability=kind.dispatches_as,
        )

    def rehearsal(self, **which: Any) -> Future[Any]:
        where: dict[str, Any] = {"path": self._path, "capability": self._kind.dispatches_as}
        return self._threads.submit(rehearse, self._script, self._ranks, self._parameters, **where, **which)

    def states(self) -> Any:
        """Parameters, gradients and optimizer state alone, if the model could be made."""
        future = self._threads.submit(states_alone, self._script, self._layout, self._parameters, path=self._path)
        return self.answer(future, "nothing more is known about the model")


def _about_facts(facts: ModelFacts, kind: Device) -> list[str]:
    notes = []
    if facts.corrected and not kind.shared:
        notes.append(f"the memory of {', '.join(facts.corrected)} was measured on this CPU; a GPU's kernel differs")
    notes += facts.assumed
    if facts.looked_at:
        length = f", with {facts.positions:,} positions" if facts.positions else ""
        longest = f"the longest of the first {facts.looked_at}{length}"
        notes.append(f"samples differ in length: batches are planned at {longest}")
    return notes


def _script(script: Script | str | os.PathLike[str]) -> tuple[Script, str]:
    """The script, and its path if it is the user's own, because it may import modules next to it."""
    if isinstance(script, Script):
        return script, ""
    if isinstance(script, str) and script in script_names():
        return Script.load(script), ""
    return Script.load(script), str(Path(script).absolute())


def _with_arguments(
    script: Script, path: str, args: Sequence[Any], parameters: Parameters
) -> tuple[Script, dict[str, Any]]:
    """The script with the extras that the arguments need, and its parameters with those among the arguments."""
    argv = [*map(str, args)]
    script = script if path else completed(script, args=argv)
    check_flags(script, argv)
    return script, {**parameters_in(script, argv), **parameters}


def _ranks(count: Any, devices: int | None, kind: Device) -> int:
    """The requested number of ranks, by default one per device."""
    if count == "auto":
        return devices or hardware().default_ranks
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
        raise LaunchError(f"nproc_per_node must be 'auto' or an integer from 1 to {MOST_RANKS:,}, got {count!r}")
    here = kind.box if kind.is_this_machine and not kind.shared else None
    if (most := devices or here) and count > most:
        raise LaunchError(f"{count} ranks need {count} devices, but the plan is for {most} x {kind.name}")
    return count


def _on_hosts(nodes: Any, each: int, kind: Device, network: Any) -> tuple[int, Device]:
    """(total ranks, device) for `nodes` hosts with `each` ranks."""
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MOST_RANKS // each:
        raise LaunchError(
            f"nodes must be an integer from 1 to {MOST_RANKS // each:,} with {each} ranks each, got {nodes!r}"
        )
    if nodes == 1:
        raise LaunchError("network connects hosts: set nodes to 2 or more")
    joined = kind.network if network is None else bandwidth_of(network)
    return nodes * each, replace(kind, nodes=nodes, box=each, network=joined)


def _splits(layout: Layout) -> list[tuple[int, bool]]:
    """(ranks, whether the sequence is split too) for every split of layers by this or another strategy."""
    within_a_box = [n for n in range(2, TENSOR_RANKS + 1) if layout.ranks % n == 0]
    requested = (layout.tensor, bool(layout.options.get("sequence_parallel")))
    return sorted({(n, False) for n in within_a_box} | ({requested} if layout.tensor > 1 else set()))
