"""DDP: every rank holds the model, and gradients are averaged in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from typing import Any

from labkit.planner.memory.ledger import Ledger
from labkit.planner.model.facts import ModelFacts
from labkit.planner.speed.collectives import SCALAR, Collective
from labkit.planner.strategies.strategy import HALF, Layout, Strategy

MIB = 1 << 20
# torch/nn/parallel/distributed.py: a first bucket of 1 MiB, so that communication starts early, then 25 MiB.
FIRST_BUCKET, BUCKET = MIB, 25 * MIB


class DDP(Strategy):
    name, simplicity = "ddp", 1
    has_buckets = for_any_script = True

    def is_in(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        from labkit.planner.model.fake.fakes import Replicated

        return any(isinstance(module, Replicated) for module in modules)

    def record_step(self, ledger: Ledger, facts: ModelFacts, layout: Layout, rank: int, *, on_gpu: bool) -> list[int]:
        """On a GPU, with the buckets of the first step. DDP replaces them at the start of the second by others, in the
        order in which gradients were ready, but NCCL may hold them until that step's backward: docs/evidence/memory.md.
        """
        is_static = layout.options.get("static_graph") or not layout.options.get("find_unused_parameters")
        gradients = layout.itemsize * sum(sum(each.parameters) for each in self.profiles(facts, layout))
        replaced = gradients if on_gpu and is_static else 0
        ledger.held["communication"] += replaced
        updated = super().record_step(ledger, facts, layout, rank, on_gpu=on_gpu)
        ledger.held["communication"] -= replaced
        return updated

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """Every gradient is sent once, for any number of micro-batches (no_sync). The last bucket is complete only when
        backward ends."""
        gradients = [n * facts.itemsize for unit in facts.units for n in unit.parameters]
        sent = buckets(reversed(gradients), layout.options.get("bucket_mib", 0.0))
        ranks, compress, kind = layout.data, layout.options.get("compress", "none"), "all_reduce"
        if compress == "powersgd":  # of square matrices, which have the smallest factors
            elements, factors = (n // facts.itemsize for n in gradients), layout.options["powersgd_rank"]
            sent = [round(sum(min(n, 2 * factors * sqrt(n)) for n in elements) * facts.itemsize)]
        elif compress in HALF:
            sent = [n * HALF[compress] // facts.itemsize for n in sent]
        elif compress == "int8":  # and a scale for each parameter
            yield Collective("all_gather", ranks, ranks * len(gradients) * facts.itemsize, len(sent), "backward", True)
            sent, kind = [ranks * n // facts.itemsize for n in sent], "all_gather"
        yield Collective(kind, ranks, sum(sent[:-1]), len(sent) - 1, "backward", True)
        yield Collective(kind, ranks, sent[-1], 1, "backward", False)
        if layout.options.get("find_unused_parameters"):
            yield Collective("all_reduce", ranks, SCALAR * len(gradients), 1, "backward", False)
        if buffers := sum(unit.buffers for unit in facts.units):
            yield Collective("broadcast", ranks, buffers, 1, "forward", False)

    def assumed(self, layout: Layout) -> Iterator[str]:
        compress = layout.options.get("compress")
        if compress in ("int8", "powersgd"):
            yield f"no time to compress to {compress}, and the bytes of square matrices"


def buckets(sizes: Iterable[int], bucket_mib: float = 0.0) -> list[int]:
    """Bytes of DDP's buckets in the order in which they are sent: gradients from the last parameter to the first; a
    bucket is closed when it has reached its size (torch/csrc/distributed/c10d/reducer.cpp)."""
    limits = [int(bucket_mib * MIB)] if bucket_mib else [FIRST_BUCKET, BUCKET]
    full: list[int] = []
    held = 0
    for size in sizes:
        held += size
        if held >= limits[min(len(full), len(limits) - 1)]:
            full.append(held)
            held = 0
    return [*full, held] if held else full
