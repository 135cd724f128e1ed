"""The ranks of a node, folded by its supervisor into one small file, for readers of runs with many ranks.

`nodes/<k>/fold.json` is rewritten in place every second. It has the node's range of each metric at that moment, its own
work by rank, the readings of its machine, and the ranks that stand out: the one that works alone for the shortest time,
the median one, the longest one, those with the most memory, the fewest steps, or a loss that is not a number.
`nodes/<k>/fold-series.json` has the same ranges since the launch, in bounded memory, for a reader that comes later.
Times are in seconds since the launch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from labkit.dataclass_json import from_json
from labkit.files import finite, in_parallel, read_json, read_text, write_json
from labkit.record.folder import RunFolder
from labkit.record.history import SERIES, HostHistory, RankHistory
from labkit.record.records import PHASES, End, Model
from labkit.series import Point, Series
from labkit.tail import LATEST_SECONDS
from labkit.text import slug

BLOCK_BYTES = 4096  # the file's size is a multiple
SERIES_EVERY = 10  # folds
BINS = 64  # of a series in the file, about as many as a picture shows
EACH_RANK = 128  # up to these, a reader keeps each rank's own work
FULLER = 1.02
FOLDED = ("seconds", "restarts", *PHASES)  # per step, of a rank that stands out


class NodeFold:
    """Folds the ranks of one node of an attempt. `home` is the node's folder, `run` the run's."""

    def __init__(self, run: RunFolder, attempt: RunFolder, home: RunFolder, ranks: range):
        self._run, self._attempt, self._home, self._all = run, attempt, home, ranks
        self._launched = run.glimpsed_manifest().launched
        self._ranks: dict[int, RankHistory] = {}
        self._machine: HostHistory | None = None
        self._series = {name: Series(bins=BINS) for name in SERIES}
        self._own: dict[int, Series] = {}
        self._voided: dict[int, float | None] = {}  # by rank, as of the last fold
        self._cut: float | None = None  # the newest time from which losses were found not to count
        self._count = 0

    def update(self) -> None:
        """Read what the ranks have written and rewrite the files. Raises OSError."""
        for rank in self._all:
            if rank not in self._ranks and self._attempt.rank(rank).is_dir():
                self._ranks[rank] = RankHistory(rank, self._attempt.metrics(rank), self._launched)
        for history in self._ranks.values():
            history.poll()
        self._forget_losses()
        text = json.dumps(_rounded(self._newest()), separators=(",", ":")).encode() + b"\n"
        file = os.open(self._home.fold, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, text.ljust(-(-len(text) // BLOCK_BYTES) * BLOCK_BYTES), 0)
        finally:
            os.close(file)
        if self._count % SERIES_EVERY == 0:
            own = {str(rank): series.points() for rank, series in self._own.items()}
            series = {name: series.points() for name, series in self._series.items()}
            write_json(self._home.fold_series, _rounded({"series": series, "own": own}))
        self._count += 1

    def _forget_losses(self) -> None:
        """Forget the losses that a rank now knows not to count."""
        voided = {rank: history.voided for rank, history in self._ranks.items()}
        new = [at for rank, at in voided.items() if at is not None and at != self._voided.get(rank)]
        if new:
            self._cut = min(new)
            self._series["loss"].cut(self._cut)
        self._voided = voided

    def _newest(self) -> dict[str, Any]:
        every = list(self._ranks.values())
        alive = [history for history in every if history.step]
        ranges: dict[str, tuple[float, float, float]] = {}
        seen = max((history.seen for history in every), default=0.0)
        host = next((history.host for history in every if history.host), "")
        for name in SERIES:
            lines = [h.series[name] for h in alive if name != "loss" or h.losses.newest is not None]
            if values := [line.last[-1] for line in lines if line.last]:
                ranges[name] = low, high, middle = min(values), max(values), median(values)
                self._series[name].extend([seen] * 3, [low, high, middle])
        for history in alive:
            if own := history.series["own_seconds"].last:
                self._own.setdefault(history.rank, Series(bins=BINS)).add(seen, own[-1])
        return {
            "v": 1,
            "started": len(every),
            "seen": seen,
            "host": host,
            "machine": self._read_machine(host),
            "ranges": ranges,
            "void": self._cut,
            "own": {rank: series.last[-1] for rank, series in self._own.items()},
            "throughput": sum(history.recent_throughput or 0.0 for history in alive),
            "samples": sum(history.totals["samples"] for history in alive),
            "undecodable": sum(history.undecodable for history in every),
            "dropped": sum(history.end.dropped for history in every if history.end),
            "ranks": [_shown(history) for history in standing_out(every)],
        }

    def _read_machine(self, host: str) -> dict[str, Any] | None:
        if self._machine is None and host:
            self._machine = HostHistory(slug(host), self._run.host(host))
        if self._machine is None:
            return None
        self._machine.poll()
        return self._machine.as_dict()


def standing_out(histories: Sequence[RankHistory]) -> list[RankHistory]:
    """The ranks that represent a node, in order."""
    by_work = sorted((h for h in histories if h.step), key=lambda h: h.own_seconds or h.recent_step_seconds)
    if not by_work:
        return list(histories[:1])
    shown = {h.rank: h for h in (by_work[0], by_work[len(by_work) // 2], by_work[-1])}
    fullest, behind = max(histories, key=lambda h: h.memory_peak), min(histories, key=lambda h: h.step)
    if fullest.memory_peak > FULLER * max(h.memory_peak for h in shown.values()):
        shown[fullest.rank] = fullest
    if behind.step < min(h.step for h in shown.values()):
        shown[behind.rank] = behind
    lost = sorted((h for h in histories if h.lost_at is not None), key=lambda h: h.lost_at or 0)
    retried = max(histories, key=lambda h: h.allocation_retries)
    shown |= {h.rank: h for h in (*lost[:1], *([retried] if retried.allocation_retries else []))}
    return [shown[rank] for rank in sorted(shown)]


def _shown(history: RankHistory) -> dict[str, Any]:
    return {
        "rank": history.rank,
        "device": history.device,
        "held": history.held,
        "uuid": history.uuid,
        "step": history.step,
        "latest": history.latest,
        "recent": {phase: history.recent_seconds(phase) for phase in FOLDED},
        "totals": history.totals,
        "communicates": history.communicates,
        "peak": history.memory_peak,
        "limit": history.memory_limit,
        "lost_at": history.lost_at,
        "finite_at": history.finite_at,
        "retries": history.allocation_retries,
        "end": {"outcome": history.end.outcome, "passes": history.end.passes} if history.end else {},
    }


def _rounded(value: Any) -> Any:
    """The value with five significant digits, except large numbers; nan and infinity, which JSON lacks, as None."""
    if isinstance(value, float):
        return None if finite(value) is None else value if abs(value) >= 1e5 else float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


NO_SERIES = {name: Series() for name in SERIES}


class FoldedRank(RankHistory):
    """A rank that stands out on its node, as its supervisor folded it; it has no series."""

    def __init__(self, attempt: RunFolder, rank: int, host: str, node_ranks: range):
        super().__init__(rank, attempt.metrics(rank))
        self.series = NO_SERIES
        self._host, self._node_ranks = host, node_ranks
        self._recent_seconds: dict[str, float] = {}

    def take(self, shown: Mapping[str, Any], host: str) -> None:
        """Take over what is in the file. Raises KeyError, TypeError or ValueError if it is damaged."""
        self._host, self.step = host, int(shown["step"])
        self.model = from_json(Model, {"t": 0.0, **shown})
        self.latest = {str(k): n for k, v in shown["latest"].items() if (n := finite(v)) is not None}
        self.totals = self.totals | {str(k): finite(v) or 0.0 for k, v in shown["totals"].items()}
        self._recent_seconds = {phase: float(shown["recent"].get(phase) or 0.0) for phase in FOLDED}
        self.communicates, self.memory_peak = bool(shown["communicates"]), float(shown["peak"])
        self.lost_at = None if shown["lost_at"] is None else int(shown["lost_at"])
        self.finite_at = int(shown["finite_at"])
        self.allocation_retries, end = float(shown["retries"]), shown["end"]
        self.end = from_json(End, {"t": 0.0, **end}) if end else None

    @property
    def host(self) -> str:
        return self._host

    @property
    def node_ranks(self) -> range:
        return self._node_ranks

    def recent_seconds(self, phase: str) -> float:
        return self._recent_seconds.get(phase, 0.0)


class NodeFolds:
    """What the supervisors of the nodes have folded; `attempts` are the run's so far, of which the last is followed,
    `nodes` the ranks of each node. Reading it again costs one small file a node.

    `series` has the range of every metric over all ranks, its `last` the median. `own` has the own work by rank, or,
    with many ranks, the longest of a node by its first rank; `shown` the ranks that each stands for, `hosts` where they
    are. `ranks` are those that stand out.
    """

    def __init__(self, attempts: Sequence[RunFolder], nodes: Sequence[range]):
        self._attempt, self._nodes = attempts[-1], nodes
        self._files = [self._attempt.node(node).fold for node in range(len(nodes))]
        self.attempts = len(attempts)
        self.world_size = sum(map(len, nodes))
        self.series = {name: Series(bins=4 * BINS) for name in SERIES}
        self.own: dict[int, Series] = {}
        self.shown: dict[int, range] = {}
        self.hosts: dict[int, str] = {}
        self.machines: dict[str, HostHistory] = {}
        self.ranks: dict[int, FoldedRank] = {}
        self.seen = self.samples = self.throughput = 0.0
        self.undecodable = self.dropped = self.started = 0
        self.latest: dict[str, float] = {}  # the medians over the ranks that have one now
        self._texts: dict[int, str] = {}
        self._made: dict[int, FoldedRank] = {}
        self._newest: dict[int, dict[str, Any]] = {}
        for attempt in attempts:
            self._take_series([attempt.node(node).fold_series for node in range(len(nodes))])

    @staticmethod
    def exist(attempt: RunFolder) -> bool:
        return attempt.node(0).fold.exists()

    def poll(self) -> bool:
        """Read the newest fold of every node; returns whether any was new."""
        changed = False
        for node, text in enumerate(in_parallel(_read, self._files)):
            if text is None or text == self._texts.get(node):
                continue
            try:
                fold = _sound(json.loads(text))
                self._take_node(self._nodes[node], fold)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
                continue  # read while it was written, another version's, or damaged
            if fold["void"] is not None and fold["void"] != self._newest.get(node, {}).get("void"):
                self.series["loss"].cut(fold["void"])
            self._texts[node], self._newest[node], changed = text, fold, True
        if changed:
            self._take_all(list(self._newest.values()))
        return changed

    def _take_node(self, ranks: range, fold: Mapping[str, Any]) -> None:
        host = str(fold["host"])
        for rank in ranks:
            self.ranks.pop(rank, None)
        for shown in fold["ranks"]:
            if (rank := int(shown["rank"])) in ranks:
                if rank not in self._made:
                    self._made[rank] = FoldedRank(self._attempt, rank, host, ranks)
                self._made[rank].take(shown, host)
                self.ranks[rank] = self._made[rank]
        own = {int(rank): float(seconds) for rank, seconds in fold["own"].items()}
        for rank, seconds in self._longest(ranks, own):
            self.own.setdefault(rank, Series(bins=BINS)).add(float(fold["seen"]), seconds)
            self.hosts[rank] = host
        if machine := fold["machine"]:
            name = slug(host)
            self.machines[name] = HostHistory.of(name, machine)

    def _longest(self, ranks: range, own: Mapping[int, float]) -> Iterable[tuple[int, float]]:
        """The own work to keep: each rank's, or with many ranks the longest."""
        if self.world_size <= EACH_RANK:
            self.shown |= {rank: range(rank, rank + 1) for rank in own}
            return own.items()
        self.shown[ranks.start] = ranks
        return [(ranks.start, max(own.values()))] if own else []

    def _take_all(self, newest: Sequence[Mapping[str, Any]]) -> None:
        self.ranks = dict(sorted(self.ranks.items()))
        self.seen, self.latest = max(fold["seen"] for fold in newest), {}
        for name in SERIES:
            if ranges := [each for fold in newest if (each := fold["ranges"].get(name))]:
                low, high, self.latest[name] = _together(ranges)
                self.series[name].extend([self.seen] * 3, [low, high, self.latest[name]])
        self.throughput, self.samples = (sum(fold[name] for fold in newest) for name in ("throughput", "samples"))
        self.undecodable, self.dropped, self.started = (
            sum(fold[name] for fold in newest) for name in ("undecodable", "dropped", "started")
        )

    def _take_series(self, files: Sequence[Path]) -> None:
        """Take over what was recorded before this reader came."""
        kept = [value if isinstance(value, dict) else {} for value in in_parallel(read_json, files)]
        for name, series in self.series.items():
            _add_together(series, [_points(value, "series", name) for value in kept])
        for ranks, value in zip(self._nodes, kept, strict=True):
            each = {rank: _points(value, "own", str(rank)) for rank in ranks}
            if self.world_size > EACH_RANK:
                each = {ranks.start: [(x, low, high, high) for line in each.values() for x, low, high, _ in line]}
            for rank, points in each.items():
                if points:
                    _add_together(self.own.setdefault(rank, Series(bins=BINS)), [points], longest=True)


def _sound(fold: Any) -> dict[str, Any]:
    """The fold with the numbers that are computed with. Raises ValueError, TypeError, KeyError or AttributeError."""
    numbers = {name: float(fold[name]) for name in ("seen", "throughput", "samples")}
    counts = {name: int(fold[name]) for name in ("undecodable", "dropped", "started")}
    ranges = {name: (float(low), float(high), float(last)) for name, (low, high, last) in fold["ranges"].items()}
    if not 0 <= numbers["seen"] < LATEST_SECONDS:
        raise ValueError(f"a fold at {numbers['seen']} s")
    return {**fold, **numbers, **counts, "ranges": ranges, "void": finite(fold.get("void"))}


def _read(path: Path) -> str | None:
    try:
        return read_text(path)
    except OSError:  # not there yet
        return None


def _points(value: Mapping[str, Any], kind: str, name: str) -> list[Point]:
    lines = value.get(kind)
    line = lines.get(name) if isinstance(lines, dict) else None
    points: list[Point] = []
    for point in line if isinstance(line, list) else []:
        numbers = [n for each in point if (n := finite(each)) is not None] if isinstance(point, list) else []
        if len(numbers) == 4 and 0 <= numbers[0] < LATEST_SECONDS:
            points.append((numbers[0], numbers[1], numbers[2], numbers[3]))
    return points


def _together(ranges: Sequence[Sequence[float]], *, longest: bool = False) -> tuple[float, float, float]:
    """(low, high, last) of several nodes."""
    high = max(each[1] for each in ranges)
    return min(each[0] for each in ranges), high, high if longest else median(each[2] for each in ranges)


def _add_together(series: Series, lines: Sequence[Sequence[Point]], *, longest: bool = False) -> None:
    """Add the points of several nodes, whose times differ a little."""
    times = [x for line in lines for x, *_ in line]
    if not times:
        return
    start, width = min(times), (max(times) - min(times)) / BINS or 1.0
    columns: dict[int, list[tuple[float, float, float]]] = {}
    for line in lines:
        for x, *values in line:
            columns.setdefault(int((x - start) / width), []).append((values[0], values[1], values[2]))
    for column in sorted(columns):
        series.extend([start + column * width] * 3, _together(columns[column], longest=longest))
