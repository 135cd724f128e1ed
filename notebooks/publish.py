"""Executed labs as the branch `labs` has them: with their results, and with buttons that open them in Colab and Kaggle.

    python notebooks/publish.py build/notebooks build/labs --repository OWNER/NAME --commit SHA

Writes a copy of every executed notebook, and a README that lists them. A copy's first cell has the buttons, its second
one installs labkit and the labs' package of this commit where they are missing. The notebooks in the repository have
neither: they cannot know from which fork they will be opened.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import nbformat

from labkit.install import Source

BRANCH = "labs"
BADGES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
}
INSTALL = """\
# For Colab and Kaggle (there, turn the internet on in the settings): the labkit that executed this lab.
import importlib.util

if not importlib.util.find_spec("labkit_labs"):
    %pip install --quiet {requirements}\
"""


def addresses(name: str, repository: str) -> dict[str, str]:
    """Where each service opens the notebook `name` ("03_ddp.ipynb") of the branch, by the service's name."""
    file = f"{repository}/blob/{BRANCH}/{name}"
    return {
        "Colab": f"https://colab.research.google.com/github/{file}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{file}",
    }


def published(book: Any, name: str, repository: str, commit: str) -> Any:
    """The executed notebook with buttons and an installing cell, without what papermill noted about its machine."""
    first = next(
        i for i, cell in enumerate(book.cells) if cell.cell_type == "markdown" and cell.source.startswith("# ")
    )
    buttons = [
        f"[![Open in {service}]({BADGES[service]})]({address})"
        for service, address in addresses(name, repository).items()
    ]
    book.cells[first].source += "\n\n" + " ".join(buttons)
    source = Source(f"https://github.com/{repository}@{commit}")
    text = INSTALL.format(requirements=shlex.join([source.labkit(), source.labs()]))
    install = nbformat.v4.new_code_cell(text, id="install-labkit")
    book.cells.insert(first + 1, install)
    for cell in book.cells:
        cell.metadata.pop("papermill", None)
    book.metadata = {key: book.metadata[key] for key in ("kernelspec", "language_info") if key in book.metadata}
    return book


def listed(books: dict[str, Any], repository: str, commit: str) -> str:
    """The branch's README."""
    rows = ""
    for name, book in books.items():
        title = next(cell.source for cell in book.cells if cell.source.startswith("# ")).partition("\n")[0].lstrip("# ")
        stopped = any(output.output_type == "error" for cell in book.cells for output in cell.get("outputs", []))
        links = " · ".join(f"[{service}]({address})" for service, address in addresses(name, repository).items())
        rows += f"| [{title}]({name}){', which stopped with an error' if stopped else ''} | {links} |\n"
    at = f"https://github.com/{repository}/tree/{commit}"
    return (
        f"# labkit's labs, with their results\n\nExecuted at commit [{commit[:7]}]({at}), on a machine without a GPU: "
        f"`make notebooks`. This branch is overwritten each time; change the notebooks [there]({at}/notebooks).\n\n"
        f"| lab | opens in |\n|---|---|\n{rows}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executed", type=Path, help="folder of executed notebooks")
    parser.add_argument("into", type=Path, help="folder for what the branch will hold")
    parser.add_argument("--repository", required=True, metavar="OWNER/NAME", help="on GitHub")
    parser.add_argument("--commit", required=True, metavar="SHA", help="of the labkit that executed them")
    arguments = parser.parse_args()
    books = {path.name: nbformat.read(path, 4) for path in sorted(arguments.executed.glob("[0-9]*.ipynb"))}
    if not books:
        print(f"no executed notebooks in {arguments.executed}: run make notebooks first", file=sys.stderr)
        return 1
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name, book in books.items():
        nbformat.write(published(book, name, arguments.repository, arguments.commit), arguments.into / name)
    readme = listed(books, arguments.repository, arguments.commit)
    (arguments.into / "README.md").write_text(readme, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
