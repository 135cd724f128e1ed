"""Checks arguments against their annotations: a value of a wrong type raises a LabError before anything else happens.

`@checked()` does so for a function, `check_argument` for a field of options. A type alone often says too little:
`Annotated[int, Expected("an integer, at least 1", …)]` adds the words and the test.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from labkit.errors import LabError

Value: TypeAlias = "None | bool | int | float | str | os.PathLike[str] | Sequence[Value]"
"""The value of an option of a script."""
Parameters: TypeAlias = Mapping[str, Value]
"""Options of a script with their values, as `launch(script, steps=100, precision="bf16")` has them."""


P = ParamSpec("P")
R = TypeVar("R")
SHORT = reprlib.Repr()  # shortens a value in a message
SHORT.maxother = SHORT.maxstring = SHORT.maxlong = 200  # characters


@dataclass(frozen=True)
class Expected:
    """What a value must be, in words, and a test of what its type does not say."""

    words: str
    holds: Callable[[Any], bool] = lambda value: True


ZeroOrMore = Annotated[int, Expected("an integer, 0 or more", lambda value: value >= 0)]
AtLeastOne = Annotated[int, Expected("an integer, at least 1", lambda value: value >= 1)]
LONGEST_GRACE = 86_400.0  # seconds
Grace = Annotated[float, Expected("a number of seconds from 0 to 86,400", lambda value: 0 <= value < LONGEST_GRACE)]
Seconds = Annotated[float, Expected("a number of seconds, 0 or more", lambda value: value >= 0)]
NameOfMetric = Annotated[str, Expected("the name of a reported value such as 'test_loss'", bool)]
WORDS = {str: "text", int: "an integer", float: "a number", bool: "True or False"}


def checked(error: type[LabError] = LabError) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that makes a function check its arguments first, and raise this error. Annotations that only a type
    checker can read are ignored."""
    return lambda function: _checked(function, error)


def _checked(function: Callable[P, R], error: type[LabError]) -> Callable[P, R]:
    @functools.cache
    def annotations() -> tuple[inspect.Signature, dict[str, Any]]:  # not at import, which must be fast
        signature = inspect.signature(function)
        known = {parameter.name: _evaluated(parameter, function) for parameter in signature.parameters.values()}
        return signature, {name: annotation for name, annotation in known.items() if annotation is not Any}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        signature, known = annotations()
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # an argument too many or too few: Python says which
            return function(*args, **kwargs)
        for name, annotation in known.items():
            if name in given:
                several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                for value in given[name] if several else (given[name],):
                    check_argument(name, value, annotation, error=error)
        return function(*args, **kwargs)

    return call


def check_argument(
    name: str, value: Any, annotation: Any, expected: str | None = None, error: type[LabError] = LabError
) -> None:
    """Raise the error unless the value has the annotated type, which `expected` says in words."""
    if not _fits(value, annotation):
        raise error(f"{name} must be {expected or _in_words(annotation)}, got {_shown(value)}")


def _evaluated(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD or parameter.annotation is inspect.Parameter.empty:
        return Any
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return get_type_hints(holder, function.__globals__, include_extras=True)[parameter.name]
    except NameError:  # imported for type checkers only
        return Any


def _fits(value: Any, annotation: Any) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin is Annotated:
        return _fits(value, parts[0]) and all(each.holds(value) for each in parts[1:])
    if origin in (Union, UnionType):
        is_path = isinstance(value, str) and _has_path(parts)  # in any encoding
        return is_path or any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is Sequence:
        items = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return items and all(_fits(item, parts[0]) for item in value)
    kind = origin or annotation or NoneType
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(_as_float(value))
    if kind is os.PathLike:
        return isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    if kind is str:
        return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()
    return isinstance(value, kind)


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def _has_path(parts: Sequence[Any]) -> bool:
    return any(get_origin(part) is os.PathLike for part in parts)


def _in_words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return str(parts[1].words)
    if origin in (Union, UnionType):
        named = [part for part in parts if part is not NoneType and not (part is str and _has_path(parts))]
        return " or ".join(dict.fromkeys(map(_in_words, named)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Sequence, Mapping):
        return "a list" if origin is Sequence else "a mapping"
    kind = origin or annotation
    return WORDS.get(kind, "a path" if kind is os.PathLike else f"a {kind.__name__}")


def _shown(value: Any) -> str:
    try:
        text = SHORT.repr(value)
    except ValueError:  # a number of thousands of digits
        text = f"a {type(value).__name__}"
    return " ".join(text.split()).encode("utf-8", "replace").decode()
