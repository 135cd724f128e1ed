"""Draws a decision as questions below each other, each with a way out to the right."""

from __future__ import annotations

from collections.abc import Sequence

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["decision"]

ASKS, LEADS, ROW, TALL, LINE = 300.0, 380.0, 84.0, 60.0, 17.0  # widths and heights


def decision(questions: Sequence[tuple[str, str, str]], otherwise: str) -> Picture:
    """Draws questions in order, and what is left when none of them has led to the right. Each has the question, the
    answer that leads to the right ("yes" or "no"), and what is there; the texts may have two lines."""
    parts = [f'<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
             f'<path d="M0 0L6 3L0 6z" fill="{GREY}"/></marker></defs>']  # fmt: skip
    for row, (asks, answer, leads) in enumerate(questions):
        y, other = row * ROW + 2, "no" if answer == "yes" else "yes"
        parts += [_told(2, y, ASKS, asks, line=GREY), _told(LEADS, y, WIDTH - LEADS - 2, leads)]
        parts += [_arrow(f"M{ASKS + 2} {y + TALL / 2}H{LEADS - 3}"), _arrow(f"M150 {y + TALL}V{y + ROW - 3}")]
        parts += [words((ASKS + LEADS) / 2, y + TALL / 2 - 7, answer, anchor="middle", bold=True)]
        parts += [words(158, y + TALL + 16, other, bold=True)]
    parts.append(_told(2, len(questions) * ROW + 2, ASKS, otherwise))
    label = "; ".join(f"{asks.replace(chr(10), ' ')} {answer}: {leads}" for asks, answer, leads in questions)
    return sheet(parts, len(questions) * ROW + TALL + 6, f"{label}; otherwise: {otherwise}".replace("\n", " "))


def _told(x: float, y: float, wide: float, text: str, *, line: str = "") -> str:
    """A question has an outline of that colour; what to do is filled."""
    lines = text.split("\n")
    top = y + TALL / 2 + 5 - LINE * (len(lines) - 1) / 2
    drawn = box(x, y, wide, TALL, "none" if line else colour_of(0), line=line, opacity=1 if line else 0.18, round=6)
    return drawn + "".join(words(x + 12, top + LINE * i, each, bold=not line and not i) for i, each in enumerate(lines))


def _arrow(path: str) -> str:
    return f'<path d="{path}" stroke="{GREY}" stroke-width="1.5" fill="none" marker-end="url(#tip)"/>'
