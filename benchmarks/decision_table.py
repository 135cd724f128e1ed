"""Popular advice on when to use what, beside the planner's.

    python benchmarks/decision_table.py > docs/evidence/decisions.md

Every row of a guide becomes situations: a decoder of that size on those devices. What the planner says of each is
computed when this is run; whether an article is right follows from that, and is not written down here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from articles import ARTICLES, BLOG, GUIDE, NOTE, README, SCRIPT
from beyond_situations import SITUATIONS
from decision_judges import (
    Judge,
    Situation,
    at,
    does_not_fit,
    faster,
    fastest_is,
    fits,
    holds,
    larger_batch,
    moves_more,
    needs_sharding,
    smaller,
)

SHARDED = ("fsdp", "zero2")  # what the articles call FSDP: SHARD_GRAD_OP is ZeRO-2


@dataclass(frozen=True)
class Row:
    """A claim in few words; each of its situations is judged: (whether the claim is right in it, what was found)."""

    article: str
    section: str
    claim: str
    judge: Judge
    situations: tuple[Situation, ...]
    why: str


HEAD = """# Popular advice, planned

What widely read articles say about when to use which strategy, each in situations that it covers: labkit's decoder
with the given number of parameters on the given devices, with samples of 1,024 or 2,048 tokens on each, in bf16 or fp16
unless a precision is named (autocast: weights and optimizer state stay fp32). What can be run or counted is in
[Popular claims, tested](popular_claims.md). Here nothing was run on a GPU: the planner calculates the memory of the
rank that holds the most, compared with what the device has for tensors, and the time of an optimizer step with its
band, from data sheets and assumed fractions of their peaks.

A question mark means that it cannot be told: the two bands of time overlap, the memory is within 5 percent of what the
device has, or the planner has no figure. So of speed there is a verdict only where the slow end of one band is below
the fast end of the other; the reasons that the last column gives for a difference in time are the planner's, not
measured.
"""
BEYOND = """## Beyond the articles' strategies

Four situations where a strategy from [Beyond data-parallel training](../how_to/beyond.md) is the better choice, next to
the best alternative (or the one that needs least memory). diloco trains differently, so `plan` compares it only on
request. The figures are calculated by `labkit.plan`, not measured; "waiting" is communication that does not overlap.

| situation | the planner's choice, per rank and step | the best of the others | why |
| --- | --- | --- | --- |"""
MARKS = {True: "✔", False: "✖", None: "?"}
DDP, FSDP = ("ddp", {}), ("fsdp", {})
ALWAYS, NEVER = ("fsdp", {"reshard_after_forward": "always"}), ("fsdp", {"reshard_after_forward": "never"})
STATES = "fp32 weights, gradients and AdamW's moments are 16 bytes a parameter, under autocast too (ZeRO, section 3.1)"
BYTES = (
    "in fp32 FSDP sends 1.5 times DDP's bytes, or as many when it gathers once; in 16 bits its gathers halve, DDP's "
    "gradients do not: 1 or 0.75 times"
)
SHARED_STEP = "the optimizer's step, which DDP repeats on every rank, is shared out by sharding"
ROWS = (
    Row(
        NOTE,
        "1. Data Parallelism",
        "limit: parameters and optimizer state must fit into a single GPU",
        fits("ddp", plainly=False),
        (at(2.0, 8, "A100 40"), at(3.0, 8, "A100 40")),
        f"{STATES}; gradients and activations must fit, too",
    ),
    Row(
        NOTE,
        "4. ZeRO",
        "stage 1: 4x memory reduction",
        smaller(("zero1", {}), DDP, 1 / 4),
        (at(1.3, 2, "A100 40"), at(1.3, 64, "A100 40")),
        "a limit for many ranks and for states in mixed precision; activations are not divided",
    ),
    Row(
        NOTE,
        "4. ZeRO",
        "stage 2: 8x",
        smaller(("zero2", {}), DDP, 1 / 8),
        (at(1.3, 2, "A100 40"), at(1.3, 64, "A100 40")),
        "a limit for many ranks, of states alone",
    ),
    Row(
        NOTE,
        "4. ZeRO",
        "stage 3: linear with N GPUs",
        smaller(ALWAYS, DDP, "1/N"),
        (at(1.3, 2, "A100 40"), at(1.3, 64, "A100 40")),
        "of the states; activations and the gathered units stay",
    ),
    Row(
        GUIDE,
        "4. Head-to-Head",
        "DDP trains faster, FSDP slightly slower",
        faster(DDP, FSDP),
        (at(0.8, 8, "A100 80", 8), at(0.8, 8, "L4", 1, precision="fp32"), at(0.8, 8, "L4", 1)),
        f"{BYTES}; {SHARED_STEP}",
    ),
    Row(
        GUIDE,
        "6. Model Size Guidelines",
        "under 1B, 40 GB: DDP",
        fastest_is("ddp"),
        (at(0.4, 8, "A100 40", 8), at(0.8, 8, "A100 40", 4)),
        f"all fit; {SHARED_STEP}",
    ),
    Row(
        GUIDE,
        "6. Model Size Guidelines",
        "1-3B, 40 GB: DDP with gradient checkpointing",
        fits("ddp", activation_checkpointing=True),
        (at(1.3, 8, "A100 40"), at(2.0, 8, "A100 40"), at(3.0, 8, "A100 40")),
        f"{STATES}; checkpointing does not shrink them",
    ),
    Row(
        GUIDE,
        "6. Model Size Guidelines",
        "3-7B, 40 GB: FSDP",
        needs_sharding(),
        (at(3.0, 8, "A100 40"), at(6.7, 8, "A100 40")),
        "how many GPUs is not said",
    ),
    Row(
        GUIDE,
        "6. Model Size Guidelines",
        "7-13B, 80 GB: FSDP FULL_SHARD",
        fastest_is("fsdp", "fsdp1"),
        (at(6.7, 8, "A100 80"), at(13, 8, "A100 80")),
        "on eight GPUs SHARD_GRAD_OP (zero2) fits as well, and gathers once",
    ),
    Row(
        GUIDE,
        "6. Model Size Guidelines",
        "13B and more: FSDP with CPU offload, or tensor parallel",
        does_not_fit("fsdp"),
        (at(13, 16, "A100 80"), at(65, 128, "A100 80")),
        "right if sharding alone did not fit",
    ),
    Row(
        GUIDE,
        "6. Quick Decision Guide",
        "fits comfortably, most throughput: DDP",
        fastest_is("ddp"),
        (at(0.4, 8, "A100 80", 8),),
        SHARED_STEP,
    ),
    Row(
        GUIDE,
        "6. Quick Decision Guide",
        "fast interconnect: DDP",
        faster(DDP, FSDP),
        (at(1.3, 8, "H100", 4), at(1.3, 8, "H100", 4, precision="fp32")),
        BYTES,
    ),
    Row(
        GUIDE,
        "6. Quick Decision Guide",
        "to maximize the batch: FSDP",
        larger_batch("fsdp", "ddp"),
        (at(0.8, 2, "T4"), at(0.8, 8, "A100 40")),
        "what states leave goes to activations",
    ),
    Row(
        GUIDE,
        "6. Quick Decision Guide",
        "training 7B and more: FSDP",
        needs_sharding(),
        (at(6.7, 8, "H100"), at(6.7, 8, "A100 80")),
        STATES,
    ),
    Row(
        GUIDE,
        "8. FSDP Best Practices",
        "SHARD_GRAD_OP if communication is the bottleneck",
        faster(NEVER, ALWAYS),
        (at(1.3, 8, "L4", 1), at(1.3, 8, "H100", 4)),
        "it gathers once: DDP's bytes instead of 1.5 times",
    ),
    Row(
        README,
        "Decision Matrix",
        "under 50M, 1-2 GPUs: single GPU or DDP",
        fastest_is("single", "ddp"),
        (at(0.03, 2, "T4", 8), at(0.03, 2, "A100 40", 8)),
        SHARED_STEP,
    ),
    Row(
        README,
        "Decision Matrix",
        "under 50M, 4-8 GPUs: DDP",
        fastest_is("ddp"),
        (at(0.03, 8, "A100 40", 8), at(0.03, 8, "L4", 1)),
        SHARED_STEP,
    ),
    Row(
        README,
        "Decision Matrix",
        "50M-1B, 2-4 GPUs: DDP",
        fastest_is("ddp"),
        (at(0.4, 2, "T4", 1), at(0.8, 2, "T4", 1), at(0.8, 4, "A100 40", 4)),
        "with few tokens on each rank one device alone may be faster; on 16 GB cards the states of DDP end near 0.9B",
    ),
    Row(
        README,
        "Decision Matrix",
        "50M-1B, 8-16 GPUs: DDP or FSDP",
        fastest_is("ddp", *SHARDED),
        (at(0.4, 16, "A100 40", 8), at(0.8, 8, "A100 40", 4)),
        "both fit",
    ),
    Row(
        README,
        "Decision Matrix",
        "1B-10B: cannot fit on a single GPU",
        does_not_fit("single"),
        (at(1.3, 1, "A100 40"), at(3.0, 1, "A100 80"), at(6.7, 1, "A100 80")),
        f"{STATES}: 1B is 16 GB",
    ),
    Row(
        README,
        "Decision Matrix",
        "1B-10B, 4-8 GPUs: FSDP",
        needs_sharding(),
        (at(1.3, 8, "A100 40", 4), at(3.0, 8, "A100 40"), at(6.7, 8, "A100 40")),
        "DDP of 1.3B fits 40 GB",
    ),
    Row(
        README,
        "Decision Matrix",
        "1B-10B, 8-16 GPUs and more: FSDP",
        needs_sharding(),
        (at(3.0, 16, "A100 40"), at(6.7, 16, "A100 40")),
        STATES,
    ),
    Row(
        README,
        "Decision Matrix",
        "over 10B: FSDP with tensor parallelism is the only viable approach",
        does_not_fit("fsdp"),
        (at(13, 16, "A100 80"), at(65, 128, "H100")),
        "right if sharding alone did not fit; PyTorch and IBM trained 7B with FSDP alone (fms-fsdp)",
    ),
    Row(
        README,
        "Quick Decision Tree",
        "8 GPUs and more: prefer FSDP, it scales better",
        faster(FSDP, DDP),
        (at(0.4, 8, "A100 40", 8), at(0.8, 64, "A100 40", 4), at(0.8, 64, "A100 40", 4, precision="fp32")),
        f"{BYTES}; {SHARED_STEP}",
    ),
    Row(
        README,
        "Quick Decision Tree",
        "most speed on 2-4 GPUs: DDP",
        fastest_is("ddp"),
        (at(0.4, 4, "A100 40", 8), at(1.3, 2, "A100 40", 2)),
        SHARED_STEP,
    ),
    Row(
        README,
        "When FSDP Becomes Beneficial",
        "7B needs 28 GB on one GPU, 14 GB on each of two under FSDP",
        holds("fsdp", 14.0, precision="fp32"),
        (at(6.7, 2, "A100 40"),),
        f"28 GB are the weights alone; {STATES}: 56 GB on each of two, and activations",
    ),
    Row(
        BLOG,
        "When to Use DDP",
        "the model fits comfortably into a single GPU",
        fastest_is("ddp"),
        (at(0.4, 8, "A100 80", 8),),
        SHARED_STEP,
    ),
    Row(
        BLOG,
        "Memory Savings",
        "7B, DDP: 112 GB per GPU, does not fit 80 GB",
        does_not_fit("ddp"),
        (at(6.7, 8, "A100 80"),),
        STATES,
    ),
    Row(
        BLOG,
        "Memory Savings",
        "7B on 8 GPUs, FSDP: 14 GB",
        holds("fsdp", 14.0, precision="fp32"),
        (at(6.7, 8, "A100 80"),),
        "the states alone; activations and the gathered units are as much again",
    ),
    Row(
        BLOG,
        "Sharding Strategies",
        "SHARD_GRAD_OP: medium communication, between FULL_SHARD and NO_SHARD",
        moves_more(NEVER, DDP),
        (at(1.3, 8, "L4", 1, precision="fp32"), at(1.3, 8, "L4", 1)),
        "one gather and one reduce-scatter are DDP's bytes exactly; with 16-bit gathers fewer",
    ),
    Row(
        BLOG,
        "When to Use Pipeline Parallelism",
        "limited bandwidth between GPUs, model does not fit on one",
        fastest_is("pipeline", "hybrid"),
        (at(1.3, 4, "T4", 1), at(3.0, 8, "L4", 1)),
        "stages send activations only, and wait for each other; with few micro-batches the bubble is most of the step",
    ),
    Row(
        BLOG,
        "Choosing the Right Strategy",
        "does not fit, fast interconnect: FSDP",
        fastest_is(*SHARDED),
        (at(6.7, 8, "H100"),),
        BYTES,
    ),
    Row(
        BLOG,
        "Choosing the Right Strategy",
        "does not fit, no fast interconnect: pipeline",
        fastest_is("pipeline", "hybrid"),
        (at(3.0, 8, "L4", 4), at(2.0, 4, "RTX 4090", 4)),
        "the more samples a step, the smaller the bubble",
    ),
    Row(
        BLOG,
        "Practical Recommendations",
        "3D parallelism for 100B and more",
        fastest_is("hybrid"),
        (at(175, 1024, "H100", 1),),
        "tensor ranks within a box, the pipeline between boxes, data over the rest",
    ),
    Row(
        SCRIPT,
        "introduction",
        "FSDP when model, gradients and optimizer state do not fit on one GPU",
        fits("fsdp"),
        (at(3.0, 8, "A100 40"), at(1.3, 4, "T4")),
        STATES,
    ),
)


def main() -> None:
    print("<!-- written by: python benchmarks/decision_table.py > docs/evidence/decisions.md -->")
    print(HEAD)
    print("| article, section | it says | situation | the planner finds | verdict | why |")
    print("| --- | --- | --- | --- | --- | --- |")
    counts: Counter[str] = Counter()
    for row in ROWS:
        judged = [(each, *row.judge(each)) for each in row.situations]
        answers = [agrees for _, agrees, _ in judged if agrees is not None]
        verdict = "agrees" if all(answers) else "agrees in part" if any(answers) else "differs"
        verdict = verdict if answers else "cannot be told"
        verdict += ", where it can be told" if 0 < len(answers) < len(judged) else ""
        counts[verdict.partition(",")[0]] += 1
        situations = "<br>".join(str(each) for each, _, _ in judged)
        found = "<br>".join(f"{MARKS[agrees]} {text}" for _, agrees, text in judged)
        print(
            f"| {ARTICLES[row.article]}, {row.section} | {row.claim} | {situations} | {found} | {verdict} | {row.why} |"
        )
    counted = f"{len(ROWS)} claims: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()) + "."
    print(f"\n{counted}\n\n{BEYOND}")
    for situation in SITUATIONS:
        print(situation.row())


if __name__ == "__main__":
    main()
