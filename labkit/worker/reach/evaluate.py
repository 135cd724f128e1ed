"""Evaluates a user's expressions where the training stands, without changing it.

Names are those of the nearest frame of the user's own code, then those of the frames between it and the optimizer (the
loop of a Trainer: `inputs`, `self`), then those of the functions that called it, then `optimizer` and the quantities.
"""

from __future__ import annotations

import _thread
import ast
import contextlib
import ctypes
import inspect
import io
import os
import random
import site
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from labkit.text import shortened
from labkit.worker.reach import quantities

OURS = str(Path(__file__).parents[1])  # labkit/worker
LIBRARIES = (
    str(Path(__file__).parents[2]),
    str(Path(os.__file__).parent),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
MOST_ELEMENTS = 10_000
LONGEST_TEXT = 10_000
MAKES_LOCALS = {"locals", "vars"}
# The frame of a line at which the training's thread is: where 3.11 traces it, it takes its variables back from this
# dictionary afterwards, so that those of an empty one would be deleted.
held: FrameType | None = None
UNSHARED = 3  # references to the dictionary of a frame's variables: the frame's, and two of who counts them


class OutOfTime(BaseException):
    """Raised inside an evaluation that takes too long; not an Exception, which the expression might catch."""


def name_of(optimizer: Any) -> str:
    """What the script calls it; its class if that cannot be found."""
    names = names_around(optimizer)
    called = (name for name, value in names.items() if value is optimizer and name != "optimizer")
    return next(called, type(optimizer).__name__)


def names_around(optimizer: Any, *, asked: bool = True) -> dict[str, Any]:
    """The names that an expression can use at the end of this optimizer's step, which is on the stack; unless somebody
    has `asked` for them, without those that the script itself might see change."""
    frames = [frame for frame in _stack() if not (_is_of_torch(frame) or _is_step(frame))] or [sys._getframe()]
    own = next((place for place, frame in enumerate(frames) if _is_users(frame)), len(frames) - 1)
    return _names_of(frames, own, optimizer, asked)


def frame_here() -> FrameType:
    """The frame that has called labkit."""
    return next(_stack())


def names_here(optimizer: Any) -> dict[str, Any]:
    """The names that an expression can use in the frame that has called labkit."""
    return _names_of([*_stack()], 0, optimizer, True)


def _names_of(frames: list[FrameType], own: int, optimizer: Any, asked: bool) -> dict[str, Any]:
    names = {name: getattr(quantities, name) for name in quantities.__all__} | {"optimizer": optimizer}
    for frame in (*filter(_is_users, reversed(frames[own + 1 :])), *reversed(frames[:own])):
        names |= locals_of(frame, asked)
    return names | frames[own].f_globals | locals_of(frames[own], asked)


def locals_of(frame: FrameType, asked: bool) -> dict[str, Any]:
    """A copy of a frame's variables. Until Python 3.13 a function's frame keeps the dictionary that is made for this,
    and so their values: it is emptied, unless the script has it, too, from `locals()`, which it would see change."""
    if not asked and sys.version_info < (3, 13) and MAKES_LOCALS.intersection(frame.f_code.co_names):
        return {}
    made = frame.f_locals
    values = dict(made)
    is_own = frame is not held and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if type(made) is dict and is_own and sys.getrefcount(made) <= UNSHARED:
        made.clear()
    return values


def evaluate(expression: str, names: dict[str, Any], *, together: bool, limit: float) -> list[dict[str, Any]]:
    """The value of an expression, or of each element of a tuple, as JSON. An exception is a value, too.

    `together`: all ranks evaluate it, so tensors that are sharded over them may be gathered. `limit` in seconds.
    """
    body = ast.parse(expression.strip(), mode="eval").body
    parts = body.elts if isinstance(body, ast.Tuple) else [body]
    names = names | {f"_labkit_{name}": getattr(quantities, name) for name in quantities.__all__}
    for node in ast.walk(body):  # many scripts have a number called grad_norm
        if isinstance(node, ast.Call) and isinstance(called := node.func, ast.Name) and called.id in quantities.__all__:
            called.id = called.id if callable(names.get(called.id)) else f"_labkit_{called.id}"

    def value(part: ast.expr) -> dict[str, Any]:
        return value_of(eval(compile(ast.Expression(part), "<labkit>", "eval"), names), together=together)

    return [_caught(partial(value, part), limit) for part in parts]


def execute(cell: str, names: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """What a cell of statements prints, and the value of its last expression, as in a notebook."""
    printed = io.StringIO()

    def run() -> dict[str, Any]:
        *statements, last = [*ast.parse(cell).body] or [ast.Pass()]
        if not isinstance(last, ast.Expr):
            statements.append(last)
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(statements, []), "<cell>", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
                if value is not None:
                    print(repr(value))
        return {}

    result = _caught(run, limit, whole_traceback=True)
    return [result | {"printed": shortened(printed.getvalue(), LONGEST_TEXT)}]


def execute_here(cell: str, optimizer: Any, limit: float) -> list[dict[str, Any]]:
    """The same in the frame that has called labkit, whose variables keep what is assigned to them."""
    frame, names = frame_here(), names_here(optimizer)
    before = dict(names)
    result = execute(cell, names, limit)
    changed = {name: value for name, value in names.items() if name not in before or before[name] is not value}
    if frame.f_locals is frame.f_globals:
        frame.f_globals.update(changed)
        return result
    code = frame.f_code
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    frame.f_locals.update({name: value for name, value in changed.items() if name in own})
    if sys.version_info < (3, 13):  # there it is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return result


def value_of(value: Any, *, together: bool) -> dict[str, Any]:
    """Scalars and arrays as values, everything else as text."""
    if value is quantities.UNSEEN:
        return {"value": value, "unseen": True}
    if together and hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if hasattr(value, "detach") and not hasattr(value, "full_tensor"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": shortened(value, LONGEST_TEXT) if isinstance(value, str) else value}
    if type(value).__module__ == "numpy" and value.dtype.kind in "biuf" and value.size <= MOST_ELEMENTS:
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return {"value": shortened(repr(value), LONGEST_TEXT)}


def _caught(evaluation: Callable[[], dict[str, Any]], limit: float, *, whole_traceback: bool = False) -> dict[str, Any]:
    """The result of an evaluation, or the exception that ended it, with the random state as it was before."""
    try:
        with _same_random_state(), _time_limit(limit):
            return evaluation()
    except OutOfTime:
        return {"error": f"TimeoutError: not evaluated within {limit:g} s"}
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
            trace = trace.tb_next
        error.__traceback__ = trace
        lines = traceback.format_exception(error) if whole_traceback else traceback.format_exception_only(error)
        return {"error": shortened("".join(lines).strip(), LONGEST_TEXT)}


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Keep the training's random state as it is, even if expressions draw random numbers."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this thread after some seconds, as soon as it executes Python's bytecode again."""
    thread, lock, done = threading.get_ident(), threading.Lock(), threading.Lock()
    is_over = False

    def raise_out_of_time() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))

    def expire() -> None:
        nonlocal is_over
        if not done.acquire(timeout=seconds):
            with lock:
                if done.locked():
                    is_over = True
                    raise_out_of_time()

    done.acquire()
    _thread.start_new_thread(expire, ())  # not one of the script's threads
    try:
        yield
    finally:
        with lock:
            done.release()
        with contextlib.suppress(OutOfTime):
            while is_over:  # one that was not delivered must not reach the training
                raise_out_of_time()


def _stack() -> Iterator[FrameType]:
    """The frames outside this package, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OURS):
            yield frame
        frame = frame.f_back


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "contextlib", "functools")


def _is_users(frame: FrameType) -> bool:
    return is_users(frame.f_code.co_filename)


def is_users(path: str) -> bool:
    """Whether it is a file of the user's own code."""
    return not path.startswith((*LIBRARIES, "<"))


def _is_step(frame: FrameType) -> bool:
    """Whether it is a method of an optimizer, or of one that wraps another."""
    return frame.f_code.co_name == "step" and hasattr(locals_of(frame, False).get("self"), "param_groups")
