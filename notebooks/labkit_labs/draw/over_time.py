"""Draws what ranks do in the course of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from labkit.charts import Palette
from labkit.text import gib
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, key, sheet, words
from labkit_labs.draw.player import Film, Frame, film
from labkit_labs.draw.timelines import Bar, added, cursor, moments, sentence

__all__ = ["buckets", "calls", "filled", "loader", "step"]


CALLS_LEFT, CALLS_ROW, APART = 66.0, 38, "#d1495b"


def calls(made: Mapping[int | str, Sequence[str]], first: int | None = 1) -> Film:
    """Draws the collectives that ranks call, one after another. `made` has the names of the calls of each rank, or of
    another name, in order, numbered from `first`, if any; "" is no call. Calls with the same number must have the same
    name; where they do not, all wait."""
    count = max(map(len, made.values()))
    wide = (WIDTH - CALLS_LEFT) / (count + 1)
    columns = [
        {rank: names[i] for rank, names in made.items() if names[i : i + 1] not in ([], [""])} for i in range(count)
    ]
    apart = next((i for i, column in enumerate(columns) if len(set(column.values())) > 1), None)
    base = [words(0, 44 + row * CALLS_ROW, _name_of(rank)) for row, rank in enumerate(made)]
    shown, done = [], list[str]()
    for i, column in enumerate(columns[: None if apart is None else apart + 1]):
        x = CALLS_LEFT + i * wide
        part = words(x + wide / 2, 15, f"#{first + i}", anchor="middle", size=12) if first is not None else ""
        for row, rank in enumerate(made):
            if rank not in column:
                continue
            y = 24 + row * CALLS_ROW
            colour = APART if i == apart else colour_of(0)
            part += box(x, y, wide - 4, CALLS_ROW - 8, colour, round=4)
            part += words(x + wide / 2 - 2, y + 20, column[rank], anchor="middle", size=12, fill="#fff")
            if i == apart:
                part += box(x + wide, y, WIDTH - x - wide, CALLS_ROW - 8, GREY, opacity=0.3, round=4)
                part += words(x + wide + 8, y + 20, "waits", size=12)
        done.append(part)
        shown.append(Frame(_told_of_calls(column, len(made), first, i, apart), [*done]))
    return film(base, shown, 30 + len(made) * CALLS_ROW, _label_of_calls(made, first, apart))


def _told_of_calls(
    column: Mapping[int | str, str], ranks: int, first: int | None, number: int, apart: int | None
) -> str:
    call = "" if first is None else f"call {first + number}, "
    if len(set(column.values())) == 1 and len(column) == ranks > 1:
        return sentence([f"{call}on all ranks: {next(iter(column.values()))}"])
    each = [f"{_name_of(rank)}: {name}" for rank, name in column.items()]
    return sentence([call + each[0], *each[1:], "they differ, so all of them wait for ever" if number == apart else ""])


def _name_of(rank: int | str) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"


def _label_of_calls(made: Mapping[int | str, Sequence[str]], first: int | None, apart: int | None) -> str:
    if apart is None:
        return "; ".join(f"{_name_of(rank)}: {', '.join(filter(None, names))}" for rank, names in made.items())
    last = ", ".join(f"{_name_of(rank)} {names[apart]}" for rank, names in made.items())
    return f"call {(first or 0) + apart} differs: {last}; all of them wait"


LOADER_LEFT, LOADER_ROW, LOADER_TOP, PREFETCH_FACTOR = 84.0, 30, 24, 2


def loader(load: float, compute: float, workers: int, *, steps: int = 6) -> Film:
    """Draws batches that are loaded while earlier ones are computed on: a row for the rank and one for each of its
    workers; grey is waiting. `load` and `compute` are the times of a batch, in the same unit. Without workers the rank
    loads, too."""
    bars = _loaded(load, compute, workers, steps)
    times = moments(bars)
    end = times[-1]
    scale = (WIDTH - LOADER_LEFT - 4) / max(end, steps * (load + compute))  # as long as without workers
    parts = added(
        bars, times, lambda t: LOADER_LEFT + t * scale, lambda row: LOADER_TOP + row * LOADER_ROW, LOADER_ROW - 6
    )
    height = LOADER_TOP + (1 + workers) * LOADER_ROW
    waits = sum(bar.end - bar.start for bar in bars if bar.kind == "forward") / end
    title = f"{workers} workers: the rank computes {waits:.0%} of the time" if workers else "no workers"
    base = [words(0, LOADER_TOP + 17, "rank", bold=True)]
    base += [box(LOADER_LEFT, LOADER_TOP, end * scale, LOADER_ROW - 6, GREY, opacity=0.3, round=0)]
    base += [words(0, LOADER_TOP + (1 + w) * LOADER_ROW + 17, f"worker {w}") for w in range(workers)]
    base += [key([(Palette.SPANS["input"], "load"), (Palette.SPANS["forward"], "compute")], WIDTH - 180, 15)]
    shown = []
    for number, (begin, until) in enumerate(pairwise(times)):
        now = [bar for bar in bars if bar.start < until - 1e-9 and bar.end > begin + 1e-9]
        loads = [
            f"{f'worker {bar.row - 1:g}' if workers else 'the rank'} loads batch {bar.text}"
            for bar in now
            if bar.kind == "input"
        ]
        computes = next((f"computes on batch {bar.text}" for bar in now if bar.kind == "forward"), "waits")
        told = sentence([*loads, f"the rank {computes}" if workers or computes != "waits" else ""])
        line = cursor(LOADER_LEFT + until * scale, LOADER_TOP - 4, height)
        shown.append(Frame(told, [*parts[number], line]))
    last = f"After {steps} batches the rank has computed {waits:.0%} of the time"
    shown.append(
        Frame(
            f"{last}, and waited for its workers or loaded otherwise." if waits < 1 else f"{last}.",
            [*parts[-1], words(LOADER_LEFT, 15, title, bold=True)],
        )
    )
    label = f"{steps} batches, {load:g} to load, {compute:g} to compute, {workers} workers: {end:g} in all"
    return film(base, shown, height, label)


def _loaded(load: float, compute: float, workers: int, steps: int) -> list[Bar]:
    """Worker w loads batches w, w + workers, …; PREFETCH_FACTOR of them before the first is taken (torch's
    prefetch_factor)."""
    bars: list[Bar] = []
    free, taken, rank_free = [0.0] * workers, list[float](), 0.0
    for batch in range(steps):
        if workers:
            asked = batch - PREFETCH_FACTOR * workers
            begin = max(free[batch % workers], taken[asked] if asked >= 0 else 0.0)
            row, ready = 1 + batch % workers, begin + load
            free[batch % workers] = ready
        else:
            row, begin, ready = 0, rank_free, rank_free + load
        bars.append(Bar(row, "input", str(batch), begin, ready))
        taken.append(max(rank_free, ready))
        rank_free = taken[-1] + compute
        bars.append(Bar(0, "forward", str(batch), taken[-1], rank_free))
    return bars


MIB = 2**20
BACKWARD_LEFT, LETTER = 96.0, 7.0  # LETTER: of the text below buckets
BACKWARD_WIDE = (WIDTH - BACKWARD_LEFT) / 1.6  # leaves room for one bucket sent after it


def filled(sizes: Mapping[str, int], bucket_cap_mb: float | None = None) -> list[list[str]]:
    """The names in each bucket. `sizes` are bytes in the order of backward; a bucket is closed when it has reached its
    limit: `bucket_cap_mb` MiB, or by default 1 for the first and 25 for the others (torch/nn/parallel/distributed.py).
    """
    first, others = (1.0, 25.0) if bucket_cap_mb is None else (bucket_cap_mb, bucket_cap_mb)
    result: list[list[str]] = [[]]
    full, limit = 0.0, first * MIB
    for name, size in sizes.items():
        if full >= limit:
            result.append([])
            full, limit = 0.0, others * MIB
        result[-1].append(name)
        full += size
    return result


def buckets(sizes: Mapping[str, int], bucket_cap_mb: float | None = None) -> Film:
    """Draws DDP's buckets: above, backward makes the gradients in this order; below, each bucket is sent once its last
    gradient exists. All buckets are drawn to one scale: sending everything takes half as long as backward."""
    groups = filled(sizes, bucket_cap_mb)
    step = BACKWARD_WIDE / max(1, len(sizes))
    number = {name: i for i, names in enumerate(groups) for name in names}
    edge = box(BACKWARD_LEFT, 22, len(sizes) * step - 2, 30, line=GREY)
    base = [words(0, 40, "backward", bold=True), words(0, 116, "all-reduce", bold=True), edge]
    shown, done = [], list[str]()
    free = named = BACKWARD_LEFT  # where the last bucket, and the text below it, end
    for i, name in enumerate(sizes):
        colour = colour_of(number[name])
        part = box(BACKWARD_LEFT + i * step, 22, step - 2, 30, colour)
        if step > 34:
            part += words(BACKWARD_LEFT + i * step + step / 2 - 1, 41, name[:8], anchor="middle", size=11, fill="#fff")
        names, bucket = groups[number[name]], number[name] + 1
        total = sum(sizes[each] for each in names)
        told = f"Backward computes the gradient of {name}, which goes into bucket {bucket}."
        if name == names[-1]:
            ready = BACKWARD_LEFT + (i + 1) * step
            begin, width = max(free, ready), BACKWARD_WIDE / 2 * total / sum(sizes.values())
            size = gib(total)
            text = min(max(begin, named), WIDTH - LETTER * max(len(size), len(f"bucket {bucket}")))
            part += (
                f'<path d="M{ready:.0f} 54V{96}" stroke="{colour}" stroke-dasharray="3 3"/>'
                + box(begin, 98, max(1.0, width - 1), 30, colour, opacity=0.8)
                + words(text, 144, f"bucket {bucket}", size=12)
                + words(text, 158, size, size=12)
            )
            free, named = begin + width, text + LETTER * (max(len(size), len(f"bucket {bucket}")) + 1.5)
            told = (
                f"The gradient of {name} closes bucket {bucket}, so its {gib(total)} are sent while backward goes on."
            )
            if i == len(sizes) - 1:
                told = (
                    f"Bucket {bucket} is closed by the last gradient, so nothing is left to compute while it is sent."
                )
        done.append(part)
        shown.append(Frame(told, [*done]))
    sent = ", ".join(gib(sum(sizes[name] for name in names)) for names in groups)
    label = f"backward fills {len(groups)} buckets, in this order: {sent}; each is sent when it is full"
    return film(base, shown, 166, label)


MEMORY_LEFT, MEMORY_TOP, MEMORY_TALL = 8.0, 40.0, 150.0
PHASES = (("forward", 0.0, 0.32), ("backward", 0.32, 0.84), ("optimizer", 0.84, 1.0))


def step(
    parameters: float,
    gradients: float,
    optimizer: float,
    activations: float,
    unit: str = "",
    *,
    top: float = 0.0,
    limit: float = 0.0,
    limit_name: str = "",
) -> Picture:
    """Draws what fills the memory of a rank: activations grow in forward and shrink in backward, while gradients
    appear; parameters and the optimizer's state are there all the time. All have the same unit, including `top`, the
    end of the axis, and `limit`, a line."""
    highest = top or parameters + optimizer + max(activations, gradients) or 1.0
    flat = [(0.0, 1.0), (1.0, 1.0)]
    layers = (
        ("parameters", parameters, flat),
        ("optimizer", optimizer, flat),
        ("gradients", gradients, [(0.0, 0.0), (0.32, 0.0), (0.84, 1.0), (1.0, 1.0)]),
        ("activations", activations, [(0.0, 0.0), (0.32, 1.0), (0.84, 0.0), (1.0, 0.0)]),
    )
    times = (0.0, 0.32, 0.84, 1.0)
    below, drawn, x = dict.fromkeys(times, 0.0), "", MEMORY_LEFT
    for name, size, course in layers:
        shares = dict(course)
        above = {time: below[time] + size * shares.get(time, 1.0) for time in times}
        there = " ".join(f"{_x_of_time(time):.0f},{_y_of_size(above[time], highest):.1f}" for time in times)
        back = " ".join(f"{_x_of_time(time):.0f},{_y_of_size(below[time], highest):.1f}" for time in reversed(times))
        drawn += f'<polygon points="{there} {back}" fill="{Palette.MEMORY[name]}" fill-opacity=".85"/>'
        label = f"{name} {size:.3g} {unit}".strip()
        drawn += f'<rect x="{x:.0f}" y="4" width="11" height="11" fill="{Palette.MEMORY[name]}"/>'
        drawn += words(x + 15, 14, label, size=12)
        x += 32 + 6.6 * len(label)
        below = above
    bottom = MEMORY_TOP + MEMORY_TALL
    for phase, begin, end in PHASES:
        drawn += words((_x_of_time(begin) + _x_of_time(end)) / 2, bottom + 18, phase, anchor="middle", size=12)
        drawn += f'<path d="M{_x_of_time(end):.0f} {MEMORY_TOP}V{bottom + 6}" stroke="{GREY}" stroke-dasharray="3 3"/>'
    peak = max(below.values())
    at = min(_x_of_time(time) for time, size in below.items() if size == peak)
    drawn += f'<circle cx="{at:.0f}" cy="{_y_of_size(peak, highest):.1f}" r="3"/>'
    drawn += words(at + 6, _y_of_size(peak, highest) - 5, f"peak {peak:.3g} {unit}".strip(), bold=True)
    if 0 < limit <= highest:
        y = _y_of_size(limit, highest)
        lines = f"M{MEMORY_LEFT} {y:.1f}H{WIDTH - MEMORY_LEFT}M{x:.0f} 10h22"  # the second one is in the legend
        drawn += f'<path d="{lines}" stroke="{Palette.LIMIT}" stroke-width="1.5" stroke-dasharray="5 3"/>'
        drawn += words(x + 27, 14, f"{limit_name} {limit:.3g} {unit}".strip(), size=12)
    return sheet(
        [drawn], bottom + 26,
        f"a step: {parameters:.3g} {unit} parameters, {optimizer:.3g} optimizer, {gradients:.3g} gradients, "
        f"{activations:.3g} activations, at most {peak:.3g} together",
    )  # fmt: skip


def _x_of_time(time: float) -> float:
    return MEMORY_LEFT + time * (WIDTH - 2 * MEMORY_LEFT)


def _y_of_size(size: float, highest: float) -> float:
    return MEMORY_TOP + MEMORY_TALL * (1 - size / highest)
