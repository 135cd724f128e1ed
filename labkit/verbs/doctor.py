"""`labkit doctor` in a terminal."""

from __future__ import annotations

import argparse

import labkit
from labkit.verbs.adding import AddVerb

__all__ = ["add_doctor_verb"]


def add_doctor_verb(verb: AddVerb) -> None:
    doctor = verb(
        "doctor",
        _doctor,
        "inspect this machine and recommend settings; exits with 1 if a launch would fail (a finding of level stop)",
    )
    doctor.add_argument("--preflight", action="store_true", help="test whether the ranks can communicate")
    ranks = "measure the collectives of this many ranks (default: one per GPU, or two)"
    doctor.add_argument("--bandwidth", type=int, nargs="?", const=True, default=False, metavar="RANKS", help=ranks)
    doctor.add_argument("--json", action="store_true", help="print findings and facts as JSON, for a bug report")


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    machine = labkit.doctor(preflight=arguments.preflight, bandwidth=arguments.bandwidth)
    print(machine.to_json() if arguments.json else machine)
    return 0 if machine.can_train else 1
