"""Writes the commands that install labkit into README, docs and labs, as the settings in labkit/install.py have them.

    python docs/install_texts.py            rewrites the texts that differ, and names them
    python docs/install_texts.py --check    only names them, and exits with 1 if there are any

What may stand in a text, and for which requirement, is Source's; this file knows how commands are written there.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from labkit.install import SOURCE, Source

ROOT = Path(__file__).parents[1]
TEXTS = ("*.md", ".pre-commit-hooks.yaml", "docs/**/*.md", "docs/examples/*.yaml", "notebooks/[0-9]*.*")
HISTORY = ("CHANGELOG.md", "docs/evidence/")  # say what was

# In prose a command that needs the clone's folder has the words before it, in a block they are its comment.
FOLDER = "in the clone's folder"
COMMAND = re.compile(
    rf"(?P<before>\s?{FOLDER},\s`)?(?P<pip>pip install )"
    rf"(?P<words>(?:[^`\n#&\\]|(?<=\S)#)*)(?P<comment># {FOLDER})?",
    re.IGNORECASE,
)
WORD = re.compile(r"""'[^']*'|"[^"]*"|\S+""")
LABKIT = re.compile(r"(?:\.|labkit)(?:\[(?P<extras>[\w,-]+)\])?(?: @ \S+)?")
LABS = re.compile(r"\./notebooks|labkit-labs(?: @ \S+)?")
WHEEL = re.compile(r"labkit-[\d.]+\w*-py3-none-any\.whl")
CLONE = re.compile(rf"Then(?:, {FOLDER})?:\n\n```bash\n(?:git clone .*\n)?")
INDEX = re.compile(r"(?<=Is labkit on PyPI\?\*\* )(?:No|Yes)\.")
REPOSITORY = "<the address or the folder of a clone of this repository>"


def texts(root: Path) -> Iterator[Path]:
    """Where commands are written down."""
    for path in sorted({path for pattern in TEXTS for path in root.glob(pattern)}):
        if not path.relative_to(root).as_posix().startswith(HISTORY):
            yield path


def rewritten(text: str, source: Source) -> str:
    """The text with labkit's commands as `source` has them."""
    text = COMMAND.sub(lambda found: _command(found, source), text)
    clone = f"git clone {source.address} labkit && cd labkit\n" if source.address else ""
    text = CLONE.sub(f"Then{'' if clone else f', {FOLDER}'}:\n\n```bash\n{clone}", text)
    text = INDEX.sub("Yes." if source.released else "No.", text)
    return text.replace(REPOSITORY, source.address) if source.address else text


def _command(found: re.Match[str], source: Source) -> str:
    words = WORD.sub(lambda word: _word(word[0], source), found["words"])
    before, comment = found["before"] or "", found["comment"] or ""
    if words != found["words"] and not source.is_folder:
        if before:
            before = ("\n" if "\n" in before else before[0].strip("Ii")) + "`"
        if comment:
            words, comment = words.rstrip(), ""
    return before + found["pip"] + words + comment


def _word(word: str, source: Source) -> str:
    """A requirement, quoted as in a shell."""
    text = word.strip("'\"")
    if labkit := LABKIT.fullmatch(text):
        return shlex.quote(source.labkit(labkit["extras"] or ""))
    if LABS.fullmatch(text):
        return shlex.quote(source.labs())
    return shlex.quote(source.wheel()) if WHEEL.fullmatch(text) else word


def main() -> int:
    checks = sys.argv[1:] == ["--check"]
    differing = {path: new for path in texts(ROOT) if (new := rewritten(old := path.read_text("utf-8"), SOURCE)) != old}
    for path, new in differing.items():
        print(path.relative_to(ROOT))
        if not checks:
            path.write_text(new, encoding="utf-8")
    return 1 if checks and differing else 0


if __name__ == "__main__":
    sys.exit(main())
