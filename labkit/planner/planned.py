"""Holds a plan: the predicted memory per rank and step time of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from labkit.arguments import Parameters, Value
from labkit.charts import Bar, Bars, as_image
from labkit.dataclass_json import to_json
from labkit.errors import LaunchError
from labkit.files import Json
from labkit.planner.advice import Advice
from labkit.planner.candidate import MARGIN, unfit
from labkit.planner.data_sheets import Device
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import ModelFacts
from labkit.planner.plan_views import break_even_chart, plan_html, plan_text, scaling_chart
from labkit.planner.scaling import break_even_curve, scaling_curves
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.speed.step_time import StepTime
from labkit.planner.strategies.strategy import Layout
from labkit.record import Peak
from labkit.text import gib
from labkit.version import release_of
from labkit.write import Script

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True, kw_only=True)
class AnyPlan:
    """What all plans have. `path` is that of the script's file, "" unless it is the user's own; `peak` is that of rank
    `rank`."""

    script: Script
    path: str
    ranks: int
    device: Device
    rank: int = 0
    peak: Peak | None
    problems: tuple[str, ...]

    @property
    def bytes(self) -> int | None:
        """The peak in bytes; None if it is unknown."""
        return self.peak.bytes if self.peak else None

    @property
    def usable(self) -> float:
        """A rank's share of the device in bytes."""
        return self.device.usable_by(self.ranks)

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a rank's share of the device; None if that cannot be told."""
        raise NotImplementedError

    @property
    def step(self) -> StepTime | None:
        """Duration of an optimizer step; None if it is unknown."""
        return None

    def record(self) -> dict[str, Json]:
        """The record that is written into a run's folder before the run starts."""
        step = self.step
        return {
            "format": 2,
            "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "device": self.device.name,
            "nodes": self.device.nodes,
            "framework": self.device.outside,
            "rank": self.rank,
            "peak": self.peak._asdict() if self.peak else None,
            "step_seconds": [step.seconds, step.low, step.high] if step else None,
            "assumed": list(step.assumed) if step else [],
            "problems": list(self.problems),
        }

    def to_dict(self) -> dict[str, Json]:
        """The plan for a program, as `labkit plan --json` prints it (docs/reference/json.md)."""
        sentences, _, assumed = self._texts()
        step = self.step
        return {
            "schema": "labkit.plan/1",
            "script": self.script.name,
            "ranks": self.ranks,
            "nodes": self.device.nodes,
            "device": self.device.name,
            "fits": self.fits,
            "peak": to_json(self.peak and self.peak._asdict()),
            "peak_rank": self.rank if self.peak else None,
            "usable": self.usable,
            "step_seconds": {"expected": step.seconds, "low": step.low, "high": step.high} if step else None,
            "problems": to_json(self.problems),
            "strategies": self._strategies(),
            "sentences": to_json(sentences),
            "assumed": to_json(assumed),
        }

    def __str__(self) -> str:
        verdict, rows, assumed = self._texts()
        return plan_text(verdict, self.peak, rows, assumed)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        verdict, rows, assumed = self._texts()
        drawn = Bars(self._bars(), self.usable, self.device.name)
        html = plan_html(verdict, self.peak, rows, assumed, drawn)
        return {"text/plain": str(self), "text/html": as_image(html)}

    def _texts(self) -> tuple[list[str], list[dict[str, str]], list[str]]:
        """The verdict in sentences, a row for each strategy, and what is assumed."""
        raise NotImplementedError

    def _bars(self) -> list[Bar]:
        raise NotImplementedError

    def _strategies(self) -> list[Json]:
        """The strategies of the table for a program, first what was asked for."""
        raise NotImplementedError

    def _problems(self) -> list[str]:
        """The problems as sentences."""
        return [f"{problem[:1].upper()}{problem[1:]}." for problem in self.problems]


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(AnyPlan):
    """The result of `labkit.plan`. It displays itself; `labkit.launch(plan)` runs it and stores the prediction with the
    run.

    `peak` is that of rank `rank`, the one that holds the most, from a rehearsal of the script; None if that failed, as
    `problems` explains. Then `states` has the bytes of parameters, gradients and optimizer state, if the model could be
    made. `failure` is how the script itself would fail, "" if it would not.
    """

    parameters: Parameters
    layout: Layout
    facts: ModelFacts | None
    states: Mapping[str, int] | None
    advice: Advice | None
    failure: str = ""

    @property
    def unfit(self) -> str:
        """Why the device cannot train this, regardless of memory; "" if it can."""
        return unfit(self.device, self.layout)

    @property
    def fits(self) -> bool | None:
        """Whether it trains within a rank's share of the device; None if that cannot be told."""
        if self.unfit or self.failure:
            return False
        if self.peak:
            return self.peak.bytes <= self.usable
        # only labkit's strategies have a known division of states
        return False if self.layout.strategy.name and self.states and sum(self.states.values()) > self.usable else None

    @property
    def step(self) -> StepTime | None:
        """Duration of an optimizer step; None if the device's speed is unknown."""
        return self.advice.requested.step if self.advice else None

    def figures(self) -> dict[str, Figure]:
        """Plotly figures by name: "memory", "scaling" (tokens/s over ranks) and "break-even" (the speed-up from a
        second device). Figures without data are left out."""
        from labkit.charts import figure  # imports plotly

        rows = [row.bar() for row in self.advice.rows] if self.advice else []
        if not rows and self.peak:
            rows = [Bar(self.layout.strategy.name or self.script.name, self.peak.categories)]
        if not rows:
            return {}
        drawn = Bars(rows, self.usable, self.device.name, title="Memory per rank by category")
        figures = {"memory": figure(drawn)}
        if self.advice is None or self.facts is None:
            return figures
        speed_model = SpeedModel(self.script, self.facts, self.device, self.ranks, self.parameters)
        if curves := scaling_curves(self.advice.rows, speed_model):
            figures["scaling"] = figure([scaling_chart(curves, self.device.box, self.device.name)])
        if points := break_even_curve(self.layout, speed_model):
            figures["break-even"] = figure([break_even_chart(points)])
        return figures

    def launched_with(self, nproc_per_node: int | str, more: Parameters) -> dict[str, Value]:
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

    def _bars(self) -> list[Bar]:
        requested = self.advice.requested.strategy if self.advice else ""
        return [row.bar(chosen=row.strategy == requested) for row in (self.advice.rows if self.advice else ())]

    def _strategies(self) -> list[Json]:
        return [row.to_dict(self.advice.best) for row in self.advice.rows] if self.advice else []

    def _texts(self) -> tuple[list[str], list[dict[str, str]], list[str]]:
        verdict = list(self.advice.sentences) if self.advice else []
        if self.advice and self.step is None and self.device.is_this_machine:
            verdict.append("To measure the step time on this machine, use labkit.plan(…, measure=True) or --measure.")
        if not self.peak:
            verdict = self._problems() + verdict
        else:
            workspaces = f"{gib(self.device.cublas_workspaces)} of workspaces for matrix products"
            on_gpu = f"the driver's context, the buffers of collectives and {workspaces}, assumed"
            what = "Python and torch" if self.device.shared else on_gpu
            verdict.append(
                f"{gib(self.usable)} are left for each rank after the framework's {gib(self.device.outside)} ({what})."
            )
        if self.states and self.layout.strategy.name:
            each = ", ".join(f"{name} {gib(size)}" for name, size in self.states.items())
            verdict.append(
                f"A rank needs {gib(sum(self.states.values()))} of {gib(self.usable)} for its "
                f"states alone ({each}); its activations need more, but that is unknown."
            )
        verdict += self._problems() if self.peak else []
        rows = [row.row() for row in self.advice.rows] if self.advice else []
        steps = [row.step for row in self.advice.rows if row.step] if self.advice else []
        assumed = list(dict.fromkeys(text for step in steps for text in step.assumed))
        if any(row["memory"].startswith("~") for row in rows):
            assumed.insert(0, "memory with ~ is from formulas; only what was asked for is rehearsed")
        if (what := self.layout.strategy.frees_later) and release_of(version("torch")) < (2, 15):
            assumed.append(f"buffers are freed as in torch {version('torch')}; 2.15 frees those of {what} earlier")
        if self.peak and not self.device.shared:
            assumed.append(
                "the plan has neither the workspaces of convolutions, which depend on the algorithms chosen, nor what "
                f"torch's allocator loses by rounding and fragmentation: leave {MARGIN:.0%} for them"
            )
        return verdict, rows, assumed
