"""Lets a fork leave the stack of the process that it was forked from."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Become"]


class Become(BaseException):
    """Raised in a fork; outermost.py then calls the steps, one after another. Not an Exception, which may be caught.

    On the way up the fork's copies of files and sockets are closed; nothing may be done that concerns both processes.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = steps
