"""The rules, one module for each topic, which registers them when it is imported.

A rule is a function that looks at a Tree and yields (node, message) for each mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit.checking.findings import KINDS
from labkit.checking.syntax.tree import Placed, Tree

Mistakes = Iterator[tuple[Placed, str]]
Looks = Callable[[Tree], Mistakes]


@dataclass(frozen=True)
class Rule:
    """`slug` is its name on the command line and in `# labkit: ignore[slug]`; `misses` lists what it does not catch."""

    slug: str
    kind: str
    why: str
    fix: str
    misses: str
    looks: Looks


RULES: dict[str, Rule] = {}


def rule(slug: str, kind: str, *, why: str, fix: str, misses: str) -> Callable[[Looks], Looks]:
    """Register the decorated function as a rule. It yields the node of each mistake and one sentence."""
    assert kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}"
    assert slug not in RULES, f"two rules are named {slug!r}"

    def register(looks: Looks) -> Looks:
        RULES[slug] = Rule(slug, kind, why, fix, misses, looks)
        return looks

    return register
