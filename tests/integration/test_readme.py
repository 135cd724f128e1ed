"""Every command in the README and in CONTRIBUTING works, every link leads somewhere, every name in its code exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.install import SOURCE
from labkit.verbs.demo import NEXT

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README + CONTRIBUTING, re.S)
    for line in block.splitlines()
]
CI_RUN = (ROOT / ".ci" / "run").read_text()
# What .ci/run calls as `make <target>`.
CALLED = re.findall(r"^for name in ([\w -]+);|(?:^|&& )suite ([\w-]+)", CI_RUN, re.M)
CI_TARGETS = set(" ".join(map(" ".join, CALLED)).split())


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_badges_state_what_pyproject_does_and_come_from_no_service():
    spec = importlib.util.spec_from_file_location("badges", ROOT / "docs" / "badges.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    drawn = module.badges()

    assert re.findall(r"docs/images/(badge-.*?)\)", README) == [*drawn]
    assert {name: (module.IMAGES / name).read_text() for name in drawn} == drawn, "run: python docs/badges.py"


def test_the_first_screen_says_for_whom_what_must_be_there_and_the_two_commands_that_ci_runs_too():
    first = "\n".join(README.splitlines()[:20])
    (commands,) = re.findall(r"```bash\n(.*?)```", first, re.S)

    assert "For people who" in first
    assert "You need git, Python 3.11 to 3.13 with venv (Debian and Ubuntu: `python3-venv`), and make." in first
    *clone, demo, test = (line.split("#")[0].strip() for line in commands.splitlines())
    assert (demo, test) == ("make demo", "make test")
    assert clone == ([f"git clone {SOURCE.address} labkit && cd labkit"] if SOURCE.address else [])
    assert {"demo", "test"} <= CI_TARGETS


def test_there_are_commands():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("target", [c.split()[1] for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist_and_ci_calls_them(target):
    dry = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    # `lab` waits for a person and is what the browser tests open; `kaggle` makes an environment of its own, which takes
    # minutes: the workflow has a job for it; `kaggle-table` needs an account.
    assert target in ("lab", "bench", "kaggle", "kaggle-table", "quick", "soak") or target in CI_TARGETS


def test_make_lab_opens_the_quickstart_and_make_demo_ends_as_labkit_demo_does():
    lab, demo = (
        subprocess.run(
            ["make", "--dry-run", "--no-print-directory", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for target in ("lab", "demo")
    )
    proposed = re.findall(r'^echo "(- .*)"$', demo, re.M)

    assert lab.split()[-2:] == ["--LabApp.default_url=/lab/tree/01_quickstart.ipynb", "notebooks"]
    assert len(proposed) == 3
    assert [line.replace(".venv/bin/", "") for line in proposed[1:]] == NEXT.splitlines()[-2:]
    assert NEXT.splitlines()[-1].partition(": ")[2] in COMMANDS  # which are tested below


@pytest.mark.parametrize("arguments", [c.split("-m ")[1].split() for c in COMMANDS if " -m pytest " in c])
def test_the_examples_of_running_one_test_find_it(arguments):
    collect = [sys.executable, "-m", *arguments, "--collect-only", "-q", "-o", "addopts="]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_terminals_commands_work_one_after_another(tmp_path):
    commands = [c for c in COMMANDS if c.startswith("labkit ")]
    assert len(commands) >= 6
    for command in commands:
        done = subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        assert done.stdout.strip(), command


def test_names_used_in_the_code_exist():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    tree = ast.parse(code)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "labkit"}
    assert len(used) >= 5
    assert used <= set(labkit.__all__)
    methods = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "run"}
    assert len(methods) >= 5
    assert all(hasattr(labkit.Run, method) for method in methods)


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)', text):
        assert link.startswith("http") or ((ROOT / page).parent / link).exists(), link


def test_files_that_contributing_names_exist():
    folders = "|".join(("labkit", "scripts", "tests", "notebooks", "benchmarks", "docs"))
    named = set(re.findall(rf"(?<![\w./<])(?:{folders})/[\w./]*\w", CONTRIBUTING))

    assert len(named) > 25
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, missing


def test_pages_that_the_texts_name_exist():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = [ROOT / name for name in listed if name.endswith((".md", ".py", ".ipynb", ".yml", "Makefile"))]
    # made on demand; a page of another project
    elsewhere = {"docs/evidence/kaggle_runs.md", "docs/performance.md"}

    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in texts
        if path.exists()
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert [pair for pair in named if pair[1] not in elsewhere and not (ROOT / pair[1]).exists()] == []


def test_the_sentences_that_troubleshooting_quotes_are_labkits():
    page = (ROOT / "docs" / "how_to" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ") and "says" not in line]
    said = [row[1] if len(row) == 3 and row[1].startswith("`") else row[0] for row in rows]
    sources = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "labkit").rglob("*.py")]
    texts = [n for tree in sources for n in ast.walk(tree) if isinstance(n, ast.Constant | ast.JoinedStr)]
    everything = "\n".join(map(text_of, texts))

    quotes = [quote for cell in said for quote in re.findall(r"`([^`]+)`", cell)]
    parts = {part.strip(" :;,.(") for quote in quotes for part in re.split(r"…|ranks? [01](?:, 1)?|\(train.*", quote)}
    assert len(parts) > 30
    unknown = sorted(part for part in parts if part not in everything)
    assert not unknown, unknown


def text_of(node: ast.AST) -> str:
    """A string of the code; an f-string with … for what it inserts, and `{'has' if … else 'have'}` as `has`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue(value=ast.IfExp(body=ast.Constant(value=str(text)))):
            return text
    return "…"


@pytest.mark.parametrize("page", ["check", "witness"])
def test_the_page_of_rules_is_the_one_that_the_rules_print(page):
    done = subprocess.run([sys.executable, f"benchmarks/{page}_table.py"], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout == (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8"), done.stderr
