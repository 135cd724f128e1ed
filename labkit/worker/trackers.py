"""Takes the numbers that a script logs to a tracker into the records of its run: what it gives to TensorBoard, W&B,
Trackio or MLflow, and what accelerate, Lightning and Trainer log, with a tracker or without one.

The calls do what they do without labkit. What they are given is only read: numbers, NumPy's scalars and tensors of one
element, of which those on a GPU are copied and read later, without waiting for it. Texts, images, histograms and so on
are passed over.

    {"k": "tracked", "t": …, "step": 40, "val/accuracy": 0.73}

- **The step** is the one that the call names if that is labkit's own count of the optimizer's steps, or one beside it,
  because loops count from 0 or log before the step. Epochs, samples and tokens are other units: such numbers are placed
  at labkit's own count. Where labkit counts no steps, the call's own is taken.
- **Names** are those of the call. After the first 64 no more are taken, which the view says.
- **At most 10 records a second**, after the first 200, see metrics_logger.py: faster numbers are thinned.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from labkit.worker.metrics_logger import SCALAR, Reports, renamed
from labkit.worker.recorder import Recorder
from labkit.worker.witness.around import call_around
from labkit.worker.witness.later import Later

MOST_NAMES = 64

Logged = tuple[Mapping[Any, Any], Any]  # numbers by name, and the step that the call names
Read = Callable[..., Logged]


def _tag(_: Any, tag: Any, scalar_value: Any, global_step: Any = None, *__: Any, **___: Any) -> Logged:
    return {tag: scalar_value}, global_step


def _tags(_: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *__: Any, **___: Any) -> Logged:
    return {f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step


def _values(_: Any, *args: Any, **named: Any) -> Logged:
    values = args[0] if args else next(named[name] for name in ("data", "metrics", "values") if name in named)
    step = args[1] if len(args) > 1 else named.get("step")
    return values, values.get("step", values.get("global_step")) if step is None else step


def _metric(_: Any, run_id: Any, key: Any, value: Any, timestamp: Any = None, step: Any = None, **__: Any) -> Logged:
    return {key: value}, step


def _metrics(_: Any, run_id: Any, metrics: Any = (), *__: Any, **___: Any) -> Logged:
    return {each.key: each.value for each in metrics}, metrics[-1].step if metrics else None


# These are called on all ranks, for trackers on the first.


def _of_accelerate(accelerator: Any, *args: Any, **named: Any) -> Logged:
    return _values(accelerator, *args, **named) if accelerator.is_main_process else NOTHING


def _of_lightning(connector: Any, *args: Any, **named: Any) -> Logged:
    return _values(connector, *args, **named) if connector.trainer.is_global_zero else NOTHING


def _of_trainer(_: Any, args: Any, state: Any, control: Any, logs: Any, **__: Any) -> Logged:
    return (logs, state.global_step) if state.is_world_process_zero else NOTHING


NOTHING: Logged = {}, None
# About no metric: the step, and what Trainer measures of its speed.
OTHERS = ("_runtime", "_samples_per_second", "_steps_per_second", "_total_flos", "_global_step")
TENSORBOARD = ("SummaryWriter", {"add_scalar": _tag, "add_scalars": _tags})
LIGHTNING = ("_LoggerConnector", {"log_metrics": _of_lightning})
# By the module that defines it: a class, and its methods that log numbers. guest.TRACKERS has the same modules.
CALLS: dict[str, tuple[str, dict[str, Read]]] = {
    "torch.utils.tensorboard.writer": TENSORBOARD,
    "tensorboardX.writer": TENSORBOARD,
    "wandb.sdk.wandb_run": ("Run", {"log": _values}),
    "wandb.sdk.lib.noop_run": ("NoopRun", {"log": _values}),
    "trackio.run": ("Run", {"log": _values}),
    "mlflow.tracking.client": ("MlflowClient", {"log_metric": _metric, "log_batch": _metrics}),
    "accelerate.accelerator": ("Accelerator", {"log": _of_accelerate}),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": LIGHTNING,
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": LIGHTNING,
    "transformers.trainer_callback": ("CallbackHandler", {"on_log": _of_trainer}),
}


class Trackers:
    """Gathers the numbers that are logged at one step into one record. `steps` tells labkit's own count."""

    def __init__(self, torch: Any, recorder: Recorder, steps: Callable[[], int]):
        self._torch, self._recorder, self._steps = torch, recorder, steps
        self._reports = Reports(recorder, "tracked")
        self._later = Later(torch, recorder.drop)
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may log while its own thread does
        self._calls = threading.local()
        self._names: set[str] = set()
        self._is_full = False
        self._gathered: dict[str, Any] = {}
        self._gathered_at = 0.0

    def hook(self, module: Any) -> None:
        """Observe the calls of a tracker's module, if this version of it has them."""
        kind, methods = CALLS[module.__name__]
        owner = getattr(module, kind, None)
        for name, read in methods.items():
            if name in vars(owner or object):
                call_around(owner, name, partial(self._observe, read), self._recorder)

    def flush(self, *, everything: bool = False) -> None:
        """Write what is pending: as much as the rate allows, or everything."""
        if os.getpid() == self._process:
            with self._lock:
                if everything:
                    self._later.poll()
                self._hand_on()
                self._reports.flush(everything=everything)

    def _observe(self, read: Read, *args: Any, **named: Any) -> Callable[[Any], None] | None:
        """Take what a call logs, without what a call that is not over has logged: Trainer and accelerate hand theirs on
        to trackers, some of which name it otherwise."""
        if os.getpid() != self._process:
            return None
        outer, names = getattr(self._calls, "names", None), set[str]()
        try:
            values, step = read(*args, **named)
            by_name = {name: (_unprefixed(name), value) for name, value in _flat(values)}
            names = {name for name, _ in by_name.values()}
            new = {name: value for name, (plain, value) in by_name.items() if not outer or plain not in outer}
            self._take(new, step)
        except Exception as error:  # arguments that the call will refuse, or objects that raise
            self._recorder.drop(error)
        if outer is not None:
            return None
        self._calls.names = names
        return self._leave

    def _leave(self, _: Any) -> None:
        self._calls.names = None

    def _take(self, values: Mapping[str, Any], step: Any) -> None:
        at, tensors = self._place(step), dict[str, Any]()
        with self._lock:
            for name, value in values.items():
                if type(value) in (self._torch.Tensor, self._torch.nn.Parameter):
                    tensors[name] = value
                else:
                    self._gather(at, name, _number(value))
            if tensors:
                self._take_tensors(at, tensors)
            self._later.poll()

    def _take_tensors(self, at: int, tensors: Mapping[str, Any]) -> None:
        """Read those of the host now, and those of a GPU later."""
        on_gpu: dict[str, Any] = {}
        hidden = self._torch._C  # from the script's modes
        with hidden.DisableTorchFunction(), hidden._DisableTorchDispatch():
            for name, tensor in tensors.items():
                if tensor.shape in SCALAR and tensor.device.type == "cpu":
                    self._gather(at, name, _number(tensor.item()))
                elif tensor.shape in SCALAR and tensor.is_cuda and self._has_room(name):
                    on_gpu[name] = tensor
            if not on_gpu or self._later.captures():
                return
            now = time.monotonic()

            def keep(numbers: list[float]) -> None:
                self._reports.keep({"step": at, **dict(zip(on_gpu, numbers, strict=True))}, now)

            values = [tensor.detach().reshape(()).float() for tensor in on_gpu.values()]
            self._later.read(self._torch.stack(values), keep)

    def _place(self, step: Any) -> int:
        own, named = self._steps(), _number(step)
        if named is None or not math.isfinite(named) or (own and abs(named - own) > 1):
            return own
        return int(named)

    def _gather(self, at: int, name: str, number: float | None) -> None:
        if number is None or not self._has_room(name):
            return
        if name in self._gathered or at != self._gathered.get("step"):
            self._hand_on()
            self._gathered["step"] = at
        self._gathered[name] = number
        self._gathered_at = time.monotonic()

    def _has_room(self, name: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) < MOST_NAMES:
            self._names.add(name)
            return True
        if not self._is_full:
            self._is_full = True
            self._recorder.write({"k": "untracked", "name": name})
        return False

    def _hand_on(self) -> None:
        if len(self._gathered) > 1:
            self._reports.keep(self._gathered, self._gathered_at)
        self._gathered = {}


def _number(value: Any) -> float | None:
    """A number of Python's or NumPy's as a float; None for anything else."""
    if type(value) is float:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) in SCALAR:
        value = value.item()
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def _flat(values: Mapping[Any, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """The values by name, those of a mapping in it as `train.loss`, as wandb names them; without the step."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif before or (name != "step" and not f"_{_unprefixed(str(name))}".endswith(OTHERS)):
            yield renamed(f"{before}{name}"), value


def _unprefixed(name: str) -> str:
    """`loss` for `train/loss` and `train/train_loss`, `eval_loss` for `eval/loss`, which Trainer's callbacks make of
    `loss`, `train_loss` and `eval_loss`."""
    return name.replace("/", "_").removeprefix("train_").removeprefix("train_")
