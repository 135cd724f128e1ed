"""Prints what happens to runs, in a terminal, one line for each event."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import labkit
from labkit.alerts import Address, Event, Events, addresses_of
from labkit.errors import LabError
from labkit.text import plain

PERIOD_SECONDS = 1.0


def add_watch_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    watch = verb("watch", _watch, "print what happens to runs until they have ended; Ctrl-C leaves them running")
    watch.add_argument("which", nargs="*", metavar="RUN", help="ids, parts of them, paths, or latest (default: active)")
    watch.add_argument("--alert", action="append", metavar="ADDRESS", help="send alerts there: docs/how_to/alerts.md")
    watch.add_argument("--json", action="store_true", help="print an object for each event, one a line")


def _watch(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Returns 1 if a run failed or was lost, else 4 if its own condition stopped one, else 0."""
    addresses = [Address(text) for text in addresses_of(arguments.alert)]
    if arguments.which:
        runs = [labkit.attach(which, runs_dir=arguments.runs_dir) for which in arguments.which]
    else:
        runs = [run for run in labkit.runs(runs_dir=arguments.runs_dir) if not run.status().is_final]
    if not runs:
        raise LabError("no run is active; name one that has ended to print how it did")
    watched = [Events(run.folder, run.status) for run in runs]
    while watched:
        for event in (event for events in watched for event in events.poll()):
            _tell(event, addresses, as_json=arguments.json)
        watched = [events for events in watched if not events.has_ended]
        time.sleep(PERIOD_SECONDS if watched else 0.0)
    states = [run.status() for run in runs]
    if any(state.state in ("failed", "lost") for state in states):
        return 1
    return 4 if any(state.cause and state.cause.kind == "stop_if" for state in states) else 0


def _tell(event: Event, addresses: list[Address], *, as_json: bool) -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    print(json.dumps(event.facts()) if as_json else f"{clock} {event.message}", flush=True)
    for address in addresses if event.is_alert else ():
        if why := address.send(event.message, event.facts()):
            print(plain(f"labkit: an alert was not sent: {why}"), file=sys.stderr, flush=True)
