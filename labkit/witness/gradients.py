"""Finds gradients that are handled wrongly: cleared never or too often, clipped while they are multiplied by a loss
scale, or clipped or unscaled by each rank's shard alone.

A number that is not finite is text in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from labkit.witness.evidence import Evidence, Line, by_place
from labkit.witness.finding import Finding, named
from labkit.witness.rule import Rule

LEAST = 2  # steps in which it is seen
MEANT = 1e-3  # of the loss scale: a larger limit may be one that was multiplied by it
ALIKE = 1e-3  # norms that differ by less, relatively, may be the same, summed up in another order


class Uncleared(Rule):
    kind = "uncleared gradients"
    title = "Gradients are never cleared"
    declared = "a backward pass adds to the gradients that are there; an optimizer of torch's own steps by the sum"
    observed = (
        "at three checks in a row: what a step has left, not zero, is still there when the next step is made, and only "
        "backward passes, which have added to it, and torch's clipping have changed it"
    )
    silent = (
        "anything else has changed them since: cleared in any way, decayed by hand, divided by a GradScaler; "
        "optimizers of other classes, which may mean it; steps without a backward pass"
    )
    limits = "sampled: 128 elements of each of 16 gradients, at steps 1 2 5 10 20 … and every 1,000th"
    explains = ("left window",)

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "uncleared"):
            yield self.found(
                line,
                "nothing clears the gradients, so that each step uses the sum of its own and of earlier ones'",
                f"they were still there in each of the {line.values['checks']} steps that were checked, up to step "
                f"{line.step}",
                "Call optimizer.zero_grad() for this optimizer once per step, before the backward pass.",
                since=line.values["since"],
            )


class Discarded(Rule):
    kind = "discarded gradients"
    title = "Gradients are cleared before they are averaged"
    declared = "DDP.no_sync: the gradients of its backward passes are to be averaged with those of a later pass"
    observed = (
        "at three checks in a row: those of all passes but the last are cleared before the next pass begins, and the "
        "only optimizer, of torch's own, steps by those of the last; each pass has a batch of the same loader"
    )
    silent = (
        "the weights change between the passes (SAM); something is added to the gradients before the step; several "
        "optimizers; passes on one batch, or on batches of several loaders; always a note"
    )
    limits = "accumulation without no_sync; sampled as above"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "discarded"):
            passes = line.values["passes"]
            yield self.found(
                line,
                f"a step uses the gradients of the last of its {passes} backward passes, those of the others are "
                "cleared",
                f"it was so in each of the {line.values['checks']} steps that were checked, up to step {line.step}",
                "Call optimizer.zero_grad() once per step, not before each backward pass.",
                certain=False,
                since=line.values["since"],
            )


class ScaledClip(Rule):
    kind = "scaled clip"
    title = "Gradients are clipped while they are multiplied by the loss scale"
    declared = "GradScaler: unscale_, or step without it, divides an optimizer's gradients by the loss scale"
    observed = (
        "torch's clipping changes gradients to a limit below a thousandth of the scale, and the scaler divides them "
        "afterwards, without any other change between"
    )
    silent = "nothing was clipped; a larger limit, which may be multiplied by the scale; fewer than two checks"
    limits = (
        "clipping by hand; an optimizer's first step; an unscale_ of a scaler's own, as of ShardedGradScaler; a "
        "max_norm below 0.001 that is rightly multiplied by the scale looks as if it were not"
    )

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        seen = {rank: len([*filter(_is_small, each.of("clipped"))]) for rank, each in evidence.ranks.items()}
        if max(seen.values(), default=0) < LEAST:
            return
        for line in by_place(evidence, "clipped", _is_small):
            limit, scale = float(line.values["limit"]), float(line.values["scale"])
            yield self.found(
                line,
                f"gradients are clipped to {limit:g} while they are multiplied by the loss scale {scale:g}, as if to "
                f"{limit / scale:.2g}",
                "they are divided by the scale only after that",
                "Call scaler.unscale_(optimizer) before clipping.",
                since=1,
                until=line.step,
            )


def _is_small(line: Line) -> bool:
    return float(line.values["limit"]) < MEANT * float(line.values["scale"])


class ShardClip(Rule):
    kind = "shard clip"
    title = "Each rank clips its shard by the norm of that shard"
    declared = "FSDP1: the ranks of its group have parts of the same gradients"
    observed = "torch's clipping is given different norms on them in the same step, and changes gradients"
    silent = "nothing was clipped; norms that agree, as of NO_SHARD or summed up by hand; fewer than two checks"
    limits = "shards that are made by hand, or taken out of a DTensor by to_local(), are not declared"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        differ = []
        for lines in _together(evidence, "shard", "number"):
            norms = [float(line.values["norm"]) for line in lines.values()]
            is_clipped = any(line.values["clipped"] for line in lines.values())
            if is_clipped and max(norms) - min(norms) > ALIKE * max(norms):
                differ.append(lines)
        if len(differ) >= LEAST:
            first, newest = next(iter(differ[0].values())), differ[-1]
            yield Finding(
                "shard clip",
                f"{named(tuple(newest))} clip parts of the same gradients by different norms",
                "torch.nn.utils.clip_grad_norm_ sees a rank's shard of FSDP1 alone",
                "Call the FSDP model's own clip_grad_norm_.",
                since=1,
                until=first.step,
                ranks=tuple(newest),
                line=first.line,
                values=tuple(f"rank {rank}: norm {float(line.values['norm']):.4g}" for rank, line in newest.items()),
            )


class Scalers(Rule):
    kind = "scaler"
    title = "The ranks' GradScalers part"
    declared = "FSDP1: the ranks of its group have parts of the same gradients, and average them"
    observed = "after equally many steps of the scaler, the loss scales differ, and still do at the next check"
    silent = "they are the same again; optimizers that have other parameters, too"
    limits = "under DDP the weights part as well: see replicas"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        checks = list(_together(evidence, "scale", "at"))
        differ = [lines for lines in checks if len({line.values["scale"] for line in lines.values()}) > 1]
        if not differ or differ[-1] is not checks[-1] or (len(differ) < LEAST and not evidence.outcome):
            return
        newest, since = differ[-1], 1
        for lines in checks[: checks.index(differ[0])]:
            since = next(iter(lines.values())).step + 1
        first = next(iter(differ[0].values()))
        yield Finding(
            "scaler",
            f"the loss scales of {named(tuple(newest))} differ, so that gradients of different scales are averaged",
            "torch's GradScaler looks for infinite gradients in a rank's shard of FSDP1 alone: one rank has left out a "
            "step that others made",
            "Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.",
            since=since,
            until=first.step,
            ranks=tuple(newest),
            line=first.line,
            values=tuple(f"rank {rank}: scale {float(line.values['scale']):g}" for rank, line in newest.items()),
        )


def _together(evidence: Evidence, kind: str, count: str) -> Iterator[dict[int, Line]]:
    """What the ranks of a group have written after the same count, by rank, if all have written it once."""
    places: dict[tuple[int, ...], dict[int, list[Line]]] = {}
    for rank, testimony in evidence.ranks.items():
        for line in testimony.of(kind):
            v = line.values
            place = (v[count], v["optimizer"], *v["ranks"])
            places.setdefault(place, {}).setdefault(rank, []).append(line)
    for (_, _, *ranks), lines in sorted(places.items()):
        if len(ranks) > 1 and sorted(lines) == sorted(ranks) and all(len(each) == 1 for each in lines.values()):
            yield {rank: each[0] for rank, each in sorted(lines.items())}
