"""torchrun and the ranks of one node in one process without torch, for `many_nodes.py`.

python -I -S simulated_torchrun.py ATTEMPT_FOLDER FIRST_RANK RANKS EVENTS

Writes what a rank's worker writes: a record of each step, a heartbeat a second. When `EVENTS/fail` names one of its
ranks, that rank fails; when `EVENTS/finish` names its first rank, all have finished.
"""
# ruff: noqa: PTH103, PTH123  (pathlib takes longer to import than this takes to start)

import json
import os
import sys
import time

STEP_SECONDS = 1.0


def main():
    attempt, first, ranks, events = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    folders = {rank: f"{attempt}/ranks/{rank}" for rank in range(first, first + ranks)}
    for folder in folders.values():
        os.makedirs(folder)
        write(f"{folder}/metrics.jsonl", "w", {"k": "meta", "t": 0, "time": time.time(), "world_size": 1024})
    with open(f"{events}/started-{first}", "w") as file:
        file.write(repr(time.time()))
    step = 0
    while True:
        step, failing = step + 1, read(f"{events}/fail")
        if read(f"{events}/finish") == str(first):
            sys.exit(0)
        for rank, folder in folders.items():
            now = time.monotonic()
            record = {"k": "step", "t": step * STEP_SECONDS, "step": step, "n": 1, "seconds": [STEP_SECONDS] * 3}
            write(f"{folder}/metrics.jsonl", "a", record | {"samples": 8, "forward": 0.2, "loss": 1.0})
            beat = {"t": now, "pid": os.getpid(), "step": step, "moved": step, "step_seconds": STEP_SECONDS}
            write(f"{folder}/heartbeat.json", "w", beat)
            if str(rank) == failing:
                message = "loss is not finite"
                error = {"rank": rank, "kind": "exception", "exception": "ValueError", "message": message}
                write(f"{folder}/error.json", "w", error | {"time_ns": time.time_ns(), "step": step})
                sys.exit(1)
        time.sleep(STEP_SECONDS)


def write(path, mode, record):
    with open(path, mode) as file:
        file.write(json.dumps(record) + "\n")


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
