"""The lecture's slides have every core lab's title, questions, figures and exercises, no answers, and load nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))
import slides  # noqa: E402

CORE = sorted((ROOT / "notebooks").glob("0[1-6]_*.ipynb"))
PICTURE = '<img src="data:image/svg+xml;base64,AAAA" alt="two bars">'


def lab(folder: Path, number: int) -> Path:
    """A lab as papermill leaves it: a figure, a table, a run's view, and an exercise with its answer."""
    cells = [
        nbformat.v4.new_markdown_cell(
            f"# 0{number} · A lab & more\n\n**You will be able to** count. **10 minutes. You need** lab 01.\n\nRanks."
        ),
        nbformat.v4.new_code_cell('lab.ask("bytes of one <step>", default=3)'),
        nbformat.v4.new_markdown_cell("## Sent\n\n- a list\n\nBoth bars are a NUMBER. More is below."),
        nbformat.v4.new_code_cell(
            "draw.bars()",
            outputs=[
                nbformat.v4.new_output("display_data", {"text/html": PICTURE}),
                nbformat.v4.new_output("display_data", {"text/html": PICTURE, "image/png": "AAAA"}),
                nbformat.v4.new_output("display_data", {"text/html": "<table></table>"}),
            ],
        ),
        nbformat.v4.new_markdown_cell(
            "## Try this\n\n1. Leave it out.\n   <details><summary>Answer</summary>No.</details>\n\n## Sources\n\nOne."
        ),
    ]
    path = folder / f"0{number}_lab.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def shown(page: str) -> list[str]:
    """The text of each slide, without what draws its figure."""
    sections = re.findall(r"<section.*?>(.*?)</section>", page, re.S)
    return [" ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<img[^>]*>", "PICTURE", each)).split()) for each in sections]


def test_a_labs_slides(tmp_path):
    opening, *made, end = shown(slides.deck([lab(tmp_path, 2)]))

    assert slides.QUESTION in opening and slides.QUESTION in end
    assert made == [
        "02 · A lab &amp; more You will be able to count. 02 · A lab &amp; more · 2 of 6",
        "Your predictions bytes of one &lt;step&gt;? 02 · A lab &amp; more · 3 of 6",
        "Sent PICTURE Both bars are a NUMBER. 02 · A lab &amp; more · 4 of 6",
        "Try this Leave it out. 02 · A lab &amp; more · 5 of 6",
    ]


def test_the_command_writes_one_file_that_loads_nothing(tmp_path):
    for number in range(1, slides.CORE + 1):
        lab(tmp_path, number)
    lab(tmp_path, 7)
    command = [sys.executable, ROOT / "notebooks" / "slides.py", tmp_path, tmp_path / "made" / "slides.html"]
    done = subprocess.run(command, capture_output=True, text=True)
    page = (tmp_path / "made" / "slides.html").read_text(encoding="utf-8")

    assert done.returncode == 0, done.stderr
    assert len(shown(page)) == 2 + 4 * slides.CORE
    assert "07 ·" not in page
    assert not re.findall(r"(?:src|href)=[\"']?(?!data:)\w", page)


def test_without_the_core_it_names_the_command(tmp_path):
    lab(tmp_path, 1)
    command = [sys.executable, ROOT / "notebooks" / "slides.py", tmp_path, tmp_path / "slides.html"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 1
    assert "1 of the 6 core labs: make notebooks" in done.stderr


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_each_core_lab_has_its_questions_and_exercises_and_no_answer(path):
    made = shown("\n".join(slides.slides_of(nbformat.read(path, 4))))

    assert "You will be able to" in made[0] and "minutes" not in made[0]
    assert made[1].startswith("Your predictions")
    assert made[1].count("?") >= 2
    assert made[-1].startswith("Try this")
    assert not any("Answer" in text for text in made)
