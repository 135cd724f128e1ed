"""Build the documentation as a site that opens offline: python docs/build_site.py [build/docs]

The repository's own pages, with the README as the first one, an API reference from the docstrings, and the labs: as
executed copies where `make notebooks` has left them in build/notebooks, otherwise as they are. A link or an anchor
that leads nowhere fails the build.
"""

from __future__ import annotations

import argparse
import base64
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import plotly.io
from plotly.offline import get_plotlyjs

import labkit

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "docs-source"
EXECUTED = ROOT / "build" / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
NOT_EXECUTED = (
    "*This page shows the notebook as it is, without results: `make notebooks docs` executes the labs first.*"
)
DOWNLOAD = "{{download}}`Download this notebook <../downloads/{name}>`"  # without results, to be executed
# The folders of docs/, shelves of every page's sidebar. GitHub shows the README, which has no sidebar.
HOW_TO = ["scripts", "models", "launch", "view", "ranks", "reach", "alerts", "sweep", "export", "plan", "beyond"]
HOW_TO += ["cluster", "kaggle", "pipelines", "check_in_ci", "troubleshooting", "faq"]
REFERENCE = [
    "concepts",
    "cheat_sheet",
    "architecture",
    "api",
    "json",
    "check",
    "witness",
    "same_program",
    "platforms",
    "security",
]
# A single entry of the sidebar, closed, because other pages state the results and link here.
EVIDENCE = [
    "parity",
    "foreign_models",
    "memory",
    "model_memory",
    "hub_models",
    "speed",
    "published_speed",
    "script_speed",
]
EVIDENCE += [
    "faults",
    "peers",
    "interactive_peers",
    "check_findings",
    "popular_claims",
    "decisions",
    "source_articles",
    "witness_reports",
    "log",
]
EVIDENCE += ["gpu/README", "gpu/1x-nvidia-h100-80gb-hbm3", "/benchmarks/README"]
DIAGRAM = "docs/static/diagram.svg"
PICTURE = r'<picture>.*?srcset="(?P<dark>.*?)".*?src="(?P<light>.*?)".*?alt="(?P<alt>.*?)".*?</picture>'


def copy_repository() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, SOURCE / name)


def write_pages() -> None:
    """The README becomes the first page, with the sidebar's contents."""
    readme = (SOURCE / "README.md").read_text(encoding="utf-8")
    diagram = (ROOT / DIAGRAM).read_text(encoding="utf-8")
    readme = re.sub(r"```mermaid\n.*?```", lambda _: f'<div class="diagram">{diagram}</div>', readme, flags=re.S)
    readme = re.sub(PICTURE, lambda picture: image(picture, "light") + image(picture, "dark"), readme, flags=re.S)
    labs = sorted(f"notebooks/{path.stem}" for path in (SOURCE / "notebooks").glob("[0-9]*.ipynb"))
    shelves = {
        "Learn": ["notebooks/README", *labs],
        "How to": [f"docs/how_to/{page}" for page in HOW_TO],
        "Reference": [f"docs/reference/{page}" for page in REFERENCE],
        "Project": ["CONTRIBUTING", "SECURITY", "CHANGELOG"],
        "Evidence": ["docs/evidence/README"],
    }
    readme += "".join(toctree(pages, caption) for caption, pages in shelves.items())
    (SOURCE / "index.md").write_text(readme, encoding="utf-8")
    evidence = SOURCE / "docs" / "evidence" / "README.md"
    evidence.write_text(evidence.read_text(encoding="utf-8") + toctree(EVIDENCE), encoding="utf-8")
    (SOURCE / "README.md").unlink()
    for page in SOURCE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", text), encoding="utf-8")


def image(picture: re.Match[str], theme: str) -> str:
    """One of a <picture>'s two images, for pages of that theme: the site's theme need not be the system's."""
    return f"```{{image}} {picture[theme]}\n:alt: {picture['alt']}\n:class: only-{theme}\n```\n"


def toctree(pages: list[str], caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{head}\n" + "\n".join(pages) + "\n```\n"


def write_labs() -> int:
    """How many of the labs are executed copies."""
    count = 0
    for path in sorted((SOURCE / "notebooks").glob("[0-9]*.ipynb")):
        executed = EXECUTED / path.name
        count += executed.exists()
        book: Any = nbformat.read(executed if executed.exists() else path, 4)
        figures = False
        for cell in book.cells:
            for output in cell.get("outputs", []):
                if PLOTLY in output.get("data", {}):
                    output.data["text/html"] = _drawn(output.data.pop(PLOTLY))
                    figures = True
        if not executed.exists():
            book.cells.insert(1, nbformat.v4.new_markdown_cell(NOT_EXECUTED))
        (SOURCE / "downloads").mkdir(exist_ok=True)
        for cell in book.cells:  # MyST-NB does not read attachments
            for name, picture in cell.pop("attachments", {}).items():
                (path.with_name(f"{path.stem}-{name}")).write_bytes(base64.b64decode(*picture.values()))
                cell.source = cell.source.replace(f"attachment:{name}", f"{path.stem}-{name}")
        shutil.copy2(ROOT / "notebooks" / path.name, SOURCE / "downloads")
        book.cells.insert(1, nbformat.v4.new_markdown_cell(DOWNLOAD.format(name=path.name)))
        if figures:
            script = nbformat.v4.new_markdown_cell('<script src="../_static/plotly.min.js"></script>')
            book.cells.insert(1, script)
        nbformat.write(book, path)
    (SOURCE / "docs" / "static" / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    return count


def _drawn(figure: dict[str, Any]) -> str:
    figure = {name: figure[name] for name in ("data", "layout", "frames") if name in figure}
    return str(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, auto_play=False, validate=False))


def missing_names() -> list[str]:
    """Public names of labkit that the API page leaves out."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    return [name for name in labkit.__all__ if not re.search(rf":: labkit\.{name}$", page, re.M)]


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        is_loaded = tag in ("script", "img", "source", "iframe") or values.get("rel") in ("stylesheet", "icon")
        self.loads += [values[name] for name in ("src", "href") if is_loaded and name in values]


def faults_of(site: Path) -> list[str]:
    """Links and anchors that lead nowhere, and whatever a page would load from the network."""
    pages: dict[Path, Page] = {}
    for path in site.rglob("*.html"):
        pages[path.resolve()] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    faults = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        faults += [f"{name} loads {address}" for address in page.loads if urlsplit(address).scheme in ("http", "https")]
        for address in {*page.links, *page.loads}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                faults.append(f"{name}: {address} leads nowhere")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                faults.append(f"{name}: {address} names no anchor")
    return sorted(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", nargs="?", type=Path, default=ROOT / "build" / "docs")
    into = parser.parse_args().into.absolute()
    copy_repository()
    executed = write_labs()
    write_pages()
    shutil.rmtree(into, ignore_errors=True)
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [*sphinx, "-E", "-d", str(SOURCE / ".doctrees"), "-c", str(SOURCE / "docs"), str(SOURCE), str(into)]
    )
    if done.returncode:
        return done.returncode
    faults = [f"docs/reference/api.md leaves out labkit.{name}" for name in missing_names()] + faults_of(into)
    print("\n".join(faults), file=sys.stderr)
    size = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    print(f"{into / 'index.html'}: {size / 1e6:.1f} MB, {executed} labs with their results")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
