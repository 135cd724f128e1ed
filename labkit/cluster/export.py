"""`labkit export --to kubeflow|skypilot`: the same script for a service that labkit does not talk to."""

from __future__ import annotations

import argparse
import re
import secrets

from labkit.cluster.handover import hand_over
from labkit.cluster.kubeflow import trainjob
from labkit.cluster.skypilot import sky_task
from labkit.errors import LaunchError

__all__ = ["add_options", "export"]

BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")  # what S3, Google's and Azure's stores all take


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the verb `export`."""
    parser.add_argument("script", help="one of labkit's own (ddp) or the path of any torchrun script")
    parser.add_argument("--to", choices=["kubeflow", "skypilot"], required=True)
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="machines")
    parser.add_argument("--nproc-per-node", type=int, required=True, metavar="N", help="ranks on each, one per GPU")
    parser.add_argument("--gpu", metavar="NAME", help="for skypilot: A100, L4, … as `sky show-gpus` names them")
    parser.add_argument("--bucket", metavar="NAME", help="for skypilot: where checkpoints go (default: a new name)")


def export(arguments: argparse.Namespace, rest: list[str]) -> str:
    """The text of the file. Raises LabError where the service would refuse it, or the script."""
    if "--" in rest:  # the first one is ours
        rest.remove("--")
    job = hand_over(arguments.script, nodes=arguments.nodes, nproc_per_node=arguments.nproc_per_node, args=rest)
    if arguments.to == "kubeflow":
        if arguments.gpu or arguments.bucket:
            raise LaunchError("--gpu and --bucket are SkyPilot's: a cluster has the GPUs and volumes that it has")
        return trainjob(job)
    if not arguments.gpu:
        raise LaunchError("SkyPilot looks for machines by their GPU: say which with --gpu, A100 for one")
    bucket = arguments.bucket or f"labkit-{job.name}-{secrets.token_hex(4)}"
    if not BUCKET.fullmatch(bucket):
        raise LaunchError(f"a bucket's name is 3 to 63 small letters, digits and hyphens, got {bucket!r}")
    return sky_task(job, gpu=arguments.gpu, bucket=bucket)
