"""What a unit computes on a rank that has a part of each sequence, or some of the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.planner.layout import Layout
from labkit.planner.model.facts import ByteCount, Moment, Profile, Unit

__all__ = ["mask_bytes", "on_rank", "shards_of"]


def on_rank(profile: Profile, unit: Unit | None, layout: Layout, keys_and_values: int) -> Profile:
    """The profile on one rank; `unit` is None for the loss. `keys_and_values` of a block, in bytes per sample."""
    if layout.context > 1:
        is_block = unit is not None and unit.name.startswith("blocks.")
        return _of_a_part(profile, layout, keys_and_values if is_block else 0)
    if layout.expert_ranks > 1 and unit and unit.experts:
        return _with_some_experts(profile, unit, layout.expert_ranks)
    return profile


def shards_of(unit: Unit, layout: Layout) -> tuple[int, ...]:
    """The number of ranks that share each parameter that a rank computes with; experts are shared only with their
    replicas."""
    replicas = layout.ranks // layout.expert_ranks
    experts = unit.experts if layout.expert_ranks > 1 else ()
    return tuple(replicas if i in experts else layout.shards for i in range(len(unit.parameters)))


def mask_bytes(positions: int, layout: Layout, itemsize: int) -> int:
    """Bytes of the masks of a rank's two chunks of a sequence, (r+1) and (2C-r) chunks wide, which all blocks share."""
    chunk = positions // (2 * layout.context)
    return chunk * chunk * (2 * layout.context + 1) * itemsize


def _of_a_part(profile: Profile, layout: Layout, keys_and_values: int) -> Profile:
    """A part of each sample, and for attention the keys and values of all positions, in bytes a sample. They are kept
    for backward unless they are gathered again, and have gradients."""
    ranks, again = layout.context, layout.activation_checkpointing

    def part(line: ByteCount, more: int = 0) -> ByteCount:
        return ByteCount(line.fixed, line.per_sample // ranks + more)

    def moments(each: tuple[Moment, ...], more: int) -> tuple[Moment, ...]:
        return tuple(Moment(part(m.held, more), part(m.kept, keys_and_values), m.settled) for m in each)

    lines: dict[str, Any] = {name: part(getattr(profile, name)) for name in ("input", "output", "between")}
    return replace(
        profile,
        **lines,
        saved=part(profile.saved, 0 if again else keys_and_values),
        forward=moments(profile.forward, keys_and_values),
        backward=moments(profile.backward, keys_and_values * (1 if again else 2)),
    )


def _with_some_experts(profile: Profile, unit: Unit, ranks: int) -> Profile:
    """The experts of one rank, which get as many rows as all experts would from one rank. Bytes that do not depend on
    the samples are those of gradients, nearly all of experts."""
    sizes = tuple(n // ranks if i in unit.experts else n for i, n in enumerate(profile.parameters))
    rows = tuple(n if i in unit.experts else row for i, (n, row) in enumerate(zip(sizes, profile.rows, strict=True)))
    share = sum(sizes) / sum(profile.parameters)
    moments: dict[str, Any] = {
        name: tuple(
            m._replace(held=m.held._replace(fixed=int(m.held.fixed * share)), settled=int(m.settled * share))
            for m in getattr(profile, name)
        )
        for name in ("forward", "backward")
    }
    return replace(profile, parameters=sizes, rows=rows, **moments)
