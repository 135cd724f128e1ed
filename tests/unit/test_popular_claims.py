"""The page of popular claims: every entry names a claim, a rule or a test that exists, and the page has every entry."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import popular_claims as popular  # noqa: E402

PAGE = (ROOT / "docs" / "evidence" / "popular_claims.md").read_text(encoding="utf-8")
RULES = (ROOT / "docs" / "reference" / "check.md").read_text(encoding="utf-8")
IDS = [entry.sentence[:50] for entry in popular.CLAIMS]


def claims_of(lab: str) -> list[re.Pattern[str]]:
    """The strings in a lab's cells, with anything for what an f-string inserts, and "scene: fact" for the facts that
    its calls pass by name to a helper, beside the scene."""
    tree = ast.parse((ROOT / "notebooks" / f"{lab}.py").read_text(encoding="utf-8"))
    patterns = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            patterns.append(re.escape(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = [re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in node.values]
            patterns.append("".join(map(str, parts)))
        elif isinstance(node, ast.Call):
            scenes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            patterns += [re.escape(f"{scene}: {fact.arg}") for scene in scenes for fact in node.keywords]
    return [re.compile(pattern) for pattern in patterns if len(pattern) > 10]


@pytest.mark.parametrize("entry", popular.CLAIMS, ids=IDS)
def test_what_decides_a_claim_exists(entry):
    match entry.by:
        case popular.Lab(lab, claim):
            assert any(pattern.fullmatch(claim) for pattern in claims_of(lab)), f"lab {lab} claims no {claim!r}"
            assert (entry.by.said is None and entry.by.times is None) == bool(entry.verdict)
        case popular.Rule(name):
            assert f"`{name}`" in RULES
        case popular.Source(text):
            for file in re.findall(r"pytest (\S+?)`", text):
                assert (ROOT / file).exists()
    if not isinstance(entry.by, popular.Lab):
        assert entry.verdict


@pytest.mark.parametrize("entry", popular.CLAIMS, ids=IDS)
def test_the_page_names_the_claim_that_decides(entry):
    if isinstance(entry.by, popular.Lab):
        (row,) = [line for line in PAGE.splitlines() if line.startswith(entry.row("FOUND", "").split("FOUND")[0])]
        assert f"Found: {entry.by.claim}: " in row


@pytest.mark.parametrize("entry", popular.CLAIMS, ids=IDS)
def test_the_page_has_every_claim_as_it_is_in_the_list(entry):
    before, after = entry.row("FOUND", "VERDICT").split("FOUND. ")
    decided_by = after.removesuffix(" | **VERDICT** |")

    (row,) = [line for line in PAGE.splitlines() if line.startswith(before)]
    assert f"{decided_by} | **" in row, "make notebooks, then write the page: see benchmarks/popular_claims.py"
    if entry.verdict:
        assert row.endswith(f" | **{entry.verdict}** |")


def test_the_page_has_nothing_else_and_counts_its_verdicts():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| it says |")]
    verdicts = [row.removesuffix("** |").rpartition("| **")[2] for row in rows]
    counts = ", ".join(
        f"{verdicts.count(v)} {v}" for v in (popular.RIGHT, popular.IN_PART, popular.WRONG, popular.UNKNOWN)
    )

    assert len(rows) == len(popular.CLAIMS)
    assert f"{len(rows)} sentences: {counts}." in PAGE


def test_runs_with_another_verdict_than_the_page_fail(tmp_path, monkeypatch, capsys):
    claim = {"name": "all-reduces in one backward of this CNN", "predicted": 2, "measured": 2}
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "03_ddp.json").write_text(json.dumps({"format": 1, "lab": "", "claims": [claim]}))
    page, arguments = tmp_path / "page.md", ["popular_claims.py", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert popular.main() == 0
    page.write_text(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", [*arguments, "--check", str(page)])
    assert popular.main() == 0

    link = "it says 1. → [lab 03](../../notebooks/03_ddp.ipynb)"
    page.write_text(page.read_text().replace(f"{link} | **wrong** |", f"{link} | **right** |"))
    assert popular.main() == 1
    assert "wrong, not right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lab", "changed", "code"),
    [
        ("03_ddp", {}, 0),
        ("03_ddp", {"name": "as it was called before"}, 1),
        ("03_ddp", {"measured": 3}, 1),
        ("05_fsdp", {}, 0),
    ],
    ids=["same", "vanished", "false", "another lab"],
)
def test_only_labs_that_were_not_run_are_skipped(tmp_path, monkeypatch, lab, changed, code):
    names = [entry.by.claim for entry in popular.CLAIMS if getattr(entry.by, "lab", "") == "03_ddp"]
    claims = [{"name": name, "predicted": 2, "measured": 2} for name in names]
    claims[0] |= changed
    (tmp_path / "claims").mkdir()
    page = tmp_path / "page.md"
    page.write_text(
        "\n".join(
            popular.page({("03_ddp", name): popular.Claim(name, 2, 2) for name in names}),
        )
    )
    (tmp_path / "claims" / f"{lab}.json").write_text(json.dumps({"format": 1, "lab": "", "claims": claims}))
    monkeypatch.setattr(sys, "argv", ["popular_claims.py", str(tmp_path), "--check", str(page)])

    assert popular.main() == code


@pytest.mark.parametrize(
    "measured, timed, said, times, verdict",
    [
        (2.0, False, 2.0, None, "right"),
        (2.0, False, 1.0, None, "wrong"),
        (2.0, False, None, 2.0, "wrong"),
        (3.0, False, 3.0, None, "cannot be told"),  # the lab's own formula is wrong
        (3.0, True, 2.0, None, "right"),  # a clock: compared with the formula
        (2.0, False, (1.0, 3.0), None, "right"),
        (2.0, False, (2.1, 3.0), None, "right"),  # within the tolerance
        (2.0, False, (1.0, 1.5), None, "wrong"),
        (2.0, False, (3.0, 4.0), None, "wrong"),
    ],
)
def test_a_sentences_number_is_compared_with_the_measurement(tmp_path, measured, timed, said, times, verdict):
    claim = {"name": "x", "predicted": 2.0, "within": 0.1, "measured": measured, "timed": timed, "holds": None}
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "lab.json").write_text(json.dumps({"format": 1, "lab": "lab", "claims": [claim]}))
    entry = popular.Entry(popular.BLOG, "", "", "", popular.Lab("lab", "x", said=said, times=times))

    assert popular.decided(entry, popular.stored(tmp_path))[1] == verdict


def test_planned_times_give_no_verdict_while_their_bands_overlap():
    from decision_judges import apart

    class Step:
        def __init__(self, low, high):
            self.low, self.seconds, self.high = low, (low + high) / 2, high

    assert apart(Step(95, 216), Step(83, 189)) is None
    assert (apart(Step(1, 2), Step(3, 4)), apart(Step(3, 4), Step(1, 2))) == (-1, 1)
