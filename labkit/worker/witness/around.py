"""Observes calls of torch's functions. An error in doing so is counted, never raised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from labkit.worker.frames import invisible, leave_out_of_compilation
from labkit.worker.recorder import Recorder


def call_after(owner: Any, name: str, observe: Callable[..., None], recorder: Recorder) -> None:
    """Have a method of a class call `observe(object)` when it has returned."""
    method = getattr(owner, name)

    @functools.wraps(method)
    @invisible
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        try:
            observe(self)
        except Exception as error:
            recorder.drop(error)
        return result

    setattr(owner, name, call)


def call_around(
    owner: Any, name: str, observe: Callable[..., Callable[[Any], None] | None], recorder: Recorder
) -> Callable[[], None]:
    """Have a function of a class or module call `observe` with its arguments. What that returns, if anything, is called
    with its result, None if it has raised. Returns what undoes it, unless somebody has replaced the function since.
    torch.compile traces the function alone."""
    function = getattr(owner, name)
    leave_out_of_compilation(observe, with_callees=True)

    @functools.wraps(function)
    @invisible
    def call(*args: Any, **kwargs: Any) -> Any:
        result = after = None
        try:
            after = observe(*args, **kwargs)
        except Exception as error:
            recorder.drop(error)
        try:
            result = function(*args, **kwargs)
        finally:
            if after is not None:
                try:
                    after(result)
                except Exception as error:
                    recorder.drop(error)
        return result

    traced: Any = call
    traced._torchdynamo_inline = function
    for defaults in ("__defaults__", "__kwdefaults__"):  # of which it guards those of `call`, who has no use for them
        setattr(traced, defaults, getattr(function, defaults, None))
    setattr(owner, name, call)

    def undo() -> None:
        if vars(owner).get(name) is call:
            setattr(owner, name, function)

    return undo
