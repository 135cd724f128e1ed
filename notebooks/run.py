"""Run notebooks headless with papermill, as CI and Kaggle's batch do; leave executed copies, pages and an index.

    python notebooks/run.py --into build/demo -p epochs 2 notebooks/01_quickstart.ipynb

The runs' folders are in `<into>/runs`. Exits non-zero, after the cause, when a notebook failed, is too heavy to be
saved, or displays something that GitHub cannot show.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from papermill import inspect_notebook

from pages import unseen, write_index, write_page

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("notebooks", nargs="+", type=Path)
parser.add_argument("--into", type=Path, required=True, help="folder for executed notebooks, HTML and runs")
parser.add_argument(
    "-p",
    nargs=2,
    action="append",
    default=[],
    metavar=("NAME", "VALUE"),
    help="a parameter, of those notebooks that have it",
)
parser.add_argument("--small", action="store_true", help="less of everything, and no plans of large models")
parser.add_argument("-j", "--jobs", type=int, default=1, help="how many notebooks run at the same time (default: 1)")
SMALL = {"epochs": "2", "seeds": "1", "strategies": "ddp fsdp pipeline"}
SMALL |= dict.fromkeys(("seven_billion", "large", "guides", "plans"), "False")
SMALL_STEPS = {"22_fine_tuning": "20", "23_images": "20", "26_talk_less": "62", "27_experts": "20"}
INJECTED = "# Values for this execution, in place of those above"  # papermill's own title says less
MOST_BYTES = 320_000  # of an executed notebook, with its figures and their pictures


def main() -> int:
    arguments = parser.parse_args()
    into = arguments.into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    known = {notebook: inspect_notebook(str(notebook)) for notebook in arguments.notebooks}
    for name, _ in arguments.p:
        if not any(name in own for own in known.values()):
            parser.error(f"none of these notebooks has a parameter {name!r}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        last_first = reversed(arguments.notebooks)  # the later labs take longer, and nothing should wait for a long one
        codes = list(pool.map(lambda notebook: run(notebook, into, known[notebook], arguments), last_first))
    if any(codes):
        return 1  # a killed notebook's is negative
    there = {*into.glob("[0-9]*.ipynb"), *(into / notebook.name for notebook in arguments.notebooks)}
    print(write_index(sorted(there), into))
    return 0


def run(notebook: Path, into: Path, known: Any, arguments: argparse.Namespace) -> int:
    """Execute one notebook and write its page; the exit code. Of several at a time, only a failure's log is shown."""
    # Nobody watches: figures are static, and a training that fails fails the notebook.
    env = {**os.environ, "LABKIT_UI": "static", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers' bar is a widget, which no page shows
    executed = into / notebook.name
    papermill = [sys.executable, "-m", "papermill", str(notebook.absolute()), str(executed)]
    small = SMALL | ({"steps": SMALL_STEPS[notebook.stem]} if notebook.stem in SMALL_STEPS else {})
    values = {**(small if arguments.small else {}), **dict(arguments.p)}
    own = [word for name, value in values.items() if name in known for word in ("-p", name, value)]
    flags = ["--cwd", str(into), "--kernel", "python3", "--log-output", "--no-progress-bar", *own]
    started = time.monotonic()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if arguments.jobs > 1 else {}
    done = subprocess.run([*papermill, *flags], env=env, cwd=into, **output)
    log = (done.stdout or b"").decode(errors="replace") if done.returncode else ""
    print(f"{log}{notebook} → {executed}, {time.monotonic() - started:.0f} s", flush=True)
    if executed.exists():
        text = executed.read_text(encoding="utf-8")
        executed.write_text(text.replace('"# Parameters\\n"', f'"{INJECTED}\\n"', 1), encoding="utf-8")
        write_page(executed, into)
    if done.returncode:
        print(f"FAILED {notebook}", flush=True)
    elif (size := executed.stat().st_size) > MOST_BYTES:
        print(f"{notebook} is too heavy to be saved: {size:,} bytes, {MOST_BYTES:,} are allowed", file=sys.stderr)
        return 1
    elif cells := unseen(executed):
        print(f"{notebook}: GitHub cannot show what cells {cells} display, which only scripts draw", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
