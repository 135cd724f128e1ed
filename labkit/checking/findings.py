"""Holds and displays the findings of a check."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload
from urllib.parse import quote

from labkit.files import Json
from labkit.text import escaped, plain

# The effect of a mistake, the worst first: ranks wait forever; training or saving is wrong or fails; time or memory is
# wasted; a deprecated name is used.
KINDS = ("hangs", "wrong", "slow", "outdated")
COLOURS = {"hangs": "#d1242f", "wrong": "#bc4c00", "slow": "#9a6700", "outdated": "#57606a"}


@dataclass(frozen=True)
class Finding:
    """One mistake at a line (from 1). `cell` is the notebook's cell (from 1) to which `line` then refers; `code` is the
    text of the line, `number` the rule's, such as "LK001"."""

    rule: str
    kind: str
    line: int
    message: str
    why: str
    fix: str
    file: str = ""
    cell: int | None = None
    code: str = ""
    number: str = ""

    @property
    def place(self) -> str:
        """`train.py:41`, a link in editors and terminals, or `lab.ipynb:cell 3:7`."""
        return f"{self.file}:{self.line}" if self.cell is None else f"{self.file}:cell {self.cell}:{self.line}"

    @property
    def short(self) -> str:
        return plain(f"{self.place}: {self.kind}: {self.rule}: {self.message}").replace("\n", " ")

    def __str__(self) -> str:
        return plain(f"{self.short}\n    why: {self.why}\n    fix: {self.fix}")

    def record(self) -> dict[str, Json]:
        """The format of `labkit check --output-format json`."""
        return {"schema": "labkit.check/1", **asdict(self)}


class Findings(Sequence[Finding]):
    """The mistakes in one script, by line. Empty, and thus false, if there are none. `name` is the script's name,
    `path` its file, if any."""

    def __init__(self, findings: Sequence[Finding], name: str, path: Path | None = None, note: str = ""):
        self._findings = tuple(findings)
        self.name = name
        self.path = path
        self.note = note

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def records(self) -> list[dict[str, Json]]:
        """One dictionary of plain values per finding."""
        return [finding.record() for finding in self]

    @property
    def summary(self) -> str:
        if not self:
            return plain(f"{self.name}: no findings") + (f" ({self.note})" if self.note else "")
        counts = ((kind, sum(finding.kind == kind for finding in self)) for kind in KINDS)
        by_kind = ", ".join(f"{count} {kind}" for kind, count in counts if count)
        findings = "1 finding" if len(self) == 1 else f"{len(self)} findings"
        return plain(f"{self.name}: {findings} ({by_kind})") + (f"; {self.note}" if self.note else "")

    def __repr__(self) -> str:
        return "\n".join([*map(str, self), self.summary])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html()}

    def html(self) -> str:
        """A list with links to lines, for notebooks."""
        items = "".join(self._item(finding) for finding in self)
        listed = f'<ul style="margin:4px 0;padding-left:18px">{items}</ul>' if items else ""
        return f"<div><b>{escaped(self.summary)}</b>{listed}</div>"

    def _item(self, finding: Finding) -> str:
        kind = f'<b style="color:{COLOURS[finding.kind]}">{finding.kind}</b>'
        code = (
            f'<pre style="margin:2px 0;overflow-x:auto">{escaped(finding.code.strip())}</pre>' if finding.code else ""
        )
        return (
            f'<li style="margin:4px 0">{self._link(finding)} {kind} <code>{escaped(finding.rule)}</code>: '
            f"{escaped(finding.message)}{code}"
            f"<details><summary>why, and what to do</summary>{escaped(finding.why)}<br>{escaped(finding.fix)}</details>"
            "</li>"
        )

    def _link(self, finding: Finding) -> str:
        """JupyterLab opens a file at `#line=` (from 0) by its path relative to the notebook, not by an absolute path.
        The cells of a notebook have no such address."""
        place = escaped(finding.place)
        if self.path is None or finding.cell is not None:
            return f"<code>{place}</code>"
        path = Path(os.path.relpath(self.path)) if self.path.is_absolute() else self.path
        return f'<a href="{quote(path.as_posix())}#line={finding.line - 1}"><code>{place}</code></a>'
