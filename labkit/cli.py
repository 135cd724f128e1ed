"""Offers the functions of the notebook as verbs of a command line."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

import labkit
from labkit.errors import LabError
from labkit.install import pip_install
from labkit.text import plain
from labkit.verbs import (
    add_check_verb,
    add_demo_verb,
    add_doctor_verb,
    add_kaggle_verbs,
    add_launch_verb,
    add_plan_verb,
    add_run_verbs,
    add_script_verbs,
    add_slurm_verbs,
    add_sweep_verb,
    add_watch_verb,
)

EXAMPLES = """examples:
  labkit demo                                            trains a small model in three ways, in about a minute
  labkit doctor
  labkit launch ddp --nproc-per-node 2 --steps 100      one of labkit's own scripts, with its options
  labkit write fsdp checkpoints --task digits > mine.py  the script as a file
  labkit launch train.py --nproc-per-node 2 -- 50 --lr 1e-3
  labkit check train.py                                  mistakes that hang, corrupt or slow down training
  labkit plan fsdp --nproc-per-node 8 --device A100-40 -- --global-batch-size 512
  labkit sweep ddp --lr 1e-3,3e-4 --seed 0,1 --steps 200
  labkit runs
  labkit stop latest
"""
EXIT_CODES = """
exit codes:
  0  success; compare --fail-if: no condition holds
  1  the training failed or does not fit; there are findings; a launch would fail
  2  refused before anything started
  3  launch --strict: the training ended well, but is certainly wrong
  4  launch --stop-if, attach: the run was stopped by its own condition
  5  compare --fail-if: a condition holds
  6  compare --fail-if: it cannot be told, because of noise
  129, 130, 141  the terminal was closed, interrupted, the reader of the output has exited
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Its exit codes are in EXIT_CODES, and in docs/reference/json.md for each verb."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.verb not in ("launch", "plan", "slurm", "sweep"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "--" in rest:  # the first one is labkit's
        rest.remove("--")
    arguments.stdout = sys.stdout
    try:
        alone = getattr(arguments, "has_document", False) and arguments.json
        with redirect_stdout(sys.stderr) if alone else nullcontext():
            return int(arguments.run(arguments, rest) or 0)
    except labkit.RankFailedError as error:
        print(plain(str(error)), file=sys.stderr)
        return 1
    except labkit.FindingError as error:
        print(plain(str(error)), file=sys.stderr)
        return 3
    except LabError as error:
        print(f"labkit: {plain(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "labkit":
            raise
        package = error.name.partition(".")[0]
        print(f"labkit: this needs {package}, which is not installed: {pip_install(package)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has exited
        _discard_output()
        return 141
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _discard_output()  # the terminal was closed
        return 129


def _discard_output() -> None:
    """Redirect output that is still to be flushed to /dev/null."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "labkit",
        description=str(labkit.__doc__).splitlines()[0],
        epilog=EXAMPLES + EXIT_CODES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"labkit {labkit.__version__}")
    parser.add_argument("--runs-dir", help="where run folders are stored (default: $LABKIT_RUNS or ./runs)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Any, help: str, **options: Any) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=help, allow_abbrev=False, **options)
        sub.add_argument("--runs-dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(run=run, parser=sub)
        return sub

    add_demo_verb(verb)
    add_doctor_verb(verb)
    add_launch_verb(verb)
    add_check_verb(verb)
    add_plan_verb(verb)
    add_run_verbs(verb)
    add_watch_verb(verb)
    add_script_verbs(verb)
    add_sweep_verb(verb)
    slurm = "submit a training job to Slurm, or print its launch file"
    add_slurm_verbs(verbs.add_parser("slurm", help=slurm, description=slurm))
    kaggle = "run a notebook on Kaggle's two T4s, follow it here, fetch its runs"
    add_kaggle_verbs(verbs.add_parser("kaggle", help=kaggle, description=kaggle))
    return parser


if __name__ == "__main__":
    sys.exit(main())
