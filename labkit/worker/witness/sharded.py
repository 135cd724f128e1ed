"""Writes down over which ranks FSDP averages gradients, and samples of what each of them gives to the average.

FSDP says both only where it averages, so its functions are hooked after the first step that may have used it, and left
alone again soon.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from zlib import crc32

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around
from labkit.worker.witness.updates import sample

STEPS, PARAMETERS = 16, 512  # that are observed, and parameters of each step
EVERY = 16  # of the sampled elements of a gradient
FSDP1, FSDP2 = "torch.distributed.fsdp._runtime_utils", "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class Sharded(Area):
    """Hooks how FSDP1 and FSDP2 average gradients, for some steps. Parts of a model may be sharded over different
    ranks: `fsdp` lines tell over which all of them are."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._undo: list[Callable[[], None]] = []
        self._seen = 0
        self._ranks: set[int] = set()
        self._told: list[int] = []
        self._samples: list[Any] = []

    def after_check(self, *_: Any) -> None:
        """Hook them, if a step may have used them, once in a training."""
        if self._undo or self._seen:
            return
        recorder = self._witness.recorder
        if (two := sys.modules.get(FSDP2)) is not None:
            self._undo.append(call_around(two.FSDPParamGroup, "post_backward", self._of_fsdp2, recorder))
        if (one := sys.modules.get(FSDP1)) is not None:
            for name in ("_reduce_grad", "_reduce_grad_no_shard"):
                self._undo.append(call_around(one, name, self._of_fsdp1, recorder))

    def _of_fsdp2(self, group: Any, *_: Any) -> None:
        gradients = [p.unsharded_param.grad for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        if group.reduce_grads and any(gradient is not None for gradient in gradients):
            info = group.mesh_info
            averaged = {info.shard_mesh_dim, info.replicate_mesh_dim if group.all_reduce_grads else None}
            place = [slice(None) if each in averaged else at for each, at in enumerate(info.mesh.get_coordinate())]
            self._add(info.mesh.mesh[tuple(place)].flatten().tolist(), gradients)

    def _of_fsdp1(self, state: Any, handle: Any) -> None:
        if state._comm_hook is None:  # one of the script's own may do anything
            ranks = self._torch.distributed.get_process_group_ranks(state.process_group)
            self._add(ranks, [handle.flat_param.grad])

    def _add(self, ranks: list[int], gradients: list[Any]) -> None:
        if self._witness.is_hidden():
            return
        self._witness.follow(self)
        self._ranks = self._ranks & set(ranks) if self._ranks else set(ranks)
        with self._torch.no_grad(), self._witness.unseen():
            for gradient in gradients[: PARAMETERS - len(self._samples)]:
                if gradient is not None:
                    self._samples.append(sample(gradient)[::EVERY].to(self._torch.float32, copy=True))

    def after_step(self, *_: Any) -> None:
        """Write what the step's gradients were."""
        self._witness.leave(self)
        if not self._samples:
            return
        ranks, samples, self._samples = sorted(self._ranks), self._samples, []
        self._seen += 1
        if ranks != self._told:
            self._told = ranks
            self._witness.write("fsdp", ranks=ranks)
        at = {"step": self._witness.step, "number": self._witness.number}
        with self._torch.no_grad(), self._witness.unseen():
            values = self._torch.cat([each for each in samples if each.device == samples[0].device])
            self._later.read(values, lambda read: self._witness.write("averaged", **at, sum=crc32(repr(read).encode())))
        if self._seen == STEPS:
            for undo in self._undo:
                undo()
