"""Knows what DDP has declared of a model, whether the script lets it average the gradients, and who steps it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from labkit.ring import JOINED, NOT_SYNCHRONIZED, is_checked

MANY, NEVER = 64, 1 << 62  # optimizers of which each is checked
# DDP's communication hooks after which replicas are still equal. Another one may do anything.
PLAIN_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"}


class DistributedModel:
    """A model that DDP has wrapped: `reduced` are the parameters whose gradients it averages over `ranks`."""

    def __init__(self, torch: Any, model: Any):
        self.reference: Callable[[], Any] = weakref.ref(model)
        self.reduced = {id(p) for p in model._module_parameters if p.requires_grad}
        self.frozen = {id(p) for p in model._module_parameters if not p.requires_grad}
        self.ranks = torch.distributed.get_process_group_ranks(model.process_group)
        # Backward passes since its optimizer's last step, those not within no_sync, and whether the newest was not.
        self.passes, self.synchronized, self.is_synchronized = 0, 0, True
        self.is_local = False  # between two steps no pass was synchronized: the ranks are meant to part

    def before_backward(self) -> int:
        """Count a pass; returns its flags."""
        if (model := self.reference()) is None:
            return 0
        self.is_synchronized = is_synchronized = bool(model.require_backward_grad_sync)
        self.passes += 1
        self.synchronized += is_synchronized
        return (0 if is_synchronized else NOT_SYNCHRONIZED) | (JOINED if model._join_config.enable else 0)

    def after_step(self) -> None:
        """After a step of its optimizer."""
        if not self.synchronized:
            self.is_local = self.is_left_local()
        self.passes = self.synchronized = 0

    def is_left_local(self) -> bool:
        """Whether no pass of this step, or of an earlier one, was synchronized."""
        return self.is_local or (self.passes > 0 and not self.synchronized)

    def is_plain(self) -> bool:
        """Whether DDP, as it is used, makes the gradients of all ranks equal."""
        hooks = self.reference()._comm_hooks
        return all(getattr(hook, "__name__", "") in PLAIN_HOOKS for hook, _ in hooks)

    def shared(self) -> list[Any]:
        """The parameters that are now there and that it has made equal."""
        if (model := self.reference()) is None:
            return []
        return [p for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore]

    def forwards(self) -> int | None:
        """In how many forward passes it prepared to average the gradients; None if torch has not counted them all, as
        on GPUs after the tenth."""
        model = self.reference()
        count = int(model._get_ddp_logging_data().get("iteration", 0))
        return count if count < 10 or model.device_type == "cpu" else None


class Stepped:
    """The `number`-th optimizer of the script, which has made `steps`. The next one that is checked is `due`; `models`
    are those of DDP of which it steps parameters, as far as checks have found them."""

    def __init__(self, number: int, optimizer: Any):
        self.number, self.reference = number, weakref.ref(optimizer)
        # A script may make one for each of its rounds: checks would cost each of them more than its steps.
        self.steps, self.due = 0, 1 if number < MANY or is_checked(number) else NEVER
        self.models: list[DistributedModel] = []


def averaged(distributed: Iterable[Any]) -> Iterator[Any]:
    """The models whose gradients torch averages: these of DDP, and the outermost of FSDP2."""
    yield from distributed
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    if sharded is not None:
        models = [module for module in list(states) if isinstance(module, sharded)]
        inner = {id(inner) for model in models for inner in model.modules() if inner is not model}
        yield from (model for model in models if id(model) not in inner)
