"""Every cell has a contract, which the documentation and help() show: what its functions get and return, and when they
are called."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from textwrap import indent

import pytest

import labkit
from labkit.write import library
from labkit.write.script import CONTRACTS

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "scripts.md"
PARTS = (library().base, *library().strategies.values(), *library().extras.values(), *library().tasks.values())
CELLS = {(cell.title, cell.text): cell for part in PARTS for cell in part.cells}.values()
HUB = {"hub", "splits", "configuration"}  # of tasks: not meant to be replaced one by one


def sections() -> dict[str, str]:
    """The contracts by the title of the cell."""
    many, _, few = CONTRACTS.partition("of one strategy, extra or kind of task\n")
    parted = re.split(r"^(\w[\w ]*)(?:, called if it is defined)?\n(?=    )", many, flags=re.MULTILINE)
    found = dict(zip(parted[1::2], parted[2::2], strict=True))
    return found | dict(re.findall(r"^    (\w+): (.*)", few, re.MULTILINE))


def seams() -> dict[tuple[str, str], list[ast.arguments | None]]:
    """The functions and classes that other cells use, by the title of their cell and their name."""
    found: dict[tuple[str, str], list[ast.arguments | None]] = {}
    for cell in CELLS:
        used = frozenset().union(*(other.uses for other in CELLS if other.title != cell.title))
        for name, statement in cell.definitions.items():
            if name in used and not name.endswith("_arguments") and cell.title not in HUB:
                places = statement.args if isinstance(statement, ast.FunctionDef) else None
                if places or isinstance(statement, ast.ClassDef):
                    found.setdefault((cell.title, name), []).append(places)
    return found


SEAMS = seams()


@pytest.mark.parametrize("title", sorted({cell.title for cell in CELLS}))
def test_every_cell_has_a_contract(title: str) -> None:
    assert sections()[title].strip()


@pytest.mark.parametrize(("title", "name"), sorted(SEAMS), ids=lambda text: text)
def test_what_other_cells_call_has_a_contract_with_its_parameters(title: str, name: str) -> None:
    (parameters,) = re.findall(rf"(?:^|\s){name}\(([^)]*)\)(?= ->|:)", CONTRACTS)
    for arguments in SEAMS[title, name]:
        if arguments is not None:
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
            given = parameters.split(", ") if parameters and not parameters.startswith("**") else []
            assert given == names[: len(given)]
            assert len(names) - len(given) <= len(arguments.defaults)


def test_functions_of_a_contract_exist() -> None:
    defined = {name for cell in CELLS for name in cell.defines}

    for title, text in sections().items():
        named = set(re.findall(r"^    (\w+)\(", text, re.MULTILINE))
        assert named <= defined | {"show_sample", "observed"}, title


def test_the_page_and_help_show_the_contracts() -> None:
    assert f"```text\n{CONTRACTS}```" in PAGE.read_text(encoding="utf-8")
    assert indent(CONTRACTS, "    ") in (inspect.getdoc(labkit.Script.with_cells) or "") + "\n"
    assert max(map(len, CONTRACTS.splitlines())) <= 120
