"""Advises which strategy to use: the fastest of those that fit the device, and what is wrong with the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from labkit import words
from labkit.arguments import Parameters
from labkit.errors import LabError
from labkit.planner.candidate import ALIKE, MARGIN, Candidate, evaluate, fastest, held_by, judged, lacks, needs
from labkit.planner.data_sheets import Device
from labkit.planner.layout import layout_of
from labkit.planner.memory.peak import moments
from labkit.planner.model.facts import ModelFacts
from labkit.planner.networks import between_hosts
from labkit.planner.scaling import bytes_per_parameter, largest_micro_batch
from labkit.planner.search import Search, fused_adamw, half_of
from labkit.planner.speed.rates import matrix_share
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.strategies.known import STRATEGIES, simplest, strategy_named
from labkit.planner.strategies.strategy import HALF, Layout
from labkit.planner.variations import extras_of, own_parameters, under, variants
from labkit.record import Peak
from labkit.text import gib
from labkit.words import EXPANDABLE
from labkit.write import Script, options_of

ASYNC = ", and async tensor parallelism (with sequence_parallel=True and torch.compile) overlap it with matrix products"


@dataclass(frozen=True)
class Advice:
    """`rows` has the requested candidate first, then the best of every other strategy. `largest` is the largest
    micro-batch that fits, None if the formulas cannot tell."""

    requested: Candidate
    rows: tuple[Candidate, ...]
    best: Candidate | None
    largest: int | None
    sentences: tuple[str, ...]


def advise(
    script: Script,
    facts: ModelFacts,
    device: Device,
    ranks: int,
    parameters: Parameters,
    speed_model: SpeedModel | None = None,
    rehearsed: Peak | None = None,
    failure: str = "",
) -> Advice:
    """The best strategies for this model on `ranks` devices. Pure: no torch, no processes. The requested candidate has
    the peak that was `rehearsed`; without one, and for all others, it uses formulas. `failure` is how the requested
    script fails.

    Raises LabError if the script itself has no valid layout: then there is nothing to compare with.
    """
    layout = layout_of(script, ranks, parameters)
    scripts = variants(script, facts.divides)
    search = Search(scripts, facts, device, speed_model)
    name = next(name for name, each in scripts.items() if each is script)
    requested = search.look(name, ranks, parameters)
    if lacks(device, layout):
        return _with_another_precision(requested, half_of(device) or "fp32", search)
    if failure:
        requested = replace(requested, peak=None, step=None, fits=False, remark=failure, failure=failure)
    elif rehearsed and requested.layout:
        requested = judged(requested, rehearsed, device, speed_model, is_rough=False)
    rows = [requested]
    ways = [] if failure else search.ways(name, ranks, parameters, layout)
    quickest = fastest([requested, *(one for one in ways if not one.is_like(requested))])
    if quickest is None:
        rows += filter(None, [search.rescue(requested)])
    elif not quickest.is_like(requested):
        rows.append(quickest)
    others = [other for other in scripts if other != name]
    usable = others if ranks > 1 else [other for other in others if other == simplest(1).name]
    rows += [_best_of(other, search, ranks, parameters, layout) for other in usable]
    if not any(row.fits for row in rows):  # then those that need more devices, too
        more = [_best_of(other, search, ranks, parameters, layout) for other in others if other not in usable]
        rows += [row for row in more if row.ranks > 1]
    best = _choice([row for row in rows if row.ranks <= ranks], layout.precision)
    rows = [_beside(row, best, ranks) for row in rows]
    largest = None if failure else _largest(requested, layout, search)
    sentences = [*_sentences(rows, best, layout, search, largest), *_beyond(rows[0], best, search)]
    return Advice(rows[0], tuple(rows), best, largest, tuple(sentences))


def _best_of(strategy: str, search: Search, ranks: int, parameters: Parameters, requested: Layout) -> Candidate:
    """The best way of another strategy for the batch of the requested one; if none fits, what would make it fit."""
    options = own_parameters(search.scripts[strategy], parameters)
    at = strategy_named(strategy).ranks_of(ranks)  # the others have to beat a single device
    ways = search.ways(strategy, at, options, requested)
    row = fastest(ways) or min((one for one in ways if one.peak), key=_smallest, default=ways[0])
    if row.fits or not row.peak:
        return row
    return search.rescue(row) or replace(row, remark=f"{row.remark}; none of the options tried makes it fit")


def _smallest(one: Candidate) -> tuple[int, int]:
    """A sort key for which is the most promising to rescue: the one that holds least, but a sequence split over more
    ranks leaves more micro-batches."""
    return -one.layout.context if one.layout else 0, held_by(one)


def _largest(requested: Candidate, layout: Layout, search: Search) -> int | None:
    """The largest micro-batch that fits; None if the formulas cannot tell, or contradict what was rehearsed."""
    try:
        largest = largest_micro_batch(search.facts, layout, search.device)
    except LabError:
        return None
    return None if requested.peak and (largest >= layout.micro_batch) != requested.fits else largest


def _with_another_precision(requested: Candidate, precision: str, search: Search) -> Advice:
    """The requested candidate, which is impossible, and the advice for a precision that the device supports."""
    parameters = {**requested.parameters, "precision": precision}
    advice = advise(requested.script, search.facts, search.device, requested.ranks, parameters, search.speed_model)
    remark = f"{requested.remark}: use precision={precision!r}"
    first = f"{requested.name} on {search.device.times(requested.ranks)} cannot run: {remark}. With {precision}:"
    requested = replace(requested, remark=remark)
    rows = tuple(replace(row, changes=(precision, *row.changes)) for row in advice.rows)
    best = replace(advice.best, changes=(precision, *advice.best.changes)) if advice.best else None
    return replace(
        advice, requested=requested, rows=(requested, *rows), best=best, sentences=(first, *advice.sentences)
    )


def _choice(rows: list[Candidate], precision: str) -> Candidate | None:
    """The choice, whichever strategy was requested. Another precision or a superseded strategy is chosen only if
    nothing else fits."""
    current = [row for row in rows if not strategy_named(row.strategy).superseded_by]
    for among in (current, rows):
        if best := fastest(row for row in among if row.layout and row.layout.precision == precision):
            return best
    return fastest(current) or fastest(rows)


def _beside(row: Candidate, best: Candidate | None, ranks: int) -> Candidate:
    """Add to the remark of a row that fits how its step time compares with the fastest."""
    if row.fits and best and row.step and row == best:
        return replace(row, remark=f"{row.remark}: recommended")
    ratio = _ratio(row, best, ranks)
    if ratio is None:
        return row
    compared = "about as fast" if ratio <= ALIKE else f"a step takes {ratio:.3g} times as long"
    if ratio * ALIKE < 1:
        compared = f"{100 / ratio - 100:.0f}% faster"
    newer = strategy_named(row.strategy).superseded_by
    return replace(row, remark=f"{row.remark}; {compared}{f', but superseded by {newer}' if newer else ''}")


def _ratio(row: Candidate, best: Candidate | None, ranks: int) -> float | None:
    """The step time relative to the choice's; None if they cannot be compared: in another precision, or on more ranks
    than were requested."""
    if not (best and row.fits and row.step and best.step and row.layout and best.layout) or row.ranks > ranks:
        return None
    return row.step.seconds / best.step.seconds if row.layout.precision == best.layout.precision else None


def _arguments(one: Candidate, requested: Candidate) -> str:
    """`activation_checkpointing=True, cpu_offload=True`: the arguments in addition to the requested ones."""
    defaults = {name: option.default for name, option in options_of(one.script).items()}
    ranks = {} if one.ranks == requested.ranks else {"nproc_per_node": one.ranks}
    changed = {
        name: value
        for name, value in one.parameters.items()
        if str(value) != str(requested.parameters.get(name, defaults.get(name)))
    }
    return ", ".join(f"{name}={value!r}" for name, value in {**ranks, **changed}.items())


def _sentences(
    rows: list[Candidate], best: Candidate | None, layout: Layout, search: Search, largest: int | None
) -> Iterator[str]:
    """Say whether the requested candidate fits, what is recommended, and how much more would fit."""
    requested, device = rows[0], search.device
    rescued = None if requested.fits else next((row for row in rows[1:] if row.strategy == requested.strategy), None)
    tight = f", but with less than {MARGIN:.0%} to spare"
    where = f"{requested.name} on {device.times(requested.ranks)}"
    if device.nodes > 1:
        where += f" ({device.nodes} hosts with {device.box} each)"
    if requested.peak:
        verdict = "fits" if requested.fits else "does not fit"
        if requested.is_tight:
            verdict += f"{tight} for fragmentation (env={EXPANDABLE} reduces it)"
        yield f"{where} {needs(requested, device)}: {verdict}."
    elif not requested.failure:
        yield f"{where} cannot be planned: {requested.remark}."
    if rescued:
        yield f"It would fit with {_arguments(rescued, requested)}{tight if rescued.is_tight else ''}."
    if requested.peak and requested.layout:
        yield from between_hosts(requested.layout, device)
    if best is None:
        yield f"Nothing fits on {device.times(requested.ranks)}."
    else:
        arguments = "" if rescued and best.is_like(rescued) else _arguments(best, requested)
        choice = f"{best.strategy} ({arguments})" if arguments else best.name
        yield _recommended(choice, best, rows)
    if largest is not None:
        yield f"Under {requested.strategy}, {_limit(layout, largest, search)}."


def _recommended(choice: str, best: Candidate, rows: list[Candidate]) -> str:
    if best.step is None:
        return f"Of those that fit, {choice} needs the least memory; their speed is unknown."
    assumed = " (assumed, see below)" if best.step.assumed else ""
    time = words.band(best.step.seconds, best.step.low, best.step.high)
    sentence = f"Recommended: {choice}, {time} per step{assumed}."
    ranks = rows[0].ranks
    near = dict.fromkeys(row.strategy for row in rows if (_ratio(row, best, ranks) or math.inf) <= ALIKE)
    others = sorted(map(strategy_named, near), key=lambda each: each.simplicity)
    names = ", ".join(each.name for each in others if each.name != best.strategy and not each.superseded_by)
    if ranks == 1 or not names:
        return sentence
    return f"{sentence} Within {100 * ALIKE - 100:.0f}% of it, but larger or less simple: {names}."


def _limit(layout: Layout, largest: int, search: Search) -> str:
    """How many samples fit, and of how many parameters the states."""
    device, positions = search.device, search.facts.positions
    length = f" of {positions:,} positions" if positions else ""
    margin = "" if device.shared else f" with {MARGIN:.0%} to spare"
    limit = f"not even one sample{length} per rank fits{margin}"
    if largest:
        limit = f"micro-batches of up to about {largest:,} samples{length} fit (now {layout.micro_batch:,}){margin}"
    trains_all = not any(unit.frozen_bytes(1, 1) for unit in search.facts.units)
    if not trains_all or layout.keeps_states_on_host(on_gpu=not device.shared):
        return limit
    size = bytes_per_parameter(layout, device)
    most = device.usable_by(layout.ranks) / size
    count = f"{words.quantity(most / 1e9)} billion" if most >= 1e9 else f"{words.quantity(most / 1e6)} million"
    return f"{limit}; at {size:.3g} bytes per parameter a rank has room for the states of at most {count}"


def _beyond(requested: Candidate, best: Candidate | None, search: Search) -> Iterator[str]:
    """Name what else would change the choice: options and methods that the comparison does not vary, or that labkit
    does not have."""
    if best:
        yield from _faster(requested, best, search)
    offloads = best is None or bool(best.parameters.get("cpu_offload"))
    if requested.peak and not requested.fits:
        yield from _in_backward(requested, search, [requested.strategy, *(search.scripts if offloads else ())])
        if offloads:
            yield _most_of_it(requested.peak)
    if best and best.layout and best.layout.activation_checkpointing and not requested.fits:
        yield "selective_checkpointing=True recomputes less and holds more: plan with it to see whether that fits, too."
    if requested.ranks > 1 and (best is None or _waits(best)):
        yield from filter(None, (each.hint(search.facts) for each in STRATEGIES.values()))
    if best and (best.ranks < requested.ranks or _waits(best)):  # on fewer, because several would wait
        yield from _other_trainings(requested, best, search)
    yield from _other_hardware(requested, best, search)


def _faster(requested: Candidate, best: Candidate, search: Search) -> Iterator[str]:
    """Say what the choice gains in 16 bits, and if a GPU updates all parameters in one kernel."""
    layout, half = best.layout, half_of(search.device)
    if layout is None:
        return
    if layout.precision == "fp32" and half:
        other = fastest(search.ways(best.strategy, best.ranks, {**best.parameters, "precision": half}, layout))
        if other and (gain := _gain(other, best)):
            tf32 = "; TF32 (torch.set_float32_matmul_precision('high')) is in between" if half == "bf16" else ""
            yield (
                f"In {half}, {best.strategy} would be {gain:.2g} times as fast ({_arguments(other, requested)}){tf32}."
            )
    if fused := fused_adamw(layout, search.device):
        other = search.look(best.strategy, best.ranks, {**best.parameters, **fused}, best.changes)
        if gain := _gain(other, best):
            yield (
                f"With fused AdamW (optimizer='adamw_fused'), {other.strategy} would be {gain:.2g} times as fast, in "
                f"{gib(held_by(other))}."
            )


def _gain(other: Candidate, best: Candidate) -> float:
    """How many times as fast as the choice another one is; 0 if it is not, or if that is unknown."""
    gain = best.step.seconds / other.step.seconds if best.step and other.step else 0.0
    return gain if gain > ALIKE else 0.0


def _waits(one: Candidate) -> bool:
    """Whether communication takes a quarter of the step."""
    return one.step is not None and 4 * one.step.parts.get("communication", 0.0) > one.step.seconds


def _in_backward(requested: Candidate, search: Search, names: Iterable[str]) -> Iterator[str]:
    """Say which of these strategies would fit if all gradients never existed at once."""
    usable, on_gpu = search.device.usable_by(requested.ranks), not search.device.shared
    for name in names:
        parameters = own_parameters(search.scripts[name], requested.parameters) | {"optimizer_in_backward": True}
        one = search.look(name, strategy_named(name).ranks_of(requested.ranks), parameters)
        if one.layout is None or not one.is_unknown:  # its script refuses the option; formulas never cover it
            continue
        usual = replace(one.layout, options={**one.layout.options, "optimizer_in_backward": False})
        try:
            backward = [each for each in moments(search.facts, usual, on_gpu=on_gpu) if each.phase != "optimizer"]
        except LabError:  # not covered by formulas
            continue
        largest = max(unit.trained for unit in search.facts.units) * search.facts.itemsize
        held = largest + max(each.bytes - each.categories.get("gradients", 0) for each in backward)
        if held <= usable:
            yield (
                f"{name} with optimizer_in_backward=True frees each gradient as soon as its parameter is updated: it "
                f"would then need about {gib(held)}, which fits."
            )
            return


def _most_of_it(peak: Peak) -> str:
    """What would reduce the larger part of a peak."""
    states = sum(peak.categories.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    if 2 * states > peak.bytes:
        return (
            "Most of it is the model's states: LoRA (lora_rank=8) trains a small part of a pretrained model, and "
            "an 8-bit AdamW (optimizer='adamw8bit', with torchao) holds 2 instead of 8 bytes per parameter; plan "
            "with either to see whether it fits."
        )
    return (
        "Most of it is activations: offload_activations=True keeps those of blocks in host memory, at the speed of "
        "the link to it."
    )


def _other_trainings(requested: Candidate, best: Candidate, search: Search) -> Iterator[str]:
    """Say what strategies that train otherwise would save of a step that waits for communication."""
    for strategy in (each for each in STRATEGIES.values() if not each.trains_alike and each.name != requested.strategy):
        script = under(requested.script, strategy.name, extras_of(requested.script))
        blank = Candidate(strategy.name, script, requested.ranks, own_parameters(script, requested.parameters))
        other = evaluate(blank, search.facts, search.device, search.speed_model)
        if other.fits and other.layout and other.step and _gain(other, best):
            yield (
                f"{strategy.name}, {strategy.difference(other.layout)}, fits, and its step takes "
                f"{words.seconds(other.step.seconds)}."
            )


def _other_hardware(requested: Candidate, best: Candidate | None, search: Search) -> Iterator[str]:
    """Name what the device has that labkit's scripts do not use: products in 8 bits, and memory that tensor ranks
    share."""
    facts, device = search.facts, search.device
    if best and best.step and best.layout and best.layout.precision in HALF and device.has_fp8 and device.bandwidth:
        share = matrix_share(facts, device, best.layout.precision, best.layout.micro_batch)
        if share > 0.5:
            yield (
                f"Matrix products are {share:.0%} of the GPU's work: fp8 (torchao.float8) would at best halve their "
                "time; labkit's scripts do not use it."
            )
    for one in filter(None, (requested, best)):
        layout, step = one.layout, one.step
        if layout and step and 1 < layout.tensor <= device.box and device.has_symmetric_memory:
            overlap = ASYNC if "sequence_parallel" in layout.options else ""
            yield (
                f"Communication is {step.parts['communication'] / step.seconds:.0%} of {one.name}'s step: torch's "
                f"symmetric memory, which labkit's scripts do not use, would shorten it{overlap}."
            )
            return
