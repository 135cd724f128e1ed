"""Turns the fields of a dataclass into the options of a call: its keywords, its signature and its flags."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, get_type_hints

from labkit.arguments import check_argument
from labkit.errors import LaunchError

__all__ = ["CallOptions", "expected", "flag", "whole_number"]


def expected(words: str) -> dict[str, Any]:
    """Metadata of a field whose type says too little: what its value must be."""
    return {"expected": words}


def flag(help: str | None = None, *, expected: str | None = None, **argparse_options: Any) -> dict[str, Any]:
    """Metadata of a field that is also a flag; `flag` is its name if it is not the field's."""
    return {"argparse": {"help": help, **argparse_options}, "expected": expected}


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The base of LaunchOptions and JobOptions. Raises LaunchError for a value that has not the type of its field."""

    def __post_init__(self) -> None:
        types = get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            check_argument(
                each.name, getattr(self, each.name), types[each.name], each.metadata.get("expected"), LaunchError
            )

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The options among the keywords of a call, and the rest: the parameters of the script."""
        names = cls.names()
        own = {name: value for name, value in keywords.items() if name in names}
        return cls(**own), {name: value for name, value in keywords.items() if name not in names}

    def as_keywords(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options' flags to a parser."""
        for each in fields(cls):
            if "argparse" in each.metadata:
                default = {"required": True} if each.default is MISSING else {"default": each.default}
                options = {"dest": each.name, **default, **each.metadata["argparse"]}
                parser.add_argument(options.pop("flag", f"--{each.name.replace('_', '-')}"), **options)

    @classmethod
    def parsed(cls, arguments: argparse.Namespace, **more: Any) -> Self:
        """The options from parsed flags; `more` are options without a flag."""
        values = {each.name: getattr(arguments, each.name) for each in fields(cls) if "argparse" in each.metadata}
        return cls(**values | more)

    @classmethod
    def signature_of(cls, function: Callable[..., Any]) -> inspect.Signature:
        """A function's signature with these options as keywords, between its first parameter and its own keywords."""
        signature = inspect.signature(function)
        first, *others = signature.parameters.values()
        options = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.default is MISSING else each.default,
                annotation=each.type,
            )
            for each in fields(cls)
        ]
        return signature.replace(parameters=[first, *options, *others])


def whole_number(text: str) -> int | str:
    """`"2"` as 2; anything else is returned unchanged and refused by a later check."""
    return int(text) if text.lstrip("-").isdigit() else text
