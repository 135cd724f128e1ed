"""Interactive ranks compared with their peers: ten things that one does with two ranks, in real kernels, as a table.

    python benchmarks/interactive_peers.py > docs/evidence/interactive_peers.md  (about ten minutes; installs the peers)

It runs in Linux namespaces of its own (`unshare`, without root), so that the processes that a tool can end, and the
addresses on which it listens, are only this benchmark's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import IPython
import torch
from interactive_notebook import PEERS, Notebook, Seen, quoted
from interactive_tools import FSDP, LABKIT, PLAIN, PLOT, PORT, TOOLS, WATCHED, Tool

PACKAGES = ["jupyter-distributed==0.1.1", "nbdistributed==0.1.0"]
STARTS, CELLS, IDLE_SECONDS, HANG_SECONDS = 3, 50, 10.0, 90.0
SET_FLAGS, UP = 0x8914, 1  # of a network interface

INTRODUCTION = """<!-- written by: python benchmarks/interactive_peers.py > docs/evidence/interactive_peers.md -->

# Interactive ranks compared with their peers

What one does with two ranks from a notebook, over gloo, in real kernels ({cores} cores, torch {torch}, IPython
{ipython}, {day}). The machine was not quiet: the 1-minute load average was {low:.0f} to {high:.0f}. Each tool is used
as its README says. A quotation is what a cell showed, shortened; `–` means not offered.

- **labkit** is [`labkit.ranks`](../how_to/ranks.md), whose ranks outlive their kernel by ten minutes, on purpose.
- [**jupyter-distributed**](https://pypi.org/project/jupyter-distributed/0.1.1/) 0.1.1 replaces the notebook's kernel by
  one that sends every cell to a kernel per rank. It is started here by the command that its server extension uses once
  somebody enters "2" in JupyterLab's toolbar. A cell joins the process group.
- [**nbdistributed**](https://pypi.org/project/nbdistributed/0.1.0/) 0.1.0 starts ranks from the kernel, which executes
  ordinary cells on them. IPython does not find its README's `%%rank[1]`; `%%rank [1]` works and is used here. Its
  `%dist_init` returns before the ranks are connected; a cell that comes too early times out after 30 s and is tried
  again, which counts as part of the start.
- **torch.distributed.debug**, part of torch, serves pages about the ranks of a script that starts it; it executes no
  cells. It listens on all interfaces, so this benchmark runs where only the loopback interface exists.

A start lasts from the start of the notebook's kernel to a barrier of both ranks: the median of {starts} alternating
rounds, and the range. The latency is the median of {cells} alternating cells, and its ratio to {plain}.
CPU is that of all processes of a notebook, its kernel included. The "other training" is a bare torchrun that none of
them started.
"""
BREAKPOINT = "a breakpoint in a cell, in JupyterLab's debugger"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Row = dict[str, str]
Numbers = dict[str, float]


def how(seen: Seen) -> str:
    """How a cell ended."""
    return (
        seen.limited or f"{'an error' if seen.error else 'the cell ends without an error'} after {seen.seconds:.1f} s"
    )


def on_ranks(seen: Seen, text: str) -> str:
    """On how many ranks it was shown."""
    return f"{len(set(re.findall(text + ' ([0-9])', seen.text)))} of 2 ranks"


def tried(tool: Tool, folder: Path) -> Row:
    book = Notebook(tool, folder)
    row = {"6. fetch a value from each": f"– ({tool.reason})", "7. send one": f"– ({tool.reason})"}
    with other_training(folder) as other:
        seen = book.on_all("import time\nkept = 10 + rank\nprint('I am', rank)\ntime.sleep(3)\nprint('end')")
        first = "nothing" if seen.first is None else f"first line after {seen.first:.1f} s"
        row["2. see each rank's output (a cell of 3 s)"] = f"{first}; {seen.quoted}"
        seen = book.on_all("x = torch.full((2,), float(rank + 1))\ndist.all_reduce(x)\nx")
        row["3. all-reduce a tensor"] = f"{seen.quoted}, {seen.seconds:.2f} s"
        seen = book.on_all("seven = 7\nif rank == 1:\n    {}['missing']")
        named = [word for word in ("rank 1", "KeyError", "line 3") if word.lower() in (seen.text + seen.error).lower()]
        kept = on_ranks(book.on_all("print(f'seven {rank + seven - 7}')"), "seven")
        message = f", {quoted(seen.error)}" if seen.error else ""
        row["4. an exception on rank 1"] = (
            f"{how(seen)}{message}; it shows {', '.join(named)}; variables stay on {kept}"
        )
        if tool.fetch:
            seen, again = book.run(tool.fetch), book.run(tool.fetch)
            row["6. fetch a value from each"] = f"{seen.quoted}, {seen.seconds:.2f} s, then {again.seconds:.2f} s"
        if tool.send:
            seen = book.run(tool.send)
            row["7. send one"] = f"{seen.seconds:.2f} s; then {book.on_all('sent').quoted}"
        seen = book.run(tool.on_one + PLOT)
        row["8. plot from rank 1"] = f"{'a' if seen.pictures else 'no'} picture; {seen.quoted}"
        cells = [book.on_all(cell) for cell in FSDP]
        seconds = sum(seen.seconds for seen in cells)
        row["9. go through one FSDP step in four cells"] = f"{cells[-1].quoted}, {seconds:.1f} s"
        stopped = book.stopped_at("y = rank + 1\nz = y * 2\nprint('z', z)", 2)
        row[BREAKPOINT] = f"{', '.join(stopped)} stop there" if stopped else "no rank stops there"
        row["5. rank 1 does not come to an all-reduce"] = absent(book)
        began = time.monotonic()
        seen = book.run(tool.stop) if tool.stop else book.close()
        row["10. stop"] = f"{time.monotonic() - began:.1f} s; {state(book, other)}; {seen.quoted}"
        if tool.reset:
            book.run(tool.reset)
            row["10. stop"] += f"; then after `{tool.reset}`: {state(book, other)}"
        book.kill()
    return row


def state(book: Notebook, other: subprocess.Popen[bytes]) -> str:
    return f"{book.left()} processes left, the other training {'goes on' if other.poll() is None else 'was ended'}"


def absent(book: Notebook) -> str:
    seen = book.on_all("if rank == 0:\n    dist.all_reduce(torch.ones(1))", HANG_SECONDS)
    if seen.limited.startswith("still"):
        return seen.limited
    after = book.on_all("x = torch.ones(1)\ndist.all_reduce(x)\nx", HANG_SECONDS / 2)
    return f"{how(seen)}: {seen.quoted}; the next all-reduce: {after.limited or after.quoted}"


@contextlib.contextmanager
def other_training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (script := folder / "other.py").write_text("import time\ntime.sleep(3600)\n")
    process = subprocess.Popen([*TORCHRUN, "--standalone", "--nproc-per-node=1", str(script)])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def restarted(book: Notebook) -> tuple[str, str]:
    """What of the ranks is left after the kernel was restarted, and after it was shut down."""
    book.on_all("kept = 10 + rank")
    ranks = re.findall(r"pid (\d+)", book.on_all("import os\nprint(f'pid {os.getpid()}')").text)
    book.restart()
    time.sleep(3)
    alive = sum(str(each.pid) in ranks for each in book.processes())
    seen = [*map(book.run, book.tool.again), book.on_all("print(f'kept {kept - 10}')")][-1]
    book.close()
    left = f"{book.left()} processes left"
    book.kill()
    return f"{alive} of 2 ranks live on; opened again, a variable is there on {on_ranks(seen, 'kept')}", left


def watched(folder: Path) -> Row:
    """The debug server's page of stacks while rank 1 does not come to an all-reduce."""
    (script := folder / "watched.py").write_text(WATCHED)
    process = subprocess.Popen([*TORCHRUN, "--nproc-per-node=2", str(script)])
    page, began = "", time.monotonic()
    while "all_reduce" not in page and time.monotonic() - began < HANG_SECONDS:
        time.sleep(1)
        with contextlib.suppress(OSError):
            page = urlopen(f"http://localhost:{PORT}/stacks").read().decode()
    process.terminate()
    process.wait()
    ranks = [set(re.findall("all_reduce|elsewhere", rank)) for rank in re.split(r"<h2>Rank \d", page)[1:]]
    shown = "; ".join(f"rank {number} in {', '.join(sorted(names))}" for number, names in enumerate(ranks))
    return {"5. rank 1 does not come to an all-reduce": f"its page of all ranks' stacks shows {shown or 'nothing'}"}


def started(folder: Path) -> tuple[list[Notebook], dict[str, list[float]]]:
    """A notebook of each tool, and how long starts took, in alternating rounds."""
    seconds: dict[str, list[float]] = {tool.name: [] for tool in TOOLS}
    for number in range(STARTS):
        books = [Notebook(tool, folder) for tool in TOOLS[:: 1 if number % 2 == 0 else -1]]
        for book in books:
            seconds[book.tool.name].append(book.seconds)
            if number < STARTS - 1:
                book.kill()
    return books, seconds


def latencies(books: list[Notebook]) -> dict[str, list[float]]:
    """Seconds of a cell, in alternating rounds."""
    seconds: dict[str, list[float]] = {book.tool.name: [] for book in books}
    for number in range(CELLS):
        for book in books[:: 1 if number % 2 == 0 else -1]:
            seconds[book.tool.name].append(book.on_all("1 + 1").seconds)
    return seconds


def idle(books: list[Notebook]) -> dict[str, list[float]]:
    """The share of a core that all of a notebook's processes use."""
    before = [book.cpu_seconds() for book in books]
    time.sleep(IDLE_SECONDS)
    used = [(book, was, book.cpu_seconds()) for book, was in zip(books, before, strict=True)]
    return {
        book.tool.name: [sum(now[pid] - was.get(pid, 0.0) for pid in now) / IDLE_SECONDS] for book, was, now in used
    }


def main() -> None:
    loads, numbers = [os.getloadavg()[0]], {}
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {tool.name: tried(tool, folder) for tool in TOOLS} | {"torch.distributed.debug": watched(folder)}
        loads.append(os.getloadavg()[0])
        books, numbers["1. start two ranks"] = started(folder)
        books.append(Notebook(PLAIN, folder))
        numbers["latency of `1 + 1`"] = latencies(books)
        numbers["CPU in the first 10 s after a cell"] = idle(books)
        numbers["CPU in the next 10 s"] = idle(books)
        loads.append(os.getloadavg()[0])
        for book in books[:-1]:
            row = columns[book.tool.name]
            row["restart of the kernel"], row["shutdown of the kernel, without a stop"] = restarted(book)
        books[-1].kill()
    print(columns, numbers, file=sys.stderr)
    base = numbers["latency of `1 + 1`"][PLAIN.name]
    formats = {"1": "{0:.1f} s ({1:.1f} to {2:.1f})", "l": "{3:.0f} ms ({4:.1f}×)", "C": "{5:.1f} % of a core"}
    for what, each in numbers.items():
        for tool in TOOLS:
            middle = statistics.median(times := each[tool.name])
            ratio = statistics.median(a / b for a, b in zip(times, base, strict=False))
            values = (middle, min(times), max(times), 1e3 * middle, ratio, 100 * middle)
            columns[tool.name][what] = formats[what[0]].format(*values)
    plain = f"a plain kernel's ({1e3 * statistics.median(base):.0f} ms)"
    facts = {"cores": os.cpu_count(), "torch": torch.__version__, "ipython": IPython.__version__, "plain": plain}
    facts |= {"day": time.strftime("%Y-%m-%d"), "low": min(loads), "high": max(loads), "starts": STARTS, "cells": CELLS}
    print(INTRODUCTION.format(**facts))
    print("| |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for what in sorted(columns[LABKIT.name], key=lambda what: int(what.split(".")[0]) if what[0].isdigit() else 99):
        print(f"| {what} |", " | ".join(row.get(what, "–").replace("|", "\\|") for row in columns.values()), "|")
    medians = {what: {name: statistics.median(each[name]) for name in each} for what, each in numbers.items()}
    medians[BREAKPOINT] = {tool.name: -len(re.findall("Rank", columns[tool.name][BREAKPOINT])) for tool in TOOLS}
    pairs = [(tool.name, what) for tool in TOOLS[1:] for what in medians]
    better = [f"- {name}: {what}" for name, what in pairs if medians[what][name] < medians[what][LABKIT.name]]
    print("\nBetter than labkit in these rows, by the median where there are times:\n", *better, sep="\n")


if __name__ == "__main__":
    if os.getpid() != 1:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(PEERS)]
        subprocess.run([*pip, *PACKAGES], check=True, stdout=sys.stderr)
        options = ["--map-root-user", "--pid", "--fork", "--mount-proc", "--net", "--uts", "--kill-child"]
        os.execvp("unshare", ["unshare", *options, sys.executable, *sys.argv])
    socket.sethostname("localhost")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14s", b"lo", UP, b""))
    main()
