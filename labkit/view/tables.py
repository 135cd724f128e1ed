"""Draws tables of text, as HTML and as lines."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from labkit.text import escaped

WIDEST, GAP = 105, 2  # characters of a line in JupyterLab at 1,200 pixels, and between its cells
LONG = 30  # characters of a sentence that would be a word a line on a narrow page, which scrolls it instead
# Classes take a fourth of the bytes of styles in every cell. Notebooks have rules of their own for tables.
STYLE = (
    "<style>table.labkit-grid{border-collapse:collapse;margin:6px 0;font-size:12px;font-variant-numeric:tabular-nums}"
    ".labkit-grid tr{background:none!important}"
    ".labkit-grid :is(td,th){border:0;padding:1px 10px 1px 0;white-space:nowrap;text-align:right!important}"
    ".labkit-grid :is(.text,:first-child){text-align:left!important}"
    ".labkit-grid td.long{white-space:normal;min-width:16em}"
    ".labkit-grid :is(td,th).narrow{white-space:normal;overflow-wrap:anywhere;min-width:6em}"
    ".labkit-grid th{font-weight:500;opacity:1;white-space:normal;vertical-align:bottom}</style>"
)


def grid(
    rows: Sequence[Mapping[str, str]],
    marks: Sequence[str] = (),
    *,
    sentences: Collection[str] = (),
    transposes: bool = False,
    pictures: tuple[str, Sequence[str]] | None = None,
) -> str:
    """A table of text with an SVG mark before each row, and a last column of `pictures`, a title and one for each row.
    Only names of columns wrap, and the columns that `sentences` names. A table that is too wide is transposed if
    `transposes` allows it and that is narrower; then all cells may wrap."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))  # a rank that has not started has fewer
    texts = [names, *([row.get(name, "") for name in names] for row in rows)]
    cells = [[escaped(text) for text in line] for line in texts]
    for line, mark in zip(cells[1:], marks or [""] * len(rows), strict=True):
        line[0] = mark + line[0]
    is_transposed = transposes and _width(texts) > max(WIDEST, _width(_transposed(texts)))
    if is_transposed:
        texts, cells = _transposed(texts), _transposed(cells)
    if pictures:
        title, drawn = pictures
        for text, line, picture in zip(texts, cells, [title, *drawn], strict=True):
            text.append(title)
            line.append(picture)
    longest = [max(map(len, column)) for column in zip(*texts, strict=True)]
    kinds = [
        "" if name not in sentences else ' class="text long"' if most > LONG else ' class="text"'
        for name, most in zip(texts[0], longest, strict=True)
    ]
    if is_transposed:
        kinds[1:] = [' class="narrow"'] * (len(kinds) - 1)
    head, *body = (
        "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, line, strict=True))
        for tag, line in zip(["th", *["td"] * len(cells)], cells, strict=False)
    )
    return (
        f'<div style="overflow-x:auto">{STYLE}<table class="labkit-grid"><tr style="opacity:.7">'
        f"{head.replace('_', '_<wbr>')}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table></div>"
    )


def _width(table: list[list[str]]) -> int:
    """The width in characters; the first line wraps."""
    columns = zip(*table, strict=True)
    return sum(max(map(len, [*re.split(r"[\s_-]", name), *cells])) + GAP for name, *cells in columns)


def _transposed(table: list[list[str]]) -> list[list[str]]:
    return [[*column] for column in zip(*table, strict=True)]


def aligned(rows: Sequence[Mapping[str, str]]) -> str:
    """A text table: the first column and a final verdict are left-aligned, figures right-aligned."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [dict(zip(names, names, strict=True)), *rows]
    widths = {name: max(len(str(line.get(name, ""))) for line in lines) for name in names}

    def cell(name: str, text: str) -> str:
        to_left = name == names[0] or (name == names[-1] and len(names) > 2 and name == "verdict")
        return f"{text:<{widths[name]}}" if to_left else f"{text:>{widths[name]}}"

    return "\n".join("  " + "  ".join(cell(name, str(line.get(name, ""))) for name in names).rstrip() for line in lines)
