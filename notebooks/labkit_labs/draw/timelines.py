"""Draws what ranks do in the course of a step, as rows of bars that fill while the picture plays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from labkit.charts import Lanes, Palette
from labkit.spans import COMMUNICATION, Span, bubble, elapsed
from labkit.words import seconds
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, boxes, drawn, key, stacked, words
from labkit_labs.draw.player import Film, Frame, film, moved

__all__ = ["Bar", "added", "grid", "grids", "lanes", "moments", "pipeline", "schedules", "sentence"]

LEFT, RIGHT = 64.0, 8.0
MOST_FRAMES = 64
SOON = 1e-9  # seconds, by which sums of the same durations differ


class Bar(NamedTuple):
    """`row` counts from above; `text` is written on the bar; times have any unit."""

    row: float
    kind: str
    text: str
    start: float
    end: float
    paler: bool = False


def moments(bars: Iterable[Bar]) -> list[float]:
    """When a bar begins or ends, in order; if that is too often, moments that are equally far apart."""
    times = sorted({round(time, 9) for bar in bars for time in (bar.start, bar.end)})
    if len(times) <= MOST_FRAMES:
        return times
    return [times[0] + (times[-1] - times[0]) * i / MOST_FRAMES for i in range(MOST_FRAMES + 1)]


def added(
    bars: Sequence[Bar], times: Sequence[float], x: Callable[[float], float], y: Callable[[float], float], tall: float
) -> list[list[str]]:
    """The marks of the bars up to each of the moments `times[1:]`, and at last of all bars in as few marks as possible;
    `x` of a time and `y` of a row. What has been drawn stays the same mark from moment to moment."""
    parts = [_between(bars, begin, end, x, y, tall) for begin, end in pairwise(times)]
    whole = _between(bars, times[0], times[-1], x, y, tall)
    return [*(parts[: number + 1] for number in range(len(parts))), [whole]]


def _between(
    bars: Sequence[Bar], begin: float, end: float, x: Callable[[float], float], y: Callable[[float], float], tall: float
) -> str:
    """The pieces of the bars from one moment to another, and the texts of the bars that end there."""
    pieces, texts = defaultdict(list), ""
    for bar in bars:
        first, last, wide = max(bar.start, begin), min(bar.end, end), x(bar.end) - x(bar.start)
        if last - first > SOON:
            left = x(first) - (0.4 if first > bar.start and not bar.paler else 0)  # or a seam would be seen
            right = x(last) - (min(1.0, wide / 4) if last > bar.end - SOON else 0)
            pieces[bar.kind, bar.paler].append((left, y(bar.row), max(0.1, right - left), tall))
        if bar.text and begin < bar.end - SOON and bar.end <= end + SOON and wide > 4 + 7 * len(bar.text):
            texts += f'<text x="{x(bar.start) + wide / 2:.1f}" y="{y(bar.row) + tall / 2 + 4:g}">{bar.text}</text>'
    drawn = "".join(
        boxes(places, Palette.SPANS[kind], ' fill-opacity=".6"' if paler else "")
        for (kind, paler), places in pieces.items()
    )
    head = '<g class="small" fill="#fff" text-anchor="middle" font-size="12">'
    return drawn + (f"{head}{texts}</g>" if texts else "")


def cursor(x: float, top: float, bottom: float) -> str:
    return f'<path d="M{x:.1f} {top:g}V{bottom:g}" stroke="{Palette.RED}" stroke-width="1.5"/>'


def sentence(parts: Iterable[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f"{text[:1].upper()}{text[1:]}."


def lanes(
    spans: Sequence[Span], title: str = "", *, moving: bool = False, names: Mapping[int, str] | None = None
) -> Picture:
    """Draws two lanes for each rank, computation above communication, in the colors of a run's timeline. With `moving`
    the lanes fill while the picture plays. `names` replaces the names of the spans' ranks."""
    called = dict(names or {rank: f"rank {rank}" for rank in sorted({span.rank for span in spans})})
    title = title or "a step"
    if not moving:
        return drawn(Lanes(spans, called, title))
    order = {rank: 2 * number for number, rank in enumerate(called)}
    bars = [Bar(order[s.rank] + (s.kind in COMMUNICATION), s.kind, "", s.start, s.end) for s in spans]
    times, left = moments(bars), 12.0 + 7.5 * max(map(len, called.values()))
    scale = (WIDTH - left - RIGHT) / times[-1]
    bottom = 44 + 46 * len(called)
    parts = added(bars, times, lambda t: left + t * scale, lambda row: 44 + 46 * (row // 2) + 19 * (row % 2), 16)
    kinds = dict.fromkeys(span.kind for span in spans)
    base = [words(0, 14, title, bold=True), key([(Palette.SPANS[kind], said(kind)) for kind in kinds], left, 34)]
    base += [words(0, 60 + 46 * number, name) for number, name in enumerate(called.values())]
    frames = []
    for number, (begin, end) in enumerate(pairwise(times)):
        now = [(called[s.rank], said(s.kind)) for s in spans if s.start < end - SOON and s.end > begin + SOON]
        does = {name: " and ".join(kind for each, kind in now if each == name) or "nothing" for name in called.values()}
        frames.append(Frame(_by_lane(does), [*parts[number], cursor(left + end * scale, 40, bottom)]))
    ends = {name: max(s.end for s in spans if s.rank == rank) for rank, name in called.items()}
    frames.append(Frame(_by_lane({name: f"over after {seconds(end)}" for name, end in ends.items()}), parts[-1]))
    return film(base, frames, bottom, f"{title}: {', '.join(map(said, kinds))}", seconds=1.5)


def _by_lane(does: Mapping[str, str]) -> str:
    if len({*does.values()}) == 1 < len(does):
        return sentence([f"all of them: {next(iter(does.values()))}"])
    return sentence(f"{name}: {what}" for name, what in does.items())


def said(kind: str) -> str:
    return {"weights": "weight gradients"}.get(kind, kind.replace("_", "-"))


def grid(spans: Sequence[Span], title: str = "", *, seconds: float | None = None, share: bool = True) -> Picture:
    """Draws a pipeline's step, a row for each rank; grey is bubble, numbers are micro-batches. `seconds` is the length
    of the axis, by default that of the step; `share` writes the bubble's share above."""
    placed = _from_zero(spans)
    names = {rank: f"rank {rank}" for rank in range(1 + max(span.rank for span in placed))}
    head = ": ".join(filter(None, [title, f"bubble {bubble(placed):.1%}" if share else ""]))
    return drawn(Lanes(placed, names, head, end=seconds or elapsed(placed), is_timed=False))


def grids(steps: Mapping[str, Sequence[Span]], *, share: bool = True) -> Picture:
    """Draws several pipelines' steps below each other, by title, on one axis that is as long as the longest."""
    longest = max(elapsed(_from_zero(spans)) for spans in steps.values())
    return stacked([grid(spans, title, seconds=longest, share=share) for title, spans in steps.items()])


def _from_zero(spans: Sequence[Span]) -> list[Span]:
    spans = [span for span in spans if span.chunk is not None]
    begin = min(span.start for span in spans)
    return [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]


def _bars(spans: Sequence[Span], ranks: int) -> list[Bar]:
    return [Bar(s.rank, s.kind, str(s.chunk), s.start, s.end, (s.stage or 0) >= ranks) for s in spans]


def computed(bars: Sequence[Bar], until: float) -> float:
    """The time that the rows are busy up to this moment, all rows together."""
    return sum(max(0.0, min(bar.end, until) - bar.start) for bar in bars)


DEVICE_TOP, DEVICE_TALL, ROW, TALL, SHARE = 8, 46, 26, 20, 54.0


def pipeline(spans: Sequence[Span], title: str = "", *, share: bool = True) -> Film:
    """Draws a pipeline's step: above, the ranks with what they compute now and what they send; below, the timeline of
    their utilization, which fills. Numbers are micro-batches, grey is bubble, and paler bars belong to the second stage
    of a rank. `share` writes how much of the time the ranks have computed so far."""
    spans = _from_zero(spans)
    ranks = 1 + max(span.rank for span in spans)
    bars, top = _bars(spans, ranks), DEVICE_TOP + DEVICE_TALL + 52
    times, room = moments(bars), WIDTH / ranks
    end, bottom = times[-1], top + ROW * ranks
    scale = (WIDTH - LEFT - (SHARE if share else RIGHT)) / end
    parts = added(bars, times, lambda t: LEFT + t * scale, lambda row: top + ROW * row, TALL)
    kinds = dict.fromkeys(span.kind for span in spans)
    marks = [(Palette.SPANS[kind], said(kind)) for kind in kinds]
    base = [
        words(0, top - 14, title, bold=True),
        key([*marks, (GREY, "bubble")], max(LEFT, 10 * len(title) + 16), top - 14),
    ]
    base += [words(WIDTH - 44, bottom + 15, "of all ranks' time, the ranks computed:", anchor="end")] if share else []
    for rank in range(ranks):
        y = top + ROW * rank
        base += [box(rank * room + 14, DEVICE_TOP, room - 28, DEVICE_TALL, line=GREY, round=8)]
        base += [words(0, y + 15, f"rank {rank}"), box(LEFT, y, end * scale, TALL, GREY, opacity=0.25, round=0)]
        base += [words(rank * room + room / 2, DEVICE_TOP + 18, f"rank {rank}", anchor="middle", bold=True)]
    frames = []
    for number, (begin, until) in enumerate(pairwise(times)):
        now = {s.rank: s for s in spans if s.start < until - SOON and s.end > begin + SOON}
        shown = [*parts[number], *(_device(rank, now.get(rank), room) for rank in range(ranks))]
        shown += [_sent(span, spans, room, ranks) for span in spans if abs(span.end - begin) < SOON]
        shown += [cursor(LEFT + until * scale, top - 4, bottom), _shares(bars, until, ranks, top) if share else ""]
        frames.append(Frame(_told(now, spans, until, ranks), shown))
    busy = computed(bars, end) / end / ranks
    last = f"The step is over: the ranks computed {busy:.0%} of the time, and the other {1 - busy:.0%} is the bubble."
    done = [*parts[-1], _shares(bars, end, ranks, top)] if share else parts[-1]
    frames.append(Frame(last if share else "The step is over: where a row is grey, the rank had nothing to do.", done))
    label = f"{title or 'a pipeline'}: {ranks} ranks" + (f", busy {busy:.1%} of the time" if share else "")
    return film(base, frames, bottom + (24 if share else 2), label, seconds=1.2)


def _device(rank: int, span: Span | None, room: float) -> str:
    text = f"{said(span.kind)} {span.chunk}" if span else "waits"
    where = rank * room + 14, DEVICE_TOP, room - 28, DEVICE_TALL
    back = box(*where, Palette.SPANS[span.kind], opacity=0.4, round=8) if span else ""
    size = 13 if room > 110 else 11
    return back + words(rank * room + room / 2, DEVICE_TOP + 37, text, anchor="middle", size=size)


def _sent(span: Span, spans: Sequence[Span], room: float, ranks: int) -> str:
    """What goes to the rank of the next stage, as a dot that arrives there."""
    stages = 1 + max(each.stage or 0 for each in spans)
    to = (span.stage or 0) + {"forward": 1, "backward": -1}.get(span.kind, stages)
    if not 0 <= to < stages or to % ranks == span.rank:
        return ""
    rank, sign = to % ranks, 1 if to % ranks > span.rank else -1
    x = rank * room + room / 2 - sign * (room / 2 - 14)
    dot = f'<circle cx="{x:.0f}" cy="{DEVICE_TOP + DEVICE_TALL / 2:g}" r="6" fill="{Palette.SPANS[span.kind]}"/>'
    return moved(dot, (span.rank - rank) * room + sign * (room - 28), 0)


def _shares(bars: Sequence[Bar], until: float, ranks: int, top: float) -> str:
    each = [computed([bar for bar in bars if bar.row == rank], until) / until for rank in range(ranks)]
    rows = "".join(
        f'<tspan x="{WIDTH}" y="{top + ROW * row + 15:g}">{busy:.0%}</tspan>'
        for row, busy in enumerate([*each, sum(each) / ranks])
    )
    return f'<text text-anchor="end">{rows}</text>'


def _told(now: Mapping[int, Span], spans: Sequence[Span], until: float, ranks: int) -> str:
    if ranks > 4:
        return f"{len(now)} of {ranks} ranks compute; the others have nothing to do."
    kinds: dict[str, list[str]] = defaultdict(list)
    for rank, span in sorted(now.items()):
        kinds[said(span.kind)].append(f"rank {rank} on micro-batch {span.chunk}")
    parts = [f"{kind}: {_and(who)}" for kind, who in kinds.items()]
    first = {rank: min(s.start for s in spans if s.rank == rank) for rank in range(ranks)}
    final = {rank: max(s.end for s in spans if s.rank == rank) for rank in range(ranks)}
    idle = [rank for rank in range(ranks) if rank not in now]
    early = [rank for rank in idle if first[rank] >= until - SOON]
    late = [rank for rank in idle if final[rank] < until - SOON]
    between = [rank for rank in idle if rank not in early and rank not in late]
    parts += [f"{_ranks(early)} {'wait' if early[1:] else 'waits'} for the first micro-batch"] if early else []
    parts += [f"{_ranks(between)} {'wait' if between[1:] else 'waits'} for another stage"] if between else []
    parts += [f"{_ranks(late)} {'have' if late[1:] else 'has'} finished"] if late else []
    return sentence(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {_and([*map(str, ranks)])}"


def _and(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if names[1:] else "") + names[-1]


MOMENTS = 33


def schedules(steps: Mapping[str, Sequence[Span]]) -> Film:
    """Draws several pipelines' steps on one axis, by title; at the right is how much of the time since the start the
    ranks have computed, up to the end of each step."""
    placed = {title: _from_zero(spans) for title, spans in steps.items()}
    ranks = {title: 1 + max(span.rank for span in spans) for title, spans in placed.items()}
    end = max(elapsed(spans) for spans in placed.values())
    scale, row, y = (WIDTH - 2 * SHARE) / end, 13, 0.0
    times = [end * i / MOMENTS for i in range(MOMENTS + 1)]
    tops, base, parts = dict[str, float](), list[str](), [list[str]() for _ in times]
    for title, spans in placed.items():
        y, tops[title] = y + 22, y + 22
        base.append(words(0, y - 6, title, bold=True))
        wide = elapsed(spans) * scale
        base += [box(0, y + row * rank, wide, row - 2, GREY, opacity=0.25, round=0) for rank in range(ranks[title])]
        bars = [bar._replace(text="", row=y + row * bar.row) for bar in _bars(spans, ranks[title])]
        for marks, more in zip(
            parts, added(bars, times, lambda time: time * scale, lambda top: top, row - 2), strict=True
        ):
            marks += more
        y += row * ranks[title] + 4
    frames = []
    for number, until in enumerate(times[1:]):
        busy, ended = dict[str, float](), list[str]()
        for title, spans in placed.items():
            at = min(until, elapsed(spans))
            busy[title] = computed(_bars(spans, ranks[title]), at) / at / ranks[title]
            ended += [title] if elapsed(spans) <= until + SOON else []
        shown = "".join(
            words(WIDTH, tops[title] + row * ranks[title] / 2 + 3, f"{of:.0%} busy", anchor="end", bold=title in ended)
            for title, of in busy.items()
        )
        most = max(busy, key=lambda title: busy[title])
        told = f"{_and(ended)} {'have' if ended[1:] else 'has'} finished" if ended else "no schedule has finished"
        told = sentence([told, f"up to now {most} has kept its ranks busiest, {busy[most]:.0%} of the time"])
        frames.append(Frame(told, [*parts[number], shown, cursor(until * scale, 0, y)]))
    frames[-1] = Frame(told, [*parts[-1], shown])
    label = "; ".join(f"{title}: bubble {bubble(spans):.1%}" for title, spans in placed.items())
    return film(base, frames, y, label, seconds=0.6)
