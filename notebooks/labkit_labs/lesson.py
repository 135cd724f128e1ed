"""Runs one lab: the reader's predictions, its claims, its runs, and what other devices would do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from IPython.utils.capture import capture_output

from labkit.errors import LabError
from labkit.frontend import ui
from labkit.hardware import hardware
from labkit.launching import launch
from labkit.run import Run
from labkit.text import plain
from labkit.view import aligned, grid
from labkit.write import Script, as_cell
from labkit_labs.claims import Claims, amount
from labkit_labs.draw.picture import Picture
from labkit_labs.guesses import YOURS, Guess, explore
from labkit_labs.on_ranks import cells_text
from labkit_labs.other_devices import Elsewhere, elsewhere

__all__ = ["ONE_CORE", "Lesson", "defined", "printed_lists", "sized"]

DEVICES = ("2xT4", "8xA100 80")
ONE_CORE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # of a rank, and no GPU


class Lesson(Claims):
    """The claims of a lab, and around them what its reader does: `ask` for a prediction, `run`, compare with `score`.

    `ranks` is the number of ranks of its runs. `env` gives each rank one core where there are fewer GPUs than ranks,
    so that two ranks have twice the hardware of one.
    """

    def __init__(self, lab: str, ranks: int = 2):
        super().__init__(lab)
        self.ranks = ranks
        self.on_cpu = len(hardware().gpus) < ranks
        self.counts_bytes = self.on_cpu and sys.platform == "linux"  # the kernel counts gloo's
        self.half = "bf16" if self.on_cpu else hardware().precision  # 16 bits that work here
        self.env = dict(ONE_CORE if self.on_cpu else {})
        self._guesses: dict[str, Guess] = {}

    def ask(
        self, name: str, *, default: float, unit: str = "", options: Mapping[str, float] | None = None, about: str = ""
    ) -> str:
        """Ask the reader for a prediction of what will be measured as `name`: a number in `unit` ("MB", "%", …) or one
        of `options`. Where nobody can answer, the default stands in. `about` explains the question.
        Returns the name."""
        self._guesses[name] = Guess(name, about, default, unit, options)
        self._guesses[name].show()
        return name

    def verify(self, name: str, predicted: float, measured: float, unit: str = "", **how: Any) -> None:
        """`Claims.verify`; a question of this name is answered, and can no longer be changed."""
        if guess := self._guesses.get(name):
            guess.freeze()
            how["options"] = guess.options
        super().verify(name, predicted, measured, unit, **how)

    def launch(
        self,
        script: Any,
        *,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        shown: bool = True,
        **options: Any,
    ) -> Run:
        """`labkit.launch` on the lesson's ranks, or on another number of them, and wait for the end. With `shown` the
        notebook displays its view, which adds some 30 kB."""
        count: dict[str, Any] = {"nproc_per_node": ranks or self.ranks} if isinstance(script, Script) else {}
        with nullcontext() if shown else capture_output():
            run = launch(script, env={**self.env, **(env or {})}, **count, **options)
            run.wait()
        return run

    def run(
        self,
        each_rank: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        **cells: Any,
    ) -> tuple[Run, list[Any]]:
        """Call `each_rank(device, *arguments)` on every rank; return the run, and what each rank returned.

        The script has the notebook cell that defines the function, the other `cells`, a few of the package's (`join`,
        which forms the process group, and those whose names are used) and a main: plain PyTorch, see `run.script`.
        """
        script = _script(self.lab, each_rank.__name__, {**cells, "each_rank": each_rank})
        args = [json.dumps(arguments)]
        run = self.launch(script, ranks=ranks, env=env, args=args, **(options or {}))
        return run, [_answer(run, rank) for rank in range(ranks or self.ranks)]

    def plans(
        self, scripts: Mapping[str, Any], *, devices: Sequence[str] = DEVICES, title: str = "", **options: Any
    ) -> Elsewhere:
        """What the planner expects of the scripts on other devices, without running anything. `options` are those of
        `labkit.launch`."""
        return elsewhere(scripts, devices, options, title)

    def explore(self, drawn: Callable[..., Picture], *fixed: Any, **positions: Sequence[Any]) -> None:
        """Display `drawn(*fixed, **values)`, with a slider for each value in a live notebook."""
        explore(partial(drawn, *fixed), positions)

    def score(self) -> Score:
        """The reader's predictions beside the formulas and the measurements, and below them all claims so far.

        What was measured with a clock is graded by its formula, for a busy machine is not the reader's mistake. Raises
        LabError when another claim does not hold.
        """
        self.require()
        return Score([self._scored(guess) for guess in self._guesses.values()], self._rows(), has_reader=ui() == "svg")

    def _scored(self, guess: Guess) -> dict[str, str]:
        claim = self._claims.get(guess.name)
        if claim is None:
            return {"question": guess.name, "predicted": guess.text, "measured": "not measured"}
        measured = guess.option_near(claim.measured) or amount(claim.measured, claim.unit)
        if claim.timed:  # with a clock
            measured += f", {claim.undecided or f'load {claim.load:.1f} per core'}"
        return {
            "question": guess.name,
            "predicted": guess.text,
            "by the formula": guess.option_near(claim.predicted) or claim.row()["predicted"],
            "measured": measured,
            "the prediction was": guess.verdict(claim.predicted) + ", by the formula"
            if claim.timed
            else guess.verdict(claim.measured),
        }


class Score:
    """The reader's predictions beside the measurements, and every claim of the lab, folded. Without `has_reader`, the
    predictions are the questions' defaults. It displays itself."""

    def __init__(self, rows: list[dict[str, str]], claims: list[dict[str, str]], *, has_reader: bool):
        self.rows, self.claims, self.has_reader = rows, claims, has_reader

    @property
    def right(self) -> int:
        return sum(row.get("the prediction was", "").startswith("right") for row in self.rows)

    def __repr__(self) -> str:
        return plain(f"{self._title()}\n{aligned(self.rows)}\n\n{self._held()}\n{aligned(self.claims)}")

    def _title(self) -> str:
        if not self.has_reader:
            return "No one was asked: these are the default predictions."
        decided = sum("the prediction was" in row for row in self.rows)  # others are "not measured"
        return f"{self.right} of {decided} predictions {'was' if self.right == 1 else 'were'} right."

    def _held(self) -> str:
        holding = sum(claim["verdict"] == "holds" for claim in self.claims)
        return f"{holding} of the {len(self.claims)} claims of this lab so far hold."

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        dot = f'<span style="color:{YOURS}">■</span> '
        table = grid(self.rows, sentences=("question", "the prediction was"))
        claims = grid(self.claims, sentences=("claim", "because"))
        folded = f"<details><summary>{self._held()}</summary>{claims}</details>"
        return {"text/plain": repr(self), "text/html": f"<b>{dot}{self._title()}</b>{table}{folded}"}


def sized(script: Script, **sizes: float) -> Script:
    """The script with other default sizes in its model and data: `sized(script, width=256, layers=8)`.

    Raises LabError when no function of these cells has such a parameter.
    """
    cells = {title: script.cells[title].text for title in ("model", "data") if title in script.cells}
    for name, value in sizes.items():
        pattern = re.compile(rf"\b{name}=\d[\d_]*(\.\d*)?(e[-+]?\d+)?")
        if not any(pattern.search(text) for text in cells.values()):
            raise LabError(f"no function in the cells {', '.join(cells)} has a default {name}=…")
        cells = {title: pattern.sub(f"{name}={value}", text) for title, text in cells.items()}
    changed = {title: text for title, text in cells.items() if text != script.cells[title].text}
    return script.with_cells(**changed) if changed else script


def defined(script: Script, *titles: str) -> SimpleNamespace:
    """What these cells of a script define, here in the notebook's process: to count, or to try without ranks."""
    names: dict[str, Any] = {}
    for title in titles:
        exec(script.cells[title].text, names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})


def printed_lists(run: Run) -> list[list[list[Any]]]:
    """By rank, the JSON lists that it printed, a line each."""
    logs = [run.logs(rank=rank, stream="stdout").splitlines() for rank in run.folder.latest.started_ranks()]
    return [[json.loads(line) for line in lines if line.startswith("[")] for lines in logs]


def _script(lab: str, called: str, own: Mapping[str, Any]) -> Script:
    """A script that calls the function `called` of the `own` cells on every rank and prints what it returns."""
    ours = Script.parse(cells_text("cells").replace("each_rank(", f"{called}(")).cells
    uses = {name for title, value in own.items() for name in as_cell(title, value).uses}
    needed: set[str] = set()
    while more := {t for t, cell in ours.items() if t in ("join", "main") or cell.defines & uses} - needed:
        needed |= more
        uses |= {name for title in more for name in ours[title].uses}
    before = {title: cell.text for title, cell in ours.items() if title in needed - {"main"}}
    return Script.of(lab, **before, **own, main=ours["main"].text)


def _answer(run: Run, rank: int) -> Any:
    for line in reversed(run.logs(rank=rank, stream="stdout").splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    raise LabError(f"rank {rank} of {run.id} printed no answer; run.logs(rank={rank}) shows what it did print")
