"""The labs keep to their limits of code, plumbing and lines before the first run.

Code lines are neither blank nor only a comment. Plumbing is what serves only the lab's own claims: the calls of
`verify`, and what nothing but these uses, in the notebook and in the lab's own module of `labkit_labs.labs`. What a
figure, a printed number, a question or a run depends on is part of the lesson.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
REWRITTEN = tuple(path.stem for path in sorted((ROOT / "notebooks").glob("[0-9]*.py")))
SECTIONS = (
    "You will be able to",
    "minutes",
    "You need",
    "Your predictions",
    "On 2 × T4 and 8 × A100",
    "Try this",
    "Sources",
)
MOST_LINES, MOST_PLUMBING, FIRST_RUN_WITHIN = 80, 0.15, 40
LONGER = {
    "02_collectives": 90,  # five collectives and the ring are written out
    "03_ddp": 122,  # six ways to send gradients are written out
    "05_fsdp": 105,  # its training loop notes what is held and sent, and a step is made by hand
    "06_which_strategy": 90,  # a function says what the plans of six strategies decide
    "07_fsdp1_and_fsdp2": 165,  # writes the same for two interfaces, and nothing of either may be hidden in a module
    "10_input_pipeline": 105,  # measures three things that have nothing in common: workers, streams, copies to a GPU
    "11_mixed_precision": 105,  # its training loop, with a scaler, is a cell of its own
    "12_activation_checkpointing": 95,  # the method is written out, and a policy for torch's
    "08_ddp_to_fsdp": 125,  # shows a whole training script, each mistake in it, and a second model
}
CLAIMS = {"verify", "verify_each"}  # of `lab`
RUNS = {"launch", "ranks", "run"}  # labkit.launch(…), labkit.ranks(…), lab.launch(…), lab.run(…)


class Lab(NamedTuple):
    lines: int
    plumbing: float
    before_run: int  # code lines up to and with the first launch; all of them if nothing is launched


def code_of(cell: nbformat.NotebookNode) -> str:
    """A cell's code, also of one that ranks execute."""
    return str(cell.source).removeprefix("%%ranks\n")


def counted(notebook: Path) -> Lab:
    """The figures of one notebook."""
    cells = [code_of(cell) for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]
    lines = before = 0
    for source in cells:
        tree, code = ast.parse(source), _code_lines(source)
        first = next((node.end_lineno or 0 for node in ast.walk(tree) if not before and _runs(node)), None)
        if first is not None:
            before = lines + len([i for i in code if i <= first])
        lines += len(code)
    plumbing, hidden = _plumbing(cells)
    return Lab(lines, (plumbing + hidden) / max(1, lines + hidden), before or lines)


class Statement(NamedTuple):
    """A statement of a notebook's cells; those within `for`, `if` and `with` are statements of their own."""

    lines: int
    defines: frozenset[str]
    uses: frozenset[str]
    is_claim: bool
    is_effect: bool  # shows, asks or runs something, or changes what it was given
    modules: tuple[tuple[str, str], ...]  # (module, name) that it imports from the labs' own modules


def _plumbing(cells: list[str]) -> tuple[int, int]:
    """The lines of a notebook that serve only its claims, and those of the labs' modules that nothing else uses."""
    statements = [each for source in cells for each in _statements(ast.parse(source).body, _code_lines(source))]
    live = {number for number, each in enumerate(statements) if each.is_effect and not each.is_claim}
    needed = frozenset[str]().union(*(statements[number].uses for number in live))
    while more := {
        n for n, each in enumerate(statements) if n not in live and not each.is_claim and each.defines & needed
    }:
        live |= more
        needed |= frozenset[str]().union(*(statements[number].uses for number in more))
    dead = [each for number, each in enumerate(statements) if number not in live]
    used_by_claims = frozenset[str]().union(*(each.uses for each in dead)) - needed
    hidden = sum(
        _lines_of(module, name) for each in statements for module, name in each.modules if name in used_by_claims
    )
    return sum(each.lines for each in dead), hidden


def _statements(body: list[ast.stmt], code: set[int]) -> Iterator[Statement]:
    for node in body:
        if isinstance(node, ast.For | ast.If | ast.With):
            head = [node.items[0].context_expr] if isinstance(node, ast.With) else []
            head += [node.iter] if isinstance(node, ast.For) else [node.test] if isinstance(node, ast.If) else []
            inner = [*_statements([*node.body, *getattr(node, "orelse", [])], code)]
            uses = frozenset(n.id for part in head for n in ast.walk(part) if isinstance(n, ast.Name))
            first = len([i for i in code if node.lineno <= i < node.body[0].lineno])
            is_claim = all(each.is_claim for each in inner)
            targets = (
                {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)} if isinstance(node, ast.For) else ()
            )
            defines = frozenset(targets).union(*(each.defines for each in inner))
            yield Statement(first, defines, uses, is_claim, any(e.is_effect and not e.is_claim for e in inner), ())
            yield from inner
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        else:
            yield _statement(node, code)


def _statement(node: ast.stmt, code: set[int]) -> Statement:
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    defines = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {getattr(node, "name", "")} - {""}
    if isinstance(node, ast.Assign | ast.AugAssign):  # a[…] = …, a.b = …, a += …
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            defines |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    modules: list[tuple[str, str]] = []
    if isinstance(node, ast.Import | ast.ImportFrom):
        defines |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit_labs.labs."):
            modules = [(node.module or "", alias.name) for alias in node.names]
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    methods = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute) and ast.unparse(c.func.value) == "lab"}
    is_claim = bool(methods & CLAIMS)
    is_effect = isinstance(node, ast.Expr) or bool(methods & {"ask"}) or any(_runs(call) for call in calls)
    uses = frozenset(n.id for n in names if isinstance(n.ctx, ast.Load))
    lines = len([i for i in code if node.lineno <= i <= (node.end_lineno or node.lineno)])
    return Statement(lines, frozenset(defines), uses, is_claim, is_effect, tuple(modules))


def _lines_of(module: str, name: str) -> int:
    """The code lines of a function of the labs' own modules."""
    path = ROOT / "notebooks" / (module.replace(".", "/") + ".py")
    source = path.read_text(encoding="utf-8")
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    code = _code_lines(source)
    return sum(len([i for i in code if node.lineno <= i <= (node.end_lineno or 0)]) for node in found)


def _code_lines(source: str) -> set[int]:
    return {i for i, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}


def _runs(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in RUNS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("lab", "labkit")
    )


def book(lab):
    return nbformat.read(ROOT / "notebooks" / f"{lab}.ipynb", 4)


@pytest.mark.parametrize("lab", REWRITTEN)
def test_a_lab_is_short_and_runs_soon(lab):
    found = counted(ROOT / "notebooks" / f"{lab}.ipynb")

    assert found.lines <= LONGER.get(lab, MOST_LINES)
    assert found.plumbing <= MOST_PLUMBING
    assert found.before_run <= FIRST_RUN_WITHIN


@pytest.mark.parametrize("lab", REWRITTEN)
def test_a_lab_has_all_of_its_parts_in_order_and_three_predictions(lab):
    cells = book(lab).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    places = [text.find(section) for section in SECTIONS]

    assert -1 not in places
    assert places == sorted(places)
    assert sum(len(re.findall(r"\blab\.ask\(", cell.source)) for cell in cells if cell.cell_type == "code") >= 3
    assert text.count("<summary>") == text.count("</details>") >= 3
    assert "ANSWER" not in text


def test_what_is_counted(tmp_path):
    cells = [
        "import json\n\n# a comment\nx = 1\nshown = 2",
        "run = lab.launch(\n    'ddp',\n)\nprint(shown)",
        "def f():\n    'A docstring.'\n    return json.loads('1')",
        "measured = f()\nlab.verify('x', x,\n    measured)\nlab.score()",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), tmp_path / "x.ipynb")

    lines, plumbing, before_run = counted(tmp_path / "x.ipynb")

    assert (lines, before_run) == (14, 6)
    assert plumbing == 8 / 14  # json, x, f, measured and verify


def test_what_a_figure_depends_on_is_no_plumbing(tmp_path):
    cells = [
        "held = {}\nfor n in (1, 2):\n    held[n] = 16 / n\n    lab.verify(f'held {n}', 16 / n, held[n])",
        "draw.bars(held)",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), tmp_path / "x.ipynb")

    assert counted(tmp_path / "x.ipynb").plumbing == 1 / 5


@pytest.mark.parametrize("name", REWRITTEN)
def test_no_question_has_its_formula_in_its_own_cell_or_above(name: str) -> None:
    """A name or a number alone may occur anywhere."""
    cells = [code_of(c) for c in nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4).cells if c.cell_type == "code"]
    asked: dict[str, int] = {}
    above: list[set[str]] = []  # the expressions of each cell
    for number, source in enumerate(cells):
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _method(node.value) == "ask":
                asked[ast.unparse(node.targets[0])] = number
        for question, formula in _answers(tree):
            if question in asked and not isinstance(formula, ast.Constant | ast.Name | ast.Attribute):
                until = asked[question] + 1
                assert number >= until, f"cell {number} asks and answers {question}"
                assert not [cell for cell in above[:until] if ast.unparse(formula) in cell], ast.unparse(formula)
        above.append({ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr)})


def _answers(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a cell verifies, each with what it expects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _method(node) == "verify" and len(node.args) > 1:
            yield ast.unparse(node.args[0]), node.args[1]
        elif isinstance(node, ast.Call) and _method(node) == "verify_each" and isinstance(node.args[0], ast.Dict):
            for key, value in zip(node.args[0].keys, node.args[0].values, strict=True):
                if key is not None and isinstance(value, ast.Tuple):
                    yield ast.unparse(key), value.elts[0]


def _method(node: ast.AST) -> str:
    """The method that a call calls."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
