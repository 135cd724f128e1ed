"""One optimizer step of a script, rehearsed on tensors without data by one of any number of ranks.

It is the script's own code, torch's own strategies and their order of events; only DDP's reducer, the sharing of
ZeroRedundancyOptimizer and what pipeline stages send are stand-ins. Costs seconds and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.planner.child import answer, ask
from labkit.record.peak import Peak
from labkit.write import Script, command_line

__all__ = ["rehearse"]


def rehearse(script: Script, ranks: int, parameters: Mapping[str, Any], *, rank: int = 0, path: str = "") -> Peak:
    """What `rank` of `ranks` holds at the peak of a step, once the optimizer has its state.

    `path` is that of the script's file, if it has one: modules beside it can be imported.

    Raises LaunchError when the script refuses its options, Unplannable when it cannot run on tensors without data.
    """
    argv = command_line(script, parameters)
    question = {"text": str(script), "argv": argv, "path": path, "ranks": ranks, "rank": rank}
    return Peak(*ask("rehearsal", question))


def _peak(text: str, argv: list[str], path: str, ranks: int, rank: int) -> Peak:
    from labkit.planner.scene import Scene
    from labkit.planner.stand_ins import Silence
    from labkit.worker.tracker import Tracker

    scene = Scene(text, argv, path)
    script, args = scene.script, scene.args
    mesh = scene.join_group(ranks, rank)
    model = scene.prepare(scene.model())
    size = args.global_batch_size // (mesh["data"].size() * args.accumulate)
    sample = scene.sample()
    micro_batches = [scene.batch(sample, size) for _ in range(args.accumulate)]
    if "pipeline" in mesh.mesh_dim_names:
        scene.tell_stages(model, micro_batches[0][0])
    with Silence():
        model = script.parallelize(model, mesh, args)  # a mesh holds real tensors
    scene.tell_types(model)
    with scene.fake, Silence():
        optimizer = script.make_optimizer(model, mesh, args)
        for group in getattr(optimizer, "optim", optimizer).param_groups:
            group["foreach"] = False
        scaler = script.LossScaler("cpu", enabled=False)
        _make_state(optimizer)
        model.train()
        tracker = Tracker()
        tracker.mark_training([model], [optimizer])
        tracker.mark([tensor for batch in micro_batches for tensor in batch], "activations")
        with tracker:
            script.forward_backward(model, micro_batches, scaler)
            tracker.before_step(optimizer)
            optimizer.step()
            tracker.after_step(optimizer)
            optimizer.zero_grad()
    return tracker.peak()


def _make_state(optimizer: Any) -> None:
    """As the first step does; the peak is that of any later one. FSDP1 leaves gradients of empty shards out."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            trained = parameter.requires_grad and parameter.numel()
            parameter.grad = parameter.detach().clone() if trained else None
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    answer(_peak)
