"""The rules, one module for each topic, all of which are imported with this package and register theirs.

A rule is a function that looks at a Tree and yields (node, message) for each mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from labkit.checking.findings import KINDS
from labkit.checking.syntax.nodes import Placed
from labkit.checking.syntax.tree import Tree

Mistakes = Iterator[tuple[Placed, str]]
Looks = Callable[[Tree], Mistakes]


@dataclass(frozen=True)
class Rule:
    """`slug` is its name on the command line and in `# labkit: ignore[slug]`, `number` its code for other tools;
    `misses` lists what it does not catch."""

    slug: str
    number: str
    kind: str
    why: str
    fix: str
    misses: str
    looks: Looks


RULES: dict[str, Rule] = {}


def rule(what: str, *, why: str, fix: str, misses: str) -> Callable[[Looks], Looks]:
    """Register the decorated function as a rule with its name. It yields the node of each mistake and one sentence.
    `what` is the rule's number and kind; a new rule gets the next number, and that of one that is removed is never used
    again."""
    number, kind = what.split()
    assert kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}"
    assert number not in {known.number for known in RULES.values()}, f"two rules have the number {number}"

    def register(looks: Looks) -> Looks:
        slug = looks.__name__.replace("_", "-")
        assert slug not in RULES, f"two rules are named {slug!r}"
        RULES[slug] = Rule(slug, number, kind, why, fix, misses, looks)
        return looks

    return register


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
