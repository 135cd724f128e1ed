"""Draws what each strategy holds, computes and sends in a step: DDP, ZeRO, FSDP, tensor parallelism, meshes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from labkit.charts import Palette
from labkit_labs.draw.picture import GREY, WIDTH, box, boxes, colour_of, key, words
from labkit_labs.draw.player import Film, Frame, film, moved
from labkit_labs.draw.timelines import Bar, added, cursor, moments

__all__ = ["Moment", "ddp", "groups", "mesh", "shards", "split", "step_of_ddp", "step_of_fsdp", "zero", "zero_bytes"]

LAYERS, SAMPLE = 4, 16


def step_of_ddp(*, overlap: bool) -> list[Bar]:
    """A step of four layers: row 0 computes, row 1 sends. A layer's forward takes 1, its backward 2 and the all-reduce
    of its gradients 2; the optimizer takes 1. Without `overlap` the all-reduces begin when backward is over."""
    bars = [Bar(0, "forward", str(layer + 1), layer, layer + 1.0) for layer in range(LAYERS)]
    free = 3.0 * LAYERS if not overlap else 0.0
    for number, layer in enumerate(reversed(range(LAYERS))):
        begin = LAYERS + 2.0 * number
        bars.append(Bar(0, "backward", str(layer + 1), begin, begin + 2))
        free = max(free, begin + 2) + 2
        bars.append(Bar(1, "all_reduce", str(layer + 1), free - 2, free))
    return [*bars, Bar(0, "optimizer", "", free, free + 1)]


def ddp(ranks: int, *, overlap: bool = True, batch: int = 8) -> Film:
    """Draws a step of DDP: samples are dealt out, each layer's gradients differ between the ranks until an all-reduce
    has averaged them, and the timeline of a rank fills. Without `overlap` all-reduces begin after backward."""
    bars = step_of_ddp(overlap=overlap)
    times, room, top = moments(bars), WIDTH / ranks, 236.0
    end, left = times[-1], 84.0
    scale = (WIDTH - left - 8) / step_of_ddp(overlap=False)[-1].end  # the same for both
    parts = added(bars, times, lambda t: left + t * scale, lambda row: top + row * 28, 22)
    cell = (room - 44) / LAYERS
    base = [words(0, 18, f"one batch of {batch} samples", bold=True), words(0, top + 16, "computes")]
    base += [words(0, top + 44, "sends"), words(0, top - 12, "the time of any rank", size=12)]
    kinds = [(Palette.SPANS[kind], name) for kind, name in KINDS_OF_DDP.items()]
    base += [key(kinds, left, top + 72)]
    for rank in range(ranks):
        x, colour = room * rank + 8, colour_of(rank)
        base += [box(x, 52, room - 16, 150, line=colour, round=8), words(x + 12, 72, f"rank {rank}", bold=True)]
        base += [words(x + 14, 114, "weights", size=12), words(x + 14, 160, "gradients", size=12)]
        for layer in range(LAYERS):
            base += [box(x + 14 + layer * cell, y, cell - 4, 22, line=GREY) for y in (119, 165)]
            name = words(x + 12 + layer * cell + cell / 2, 134, str(layer + 1), anchor="middle", size=12)
            base += [box(x + 14 + layer * cell, 119, cell - 4, 22, GREY, opacity=0.4), name]
    frames = [Frame("Every rank has the same weights, and a batch is about to be divided.", [_samples(ranks, batch)])]
    dealt = [_samples(ranks, batch, dealt=True)]
    frames.append(Frame("The samples are dealt out, so that no two ranks compute on the same ones.", dealt))
    for number, (begin, until) in enumerate(pairwise(times)):
        now = {bar.kind: bar.text for bar in bars if bar.start < until and bar.end > begin}
        made = [bar.text for bar in bars if bar.kind == "backward" and bar.start < until]
        averaged = {bar.text for bar in bars if bar.kind == "all_reduce" and bar.end <= begin}
        marks = [*dealt, *parts[number], cursor(left + until * scale, top - 6, top + 54)]
        marks += [_gradient(ranks, int(layer), layer in averaged) for layer in made]
        marks += [_outlined(ranks, int(text), Palette.SPANS[kind], kind) for kind, text in now.items() if text]
        frames.append(Frame(_told_of_ddp(now, overlap), marks))
    waits = end - 3 * LAYERS - 1
    told = f"The step took {end:g} units of time, of which the rank waited {waits:g} for all-reduces."
    final = [*dealt, *parts[-1], *(_gradient(ranks, layer + 1, True) for layer in range(LAYERS))]
    frames.append(Frame(told, final))
    label = (
        f"DDP on {ranks} ranks, {'with' if overlap else 'without'} overlap: {end:g} units of time, {waits:g} waiting"
    )
    return film(base, frames, top + 78, label, seconds=3)


KINDS_OF_DDP = {
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce",
    "optimizer": "optimizer",
}


def _samples(ranks: int, batch: int, *, dealt: bool = False) -> str:
    room, shown = WIDTH / ranks, ""
    for sample in range(batch):
        rank = sample % ranks
        first = 190 + sample * (SAMPLE + 4), 5.0
        place = (room * rank + 82 + sample // ranks * (SAMPLE + 4), 60.0) if dealt else first
        drawn = box(place[0], place[1], SAMPLE, SAMPLE, colour_of(rank))
        drawn += words(place[0] + SAMPLE / 2, place[1] + 12, str(sample), anchor="middle", size=11, fill="#fff")
        shown += moved(drawn, first[0] - place[0], first[1] - place[1]) if dealt else drawn
    return shown


def _cell_of_ddp(ranks: int, rank: int, layer: int) -> tuple[float, float]:
    cell = (WIDTH / ranks - 44) / LAYERS
    return WIDTH / ranks * rank + 22 + (layer - 1) * cell, cell - 4


def _gradient(ranks: int, layer: int, averaged: bool) -> str:
    """In the colour of its rank; averaged, in the colours of all."""
    cells = [_cell_of_ddp(ranks, rank, layer) for rank in range(ranks)]
    part = 22 / ranks
    if not averaged:
        return "".join(box(x, 165, wide, 22, colour_of(rank), round=0) for rank, (x, wide) in enumerate(cells))
    return "".join(boxes([(x, 165 + r * part, wide, part) for x, wide in cells], colour_of(r)) for r in range(ranks))


def _outlined(ranks: int, layer: int, colour: str, kind: str) -> str:
    y = 165 if kind == "all_reduce" else 119
    places = [_cell_of_ddp(ranks, rank, layer) for rank in range(ranks)]
    lines = boxes([(x - 1, y - 1, wide + 2, 24) for x, wide in places], "none", f' stroke="{colour}" stroke-width="3"')
    if kind != "all_reduce":
        return lines
    return (
        lines
        + f'<path d="M{places[0][0]:.0f} 208H{places[-1][0] + places[-1][1]:.0f}" stroke="{colour}" stroke-width="3"/>'
    )


def _told_of_ddp(now: dict[str, str], overlap: bool) -> str:
    sends, layer = now.get("all_reduce"), now.get("forward") or now.get("backward")
    if "forward" in now:
        return f"Forward: each rank computes layer {layer} on its own samples."
    if "optimizer" in now:
        return "The optimizer makes the same update from the same averages on every rank, so the weights stay equal."
    if "backward" in now and sends:
        return f"Backward computes layer {layer}; meanwhile an all-reduce averages the gradients of layer {sends}."
    if "backward" in now:
        return f"Backward computes the gradients of layer {layer}, which differ from rank to rank as the samples do."
    if overlap:
        return f"Backward is over, so nothing hides the all-reduce of layer {sends}: the ranks wait."
    return f"An all-reduce averages the gradients of layer {sends}; it began after backward, so the ranks wait."


class Moment(NamedTuple):
    """What a step of FSDP does at the same time: units that compute, are gathered and whose gradients are scattered.
    A rank has all parameters of the units in `whole`, the gradients of its own samples of those in `gradients`, and its
    part of the averaged gradients of those in `scattered`."""

    phase: str
    computes: int | None = None
    gathers: int | None = None
    scatters: int | None = None
    whole: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    scattered: frozenset[int] = frozenset()


def step_of_fsdp(units: int, *, reshard: bool = True) -> Iterator[Moment]:
    """A step, with the next unit gathered while one computes. The last unit is the root: it is gathered first and
    freed at the end of backward. With `reshard` (`reshard_after_forward`) others are freed after forward."""
    root, blocks = units - 1, range(units - 1)
    yield Moment("forward", gathers=root, whole=frozenset({root}))
    yield Moment("forward", gathers=0, whole=frozenset({root, 0}))
    for unit in blocks:
        after = unit + 1 if unit + 1 in blocks else None
        kept = blocks[unit:] if reshard else blocks
        whole = {root, *(each for each in kept if each <= unit or each == after)}
        yield Moment("forward", unit, after, whole=frozenset(whole))
    yield Moment("forward", root, whole=frozenset({root} if reshard else range(units)))
    for unit in reversed(range(-1, units)):
        computes = {unit} - {-1}
        before, scatters = {unit - 1} & {*blocks} if reshard else set(), {unit + 1} & {*blocks}
        computing, gathered, scattering = (next(iter(each), None) for each in (computes, before, scatters))
        whole = {root} | computes | before | (set() if reshard else {*range(unit)})
        gradients, scattered = {root} | computes | scatters, range(unit + 2, root)
        acts = Moment("backward", computing, gathered, scattering)
        yield acts._replace(whole=frozenset(whole), gradients=frozenset(gradients), scattered=frozenset(scattered))
    yield Moment("backward", scatters=root, gradients=frozenset({root}), scattered=frozenset(blocks))
    yield Moment("optimizer", scattered=frozenset(range(units)))


UNITS_LEFT, UNITS_ROW, HELD_TALL = 86.0, 38, 60
HELD = {"parameters": GREY, "gradients": colour_of(4)}  # unlike the colours of the first ranks


def shards(units: int, ranks: int, *, reshard: bool = True) -> Film:
    """Draws a step of FSDP: units are gathered before they compute and freed afterwards. Above are each rank's units,
    with the parts of other ranks paler, and below them the gradients; further down what a rank holds of the model's
    parameters and gradients, and what it has sent. The still picture shows backward, in which all of it happens."""
    steps = [*step_of_fsdp(units, reshard=reshard)]
    wide, bar = (WIDTH - UNITS_LEFT - 10) / units, (WIDTH - UNITS_LEFT - 10) / len(steps)
    held_at = 22 + ranks * UNITS_ROW + HELD_TALL + 54
    sent_at = held_at + HELD_TALL + 34
    total = 3.0 * (ranks - 1) / ranks  # the most that is sent, in sizes of the model
    names = [*(f"unit {unit + 1}" for unit in range(units - 1)), "root"]
    base = [words(UNITS_LEFT + wide * (u + 0.5) - 2, 14, name, anchor="middle") for u, name in enumerate(names)]
    base += _axes_of_shards(ranks, held_at, sent_at, len(steps), units, bar)
    for rank in range(ranks):
        y, part = 22 + rank * UNITS_ROW, (wide - 4) / ranks
        base.append(words(0, y + 17, f"rank {rank}", fill=colour_of(rank), bold=True))
        x = [UNITS_LEFT + unit * wide for unit in range(units)]
        base.append(boxes([(left + rank * part, y, part, 20) for left in x], colour_of(rank)))
        base.append(boxes([(left, y, wide - 4, 20) for left in x], "none", f' stroke="{GREY}"'))
    frames, curves, sent = list[Frame](), list[str](), 0.0
    for i, now in enumerate(steps):
        sent += ((now.gathers is not None) + (now.scatters is not None)) * (ranks - 1) / ranks / units
        parameters, gradients = held_by_fsdp(now, units, ranks)
        at, high, low = UNITS_LEFT + i * bar, HELD_TALL * parameters / 2, HELD_TALL * gradients / 2
        curve = box(at, held_at - high, bar - 1, high, HELD["parameters"], round=0)
        curve += box(at, held_at - high - low, bar - 1, low, HELD["gradients"], round=0)
        tall = HELD_TALL * sent / total if ranks > 1 else 0.0
        curves.append(curve + box(at, sent_at - tall, bar - 1, tall, Palette.SPANS["all_gather"], round=0))
        many = f"{parameters + gradients:.2f}", f"{sent:.2f}"
        marks = [*curves, _counts_of_shards(*many, held_at, sent_at)]
        marks += [_unit(unit, "whole", ranks, wide) for unit in sorted(now.whole)]
        marks += [_unit(unit, "gradients", ranks, wide) for unit in sorted(now.gradients)]
        marks += [_unit(unit, "scattered", ranks, wide) for unit in sorted(now.scattered)]
        acts = {"computes": now.computes, "gathers": now.gathers, "scatters": now.scatters}
        marks += [_unit(unit, act, ranks, wide) for act, unit in acts.items() if unit is not None]
        frames.append(Frame(_told_of_fsdp(now, [*names[:-1], "the root"], reshard), marks))
    most = max(len(now.whole) for now in steps)
    label = f"{units} units on {ranks} ranks: at most {most} of them whole at the same time; a rank sends {sent:.2f} "
    best = min(units + 4, 2 * units + 1)  # in backward, with a gather and a scatter beside it
    return film(base, frames, sent_at + 26, f"{label}times the model's parameters", seconds=3.5, best=best)


def held_by_fsdp(now: Moment, units: int, ranks: int) -> tuple[float, float]:
    """What a rank holds of the parameters and of the gradients, as shares of all of the model's."""
    parameters = (len(now.whole) + (units - len(now.whole)) / ranks) / units
    return parameters, (len(now.gradients) + len(now.scattered) / ranks) / units


def _axes_of_shards(ranks: int, held_at: float, sent_at: float, steps: int, units: int, bar: float) -> list[str]:
    outlines = [(OUTLINES[what][2], name) for what, name in ACTS.items()]
    dashes = f'stroke="{GREY}" stroke-dasharray="4 3"'
    return [
        words(0, held_at - 14, "holds"),
        words(0, sent_at - 14, "has sent"),
        key(outlines, UNITS_LEFT, held_at - HELD_TALL - 38),
        key([(colour, name) for name, colour in HELD.items()], UNITS_LEFT, held_at - HELD_TALL - 12),
        f'<path d="M{UNITS_LEFT} {held_at - HELD_TALL}H{WIDTH - 10}" {dashes}/>',
        words(UNITS_LEFT - 6, held_at - HELD_TALL + 4, "DDP", anchor="end", size=12),
        words(UNITS_LEFT + (units + 2) * bar / 2, sent_at + 18, "forward", anchor="middle"),
        words(UNITS_LEFT + (units + 2) * bar * 1.5, sent_at + 18, "backward", anchor="middle"),
        words(WIDTH - 10, sent_at + 18, "optimizer", anchor="end"),
    ]


OUTLINES = {  # distance from the unit's top, height, colour
    "computes": (-1, 22, Palette.SPANS["forward"]),
    "gathers": (-1, 22, Palette.SPANS["all_gather"]),
    "scatters": (21, 10, Palette.SPANS["reduce_scatter"]),
}


ACTS = {"computes": "computes", "gathers": "all-gather", "scatters": "reduce-scatter"}


def _counts_of_shards(held: str, sent: str, held_at: float, sent_at: float) -> str:
    x, of = WIDTH - 10, "× the parameters"
    shown = words(x, held_at - HELD_TALL - 12, f"each rank holds {held} {of}", anchor="end", bold=True)
    return shown + words(x, sent_at - HELD_TALL - 4, f"each rank has sent {sent} {of}", anchor="end", bold=True)


def _unit(unit: int, what: str, ranks: int, wide: float) -> str:
    """A mark on the same unit of all ranks: an outline, its parameters from the other ranks, or its gradients."""
    x, cell, part = UNITS_LEFT + unit * wide, wide - 4, (wide - 4) / ranks
    rows = [22.0 + rank * UNITS_ROW for rank in range(ranks)]
    if what in OUTLINES:
        down, tall, colour = OUTLINES[what]
        line = f' stroke="{colour}" stroke-width="3"'
        return boxes([(x - 1, y + down, cell + 2, tall) for y in rows], "none", line)
    if what == "whole":
        others = (
            boxes(
                [(x + other * part, y, part, 20) for rank, y in enumerate(rows) if rank != other],
                colour_of(other),
                ' fill-opacity=".4"',
            )
            for other in range(ranks)
        )
        return "".join(others)
    if what == "gradients":
        return boxes([(x, y + 22, cell, 8) for y in rows], HELD["gradients"], ' fill-opacity=".5"')
    return boxes([(x + rank * part, y + 22, part, 8) for rank, y in enumerate(rows)], HELD["gradients"])


def _told_of_fsdp(now: Moment, names: Sequence[str], reshard: bool) -> str:
    if now.phase == "optimizer":
        return "The optimizer updates each rank's own shards, for which the rank has the averaged gradients."
    root, unit = len(names) - 1, now.computes
    gathers = "" if now.gathers is None else f"an all-gather already collects {names[now.gathers]}"
    scatters = "" if now.scatters is None else f"a reduce-scatter averages the gradients of {names[now.scatters]}"
    if now.scatters == root:
        return f"Backward has ended: the root is freed, and {scatters}."
    if unit is None and scatters:
        return f"Backward has reached the beginning: {scatters}, and leaves each rank those of its own shard."
    if unit is None and now.gathers == root:
        return "Each rank holds shards. The root, which has what is in no block, is gathered first, and stays whole."
    if unit is None:
        return f"An all-gather collects {names[now.gathers or 0]}, which computes first."
    what = f"{now.phase.capitalize()} of {names[unit]}"
    if meanwhile := " and ".join(filter(None, [gathers, scatters])):
        return f"{what}; meanwhile {meanwhile}."
    if unit == root and now.phase == "backward":
        return f"{what}, which stays whole until the end."
    if now.phase == "forward" and (unit == root or not reshard):
        return f"{what}, which stays whole until backward."
    return f"{what}, which is freed afterwards."


ZERO_TOP, ZERO_TALL = 30, 200
STAGED = {1: "optimizer", 2: "gradients", 3: "parameters"}  # what each stage of ZeRO divides


def zero_bytes(stage: int, ranks: int, *, mixed: bool = False) -> dict[str, float]:
    """Bytes per parameter that a rank holds with Adam under ZeRO's stage 0 (DDP) to 3. In fp32: 4 for the parameter, 4
    for the gradient, 8 for two moments. `mixed`: 2, 2, and 12 for moments and a copy in fp32 (ZeRO, arXiv:1910.02054,
    section 3.1)."""
    whole = {"parameters": 2.0, "gradients": 2.0, "optimizer": 12.0} if mixed else None
    whole = whole or {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
    divided = {STAGED[each] for each in range(1, stage + 1)}
    return {name: size / ranks if name in divided else size for name, size in whole.items()}


def zero(ranks: int, *, mixed: bool = False, billions: float = 7) -> Film:
    """Draws what each rank holds of parameters, gradients and optimizer state under DDP and ZeRO 1 to 3, with the bytes
    per parameter and those of a model of so many billion parameters."""
    whole, room = zero_bytes(0, ranks, mixed=mixed), (WIDTH - 250) / ranks
    full, bottom = sum(whole.values()), ZERO_TOP + ZERO_TALL
    base = [key([(Palette.MEMORY[name], _short(name)) for name in whole], 0, bottom + 44)]
    starts = dict(zip(whole, (sum([*whole.values()][:i]) for i in range(3)), strict=True))
    for rank in range(ranks):
        x = 2 + rank * room
        base += [words(x + room / 2 - 4, bottom + 18, f"rank {rank}" if room > 50 else f"{rank}", anchor="middle")]
        base += [box(x, ZERO_TOP, room - 8, ZERO_TALL, line=GREY, round=0)]
        for name, size in whole.items():
            y, tall = bottom - ZERO_TALL * (starts[name] + size) / full, ZERO_TALL * size / full
            base += [box(x, y, room - 8, tall, Palette.MEMORY[name], opacity=0.15, round=0)]
    frames = []
    for stage in range(4):
        held, shown = zero_bytes(stage, ranks, mixed=mixed), ""
        for name, size in held.items():
            tall = ZERO_TALL * size / full
            below, apart = ZERO_TALL * starts[name] / full, tall if size < whole[name] else 0.0
            places = [(2 + r * room, bottom - below - tall - r * apart, room - 8, tall) for r in range(ranks)]
            shown += boxes(places, Palette.MEMORY[name])
        each, title = sum(held.values()), f"ZeRO-{stage}" if stage else "DDP"
        x = ranks * room + 20
        shown += words(x, 60, title, bold=True, size=20) + words(x, 92, f"{each:.4g} bytes per parameter", bold=True)
        shown += words(x, 114, " + ".join(f"{size:.3g}" for size in held.values()))
        shown += words(x, 146, f"{billions:g} billion parameters:")
        shown += words(x, 166, f"{billions * each:,.3g} GB on each rank", bold=True)
        shown += words(x, 198, f"{full / each:.2f} times less than DDP" if stage else f"the same on all {ranks} ranks")
        frames.append(Frame(_told_of_zero(stage, ranks), [shown]))
    totals = ", ".join(f"{sum(zero_bytes(s, ranks, mixed=mixed).values()):.4g}" for s in range(4))
    label = f"bytes per parameter on each of {ranks} ranks under DDP and ZeRO 1, 2 and 3: {totals}"
    return film(base, frames, bottom + 54, label, seconds=5)


def _short(name: str) -> str:
    return {"optimizer": "optimizer state"}.get(name, name)


def _told_of_zero(stage: int, ranks: int) -> str:
    if not stage:
        return "DDP keeps everything on every rank: the parameters, their gradients and the optimizer's state."
    also = ", too," if stage > 1 else ""
    what = {1: "the optimizer's state", 2: "the gradients", 3: "the parameters"}[stage]
    cost = {
        1: "each rank updates its part of the parameters and sends it to the others",
        2: "a reduce-scatter leaves a rank the averages that it needs for its update",
        3: "all-gathers collect them in forward and again in backward",
    }[stage]
    name = "ZeRO-3, or FSDP," if stage == 3 else f"ZeRO-{stage}"
    return f"{name} divides {what}{also} among {ranks} ranks: {cost}."


SPLIT_TOP, SPLIT_ROW = 34, 92
X, A, H, B, Y = 84.0, 170.0, 300.0, 430.0, 520.0  # left edges
SHORT, LONG, SPLIT_TALL = 48, 96, 64


def split(ranks: int) -> Film:
    """Draws gelu(x A) B on several ranks: A is split by columns, B by rows. A matrix of the whole layer is an outline;
    what a rank has of it is filled."""
    part, thin, summed, base = LONG / ranks, SPLIT_TALL / ranks, Y + 74, ""
    columns, activated, partial, arrives = "", "", "", ""
    for rank in range(ranks):
        y, colour = SPLIT_TOP + rank * SPLIT_ROW, colour_of(rank)
        base += words(0, y + 30, f"rank {rank}", bold=True, fill=colour) + box(
            X, y, SHORT, SPLIT_TALL, GREY, opacity=0.6
        )
        base += box(A, y, LONG, SPLIT_TALL - 16, line=GREY) + box(A + rank * part, y, part, SPLIT_TALL - 16, colour)
        base += box(B, y, SHORT, SPLIT_TALL, line=GREY) + box(B, y + rank * thin, SHORT, thin, colour)
        base += box(H, y, LONG, SPLIT_TALL, line=GREY, round=0) + box(Y, y, SHORT, SPLIT_TALL, line=GREY, round=0)
        base += box(summed, y, SHORT, SPLIT_TALL, line=GREY, round=0)
        columns += box(H + rank * part, y, part, SPLIT_TALL, colour, opacity=0.4)
        activated += box(H + rank * part, y, part, SPLIT_TALL, colour)
        partial += box(Y, y, SHORT, SPLIT_TALL, colour, opacity=0.4)
        stripes = [box(summed, y + r * thin, SHORT, thin, colour_of(r), round=0) for r in range(ranks)]
        arrives += "".join(moved(stripe, Y - summed, (r - rank) * SPLIT_ROW) for r, stripe in enumerate(stripes))
        arrives += words(Y + 54, y + 36, "→")
    done = [columns, activated, partial, arrives]
    says = (
        "Every rank has the whole input x, some columns of A and the same rows of B.",
        "Each rank multiplies x by its columns of A and has whole columns of the result; nothing is sent.",
        "GELU acts on each number alone, so no rank needs the columns of another.",
        "Each rank multiplies by its rows of B, which gives a term of the sum that the result is.",
        "An all-reduce adds the terms, the only communication in forward, and every rank has the result.",
    )
    frames = [Frame(told, done[:number]) for number, told in enumerate(says)]
    height = SPLIT_TOP + ranks * SPLIT_ROW - 20
    heads = zip((X, A, H, B, Y, summed), ("x", "A", "gelu(x A)", "B", "y", "sum"), strict=True)
    head = "".join(words(x, 20, text) for x, text in heads)
    label = f"{ranks} ranks: columns of A, the same rows of B, one sum of {ranks} partial sums"
    return film([head, base], frames, height, label, seconds=4)


SAYS = {
    "pipeline": "activations between stages",
    "data": "weights and gradients",
    "tensor": "sums, in every block",
}
MESH_ROW, MESH_TOP = 28, 44


def groups(pipeline: int, data: int, tensor: int) -> dict[str, list[list[int]]]:
    """The ranks of each group, by axis. A rank is (stage × data + replica) × tensor + part, as in a DeviceMesh."""
    rank = [[[(p * data + d) * tensor + t for t in range(tensor)] for d in range(data)] for p in range(pipeline)]
    return {
        "pipeline": [[rank[p][d][t] for p in range(pipeline)] for d in range(data) for t in range(tensor)],
        "data": [[rank[p][d][t] for d in range(data)] for p in range(pipeline) for t in range(tensor)],
        "tensor": [rank[p][d] for p in range(pipeline) for d in range(data)],
    }


def mesh(pipeline: int, data: int, tensor: int) -> Film:
    """Draws the ranks of a mesh once for each axis; those of one colour are in one process group along it. A block of
    rows is a stage, a row a replica. As it plays, the groups that communicate are shown, for one micro-batch."""
    of, each = groups(pipeline, data, tensor), data * tensor
    height = MESH_TOP + pipeline * (data * MESH_ROW + 10)
    base = []
    for panel, (axis, members) in enumerate(of.items()):
        base.append(words(panel * WIDTH / 3, 15, axis, bold=True, size=15))
        base.append(words(panel * WIDTH / 3, 33, SAYS[axis] if members[0][1:] else "nothing", size=12))
        for number, ranks in enumerate(members):
            base += [_rank_of_mesh(rank, panel, number, data, tensor, faint=True) for rank in ranks]
    frames = []
    for axis, ranks, told in talk_in_a_step(pipeline, data, tensor):
        panel = [*of].index(axis) if axis else -1
        numbers = {rank: number for number, members in enumerate(of.get(axis, [])) for rank in members}
        frames.append(
            Frame(told, [_rank_of_mesh(rank, panel, numbers[rank], data, tensor, faint=False) for rank in ranks])
        )
    every = [
        _rank_of_mesh(rank, panel, number, data, tensor, faint=False)
        for panel, members in enumerate(of.values())
        for number, ranks in enumerate(members)
        for rank in ranks
        if members[0][1:]
    ]
    whole = f"The optimizer updates each rank's part; each of {pipeline * each} ranks is in one group of every axis."
    label = f"{pipeline} x {data} x {tensor} ranks: " + "; ".join(f"{axis} groups {m}" for axis, m in of.items())
    return film(base, [*frames, Frame(whole, every)], height, label, seconds=4)


def talk_in_a_step(pipeline: int, data: int, tensor: int) -> Iterator[tuple[str, list[int], str]]:
    """(axis, ranks that communicate along it, a sentence) in the order of a step of one micro-batch."""
    stages = [[*range(p * data * tensor, (p + 1) * data * tensor)] for p in range(pipeline)]
    every = [rank for ranks in stages for rank in ranks]
    if data > 1:
        yield "data", every, "Data axis: the ranks of a color all-gather the weights that they share."
    for step, order in (("forward", range(pipeline)), ("backward", range(pipeline)[::-1])):
        for number, stage in enumerate(order):
            at = f"{step.capitalize()} of stage {stage}"
            if tensor > 1:
                yield (
                    "tensor",
                    stages[stage],
                    f"{at}, tensor axis: the ranks of a color add up their results in every block.",
                )
            elif pipeline == 1:
                yield "", [], f"{at}: no rank communicates."
            if number + 1 < pipeline:
                both = stages[stage] + stages[order[number + 1]]
                what = "its activations" if step == "forward" else "the gradients of these activations"
                yield "pipeline", both, f"Pipeline axis: stage {stage} sends {what} to stage {order[number + 1]}."
    if data > 1:
        yield "data", every, "Data axis: a reduce-scatter averages the gradients over the ranks of a color."


def _rank_of_mesh(rank: int, panel: int, number: int, data: int, tensor: int, *, faint: bool) -> str:
    cell = min(84.0, (WIDTH / 3 - 30) / tensor)
    stage, row, column = rank // (data * tensor), rank // tensor % data, rank % tensor
    x, y = panel * WIDTH / 3 + column * cell, MESH_TOP + row * MESH_ROW + stage * (data * MESH_ROW + 10)
    colour = GREY if faint else colour_of(number)
    back = box(x, y, cell - 3, MESH_ROW - 4, colour, opacity=0.3 if faint else 1)
    return back + words(x + cell / 2 - 1.5, y + 17, str(rank), anchor="middle", fill="" if faint else "#fff")
