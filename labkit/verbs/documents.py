"""Prints what a verb shows as one JSON document, alone on stdout: the option --json of many verbs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from labkit.dataclass_json import to_json


def add_json(verb: argparse.ArgumentParser) -> None:
    """Add --json. `cli.main` then sends to stderr what else the verb prints."""
    verb.add_argument("--json", action="store_true", help="print JSON, see docs/reference/json.md")
    verb.set_defaults(has_document=True)


def show(arguments: argparse.Namespace, shown: object, document: Callable[[], Any]) -> None:
    """Print what a verb shows, or with --json its document, on what was stdout before the verb started."""
    text = json.dumps(to_json(document()), indent=2, allow_nan=False) if arguments.json else shown
    print(text, file=arguments.stdout)
