"""Shows a line while a plan is made, with the seconds that it has taken, and removes it when the plan is there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from labkit.frontend import close_widget, ui

P = ParamSpec("P")
R = TypeVar("R")
AFTER, PERIOD = 0.5, 1.0  # seconds; a plan that is known already shows no line


def telling(plan: Callable[P, R]) -> Callable[P, R]:
    """Decorate what makes a plan: in a terminal or a notebook, a line says so while it runs."""

    @wraps(plan)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        with _line() as write:
            done = threading.Event()
            thread = threading.Thread(target=_tell, args=(write, done), name="labkit planning", daemon=True)
            thread.start()
            try:
                return plan(*args, **kwargs)
            finally:
                done.set()
                thread.join()

    return told


def _tell(write: Callable[[str], object], done: threading.Event) -> None:
    began, period = time.monotonic(), AFTER
    with suppress(Exception):  # of a closed terminal, or of a kernel in which no thread can update a widget
        while not done.wait(period):
            write(f"planning, {time.monotonic() - began:.0f} s: steps are rehearsed on tensors without data")
            period = PERIOD


@contextmanager
def _line() -> Iterator[Callable[[str], object]]:
    """A function that writes one line over and over, of which nothing remains."""
    if ui() == "svg":
        from IPython.display import display
        from ipywidgets import HTML

        widget = HTML()
        handle = display(widget, display_id=True)
        try:
            yield lambda text: setattr(widget, "value", text)  # a thread may touch nothing but a widget's traits
        finally:
            close_widget(widget)
            handle.update({"text/plain": ""}, raw=True)
    elif sys.stderr.isatty():  # stdout is for the answer
        written: list[str] = []

        def write(text: str) -> None:
            written.append(text)
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

        try:
            yield write
        finally:
            if written:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    else:
        yield lambda text: None
