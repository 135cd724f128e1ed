"""A lecture's slides from the executed core labs: titles, questions, figures, recaps, and exercises without answers.

    python notebooks/slides.py build/notebooks build/slides.html

One HTML file that loads nothing: arrow keys, space, Home and End turn its pages, PageUp and PageDown even while a
figure that plays has the other keys. The browser prints one slide a page.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.filters import markdown2html

CORE = 6
QUESTION = "What does each rank hold, what does it send, and when does it wait?"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light }}
body {{ margin: 0; font: 24px/1.4 system-ui, sans-serif; color: #1f2328; background: #fff }}
section {{ display: none; box-sizing: border-box; min-height: 100vh; padding: 5vh 6vw; flex-direction: column }}
section.shown {{ display: flex }}
section.opening {{ justify-content: center }}
h1 {{ font-size: 52px; line-height: 1.15; margin: 0 0 24px }} h2 {{ font-size: 36px; margin: 0 0 18px }}
footer {{ margin-top: auto; padding-top: 18px; font-size: 15px; color: #656d76 }}
figure {{ margin: 12px auto; width: min(100%, 1150px) }} figure:has(.labkit-film) {{ width: min(100%, 100vh) }}
figure img {{ width: 100% !important; max-width: none !important;
height: auto !important; max-height: 62vh; object-fit: contain }}
li {{ margin: 0.35em 0 }} table {{ border-collapse: collapse; font-size: 20px }}
td, th {{ padding: 6px 12px; text-align: left;
border-bottom: 1px solid #d0d7de }}
code {{ font-size: 0.9em }} pre {{ font-size: 17px; white-space: pre-wrap }}
@media print {{
  @page {{ size: 297mm 167mm; margin: 0 }}
  section {{ display: flex; min-height: 0; height: 166mm; padding: 10mm 14mm; break-after: page; overflow: hidden }}
  body {{ font-size: 17px }} figure img {{ max-height: 100mm }}
}}
</style>
{sections}
<script>
const slides = [...document.querySelectorAll("section")];
let at = 0;
function show(number) {{
  slides[at].classList.remove("shown");
  at = Math.max(0, Math.min(slides.length - 1, number));
  slides[at].classList.add("shown");
  history.replaceState(null, "", "#" + (at + 1));
  scrollTo(0, 0);
}}
addEventListener("keydown", event => {{
  if (event.target.closest(".labkit-film") && !event.key.startsWith("Page")) return;  // the figure's own keys
  const steps = {{ArrowRight: at + 1, PageDown: at + 1, " ": at + 1, ArrowLeft: at - 1, PageUp: at - 1, Home: 0,
    End: slides.length}};
  if (event.key in steps) {{ event.preventDefault(); show(steps[event.key]); }}
}});
show((parseInt(location.hash.slice(1)) || 1) - 1);
</script>
</html>
"""


def deck(labs: list[Path]) -> str:
    """The slides of the executed labs as one page."""
    title = "Distributed training"
    slides = [_slide(f"<h1>{title}</h1><p>{QUESTION}</p>", "", "opening")]
    for path in labs:
        book = nbformat.read(path, 4)
        slides += slides_of(book)
    slides.append(_slide(f"<h1>{QUESTION}</h1><p>For your own model: <code>labkit.plan</code>.</p>", "", "opening"))
    numbered = [f"{n} of {len(slides)}".join(slide.rsplit("NUMBER", 1)) for n, slide in enumerate(slides, 1)]
    return PAGE.format(title=title, sections="\n".join(numbered))


def slides_of(book: Any) -> Iterator[str]:
    """A lab's opening, its questions, its figures, its recap and its exercises."""
    texts = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    first = next(text for text in texts if text.startswith("# "))
    title, _, rest = first.partition("\n")
    lab = title.lstrip("# ")
    goal = re.split(r"\s*\*\*\d+ minutes", rest.strip())[0].replace("**", "")
    yield _slide(f"<h1>{html.escape(lab)}</h1>{markdown2html(goal)}", lab, "opening")
    if asked := list(questions(book)):
        items = "".join(f"<li>{html.escape(each)}</li>" for each in asked)
        yield _slide(f"<h2>Your predictions</h2><ol>{items}</ol>", lab)
    for heading, sentence, picture in figures(book):
        told = markdown2html(sentence)
        yield _slide(f"<h2>{html.escape(heading or lab)}</h2><figure>{picture}</figure>{told}", lab)
    for heading in ("Recap", "Try this"):
        if text := _section(texts, heading):
            yield _slide(f"<h2>{heading}</h2>{markdown2html(text)}", lab)


def questions(book: Any) -> Iterator[str]:
    """What the lab asks, with its unit or its options: `all-reduces in one backward of this CNN`."""
    for cell in book.cells:
        if cell.cell_type != "code" or "lab.ask(" not in cell.source:
            continue
        shown = [o.data["text/plain"] for o in cell.outputs if "text/plain" in o.get("data", {})]
        calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        asks = [call for call in calls if ast.unparse(call.func) == "lab.ask"]
        for number, call in enumerate(sorted(asks, key=lambda call: call.lineno)):
            if isinstance(call.args[0], ast.Constant):
                yield f"{call.args[0].value}?"
            elif number < len(shown):  # its name is computed: as it was shown, without the default
                yield shown[number].partition("\n")[0].rpartition(":")[0] + "?"


def figures(book: Any) -> Iterator[tuple[str, str, str]]:
    """Each picture that a cell drew: the heading and the sentence above it, and its HTML. Tables and the views of runs
    are left to the lab."""
    heading = sentence = ""
    for cell in book.cells:
        if cell.cell_type == "markdown":
            heading, sentence = _above(cell.source, heading, sentence)
            continue
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            page = data.get("text/html", "")
            drawn = "labkit-film" in page or "labkit-picture" in page or page.lstrip().startswith("<img")
            if drawn and "image/png" not in data:
                yield heading, sentence, re.sub(r"<details>.*?</details>", "", page, flags=re.S)  # other positions
                sentence = ""  # said once


def _above(text: str, heading: str, sentence: str) -> tuple[str, str]:
    """The last heading in a cell of text, and the first sentence of its last paragraph."""
    for part in re.split(r"\n\s*\n", _without_answers(text)):
        line = part.strip()
        if found := re.match(r"#+ (.*)", line):
            heading, sentence = re.sub(r"^\d+ · ", "", found[1]), ""
            line = line.partition("\n")[2].strip()
        if line and not re.match(r"([-*|>]|\d+\.|```) ?", line):
            sentence = re.split(r"(?<=[.:!?])\s+(?=[A-Z*`(])", " ".join(line.split()))[0]
    return heading, sentence


def _section(texts: list[str], heading: str) -> str:
    """The list or table below this heading, without answers; empty if the lab has none."""
    found = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", "\n\n".join(texts), re.M | re.S)
    return _without_answers(found[1]).partition("\n\n**")[0].strip() if found else ""


def _without_answers(text: str) -> str:
    return re.sub(r"\s*<details>.*?</details>", "", text, flags=re.S)


def _slide(body: str, lab: str, kind: str = "") -> str:
    footer = " · ".join(part for part in (html.escape(lab), "NUMBER") if part)
    return f'<section class="{kind}">{body}<footer>{footer}</footer></section>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executed", type=Path, help="folder of executed notebooks")
    parser.add_argument("into", type=Path, help="the HTML file to write")
    arguments = parser.parse_args()
    labs = sorted(path for path in arguments.executed.glob("0[0-9]_*.ipynb") if int(path.name[:2]) <= CORE)
    if len(labs) < CORE:
        print(f"{arguments.executed} has {len(labs)} of the {CORE} core labs: make notebooks", file=sys.stderr)
        return 1
    arguments.into.parent.mkdir(parents=True, exist_ok=True)
    arguments.into.write_text(deck(labs), encoding="utf-8")
    print(arguments.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
