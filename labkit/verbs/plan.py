"""`labkit plan` in a terminal."""

from __future__ import annotations

import argparse
from typing import Any

import labkit
from labkit.verbs.adding import AddVerb
from labkit.write import check_flags, completed, options_of, read_back, script_names, whole_number

__all__ = ["add_plan_verb"]


def add_plan_verb(verb: AddVerb) -> None:
    plan = verb(
        "plan",
        _plan,
        "predict memory and speed of each strategy before a launch; exits with 1 if the script does not fit",
        usage="labkit plan SCRIPT [options] [--] [the script's own options]",
    )
    plan.add_argument("script", help="one of labkit's own (ddp) or the path of a script with the same cells")
    plan.add_argument(
        "--nproc-per-node",
        type=whole_number,
        default="auto",
        metavar="N",
        help="ranks (default: the number in --device, or else one per GPU here, or two)",
    )
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    plan.add_argument("--network", help="network between hosts: 100GbE, InfiniBand NDR, … or bits/s of one host")
    plan.add_argument("--device", help="T4, 2xT4, A100-40, 8xH100 … (default: this machine)")
    plan.add_argument("--measure", action="store_true", help="measure this machine's speed first (15 seconds)")


def _plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    script = labkit.Script.load(arguments.script)
    if arguments.script in script_names():
        script = completed(script, args=rest)
    check_flags(script, rest)
    options = options_of(script)
    parameters: dict[str, Any] = {
        name: value == "True" if options[name].kind == "flag" else value
        for name, value in read_back(script, rest).items()
    }
    plan = labkit.plan(
        script,
        nproc_per_node=arguments.nproc_per_node,
        nodes=arguments.nodes,
        device=arguments.device,
        network=_number(arguments.network),
        measure=arguments.measure,
        **parameters,
    )
    print(plan)
    return 2 if plan.fits is None else 0 if plan.fits else 1


def _number(text: str | None) -> str | float | None:
    try:
        return text and float(text)
    except ValueError:
        return text
