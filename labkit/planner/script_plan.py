"""Plans a script that is not made of labkit's cells: it runs up to the end of its second optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.arguments import Parameters
from labkit.charts import Bar
from labkit.errors import LaunchError
from labkit.files import Json
from labkit.planner.candidate import Candidate, when
from labkit.planner.data_sheets import Device
from labkit.planner.model.child import Unplannable, ask
from labkit.planner.planned import AnyPlan
from labkit.planner.strategies.known import simplest
from labkit.record import Peak
from labkit.text import gib, listed
from labkit.write import Script

NAMES = {simplest(1).name: "replicated", "": "its own"}


@dataclass(frozen=True, kw_only=True, repr=False)
class ScriptPlan(AnyPlan):
    """The result of `labkit.plan` for a script that is not made of labkit's cells. It displays itself, and
    `labkit.launch(plan)` runs the script with these ranks and arguments.

    `peak` is that of rank 0 in the script's second optimizer step, None if the script cannot be planned, as `problems`
    explains. `strategy` is the name of labkit's script that divides the model as this one does, "" if none does.
    `others` are derived from `peak`: what a rank would hold under these strategies. `is_real`: the step was computed on
    real tensors.
    """

    arguments: tuple[str, ...]
    strategy: str
    others: Mapping[str, Peak]
    is_real: bool

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into a rank's share of the device; None if unknown."""
        return None if self.peak is None else self.peak.bytes <= self.usable

    @property
    def rows(self) -> list[dict[str, str]]:
        """The script as it is, and what a rank would hold under other strategies, as texts of a table."""
        peaks = {f"{NAMES.get(self.strategy, self.strategy)} (as it is)": self.peak, **self.others}
        return [
            {
                "strategy": name,
                "memory": ("~" if name in self.others else "") + gib(peak.bytes),
                "states": gib(sum(peak.categories.get(each, 0) for each in Peak.CATEGORIES[:3])),
                "verdict": "fits" if peak.bytes <= self.usable else self._needs(peak),
            }
            for name, peak in peaks.items()
            if peak
        ]

    def _needs(self, peak: Peak) -> str:
        return f"needs {gib(peak.bytes)} of {gib(self.usable)} per rank (peak {when(peak)})"

    def launched_with(self, nproc_per_node: int | str, args: Sequence[object], more: Parameters) -> list[str]:
        """The script's arguments. Raises LaunchError if the launch would differ from the plan."""
        if self.device.nodes > 1:
            raise LaunchError("a plan for several hosts cannot be launched; launch the script on its hosts")
        if nproc_per_node not in ("auto", self.ranks) or args or more:
            raise LaunchError(
                f"this plan is for {self.ranks} ranks with the arguments {' '.join(self.arguments) or '(none)'}; make "
                "another with labkit.plan"
            )
        return [*self.arguments]

    def _strategies(self) -> list[Json]:
        peaks = [*filter(None, [self.peak]), *self.others.values()]
        rows = [
            Candidate(row["strategy"], self.script, self.ranks, {}, peak=peak, fits=peak.bytes <= self.usable)
            for row, peak in zip(self.rows, peaks, strict=True)
        ]
        return [{**each.to_dict(), "is_rough": each.peak is not self.peak} for each in rows]

    def _bars(self) -> list[Bar]:
        name = NAMES.get(self.strategy, self.strategy)
        own = [Bar(name, self.peak.categories, fits=bool(self.fits), chosen=True)] if self.peak else []
        return own + [
            Bar(other, peak.categories, "derived", fits=peak.bytes <= self.usable, rough=True)
            for other, peak in self.others.items()
        ]

    def _texts(self) -> tuple[list[str], list[dict[str, str]], list[str]]:
        what = f"{self.script.name}.py on {self.device.times(self.ranks)}"
        if self.peak is None:
            return [f"{what} cannot be planned.", *self._problems()], [], []
        fits = "fits" if self.fits else "does not fit"
        assumed = ["the largest step is its second, on rank 0; its step time is not planned"]
        if self.others:
            assumed.append(
                f"{', '.join(self.others)}: parameters, gradients and optimizer state divided as in ZeRO, with "
                "activations and temporaries as observed; fsdp gathers what is outside of blocks, and two of "
                "the largest blocks at a time"
            )
        return [f"{what} {self._needs(self.peak)}: {fits}.", *self._problems()], self.rows, assumed


def plan_script(
    script: Script, path: str, ranks: int, arguments: Sequence[str], device: Device, measure: bool
) -> ScriptPlan:
    """Run the script up to its second step on tensors without data; if it needs their values, on real ones."""
    capability = device.dispatches_as
    gpu = {"name": device.name, "count": ranks // device.nodes, "memory": device.memory, "capability": capability}
    question = {
        "text": str(script),
        "argv": [],
        "arguments": [*arguments],
        "path": path or f"{script.name}.py",
        "ranks": ranks,
        "gpu": gpu if capability else None,
    }
    problems = []
    if measure:
        problems.append("nothing was measured: the step time of a script without labkit's cells is not planned")
    answer = _asked({**question, "without_data": True})
    is_real = answer["measured"] is None
    if is_real:
        why = answer["why"]
        answer = _asked({**question, "without_data": False})
        if answer["measured"]:
            on = "; a GPU's kernels may hold more or less" if capability else ""
            problems.append(f"the figures are of a step on real tensors of this machine, because {why}{on}")
        else:
            problems += dict.fromkeys([why, answer["why"]])
    problems += _about(answer)
    measured = answer["measured"] or {"peak": None, "strategy": "", "others": {}}
    return ScriptPlan(
        script=script,
        path=path,
        ranks=ranks,
        arguments=tuple(arguments),
        device=device,
        peak=Peak(**measured["peak"]) if measured["peak"] else None,
        strategy=measured["strategy"],
        others={name: Peak(**peak) for name, peak in measured["others"].items()},
        is_real=is_real,
        problems=tuple(problems),
    )


def _asked(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ask("any_script.rehearsal.peak_of_script", question)
    except Unplannable as error:
        return {"measured": None, "why": str(error), "notes": [], "written": [], "read": [], "assumed": []}
    return answer


def _about(answer: Mapping[str, Any]) -> list[str]:
    """What was assumed or left out."""
    about = [*answer["notes"], *answer["assumed"]]
    if places := answer["read"]:
        about.append(f"it reads values from tensors ({', '.join(places)}), which are assumed to be 1, as of a loss")
    if written := answer["written"]:
        about.append(
            f"before its second step it writes {listed(written, 3)}, which the plan kept in a temporary folder"
        )
    return about
