"""Reads from a script's text which values of its metrics it calls better: what stops it early, or reduces its learning
rate, or decides which checkpoint is kept."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from labkit.checking.syntax.nodes import argument_at, entries, has_stars, is_method_call, keyword, last_part, owner_of
from labkit.checking.syntax.tree import Tree
from labkit.metric_names import Better, better

MODES: dict[Any, Better] = {"min": "lower", "max": "higher"}
GREATER: dict[Any, Better] = {True: "higher", False: "lower"}


def metric_modes(tree: Tree) -> dict[str, Better]:
    """What the text says of each metric; nothing of those of which it says both."""
    answers: dict[str, set[Better]] = defaultdict(set)
    for name, answer in (*_monitored(tree), *_plateaus(tree), *_best_models(tree)):
        if isinstance(name, str) and answer:
            answers[name].add(answer)
    return {name: each.pop() for name, each in answers.items() if len(each) == 1}


def _monitored(tree: Tree) -> Iterator[tuple[Any, Better | None]]:
    """`EarlyStopping("val_loss", mode="min")` and `ModelCheckpoint(monitor=…, mode=…)`, of any framework."""
    for call, name in tree.names_of_calls.items():
        is_first = last_part(name) == "EarlyStopping"
        monitor = argument_at(call, 0, "monitor") if is_first else keyword(call, "monitor")
        yield tree.value(monitor), MODES.get(tree.value(keyword(call, "mode")))


def _plateaus(tree: Tree) -> Iterator[tuple[Any, Better | None]]:
    """`ReduceLROnPlateau(…, mode=…)` with the name that its step takes, or that Lightning gets beside it."""
    calls = [call for call, name in tree.names_of_calls.items() if last_part(name) == "ReduceLROnPlateau"]
    modes = {call: MODES.get(tree.value(argument_at(call, 1, "mode"))) for call in calls}
    for call, mode in modes.items():
        for step in tree.method_calls("step"):
            if owner_of(step) in tree.targets_of(call):
                yield _name_of(argument_at(step, 0, "metrics")), mode
    for node in tree.nodes[ast.Dict] if calls else ():
        values = {tree.value(key): value for key, value in entries(node)}
        scheduler = tree.resolved(values.get("scheduler", values.get("lr_scheduler")))
        if isinstance(scheduler, ast.Call):
            yield tree.value(values.get("monitor")), modes.get(scheduler)


def _name_of(value: ast.AST | None) -> str | None:
    """`val_loss`, also of `metrics["val_loss"]`, `self.val_loss` and `val_loss.item()`."""
    if is_method_call(value, "item"):
        value = value.func.value
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        return str(value.slice.value)
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else None


def _best_models(tree: Tree) -> Iterator[tuple[Any, Better | None]]:
    """`TrainingArguments(metric_for_best_model=…, greater_is_better=…)`. By default greater is better for names that do
    not end in "loss", which is kept only where the name does not say otherwise."""
    for call in tree.calls:
        name, greater = (keyword(call, option) for option in ("metric_for_best_model", "greater_is_better"))
        metric = tree.value(name)
        if greater is not None and tree.value(greater) is not None:
            yield metric, GREATER.get(tree.value(greater))
        elif isinstance(metric, str) and not has_stars(call):
            yield metric, better(metric) or GREATER[not metric.endswith("loss")]
