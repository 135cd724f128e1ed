import ast
import functools
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import labkit
from labkit import errors

PACKAGE = Path(labkit.__file__).parent
# Packages, and the modules beside them that packages use, each with what it may import besides itself.
SMALL = {
    "arguments",
    "beside",
    "dataclass_json",
    "errors",
    "faces",
    "files",
    "frontend",
    "host",
    "install",
    "launch_options",
    "line_folder",
    "metric_names",
    "place",
    "rank_files",
    "ring",
    "series",
    "session",
    "spans",
    "tail",
    "text",
    "version",
}
BASIC = SMALL | {"hardware", "record", "stored_runs", "witness", "words", "write"}
MAY_IMPORT = {
    "hardware": SMALL,
    "record": SMALL,
    "witness": SMALL | {"record"},
    "write": SMALL | {"record"},
    "worker": SMALL | {"hardware", "record"},
    "checking": BASIC,
    "launcher": BASIC | {"checking", "needs", "worker"},
    "link": BASIC | {"launcher"},
    "charts": SMALL | {"record", "words"},
    "view": BASIC | {"charts"},
    "alerts": BASIC | {"view"},
    "needs": BASIC | {"checking"},
    "cluster": BASIC | {"launcher"},
    "kaggle": BASIC | {"needs", "view"},
    "sweeps": BASIC | {"cluster", "charts", "export", "launcher", "view"},
    "export": BASIC | {"view"},
    "planner": BASIC | {"checking", "worker", "charts", "launcher", "link", "view"},
    "diagnosis": BASIC | {"data", "launcher", "link", "planner", "view"},
}
MOST_NAMES = 25
# An installed package also holds the training scripts, which have tests of their own.
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "scripts")
SOURCES = sorted(path for layer in MAY_IMPORT for path in (PACKAGE / layer).rglob("*.py"))


@functools.cache
def imports_of_labkit(path):
    """The parts of labkit that a file imports, wherever in it."""
    return [*_imports_of_labkit(path)]


def _imports_of_labkit(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively at line {node.lineno}"
            names = [f"labkit.{a.name}" for a in node.names] if node.module == "labkit" else [node.module]
        else:
            continue
        yield from (name.split(".")[1] if "." in name else "" for name in names if name.split(".")[0] == "labkit")


@pytest.mark.parametrize(
    "module", ["torch", "ipywidgets", "pandas", "plotly", "matplotlib", "IPython", "numpy", "pooch"]
)
def test_importing_labkit_imports_nothing_heavy(module, modules_after_import):
    assert "labkit" in modules_after_import
    assert module not in modules_after_import


@pytest.fixture(scope="module")
def modules_after_import():
    code = "import sys, labkit; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_public_names_include_the_errors():
    assert set(errors.__all__) < set(labkit.__all__)
    assert dir(labkit) == labkit.__all__


@pytest.mark.parametrize("name", labkit.__all__)
def test_every_public_name_exists_and_says_what_it_is(name):
    thing = getattr(labkit, name)

    assert thing.__name__ == name
    assert thing.__doc__
    assert thing.__doc__.strip()


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(AttributeError, match="module 'labkit' has no attribute 'lanch'; it has .*launch"):
        labkit.lanch  # noqa: B018


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_lab_error_that_shows_no_stack_of_ours(name):
    error = getattr(errors, name)("first line\nsecond line")

    assert isinstance(error, labkit.LabError)
    assert error._render_traceback_() == [f"{name}: first line", "second line"]


def test_a_failed_rank_carries_its_cause_as_fields():
    error = labkit.RankFailedError("rank 3 failed", run_id="run", cause={"rank": 3, "sentence": "rank 3 failed"})

    assert (error.run_id, error.rank, error.cause["sentence"]) == ("run", 3, "rank 3 failed")
    assert labkit.RankFailedError("unknown").rank is None


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_every_layer_has_sources(layer):
    assert [path for path in SOURCES if path.is_relative_to(PACKAGE / layer)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_layer_imports_only_those_below_it(path):
    layer = path.relative_to(PACKAGE).parts[0]

    assert set(imports_of_labkit(path)) <= MAY_IMPORT[layer] | {layer}


def test_no_modules_import_each_other_not_even_for_types():
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imports = {
        name: {
            module if (module := f"{node.module}.{alias.name}") in paths else node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "labkit"
            for alias in node.names
        }
        for name, path in paths.items()
    }

    TopologicalSorter(imports).prepare()  # raises CycleError


def test_the_layers_are_seen_to_import_one_another():
    found = {layer: set() for layer in MAY_IMPORT}
    for path in SOURCES:
        found[path.relative_to(PACKAGE).parts[0]] |= set(imports_of_labkit(path))

    assert found["launcher"] >= {"errors", "record", "write"}
    assert found["worker"] >= {"record"}


def test_labkit_stays_small():
    """The witness, the rules of the checker and the planner have sizes of their own."""
    lines = {path.relative_to(PACKAGE): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    witness = sum(count for path, count in lines.items() if "witness" in path.parts or path.name == "ring.py")
    checking, planner = (
        sum(count for path, count in lines.items() if path.parts[0] == name) for name in ("checking", "planner")
    )

    assert len(MODULES) <= 385
    assert witness <= 6_574
    assert checking <= 7_380
    assert planner <= 10_904
    assert sum(lines.values()) - witness - checking - planner <= 38_630


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


FACES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "scripts")
LABS = PACKAGE.parent / "notebooks" / "labkit_labs"
ENTERING = sorted([*MODULES, *LABS.rglob("*.py")])


@pytest.mark.parametrize("path", ENTERING, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_a_package_is_entered_by_its_face(path):
    own = path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else ""
    within = [
        f"line {line}: {module}"
        for line, module in _imported_modules(path)
        if module.count(".") > 1 and module.split(".")[1] not in ("", own)
    ]

    assert not within


def _imported_modules(path):
    """`(line, module)` of each import of labkit's, where a module that is imported by name counts as itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if _is_module(name) else node.module for name in names]
        else:
            continue
        yield from ((node.lineno, name) for name in found if name.split(".")[0] == "labkit")


def _is_module(name):
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("name", FACES)
def test_a_face_offers_what_there_is(name):
    package = importlib.import_module(f"labkit.{name}")

    assert all(hasattr(package, public) for public in package.__all__)
    assert not [public for public in package.__all__ if _is_module(f"labkit.{name}.{public}")]


@pytest.mark.parametrize("name", FACES)
def test_a_face_is_small(name):
    assert len(importlib.import_module(f"labkit.{name}").__all__) <= MOST_NAMES


def test_what_a_face_does_not_offer_is_answered_with_what_it_does():
    from labkit import record

    with pytest.raises(
        AttributeError, match=r"module 'labkit\.record' has no attribute 'RunFoder'; it has .*RunFolder"
    ):
        record.RunFoder  # noqa: B018
