"""Findings reach other tools: annotations of a pull request, code scanning, and flake8, which is run for real."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import nbformat
import pytest

from labkit.checking.rules import RULES
from labkit.cli import main
from unit.seeded import SEEDED

ROOT = Path(__file__).parents[2]
# OASIS's schema, errata 01, without its descriptions.
SCHEMA = json.loads((Path(__file__).parent / "sarif-schema-2.1.0.json").read_text())
BARRIER, CORRECTED = SEEDED["rank-0-collective"][0]
LINE = BARRIER.splitlines().index("    dist.barrier()  # HERE") + 1


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(BARRIER)
    Path("good.py").write_text(CORRECTED)
    return tmp_path


def notebook(**keywords):
    cells = [nbformat.v4.new_markdown_cell("a\nb"), nbformat.v4.new_code_cell("import os\nprint('a/b')")]
    cells += [nbformat.v4.new_code_cell(BARRIER), nbformat.v4.new_code_cell("print(rank)")]
    book = nbformat.v4.new_notebook(cells=cells)
    return json.dumps(json.loads(nbformat.writes(book)), **keywords)


def checked(capsys, *arguments):
    code = main(["check", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_every_rule_has_a_number_of_its_own_which_it_keeps():
    numbers = sorted(rule.number for rule in RULES.values())

    assert numbers == [f"LK{number:03}" for number in range(1, len(RULES) + 1)], "a number is used twice or was lost"
    assert (RULES["sharded-state-dict"].number, RULES["no-sync-of-fsdp2"].number) == ("LK001", "LK050")


def test_annotations_name_the_file_the_line_and_the_rule(in_folder, capsys):
    Path("odd, 100%:a.py").write_text(BARRIER)

    code, output = checked(capsys, in_folder / "bad.py", "odd, 100%:a.py", "good.py", "--output-format", "github")

    first, second = output.splitlines()
    assert code == 1
    assert first.startswith(f"::error file=bad.py,line={LINE},title=LK008 rank-0-collective::`barrier` needs all ranks")
    assert second.startswith(f"::error file=odd%2C 100%25%3Aa.py,line={LINE},")
    assert first.endswith(
        ". Call it on every rank, and keep only what follows (printing, writing) under the condition."
    )


def test_a_slow_script_is_a_warning_and_a_migration_shows_what_it_forgot(in_folder, capsys):
    Path("slow.py").write_text(SEEDED["item-every-step"][0][0])

    assert checked(capsys, "slow.py", "--output-format", "github")[1].startswith("::warning file=slow.py,line=")
    code, output = checked(capsys, "--from", "good.py", "bad.py", "--output-format", "github")
    assert (code, output.count("::error")) == (1, 1)


@pytest.mark.parametrize("style", [{"indent": 1}, {"indent": 1, "ensure_ascii": False}, {}])
def test_a_line_in_a_cell_is_a_line_of_the_notebooks_file(style, in_folder, capsys):
    text = notebook(**style).replace("a/b", "a\\/b \\ud83d\\ude00")
    Path("lab.ipynb").write_text(text)

    output = checked(capsys, "lab.ipynb", "--output-format", "github")[1]

    line = next(number for number, text in enumerate(text.splitlines(), 1) if "# HERE" in text)
    assert output.startswith(f"::error file=lab.ipynb,line={line},")
    assert f"::cell 2, line {LINE}: `barrier`" in output


def test_a_log_for_code_scanning_is_valid_and_names_what_could_not_be_read(in_folder, capsys):
    Path("src").mkdir()
    Path("src/a b.py").write_text(SEEDED["item-every-step"][0][0])
    Path("lab.ipynb").write_text(notebook(indent=1))
    Path("broken.py").write_text("def f(:\n")

    code, output = checked(capsys, ".", "--output-format", "sarif")

    log = json.loads(output)
    jsonschema.validate(log, SCHEMA)
    (run,) = log["runs"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert code == 2
    assert [place["artifactLocation"]["uri"] for place in places] == ["bad.py", "lab.ipynb", "src/a%20b.py"]
    assert [result["level"] for result in run["results"]] == ["error", "error", "warning"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["LK008", "LK036"]
    assert places[0]["region"] == {"startLine": LINE, "snippet": {"text": "    dist.barrier()  # HERE"}}
    assert not run["invocations"][0]["executionSuccessful"]
    (notification,) = run["invocations"][0]["toolExecutionNotifications"]
    assert notification["message"]["text"] == "broken.py is not Python: line 1: invalid syntax"


def test_a_log_without_findings_is_valid_and_a_file_elsewhere_has_its_whole_address(in_folder, monkeypatch, capsys):
    code, output = checked(capsys, "good.py", "ddp", "--output-format", "sarif")
    jsonschema.validate(json.loads(output), SCHEMA)
    assert (code, json.loads(output)["runs"][0]["results"]) == (0, [])

    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    (result,) = json.loads(checked(capsys, "../bad.py", "--output-format", "sarif")[1])["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == (in_folder / "bad.py").as_uri()


def test_json_has_the_number_and_its_old_flag(in_folder, capsys):
    code, output = checked(capsys, "bad.py", "--output-format", "json")

    assert (code, json.loads(output)[0]["number"]) == (1, "LK008")
    assert checked(capsys, "bad.py", "--json") == (code, output)


WITHOUT_DEPENDENCIES = """
import importlib.metadata, sys

def version(name, get=importlib.metadata.version):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return get(name)

importlib.metadata.version = version
for name in ("torch", "numpy", "pandas", "IPython", "ipywidgets", "plotly", "pooch", "rich", "threadpoolctl", "pynvml"):
    sys.modules[name] = None

from labkit.cli import main

sys.exit(main(["check", "bad.py", "--output-format", "sarif"]))
"""


def test_checking_needs_no_torch(in_folder):
    done = subprocess.run([sys.executable, "-c", WITHOUT_DEPENDENCIES], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (1, "")
    assert "LK008" in done.stdout


@pytest.fixture
def flake8(in_folder, monkeypatch):
    """Runs flake8 with labkit as pyproject.toml declares it, whatever is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["flake8.extension"]
    metadata = in_folder / "installed" / "labkit-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: labkit\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[flake8.extension]\n" + "".join(f"{name} = {value}\n" for name, value in declared.items())
    )
    monkeypatch.setenv("PYTHONPATH", f"{metadata.parent}:{ROOT}")

    def run(*arguments, interpreter=()):
        command = [sys.executable, *interpreter, "-m", "flake8", "--isolated", "--select=LK", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def test_flake8_runs_the_rules(flake8):
    done = flake8("bad.py", "good.py")

    assert done.stdout.startswith(f"bad.py:{LINE}:1: LK008 rank-0-collective: `barrier` needs all ranks")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (1, 1, "")


def test_flake8s_own_comment_and_labkits_silence_a_rule_in_both(flake8):
    for comment, code in (
        ("noqa: LK008", 0),
        ("noqa", 0),
        ("labkit: ignore[rank-0-collective]", 0),
        ("noqa: LK007", 1),
    ):
        Path("bad.py").write_text(BARRIER.replace("HERE", comment))
        assert flake8("bad.py").returncode == code, comment
        assert main(["check", "bad.py"]) == code, comment


def test_flake8_imports_no_torch(flake8):
    imported = flake8("bad.py", interpreter=("-X", "importtime")).stderr

    assert "labkit.checking.rules" in imported
    assert " torch" not in imported
