"""Reading a run back: its ranks' histories, and all rows on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.record.folder import RunFolder
from labkit.record.hosts import HostHistory
from labkit.record.manifest import Nodes
from labkit.record.measured.fold import NodeFolds, are_folded
from labkit.record.measured.metrics_file import number
from labkit.record.measured.rank_history import KEPT_CHANGES, RankHistory
from labkit.record.measured.series import Series
from labkit.record.records import PASSED, PHASES, Event, Events, Header, Losses, Record, Records, Report, Scalar, Step

__all__ = ["COLUMNS", "Row", "RunReader", "rows"]

Row = dict[str, Scalar]
MEMORY = ("rss", "allocated", "reserved", "peak", "retries")

LONGEST_NAME = 60  # in a chart
# Every row has these columns, even if nothing was recorded.
COLUMNS = (
    "rank",
    "attempt",
    "step",
    "time",
    "samples",
    *PHASES,
    "loss",
    "steps",
    "step_seconds",
    "step_seconds_min",
    "step_seconds_max",
    "throughput",
)


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
        self._events: list[Events] = []  # of each attempt
        self.changes: list[tuple[float, str]] = []  # seconds since the launch, and what the owner set then

    def poll(self) -> bool:
        """Read what all ranks have written since the last call; returns whether there was anything."""
        attempts = self.folder.attempts()
        self.attempt = attempts[-1]
        is_folded = bool(self._nodes) and (self.folds is not None or NodeFolds.exist(self.attempt))
        for position, attempt in enumerate(attempts):
            if position == len(self._events):
                self._events.append(Events(attempt.events))
            self._take_events(self._events[position].poll())
            for rank in (0,) if is_folded else attempt.started_ranks():
                if rank not in self._own:
                    self._own[rank] = RankHistory(rank, attempt.metrics(rank), self._launched)
                    self._read[rank] = position
                elif position > self._read[rank]:
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
        """The ranks of the newest attempt that have started; of a folded run all."""
        return range(self.folds.world_size) if self.folds else list(self.current)

    def lines(self, name: str) -> dict[int, Series]:
        """A metric over time by rank; of a folded run only one line, its median and range over all ranks."""
        if self.folds:
            return {0: self.folds.series[name]}
        return {rank: history.series[name] for rank, history in self.ranks.items()}

    def samples(self) -> list[float]:
        """How many samples each rank has processed; of a folded run the mean for each."""
        if self.folds:
            return [self.folds.samples / self.folds.world_size] * self.folds.world_size
        return [h.totals["samples"] for h in self.ranks.values() if h.totals["samples"]]

    def throughputs(self) -> list[float]:
        """Samples per second of each rank, from its newest record; of a folded run the mean for each."""
        if self.folds:
            return [self.folds.throughput / self.folds.world_size] * self.folds.world_size
        return [h.latest["throughput"] for h in self.current.values() if "throughput" in h.latest]

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
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
    if nodes is None or not are_folded(nodes.world_size, nodes.count):
        return []
    return [nodes.ranks_of(node) for node in range(nodes.count)]


def rows(folder: RunFolder) -> Iterator[Row]:
    """One row per attempt, rank and logged step, from all records: the probe's values, overridden by the script's
    reports for the same step. A report without a step goes into the row of the preceding step in the rank's file, or,
    unless the name is taken, into the first row; a rank without steps has one row of these. Times are in seconds since
    the rank's first start, memory in bytes."""
    first: dict[int, float] = {}  # each rank's first start by the wall clock
    for position, attempt in enumerate(folder.attempts(), 1):
        for rank in attempt.started_ranks():
            records = Records(attempt.metrics(rank)).read_all()
            wall = records[0].time if records and isinstance(records[0], Header) else None
            first.setdefault(rank, wall or 0.0)
            since = max(0.0, (wall or 0.0) - first[rank])
            for row in _rows_of_rank(records, since):
                key: Row = {"rank": rank, "attempt": position}
                yield key | row | key


def _rows_of_rank(records: Sequence[Record], since: float) -> Iterator[Row]:
    measured: dict[int, Row] = {}
    reported: dict[int, Row] = {}
    before: Row = {}  # reports before the first step
    first = newest = None
    steps_before = 0
    losses = Losses()
    for record in records:
        if not isinstance(record, Step | Report):
            continue
        loss, void_after = losses.take(record)
        if void_after is not None:
            for step, row in measured.items():
                if not void_after or step > steps_before + void_after:
                    row.pop("loss", None)
        if isinstance(record, Report):
            steps_before = record.start_step or steps_before
            values, rows_of_kind = _of_report(record), reported
        else:
            values, rows_of_kind = _of_step(record, loss), measured
        if record.step is not None:
            newest = record.step + (steps_before if isinstance(record, Step) else 0)
            first = newest if first is None else first
            values |= {"step": newest, "time": since + record.t - records[0].t}
            rows_of_kind.setdefault(newest, {}).update(values)
        elif isinstance(record, Report):
            (before if newest is None else reported.setdefault(newest, {})).update(values)
    if losses.are_scripts:
        for row in measured.values():
            row.pop("loss_of", None)
    if first is None and before:
        first, measured = steps_before, {steps_before: {"step": steps_before, "time": since}}
    for step in sorted(measured.keys() | reported.keys()):
        row = measured.get(step, {}) | reported.get(step, {})
        yield row | {name: value for name, value in before.items() if step == first and name not in row}


def _of_report(record: Report) -> Row:
    values = {k: v for k, v in record.values.items() if k not in ("step", "time")}
    return {k: v if (n := number(v)) is None else n for k, v in values.items()}


def _of_step(record: Step, loss: float | None) -> Row:
    row: Row = {phase: None if s is None else s / record.steps for phase, s in record.phases.items()}
    row |= {name: value for name in MEMORY if (value := getattr(record, name)) is not None}
    if loss is not None:
        row["loss"] = loss
    if record.loss_of != PASSED:
        row["loss_of"] = record.loss_of
    if record.training > 1:
        row["training"] = record.training
    if record.is_rest:
        return row
    row |= {"samples": record.samples, "steps": record.steps, "step_seconds": record.seconds / record.steps}
    row |= {"step_seconds_min": record.fastest, "step_seconds_max": record.slowest}
    row["throughput"] = record.samples / record.seconds if record.samples and record.seconds else None
    return row
