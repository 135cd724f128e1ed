"""Sentences of widely read articles, each with what decides it.

    make notebooks && python benchmarks/popular_claims.py build/notebooks/runs > docs/evidence/popular_claims.md

What a lab decides is read from what that lab has claimed and measured, and what can be counted is counted when this is
run. A verdict that no number gives is written down here, with its reason. tests/unit/test_popular_claims.py keeps the
list to what the labs claim and the page to this list.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import counted_claims as counted
from articles import ARTICLES, BLOG, GUIDE, NOTE, README, SCRIPT

from labkit_labs.claims import Claim

RIGHT, WRONG, IN_PART, UNKNOWN = "right", "wrong", "right in part", "cannot be told"

HEAD = """# Popular claims, tested

Sentences of five widely read articles on distributed training, abridged, each with what is true and what decides it.
Their addresses are not known, so titles and sections stand for them. The page is written by `make notebooks && python
benchmarks/popular_claims.py build/notebooks/runs`, on a machine without a GPU. What only a GPU could decide cannot be
told.

Behind each arrow is what decides:

- **A lab**: `python notebooks/run.py --into build/notebooks notebooks/05_fsdp.ipynb` runs the one that is named. Shown
  is what it measured, and its formula if that differs. A number in a sentence is compared with that within the lab's
  tolerance, or with the formula if a clock measured it.
- **Counted**: `python benchmarks/counted_claims.py` and the word behind it print it.
- **A rule** of [`labkit check`](../reference/check.md), which finds it in such a script.
- A test, or a document.

[The articles' advice on when to use what](decisions.md), which the planner judges, is a page of its own.
"""


@dataclass(frozen=True)
class Lab:
    """A claim of a lab decides. `said`: the sentence's number, or the lowest and the highest, in the claim's unit;
    `times`: the same as a multiple of the lab's formula. Without either, the verdict is the entry's."""

    lab: str
    claim: str
    said: float | tuple[float, float] | None = None
    times: float | None = None

    @property
    def shown(self) -> str:
        return f"[lab {self.lab[:2]}](../../notebooks/{self.lab}.ipynb)"


@dataclass(frozen=True)
class Counted:
    """A function of counted_claims.py decides: it returns what it found."""

    found: Callable[[], str]

    @property
    def shown(self) -> str:
        return f"counted: `{self.found.__name__}`"


@dataclass(frozen=True)
class Rule:
    """A rule of `labkit check` finds it in the article's script."""

    name: str

    @property
    def shown(self) -> str:
        return f"rule `{self.name}`"


@dataclass(frozen=True)
class Source:
    """A test of labkit's or a document decides, given as Markdown."""

    text: str

    @property
    def shown(self) -> str:
        return self.text


@dataclass(frozen=True)
class Entry:
    article: str
    section: str
    sentence: str
    truth: str
    by: Lab | Counted | Rule | Source
    verdict: str = ""  # empty if the lab's number gives it

    def row(self, found: str, verdict: str) -> str:
        says = f"{self.sentence} *({self.section})*"
        true = f"{self.truth} {found}{'. ' if found else ''}→ {self.by.shown}"
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (says, true, f'**{verdict}**'))} |"


CLAIMS = (
    Entry(
        NOTE,
        "3. FSDP",
        "Optimizer State: Sharded (biggest memory saver)",
        "Adam's two moments are half of the 16 bytes that a parameter takes in fp32.",
        Lab("04_memory", "FSDP: AdamW of a rank, in bytes per parameter"),
        RIGHT,
    ),
    Entry(
        NOTE,
        "3. FSDP",
        "During Backward pass: Same.",
        "Blocks are gathered in forward and again in backward. The root, which backward needs first, is kept.",
        Lab("05_fsdp", "all-gathers in a step of FSDP, 23 blocks and the root"),
        IN_PART,
    ),
    Entry(
        NOTE,
        "PyTorch FSDP Wrapper",
        "my_auto_wrap_policy = functools.partial(…)",
        "The example does not import functools: it stops with a NameError.",
        Source("read: the imports of the example are torch, FullyShardedDataParallel and size_based_auto_wrap_policy"),
        WRONG,
    ),
    Entry(
        NOTE,
        "PyTorch FSDP Wrapper",
        "MixedPrecision(param_dtype=torch.float16, …), then loss.backward()",
        "Without a scaler small gradients lose digits in fp16, or become 0.",
        Lab("11_mixed_precision", "share of this model's gradients that lose digits in fp16, not scaled"),
        WRONG,
    ),
    Entry(
        NOTE,
        "PyTorch FSDP Wrapper",
        "model = MyLargeTransformer().cuda(), then FSDP(model)",
        "The whole model is first on every GPU, so it has to fit there, which FSDP is to avoid.",
        Rule("moved-before-sharding"),
        WRONG,
    ),
    Entry(
        NOTE,
        "PyTorch FSDP Wrapper",
        "init_process_group(backend='nccl'), then model.cuda()",
        "Nothing tells a rank which GPU is its own, so all of them take GPU 0.",
        Rule("no-set-device"),
        WRONG,
    ),
    Entry(
        GUIDE,
        "2. DDP Explained",
        "Overlapped communication: Gradient sync overlaps with backward pass",
        "All buckets but the last are sent while backward goes on.",
        Lab("17_profiling", "healthy: all-reduces that backward hides, of four buckets"),
        RIGHT,
    ),
    Entry(
        GUIDE,
        "2. DDP Explained",
        "Just wrap your model with DistributedDataParallel",
        "Wrapping averages the gradients. That ranks read different samples is the sampler's work, and without one all "
        "ranks train on the same.",
        Rule("no-distributed-sampler"),
        IN_PART,
    ),
    Entry(
        GUIDE,
        "3. FSDP's Sharding Strategies",
        "SHARD_GRAD_OP: Shard gradients and optimizer states only",
        "Between two steps the parameters are sharded as well. They stay gathered from forward to backward.",
        Lab("05_fsdp", "never: held before forward", times=2),
    ),
    Entry(
        GUIDE,
        "4. Head-to-Head Comparison",
        "Memory per GPU: 1/N of each (sharded)",
        "That is the states' share. Activations and the gathered unit are not divided.",
        Lab("04_memory", "FSDP's peak on two ranks, as a share of DDP's", said=0.5),
    ),
    Entry(
        GUIDE,
        "5. Code Examples",
        "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, …)",
        "It sends half of the bytes of fp32, but gradients are then summed with bf16's 8 significant bits. With "
        "reduce_dtype=torch.float32 it is two thirds.",
        Lab("11_mixed_precision", "the same with sums in 16 bits"),
        IN_PART,
    ),
    Entry(
        GUIDE,
        "5. FSDP Checkpointing",
        'FSDP.optim_state_dict_to_load(checkpoint["optimizer"], model, optimizer)',
        "The arguments are (model, optim, optim_state_dict): the state takes the place of the model.",
        Rule("optim-state-dict-order"),
        WRONG,
    ),
    Entry(
        GUIDE,
        "7. Key Migration Considerations",
        "Learning rate: May need adjustment due to different gradient handling",
        "FSDP's gradients are DDP's. If you also enlarge the batch, that is the reason to look for the rate again.",
        Lab("19_your_own_model", "FSDP: largest relative difference to a loss of DDP"),
        WRONG,
    ),
    Entry(
        GUIDE,
        "7. Common Migration Mistakes",
        "Moving model to GPU before FSDP wrapping (causes OOM)",
        "It does if the model does not fit on one GPU.",
        Rule("moved-before-sharding"),
        RIGHT,
    ),
    Entry(
        GUIDE,
        "8. DDP Best Practices",
        "Use gradient accumulation to simulate larger batch sizes",
        "Without no_sync every micro-batch sends all gradients, though only their sum is needed.",
        Lab("03_ddp", "four micro-batches, one step: how many times as many bytes as in one backward"),
        IN_PART,
    ),
    Entry(
        GUIDE,
        "8. DDP Best Practices",
        "Sync batch norm with torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "BatchNorm's mean and variance are those of a rank's own samples; only shared ones equal one bigger batch.",
        Lab("03_ddp", "BatchNorm: largest difference from the batch"),
        RIGHT,
    ),
    Entry(
        README,
        "Combined Impact on Performance",
        "10-20% faster training",
        "It depends on how long loading takes beside computing: nothing if it is already hidden, half of the step if "
        "both take as long. With a GPU, pinned memory adds to that; this needs one.",
        Lab("10_input_pipeline", "share of a step that 2 workers save, compared with none", said=(0.1, 0.2)),
    ),
    Entry(
        README,
        "DDP Core Concepts",
        "After backward pass, gradients are synchronized using all-reduce",
        "Most of it happens during backward: each bucket is sent as soon as its gradients are there.",
        Lab("17_profiling", "healthy: all-reduces that backward hides, of four buckets", said=0),
    ),
    Entry(
        README,
        "DistributedSampler",
        "Must call set_epoch() each epoch",
        "Without it every epoch has the same order, and nothing warns.",
        Lab("03_ddp", "different orders of the samples in 3 epochs, if nobody calls sampler.set_epoch"),
        RIGHT,
    ),
    Entry(
        README,
        "How Batch Division Works",
        "Samples per GPU per batch: 128 / 2 = 64, beside 60,000 / 256 = 235 steps",
        "One contradicts the other. DataLoader's batch_size counts per rank, so its script has 128 on each and 235 "
        "steps; with 64 on each there would be 469, as on one GPU.",
        Counted(counted.batch_division),
        WRONG,
    ),
    Entry(
        README,
        "How Batch Division Works",
        "50% fewer steps to complete one epoch, 2 GPUs → 2x faster (ideally)",
        "Only because the global batch doubles. The learning rate then has to be found again; at the same rate the "
        "larger batch learns less in an epoch.",
        Lab("21_cluster", "8 times the batch, the same learning rate: test loss, how many times the small batch's"),
        IN_PART,
    ),
    Entry(
        README,
        "How Batch Division Works",
        "GPU0 receives grad_1, GPU1 receives grad_0",
        "In a ring, a rank receives only one chunk of its neighbor's gradient unchanged, all others in a sum.",
        Lab("02_collectives", "how much of its neighbor's gradient rank 0 receives unchanged, not in a sum", said=1.0),
    ),
    Entry(
        README,
        "Backward Pass Synchronization",
        "Synchronize gradients across GPUs (All-Reduce). All GPUs get identical averaged gradients",
        "FSDP's gradients are reduce-scattered: a rank gets the average of its own shard only.",
        Lab("05_fsdp", "never: gradients of a rank", times=2),
    ),
    Entry(
        README,
        "Auto Wrap Policy",
        "min_num_params=1_000_000: wrap layers with >1M parameters",
        "The whole CNN has fewer, so nothing in it becomes a unit of its own: while it computes, every rank holds "
        "all of its parameters.",
        Counted(counted.units_of_the_size_policy),
        WRONG,
    ),
    Entry(
        README,
        "Key Observations",
        "a model this small (120K parameters)",
        "Its CNN is three times as large.",
        Counted(counted.parameters_of_the_cnn),
        WRONG,
    ),
    Entry(
        README,
        "Communication vs Computation Overhead",
        "All-Reduce: Synchronize gradients (1 collective operation)",
        "One for each bucket: the first closes at 1 MiB, the others at 25.",
        Lab("03_ddp", "all-reduces in one backward of this CNN", said=1),
    ),
    Entry(
        README,
        "GPU Utilization Breakdown",
        "DDP (2 GPUs): Speedup: ~1.9x (close to linear); Speedup = 2x / (1 + overhead), overhead 5-10%",
        "Its own table has 1.29 times, an overhead of 55% by its own formula.",
        Counted(counted.overhead_of_its_table),
        WRONG,
    ),
    Entry(
        README,
        "Scaling Beyond 2 GPUs",
        "8 GPUs: DDP ~6x, FSDP ~7.5x (better scaling!)",
        "No model, GPU or link is named. How much a rank waits follows from these.",
        Source("needs eight GPUs"),
        UNKNOWN,
    ),
    Entry(
        README,
        "Linux/macOS Advantages",
        "NCCL works perfectly (on macOS)",
        "NCCL is for NVIDIA's GPUs under Linux. On macOS torch has gloo, between processes on the CPU.",
        Source("[Platforms](../reference/platforms.md#backends): torch's and NCCL's documentation"),
        WRONG,
    ),
    Entry(
        README,
        "Google Colab Limitations",
        "NCCL isn't available in Colab environment",
        "torch's CUDA wheels bring NCCL with them. What Colab lacks is a second GPU.",
        Source("[Platforms](../reference/platforms.md#backends)"),
        WRONG,
    ),
    Entry(
        README,
        "Google Colab Limitations",
        "Can't properly launch torchrun in notebook environment",
        "torchrun is a program like any other: `!torchrun …` starts it, as this article itself does on Kaggle.",
        Source("`pytest tests/integration/test_kernel.py`"),
        WRONG,
    ),
    Entry(
        README,
        "NCCL on Windows",
        "it's not available on Windows",
        "WSL2 is Linux and has it. Windows itself has gloo.",
        Source("[Platforms](../reference/platforms.md#backends)"),
        RIGHT,
    ),
    Entry(
        README,
        "NCCL on Windows",
        'init_process_group(backend="gloo", device_id=local_rank)',
        "gloo needs no device. torch 2.6 refuses a number here, and 2.13 does where there is no GPU.",
        Rule("device-id-int"),
        IN_PART,
    ),
    Entry(
        README,
        "FAQ: My code works on single GPU but fails with DDP/FSDP",
        "Correct: if rank == 0: evaluate(model, test_loader)",
        "A sharded model's forward is a collective, and so is that of a DDP model with buffers: rank 0 waits for "
        "ranks that do not come. Its own DDP script evaluates model.module, which is safe.",
        Lab("18_when_it_breaks", "rank 0 evaluates alone: errors", said=0),
    ),
    Entry(
        README,
        "FAQ: Can I use DataParallel with multiple GPUs?",
        "old, deprecated",
        "torch recommends DDP even on one machine, but has not deprecated DataParallel.",
        Source("[torch.nn.DataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html)"),
        IN_PART,
    ),
    Entry(
        BLOG,
        "The Time Constraint",
        "Training GPT-3 on a single V100 GPU would take approximately 355 years",
        "6 × 175 billion parameters × 300 billion tokens, at 28 TFLOP/s.",
        Counted(counted.years_of_gpt_3),
        RIGHT,
    ),
    Entry(
        BLOG,
        "introduction",
        "GPT-4 has over a trillion parameters",
        "OpenAI has not published it.",
        Source("no published figure"),
        UNKNOWN,
    ),
    Entry(
        BLOG,
        "Types of Parallelism",
        "Model/Tensor Parallelism: Model layers across devices",
        "That is the pipeline. Tensor parallelism splits each layer, with two all-reduces in a block's backward.",
        Lab("14_tensor_parallel", "all-reduces in a backward of four blocks", said=0),
    ),
    Entry(
        BLOG,
        "Pros of DDP",
        "Near-linear speedup with more GPUs for communication-bound scenarios",
        "For computation-bound ones: more ranks divide the computing, not what each of them sends.",
        Counted(counted.speedup_when_bound),
        WRONG,
    ),
    Entry(
        BLOG,
        "Pros of DDP",
        "Fault Tolerance: Easy to checkpoint and resume training",
        "If one rank fails, all end. What was trained since the last checkpoint is trained again.",
        Lab("16_checkpoints", "killed: steps that are trained again"),
        IN_PART,
    ),
    Entry(
        BLOG,
        "Cons of DDP",
        "All GPUs must wait for slowest one (stragglers)",
        "They wait within their own all-reduces, as long as the slow rank is slower.",
        Lab("17_profiling", "straggler: the other rank waits"),
        RIGHT,
    ),
    Entry(
        BLOG,
        "Cons of DDP",
        "AllReduce scales with model size",
        "One backward hands as many bytes to all-reduce as the parameters have.",
        Lab("03_ddp", "bytes in a backward"),
        RIGHT,
    ),
    Entry(
        BLOG,
        "Reducing Bubbles with Micro-batching",
        "Bubble Fraction = (p - 1)/m",
        "That is idle time over computing time. Of the whole time it is (p - 1)/(m + p - 1).",
        Lab("13_pipeline", "share of the ranks' time that is bubble, with 1F1B"),
        IN_PART,
    ),
    Entry(
        BLOG,
        "Pipeline Schedules",
        "1F1B: memory lower",
        "At most as many micro-batches as there are stages are in flight, instead of all eight.",
        Lab("13_pipeline", "micro-batches whose activations rank 0 holds at once, with 1F1B"),
        RIGHT,
    ),
    Entry(
        BLOG,
        "Pipeline Schedules",
        "Interleaved 1F1B: memory lowest",
        "The first rank holds more than under 1F1B, which has 4 micro-batches in flight.",
        Lab(
            "13_pipeline",
            "the same with Interleaved1F1B (a micro-batch in one of two stages counts 1/2)",
            said=4,
        ),
    ),
    Entry(
        BLOG,
        "Cons of Pipeline Parallelism",
        "Gradient Staleness: Some schedules have delayed gradient updates",
        "None of the three that it lists: all end a step before the next one begins, and their losses are one rank's. "
        "PipeDream's asynchronous schedule, which torch does not have, is the one with stale gradients.",
        Lab("13_pipeline", "1F1B: largest difference of a loss to one device's"),
        WRONG,
    ),
    Entry(
        BLOG,
        "Pros of Pipeline Parallelism",
        "Lower Communication: Only activations transferred between stages",
        "As long as a batch's activations are smaller than the parameters, as here.",
        Lab("06_which_strategy", "bytes that the pipeline sends, as a share of DDP's"),
        IN_PART,
    ),
    Entry(
        SCRIPT,
        "PyTorch Fully-Sharded Data Parallelism",
        "FSDP splits all parameters (usually along the first dimension)",
        "FSDP2 does. The class in its script, FSDP1, flattens a unit's parameters and splits the result "
        "without regard to dimensions.",
        Source("torch/distributed/fsdp: `_flat_param.py`, `_fully_shard/_fsdp_param.py`"),
        IN_PART,
    ),
    Entry(
        SCRIPT,
        "PyTorch Fully-Sharded Data Parallelism",
        "moving data between GPUs is much less expensive than moving data between the CPU and GPU",
        "With NVLink. Without it, as between two T4s, both go over PCIe.",
        Source("[data sheets](../../labkit/planner/devices.csv)"),
        IN_PART,
    ),
    Entry(
        SCRIPT,
        "Comparing DDP and FSDP",
        'MASTER_PORT = "12355"',
        "Two runs on one machine take the same port: the second one fails. torchrun finds a free one.",
        Rule("hard-coded-port"),
        WRONG,
    ),
)


def decided(entry: Entry, claims: dict[tuple[str, str], Claim]) -> tuple[str, str]:
    """What was found, and the verdict."""
    match entry.by:
        case Lab() as by:
            claim = claims.get((by.lab, by.claim))
            if claim is None:
                return "Not measured", UNKNOWN
            return _measured(by, claim), _verdict(entry, by, claim)
        case Counted(found):
            return f"Found: {found()}", entry.verdict
        case _:
            return "", entry.verdict


def _verdict(entry: Entry, by: Lab, claim: Claim) -> str:
    if not claim.holds and not claim.timed:
        return UNKNOWN  # the lab's own formula is wrong
    said = _said(by, claim)
    if said is None:
        return entry.verdict
    compared = claim.predicted if claim.timed else claim.measured
    low, high = (replace(claim, predicted=number, measured=compared) for number in said)
    agrees = replace(low, how="at least").holds and replace(high, how="at most").holds
    return RIGHT if agrees else WRONG


def _measured(by: Lab, claim: Claim) -> str:
    """`all-reduces in one backward of this CNN: 2; it says 1`"""
    measured, formula = claim.shown(claim.measured), claim.shown(claim.predicted)
    bound = "" if claim.how == "equals" else f"{claim.how} "
    found = f"Found: {claim.name}: {'planned ' if claim.planned else ''}{measured}"
    found += "" if measured == formula and not bound else f", by the formula {bound}{formula}"
    said = _said(by, claim)
    return found + ("" if said is None else f"; it says {' to '.join(dict.fromkeys(map(claim.shown, said)))}")


def _said(by: Lab, claim: Claim) -> tuple[float, float] | None:
    """The lowest and the highest number of the sentence."""
    said = claim.predicted * by.times if by.times is not None else by.said
    return said if said is None or isinstance(said, tuple) else (said, said)


def stored(runs: Path) -> dict[tuple[str, str], Claim]:
    """The claims that labs left in a folder of runs, by lab and name."""
    names = Claim.__dataclass_fields__
    found: dict[tuple[str, str], Claim] = {}
    for file in sorted(runs.glob("claims/*.json")):
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for each in kept["claims"]:
            claim = Claim(**{name: value for name, value in each.items() if name in names})
            found[file.stem, claim.name] = claim
    return found


def page(claims: dict[tuple[str, str], Claim]) -> Iterator[str]:
    yield HEAD
    verdicts = [decided(entry, claims) for entry in CLAIMS]
    for article, title in ARTICLES.items():
        yield f"## {title}\n"
        yield "| it says | what is true | verdict |"
        yield "|---|---|---|"
        yield from (
            entry.row(*found) for entry, found in zip(CLAIMS, verdicts, strict=True) if entry.article == article
        )
        yield ""
    counts = ", ".join(f"{[v for _, v in verdicts].count(v)} {v}" for v in (RIGHT, IN_PART, WRONG, UNKNOWN))
    yield f"{len(CLAIMS)} sentences: {counts}."


def verdicts(rows: Iterable[str]) -> dict[str, str]:
    """The verdicts of a page's rows, by sentence."""
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ") and row.endswith("** |")]
    return {says: verdict.strip("*") for says, _, verdict in cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder of runs that the labs left")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="PAGE",
        help="fail if the labs that these runs are of give another verdict than PAGE",
    )
    arguments = parser.parse_args()
    claims = stored(arguments.runs)
    if not claims:
        parser.error(f"no claims in {arguments.runs}: run the labs first, make notebooks")
    made = [line for text in page(claims) for line in text.splitlines()]
    if arguments.check is None:
        print("\n".join(made))
        return 0
    said = verdicts(arguments.check.read_text(encoding="utf-8").splitlines())
    labs = {lab for lab, _ in claims}
    decidable = [entry for entry in CLAIMS if not isinstance(entry.by, Lab) or entry.by.lab in labs]
    found = verdicts(entry.row(*decided(entry, claims)) for entry in decidable)
    other = [f"{says}: {verdict}, not {said.get(says)}" for says, verdict in found.items() if said.get(says) != verdict]
    print("\n".join(other) or f"{len(found)} verdicts are those of {arguments.check}")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
