"""Runs one micro-step of a script on a few real samples, to tell a script that fails from one that only cannot be
rehearsed. Runs in a child process, which ends when it needs too much memory or time.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.planner.contract import prepared
from labkit.planner.model.fake import fake_run
from labkit.planner.model.question_server import signature
from labkit.planner.model.samples import floating_type, longest

MOST_BYTES, MOST_SECONDS = 1 << 31, 20
SAMPLES = 2  # of each micro-batch


def failure(text: str, argv: list[str], path: str, ranks: int, rank: int) -> str:
    """The signature of the error that ends the step, "" if none does. Collectives return at once, so that what ranks
    receive is arbitrary: an error means something only if a rehearsal ends with the same."""
    _limit()
    try:
        _step(fake_run.loaded(text, path), argv, ranks, rank)
    except Exception as error:
        return signature(error)
    return ""


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES,) * 2)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent.ru_utime + spent.ru_stime) + MOST_SECONDS,) * 2)


def _step(script: Any, argv: list[str], ranks: int, rank: int) -> None:
    sys.argv = [fake_run.SCRIPT_FILE, *argv]
    args = script.parse_args()
    if getattr(args, "precision", "") == "fp16":  # on a GPU only
        args.precision = "bf16"
    args.compile = False
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh, device = script.make_mesh("cpu", args), torch.device("cpu")
    model = prepared(vars(script), device, args)
    dtype = floating_type(model)
    train, _ = script.load_datasets(args.data_dir)
    sample, _ = longest(train, script.collate, script.map_tensors)
    batch = script.collate([sample] * SAMPLES * getattr(args, "accumulate", 1))
    batch = script.map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
    model = script.parallelize(model, mesh, device, args)
    for name, parameter in model.named_parameters():
        parameter.path = name
    optimizer = script.make_optimizer(model, mesh, args)
    script.forward_backward(model, batch, mesh["data"], args)
    optimizer.step()
