"""A script is completed by the options asked of it: one that only an extra declares brings that extra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from labkit.errors import ScriptError
from labkit.write.compose import is_composed, library, strategy_of, with_extra
from labkit.write.options import Option, options_of, options_of_part, unknown_flags
from labkit.write.script import Script

__all__ = ["completed"]


def completed(script: Script, names: Iterable[str] = (), args: Sequence[str] = ()) -> Script:
    """The script with the extras that declare those options it does not declare itself: parameter names, and `--flags`
    among raw arguments. An option that nobody declares is left to be refused, as are all of a script of another make.

    Raises ScriptError when an extra that declares one cannot be added, naming it and why.
    """
    if not is_composed(script):
        return script
    wanted = [*names, *(flag[2:].replace("-", "_") for flag in unknown_flags(script, args))]
    for name in wanted:
        if name not in options_of(script):
            script = _with_option(script, name)
    return script


def _with_option(script: Script, name: str) -> Script:
    strategy, refusals = strategy_of(script), {}
    extras = {extra: part for extra, part in library().extras.items() if _declares(options_of_part(part), name)}
    for extra in sorted(extras, key=lambda extra: strategy not in extras[extra].goes_with):  # its very own first
        try:
            return replace(script, parts=with_extra(script, extra))
        except ScriptError as error:
            refusals[extra] = error
    for extra, refusal in refusals.items():
        raise ScriptError(f"{name} is an option of the extra {extra}, which cannot be added: {refusal}") from None
    return script


def _declares(options: Mapping[str, Option], name: str) -> bool:
    own = options.get(name) or options.get(name.removeprefix("no_"))
    return own is not None and (name in options or own.negatable)
