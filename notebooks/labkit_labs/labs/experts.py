"""Shows experts on ranks of their own: which tokens each gets, and experts that sleep, so that a busy one costs an
exact time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from labkit.run import Run
from labkit.write import Script
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, boxes, colour_of, sheet, words
from labkit_labs.draw.player import Frame, film, moved
from labkit_labs.labs.broken_scripts import replaced

__all__ = ["EXPERTS", "SECONDS", "by_rank", "routed", "shares_by_step", "sleeping_experts"]

EXPERTS, SECONDS = 8, 1e-3  # that an expert sleeps for a token, in forward and in backward
TOKENS, LEFT, QUEUE, ROW, TOP, TALL = 16, 60.0, 290.0, 44, 28, 16  # of a rank; of the picture
SLEEP = f"""
class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        time.sleep({SECONDS} * len(rows))
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep({SECONDS} * len(gradient))
        return gradient


class Experts("""


def sleeping_experts(share: float) -> Script:
    """expert_parallel with two small blocks whose experts sleep in training. `share` of each rank's tokens choose
    expert 0, the others evenly."""
    script = Script.load("expert_parallel", task="mixture")
    routes, computes = "        scores, chosen = (scores /", "        return torch.cat([F.gelu(part"
    evenly = f"torch.arange(len(tokens), device=x.device) % {EXPERTS}"
    first = f"torch.arange(len(tokens), device=x.device) < {share} * len(tokens)"
    for before, after in {
        "import math\n": "import math\nimport time\n",
        "class Experts(": SLEEP,
        "width=128, heads=4, layers=4": "width=16, heads=2, layers=2",
        routes: f"        chosen = torch.where({first}, 0, {evenly})[:, None]\n{routes}",
        computes: f"        rows = Sleep.apply(rows) if self.training else rows\n{computes}",
    }.items():
        script = replaced(script, before, after)
    return script


def shares_by_step(run: Run) -> dict[int, list[float]]:
    """The share of the tokens that chose each expert, by step: the mean over ranks, which have the same number."""
    names = [f"expert_{expert}" for expert in range(EXPERTS)]
    means = run.metrics().dropna(subset=names).groupby("step")[names].mean()
    return {int(step): [*row] for step, row in zip(means.index, means.to_numpy().tolist(), strict=True)}


def by_rank(of_experts: Sequence[float], ranks: int) -> list[float]:
    """The sum over the experts of each rank, of which all ranks have the same number."""
    own = len(of_experts) // ranks
    return [sum(of_experts[rank * own : (rank + 1) * own]) for rank in range(ranks)]


def routed(ranks: int, share: float = 0.0, capacity: float = 0.0, *, moving: bool = False) -> Picture:
    """Each rank's tokens are on the left, those of its experts on the right, in the color of the rank that they come
    from. `share` of them choose expert 0, the others evenly. `capacity` is the largest number of a rank's tokens that
    an expert takes, in multiples of an even share (0: all). `moving` plays the layer."""
    sizes = [0] * EXPERTS
    for token in range(TOKENS):
        sizes[0 if token < share * TOKENS else token % EXPERTS] += 1
    kept = [min(size, ceil(capacity * TOKENS / EXPERTS)) if capacity else size for size in sizes]
    longest = ranks * max(by_rank(kept, ranks))
    wide = (WIDTH - QUEUE - 24) / ranks / TOKENS  # of a token: all of them fit into one row
    end = QUEUE + longest * wide + EXPERTS // ranks * 4
    base, sent, back, waits = "", "", "", ""
    for rank in range(ranks):
        y = TOP + rank * ROW
        base += words(0, y + 13, f"rank {rank}", fill=colour_of(rank), bold=True)
        at = QUEUE
        for expert in range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks):
            if room := ranks * kept[expert] * wide:
                base += words(at + room / 2, y + TALL + 13, str(expert), anchor="middle", size=10)
                base += box(at, y, room - 1, TALL, line=GREY, round=0)
            for source in range(ranks):
                home = LEFT + sum(sizes[:expert]) * wide, TOP + source * ROW
                places = [(home[0] + i * wide, float(home[1]), wide - 1, float(TALL)) for i in range(sizes[expert])]
                base += boxes(places[: kept[expert]], colour_of(source), ' fill-opacity=".3"')
                base += boxes(places[kept[expert] :], "none", f' stroke="{GREY}" stroke-width=".6"')
                returned = boxes(places[: kept[expert]], colour_of(source))
                there = [(at + i * wide, float(y), wide - 1, float(TALL)) for i in range(kept[expert])]
                sent += moved(boxes(there, colour_of(source)), home[0] - at, home[1] - y)
                back += moved(returned, at - home[0], y - home[1])
                at += kept[expert] * wide
            at += 4
        if end - at > 4:
            waits += box(at, y, end - at, TALL, GREY, opacity=0.25, round=0)
            waits += words(end - 6, y + 12, "waits", anchor="end", size=11) if end - at > 50 else ""
    heads = words(LEFT, 15, "tokens", size=12) + words(QUEUE, 15, "tokens at the experts 0 to 7", size=12)
    dropped = 1 - sum(kept) / TOKENS
    result = f"experts take {longest / TOKENS:.2f} times as long as with an even choice"
    result += f"; {dropped:.0%} of the tokens are dropped" if capacity else ""
    bottom, label = TOP + ranks * ROW, f"{TOKENS} tokens on each of {ranks} ranks, {EXPERTS} experts: {result}"
    if not moving:
        return sheet([heads, base, sent, waits, words(LEFT, bottom + 14, result, bold=True)], bottom + 24, label)
    frames = [
        Frame("Each rank's router chooses an expert for each of its tokens.", []),
        Frame("An all-to-all sends each token to the rank of its expert.", [sent]),
        Frame("The experts compute; a rank whose experts have fewer tokens waits for the others.", [sent, waits]),
        Frame("Another all-to-all returns the results to the ranks of their tokens.", [back]),
    ]
    return film([heads, base], frames, bottom, label, seconds=3, best=2)
