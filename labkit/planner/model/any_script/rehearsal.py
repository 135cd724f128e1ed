"""Runs a script as rank 0 of a launch, from its first line to the end of the second step of its optimizers.

Its parameters have no data, nor has what is computed from them; all else, such as its data, is real. Where a script
needs the values, it can be run on real tensors instead. Runs in a child process, which then ends.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from labkit.hardware import memory_limit
from labkit.planner.model.any_script.as_rank import be_rank, seem_to_have_gpus, simplify
from labkit.planner.model.any_script.divided import Weighed, others, strategy_in
from labkit.planner.model.any_script.kept_apart import REFUSED, KeptApart
from labkit.planner.model.any_script.values import LikelyValues, OnCpu
from labkit.planner.model.fake import fake_run
from labkit.planner.model.fake.fakes import Replicated, replace, replace_parallel, silence
from labkit.text import first_line, shortened
from labkit.worker import live_optimizers

MOST_SECONDS = 300
MOST_STEPS = 12  # of one optimizer, while others have not stepped


class Stepped(BaseException):
    """Ends the script after its second step; no handler of Exception catches it."""


class TooLong(BaseException):
    """Ends a script that has not stepped twice in MOST_SECONDS."""


def peak_of_script(
    text: str,
    argv: list[str],
    arguments: list[str],
    path: str,
    ranks: int,
    gpu: dict[str, Any] | None,
    without_data: bool,
) -> dict[str, Any]:
    """The peak of rank 0 in the second step, or why it is not known. `gpu`: the keywords of `seem_to_have_gpus`."""
    if gpu:
        gpu["capability"] = tuple(gpu["capability"])  # a list in JSON
    with tempfile.TemporaryDirectory(prefix="labkit-plan-") as folder:
        kept = KeptApart(folder)
        rehearsal = Rehearsal(path, without_data, ranks, gpu)
        return {"why": rehearsal.run(text, arguments), "written": sorted(kept.written), **rehearsal.found()}


class Rehearsal:
    """One run of a script, watched by the hooks of torch's optimizers and DataLoaders."""

    def __init__(self, path: str, without_data: bool, ranks: int, gpu: dict[str, Any] | None) -> None:
        self._path, self._ranks, self._gpu = path, ranks, gpu
        self._notes: dict[str, None] = {}
        self._fake = LikelyValues(path, on_gpu=gpu is not None) if without_data else None
        self._steps = 0
        self._first: Any = None  # the optimizer whose steps count
        self._stepped: set[int] = set()  # since the tracker began, by the first parameter of each optimizer
        self._fetches = False  # whether a DataLoader was asked in the first step
        self._tracker: Weighed | None = None
        self._replaced: list[torch.Tensor] = []  # buckets of the first step, until the second's backward
        self._measured: dict[str, Any] | None = None

    def run(self, text: str, arguments: Sequence[str]) -> str:
        """Run the script, and say why it did not step twice; "" if it did."""
        be_rank(self._ranks)
        simplify(lambda note: self._notes.setdefault(note))
        replace_parallel()
        if self._gpu:
            seem_to_have_gpus(**self._gpu)
        fake_run.compute_as_on(self._gpu["capability"] if self._gpu else None, self._fake)
        if self._fake:
            _without_data(self._fake)
        self._hook()
        _limit_memory()
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(MOST_SECONDS)
        sys.argv = [self._path, *arguments]
        try:
            with OnCpu(self._fake, self._gpu is not None), silence():
                fake_run.execute(text, "__main__", self._path, self._path)
            why = f"it ended after {self._steps} optimizer steps, and a plan needs two"
        except BaseException as error:
            why = why_it_ended(error, self._path)
        finally:
            signal.alarm(0)
        return "" if self._measured else why

    def found(self) -> dict[str, Any]:
        """What is known, in JSON's types."""
        read, assumed = (self._fake.read, self._fake.assumed) if self._fake else ((), ())
        return {"measured": self._measured, "notes": [*self._notes], "read": [*read], "assumed": sorted(assumed)}

    def _hook(self) -> None:
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._before_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._after_step(optimizer))
        fetch = _BaseDataLoaderIter.__next__

        def fetched(iterator: Any) -> Any:
            self._fetches = True
            if self._steps and self._tracker is None and torch.is_grad_enabled():
                self._begin()
            return fetch(iterator)

        setattr(_BaseDataLoaderIter, "__next__", fetched)  # noqa: B010

    def _before_step(self, optimizer: Any) -> None:
        self._replaced.clear()
        if self._measured:  # something caught Stepped
            raise Stepped
        if self._tracker is not None:
            self._tracker.before_step(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("its optimizer steps during backward, where no operation marks the end of a step")
        if self._first is None:
            self._first = optimizer
        self._steps += optimizer is self._first
        if self._tracker is None:
            if not self._fetches:
                self._begin()
            return
        self._tracker.after_step(optimizer)
        self._stepped.add(_key(optimizer))
        waiting = {_key(each) for each in live_optimizers()} - self._stepped
        if optimizer is not self._first and _key(self._first) not in self._stepped:
            return
        if not waiting or self._steps >= MOST_STEPS:
            self._end()

    def _begin(self) -> None:
        gc.collect()
        self._tracker, modules = Weighed(), _modules()
        self._tracker.mark_training(modules, live_optimizers())
        if self._gpu:
            self._replaced = [bucket for each in modules if isinstance(each, Replicated) for bucket in each.replaced()]
            self._tracker.mark(self._replaced, "communication")
        self._tracker.__enter__()

    def _end(self) -> None:
        assert self._tracker is not None
        self._tracker.__exit__(None, None, None)
        modules, optimizers = _modules(), live_optimizers()
        strategy = strategy_in(modules, optimizers)
        ranks = dist.get_world_size() if dist.is_initialized() else self._ranks
        derived = others(self._tracker, strategy, ranks, modules, on_gpu=self._gpu is not None)
        self._measured = {"peak": self._tracker.peak()._asdict(), "strategy": strategy.name, "others": derived}
        raise Stepped


def _modules() -> list[nn.Module]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def _key(optimizer: Any) -> int:
    """What tells an optimizer from others, but not from those that wrap it."""
    return next((id(p) for group in optimizer.param_groups for p in group["params"]), id(optimizer))


def _exit(code: Any) -> str:
    if isinstance(code, str):
        return code
    said = ""
    with suppress(OSError):  # what the script has printed last
        lines = os.pread(2, 1 << 14, max(0, os.fstat(2).st_size - (1 << 14))).decode(errors="replace").split("\n")
        said = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
    return f"it exited with {code} before its second optimizer step{said}"


def _limit_memory() -> None:
    """Fail instead of using more than half of what this host has left, and before anything else does."""
    kernel = Path("/proc/meminfo")
    if kernel.exists():
        Path("/proc/self/oom_score_adj").write_text("1000")
        kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in kernel.read_text().splitlines()}
        left = min(kibibytes["MemAvailable"] * 1024, memory_limit() or math.inf) // 2
        resource.setrlimit(resource.RLIMIT_DATA, (int(left), resource.RLIM_INFINITY))


def _give_up(*_: Any) -> None:
    raise TooLong


def why_it_ended(error: BaseException, path: str) -> str:
    """One sentence, if it failed with the script's own line."""
    if isinstance(error, TooLong):
        return f"it did not step twice within {MOST_SECONDS} seconds"
    if isinstance(error, SystemExit):
        return _exit(error.code)
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" in line {lines[-1].lineno} (`{shortened((lines[-1].line or '').strip())}`)" if lines else ""
    if type(error).__name__ in fake_run.DEPENDS_ON_DATA:
        return f"it reads values of tensors{where}, which a plan's tensors do not have"
    why = f"it fails{where}: {type(error).__name__}: {first_line(str(error)).rstrip('.')}"
    refused = "; a plan lets only Python's own functions write files" if REFUSED.search(why) else ""
    return why + refused


def _without_data(fake: LikelyValues) -> None:
    """Leave out the data of all parameters from now on."""
    register, call = nn.Module.register_parameter, nn.Module.__call__

    def registered(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, faked(parameter))

    def faked(parameter: Any) -> Any:
        if isinstance(parameter, DTensor):
            parameter._local_tensor = faked(parameter._local_tensor)
            return parameter
        is_plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.device.type != "meta"
        return fake.from_tensor(parameter) if is_plain and not isinstance(parameter, FakeTensor) else parameter

    def applied(module: nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        def changed(tensor: Any) -> Any:  # one by one: all of them may not fit
            return faked(change(tensor)) if isinstance(tensor, nn.Parameter) else change(tensor)

        return fake_run.applied(module, changed, recurse)

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_sharded = isinstance(module, FSDPModule | FullyShardedDataParallel)
        with fake if is_sharded else nullcontext():
            return call(module, *args, **kwargs)

    def differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
        def differentiate(*args: Any, **kwargs: Any) -> Any:
            with fake:
                return function(*args, **kwargs)

        return differentiate

    replace(nn.Module, register_parameter=registered, _apply=applied, to=fake_run.converted, __call__=called)
    backward, grad = differentiated(torch.autograd.backward), differentiated(torch.autograd.grad)
    replace(torch.autograd, backward=backward, grad=grad)
