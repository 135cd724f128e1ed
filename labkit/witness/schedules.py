"""Finds learning rate schedules that move too often, or whose planned end is not the training's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from labkit.witness.evidence import Evidence, Line
from labkit.witness.finding import Finding
from labkit.witness.rule import Rule

FEWEST_IDLE, IDLE_SHARE = 10, 0.05  # steps at a learning rate of zero, and their share of all
COMPLETE = 0.67  # of the planned moves


class Schedules(Rule):
    kind = "schedule"
    title = "A learning rate schedule is not as long as the training"
    declared = (
        "accelerate moves a prepared scheduler once per process at each call; total_steps, T_max, total_iters or the "
        "num_training_steps of a partial function"
    )
    observed = (
        "a prepared scheduler is called once per epoch; the planned end came early, and steps at a learning rate of "
        "zero followed (a note if there are other optimizers); a run has succeeded whose last steps had a rate of zero "
        "for another reason (a note); at the end (a note) it was planned for exactly the run's steps (OneCycleLR: but "
        "for one per epoch) or backward passes, and moved less"
    )
    silent = (
        "fewer than 10 steps at zero, or 5 % of them; any other end, early or late: warm restarts, a cosine's period, "
        "ReduceLROnPlateau, a training that was stopped, a process that left by os._exit; schedulers that are within "
        "others, or gone when other steps follow"
    )

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        found: dict[int, list[tuple[int, Finding]]] = {}
        for rank, testimony in evidence.ranks.items():
            newest = {line.values["n"]: line for line in testimony.of("schedule")}
            for number, line in newest.items():
                finding = _moves_several(evidence, line) or _ended(evidence, line) or _planned_longer(evidence, line)
                if finding is not None:
                    found.setdefault(number, []).append((rank, finding))
        for each in found.values():
            yield replace(each[0][1], ranks=tuple(rank for rank, _ in each))


def _moves_several(evidence: Evidence, line: Line) -> Finding | None:
    v = line.values
    is_per_epoch = v["stops"] >= 2 and v["gap"] >= 2 and v["stops"] <= v["epochs"] + 1
    is_planned = v["planned"] and v["moves"] <= v["planned"]
    if not (v["through_accelerate"] and v["fewest"] == v["most"] >= 2 and is_per_epoch) or is_planned:
        return None
    return Finding(
        "schedule",
        f"{v['type']} moves {v['most']} times at each call, and is called once in {v['gap']} optimizer steps"
        f"{evidence.at(line.line)}",
        "a prepared scheduler moves once per process at each call, because accelerate expects a call per batch",
        "Do not prepare a scheduler that is called once per epoch.",
        since=max(1, line.step - (v["stops"] - 1) * v["gap"]),
        line=line.line,
    )


def _ended(evidence: Evidence, line: Line) -> Finding | None:
    v = line.values
    is_past = v["is_end"] and v["last"] > v["planned"]  # at its end a cosine rises again
    if not (is_past or _is_complete(evidence, line)) or v["idle"] < max(FEWEST_IDLE, IDLE_SHARE * v["steps"]):
        return None
    what = f"made the {v['planned']} moves for which it was planned by step {v['ended']}; the rate is zero since then"
    if not v["is_end"]:
        what = f"has moved, and the learning rate was zero in the last {v['idle']} of {v['steps']} steps"
    several = f"it moves {v['most']} times at each call" if v["fewest"] == v["most"] > 1 else ""
    why = several or ("it is shorter than the training" if v["is_end"] else "")
    if v["through_accelerate"]:
        why = f"{why}; a scheduler that accelerate has prepared moves once per process".removeprefix("; ")
    on_all = " on all processes together" if v["through_accelerate"] else ""
    return Finding(
        "schedule",
        f"{v['type']}{evidence.at(line.line)} {what}",
        why,
        f"Plan it for as many moves as the training makes{on_all}.",
        certain=v["alone"] and v["is_end"],  # another optimizer may train on, when this one has been annealed
        since=v["ended"] + 1,
        line=line.line,
    )


def _is_complete(evidence: Evidence, line: Line) -> bool:
    """Whether the training has reached its end, and the line is of all of it, not of the newest step that was checked:
    a process that leaves by `os._exit` writes no such line."""
    return evidence.outcome == "succeeded" and bool(line.values["is_over"])


def _planned_longer(evidence: Evidence, line: Line) -> Finding | None:
    v = line.values
    if not _is_complete(evidence, line) or not v["stops"] or not 0 < v["moves"] < COMPLETE * v["planned"]:
        return None
    # OneCycleLR is meant to move at each step; an epoch may have a step more or less than it was planned for.
    is_per_epoch = v["type"] == "OneCycleLR" and v["gap"] >= 2 and 2 <= v["stops"] <= v["epochs"] + 1
    if abs(v["planned"] - v["steps"]) <= (v["stops"] if is_per_epoch else 0):
        unit, why = "optimizer steps", f"it is called once in {v['gap']} steps"
    elif v["planned"] == v["passes"]:
        unit, why = "backward passes", "gradients are accumulated, so that there are fewer steps than batches"
    else:
        return None
    many = "about as many" if v["planned"] not in (v["steps"], v["passes"]) else "as many"
    return Finding(
        "schedule",
        f"{v['type']}{evidence.at(line.line)} was planned for {v['planned']} moves, {many} as the run's {unit}, and "
        f"made {v['moves']}",
        why,
        "Call it after each step, or plan it for as many moves as the training makes.",
        certain=False,
        line=line.line,
    )
