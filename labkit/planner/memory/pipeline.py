"""Computes the memory of a pipeline rank: the micro-batches in flight in each of its stages, and the buffers between
stages.

Source: torch/distributed/pipelining/stage.py of torch 2.13: receive buffers for all micro-batches are made once
(_setup_forward_recv_info, _create_grad_recv_info), since 2.15 one at a time (_recv_buffers.py). A stage's output is
held until its backward (fwd_cache), since 2.15 until it is sent (release_fwd_send_outputs); before 2.10 that of the
last stage until the next step (output_chunks), and all of them are concatenated (_merge_outputs). Schedules for several
stages per rank hold what they send until the end of the step (schedules.py, send_ops), since 2.15 only gradients; two
stages of the same rank share tensors instead (set_local_fwd_input, set_local_bwd_input).

The order in which a rank computes forwards (F) and backwards (B) of micro-batches through its stages is that of
torch/distributed/pipelining/schedules.py of torch 2.13; a backward may be split into gradients of inputs (I) and,
later, of weights (W); the memory of such schedules is only rehearsed. Sources: GPipe (1811.06965), 1F1B and interleaved
(2104.04473), breadth-first (2211.05953), zero bubble (2401.10241).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from labkit.planner.memory.ledger import Keeper, Ledger, UnknownToFormulas, backward, forward, note
from labkit.planner.model.facts import ByteCount, Moment, Profile
from labkit.version import torch_release

SCHEDULES_THERE_AND_BACK = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES_ZERO_BUBBLE = ("InterleavedZeroBubble", *SCHEDULES_THERE_AND_BACK)
SCHEDULES_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
JOINS = torch_release() < (2, 10)  # the outputs of the last stage
RECEIVES_LATE = torch_release() >= (2, 15)
Action = tuple[str, int, int]  # kind, stage, micro-batch


@dataclass(frozen=True)
class Stage:
    """A stage of consecutive units. A `first` one reads the data. `loss` is set in the last stage; with `wide` the loss
    uses the output itself, not a copy with higher precision.
    """

    names: Sequence[str]
    profiles: Sequence[Profile]
    keeper: Keeper
    first: bool
    loss: Profile | None
    wide: bool


def pipelined(
    ledger: Ledger, stages: dict[int, Stage], order: Sequence[Action], samples: int, count: int, schedule: str
) -> None:
    """Record the moments of a step with `count` micro-batches of `samples` in this order. 1F1B sends an input's
    gradient together with the next receive and holds it until the next backward ends, and the output that its warm-up
    sent last until the step ends.
    """
    if RECEIVES_LATE:
        _received_late(ledger, stages, order, samples, schedule)
        return
    held, sent = ledger.held, {"activations": 0, "temporary": 0}
    keeps_sent = schedule in SCHEDULES_LOOPED
    warm_up = next(place for place, (what, *_) in enumerate(order) if what != "F")
    for stage in stages.values():
        if not stage.first:
            held["activations"] += count * stage.profiles[0].input.at(samples)
        if not stage.loss:
            held["temporary"] += count * stage.profiles[-1].output.at(samples)
    begun: set[int] = set()
    for what, number, micro_batch in order:
        stage = stages[number]
        output = stage.profiles[-1].output.at(samples)
        gradient = 0 if number - 1 in stages else _received(stage, samples)
        if what == "F":
            _forward(ledger, stage, samples)
            if number + 1 in stages:  # it replaces the next stage's receive buffer
                held["activations"] -= output
        else:
            stage.keeper.begin(first=number not in begun, last=False)
            _backward(ledger, stage, samples)
            if number + 1 not in stages and not stage.loss:
                held["activations"] -= output
                if keeps_sent or (schedule == "1F1B" and micro_batch == warm_up - 2):
                    sent["activations"] += output
                    held["activations"] += output
            if keeps_sent or (schedule == "1F1B" and number not in begun):
                sent["temporary"] += gradient
                held["temporary"] += gradient
            begun.add(number)
            if stage.loss and not JOINS:
                held["activations"] -= output
    for category, size in sent.items():
        held[category] -= size
    for stage in stages.values():
        stage.keeper.end_of_step()
        if stage.loss and JOINS:
            outputs = count * stage.profiles[-1].output.at(samples)
            ledger.note("forward", "joining the outputs of the last stage", temporary=outputs)


def _received_late(
    ledger: Ledger, stages: dict[int, Stage], order: Sequence[Action], samples: int, schedule: str
) -> None:
    """Record the moments of a step since torch 2.15. A stage's input and the gradient of its output are held from when
    they are received (torch posts some receives one action earlier) until its backward ends; its output until the send
    is awaited: in schedules for several stages per rank, after its backward. The graph of the loss holds the last
    stage's inputs until the step ends.
    """
    held, until_end = ledger.held, {"activations": 0, "temporary": 0}
    one_stage, sending = schedule in ("GPipe", "1F1B"), 0
    begun: set[int] = set()
    for what, number, _ in order:
        stage, last = stages[number], stages[number].profiles[-1]
        output, received = last.output.at(samples), _received(stage, samples)
        from_other = 0 if number - 1 in stages else received
        if what == "F":
            held["activations"] += from_other
            _forward(ledger, stage, samples)
            if one_stage and not stage.loss and not last.keeps_output:
                sent = sending if schedule == "1F1B" else 0
                held["activations"] -= sent
                sending += output - sent
            continue
        held["activations"] -= output if one_stage and not stage.loss and last.keeps_output else sending
        sending = 0
        if not stage.loss and number + 1 not in stages:
            held["temporary"] += output  # its gradient
        stage.keeper.begin(first=number not in begun, last=False)
        begun.add(number)
        _backward(ledger, stage, samples)
        if stage.loss:
            until_end["activations"] += from_other
        else:
            held["activations"] -= from_other
            held["temporary"] -= output
            if number + 1 in stages and stages[number + 1].loss:
                until_end["activations"] += output
            elif not one_stage:
                held["activations"] -= output
        if not stage.first:
            held["activations"] -= output if stage.loss else 0
            if schedule != "1F1B" or not until_end["temporary"]:
                held["temporary"] += received  # the gradient of its input
                until_end["temporary"] += from_other
    for category, size in until_end.items():
        held[category] -= size
    for stage in stages.values():
        stage.keeper.end_of_step()


def _forward(ledger: Ledger, stage: Stage, samples: int) -> None:
    held, received, output = ledger.held, _received(stage, samples), stage.profiles[-1].output.at(samples)
    held["activations"] -= received  # it is in the receive buffer
    forward(ledger, stage.keeper, stage.names, stage.profiles, samples)
    held["activations"] += received - _kept(stage, samples) + output
    if stage.loss:
        again = stage.loss.input.at(samples) if stage.wide else 0
        held["activations"] -= again
        note(ledger, "forward", "loss", stage.loss.forward, samples)
        held["activations"] += again + _saved(stage.loss, samples)


def _backward(ledger: Ledger, stage: Stage, samples: int) -> None:
    held, last = ledger.held, stage.profiles[-1]
    if not stage.loss:
        last = replace(last, backward=last.backward_in_stage)
    elif last.keeps_output:  # the stage holds it
        last = replace(last, backward=tuple(_without(moment, last.output) for moment in last.backward))
    if stage.loss:
        _backward_of_loss(ledger, stage.loss, stage.wide, samples)
    backward(ledger, stage.keeper, stage.names, [*stage.profiles[:-1], last], samples)
    held["activations"] += _kept(stage, samples)


def _backward_of_loss(ledger: Ledger, loss: Profile, wide: bool, samples: int) -> None:
    again = loss.input.at(samples) if wide and loss.keeps_input else 0  # the stage holds it
    ledger.held["activations"] -= _saved(loss, samples) + again
    note(ledger, "backward", "backward of the loss", loss.backward, samples)
    ledger.held["activations"] += again


def _saved(loss: Profile, samples: int) -> int:
    """Bytes saved by the loss except its input, which the stage keeps."""
    return loss.saved.at(samples) - (loss.input.at(samples) if loss.keeps_input else 0)


def _received(stage: Stage, samples: int) -> int:
    return 0 if stage.first else stage.profiles[0].input.at(samples)


def _kept(stage: Stage, samples: int) -> int:
    """Bytes of the received input if the first unit counts it as kept."""
    return _received(stage, samples) if stage.profiles[0].keeps_input else 0


def _without(moment: Moment, line: ByteCount) -> Moment:
    """The moment without these bytes, which autograd keeps."""

    def less(count: ByteCount) -> ByteCount:
        return ByteCount(count.fixed - line.fixed, count.per_sample - line.per_sample)

    return moment._replace(held=less(moment.held), kept=less(moment.kept))


def actions(schedule: str, ranks: int, rank: int, stages: Sequence[int], micro_batches: int) -> list[Action]:
    """The actions of `rank` in one step; `stages` are its stages in ascending order. Raises UnknownToFormulas for
    V-shaped schedules."""
    if schedule in ("GPipe", "LoopedBFS"):
        return _breadth_first(stages, micro_batches, reverse=schedule == "LoopedBFS")
    if schedule == "1F1B":
        return _one_forward_one_backward(stages[0], min(micro_batches, ranks - rank), micro_batches)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return _interleaved(ranks, rank, stages, micro_batches, zero_bubble=schedule == "InterleavedZeroBubble")
    raise UnknownToFormulas(f"they do not cover {schedule}")


def _breadth_first(stages: Sequence[int], micro_batches: int, *, reverse: bool) -> list[Action]:
    numbers = range(micro_batches)
    there = [("F", stage, n) for stage in stages for n in numbers]
    back = [("B", stage, n) for stage in reversed(stages) for n in (reversed(numbers) if reverse else numbers)]
    return there + back


def _one_forward_one_backward(stage: int, warm_up: int, micro_batches: int) -> list[Action]:
    steady = ["B", "F"] * (micro_batches - warm_up)
    return _numbered((kind, stage) for kind in ["F"] * warm_up + steady + ["B"] * warm_up)


def _numbered(order: Iterable[tuple[str, int]]) -> list[Action]:
    """These kinds and stages with their micro-batches: the first of a kind in a stage is that of the first one."""
    seen: Counter[tuple[str, int]] = Counter()
    actions = []
    for kind, stage in order:
        actions.append((kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1
    return actions


def _interleaved(
    ranks: int, rank: int, stages: Sequence[int], micro_batches: int, *, zero_bubble: bool
) -> list[Action]:
    chunks, per_round = len(stages), micro_batches // max(1, micro_batches // ranks)
    every = chunks * micro_batches
    warm_up = min(every, (chunks - 1) * per_round + (1 if zero_bubble else 2) * (ranks - 1 - rank))

    def backward_stage(step: int) -> int:
        return stages[chunks - 1 - (step // per_round) % chunks]

    order = []
    for step in range(every + warm_up):
        back = step - warm_up
        if step < every:
            order.append(("F", stages[(step // per_round) % chunks]))
        if back >= 0:
            order.append(("I" if zero_bubble else "B", backward_stage(back)))
        if zero_bubble and back >= rank:
            order.append(("W", backward_stage(back - rank)))
    if zero_bubble:
        order += [("W", backward_stage(step)) for step in range(max(0, every - rank), every)]
    return _numbered(order)
