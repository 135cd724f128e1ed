"""One optimizer step of a script, rehearsed on tensors without data by one of any number of ranks.

It is the script's own code, torch's own strategies and their order of events; only DDP's reducer, the sharing of
ZeroRedundancyOptimizer and what pipeline stages send are stand-ins. Costs seconds and no device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from labkit.planner.layout import able_to
from labkit.planner.model.child import answer, ask
from labkit.record.peak import Peak
from labkit.write import Script, command_line

__all__ = ["rehearse"]


def rehearse(script: Script, ranks: int, parameters: Mapping[str, Any], *, rank: int = 0, path: str = "") -> Peak:
    """What `rank` of `ranks` holds at the peak of a step, once the optimizer has its state.

    `path` is that of the script's file, if it has one: modules beside it can be imported.

    Raises LaunchError when the script refuses its options, Unplannable when it cannot run on tensors without data.
    """
    script = script if path else able_to(script, parameters)
    argv = command_line(script, parameters)
    question = {"text": str(script), "argv": argv, "path": path, "ranks": ranks, "rank": rank}
    return Peak(*ask("rehearsal", question))


def _peak(text: str, argv: list[str], path: str, ranks: int, rank: int) -> Peak:
    from labkit.planner.model.fake_run import CPU, Scene
    from labkit.planner.model.fakes import silence
    from labkit.worker.tracker import Tracker

    scene = Scene(text, argv, path)
    script, args = scene.script, scene.args
    mesh = scene.join_group(ranks, rank)
    data = mesh["data"]
    model, scaler = scene.prepared()
    dtype = next(model.parameters()).dtype
    batches = scene.batches()
    batch = batches.make(args.global_batch_size // data.size(), dtype)
    if "pipeline" in mesh.mesh_dim_names:
        micro_batch = args.global_batch_size // (data.size() * args.accumulate)
        scene.tell_stages(model, batches.make(micro_batch, dtype))
    with silence():
        model = script.parallelize(model, mesh, CPU, args)  # a mesh holds real tensors
    scene.tell_types(model)
    with scene.fake, silence():
        optimizer = script.make_optimizer(model, mesh, args)
        stepping = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer steps its share in .optim
        for group in stepping.param_groups:
            if "foreach" in group:
                group["foreach"] = False
        alike = _alike(stepping)
        _make_state(stepping, alike)
        model.train()
        tracker = Tracker()
        tracker.mark_training([model], [optimizer])
        tracker.mark(batches.tensors(batch), "activations")
        with tracker:
            script.forward_backward(model, batch, data, scaler, args)
            tracker.before_step(optimizer)
            with _only(stepping, {first for first, *_ in alike}):
                optimizer.step()
            tracker.after_step(optimizer)
            optimizer.zero_grad()
    return tracker.peak()


def _alike(optimizer: Any) -> list[list[Any]]:
    """Its trained parameters, those in one list that are stepped in the same way, one after the other.

    Of a hundred layers that are alike stepping one tells all: nothing of the first is left when the second begins.
    That is known of torch's own optimizers. FSDP1 leaves gradients of empty shards out.
    """
    torchs_own = type(optimizer).__module__.startswith("torch.optim.")
    singly = torchs_own and all(group.get("foreach") is False for group in optimizer.param_groups)
    alike: dict[Any, list[Any]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad and p.numel():
                kind = (number, type(p), p.shape, p.dtype, getattr(p, "placements", None))
                alike[kind if singly else id(p)].append(p)
    return [*alike.values()]


def _make_state(optimizer: Any, alike: list[list[Any]]) -> None:
    """As the first step does; the peak is that of any later one."""
    for first, *_ in alike:
        first.grad = first.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    for first, *others in alike:
        for p in others if first in optimizer.state else []:
            optimizer.state[p] = {name: value.clone() for name, value in optimizer.state[first].items()}


@contextmanager
def _only(optimizer: Any, parameters: set[Any]) -> Iterator[None]:
    """While it steps nothing but these."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, all_of_them in groups:
        group["params"] = [p for p in all_of_them if p in parameters]
    yield
    for group, all_of_them in groups:
        group["params"] = all_of_them


if __name__ == "__main__":
    answer(_peak)
