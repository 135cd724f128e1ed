"""Decodes JSON that may be damaged, or of another version, to dataclasses by the types of their fields; and makes sound
JSON of any values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from math import isfinite
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from labkit.files import Json, finite
from labkit.text import plain

T = TypeVar("T")


def from_json(cls: type[T], content: Any, *, strict: bool = False) -> T | None:
    """The dataclass with what `content` has of its fields; one that is missing, null or of another type gets its
    default. None without a mapping, or if a field has no default; if strict, also for a field of another type."""
    if not isinstance(content, Mapping):
        return None
    types = _types(cls)  # type: ignore[arg-type]  # a class is hashable, even if its instances are not
    given = {name: _sound(content[name], kind) for name, kind in types if content.get(name) is not None}
    sound = {name: value for name, value in given.items() if value is not None}
    if strict and len(sound) < len(given):
        return None
    try:
        return cls(**sound)
    except TypeError:  # a field without a default
        return None


@cache
def _types(cls: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(cls, localns={"Json": Any}, include_extras=True)
    return [(field.name, hints[field.name]) for field in fields(cls)]


def _sound(value: Any, kind: Any) -> Any:
    """The value as that type, of a list or mapping what is sound in it; None if it is of another type.

    `Annotated[int, range(…)]` is an integer in that range. A dataclass may have a `decode` of its own.
    """
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return next((each for one in args if (each := _sound(value, one)) is not None), None)
    if origin is Annotated:
        return value if type(value) is int and value in args[1] else None
    if origin is Literal:
        return value if isinstance(value, str) and value in args else None
    if origin in (tuple, list, frozenset):
        each = (_sound(item, args[0]) for item in value) if isinstance(value, list) else None
        return None if each is None else origin(item for item in each if item is not None)
    if origin in (Mapping, dict):
        items = [(name, _sound(item, args[1])) for name, item in value.items()] if isinstance(value, dict) else None
        return None if items is None else {k: item for k, item in items if item is not None or args[1] is Any}
    if kind is float:
        return finite(value)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind.decode(value) if hasattr(kind, "decode") else from_json(kind, value)
    return value if kind is Any or type(value) is kind else None


def to_json(value: Any) -> Json:
    """The value as JSON has it: a dataclass as an object, an array as lists, text without control characters, null for
    NaN and infinity, which JSON lacks; anything else as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain(str(name)): to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    return to_json(value.tolist()) if hasattr(value, "tolist") else plain(str(value))
