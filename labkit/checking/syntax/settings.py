"""Reads the settings that accelerate and transformers take as mappings: in a script, or in a file of their own.

A file becomes Python text of the same lines, so that rules look at one kind of tree.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit.checking.syntax.nodes import Placed, entries, has_stars, keyword, spelled
from labkit.checking.syntax.tree import Tree, kept
from labkit.checking.syntax.values import UNKNOWN

JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b')
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # FSDP1's, from 1
SHARED = {
    *("version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"),
    *("state_dict_type", "cpu_ram_efficient_loading", "activation_checkpointing"),
}
OF_FSDP1 = {"use_orig_params", "sync_module_states", "backward_prefetch", "forward_prefetch"}
FSDP_SETTINGS = {
    "accelerate": SHARED
    | OF_FSDP1
    | {"sharding_strategy", "offload_params", "activation_checkpointing_offload", "ignored_modules"},
    "transformers": SHARED
    | OF_FSDP1
    | {"cpu_offload", "limit_all_gathers", "xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"},
}
MOST_PARTS = 200_000  # of the text: an alias is written out
NO_WORDS = {"n", "no", "f", "false", "off", "0"}
YES_WORDS = {"y", "yes", "t", "true", "on", "1"}


@dataclass(frozen=True)
class Setting:
    """`name` as it is spelled and `node` its place; `value` is a literal's or UNKNOWN, `expression` its node."""

    name: str
    value: Any
    node: Placed
    expression: ast.expr

    @property
    def is_on(self) -> bool:
        return str(self.value).lower() in YES_WORDS

    @property
    def is_off(self) -> bool:
        return str(self.value).lower() in NO_WORDS


Settings = dict[str, Setting]


@dataclass(frozen=True)
class Configuration:
    """One training's settings. `fsdp` has those of its `fsdp_config`, by names without `fsdp_`; `whole` the settings
    around it: accelerate's file, or the arguments of transformers' TrainingArguments."""

    reader: str  # accelerate or transformers
    fsdp: Settings
    whole: Settings = field(default_factory=dict)
    has_others: bool = False  # settings that are not literal: **arguments

    @property
    def is_accelerates(self) -> bool:
        return self.reader == "accelerate"

    def starts(self, kind: str) -> bool:
        """Whether accelerate launch starts FSDP or DEEPSPEED with this file."""
        started = self.whole.get("distributed_type")
        return self.is_accelerates and started is not None and started.value == kind

    @property
    def version(self) -> int | None:
        """FSDP's, if it is certain: without it, accelerate takes 1, and transformers 1 or 2, depending on its own."""
        if "version" not in self.fsdp:
            return 1 if self.is_accelerates else None
        value = str(self.fsdp["version"].value)
        return int(value) if value in ("1", "2") else None


def python_of_json(text: str) -> str:
    """JSON as a Python expression of the same lines. Raises ValueError if it is not JSON."""
    json.loads(text)
    return JSON_WORD.sub(lambda word: repr(json.loads(word[0])), text)


def python_of_yaml(text: str) -> str:
    """YAML as a Python expression, each name on its line. Raises ImportError without PyYAML, and ValueError."""
    import yaml

    writer = _Writer(text)
    try:
        writer.write(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).split("\n")[0]
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark else problem) from None
    return "\n".join("".join(line) for line in writer.lines)


class _Writer:
    """Writes PyYAML's nodes as Python, each at its line, or at the current one if that is below: an alias."""

    def __init__(self, text: str):
        import yaml

        self.lines: list[list[str]] = [[] for _ in text.split("\n")]
        self._at = self._parts = 0
        self._loader = yaml.SafeLoader("")

    def write(self, node: Any) -> None:
        if node is None:  # an empty file
            self._put("None")
            return
        self._at = min(max(self._at, node.start_mark.line), len(self.lines) - 1)
        if node.id == "scalar":
            self._put(repr(self._value(node)))
            return
        self._put("{" if node.id == "mapping" else "[")
        for part in node.value:
            for i, each in enumerate(part if node.id == "mapping" else [part]):
                self._put(": " if i else "")
                self.write(each)
            self._put(", ")
        self._put("}" if node.id == "mapping" else "]")

    def _put(self, text: str) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ValueError("its aliases repeat too much")
        self.lines[self._at].append(text)

    def _value(self, node: Any) -> str | int | float | bool | None:
        """A scalar's value; the text of a date, of `<<` and of what has a tag of its own."""
        import yaml

        try:
            value = self._loader.construct_object(node)
        except yaml.constructor.ConstructorError:
            return str(node.value)
        return value if isinstance(value, str | int | float | bool | None) else str(node.value)


@kept
def configurations(tree: Tree) -> list[Configuration]:
    """The configuration that a file consists of, or those in a script."""
    return list(_configurations(tree))


def _configurations(tree: Tree) -> Iterator[Configuration]:
    if (root := _root(tree)) is not None:
        whole = settings_of(root)
        if whole.keys() & {"distributed_type", "compute_environment"}:
            fsdp = settings_of(whole["fsdp_config"].expression) if "fsdp_config" in whole else {}
            yield Configuration("accelerate", _without_prefix(fsdp), whole)
        elif _is_fsdp(fsdp := _without_prefix(whole)):
            yield Configuration("transformers", fsdp)
        return
    for call in tree.calls:
        if (value := keyword(call, "fsdp_config")) is None or not _takes_training_arguments(tree, call):
            continue
        if isinstance(value, ast.Name) and not _is_changed(tree, value.id):
            value = tree.resolved(value) or value
        yield Configuration("transformers", _without_prefix(settings_of(value)), _passed(call), has_stars(call))


def _root(tree: Tree) -> ast.Dict | None:
    """The mapping that a configuration file is; a program is more than one."""
    body = tree.module.body
    alone = body[0] if len(body) == 1 else None
    return alone.value if isinstance(alone, ast.Expr) and isinstance(alone.value, ast.Dict) else None


def _is_fsdp(settings: Settings) -> bool:
    """Whether most names of a file are those of an fsdp_config, and more than `version`, which many files have."""
    known = settings.keys() & set().union(*FSDP_SETTINGS.values())
    return len(known) * 2 > len(settings) and known != {"version"}


def _is_changed(tree: Tree, name: str) -> bool:
    """Whether a mapping gets settings after it was made."""
    stores = (node.value for node in tree.nodes[ast.Subscript] if isinstance(node.ctx, ast.Store | ast.Del))
    changes = (call.func.value for call in tree.method_calls("update", "setdefault", "pop"))
    return any(isinstance(node, ast.Name) and node.id == name for node in (*stores, *changes))


def _takes_training_arguments(tree: Tree, call: ast.Call) -> bool:
    """TrainingArguments, or TRL's SFTConfig and others; a class derived from them may have defaults of its own."""
    name = tree.called(call)
    return name == "TrainingArguments" or name.startswith(("transformers.", "trl."))


def _without_prefix(settings: Settings) -> Settings:
    return {name.removeprefix("fsdp_"): setting for name, setting in settings.items()}


def settings_of(node: ast.AST) -> Settings:
    """The settings of `{"a": 1}` or `dict(a=1)`; none of anything else."""
    if isinstance(node, ast.Dict):
        named = [(str(key.value), key, value) for key, value in entries(node) if isinstance(key, ast.Constant)]
        return {name: Setting(name, _literal(value), key, value) for name, key, value in named}
    return _passed(node) if isinstance(node, ast.Call) and spelled(node.func) == "dict" else {}


def _passed(call: ast.Call) -> Settings:
    return {k.arg: Setting(k.arg, _literal(k.value), k.value, k.value) for k in call.keywords if k.arg}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return UNKNOWN
