"""Finds steps that do not change the model as they should: weights below their type's resolution, parameters in no
optimizer, gradients of the epoch before, ties that came apart."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.witness.evidence import Evidence, Line, by_place
from labkit.witness.finding import Finding
from labkit.witness.rule import Rule

FEWEST, LEAST = 32, 2  # sampled weights that have gradients at a check, and checks
SHARE = 0.02  # of weights that move although most updates are lost


class LostUpdates(Rule):
    kind = "lost updates"
    title = "Updates are below the weights' resolution"
    declared = "parameters in bfloat16 or float16 in one of torch's own optimizers, at a learning rate above zero"
    observed = "of the sampled weights that have gradients at most 2 % move in a step, and since the check before"
    silent = (
        "any check with more; a rising learning rate; float32 weights; other optimizers, which may keep float32 copies "
        "or round at random"
    )
    limits = "sampled: 128 elements of each of the 16 largest parameters, at steps 1 2 5 10 20 … and every 1,000th"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        still: dict[int, Line] = {}
        for rank, testimony in evidence.ranks.items():
            for number in sorted({line.values["optimizer"] for line in testimony.of("moved")}):
                checks = [c for c in testimony.of("moved", optimizer=number) if c.values["sampled"] >= FEWEST]
                if len(checks) > LEAST and all(_is_still(c) for c in checks) and _does_not_rise(checks):
                    still.setdefault(rank, checks[-1])
        if still:
            rank, check = min(still.items())
            values = check.values
            yield Finding(
                "lost updates",
                f"the weights do not move: {values['since']:.0f} of {values['sampled']:.0f} sampled weights that have "
                f"gradients changed up to step {check.step}",
                f"updates at a learning rate of {values['lr']:g} are below the resolution of {values['type']}",
                "Keep the weights in float32 and compute in lower precision under torch.autocast.",
                since=1,
                ranks=tuple(sorted(still)),
                line=check.line,
            )


def _is_still(check: Line) -> bool:
    most = SHARE * check.values["sampled"]
    return bool(check.values["moved"] <= most and check.values["since"] <= most)


def _does_not_rise(checks: list[Line]) -> bool:
    before, newest = checks[-2].values["lr"], checks[-1].values["lr"]
    return bool(0 < newest <= before)


class OtherTensors(Rule):
    kind = "other tensors"
    title = "The optimizer has other tensors than the model"
    declared = "a model whose gradients DDP or FSDP2 averages, and an optimizer that makes steps"
    observed = (
        "parameters of the model have gradients, are in no optimizer and do not move; the optimizer has others of "
        "their shape (but for the first dimension) that require gradients, are not the model's and have never had one, "
        "or, if it is the only one and has none of those with gradients, others of the model that never have one"
    )
    silent = "before step 20; parameters that change by hand; float32 copies, which have gradients"
    limits = "FSDP1, and models that nothing wraps"
    explains = ("no optimizer",)

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "orphans", lambda line: line.values["strange"] > 0 or _is_idle(line)):
            strange, held = line.values["strange"], line.values["held"]
            verbs = "are not the model's and never have" if strange > 1 else "is not the model's and never has"
            others = f"{strange} of the optimizer's {held} parameters {verbs}"
            why = "parameters were replaced (by fully_shard, to_empty, another layer)"
            if not strange:
                others = f"none of the optimizer's {held} parameters ever has"
                why = "those that are trained were added (by get_peft_model, another layer), or others were frozen"
            yield self.found(
                line,
                f"{others} a gradient, while {_parameters(line)}",
                f"the optimizer was created before {why}",
                "Create the optimizer after the model is complete and wrapped.",
                since=1,
                until=line.step,
                parameters=tuple(line.values["names"]),
            )


class NoOptimizer(Rule):
    kind = "no optimizer"
    title = "Layers that have gradients are in no optimizer"
    declared = "requires_grad of a model whose gradients DDP or FSDP2 averages"
    observed = (
        "parameters have gradients, are in no optimizer, and do not move: the last ones are among them; or they were "
        "frozen when DDP wrapped the model; or they are all of the model's, and two optimizers step the same ones"
    )
    silent = (
        "before step 20; otherwise all of the model's (an optimizer of copies, one that steps in backward hooks), and "
        "only earlier ones (a new head on a backbone); parameters that change by hand"
    )
    limits = "a note: somebody may have meant it so, or may add them later"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        lines = {tuple(line.values["names"]): line for line in by_place(evidence, "orphans", _is_meant_to_learn)}
        for line in lines.values():
            is_unfrozen = line.values["unfrozen"] == line.values["lost"]
            why = "they were frozen when DDP wrapped the model" if is_unfrozen else ""
            if line.values["lost"] == line.values["of"]:
                why = f"two optimizers step the same {line.values['held']} parameters"
            yield self.found(
                line,
                _parameters(line),
                why,
                advice="Give them to the optimizer, or set requires_grad to False.",
                certain=False,
                since=1,
                until=line.step,
                parameters=tuple(line.values["names"]),
            )


def _is_idle(line: Line) -> bool:
    """Whether nothing is trained: neither what has gradients nor what the optimizer has."""
    return bool(line.values["is_idle"] and line.values["lost"] == line.values["of"])


def _is_meant_to_learn(line: Line) -> bool:
    v = line.values
    return bool(v["is_twice"] if v["lost"] == v["of"] else v["is_last"] or v["unfrozen"] == v["lost"])


def _parameters(line: Line) -> str:
    name, lost = line.values["names"][0], line.values["lost"]
    if lost == 1:
        return f"{name}, which has gradients, is in no optimizer and does not move"
    return f"{lost} of the model's parameters with gradients, {name} among them, are in no optimizer and do not move"


class Unfrozen(Rule):
    kind = "not frozen"
    title = "requires_grad was set on a module, whose parameters still learn"
    declared = (
        "requires_grad = False on a module, which torch reads on tensors only; a model that DDP or FSDP2 averages"
    )
    observed = "all of the module's parameters require gradients, have them, and move between two checks"
    silent = (
        "a class whose own code has an attribute of this name; parameters that were frozen as well, even if they no "
        "longer are; a part of them that does not move; always a note"
    )

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        found: dict[str, list[tuple[int, Line]]] = {}
        for rank, testimony in evidence.ranks.items():
            for line in testimony.of("unfrozen"):
                found.setdefault(line.values["name"], []).append((rank, line))
        for name, lines in found.items():
            values = lines[0][1].values
            yield Finding(
                self.kind,
                f"requires_grad was set to False on {name or 'the model'} ({values['type']}), but its "
                f"{values['parameters']} parameters are trained",
                "torch does not read this attribute of a module",
                "Call requires_grad_(False) of it, which freezes its parameters, or remove the line.",
                certain=False,
                until=lines[0][1].step,
                ranks=tuple(rank for rank, _ in lines),
                parameters=(name,),
            )


class LeftInEvalMode(Rule):
    kind = "left in eval mode"
    title = "A validation leaves the model in eval mode"
    declared = "Dropout and BatchNorm of torch's in a DDP model, which do something else in train mode"
    observed = (
        "at least twice the model went from train mode to eval mode, was called without gradients and then made steps, "
        "20 in all, before it was in train mode again; nobody set a mode between"
    )
    silent = (
        "eval mode that is set after the validation, or from the first step on; a model that is never in train mode "
        "again; layers that stay in one mode; always a note"
    )
    limits = "models that DDP has not wrapped, and validations that call model.module(...)"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "left_in_eval"):
            values = line.values
            yield self.found(
                line,
                f"{values['steps']} steps up to step {line.step} have trained the model in eval mode, in which its "
                f"{values['type']} ({values['name']}) does something else",
                "a validation calls model.eval(), and training goes on without model.train()",
                "Call model.train() after each validation.",
                certain=False,
                since=values["since"],
            )


class LeftWindow(Rule):
    kind = "left window"
    title = "Gradients of the epoch before are in a step"
    declared = "the number of backward passes that nearly all steps of the only optimizer have"
    observed = "the first step of an epoch sums those that were left from the epoch before on top of its own"
    silent = (
        "the gradients were cleared; the window goes on across epochs; windows of changing size; several optimizers"
    )

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "window"):
            values = line.values
            left = f"{values['left']} are" if values["left"] > 1 else "1 is"
            yield self.found(
                line,
                f"step {line.step} sums {values['passes']} backward passes instead of {values['usual']}: {left} of the "
                "epoch before",
                "its last window of accumulation was neither stepped nor cleared",
                "Make a step, or clear the gradients, at the end of an epoch.",
                since=line.step,
            )


class PartedTies(Rule):
    kind = "parted tie"
    title = "A shared parameter has become two"
    declared = "a module with two names for one parameter"
    observed = (
        "after Module.to, to_empty or load_state_dict(assign=True) they are two, after the latter of equal values, and "
        "both have gradients at a step"
    )
    silent = "they are tied again by the first step; one of them has no gradient; the script parts them itself"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "parted"):
            names = line.values["names"]
            call = "load_state_dict(assign=True)" if line.values["by"] == "load_state_dict" else "to or to_empty"
            yield self.found(
                line,
                f"{' and '.join(names)} were one parameter, and are trained as {len(names)}",
                f"{call}{evidence.at(line.line)} made a new parameter for each name",
                "Tie them again after that call, before the model is wrapped and the optimizer is created.",
                since=max(1, line.step),
                parameters=tuple(names),
            )
