"""`labkit check` in a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import labkit
from labkit.errors import LabError
from labkit.text import plain
from labkit.verbs.adding import AddVerb
from labkit.write import script_names

__all__ = ["add_check_verb"]

EXAMPLES = """examples:
  labkit check train.py lab.ipynb
  labkit check src/
  labkit check --from ddp.py fsdp.py

A comment `# labkit: ignore[rule]` silences a rule on its line. docs/reference/check.md lists the rules.
"""


def add_check_verb(verb: AddVerb) -> None:
    check = verb(
        "check",
        _check,
        "find mistakes in a training script that hang, corrupt or slow down distributed training; "
        "exits with 0 without findings, 1 with findings, 2 if a file cannot be read",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = "scripts, notebooks, Markdown pages, folders, names of labkit's own scripts, or - for standard input"
    check.add_argument("files", nargs="+", metavar="FILE", help=files)
    check.add_argument(
        "--from",
        dest="before",
        metavar="BEFORE",
        help="compare FILE with this script as a migration, for example from DDP to FSDP: what changed, "
        "and what was forgotten (exits with 1 if anything was)",
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    from labkit.checking import files_in  # as all that the help does not need

    if arguments.before:
        return _check_migration(arguments)
    checked, unreadable, clean = [], 0, 0
    folders = [file for file in arguments.files if file not in script_names() and Path(file).is_dir()]
    files: list[Any] = [each for file in arguments.files for each in (files_in(file) if file in folders else [file])]
    for file in files:
        try:
            findings = labkit.check(labkit.Script.parse(sys.stdin.read(), name="stdin") if file == "-" else file)
        except LabError as error:  # the other files are still checked
            unreadable += 1
            print(f"labkit: {plain(str(error))}", file=sys.stderr)
            continue
        if findings or not folders:
            checked.append(findings)
        else:
            clean += 1
    if arguments.json:
        print(json.dumps([record for findings in checked for record in findings.records()], indent=2))
    else:
        for findings in checked:
            print(findings)
        if folders:
            print(f"{len(files)} files checked, {clean} without findings")
    return 2 if unreadable else 1 if any(checked) else 0


def _check_migration(arguments: argparse.Namespace) -> int:
    if len(arguments.files) != 1:
        raise LabError(f"--from compares two scripts: expected one FILE, got {len(arguments.files)}")
    migration = labkit.check(arguments.before, arguments.files[0])
    print(json.dumps(migration.record(), indent=2) if arguments.json else migration)
    return 1 if migration.forgotten else 0
