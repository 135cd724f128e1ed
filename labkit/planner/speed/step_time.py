"""Predicts the time of an optimizer step: computation at a measured rate, communication at a measured bandwidth, their
overlap, and the bubble of a pipeline. Pure functions of a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

from labkit.link import CollectiveTime, Link
from labkit.planner.memory.pipeline import SCHEDULES_ZERO_BUBBLE
from labkit.planner.model.facts import ModelFacts, Unit
from labkit.planner.networks import NETWORK_SHARE, Hosts
from labkit.planner.speed.collectives import Collective, wire
from labkit.planner.speed.rates import HOST, OPTIMIZER_BYTES, Rates
from labkit.planner.strategies.strategy import Layout, volume
from labkit.planner.strategies.tensor_parallel import held

# The bubble as a fraction of 1F1B's (Qi et al., arXiv 2401.10241, table 1: (p-1)(f+b-2w) with f=b=w is a third). ZBV's
# would be 0, but measured with sleeping stages it and DualPipeV equal InterleavedZeroBubble.
ZERO_BUBBLE, ZERO_BUBBLE_STAGES = 1 / 3, 2
TENSORS_SPLIT, PAIRS = 8, 2  # parameters of a block that tensor parallelism splits, and pairs of layers
# Operators in which torch's AdamW updates one parameter without foreach: counted in torch/optim/adam.py
# (_single_tensor_adam). On a DTensor each takes the host DISPATCH seconds longer: measured on two slow cores, where the
# update of a DTensor took 0.16 ms and of a plain tensor 0.024 (overheads in calibrate.py).
UPDATE_OPERATORS, DISPATCH = 8, 15e-6
# A fused kernel reads 16 bytes of each element and writes 12 (aten/src/ATen/native/cuda/fused_adam_utils.cuh).
FUSED_BYTES = 28
# Seconds that FSDP2's hooks take a GPU's host for each unit and step: half of the 2 ms measured on two slow cores
# (collective_times.sharding), because a server's are faster. Assumed.
UNIT_HOST = 1e-3
# Offloaded shards move over the host's link, PCIe 3 x16, and AdamW updates them on the host's cores: measured 24 ns per
# element on two slow cores; a server's memory would allow 1 to 2. A guess between them, within a factor of 4.
HOST_LINK, HOST_STEP, HOST_SPREAD = 15.75e9, 6e-9, 4
# What the formulas leave out, relative to the computing: the median error in docs/evidence/speed.md. Rates that were
# measured on a quiet machine spread less.
FORMULA_ERROR = 0.06
# Seconds from rank to rank in a ring of NCCL's Simple protocol, over NVLink and over a network (NCCL 2.11,
# src/graph/tuning.cc, hwLat; the numbers of steps below are those of ncclTopoTuneModel).
HOP, NETWORK_HOP = 3.4e-6, 9.6e-6
NUMBERS_OF_RANKS = tuple(2**n for n in range(11))  # of scaling curves


@dataclass(frozen=True)
class StepTime:
    """`seconds` of an optimizer step, between `low` and `high`; `parts` add up to it. `samples` and `predictions`
    (for a language model, tokens) per step over all ranks. `assumed` lists what was not measured."""

    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    samples: int
    predictions: int
    assumed: tuple[str, ...] = ()

    @property
    def predictions_per_second(self) -> float:
        return self.predictions / self.seconds


def step_time(
    facts: ModelFacts, layout: Layout, rates: Rates, link: Link | None, hosts: Hosts | None = None
) -> StepTime:
    """The step time of the slowest rank. `link` is the link within a host; it may be None for one rank. `hosts` is None
    if all ranks are on one host."""
    rates = rates.shared_by(min(layout.ranks, rates.ranks))  # further ranks use other machines
    units, moved = _held_units(facts, layout), volume(facts, layout, _slowest(layout))
    compute, recompute = _compute(layout, rates), _recompute(layout, rates)
    busy = compute + recompute
    exposed = [_exposed(each, layout, rates, link, hosts, busy) for each in moved]
    parts = {
        "compute": compute,
        "recompute": recompute,
        "bubble": _bubble(layout, rates, busy),
        "optimizer": _optimizer(units, layout, rates),
        "copies": _copies(facts, units, layout, rates),
        "offload": _offload(facts, layout) if layout.keeps_states_on_host(on_gpu=rates.on_gpu) else 0.0,
        "strategy": _overhead(units, moved, layout, rates, link, busy),
        "communication": sum(seconds for seconds, _ in exposed),
    }
    seconds = sum(parts.values())
    computing = seconds - parts["communication"] - parts["offload"]
    unsure = sum(error for _, error in exposed)
    below, above = (max(spread, FORMULA_ERROR) for spread in rates.spread)
    low = seconds - computing * below - unsure - parts["offload"] * (1 - 1 / HOST_SPREAD)
    high = seconds + computing * above + unsure + parts["offload"] * (HOST_SPREAD - 1)
    return StepTime(
        seconds,
        max(low, 0.0),
        high,
        {name: part for name, part in parts.items() if part},
        layout.global_batch,
        layout.global_batch * facts.predictions,
        (*rates.assumed, *_assumed(layout, rates, link, hosts)),
    )


def scaling(
    facts: ModelFacts, layout: Layout, rates: Rates, link: Link, *, box: int, network: float
) -> dict[int, StepTime]:
    """Weak scaling: the same micro-batch on each of 1, 2, 4 … 1,024 ranks. A box has `box` ranks; boxes communicate
    over `network`, in bytes/s per box. Numbers of ranks that the strategy cannot use are omitted."""
    times = {}
    for ranks in NUMBERS_OF_RANKS:
        stretched = layout.strategy.stretched(facts, layout, ranks)
        if stretched is not None:
            times[ranks] = step_time(facts, stretched, rates, link, Hosts(box, network))
    return times


def _compute(layout: Layout, rates: Rates) -> float:
    """Computation of all micro-batches; in a pipeline, of the rank with the most work."""
    samples = layout.micro_batch / layout.context
    whole, ends, alike = (_line(line, samples) for line in (rates.both, rates.ends, rates.alike))
    blocks = max(0.0, whole - ends)
    if layout.tensor > 1:
        undivided = min(rates.alike[0] if layout.options.get("sequence_parallel") else alike, blocks)
        blocks = undivided + (blocks - undivided) / layout.tensor
    # The last stage has the head and the loss; the embedding is negligible.
    return layout.accumulate * (blocks / layout.pipeline + ends)


def _recompute(layout: Layout, rates: Rates) -> float:
    """Seconds in which activation checkpointing repeats the forward of each block."""
    if not layout.activation_checkpointing:
        return 0.0
    samples = layout.micro_batch / layout.context
    forward = _line(rates.forward, samples) - _line(rates.ends, samples) / 3
    shared = layout.pipeline * layout.tensor
    return layout.accumulate * max(0.0, forward) / shared


def _bubble(layout: Layout, rates: Rates, busy: float) -> float:
    """Idle time of a pipeline: fill and drain take p-1 of m+p-1 slots (Narayanan et al., arXiv 2104.04473, section
    2.2), divided by v with v stages per rank. Ranks that share cores run faster while others wait: a slot with k
    working ranks takes the time of k ranks under contention."""
    if layout.pipeline == 1:
        return 0.0
    p, m = layout.pipeline, layout.accumulate
    working = [min(slot, p, m, m + p - slot) for slot in range(1, m + p)]
    slowed = [rates.slowdown(k * layout.data * layout.tensor) for k in working]
    whole = busy / m * (sum(slowed) / rates.slowdown(layout.ranks) - m)
    schedule = layout.options["schedule"]
    if schedule in SCHEDULES_ZERO_BUBBLE:
        return whole * ZERO_BUBBLE / ZERO_BUBBLE_STAGES
    return whole / (layout.stages // p)


def _optimizer(units: Sequence[Unit], layout: Layout, rates: Rates) -> float:
    """AdamW on the parameters whose states a rank holds: time per element and per tensor. If it updates one at a time,
    a GPU may wait for the host to launch that."""
    elements = sum(held(unit, layout.tensor) for unit in units) / layout.shards
    tensors = sum(len(unit.parameters) for unit in units)
    split = 0
    if layout.strategy.has_dtensors:
        split = tensors
    elif layout.tensor > 1:
        split = TENSORS_SPLIT * len([unit for unit in units if unit.is_block])
    if layout.strategy.deals_parameters:
        elements, tensors = elements / layout.ranks, tensors // layout.ranks
    if layout.keeps_states_on_host(on_gpu=rates.on_gpu):  # counted in _offload
        elements = 0
    per_element = rates.optimizer * (FUSED_BYTES / OPTIMIZER_BYTES if layout.is_fused else 1)
    seconds = elements * per_element + (tensors - split) * rates.tensor + split * rates.dtensor
    if layout.updates_singly and not layout.is_fused and rates.on_gpu:
        seconds = max(seconds, UPDATE_OPERATORS * (tensors * HOST + split * DISPATCH))
    return seconds


def _offload(facts: ModelFacts, layout: Layout) -> float:
    """A shard of the parameters moves to the device before each forward and, if it is gathered again, each backward;
    its gradients return once per step, and the host updates the shard. No overlap with computation is assumed."""
    elements = facts.elements / layout.shards
    kept = layout.options.get("sharding_strategy", "FULL_SHARD") != "FULL_SHARD"
    kept = kept or layout.options.get("reshard_after_forward") == "never"
    moves = layout.accumulate * (1 if kept else 2) + 1
    return elements * (moves * facts.itemsize / HOST_LINK + HOST_STEP)


def _copies(facts: ModelFacts, units: Sequence[Unit], layout: Layout, rates: Rates) -> float:
    """Memory passes over gradients and parameters that the strategy adds: DDP copies gradients into its buckets, and
    gradients are accumulated after the first micro-batch."""
    gradients = sum(held(unit, layout.tensor) for unit in units) * facts.itemsize
    passes = 1.5 * (layout.accumulate - 1) * gradients  # reads two, writes one
    if layout.strategy.has_buckets:
        passes += gradients
    return passes * rates.copy


def _overhead(
    units: Sequence[Unit], moved: Sequence[Collective], layout: Layout, rates: Rates, link: Link | None, busy: float
) -> float:
    """Host work of hooks and distributed tensors, and FSDP's copies into and out of its communication buffers. A GPU's
    host works ahead of it: only what exceeds the computation is added."""
    blocks = sum(unit.is_block for unit in units) * layout.accumulate
    split = PAIRS * blocks * rates.split_pair if layout.tensor > 1 else 0.0
    if layout.shards == 1 or link is None:
        return split
    copied = sum(each.bytes for each in moved if each.kind in ("all_gather", "reduce_scatter"))
    hooks = blocks + layout.accumulate  # one for the root
    if rates.on_gpu:
        host = hooks * UNIT_HOST + layout.accumulate * rates.launching
        return split + max(0.0, host - busy) + copied * rates.copy
    return split + hooks * link.sharding[0] + copied * link.sharding[1]


def _exposed(
    each: Collective, layout: Layout, rates: Rates, link: Link | None, hosts: Hosts | None, busy: float
) -> tuple[float, float]:
    """(seconds that a rank waits for a collective, uncertainty in seconds).

    On GPUs, overlapped communication is hidden by up to the duration of computation. gloo has no streams, so FSDP waits
    for each collective. DDP's reducer and a pipeline's sends run in threads, which need the cores that ranks compute
    on; if all cores are in use, their work, measured in core-seconds, is added.
    """
    assert link is not None
    line = _among(each, layout, link, hosts)
    here = min(layout.ranks, hosts.each) if hosts else layout.ranks
    beside = each.hidden and (rates.on_gpu or layout.strategy.has_buckets or each.kind == "send")
    # There is no computation between the optimizer's collectives: ranks wait for each other at the first.
    together = min(1, each.count) if each.phase == "optimizer" else each.count
    late = max(0.0, rates.waiting - link.kinds["all_reduce"].latency) * together
    alone = line.latency * each.count + line.per_byte * each.bytes
    seconds = alone + late
    if beside and rates.cores is not None and here >= rates.cores:
        seconds = min(alone, line.cpu * each.bytes * here / rates.cores)
        seconds += late if each.kind == "send" else 0.0
    elif beside:
        phase = busy * (1 / 3 if each.phase == "forward" else 2 / 3)
        seconds = max(0.0, alone - phase)
    return seconds, seconds * line.residual


def _slowest(layout: Layout) -> int:
    """The rank with the last stage and thus the head; in V-shaped schedules it is the first."""
    last = next(r for r in range(layout.pipeline) if layout.stages - 1 in layout.strategy.stages_of(layout, r))
    return last * layout.data * layout.tensor


def _line(line: tuple[float, float], samples: float) -> float:
    return line[0] + line[1] * samples


def _held_units(facts: ModelFacts, layout: Layout) -> list[Unit]:
    """The units on one rank; in a pipeline, its share of the blocks and the head."""
    if layout.pipeline == 1:
        return [*facts.blocks, *facts.ends]
    return [*facts.blocks[: len(facts.blocks) // layout.pipeline], *facts.ends[-1:]]


def _among(each: Collective, layout: Layout, link: Link, hosts: Hosts | None) -> CollectiveTime:
    """The time of a collective in its group, extrapolated from `link.ranks` ranks on one host. Between hosts the
    network may be the bottleneck. The residual grows by its own size with each doubling of ranks."""
    line = link.kinds[each.kind]
    further = max(0.0, log2(each.group / link.ranks))
    per_byte = line.per_byte * wire(each.kind, each.group) / wire(each.kind, link.ranks)
    group = layout.pipeline if each.kind == "send" else each.group  # a pipeline is as slow as its slowest send
    across = 1.0
    if hosts and hosts.cross(group, each.stride, layout.ranks):
        network = wire(each.kind, each.group) / hosts.share(each.stride)
        if each.kind == "all_to_all":
            network = hosts.exchanged(each.group, each.stride)
        per_byte = max(per_byte, network)
        across = each.group * each.stride / hosts.each
    if link.backend == "nccl":
        latency = line.latency + _hops(each, link, across)
    else:
        latency = line.latency * (1 + further / log2(link.ranks))
    return replace(
        line,
        latency=latency,
        per_byte=per_byte,
        residual=max(line.residual, min(0.9, line.residual * (1 + further))),
    )


def _hops(each: Collective, link: Link, across: float) -> float:
    """Seconds by which a group on `across` hosts waits longer than one of `link.ranks` ranks on one host. NCCL's
    all-gathers and reduce-scatters are rings, so they pass every rank; its small sums follow a tree of hosts."""
    if each.kind in ("send", "all_to_all"):
        return NETWORK_HOP if across > 1 else 0.0
    if each.kind in ("all_reduce", "broadcast"):
        return 2 * log2(across) * NETWORK_HOP if across > 1 else 0.0
    between = across if across > 1 else 0.0
    return max(0.0, each.group - link.ranks - between) * HOP + between * NETWORK_HOP


def _assumed(layout: Layout, rates: Rates, link: Link | None, hosts: Hosts | None) -> Iterator[str]:
    if link is not None and layout.ranks > 1 and not link.when:
        yield "the fraction of the link's data-sheet bandwidth that is reached"
    elif link is not None and layout.ranks > link.ranks:
        yield f"the link between more than {link.ranks} ranks"
    if hosts is not None and layout.ranks > hosts.each:
        is_nccl = link is not None and link.backend == "nccl"
        latency = f"{NETWORK_HOP * 1e6:g} us from host to host" if is_nccl else "with the latency of one host"
        yield f"{NETWORK_SHARE:.0%} of {hosts.network / 1e9:.3g} GB/s between hosts of {hosts.each} ranks, {latency}"
    yield from layout.strategy.assumed(layout)
    if layout.keeps_states_on_host(on_gpu=rates.on_gpu):
        host = f"PCIe at {HOST_LINK / 1e9:.4g} GB/s, AdamW at {HOST_STEP * 1e9:g} ns per element"
        yield f"the host's work for offloaded shards: {host} ({1 / HOST_SPREAD:g} to {HOST_SPREAD} times)"
