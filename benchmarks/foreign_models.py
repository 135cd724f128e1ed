"""Small models that are not labkit's (benchmarks/foreign) under five strategies, as docs/evidence/foreign_models.md:
their losses against those of one rank, their resumed checkpoints, and their planned against their traced memory.

python benchmarks/foreign_models.py > docs/evidence/foreign_models.md  # 30 minutes; with names, only these models
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import labkit
from labkit import LabError, Script

FOREIGN = Path(__file__).parent / "foreign"
SPLIT = ("ddp", "zero1", "zero2", "fsdp")
OPTIONS = {"global_batch_size": 8, "precision": "fp64"}
STEPS, SAVED = 6, 4  # a run that is resumed was saved after step 4
CLOSE, SURE = 1e-9, 0.05
ABOUT_MEMORY = ("cannot be planned", "not planned", "not rehearsed", "samples differ", "the memory of")


@dataclass
class Result:
    """Of one model: a cell of the table per column, the errors of its plans, and what was said before a launch."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    unsure: bool = False
    sentences: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return all(cell == "✓" for cell in self.cells.values())

    @property
    def memory(self) -> str:
        worst = max(self.errors.values(), key=abs, default=None)
        figure = "" if worst is None else f"{100 * worst:+.1f}%"
        if worst is not None and abs(worst) <= SURE:
            return figure
        return f"not sure {figure}".strip() if self.unsure else f"**WRONG** {figure}".strip()

    def say(self, sentence: str) -> str:
        """The number of a sentence below the table."""
        return self.sentences.setdefault(sentence, f"{self.name} {len(self.sentences) + 1}")


def script_of(name: str, strategy: str) -> Script:
    cells = {title: cell.text for title, cell in Script.load(FOREIGN / f"{name}.py").cells.items()}
    return Script.load(strategy, "precision", "checkpoints").with_cells(**cells)


def losses_of(run: labkit.Run) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in run.losses().items()}


def difference(losses: dict[int, float], expected: dict[int, float], steps: range) -> float:
    return max(abs(losses[step] / expected[step] - 1) for step in steps)


def first_line(error: LabError) -> str:
    return str(error).splitlines()[0]


def trained(result: Result, strategy: str, steps: int, kept: Path) -> dict[int, float] | None:
    """The losses by step of a planned run; None if the plan or the run was refused or failed."""
    script, ranks = script_of(result.name, strategy), 1 if strategy == "single" else 2
    options = {**OPTIONS, "checkpoint_dir": kept} if strategy in ("ddp", "fsdp") else OPTIONS
    said = [str(mistake) for mistake in labkit.check(script)]
    plan = None
    try:
        plan = labkit.plan(script, nproc_per_node=ranks, **options)
        said += plan.problems
    except LabError as error:
        said.append(first_line(error))
    numbers = ", ".join(result.say(sentence) for sentence in said if not sentence.startswith(ABOUT_MEMORY))
    how = {"steps": steps, "wait": True, "trace_memory": True}
    try:
        run = labkit.launch(plan, **how) if plan else labkit.launch(script, nproc_per_node=ranks, **options, **how)
    except LabError as error:
        print(result.name, strategy, error, file=sys.stderr)
        result.cells[strategy] = numbers or f"**WRONG**: {first_line(error)}"
        return None
    if plan:
        traced = run.memory().ranks[plan.rank].traced
        if plan.bytes and traced:
            result.errors[strategy] = plan.bytes / traced.bytes - 1
        result.unsure |= bool(plan.problems) or not plan.bytes
        for sentence in plan.problems:
            result.say(sentence)
    result.cells[strategy] = "✓" if plan else f"**WRONG**: refused ({numbers}), but it trains"
    return losses_of(run)


def result_of(name: str) -> Result:
    result = Result(name)
    with tempfile.TemporaryDirectory() as folder:
        kept = {strategy: Path(folder) / strategy for strategy in SPLIT}
        expected = trained(result, "single", STEPS, Path(folder))
        for strategy in SPLIT:
            losses = trained(result, strategy, SAVED, kept[strategy])
            if losses and expected:
                judge(result, strategy, difference(losses, expected, range(1, SAVED + 1)))
        if not expected:
            return result
        for saved_by, resumed_by in (("fsdp", "ddp"), ("ddp", "fsdp")):
            column = f"{saved_by} → {resumed_by}"
            if {result.cells[saved_by], result.cells[resumed_by]} != {"✓"}:
                result.cells[column] = "—"
                continue
            how = {"nproc_per_node": 2, "steps": STEPS, "checkpoint_dir": kept[saved_by], "wait": True, **OPTIONS}
            try:
                losses = losses_of(labkit.launch(script_of(name, resumed_by), **how))
            except LabError as error:
                result.cells[column] = f"**WRONG**: {first_line(error)}"
                continue
            result.cells[column] = "✓"
            judge(result, column, difference(losses, expected, range(SAVED + 1, STEPS + 1)))
    return result


def judge(result: Result, column: str, difference: float) -> None:
    """Replaces a check mark if the losses differ: right if a sentence has said so, otherwise wrong."""
    if difference > CLOSE and result.cells[column] == "✓":
        said = ", ".join(n for sentence, n in result.sentences.items() if not sentence.startswith(ABOUT_MEMORY))
        result.cells[column] = f"{difference:.0e}, said: {said}" if said else f"**WRONG**: {difference:.0e}"


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem for path in FOREIGN.glob("*.py"))
    columns = ["single", *SPLIT, "fsdp → ddp", "ddp → fsdp"]
    print("<!-- python benchmarks/foreign_models.py > docs/evidence/foreign_models.md -->\n")
    print("# Models that are not labkit's under five strategies\n")
    print("| model | " + " | ".join(columns) + " | plan |")
    print("|---" * (2 + len(columns)) + "|", flush=True)
    results = []
    for name in names:
        with contextlib.redirect_stdout(sys.stderr):
            result = result_of(name)
        results.append(result)
        cells = [result.cells.get(column, "—") for column in columns]
        print(f"| {name} | {' | '.join(cells)} | {result.memory} |", flush=True)
        for sentence, number in result.sentences.items():
            print(f"   {number}: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
