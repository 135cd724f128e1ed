"""What the planner knows of a strategy is in one file, named as its script."""

import ast
from pathlib import Path

import pytest

import labkit
from labkit.planner.strategies.known import CUSTOM, STRATEGIES, simplest, strategy_named
from labkit.write import script_names

PLANNER = Path(labkit.__file__).parent / "planner"
ELSEWHERE = sorted(path for path in PLANNER.rglob("*.py") if path.parent.name != "strategies")


def test_every_script_has_a_strategy_in_a_file_of_its_name():
    assert {*STRATEGIES} == {*script_names()}
    for name, strategy in STRATEGIES.items():
        assert type(strategy).__module__ == f"labkit.planner.strategies.{name}"


def named(source):
    """The lines that name a strategy by a string, or ask an object which one it is."""
    classes = {type(strategy).__name__ for strategy in STRATEGIES.values()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in STRATEGIES:
            yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            kinds = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            if kinds & classes:
                yield node.lineno


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: path.relative_to(PLANNER).as_posix())
def test_nothing_else_in_the_planner_names_a_strategy(path):
    assert not [*named(path.read_text(encoding="utf-8"))]


def test_a_named_strategy_is_seen():
    assert {*named('if layout.strategy == "ddp": pass\nisinstance(x, (FSDP, int))\nf("ddp is simple")')} == {1, 2}


def test_what_labkit_did_not_write_is_a_strategy_of_the_users():
    assert strategy_named("") is strategy_named("mine") is CUSTOM
    assert (simplest(1).name, simplest(2).name) == ("single", "ddp")
