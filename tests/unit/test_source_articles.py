"""Every subject of the source articles is taught in a lab that exists, in a section that it has, or has a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "source_articles.md"
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] != "| #"]
SUBJECTS = [row for row in ROWS if len(row) == 4]


def headings(lab: Path) -> set[str]:
    return set(re.findall(r"^# #+ (.*)$", lab.with_suffix(".py").read_text(encoding="utf-8"), re.M))


def test_all_91_are_there():
    assert [int(number) for number, *_ in SUBJECTS] == list(range(1, 92))


@pytest.mark.parametrize("number, subject, articles, where", SUBJECTS, ids=[row[1] for row in SUBJECTS])
def test_a_subject_has_a_place_or_a_reason(number, subject, articles, where):
    links = re.findall(r"\[([^\]]+)\]\(([^)#]+)", where)

    assert set(articles.split()) <= set("ABCDE") or articles == "beyond"
    assert links or where.startswith("Not taught: ")
    for text, link in links:
        target = (PAGE.parent / link).resolve()
        assert target.exists(), link
        if target.suffix == ".ipynb":
            named, _, section = text.partition(" ")
            assert target.name.startswith(f"{named}_")
            assert not section or section in headings(target), f"{target.name} has no section {section!r}"
