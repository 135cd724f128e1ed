"""Counts the collectives of one optimizer step under each strategy, with their bytes.

Verified with torch's flight recorder (tests/planner/test_volume_recorded.py). The counts of FSDP2 match its design:
L blocks and a root make 2(L+1) all-gathers with reshard_after_forward, 2(L+1)-1 if the root stays gathered, L+1 if all
stay gathered, and L+1 reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import sqrt

from labkit.planner.layout import Layout
from labkit.planner.model.facts import ModelFacts, Unit

MIB = 1 << 20
# torch/nn/parallel/distributed.py: a first bucket of 1 MiB, so that communication starts early, then 25 MiB.
FIRST_BUCKET, BUCKET = MIB, 25 * MIB
HALF = {"fp16": 2, "bf16": 2}
SCALAR, COUNT, SUM = 4, 8, 8  # bytes of a flag, of the number of predictions, and of a step's loss in a pipeline
WHOLE = 6  # parameters of labkit's block that every tensor rank holds: of two norms, and two biases
NORMS = 4  # the weights and biases of two norms


@dataclass(frozen=True)
class Collective:
    """`count` calls in a group of `group` ranks, which are `stride` apart. `bytes` is the sum over all calls of the
    full array (the output of an all-gather, the input of a reduce-scatter and of an all-to-all), as in nccl-tests. A
    `hidden` one overlaps with computation."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send
    group: int
    bytes: int
    count: int
    phase: str  # forward, backward, optimizer
    hidden: bool
    stride: int = 1


def wire(kind: str, group: int) -> float:
    """Minimum bytes that each rank sends, relative to the bytes of the array: 2(n-1)/n for an all-reduce, (n-1)/n for
    an all-gather, a reduce-scatter and an all-to-all, 1 for a broadcast and a send (Thakur, Rabenseifner, Gropp 2005,
    section 4; nccl-tests, doc/PERFORMANCE.md)."""
    share = (group - 1) / group
    return {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(kind, share)


def volume(facts: ModelFacts, layout: Layout, rank: int = 0) -> list[Collective]:
    """The collectives of one optimizer step. `rank` matters in a pipeline only.

    ModelFacts do not tell which layers fsdp1 wraps with `wrap` "module" and "size" (blocks and a root are assumed; the
    bytes are the same), nor the padding of shards.
    """
    if layout.strategy == "diloco":
        collectives = [_averaged(facts, layout)]
        return [each for each in collectives if each.group > 1]
    # the number of predictions of the whole batch
    collectives = [Collective("all_reduce", layout.data, COUNT, 1, "forward", False, layout.tensor * layout.context)]
    if layout.strategy in ("ddp", "zero1"):
        collectives += _replicated(facts, layout)
    elif layout.strategy in ("fsdp", "zero2", "fsdp1", "context_parallel", "expert_parallel"):
        collectives += _sharded(facts, layout)
        collectives += _context(facts, layout)
        collectives += _experts(facts, layout)
    if layout.strategy in ("pipeline", "hybrid"):
        collectives += _staged(facts, layout, rank)
    if layout.tensor > 1:
        collectives += _tensor(facts, layout, rank)
    if layout.precision == "fp16" and layout.ranks > 1:  # the overflow flag
        collectives.append(Collective("all_reduce", layout.ranks, SCALAR, 1, "optimizer", False))
    return [each for each in collectives if each.group > 1 and each.count]


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


def _replicated(facts: ModelFacts, layout: Layout) -> Iterator[Collective]:
    """DDP sends every gradient once, for any number of micro-batches (no_sync). Its last bucket is complete only when
    backward ends. ZeRO-1 also broadcasts each parameter from the rank that has updated it."""
    gradients = [n * facts.itemsize for unit in facts.units for n in unit.parameters]
    sent = buckets(reversed(gradients), layout.options.get("bucket_mib", 0.0))
    ranks, compress, kind = layout.data, layout.options.get("compress", "none"), "all_reduce"
    if compress == "powersgd":  # of square matrices, which have the smallest factors
        elements, rank = (n // facts.itemsize for n in gradients), layout.options["powersgd_rank"]
        sent = [round(sum(min(n, 2 * rank * sqrt(n)) for n in elements) * facts.itemsize)]
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
    if layout.strategy == "zero1":
        yield Collective("broadcast", ranks, sum(gradients), len(gradients), "optimizer", False)


def _averaged(facts: ModelFacts, layout: Layout) -> Collective:
    """DiLoCo: one all-reduce per parameter at the end of a round, spread over its steps."""
    every, parameters = layout.options["sync_every"], [n for unit in facts.units for n in unit.parameters]
    size, count = sum(parameters) * facts.itemsize // every, -(-len(parameters) // every)
    return Collective("all_reduce", layout.data, size, count, "optimizer", False)


def _sharded(facts: ModelFacts, layout: Layout) -> Iterator[Collective]:
    """FSDP: each unit is gathered before use, and its gradients are reduce-scattered once per step; under ZeRO-2 once
    per micro-batch, while parameters stay gathered."""
    options, times = layout.options, layout.accumulate
    blocks = [unit for unit in facts.units if unit.name.startswith("blocks.")]
    if layout.strategy == "fsdp1" and options["wrap"] == "none":
        blocks = []
    root = [unit for unit in facts.units if unit not in blocks]
    again, root_again, forwards, scatters = True, False, times, 1
    if layout.strategy == "zero2":
        again, forwards, scatters = False, 1, times
    elif layout.strategy in ("fsdp", "context_parallel", "expert_parallel"):
        again = options.get("reshard_after_forward") != "never"
        root_again = options.get("reshard_after_forward") == "always"
    elif options["sharding_strategy"] == "NO_SHARD":
        yield from _scattered(facts, blocks, root, "all_reduce", layout.data, 1)
        return
    elif options["sharding_strategy"] == "SHARD_GRAD_OP":  # within no_sync parameters stay gathered
        again, forwards = False, 1
    ranks, size = layout.shards, HALF.get(layout.precision, facts.itemsize)
    divided = _of_experts(blocks) if layout.expert_ranks > 1 else 0  # not with all ranks
    whole = [(_elements(blocks) - divided) * size, _elements(root) * size]
    # The first all-gather of a forward cannot overlap with computation; all others do.
    yield Collective("all_gather", ranks, whole[1] * forwards, forwards, "forward", False)
    yield Collective("all_gather", ranks, whole[0] * forwards, len(blocks) * forwards, "forward", True)
    if again:
        yield Collective("all_gather", ranks, whole[0] * forwards, len(blocks) * forwards, "backward", True)
    if root_again:
        yield Collective("all_gather", ranks, whole[1] * forwards, forwards, "backward", False)
    yield from _scattered(facts, blocks, root, "reduce_scatter", ranks, scatters, divided)
    if layout.data > ranks:  # each rank its shard, across the replicas
        copies, shard = layout.data // ranks, facts.elements * facts.itemsize // ranks
        yield Collective("all_reduce", copies, shard, len(blocks) + 1, "backward", True, stride=ranks)


def _context(facts: ModelFacts, layout: Layout) -> Iterator[Collective]:
    """Keys and values of each block are gathered, and their gradients reduce-scattered (Llama 3, arXiv 2407.21783,
    section 3.3.2). A ring, where grouped ones are repeated for every head, sends them C-1 times, and in backward their
    gradients C more times."""
    if layout.context == 1:
        return
    blocks = [unit for unit in facts.units if unit.name.startswith("blocks.")]
    calls, again = len(blocks) * layout.accumulate, int(layout.activation_checkpointing)
    size, ranks = HALF.get(layout.precision, facts.itemsize), layout.context
    gathers = layout.options["attention"] == "gather"
    elements = len(blocks) * facts.keys if gathers else 2 * sum(unit.output for unit in blocks)
    whole = elements * layout.micro_batch * layout.accumulate * size
    if gathers:
        yield Collective("all_gather", ranks, whole, calls, "forward", False)
        yield Collective("all_gather", ranks, whole * again, calls * again, "backward", False)
        yield Collective("reduce_scatter", ranks, whole, calls, "backward", False)
        return
    gradients = whole // size * max(4, size)  # added up in fp32 or wider
    there, back = ranks - 1, (ranks - 1) * (1 + again)
    yield Collective("send", 2, there * whole // ranks, there * calls, "forward", True)
    yield Collective("send", 2, back * whole // ranks + gradients, (back + ranks) * calls, "backward", True)


def _experts(facts: ModelFacts, layout: Layout) -> Iterator[Collective]:
    """For each mixture, a rank sends how many rows go to each expert, then the rows to the ranks of their experts,
    which send the results back, and in backward their gradients (GShard, arXiv 2006.16668, section 3.2). It assumes a
    router that divides its tokens evenly; the number of rows over all ranks is the same for any router. With replicas
    of the experts, FSDP gathers and reduce-scatters each rank's among them."""
    ranks, replicas = layout.expert_ranks, layout.ranks // layout.expert_ranks
    units = [unit for unit in facts.units if unit.routed] if ranks > 1 else []
    calls, again = len(units) * layout.accumulate, int(layout.activation_checkpointing)
    size = HALF.get(layout.precision, facts.itemsize)
    rows = sum(unit.routed for unit in units) * layout.micro_batch * layout.accumulate * size
    for phase, times in (("forward", 1), ("backward", again)):
        counts = COUNT * facts.experts * calls * times
        yield Collective("all_to_all", ranks, counts, calls * times, phase, False)
    yield Collective("all_to_all", ranks, 2 * rows, 2 * calls, "forward", False)
    yield Collective("all_to_all", ranks, 2 * (1 + again) * rows, 2 * (1 + again) * calls, "backward", False)
    whole = _of_experts(units) // ranks
    for phase in ("forward", "backward"):
        gathered = whole * size * layout.accumulate
        yield Collective("all_gather", replicas, gathered, calls, phase, True, ranks)
    yield Collective("reduce_scatter", replicas, whole * facts.itemsize, len(units), "backward", True, ranks)


def _scattered(
    facts: ModelFacts, blocks: list[Unit], root: list[Unit], kind: str, ranks: int, times: int, divided: int = 0
) -> Iterator[Collective]:
    """Gradients are reduce-scattered in the parameters' precision, except those of `divided` elements of the blocks.
    The root's come last, because its embedding is the first layer."""
    elements = [sum(sum(unit.parameters) for unit in units) for units in (blocks, root)]
    sizes = [n * facts.itemsize * times for n in (elements[0] - divided, elements[1])]
    yield Collective(kind, ranks, sizes[0], len(blocks) * times, "backward", True)
    yield Collective(kind, ranks, sizes[1], times, "backward", False)


def _staged(facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
    """A pipeline sends activations to the next stage and their gradients back for every micro-batch, and the loss at
    the end of a step. With a data axis, the stages' parameters are sent as under ZeRO-2, but reduce-scattered once per
    step."""
    owners = {stage: r for r in range(layout.pipeline) for stage in layout.stages_of(r)}
    apart = layout.data * layout.tensor  # mesh axes: pipeline, data, tensor; the last varies fastest
    me = rank // apart
    blocks = [unit for unit in facts.units if unit.name.startswith("blocks.")]
    each, width = len(blocks) // layout.stages, _passed_on(facts, layout)
    for stage in layout.stages_of(me):
        handed_on = blocks[each * (stage + 1) - 1].output * width * layout.micro_batch * layout.accumulate
        if stage + 1 in owners and owners[stage + 1] != me:
            yield Collective("send", 2, handed_on, layout.accumulate, "forward", True, apart)
        if stage and owners[stage - 1] != me:
            before = blocks[each * stage - 1].output * width * layout.micro_batch * layout.accumulate
            yield Collective("send", 2, before, layout.accumulate, "backward", True, apart)
        if layout.strategy == "hybrid":
            units = [*blocks[each * stage : each * (stage + 1)], *_ends(facts, layout, stage)]
            calls = len([u for u in units if u in blocks]) + any(u not in blocks for u in units)
            size = HALF.get(layout.precision, facts.itemsize)
            gathered, scattered = (
                sum(held(unit, layout.tensor) + more * unit.frozen for unit in units) for more in (1, 0)
            )
            scattered *= facts.itemsize
            yield Collective("all_gather", layout.data, gathered * size, calls, "forward", True, layout.tensor)
            yield Collective("reduce_scatter", layout.data, scattered, calls, "backward", False, layout.tensor)
    yield Collective("all_reduce", layout.data, SCALAR, 1, "forward", False, layout.tensor)  # flag for a changed shape
    yield Collective("broadcast", layout.pipeline, SUM, 1, "backward", False, apart)


def _passed_on(facts: ModelFacts, layout: Layout) -> int:
    """Bytes of an element between blocks: FSDP casts a block's input, autocast alone keeps sums in the parameters'
    type."""
    return HALF.get(layout.precision, facts.itemsize) if layout.strategy == "hybrid" else facts.itemsize


def _ends(facts: ModelFacts, layout: Layout, stage: int) -> list[Unit]:
    """The units other than blocks of the first and the last stage."""
    first, last = stage == 0, stage == layout.stages - 1
    return [u for u in facts.units if (u.name == "embed" and first) or (u.name == "unembed" and last)]


def held(unit: Unit, tensor: int) -> int:
    """Trained elements of a unit on each of `tensor` tensor ranks. In labkit's block (with two norms), the norms and
    biases after sums are not split; each has the model's width, the smallest size of all."""
    if tensor == 1 or not unit.name.startswith("blocks."):
        return sum(unit.parameters)
    whole = min(unit.parameters) * min(WHOLE, unit.parameters.count(min(unit.parameters)))
    return whole + (sum(unit.parameters) - whole) // tensor


def _tensor(facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
    """Two sums of activations per block in each direction (Megatron-LM, arXiv 1909.08053, section 3). With sequence
    parallelism, each is an all-gather and a reduce-scatter (arXiv 2205.05198, section 4.2.2)."""
    blocks = [unit for unit in facts.units if unit.name.startswith("blocks.")]
    each = len(blocks) // layout.stages
    mine = [
        b for s in layout.stages_of(rank // (layout.data * layout.tensor)) for b in blocks[each * s : each * (s + 1)]
    ]
    elements = sum(unit.output for unit in mine) * layout.micro_batch * layout.accumulate
    calls = len(mine) * layout.accumulate
    forward = elements * HALF.get(layout.precision, facts.itemsize)
    backward = elements * _passed_on(facts, layout)
    again = layout.activation_checkpointing  # recomputation stops before a block's last sum
    if not layout.options.get("sequence_parallel"):
        yield Collective("all_reduce", layout.tensor, 2 * forward, 2 * calls, "forward", False)
        yield Collective(
            "all_reduce", layout.tensor, 2 * backward + again * forward, (2 + again) * calls, "backward", False
        )
        return
    ends = (
        mine[-1].output * layout.micro_batch * layout.accumulate * _passed_on(facts, layout)
    )  # split once, gathered once
    gathers = 2 * backward + ends, 2 * calls + layout.accumulate
    yield Collective("all_gather", layout.tensor, *gathers, "forward", False)
    yield Collective("reduce_scatter", layout.tensor, 2 * forward, 2 * calls, "forward", False)
    yield Collective(
        "all_gather",
        layout.tensor,
        gathers[0] + 2 * again * backward,
        gathers[1] + 2 * again * calls,
        "backward",
        False,
    )
    yield Collective(
        "reduce_scatter", layout.tensor, 2 * backward + again * forward, (2 + again) * calls, "backward", False
    )
    # Each rank has the norms' gradients of its own positions; the optimizer's step sums them.
    sums = NORMS * sum(min(unit.parameters) for unit in mine) * facts.itemsize
    yield Collective("all_reduce", layout.tensor, sums, NORMS * len(mine), "optimizer", False)


def _of_experts(units: Iterable[Unit]) -> int:
    return sum(unit.parameters[i] for unit in units for i in unit.experts)


def _elements(units: Iterable[Unit]) -> int:
    return sum(sum(unit.parameters) + unit.frozen for unit in units)
