import argparse
import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from labkit.write import Script, options_of, script_names

FOLDER = Path(__file__).parents[2] / "scripts"
PATHS = sorted(FOLDER.glob("*.py"))
# What a strategy forces to differ; every other cell of the same title is the same in every script.
MAY_DIFFER = {"strategy", "step"}

each_script = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def test_there_are_scripts_and_labkit_knows_them_all():
    assert len(PATHS) >= 3
    assert set(script_names()) == {path.stem for path in PATHS}


@each_script
def test_a_script_passes_its_own_check(path):
    Script.load(path).check()


@each_script
def test_a_script_imports_only_torch_and_the_standard_library(path):
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = {
        name.split(".")[0]
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }

    assert "torch" in names
    assert names - sys.stdlib_module_names == {"torch"}


@each_script
def test_importing_a_script_defines_main_and_does_nothing(path, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest", "--unknown-to-the-script"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)

    spec.loader.exec_module(module)

    assert callable(module.main)
    assert not module.dist.is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@each_script
def test_the_cells_of_a_script_only_define(path):
    for cell in Script.load(path).parts:
        cell.check_only_defines()


@each_script
def test_what_a_cell_uses_another_defines(path):
    script = Script.load(path)
    defined = frozenset().union(*(cell.defines for cell in script.parts))

    for cell in script.parts:
        assert cell.uses <= defined, cell.title


@each_script
def test_every_cell_has_a_title_of_its_own(path):
    titles = [cell.title for cell in Script.load(path).parts]

    assert titles[-1] == "main"
    assert {"parameters", "model", "data", "strategy", "checkpoint", "report"} <= set(titles)
    assert len(titles) == len(set(titles))
    assert all(re.fullmatch(r"[a-z_]+", title) for title in titles)


@each_script
def test_every_cell_can_be_replaced_by_itself(path):
    script = Script.load(path)

    for title, cell in script.cells.items():
        replaced = script.with_cells(**{title: cell.text})
        assert replaced.cells[title].text.strip() == cell.text.strip()


def test_cells_of_the_same_title_are_the_same_in_every_script():
    texts = {}
    for path in PATHS:
        for cell in Script.load(path).parts[:-1]:
            texts.setdefault(cell.title, {}).setdefault(cell.text, []).append(path.stem)
        texts.setdefault("main", {}).setdefault(Script.load(path).cells["main"].text.rstrip(), []).append(path.stem)
    differing = {title: list(found.values()) for title, found in texts.items() if len(found) > 1}

    assert set(differing) == MAY_DIFFER, differing


def test_every_script_has_the_same_cells_in_the_same_order():
    assert len({tuple(cell.title for cell in Script.load(path).parts) for path in PATHS}) == 1


@each_script
def test_the_docstring_says_how_to_run_the_script(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))

    assert re.search(rf"^ +torchrun --standalone --nproc-per-node=\d {path.name} ", docstring, re.MULTILINE)


@each_script
def test_a_scripts_options_are_what_its_parser_takes(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [path.name])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location(f"parsed_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    taken = vars(module.parse_args())

    assert {name: option.default for name, option in options_of(Script.load(path)).items()} == taken


@pytest.mark.parametrize(("schedule", "torch", "refused"), [
    ("GPipe", "2.10.0+cu128", "--schedule GPipe on 2 pipeline ranks needs at least 2 micro-batches; --accumulate is 1"),
    ("GPipe", "2.11.0", None),
    ("1F1B", "2.13.0", "--schedule 1F1B on 2 pipeline ranks needs at least 2 micro-batches; --accumulate is 1"),
    ("DualPipeV", "2.12.1", "--schedule DualPipeV needs torch 2.13 or newer; this is 2.12.1"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["pipeline", "hybrid"])
def test_a_schedule_that_this_torch_would_not_make_is_refused(name, schedule, torch, refused, monkeypatch):
    """Before 2.11 torch refused a GPipe of fewer micro-batches than stages, with a traceback in every rank."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location(f"refusing_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.torch, "__version__", torch)
    monkeypatch.setattr(module.dist, "get_backend", lambda: "nccl")
    args = argparse.Namespace(schedule=schedule, accumulate=1, compile=False, virtual_stages=2)

    try:
        module.check_schedule(args, 2)
    except SystemExit as error:
        assert str(error) == refused
    else:
        assert refused is None
