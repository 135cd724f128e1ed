"""The course's page lists every lab with its minutes and what it needs, and a lab needs earlier ones only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
LABS = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
CORE = 6


class Head(NamedTuple):
    """What a lab's first paragraph says."""

    minutes: str
    needs: list[str]  # numbers of labs


def head_of(lab: str) -> Head:
    text = re.sub(r"\n# ?", " ", (FOLDER / f"{lab}.py").read_text(encoding="utf-8"))
    (found,) = re.findall(r"\*\*(\d+) minutes\. You need\*\* (.*?)\.(?: |$)", text)
    minutes, needs = found
    return Head(minutes, numbers(needs))


def numbers(text: str) -> list[str]:
    """The labs that a text names: "01, 03 to 05" are four."""
    named = re.findall(r"\b(\d\d)(?: to (\d\d))?\b", text)
    return [f"{lab:02}" for first, last in named for lab in range(int(first), int(last or first) + 1)]


def rows() -> dict[str, list[str]]:
    """The page's rows by lab, as their cells."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return {found[1]: line for line in lines if (found := re.search(r"\]\((\d\d_\w+)\.ipynb\)", " | ".join(line)))}


def test_the_page_lists_every_lab_in_order():
    assert list(rows()) == LABS


@pytest.mark.parametrize("lab", LABS)
def test_the_page_has_a_labs_minutes_and_what_it_needs(lab):
    number, row, head = lab[:2], rows()[lab], head_of(lab)
    place = next(i for i, cell in enumerate(row) if f"({lab}.ipynb)" in cell)

    assert row[place].startswith(f"[{number} ")
    assert row[place + 1] == head.minutes
    assert numbers(row[place + 2]) == head.needs


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_needs_only_earlier_labs_that_exist(lab):
    needs = head_of(lab).needs

    assert set(needs) <= {other[:2] for other in LABS}
    assert [need for need in needs if need >= lab[:2]] == []


def test_the_cores_minutes_are_those_of_an_afternoon():
    minutes = sum(int(head_of(lab).minutes) for lab in LABS[:CORE])

    assert LABS[CORE - 1].startswith("06")
    assert minutes == 180, "notebooks/README.md says three hours"


def test_the_lectures_plan_has_no_gap_and_takes_two_hours():
    times = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+)–(\d+) \|", PAGE, re.M)]

    assert times[0][0] == 0 and times[-1][1] == 120
    assert all(end == start for (_, end), (start, _) in zip(times, times[1:], strict=False))


WORDS = [
    line.strip("| ").split(" | ")
    for line in (FOLDER.parent / "docs" / "reference" / "concepts.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and ".ipynb)" in line
]


def test_words_are_in_alphabetical_order_and_have_one_meaning():
    words = [word.lower() for word, _, _ in WORDS]

    assert len(words) > 40
    assert words == sorted(set(words))


@pytest.mark.parametrize("word, meaning, lab", WORDS, ids=[word for word, *_ in WORDS])
def test_a_word_links_to_a_lab_that_uses_it(word, meaning, lab):
    (name,) = re.findall(r"notebooks/(\d\d_\w+)\.ipynb", lab)
    text = re.sub(r"[-_\s*#]+", " ", (FOLDER / f"{name}.py").read_text(encoding="utf-8")).lower()

    assert all(part.replace("-", " ").lower() in text for part in word.split(", "))
