"""Reads the options of a script from its `add_argument` calls, without running it, and makes its command line."""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Number
from typing import Any, TypeVar

from labkit.arguments import Parameters
from labkit.errors import LaunchError, ScriptError
from labkit.launch_options import LaunchOptions
from labkit.write.cells import ScriptText
from labkit.write.compose import Part, is_composed, library, strategy_of, strategy_titles, with_extra

S = TypeVar("S", bound=ScriptText)
PLAIN = (str, os.PathLike, Number, list, tuple, dict)  # whose text a script can read
NUMBER_OF_RANKS = ("ranks", "gpus", "num_gpus", "devices", "world_size", "num_processes")


@dataclass(frozen=True)
class Option:
    """One `--flag`. `kind` is the name in `type=`, or "flag" for an option without a value."""

    name: str
    kind: str = "str"
    choices: tuple[Any, ...] = ()
    default: Any = None
    negatable: bool = False
    many: bool = False
    help: str = field(default="", compare=False)


def options_of(script: ScriptText) -> dict[str, Option]:
    """The long options of a script by parameter name (`global_batch_size`), in order of declaration."""
    texts = [script.head, *(cell.text for cell in script.parts)]
    return {name: option for text in texts for name, option in options_in(text).items()}


@lru_cache(maxsize=256)
def options_of_strategy(script: ScriptText) -> Mapping[str, Option]:
    """The options of the strategy's cells and of extras that work with this strategy only, whether or not the script
    has them; except `accumulate`, which all strategies have."""
    strategy = strategy_of(script)
    extras = [_options_of_part(extra) for extra in library().extras.values() if strategy in extra.goes_with]
    own = [options_in(script.cells[title].text) for title in strategy_titles(script)]
    options = {name: option for declared in (*extras, *own) for name, option in declared.items()}
    options.pop("accumulate", None)
    return options


def extra_options(script: ScriptText) -> dict[str, dict[str, Option]]:
    """The options that each extra would add to a script composed of labkit's own cells, by extra."""
    if not is_composed(script):
        return {}
    strategy, declared = strategy_of(script), options_of(script)
    by_extra = {}
    for extra, part in library().extras.items():
        new = {name: option for name, option in _options_of_part(part).items() if name not in declared}
        if new and (strategy in part.goes_with or not part.goes_with):
            by_extra[extra] = new
    return by_extra


def _options_of_part(part: Part) -> dict[str, Option]:
    """The options that the cells of a strategy, a task or an extra declare."""
    return {name: option for cell in part.cells for name, option in options_in(cell.text).items()}


@lru_cache(maxsize=1024)  # parsing a whole script takes 10 ms, and a panel parses many on every change
def options_in(text: str) -> Mapping[str, Option]:
    """The long options that a text declares, by parameter name."""
    options = {}
    for node in ast.walk(ast.parse(text)) if "add_argument" in text else ():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for argument in node.args:
                name = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and name.startswith("--"):
                    help = next((_literal(k.value) for k in node.keywords if k.arg == "help"), None)
                    options[name[2:].replace("-", "_")] = replace(_option(name, node.keywords), help=help or "")
    return options


def _option(name: str, keywords: list[ast.keyword]) -> Option:
    values = {k.arg: k.value for k in keywords if k.arg}
    kind, action = values.get("type"), values.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        return Option(name, "flag", default=action.value == "store_false")
    if action is not None and "BooleanOptionalAction" in ast.dump(action):
        return Option(name, "flag", default=_literal(values.get("default")), negatable=True)
    if _literal(values.get("nargs")) == 0:  # the script's own action, without a value
        return Option(name, "flag", default=False)
    choices = tuple(_literal(values.get("choices")) or ())
    kind_name = kind.id if isinstance(kind, ast.Name) else "str"
    return Option(name, kind_name, choices, _literal(values.get("default")), many="nargs" in values)


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def command_line(script: ScriptText, parameters: Parameters) -> list[str]:
    """`steps=200, precision="bf16"` as `["--steps", "200", "--precision", "bf16"]`.

    Raises ScriptError for an unknown parameter, with the nearest name and the list of parameters, or for an invalid
    value.
    """
    options = options_of(script)
    argv: list[str] = []
    for name, value in parameters.items():
        option = options.get(name)
        if option is None and value is None and any(name in each for each in extra_options(script).values()):
            continue
        if option is None:
            raise ScriptError(_unknown(script, name, options))
        argv += _arguments(script, option, name, value)
    return argv


def check_flags(script: ScriptText, args: Sequence[str]) -> None:
    """Raise ScriptError for a `--flag` among raw arguments that the script's argparse would refuse."""
    for flag in unknown_flags(script, args):
        raise ScriptError(_unknown(script, flag[2:].replace("-", "_"), options_of(script)))


def unknown_flags(script: ScriptText, args: Sequence[str]) -> list[str]:
    """The `--flags` among raw arguments that the script's argparse would refuse."""
    options = options_of(script)
    if not options or "parse_known_args" in str(script):
        return []
    names = [name for option in options.values() for name in (option.name, f"--no-{option.name[2:]}")] + ["--help"]
    flags = [arg.split("=")[0] for arg in itertools.takewhile(lambda arg: arg != "--", args) if arg.startswith("--")]
    # argparse accepts any unambiguous prefix of a flag
    return [flag for flag in flags if not any(name.startswith(flag) for name in names)]


def read_back(script: ScriptText, args: Sequence[str]) -> dict[str, str]:
    """The values of the script's options in raw arguments, by parameter name; a flag is "True" or "False"."""
    values = {}
    for name, option in options_of(script).items():
        for word, following in zip(args, [*args[1:], ""], strict=False):
            if word == option.name:
                values[name] = "True" if option.kind == "flag" else following
            elif word.startswith(f"{option.name}="):
                values[name] = word.partition("=")[2]
            elif option.negatable and word == f"--no-{option.name[2:]}":
                values[name] = "False"
    return values


def _unknown(script: ScriptText, name: str, options: Mapping[str, Option]) -> str:
    extras = {option: extra for extra, declared in extra_options(script).items() for option in declared}
    if name in NUMBER_OF_RANKS:
        return f"{script.name}.py takes no parameter {name!r}; the number of ranks on a machine is nproc_per_node"
    if not options:
        return f"{script.name}.py declares no options, so it takes no {name!r}. Pass its arguments with args=[…]"
    if name in extras:  # a user's own file, which is never completed
        return (
            f"{script.name}.py takes no parameter {name!r}; the extra {extras[name]} has it: compose a script with "
            f"it, Script.load({strategy_of(script) or 'single'!r}, {extras[name]!r})"
        )
    names = [*options, *extras, *LaunchOptions.names()]
    close = [n for n in names if n[:5] == name[:5]] or difflib.get_close_matches(name, names, n=1)
    of_extra = f", of the extra {extras[close[0]]}" if close and close[0] in extras else ""
    hint = f"; did you mean {close[0]!r}{of_extra}?" if close else "."
    return f"{script.name}.py takes no parameter {name!r}{hint} It takes: {', '.join(options)}"


def _arguments(script: ScriptText, option: Option, name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise ScriptError(f"{name} of {script.name}.py is a flag: expected True or False, got {value!r}")
        off = [f"--no-{option.name[2:]}"] if option.negatable else []
        return [option.name] if value else off
    if option.many and isinstance(value, list | tuple):
        return [option.name, *map(str, value)]
    if option.choices and value not in option.choices:
        choices = ", ".join(map(str, option.choices))
        raise ScriptError(f"{name} of {script.name}.py must be one of {choices}; got {value!r}")
    if option.kind in ("int", "float"):
        _check_number(script, option, name, value)
    if not isinstance(value, PLAIN):
        raise ScriptError(f"{name} of {script.name}.py must be text, a number or a path; got {value!r}")
    text = str(value)
    return [f"{option.name}={text}"] if text.startswith("-") else [option.name, text]


def _check_number(script: ScriptText, option: Option, name: str, value: Any) -> None:
    expected = "an integer" if option.kind == "int" else "a number"
    try:
        number = (int if option.kind == "int" else float)(str(value))
        is_valid = isinstance(number, int) or math.isfinite(number)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ScriptError(f"{name} of {script.name}.py must be {expected}; got {value!r}")


def completed(script: S, names: Iterable[str] = (), args: Sequence[str] = ()) -> S:
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


def _with_option(script: S, name: str) -> S:
    strategy, refusals = strategy_of(script), {}
    extras = {extra: part for extra, part in library().extras.items() if _declares(_options_of_part(part), name)}
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


def check_split(size: int, ranks: int, micro_batches: int | None) -> None:
    """Check that a global batch of this size splits into so many ranks that read different samples and, unless the
    script has none, micro-batches. Raises LaunchError."""
    pieces = ranks * (1 if micro_batches is None else micro_batches)
    if pieces < 1 or size < 1:
        raise LaunchError(f"global_batch_size{'' if micro_batches is None else ' and accumulate'} must be at least 1")
    if size % pieces:
        below, above = size - size % pieces, size - size % pieces + pieces
        near = f"sizes are {below} or {above}" if below else f"size is {above}"
        micro = [] if micro_batches is None else [f"{micro_batches} micro-batches"]
        over = " x ".join([f"{ranks} data ranks", *micro] if ranks > 1 else micro)
        raise LaunchError(f"global_batch_size={size} cannot be split evenly into {over}; the nearest {near}")
