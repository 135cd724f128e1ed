"""The planner's memory formulas against a rehearsed step, the traced step of a real run and other estimators, over
models, strategies, ranks and precisions, as a table. About 300 runs: forty minutes on two cores.

python benchmarks/memory_accuracy.py [--only fsdp --models CNN] > docs/evidence/memory.md
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from accelerate.commands.estimate import estimate_training_usage

import labkit
from labkit import Script
from labkit.planner.layout import layout_of
from labkit.planner.memory.ledger import UnknownToFormulas
from labkit.planner.memory.peak import peak
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.model.rehearsal import rehearse
from labkit.planner.strategies.strategy import Layout
from labkit.record.records import Peak

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from strategies.matrix import CNN, IMAGES, MLP  # noqa: E402

# Five square layers, as in "FSDP vs. DDP", whose layers are 16,384 wide.
WIDE = MLP.replace("width=64, layers=4", "width=768, layers=5")
SIZES = "context=128, width=128, heads=4, layers=4"
GLOBAL_BATCH = 16
INTRODUCTION = """
# Memory per rank: planned, rehearsed, measured

Each case is launched with `trace_memory=True`. The measured value is the peak of its third step, over everything that
goes through torch's dispatcher. The other columns show how far each prediction is from it: labkit's closed-form
formulas, the rehearsal of the script on tensors without data, and three published estimators. accelerate and DeepSpeed
cover states but not activations; the playbook's formula is for transformers and assumes unfused attention. An empty
cell means that the estimator does not cover the case. "States" are parameters and optimizer state, as rehearsed.
"""
SHAPES = {
    "transformer": {"tokens": 128, "width": 128, "heads": 4, "blocks": 4},
    "larger transformer": {"tokens": 128, "width": 256, "heads": 4, "blocks": 8},
}
STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "fsdp1": 3}  # as ZeRO counts them
HALF = ("bf16", "fp16")


def accelerate(facts: ModelFacts, layout: Layout) -> float | None:
    """`accelerate estimate-memory`, the column of training with Adam: a multiple of the weights, for one device."""
    if layout.strategy.name not in STAGES:
        return None
    usage = estimate_training_usage(facts.elements * 4, "bfloat16" if layout.precision in HALF else "float32")
    return max(usage.values())


def deepspeed(facts: ModelFacts, layout: Layout) -> float | None:
    """`estimate_zero2_model_states_mem_needs` and `estimate_zero3_…` without offload. Source: DeepSpeed's
    documentation, Memory Requirements: 4 params + 16 params/N; 4 x largest layer + 18 params/N. States only.
    """
    stage, elements = STAGES.get(layout.strategy.name, 0), facts.elements
    if stage == 2:
        return 4 * elements + 16 * elements / layout.shards
    if stage == 3:
        largest = max(size for unit in facts.units for size in unit.parameters)
        return 4 * largest + 18 * elements / layout.shards
    return None


def playbook(facts: ModelFacts, layout: Layout, *, tokens: int, width: int, heads: int, blocks: int) -> float | None:
    """The Ultra-Scale Playbook ("First steps: training on one GPU" and "Data parallelism: ZeRO"): 16 bytes per
    parameter, of which the stage divides 12, 14 or all by N, and L s b h (34 + 5 n s / h) of activations in 16 bits,
    twice that in 32; with recomputation only each block's input.
    """
    if layout.strategy.name not in STAGES:
        return None
    elements, ranks = facts.elements, layout.ranks
    stage = STAGES[layout.strategy.name]
    parameters, gradients, rest = (4, 4, 8) if layout.precision not in HALF else (2, 2, 12)
    states = (
        parameters / (ranks if stage == 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + rest / (ranks if stage >= 1 else 1)
    )
    per_token = 2 if layout.activation_checkpointing else 34 + 5 * heads * tokens / width
    wide = 1 if layout.precision in HALF else 2
    return states * elements + wide * blocks * tokens * layout.micro_batch * width * per_token


@dataclass(frozen=True)
class Case:
    strategy: str
    model: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    rank: int = 0

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.strategy} x{self.ranks}, {self.model}{options}" + (f", rank {self.rank}" if self.rank else "")

    @property
    def script(self) -> Script:
        script = Script.load(self.strategy)
        if "transformer" in self.model:  # with less text than by default: each run ends with a look at all of its test
            text = str(script).replace("limit=2**20", "limit=2**17")
            larger = text.replace(SIZES, "context=128, width=256, heads=4, layers=8")
            return Script.parse(larger if self.model == "larger transformer" else text, name=script.name)
        return script.with_cells(model={"CNN": CNN, "MLP": WIDE}[self.model], data=IMAGES)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"global_batch_size": GLOBAL_BATCH, **self.options}


def cases() -> Iterator[Case]:
    """Every strategy with one, two and four ranks, then its options."""
    models = ["transformer", "larger transformer", "CNN", "MLP"]
    for strategy, model, ranks, precision, recomputed in itertools.product(
        ["single", "ddp", "zero1", "zero2", "fsdp", "fsdp1", "tensor_parallel", "pipeline", "hybrid"],
        models,
        [1, 2, 4],
        ["fp32", "bf16"],
        [False, True],
    ):
        without_blocks = model == "CNN" and (recomputed or strategy in ("pipeline", "hybrid"))
        uncut = model == "MLP" and strategy in ("pipeline", "hybrid") and ranks > 1  # five blocks
        unsplit = strategy == "tensor_parallel" and "transformer" not in model
        if without_blocks or uncut or unsplit or (strategy == "single" and ranks > 1):
            continue
        options: dict[str, Any] = {"precision": precision} if precision != "fp32" else {}
        if recomputed:
            options["activation_checkpointing"] = True
        if strategy == "pipeline":
            options |= {"accumulate": 4, "schedule": "1F1B"}
        if strategy == "hybrid":
            options |= {"pipeline": min(2, ranks), "accumulate": 2}
        yield Case(strategy, model, ranks, options, ranks - 1)
    for strategy, ranks, options in OPTIONS:
        for model in ("transformer", "MLP"):
            five = ranks if strategy != "pipeline" else 5
            if model == "MLP" and (strategy == "tensor_parallel" or options.get("tensor") or options.get("pipeline")):
                continue
            if model == "MLP" and strategy == "pipeline" and options["schedule"] != "1F1B":
                continue
            yield Case(strategy, model, five if model == "MLP" else ranks, options)


OPTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {"accumulate": 4}),
    ("single", 1, {"precision": "fp64"}),
    ("ddp", 2, {"gradient_as_bucket_view": False}),
    ("ddp", 2, {"gradient_as_bucket_view": False, "accumulate": 4}),
    ("ddp", 2, {"accumulate": 2, "precision": "bf16"}),
    ("zero1", 4, {"accumulate": 4}),
    ("zero2", 2, {"accumulate": 4}),
    ("fsdp", 2, {"reshard_after_forward": "always"}),
    ("fsdp", 4, {"reshard_after_forward": "never", "precision": "bf16"}),
    ("fsdp", 4, {"replicas": 2}),
    ("fsdp", 2, {"accumulate": 4}),
    ("fsdp", 2, {"accumulate": 4, "precision": "bf16"}),
    ("fsdp1", 2, {"sharding_strategy": "SHARD_GRAD_OP", "accumulate": 2}),
    ("fsdp1", 2, {"sharding_strategy": "NO_SHARD"}),
    ("fsdp1", 2, {"wrap": "none"}),
    ("fsdp1", 2, {"wrap": "module"}),
    ("fsdp1", 2, {"wrap": "size"}),
    ("fsdp1", 2, {"accumulate": 2, "precision": "bf16"}),
    ("tensor_parallel", 2, {"sequence_parallel": True}),
    ("tensor_parallel", 4, {"sequence_parallel": True, "precision": "bf16", "activation_checkpointing": True}),
    *(
        ("pipeline", 2, {"accumulate": 4, "schedule": schedule})
        for schedule in [
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        ]
    ),
    ("hybrid", 4, {"tensor": 2}),
    ("hybrid", 8, {"tensor": 2, "pipeline": 2, "accumulate": 4, "schedule": "1F1B", "precision": "bf16"}),
]


@cache
def facts(model: str, split: tuple[tuple[int, bool], ...]) -> ModelFacts:
    return facts_of(Case("tensor_parallel" if split else "single", model, 1).script, {}, split)


def planned(case: Case) -> Peak | None:
    """The peak by formulas; None where they do not cover the case."""
    layout = layout_of(case.script, case.ranks, case.parameters)
    split = ((layout.tensor, bool(case.options.get("sequence_parallel"))),) if layout.tensor > 1 else ()
    known = facts(case.model, split)
    try:
        return peak(known, layout, case.rank)
    except UnknownToFormulas:
        return None


def rehearsed(case: Case) -> Peak:
    return rehearse(case.script, case.ranks, case.parameters, rank=case.rank).peak


def traced(case: Case, runs_dir: str) -> Peak:
    """Of the same step in a real run: torchrun, gloo, every rank."""
    with contextlib.redirect_stdout(sys.stderr):
        run = labkit.launch(
            case.script,
            nproc_per_node=case.ranks,
            trace_memory=True,
            steps=3,
            wait=True,
            runs_dir=runs_dir,
            **case.parameters,
        )
    (held,) = (held for held in run.memory().ranks if held.rank == case.rank)
    assert held.traced, f"{case}: no step was traced"
    return held.traced


PEERS = """
torch has a tracker of its own, `torch.distributed._tools`: `MemTracker`, and `FSDPMemTracker` for FSDP2. In the
rehearsed step of `single`, `ddp`, `zero1`, `zero2`, `fsdp` and `tensor_parallel` it finds the same peak, to the byte
(tests/planner/test_memory_peer.py). labkit keeps its own because it takes half the time, has one set of categories for
all strategies, says in which phase and operator the peak is, and counts no more on real ranks than was there before the
step. `RuntimeEstimator` asks the GPU that it runs on for its speed, so it cannot plan for another one; `SACEstimator`
chooses what to recompute, which labkit leaves to the user.
"""
ON_A_GPU = """
## On a GPU

A plan for a GPU is made without one, on CPU tensors and by CUDA's rules: the lists of its autocast, read from torch's
own header, and the kernels that torch chooses there for attention, dropout, norms, LSTM cells, embedding bags and
optimizers. `make cuda-dispatch` compares such plans with torch's own dispatch for CUDA, which a CUDA build of torch has
without a GPU: 102 operators and layers in fp32 and bf16, attention also as on a T4 (fp16) and on an H100, 18 models of
transformers, torchvision and timm, and five optimizers. All are equal to the byte, except:

- fp16 is planned as bf16. CUDA's softmax reads fp16 and writes 32 bits in one kernel: where scores are held, as without
  `scaled_dot_product_attention`, up to 5% too much is planned. Attention in bf16 on GPUs before Ampere, where a model
  names that type itself, holds its scores, which a plan leaves out.
- Attention on Hopper and newer, where torch prefers cuDNN's kernel: 8 bytes more a call are planned, and the copy of a
  mask whose rows do not begin at multiples of 8 elements.
- `LSTM`, `GRU` and `RNN` are not compared: cuDNN does not publish the size of its reserve space. The plan says what it
  assumes.
- `GRUCell` and `ctc_loss` are not compared: torch has no fake kernels of them for CUDA.
- A model that asks for `x.is_cuda` or for the type of a tensor's device takes the CPU's branch,
  and `torch.autocast("cpu")` counts as CUDA's.
- Where an operator that was never compared has more results than one, which may be a workspace, the plan says so.

Beside the tensors of a plan, a GPU holds:

- CUDA's context: 0.1 to 0.5 GiB (out-of-memory messages of T4s; Bekman, "Machine Learning Engineering"). Half a GiB is
  assumed for it and the next two.
- NCCL's buffers: 4 MiB for each channel and peer (NCCL_BUFFSIZE in NCCL's documentation).
- cuBLAS's workspaces, in torch's allocator: 8.1 MiB, since Hopper 32 MiB, once for the thread of forward and once for
  that of backward (`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp).
- cuDNN's workspaces, in torch's allocator: cannot be told, because the algorithms that cuDNN picks decide.
- What torch's allocator loses by rounding to 512 bytes, by blocks up to 1 MiB larger than asked for, and by
  fragmentation: cannot be told; recommendations leave 5%.
- The buckets of DDP's first step (`ddp`, `zero1`), over NCCL. They are planned until the optimizer's step.

The last of these was measured on one H100 (2026-11-27): GPT-2 small under `ddp` peaked 638 MiB above parameters,
gradients, optimizer state, activations and cuBLAS's workspaces, under `single` 15 MiB; its gradients have 622 MiB. The
cause was read in torch's source, not run: at the start of the second step DDP makes new buckets, in the order in which
gradients were ready in the first (`Reducer::rebuild_buckets`; not with `find_unused_parameters` unless the graph is
static). It waits for the futures of its all-reduces, not for their works, so their tensors stay in the works'
`TensorShelf` until NCCL's watchdog, which looks every 0.1 s, has seen them end and a later collective empties the shelf
(ProcessGroupNCCL.hpp, `shelvesToUnstash_`). So a step of a few tenths of a second may not have a second set at its
peak, and in one below 0.1 s the set may outlast backward, which is not planned.
"""


def others(case: Case) -> list[float | None]:
    """What accelerate, DeepSpeed and the playbook say of the case."""
    layout, known = layout_of(case.script, case.ranks, case.parameters), facts(case.model, ())
    sizes = SHAPES.get(case.model)
    return [
        accelerate(known, layout),
        deepspeed(known, layout),
        playbook(known, layout, **sizes) if sizes else None,
    ]


def percent(found: Any, measured: Peak) -> str:
    return "" if found is None else f"{100 * (found / measured.bytes - 1):+.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="strategies, of the cases that --every leaves")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--jobs", type=int, default=2, help="rehearsals at once (default 2)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th case (3 mixes all options)")
    chosen = parser.parse_args()
    each = [case for case in dict.fromkeys(cases()) if case.model in (chosen.models or [case.model])][:: chosen.every]
    wanted = [case for case in each if case.strategy in (chosen.only or [case.strategy])]
    print(f"<!-- written by: python {shlex.join(sys.argv)} > docs/evidence/memory.md -->")
    print(INTRODUCTION)
    print("| case | measured, MiB | at | states | formulas | at | rehearsed | accelerate | DeepSpeed | playbook |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    errors = defaultdict(list)
    with ThreadPoolExecutor(chosen.jobs) as pool, tempfile.TemporaryDirectory() as runs_dir:
        for case, played in zip(wanted, pool.map(rehearsed, wanted), strict=True):
            ours, seen = planned(case), traced(case, runs_dir)
            wrong = {n: played.categories.get(n, 0) - seen.categories.get(n, 0) for n in ("parameters", "optimizer")}
            exact = "exact" if not any(wrong.values()) else ", ".join(f"{n} {b:+,} bytes" for n, b in wrong.items())
            formulas = ours.bytes / seen.bytes - 1 if ours else None
            errors[case.strategy].append((formulas, played.bytes / seen.bytes - 1, exact == "exact"))
            columns = [
                case,
                f"{seen.bytes / 2**20:.2f}",
                f"{seen.phase}, {seen.operation.removesuffix('.default')}",
                exact,
                percent(ours.bytes if ours else None, seen),
                ours.operation if ours else "",
                percent(played.bytes, seen),
                *(percent(other, seen) for other in others(case)),
            ]
            print("|", *(f"{column} |" for column in columns), flush=True)
    print("\n| strategy | cases | states exact | formulas: median, largest error | rehearsed: median, largest |")
    print("|---|---|---|---|---|")
    for strategy, found in errors.items():
        both = ([abs(each[way]) for each in found if each[way] is not None] for way in (0, 1))
        exact = sum(each[2] for each in found)
        worst = [f"{100 * median(way):.2f}%, {100 * max(way):.2f}%" if way else "" for way in both]
        print("|", *(f"{column} |" for column in (strategy, len(found), exact, *worst)))
    print(PEERS + ON_A_GPU.rstrip())


if __name__ == "__main__":
    main()
