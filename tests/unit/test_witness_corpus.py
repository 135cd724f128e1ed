"""The trainings of tests/witness: each fault says what it is and has a twin, and the page names scripts that exist."""

import re
from pathlib import Path

import pytest
from witness.found import FOUND

from labkit.witness.judge import RULES

ROOT = Path(__file__).parents[2]
FAULTY = sorted((ROOT / "tests" / "witness" / "faulty").glob("*.py"))
CORRECT = ROOT / "tests" / "witness" / "correct"
REPORTS = (ROOT / "docs" / "evidence" / "witness_reports.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", FAULTY, ids=lambda script: script.stem)
def test_a_fault_says_what_it_is_and_has_a_twin(script: Path) -> None:
    twin = CORRECT / f"ok_{script.name}"
    for path, kind in ((script, "fault"), (twin, "corrected")):
        text = path.read_text(encoding="utf-8")
        assert re.match(rf"# {kind}: \S.{{20,}}\n", text), f"{path.name} does not begin with `# {kind}: …`"
        compile(text, str(path), "exec")
    # Comments say so; the programs differ as well.
    programs = [re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M) for path in (script, twin)]
    assert programs[0] != programs[1]


def test_each_report_names_a_script_that_is_there() -> None:
    rows = [line.split(" | ") for line in REPORTS.splitlines() if line.startswith("| [")]
    names = [re.findall(r"`(\w+)`", row[2])[0] for row in rows]
    faults = {script.stem for script in FAULTY}
    assert len(rows) >= 10
    assert all(row[0].count("](https://github.com/") >= 1 for row in rows)
    assert [name for name in names if name not in faults and not (CORRECT / f"{name}.py").exists()] == []
    assert len(set(names)) == len(names)


def test_every_rule_finds_a_training_of_the_corpus_that_is_wrong() -> None:
    kinds = {kind.removesuffix(", note") for kind in FOUND.values()}
    kinds |= {"skip"}  # of Slips, too
    assert {rule.kind for rule in RULES} - kinds == set()
    assert {script.stem for script in FAULTY} >= FOUND.keys()
