"""Rehearses one optimizer step of a script on tensors without data, as one of any number of ranks.

It runs the script's own code and torch's own strategies; only DDP's reducer, the partitioning of
ZeroRedundancyOptimizer and the communication of pipeline stages are stand-ins. It takes seconds and needs no device.
For a model that cannot be run without data, it tells the memory of parameters, gradients and optimizer state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from labkit.arguments import Parameters
from labkit.errors import LaunchError
from labkit.planner.contract import able_to
from labkit.planner.model.child import FORKS, Unplannable, WillFail, ask
from labkit.planner.model.facts import Capability
from labkit.planner.strategies.staged import PIPELINE_AXIS
from labkit.planner.strategies.strategy import Layout
from labkit.record import Peak
from labkit.write import Script, command_line

MOMENTS = 2  # of AdamW
SAMPLES = 2  # that are evaluated


def states_alone(script: Script, layout: Layout, parameters: Parameters, *, path: str = "") -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on a rank: 4, 4 and 8 per trained fp32 parameter, as in
    ZeRO (arXiv 1910.02054, section 5), if layers split evenly over tensor and pipeline ranks.

    Raises LaunchError if the script refuses its options, Unplannable if its model cannot be built.
    """
    script = script if path else able_to(script, parameters)
    sizes = ask("rehearsal.sizes_of", {"text": str(script), "argv": command_line(script, parameters), "path": path})
    along = layout.tensor * layout.pipeline  # which do not divide what is outside of blocks
    trained = sizes["blocks"] + sizes["rest"] * along
    by = layout.strategy.divided(layout)
    gathered = layout.variant.itemsize * trained + sizes["frozen"] if by.parameters < by.gradients else 0
    return {
        "parameters": layout.itemsize * (trained // by.gradients) + sizes["frozen"] // by.gradients + gathered,
        "gradients": layout.itemsize * (trained // by.gradients),
        "optimizer": MOMENTS * layout.itemsize * (trained // by.optimizer),
    }


def sizes_of(text: str, argv: Sequence[str], path: str) -> dict[str, int]:
    """Elements of trained parameters, in blocks and elsewhere, and bytes of those that are not trained."""
    from labkit.planner.model.fake.fake_run import FakeRun

    fake_run = FakeRun(text, argv, path)
    model = fake_run.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    in_blocks = {p for block in fake_run.script.blocks_of(model) for p in block.parameters()}
    blocks = sum(p.numel() for p in trained if p in in_blocks)
    types = {p.dtype for p in model.parameters() if not p.requires_grad}
    half = fake_run.half()
    kept_in = {dtype: fake_run.kept_in(dtype, half) if dtype.is_floating_point else dtype for dtype in types}
    return {
        "blocks": blocks,
        "rest": sum(p.numel() for p in trained) - blocks,
        "frozen": sum(p.numel() * kept_in[p.dtype].itemsize for p in model.parameters() if not p.requires_grad),
    }


class Rehearsal(NamedTuple):
    """The peak memory of a rank in a step, and sentences on what the step does that a user may not expect."""

    peak: Peak
    notes: tuple[str, ...]


def rehearse(
    script: Script,
    ranks: int,
    parameters: Parameters,
    *,
    rank: int = 0,
    path: str = "",
    capability: Capability | None = None,
    skewed: bool = False,
) -> Rehearsal:
    """Rehearse a step of `rank`, after the optimizer has its state.

    `path` is the script's file, if any, so that modules next to it can be imported. `capability`: with the kernels and
    the autocast of a GPU of this compute capability, instead of a CPU's. `skewed`: a router sends all tokens to the
    same experts, instead of the same share to each.

    Raises LaunchError if the script refuses its options, Unplannable if it cannot run on tensors without data, and
    WillFail, which is one of these, if it fails with data, too.
    """
    script = script if path else able_to(script, parameters)
    argv = command_line(script, parameters)
    question = {"text": str(script), "argv": argv, "path": path, "ranks": ranks, "rank": rank}
    try:
        peak, notes = ask("rehearsal.step", question | {"capability": capability, "skewed": skewed})
    except Unplannable as error:
        if error.signature and _signature_with_data(question) == error.signature:
            raise WillFail(str(error)) from None
        raise
    return Rehearsal(Peak(*peak), tuple(notes))


def _signature_with_data(question: dict[str, Any]) -> str:
    """The signature of the error with which a step ends on a few samples; "" if it ends well, or is too much."""
    try:
        return str(ask("real_step.failure", question)) if FORKS else ""
    except (LaunchError, Unplannable):
        return ""


def step(
    text: str, argv: list[str], path: str, ranks: int, rank: int, capability: Capability | None, skewed: bool = False
) -> tuple[Peak, list[str]]:
    from torch.distributed.fsdp import FSDPModule
    from torch.optim.optimizer import _default_to_fused_or_foreach as together

    from labkit.planner.model.fake.fake_run import CPU, FakeRun
    from labkit.planner.model.fake.fakes import Replicated, refuse_double_backward, silence
    from labkit.planner.model.samples import floating_type
    from labkit.planner.model.writes import Writes, few_samples
    from labkit.worker import Tracker, live_optimizers

    fake_run = FakeRun(text, argv, path, capability, skewed)
    script, args = fake_run.script, fake_run.args
    mesh = fake_run.join_group(ranks, rank)
    data, model = mesh["data"], fake_run.prepared()
    dtype = floating_type(model)
    batches = fake_run.batches()
    batch = batches.make(args.global_batch_size // data.size(), dtype)
    fake_run.try_evaluation(model, batches.make(SAMPLES, dtype))
    if PIPELINE_AXIS in mesh.mesh_dim_names:
        micro_batch = args.global_batch_size // (data.size() * args.accumulate)
        fake_run.tell_stages(model, batches.make(micro_batch, dtype))
    writes = Writes(model, batches.tensors(batch))
    with silence():
        model = script.parallelize(model, mesh, CPU, args)  # a mesh holds real tensors
    fake_run.tell_types(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        refuse_double_backward()
    for name, parameter in model.named_parameters():
        parameter.path = name  # as main() does with the extra optimizers
    with fake_run.fake, silence():
        optimizer = script.make_optimizer(model, mesh, args)
        stepping = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer updates its partition with .optim
        for group in stepping.param_groups:
            if "foreach" in group and group["foreach"] is None:
                group["foreach"] = together(group["params"], differentiable=False)[1]
        alike = _alike(stepping)
        updated = _updated(stepping, alike)
        _make_state(stepping, alike, {p for group in updated for p in group})
        model.train()
        tracker = Tracker()
        tracker.mark_training([model], live_optimizers())
        tracker.mark(batches.tensors(batch), "activations")
        replaced = model.replaced() if isinstance(model, Replicated) and capability else []
        tracker.mark(replaced, "communication")
        with tracker:
            with writes:
                script.forward_backward(model, batch, data, args)
            parts = fake_run.option("accumulate") or 1
            notes = writes.notes(data.size(), parts, broadcasts=isinstance(model, Replicated))
            notes += few_samples(model, args.global_batch_size, data.size() * parts)
            if isinstance(model, Replicated) and not skewed:
                model.check()
            replaced.clear()
            if capability and fake_run.option("cpu_offload"):  # the optimizer's step is the host's
                return tracker.peak(elsewhere=_states(model, optimizer)), notes
            tracker.before_step(optimizer)
            with _updating(stepping, updated):
                optimizer.step()
            tracker.after_step(optimizer)
            optimizer.zero_grad()
    return tracker.peak(), notes


def _states(model: Any, optimizer: Any) -> list[Any]:
    """The parameters, their gradients and the optimizer's state."""
    parameters = {*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])}
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [*parameters, *(p.grad for p in parameters if p.grad is not None), *state]


def _alike(optimizer: Any) -> list[list[Any]]:
    """The trained parameters; those of torch's own optimizers grouped by identical state and updates. FSDP1 omits
    gradients of empty shards.
    """
    alike: dict[Any, list[Any]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad and p.numel():
                kind = (number, type(p), p.shape, p.dtype, getattr(p, "placements", None))
                alike[kind if _is_torchs(optimizer) else id(p)].append(p)
    return [*alike.values()]


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _updated(optimizer: Any, alike: list[list[Any]]) -> list[list[Any]]:
    """By group of the optimizer, the parameters that have to be updated. Of those that torch's own optimizers update
    one by one, each combination of neighbours once: a parameter's temporaries are freed during the update of the next.
    """
    kinds = {p: kind for kind, group in enumerate(alike) for p in group}
    groups = [[p for p in group["params"] if p in kinds] for group in optimizer.param_groups]
    one_by_one = _is_torchs(optimizer) and all(group.get("foreach") is False for group in optimizer.param_groups)
    return [_neighbours(group, kinds) for group in groups] if one_by_one else groups


def _neighbours(parameters: list[Any], kinds: Mapping[Any, int]) -> list[Any]:
    """One pair of neighbours of each combination of kinds, with the smallest parameter between pairs, of which next to
    nothing is held during an update."""
    smallest = min(parameters, key=lambda p: p.numel(), default=None)
    seen: set[tuple[int, int]] = set()
    chosen = parameters[:1]
    for before, p in pairwise(parameters):
        if (pair := (kinds[before], kinds[p])) not in seen:
            seen.add(pair)
            chosen += [p] if chosen[-1] is before else [smallest, before, p]
    return chosen


def _make_state(optimizer: Any, alike: list[list[Any]], updated: set[Any]) -> None:
    """Make the state as the first step does, because the peak is that of a later step."""
    for first, *_ in alike:
        first.grad = first.detach().clone()
    firsts = {first for first, *_ in alike}
    with _updating(optimizer, [[p for p in group["params"] if p in firsts] for group in optimizer.param_groups]):
        optimizer.step()
    optimizer.zero_grad()
    for first, *others in alike:
        for p in others if first in optimizer.state else []:
            values = optimizer.state[first]
            if p not in updated and not getattr(p, "_post_accumulate_grad_hooks", None):  # nor updated in backward
                values = {name: getattr(value, "_local_tensor", value) for name, value in values.items()}
            optimizer.state[p] = {name: value.clone() for name, value in values.items()}


@contextmanager
def _updating(optimizer: Any, parameters: list[list[Any]]) -> Iterator[None]:
    """Restrict the groups of the optimizer to these parameters.

    Where torch's optimizers update lists of DTensors, they get this rank's parts: each operator on such lists spends
    seconds on the shardings of hundreds of tensors. Of these optimizers only Adafactor needs other ranks' elements.
    """
    own = _is_torchs(optimizer) and type(optimizer).__name__ != "Adafactor"
    in_lists = any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)
    sharded = [p for group in parameters for p in group if hasattr(p, "_local_tensor") and p.grad is not None]
    in_backward = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in sharded)  # updates whole DTensors
    parts = {p: p._local_tensor for p in sharded if own and in_lists and not in_backward}
    for p, part in parts.items():
        grad = p.grad if p.grad.placements == p.placements else p.grad.redistribute(placements=p.placements)
        part.grad = grad._local_tensor
        optimizer.state[part] = optimizer.state.pop(p, {})
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for (group, _), chosen in zip(groups, parameters, strict=True):
        group["params"] = [parts.get(p, p) for p in chosen]
    yield
    for group, all_of_them in groups:
        group["params"] = all_of_them
    for p, part in parts.items():
        part.grad = None
        optimizer.state[p] = optimizer.state.pop(part)
