"""Sends the alerts of a run while it goes on: a process of its own, which reads the run folder and nothing else.

    python -m labkit.alerts.sender <run folder>  < a JSON list of addresses

The addresses come by a pipe, because they may hold secrets. It has the lowest priority. `alerts.json` in the run folder
says why an alert could not be sent, without the address.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

from labkit.alerts.addresses import Address
from labkit.alerts.events import Events
from labkit.files import log, write_json
from labkit.record import RunFolder

PERIOD_SECONDS = 1.0
SHARE = 50  # a look that takes a second is followed by a pause of 50


def main() -> None:
    os.nice(19)
    folder, addresses = RunFolder(sys.argv[1]), [Address(text) for text in json.load(sys.stdin)]
    events, failed = Events(folder), set[str]()
    while folder.path.is_dir():
        before = time.process_time()
        for event in events.poll():
            for address in addresses if event.is_alert else ():
                why = address.send(event.message, event.facts())
                if why and why not in failed:
                    failed.add(why)
                    log(f"an alert was not sent: {why}")
                    with suppress(OSError):  # a full disk
                        write_json(folder.alerts, {"failed": sorted(failed)})
        if events.has_ended:
            return
        time.sleep(max(PERIOD_SECONDS, SHARE * (time.process_time() - before)))


if __name__ == "__main__":
    main()
