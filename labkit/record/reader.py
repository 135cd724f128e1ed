"""Reading a run back: its ranks' histories, and all rows on request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import Decimal

from labkit.files import tail_text
from labkit.record.fold import NodeFolds
from labkit.record.folder import RunFolder
from labkit.record.history import KEPT_CHANGES, HostHistory, RankHistory
from labkit.record.log_numbers import STREAMS, numbers_in
from labkit.record.manifest import Nodes
from labkit.record.records import Event, Record, Records, Scalar
from labkit.series import Series

LONGEST_NAME = 60  # in a chart
LOG_BYTES, FEWEST_LINES = 1 << 15, 3  # in which names are looked for, and in how many lines
LOG_SECONDS = 5.0  # between two looks, each of which takes up to 20 ms


def _change(name: str, value: Scalar) -> str:
    if value is None:
        return f"{name} as scheduled"
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"


class RunReader:
    """All ranks of a run, through all its attempts. `poll()` reads only new records, so watching a long run costs no
    more than a short one.

    Of many ranks on several nodes it reads what their supervisors have folded (`folds`) and rank 0's own records;
    `ranks` are then those that stand out. `each_rank=True` reads the records of all ranks.
    """

    def __init__(self, folder: RunFolder, *, each_rank: bool = False):
        self.folder = folder
        self.ranks: dict[int, RankHistory] = {}
        self.folds: NodeFolds | None = None
        self._own: dict[int, RankHistory] = {}  # read from the ranks' own files
        self.attempt = folder  # the newest, as of the last poll
        self._nodes = [] if each_rank else _folded_nodes(folder.glimpsed_manifest().nodes)
        self._launched = folder.glimpsed_manifest().launched
        self.hosts: dict[str, HostHistory] = {}
        self._read: dict[int, int] = {}  # the attempt that each rank's history has reached
        self._events: list[Records] = []  # of each attempt
        self._numbers_in_log: dict[str, list[Decimal]] = {}
        self._look_at_log = 0.0
        self.changes: list[tuple[float, str]] = []  # seconds since the launch, and what the owner set then

    def poll(self) -> bool:
        """Read what all ranks have written since the last call; returns whether there was anything."""
        attempts = self.folder.attempts()
        self.attempt = attempts[-1]
        from_log = self.folder.metrics_from_log()
        is_folded = bool(self._nodes) and (self.folds is not None or NodeFolds.exist(self.attempt))
        for position, attempt in enumerate(attempts):
            if position == len(self._events):
                self._events.append(Records(attempt.events))
            self._take_events(self._events[position].poll())
            for rank in (0,) if is_folded else attempt.started_ranks():
                if rank not in self._own:
                    self._own[rank] = RankHistory(rank, attempt.metrics(rank), self._launched)
                    self._read[rank] = position
                if rank == 0:
                    self._own[rank].from_log = from_log
                if position > self._read[rank]:
                    self._own[rank].continue_with(attempt.metrics(rank))
                    self._read[rank] = position
        if is_folded:
            return self._poll_folds(attempts)
        self.ranks = self._own = dict(sorted(self._own.items()))  # ranks start in any order
        for path in self.folder.hosts.glob("*.jsonl"):
            self.hosts.setdefault(path.stem, HostHistory(path.stem, path))
        histories: list[RankHistory | HostHistory] = [*self.ranks.values(), *self.hosts.values()]
        polls = [history.poll() for history in histories]
        return any(polls)

    def _poll_folds(self, attempts: list[RunFolder]) -> bool:
        if self.folds is None or self.folds.attempts != len(attempts):
            self.folds = NodeFolds(attempts, self._nodes)
            self._own = {0: self._own[0]}  # others were read before the first fold
        polls = [self._own[0].poll(), self.folds.poll()]
        self.ranks, self.hosts = {**self.folds.ranks}, self.folds.machines
        return any(polls)

    @property
    def reporting(self) -> list[RankHistory]:
        """The ranks whose own records are read: all of them, or of many the first."""
        return list(self._own.values())

    @property
    def current(self) -> dict[int, RankHistory]:
        """`ranks` without those that are gone since the run was restarted on fewer."""
        header = self.reporting[0].header if self._own else None
        size = header.world_size if header else None
        return {rank: history for rank, history in self.ranks.items() if size is None or rank < size}

    @property
    def rank_numbers(self) -> range | list[int]:
        """The ranks of the newest attempt that have started; all of them in a folded run."""
        return range(self.folds.world_size) if self.folds else list(self.current)

    def lines(self, name: str) -> dict[int, Series]:
        """A metric over time by rank; for a folded run only one line, its median and range over all ranks."""
        if self.folds:
            return {0: self.folds.series[name]}
        return {rank: history.series[name] for rank, history in self.ranks.items()}

    def samples(self) -> list[float]:
        """How many samples each rank has processed; for a folded run the mean as that of each."""
        if self.folds:
            return [self.folds.samples / self.folds.world_size] * self.folds.world_size
        return [h.totals["samples"] for h in self.ranks.values() if h.totals["samples"]]

    def throughputs(self) -> list[float]:
        """Samples per second of each rank, over its last steps; for a folded run the mean as that of each."""
        if self.folds:
            return [self.folds.throughput / self.folds.world_size] * self.folds.world_size
        return [rate for h in self.current.values() if (rate := h.recent_throughput) is not None]

    def numbers_in_log(self) -> dict[str, list[Decimal]]:
        """The numbers in several lines at the end of the log of rank 0, some seconds ago, by the names before them."""
        if time.monotonic() >= self._look_at_log:
            text = "\n".join(tail_text(self.attempt.log(0, stream), LOG_BYTES) for stream in STREAMS)
            self._numbers_in_log = numbers_in(text, FEWEST_LINES)
            self._look_at_log = time.monotonic() + LOG_SECONDS
        return self._numbers_in_log

    def _take_events(self, events: Sequence[Record]) -> None:
        for event in events:
            if not isinstance(event, Event):
                continue
            if event.kind == "set" and event.values and not event.has_errors and event.time is not None:
                text = ", ".join(_change(name, value) for name, value in event.values.items())
                if len(self.changes) < KEPT_CHANGES:
                    self.changes.append((event.time - (self._launched or event.time), text[:LONGEST_NAME]))

    @property
    def restarts(self) -> list[float]:
        """When later attempts started, in seconds since the launch."""
        return next((history.restarts for history in self.reporting), [])

    def read_all(self) -> RunReader:
        """Read all records of a run that has ended."""
        self.poll()
        for history in self.reporting:
            history.read_all()
        for host in self.hosts.values():
            host.read_all()
        return self

    @property
    def undecodable(self) -> int:
        """Lines that were not records: the disk was full, or another program wrote them."""
        return self.folds.undecodable if self.folds else sum(h.undecodable for h in self.ranks.values())

    @property
    def dropped(self) -> int:
        """Measurements that could not be written."""
        return self.folds.dropped if self.folds else sum(h.end.dropped for h in self.ranks.values() if h.end)


def _folded_nodes(nodes: Nodes | None) -> list[range]:
    """The ranks of each node, if the run has so many that they are folded."""
    if nodes is None or not nodes.are_folded:
        return []
    return [nodes.ranks_of(node) for node in range(nodes.count)]
