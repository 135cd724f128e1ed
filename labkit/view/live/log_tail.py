"""Reads the end of a rank's log, optionally filtered by a search text."""

from __future__ import annotations

from pathlib import Path

from labkit.files import opened
from labkit.record import RunFolder
from labkit.text import escaped, plain

__all__ = ["log_html", "tail_of_log"]

LOG_BYTES = 16_000
SEARCHED_BYTES = 1 << 20
LOG_LINES = 10


def log_html(folder: RunFolder, rank: int, search: str = "") -> str:
    lines = tail_of_log(folder, rank, LOG_LINES, search)
    if not lines:
        return f'<div style="font-size:11px;opacity:.75">rank {rank}: no line with that text</div>' if search else ""
    text = escaped("\n".join(line[:300] for line in lines))
    style = "margin:4px 0;padding:4px 8px;font:11px monospace;overflow:auto;max-height:170px;border:1px solid #8886"
    return f'<div style="font-size:11px;opacity:.75">rank {rank}, end of its log</div><pre style="{style}">{text}</pre>'


def tail_of_log(folder: RunFolder, rank: int, lines: int, search: str = "") -> list[str]:
    """The last lines of a rank's stdout and stderr that contain `search`, without terminal codes. It reads only the
    end of the files; a search reads more."""
    size, most = (SEARCHED_BYTES, None) if search else (LOG_BYTES, lines)
    streams = [
        [line for line in _end_of(folder.log(rank, stream), size, most) if search.lower() in line.lower()]
        for stream in ("stdout", "stderr")
    ]
    non_empty = [stream[-lines:] for stream in streams if stream]
    share = lines // max(1, len(non_empty))  # neither stream crowds out the other
    return [line for stream in non_empty for line in stream[-share:]]


def _end_of(path: Path, size: int, most: int | None) -> list[str]:
    """The lines in the last `size` bytes; of more than `most`, at least the last `most`."""
    try:
        with opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            text = file.read().decode("utf-8", "replace")
            end = text if most is None else "\n".join(text.rsplit("\n", most + 1)[-most - 1 :])
            return plain(end).splitlines()
    except OSError:
        return []
