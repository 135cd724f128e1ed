"""Displays scripts, diffs of scripts, and the parts that scripts are composed of."""

from __future__ import annotations

import difflib
import html
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from labkit.write.cells import ScriptText
from labkit.write.compose import Library, Part, is_composed, strategy_titles
from labkit.write.script_options import options_in

CODE = "font-family:monospace;font-size:12px;line-height:1.45;white-space:pre;overflow-x:auto;margin:2px 0 10px"
# By pygments token type: JupyterLab's own colors, which follow its theme, with fallbacks that are legible on white and
# on black.
COLOURS = {
    "Keyword": ("keyword", "#2f8f5b"),
    "Name.Builtin": ("builtin", "#2f8f5b"),
    "Name.Function": ("def", "#3b82d6"),
    "Name.Class": ("def", "#3b82d6"),
    "Name.Decorator": ("meta", "#a561d6"),
    "Literal.String": ("string", "#c0543c"),
    "Literal.Number": ("number", "#2f8f5b"),
    "Comment": ("comment", "#808080"),
}
HUES = dict(COLOURS.values())
VARIABLES = ";".join(f"--lk-{name}:var(--jp-mirror-editor-{name}-color,{hue})" for name, hue in HUES.items())


def script_html(script: ScriptText) -> str:
    """The script as foldable cells, open for the strategy's and the user's own. No JavaScript, no style sheet."""
    own = [] if is_composed(script) else list(script.cells)
    opened = {*own, *strategy_titles(script), *(cell.title for cell in script.parts if cell.origin)}
    head = script.head.strip()
    first = head.split("\n")[0].strip("\"'")
    title = f"<b>{html.escape(script.name)}</b> · {_lines(str(script))}{f' · {html.escape(first)}' if first else ''}"
    parts = [_folded("above the first cell", head, "", not script.parts)] if "\n" in head or not script.parts else []
    parts += [_folded(f"# %% {cell.title}", cell.text, cell.origin, cell.title in opened) for cell in script.parts]
    return f'<div style="{VARIABLES}"><div>{title}</div>{"".join(parts)}</div>'


def _lines(text: str) -> str:
    count = len(text.strip().splitlines())
    return f"{count} line{'' if count == 1 else 's'}"


def _folded(name: str, text: str, origin: str, opened: bool) -> str:
    about = f"{_lines(text)}{f' · from {html.escape(origin)}' if origin else ''}"
    return (
        f'<details{" open" if opened else ""}><summary style="cursor:pointer"><code>{html.escape(name)}</code> '
        f'<span style="opacity:.65">{about}</span></summary>'
        f'<pre style="{CODE}">{_highlighted(text.strip(chr(10)))}</pre></details>'
    )


def _highlighted(code: str) -> str:
    from pygments.lexers import PythonLexer
    from pygments.token import string_to_tokentype

    colours = {string_to_tokentype(kind): name for kind, (name, _) in COLOURS.items()}
    pieces = []
    for kind, text in PythonLexer(stripnl=False).get_tokens(code):
        colour = next((colours[each] for each in reversed(kind.split()) if each in colours), "")
        shown = html.escape(text, quote=False)
        pieces.append(f'<span style="color:var(--lk-{colour})">{shown}</span>' if colour and text.strip() else shown)
    return "".join(pieces).rstrip("\n")


@dataclass(frozen=True)
class Diff:
    """A unified diff of two texts: plain in a terminal, colored (and marked with + and -) in a notebook."""

    before: str
    after: str
    before_name: str
    after_name: str

    def lines(self) -> list[str]:
        before, after = self.before.splitlines(), self.after.splitlines()
        return list(difflib.unified_diff(before, after, self.before_name, self.after_name, lineterm="", n=2))

    @property
    def changed(self) -> int:
        """The number of lines that are added or removed."""
        return sum(line[0] in "+-" for line in self.lines()[2:])

    def __str__(self) -> str:
        if lines := self.lines():
            return "\n".join(lines)
        same = "are the same" if self.before == self.after else "differ only in how their last line ends"
        return f"{self.before_name} and {self.after_name} {same}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        tints = {"+": "rgba(46,160,67,.18)", "-": "rgba(248,81,73,.18)", "@": "rgba(56,139,253,.15)"}
        body = "".join(
            f'<div style="background:{tints.get(line[:1], "none")}">{html.escape(line) or "&nbsp;"}</div>'
            for line in str(self).splitlines()
        )
        style = "font-family:monospace;font-size:12px;line-height:1.45;white-space:pre;overflow-x:auto"
        return {"text/plain": str(self), "text/html": f'<div style="{style}">{body}</div>'}


@dataclass(frozen=True)
class Names:
    """The names that `Script.load` takes, a strategy, any extras and a task, with one sentence each."""

    parts: Library

    @property
    def strategies(self) -> dict[str, str]:
        return {name: part.description for name, part in self.parts.strategies.items()}

    @property
    def extras(self) -> dict[str, str]:
        return {name: part.description for name, part in self.parts.extras.items()}

    @property
    def tasks(self) -> dict[str, str]:
        return {name: part.description for name, part in self.parts.tasks.items()}

    def __str__(self) -> str:
        width = max(len(name) for names in self._groups.values() for name in names)
        lines = ['Script.load(strategy, *extras, task="bytes"), or labkit write STRATEGY [EXTRA …] [--task TASK]']
        for group, parts in self._groups.items():
            lines += ["", group]
            for name, part in parts.items():
                lines.append(f"  {name:{width}}  {part.description}")
                lines += [f"  {'':{width}}  {line}" for line in _notes(part)]
        return "\n".join(lines)

    __repr__ = __str__

    @cached_property
    def _groups(self) -> dict[str, Mapping[str, Part]]:
        return {"strategies": self.parts.strategies, "extras": self.parts.extras, "tasks": self.parts.tasks}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        left = 'style="text-align:left;vertical-align:top"'
        rows = "".join(
            f"<tr><th {left} colspan=2>{group}</th></tr>"
            + "".join(
                f"<tr><td {left}><code>{html.escape(name)}</code></td><td {left}>{html.escape(part.description)}"
                + "".join(f'<div style="opacity:.65">{html.escape(line)}</div>' for line in _notes(part))
                + "</td></tr>"
                for name, part in parts.items()
            )
            for group, parts in self._groups.items()
        )
        return {"text/plain": str(self), "text/html": f"<table>{rows}</table>"}


def _notes(part: Part) -> list[str]:
    """Notes on an extra: its options, and the strategies that it is restricted to."""
    if part.kind != "extra":
        return []
    options = " ".join(option.name for cell in part.cells for option in options_in(cell.text).values())
    return [*([options] if options else []), *([f"with {', '.join(part.goes_with)}"] if part.goes_with else [])]
