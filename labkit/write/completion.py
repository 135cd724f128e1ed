"""Completes a script for the options that it is launched with: an option that only an extra declares adds the extra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from labkit.errors import ScriptError
from labkit.write.compose import is_composed, library, strategy_of, with_extra
from labkit.write.options import Option, options_of, options_of_part, unknown_flags
from labkit.write.script import Script

__all__ = ["completed"]


def completed(script: Script, names: Iterable[str] = (), args: Sequence[str] = ()) -> Script:
    """The script with the extras that declare the options that it lacks: parameter names, and `--flags` among raw
    arguments. An option that no extra declares is refused later, as is any unknown option of a script that is not
    composed of labkit's cells. Raises ScriptError when an extra cannot be added, with its name and the reason.
    """
    if not is_composed(script):
        return script
    options = [*names, *(flag[2:].replace("-", "_") for flag in unknown_flags(script, args))]
    for name in options:
        if name not in options_of(script):
            script = _with_option(script, name)
    return script


def _with_option(script: Script, name: str) -> Script:
    strategy, refusals = strategy_of(script), {}
    extras = {extra: part for extra, part in library().extras.items() if _declares(options_of_part(part), name)}
    for extra in sorted(extras, key=lambda extra: strategy not in extras[extra].goes_with):  # its own first
        try:
            return replace(script, parts=with_extra(script, extra))
        except ScriptError as error:
            refusals[extra] = error
    for extra, refusal in refusals.items():
        raise ScriptError(f"{name} is an option of the extra {extra}, which cannot be added: {refusal}") from None
    return script


def _declares(options: Mapping[str, Option], name: str) -> bool:
    option = options.get(name) or options.get(name.removeprefix("no_"))
    return option is not None and (name in options or option.negatable)
