"""Compares two scripts as a migration, for example from DDP to FSDP: what changed, and what was forgotten."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from labkit.checking.findings import Finding, Findings
from labkit.checking.rules.saving import GATHERS
from labkit.checking.source import Piece
from labkit.checking.syntax.collectives import CHECKPOINT, OF_SHARDS
from labkit.checking.syntax.models import moves_to_device, optimizers
from labkit.checking.syntax.nodes import keyword, last_part
from labkit.checking.syntax.settings import configurations
from labkit.checking.syntax.tree import Tree
from labkit.files import Json
from labkit.text import escaped, plain

NAMES = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "fully_shard"}
Trees = list[tuple[Piece, Tree]]
Seen = tuple[str, int | None]  # what a script does, and the line; "" if it does not


@dataclass(frozen=True)
class Change:
    """A setting and its values in both scripts. A line is None if that script does not have the setting."""

    what: str
    before: str
    after: str
    before_line: int | None = None
    after_line: int | None = None

    @property
    def is_one(self) -> bool:
        return self.before != self.after

    def text(self) -> str:
        def side(text: str, line: int | None) -> str:
            return (text or "nothing") + (f" (line {line})" if line else "")

        return f"{self.what}: {side(self.before, self.before_line)} -> {side(self.after, self.after_line)}"


@dataclass(frozen=True)
class Migration:
    """The comparison of two scripts: `changed` are the settings that differ, `forgotten` the new mistakes of the second
    script, and `kept` the mistakes that both have. Or the conversion of one file, whose new settings are `section`."""

    changed: tuple[Change, ...]
    forgotten: Findings
    kept: Findings
    section: str = ""

    def record(self) -> dict[str, Json]:
        """The format of `--output-format json`."""
        changed: list[Json] = [asdict(change) for change in self.changed]
        mistakes: dict[str, Json] = {"forgotten": [*self.forgotten.records()], "kept": [*self.kept.records()]}
        return {"schema": "labkit.migration/1", "changed": changed, **mistakes, "section": self.section or None}

    def __repr__(self) -> str:
        lines = [f"  {change.text()}" for change in self.changed] or ["  nothing that affects distributed training"]
        if self.section:
            lines += ["for FSDP2:", self.section]
        else:
            lines += ["forgotten:", *(map(str, self.forgotten) if self.forgotten else ["  nothing"])]
        if self.kept:
            lines += ["already present:", *(finding.short for finding in self.kept)]
        return plain("\n".join(["changed:", *lines]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        changes = "".join(f"<li>{escaped(change.text())}</li>" for change in self.changed) or "<li>nothing</li>"
        rest = f"<b>forgotten</b>{self.forgotten.html()}"
        if self.section:
            rest = f"<b>for FSDP2</b><pre>{escaped(self.section)}</pre>"
        if self.kept:
            rest += f"<details><summary>already present</summary>{self.kept.html()}</details>"
        return {"text/plain": repr(self), "text/html": f"<div><b>changed</b><ul>{changes}</ul>{rest}</div>"}


def compared(before: Trees, after: Trees, found_before: Findings, found_after: Findings) -> Migration:
    """The differences between the second script and the first."""
    changes = []
    for what, looks in LOOKED_AT.items():
        (was, was_at), (now, now_at) = (_seen(looks, trees) for trees in (before, after))
        changes.append(Change(what, was, now, was_at, now_at))
    was_set, now_set = _values(before), _values(after)
    for name in dict.fromkeys([*was_set, *now_set]):
        (was, was_at), (now, now_at) = (those.get(name, ("", None)) for those in (was_set, now_set))
        changes.append(Change(name, was, now, was_at, now_at))
    kept, forgotten = _sorted_out(found_before, found_after)
    new, old = (Findings(each, found_after.name, found_after.path) for each in (forgotten, kept))
    return Migration(tuple(change for change in changes if change.is_one), new, old)


def _sorted_out(before: Findings, after: Findings) -> tuple[list[Finding], list[Finding]]:
    """(kept, new) findings of the second script. For each rule, as many are kept as the first script has, preferably
    those on identical lines of code."""
    had, lines = Counter(finding.rule for finding in before), set(map(_spelled, before))
    kept: set[int] = set()
    for number in sorted(range(len(after)), key=lambda number: _spelled(after[number]) not in lines):
        if had[rule := after[number].rule]:
            had[rule] -= 1
            kept.add(number)
    numbered = list(enumerate(after))
    return [finding for i, finding in numbered if i in kept], [finding for i, finding in numbered if i not in kept]


def _spelled(finding: Finding) -> tuple[str, str]:
    return finding.rule, finding.code.strip()


def _seen(looks: Callable[[Tree], Iterator[tuple[str, ast.expr]]], trees: Trees) -> Seen:
    """The values of a setting in a script, and the line of the first."""
    uses = [(text, piece.place(node.lineno)[1]) for piece, tree in trees for text, node in looks(tree)]
    return ", ".join(dict.fromkeys(text for text, _ in uses)), uses[0][1] if uses else None


def _values(trees: Trees) -> dict[str, Seen]:
    """The values of accelerate's file or of an fsdp_config, by the names of the settings."""
    values: dict[str, Seen] = {}
    for piece, tree in trees:
        for configuration in configurations(tree):
            whole = configuration.whole if configuration.is_accelerates else {}
            for setting in (*whole.values(), *configuration.fsdp.values()):
                if not isinstance(setting.value, dict):
                    values[setting.name] = ast.unparse(setting.expression), piece.place(setting.node.lineno)[1]
    return values


def _wrapper(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    return ((NAMES[wrap.strategy], wrap.call) for wrap in tree.wraps)


def _units(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    for wrap in tree.wraps:
        policy = keyword(wrap.call, "auto_wrap_policy")
        if policy is not None:
            yield "auto_wrap_policy", policy
        elif wrap.strategy == "fsdp2" and tree.loops_of(wrap.call):
            yield "each block, in a loop", wrap.call


def _precision(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    names = ("autocast", "MixedPrecision", "MixedPrecisionPolicy", "GradScaler", "ShardedGradScaler")
    return ((last_part(tree.called(call)), call) for call in tree.torch_calls(*names))


def _moved(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    for wrap in tree.wraps:
        for call in tree.method_calls("to", "cuda"):
            made = isinstance(call.func.value, ast.Call) or call is wrap.source
            if made and moves_to_device(tree, call) and tree.function_of(call) is tree.function_of(wrap.call):
                yield "the whole model", call
                return


def _built(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    for call, _ in optimizers(tree):
        earlier = [w for w in tree.wraps if tree.function_of(w.call) is tree.function_of(call)]
        yield ("before wrapping" if any(call.lineno < w.call.lineno for w in earlier) else "after wrapping"), call


def _clips(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    for call in tree.method_calls("clip_grad_norm_"):
        yield ("torch.nn.utils" if tree.called(call).startswith("torch.") else "the model's own"), call


def _accumulates(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    return ((call.func.attr, call) for call in tree.method_calls("no_sync", "set_requires_gradient_sync"))


def _state(tree: Tree) -> Iterator[tuple[str, ast.expr]]:
    for call in tree.calls:
        name = tree.called(call)
        last = last_part(name)
        if name == "torch.save" or (
            name.startswith("torch.distributed.checkpoint.") and last in CHECKPOINT | OF_SHARDS | GATHERS
        ):
            yield ("torch.save" if name == "torch.save" else last), call
        elif isinstance(call.func, ast.Attribute) and call.func.attr in ("state_dict_type", "full_tensor"):
            yield call.func.attr, call


LOOKED_AT: dict[str, Callable[[Tree], Iterator[tuple[str, ast.expr]]]] = {
    "wrapper": _wrapper,
    "units that are sharded": _units,
    "moved to the GPU": _moved,
    "optimizer built": _built,
    "precision": _precision,
    "gradients clipped by": _clips,
    "accumulation": _accumulates,
    "state saved by": _state,
}
