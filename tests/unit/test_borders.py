"""What a package offers is typed to its borders: no mapping of names to values of any kind."""

import dataclasses
import importlib
import inspect
import re
import typing

import pytest

from unit.test_package import FACES

LOOSE = re.compile(r"\b(dict|Dict|Mapping|MutableMapping)\[\s*\w+,\s*(typing\.)?(Any|object)\s*\]")


def signatures(thing):
    """`(name, annotation)` of all that a caller gives to a class or function, or gets from it."""
    if inspect.isclass(thing):
        yield from _hints(thing, thing.__name__)
        for name, member in vars(thing).items():
            if not name.startswith("_") or (name == "__init__" and not dataclasses.is_dataclass(thing)):
                member = getattr(member, "fget", None) or getattr(member, "func", None) or member
                member = inspect.unwrap(getattr(member, "__func__", member))
                if inspect.isfunction(member):
                    yield from _hints(member, member.__qualname__)
    elif inspect.isfunction(inspect.unwrap(thing)):
        yield from _hints(inspect.unwrap(thing), thing.__name__)


def _hints(thing, name):
    """Aliases are resolved where their module can resolve them: `Options` may be a mapping of anything."""
    try:
        hints = typing.get_type_hints(thing, vars(importlib.import_module(thing.__module__)))
    except NameError:  # of a name that only the checker of types imports
        hints = {}
    written = inspect.get_annotations(thing)
    return (
        (f"{name}({key})", f"{text} {hints.get(key, '')}") for key, text in written.items() if not key.startswith("_")
    )


@pytest.mark.parametrize("package", [name for name in FACES if name != "worker"])
def test_no_mapping_of_anything_crosses_a_border(package):
    face = importlib.import_module(f"labkit.{package}")
    loose = {
        name: annotation
        for public in face.__all__
        for name, annotation in signatures(getattr(face, public))
        if LOOSE.search(annotation)
    }

    assert not loose


Anything = dict[str, typing.Any]


def test_a_mapping_of_anything_is_seen_also_behind_a_name():
    def reported(values: "dict[str, Any]", more: Anything, rank: int) -> "list[Mapping[str, object]]": ...  # noqa: F821

    found = [name for name, annotation in signatures(reported) if LOOSE.search(annotation)]
    assert found == ["reported(values)", "reported(more)", "reported(return)"]
