"""States what else the machine did during a run that may have slowed it down: other programs, other runs of labkit, a
battery, heat. What the machine does not say is not stated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from labkit.record import HostHistory, RunReader, State
from labkit.text import plain

LARGE = 0.25  # of the cores, or of the time
OVERLAPS, SHORTEST_SECONDS = 0.05, 2.0  # of the run's time, and at least
MOST = 4  # of the same may be true of hundreds of hosts


@dataclass(frozen=True)
class Disturbance:
    """What happened as a `sentence`, and in a word or two as a `label`."""

    label: str
    sentence: str


def disturbances(reader: RunReader, state: State) -> list[Disturbance]:
    """The first MOST, in the order of the hosts: of a run that goes on over the last minute, once it has ended over all
    of its time."""
    several = len(reader.hosts) > 1
    every = (
        disturbance
        for name, host in sorted(reader.hosts.items())
        for disturbance in _of_host(host, f" on {plain(name)}" if several else "", reader, state)
    )
    return [*islice(every, MOST)]


def _of_host(host: HostHistory, where: str, reader: RunReader, state: State) -> Iterator[Disturbance]:
    conditions = host.conditions if state.is_final else host.recent_conditions
    if overlaps := _overlaps(host, state):
        same = "GPUs" if reader.folder.glimpsed_manifest().gpus else "cores"
        yield Disturbance("overlapped", f"{overlaps}, on the same {same}{where}")
    if conditions.crowded >= LARGE:
        use = "used" if state.is_final else "use"
        yield Disturbance("other load", f"other programs {use} {conditions.others:.0%} of these cores{where}")
    if conditions.throttled >= LARGE:
        slowed = f"heat slowed the processor{where} down for {conditions.throttled:.0%} of the time"
        yield Disturbance("hot", slowed)
    if conditions.on_battery >= LARGE:
        yield Disturbance("battery", f"the machine{where} ran on its battery")
    for number, device in enumerate(host.used_by({history.uuid for history in reader.ranks.values() if history.uuid})):
        name = f"GPU {number}{f' {plain(device.name)}' if device.name else ''}{where}"
        if device.shared >= LARGE * device.samples > 0:
            share = device.shared / device.samples
            yield Disturbance("shared GPU", f"other processes had memory on {name} for {share:.0%} of the time")
        if device.throttled >= LARGE * device.samples > 0:
            yield Disturbance("hot", f"heat slowed {name} down for {device.throttled / device.samples:.0%} of the time")


def _overlaps(host: HostHistory, state: State) -> str:
    """The run that was active beside this one for longest, and when."""
    shortest = max(SHORTEST_SECONDS, OVERLAPS * state.seconds)
    long = {run: times for run, times in host.runs.items() if times[1] - times[0] >= shortest}
    if not long:
        return ""
    run = max(long, key=lambda run: long[run][1] - long[run][0])
    start, end = (time.strftime("%H:%M:%S", time.localtime(seconds)) for seconds in long[run])
    more = f", and with {len(long) - 1} more" if len(long) > 1 else ""
    name = plain(run.partition("-")[2] or run)  # enough to attach to it
    return f"it overlapped with run {name} from {start} to {end}{more}"
