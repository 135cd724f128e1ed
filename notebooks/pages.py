"""Executed notebooks as pages whose figures move, and an index of them: a gallery that opens without a network.

    python notebooks/pages.py build/notebooks build/gallery/labs

Needs what run.py leaves: executed notebooks and, in `runs/claims`, what their labs claimed.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import plotly.io
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

PLOTLY = "application/vnd.plotly.v1+json"
SCRIPTED = {PLOTLY, "application/vnd.jupyter.widget-view+json", "application/javascript"}
PICTURE = re.compile(r'<img src="(data:image/[^"]{2000,})"')  # less is a bar in a table
FILM = '<div class="labkit-film">'  # of labkit_labs.draw.player: what its script replaces
HEAD = """<script src="plotly.min.js"></script><style>
.jp-InputArea-editor pre, .jp-RenderedText pre { white-space: pre !important; word-break: normal !important }
.jp-InputArea-editor .cm-editor, .jp-RenderedText, .jp-RenderedMarkdown pre { overflow-x: auto !important }
.labkit-figure { overflow-x: auto } .labkit-figure > div { min-width: 480px }
.jp-RenderedMarkdown table { display: block; max-width: 100%; overflow-x: auto }
.jp-RenderedMarkdown :is(td, th) { min-width: 6em }
@media print { pre { white-space: pre-wrap !important } }
</style>"""
STYLE = """<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 40px auto; padding: 0 20px }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 20px }
a { color: inherit; text-decoration: none; border: 1px solid #8886; border-radius: 8px; padding: 4px 18px 14px }
a:hover { border-color: #888 }
h2 { font-size: 17px; margin: 12px 0 6px } p { margin: 0 } small { opacity: .7 }
img { width: 100%; height: 130px; object-fit: contain; background: #fff; margin-top: 12px }
</style>"""


def write_page(executed: Path, folder: Path) -> Path:
    """An executed notebook as HTML in `folder`, beside the one plotly.min.js that all pages share."""
    book = nbformat.read(executed, 4)
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if PLOTLY in output.get("data", {}):
                picture = f"<noscript>{output.data.get('text/html', '')}</noscript>"
                output.data["text/html"] = _drawn(output.data.pop(PLOTLY)) + picture
    # plotly does not become a global where require.js is loaded first
    exporter = HTMLExporter(require_js_url="", mathjax_url="")
    page, _ = exporter.from_notebook_node(book, {"metadata": {"name": executed.stem}})
    script = folder / "plotly.min.js"
    if not script.exists():
        script.write_text(get_plotlyjs(), encoding="utf-8")
    written = folder / f"{executed.stem}.html"
    written.write_text(page.replace("<head>", f"<head>{HEAD}", 1), encoding="utf-8")
    return written


def unseen(executed: Path) -> list[int]:
    """The numbers of the cells with an output that only scripts draw: GitHub, and a page without them, show nothing."""
    cells = nbformat.read(executed, 4).cells
    shown = [(n, output.get("data", {})) for n, cell in enumerate(cells) for output in cell.get("outputs", [])]
    return [number for number, data in shown if _needs_scripts(data) and not _is_picture(data)]


def _needs_scripts(data: dict[str, Any]) -> bool:
    return not SCRIPTED.isdisjoint(data) or "<script" in data.get("text/html", "")


def _is_picture(data: dict[str, Any]) -> bool:
    page = data.get("text/html", "<script")
    return any(kind.startswith("image/") for kind in data) or "<script" not in page or FILM in page


def _drawn(figure: dict[str, Any]) -> str:
    figure = {name: figure[name] for name in ("data", "layout", "frames") if name in figure}
    drawn = plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, auto_play=False, validate=False)
    return f'<div class="labkit-figure">{drawn}</div>'


def write_index(executed: list[Path], folder: Path) -> Path:
    """index.html: every lab by its title, what it is about, and how many of its claims were measured to hold."""
    cards = "".join(_card(notebook) for notebook in executed)
    head = f"<!doctype html><meta charset=utf-8><title>labkit's labs</title>{STYLE}"
    told = "Executed notebooks: what they call measured was measured when they ran, what they call planned was not run."
    told += " Figures can be zoomed and played."
    index = folder / "index.html"
    index.write_text(f"{head}<h1>labkit's labs</h1><p>{told}</p><br><main>{cards}</main>", encoding="utf-8")
    return index


def _card(executed: Path) -> str:
    cells = nbformat.read(executed, 4).cells
    told = (cell.source for cell in cells if cell.cell_type == "markdown")
    title, _, text = next(told, executed.stem).partition("\n")
    about = html.escape(re.sub(r"[*`]|\(http[^)]*\)", "", text.strip().split("\n\n")[0]))
    picture = _picture([output.get("data", {}) for cell in cells for output in cell.get("outputs", [])])
    return (
        f'<a href="{executed.stem}.html">{picture}<h2>{html.escape(title.lstrip("# "))}</h2><p>{about}</p>'
        f"<small>{_held(executed)}</small></a>"
    )


def _picture(shown: list[dict[str, str]]) -> str:
    """The last timeline, plan or figure; where there is none, the fullest charts of a run."""
    figures, charts = [], []
    for data in shown:
        page, png = data.get("text/html", ""), data.get("image/png")
        drawn = PICTURE.findall(page)
        if page and png:  # only a run's view comes both ways
            charts += drawn
        else:
            figures += [f"data:image/png;base64,{png}"] if png else drawn
    chosen = figures[-1] if figures else max(charts, key=len, default="")
    return f'<img alt="" src="{chosen}">' if chosen else ""


def _held(executed: Path) -> str:
    claims = executed.parent / "runs" / "claims" / f"{executed.stem}.json"
    if not claims.exists():
        return ""
    held = [claim["holds"] for claim in json.loads(claims.read_text(encoding="utf-8"))["claims"]]
    return f"{sum(map(bool, held))} of {len(held)} claims hold"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executed", type=Path, help="folder of executed notebooks")
    parser.add_argument("into", type=Path, help="folder for the pages")
    arguments = parser.parse_args()
    notebooks = sorted(arguments.executed.glob("[0-9]*.ipynb"))
    if not notebooks:
        print(f"no executed notebooks in {arguments.executed}: run make notebooks first", file=sys.stderr)
        return 1
    arguments.into.mkdir(parents=True, exist_ok=True)
    for notebook in notebooks:
        write_page(notebook, arguments.into)
    print(write_index(notebooks, arguments.into))
    return 0


if __name__ == "__main__":
    sys.exit(main())
