"""Small models that are not labkit's (benchmarks/foreign) under five strategies, as docs/evidence/foreign_models.md:
their losses against those of one rank, their resumed checkpoints, and their planned against their traced memory.

python benchmarks/foreign_models.py > docs/evidence/foreign_models.md  # an hour; with names, only these models
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import labkit
from labkit import LabError, Script

FOREIGN = Path(__file__).parent / "foreign"
SPLIT = ("ddp", "zero1", "zero2", "fsdp")
RESUMED = {"fsdp → ddp": ("fsdp", "ddp"), "ddp → fsdp": ("ddp", "fsdp")}  # who saves, who resumes
COLUMNS = ("single", *SPLIT, *RESUMED)
BATCH = 8
OPTIONS = {"global_batch_size": BATCH, "precision": "fp64"}
STEPS, SAVED = 6, 4  # a run that is resumed was saved after step 4
CLOSE, SURE = 1e-9, 0.05
EQUAL = "✓"
ABOUT_MEMORY = ("cannot be planned", "not rehearsed", "other strategies", "samples differ", "CTC's targets")
HEAD = f"""<!-- python benchmarks/foreign_models.py > docs/evidence/foreign_models.md -->
# Models that are not labkit's under five strategies

Each model, its data and its loss are a file of `benchmarks/foreign`, written for this page after what the field uses,
and put into labkit's scripts with `with_cells`. A check mark means that {SAVED} steps on two gloo ranks in fp64, with a
global batch of {BATCH}, have the losses of one rank to {CLOSE:.0e}; in the columns with an arrow, that the second
strategy resumes the first one's checkpoint and trains what {STEPS} uninterrupted steps train. A number in parentheses
is a sentence below, which a plan says before the launch; beside it is the difference of the losses, if the model trains
at all. The last column is the largest difference of the plans from the traced peaks; "not sure" means that a plan says
what it does not know.
"""


@dataclass
class Result:
    """Of one model: by column a check mark, a difference or an error, and what was said before the launch; by strategy
    the error of the plan, and what the plan was not sure of."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def judge(self, column: str, losses: dict[int, float], expected: dict[int, float], steps: range) -> None:
        apart = difference(losses, expected, steps)
        self.cells[column] = EQUAL if apart <= CLOSE else f"{apart:.0e}"


def script_of(name: str, strategy: str) -> Script:
    cells = {title: cell.text for title, cell in Script.load(FOREIGN / f"{name}.py").cells.items()}
    return Script.load(strategy, "precision", "checkpoints").with_cells(**cells)


def losses_of(run: labkit.Run) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in run.losses().items()}


def difference(losses: dict[int, float], expected: dict[int, float], steps: range) -> float:
    return max(abs(losses[step] / expected[step] - 1) for step in steps)


def first_line(error: object) -> str:
    return str(error).splitlines()[0]


def trained(result: Result, strategy: str, steps: int, kept: Path) -> dict[int, float]:
    """The losses by step of a planned run, also if the plan says that it would fail; {} if it fails."""
    script, ranks = script_of(result.name, strategy), 1 if strategy == "single" else 2
    options = {**OPTIONS, "checkpoint_dir": kept} if strategy in ("ddp", "fsdp") else OPTIONS
    plan, problems = None, []
    try:
        plan = labkit.plan(script, nproc_per_node=ranks, **options)
        problems = [first_line(problem) for problem in plan.problems]
    except LabError as error:
        problems = [first_line(error)]
    result.said[strategy] = [problem for problem in problems if not problem.startswith(ABOUT_MEMORY)]
    result.doubts += [problem for problem in problems if problem.startswith(ABOUT_MEMORY)]
    how = {"steps": steps, "wait": True, "trace_memory": True}
    try:
        run = labkit.launch(plan, **how) if plan else labkit.launch(script, nproc_per_node=ranks, **options, **how)
    except LabError as error:
        print(result.name, strategy, error, file=sys.stderr)
        result.cells[strategy] = first_line(error)
        return {}
    traced = run.memory().ranks[plan.rank if plan else 0].traced
    if plan and plan.bytes and traced:
        result.errors[strategy] = plan.bytes / traced.bytes - 1
    result.cells[strategy] = EQUAL
    return losses_of(run)


def result_of(name: str) -> Result:
    result = Result(name)
    with tempfile.TemporaryDirectory() as folder:
        kept = {strategy: Path(folder) / strategy for strategy in SPLIT}
        expected = trained(result, "single", STEPS, Path(folder))
        for strategy in SPLIT:
            losses = trained(result, strategy, SAVED, kept[strategy])
            if losses and expected:
                result.judge(strategy, losses, expected, range(1, SAVED + 1))
        for column, (saves, resumes) in RESUMED.items():
            if {result.cells[saves], result.cells[resumes]} != {EQUAL}:
                continue
            how = {"nproc_per_node": 2, "steps": STEPS, "checkpoint_dir": kept[saves], "wait": True, **OPTIONS}
            try:
                losses = losses_of(labkit.launch(script_of(name, resumes), **how))
                result.judge(column, losses, expected, range(SAVED + 1, STEPS + 1))
            except LabError as error:
                result.cells[column] = first_line(error)
    return result


class Page:
    """The rows of the table, and the numbers of the sentences below it."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.equal = self.explained = self.wrong = self.sure = self.unsure = 0

    def row(self, result: Result) -> str:
        cells = [self._cell(result, column) for column in COLUMNS]
        self.wrong += any("WRONG" in cell for cell in cells)
        self.equal += all(cell == EQUAL for cell in cells[: 1 + len(SPLIT)])
        self.explained += any(cell != EQUAL for cell in cells[: 1 + len(SPLIT)])
        return f"| {result.name} | {' | '.join(cells)} | {self._memory(result)} |"

    def _cell(self, result: Result, column: str) -> str:
        cell, said = result.cells.get(column, "—"), result.said.get(column, [])
        refers = self._refer(said)
        if cell in (EQUAL, "—"):
            return f"{cell} {refers}".strip()
        what = cell if cell[0].isdecimal() else ""
        return f"{what} {refers}".strip() if said else f"**WRONG**: {cell}"

    def _refer(self, sentences: Iterable[str]) -> str:
        return " ".join(f"({self.numbers.setdefault(each, len(self.numbers) + 1)})" for each in sentences)

    def _memory(self, result: Result) -> str:
        worst = max(result.errors.values(), key=abs, default=None)
        refers = self._refer(dict.fromkeys(result.doubts))
        if worst is None and not refers:
            return "—"
        if worst is not None and abs(worst) <= SURE:
            self.sure += 1
            return f"{100 * worst:+.1f}% {refers}".strip()
        figure = "" if worst is None else f" {100 * worst:+.1f}%"
        self.unsure += bool(refers)
        self.wrong += not refers
        return f"not sure{figure} {refers}" if refers else f"**WRONG**{figure}"

    def foot(self) -> str:
        lines = [f"{number}. {sentence}" for sentence, number in self.numbers.items()]
        verdict = (
            f"{self.equal} models train the same under all five strategies; of {self.explained} a plan says before the "
            f"launch where they do not. The plans of {self.sure} are within {SURE:.0%}, those of {self.unsure} not "
            f"sure. Wrong: {self.wrong}."
        )
        return "\n".join(["", *lines, "", verdict])


def main() -> None:
    page, names = Page(), sys.argv[1:] or sorted(path.stem for path in FOREIGN.glob("*.py"))
    print(HEAD)
    print(f"| model | {' | '.join(COLUMNS)} | memory |")
    print("|---" * (2 + len(COLUMNS)) + "|", flush=True)
    for name in names:
        with contextlib.redirect_stdout(sys.stderr):
            result = result_of(name)
        print(page.row(result), flush=True)
    print(page.foot())


if __name__ == "__main__":
    main()
