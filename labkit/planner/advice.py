"""Advises which strategy to use: the fastest of those that fit the device, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from labkit import words
from labkit.arguments import Parameters
from labkit.errors import LabError
from labkit.planner.candidate import ALIKE, MARGIN, Candidate, evaluate, fastest, held_by, judged, lacks, needs, refusal
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

    device: Device
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
    alone = [other for other in others if other == simplest(1).name]
    rows += [_best_of(other, search, ranks, parameters, layout) for other in (others if ranks > 1 else alone)]
    if ranks == 1 and not any(row.fits for row in rows):  # then those that need more devices
        more = (_best_of(other, search, ranks, parameters, layout) for other in others if other not in alone)
        rows += [row for row in more if row.ranks > 1]
    best = _choice([row for row in rows if row.ranks <= ranks], layout.precision)
    rows = [_beside(row, best) for row in rows]
    largest = None if failure else _largest(facts, layout, device)
    if largest is not None and requested.peak and (largest >= layout.micro_batch) != requested.fits:
        largest = None  # the formulas are too rough
    sentences = [*_sentences(rows, best, layout, search, largest), *_beyond(rows, best, search)]
    return Advice(device, rows[0], tuple(rows), best, largest, tuple(sentences))


def _best_of(strategy: str, search: Search, ranks: int, parameters: Parameters, requested: Layout) -> Candidate:
    """The best way of another strategy for the batch of the requested one; if none fits, what would make it fit."""
    options = own_parameters(search.scripts[strategy], parameters)
    at = strategy_named(strategy).ranks_of(ranks)  # the others have to beat a single device
    ways = search.ways(strategy, at, options, requested)
    row = fastest(ways) or min((one for one in ways if one.peak), key=_smallest, default=ways[0])
    return row if row.fits else search.rescue(row) or _hopeless(row)


def _largest(facts: ModelFacts, layout: Layout, device: Device) -> int | None:
    """The largest micro-batch that fits; None if the formulas cannot tell."""
    try:
        return largest_micro_batch(facts, layout, device)
    except LabError:
        return None


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


def _smallest(one: Candidate) -> tuple[int, int]:
    """A sort key for which is the most promising to rescue: the one that holds least, but a sequence split over more
    ranks leaves more micro-batches."""
    return -one.layout.context if one.layout else 0, held_by(one)


def _hopeless(row: Candidate) -> Candidate:
    return replace(row, remark=f"{row.remark}; none of the options tried makes it fit") if row.peak else row


def _beside(row: Candidate, best: Candidate | None) -> Candidate:
    """Add to the remark of a row that fits how its step time compares with the fastest."""
    if not (row.fits and best and row.step and best.step):
        return row
    if row == best:
        return replace(row, remark=f"{row.remark}: recommended")
    if not _is_comparable(row, best):
        return row
    return replace(row, remark=f"{row.remark}; {_compared(row.step.seconds / best.step.seconds)}{_but(row)}")


def _is_comparable(row: Candidate, best: Candidate) -> bool:
    """Whether both have the same precision and the row needs no more ranks."""
    same = row.layout and best.layout and row.layout.precision == best.layout.precision
    return bool(same and row.fits and row.remark.startswith("fits"))


def _compared(ratio: float) -> str:
    """The step time relative to the choice's, in words."""
    if ratio * ALIKE < 1:
        return f"{100 / ratio - 100:.0f}% faster"
    return "about as fast" if ratio <= ALIKE else f"a step takes {ratio:.3g} times as long"


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


def _as_fast(rows: list[Candidate], best: Candidate) -> list[str]:
    """Other strategies whose predicted step times are indistinguishable from the choice's."""
    near = [
        row.strategy
        for row in rows
        if row.step
        and best.step
        and _is_comparable(row, best)
        and row.strategy != best.strategy
        and not strategy_named(row.strategy).superseded_by
        and row.step.seconds <= ALIKE * best.step.seconds
    ]
    return sorted(dict.fromkeys(near), key=lambda name: strategy_named(name).simplicity)


def _but(row: Candidate) -> str:
    newer = strategy_named(row.strategy).superseded_by
    return f", but superseded by {newer}" if newer else ""


def _sentences(
    rows: list[Candidate], best: Candidate | None, layout: Layout, search: Search, largest: int | None
) -> Iterator[str]:
    device, length = search.device, f" of {search.facts.positions:,} positions" if search.facts.positions else ""
    requested, rescued = rows[0], [row for row in rows[1:] if row.strategy == rows[0].strategy]
    where = f"{requested.name} on {device.times(requested.ranks)}"
    where += f" ({device.nodes} hosts with {device.box} each)" if device.nodes > 1 else ""
    if requested.peak:
        verdict = "fits" if requested.fits else "does not fit"
        if requested.is_tight:
            verdict += f", but with less than {MARGIN:.0%} to spare for fragmentation (env={EXPANDABLE} reduces it)"
        yield f"{where} {needs(requested, device)}: {verdict}."
    elif not requested.failure:
        yield f"{where} cannot be planned: {requested.remark}."
    if not requested.fits:
        for row in rescued[:1]:
            tight = f", but with less than {MARGIN:.0%} to spare" if row.is_tight else ""
            yield f"It would fit with {_arguments(row, requested)}{tight}."
    yield from between_hosts(requested.layout, device) if requested.peak and requested.layout else ()
    choice = ""
    if best:
        is_named = not requested.fits and any(best.is_like(row) for row in rescued[:1])
        arguments = "" if is_named else _arguments(best, requested)
        choice = f"{best.strategy} ({arguments})" if arguments else best.name
    if best and best.step:
        assumed = " (assumed, see below)" if best.step.assumed else ""
        time = words.band(best.step.seconds, best.step.low, best.step.high)
        others = _as_fast(rows, best) if requested.ranks > 1 else []
        close = f"Within {100 * ALIKE - 100:.0f}% of it, but larger or less simple: {', '.join(others)}."
        yield f"Recommended: {choice}, {time} per step{assumed}.{f' {close}' if others else ''}"
    elif best:
        yield f"Of those that fit, {choice} needs the least memory; their speed is unknown."
    else:
        yield f"Nothing fits on {device.times(requested.ranks)}."
    if largest is not None and requested.layout:
        margin = "" if device.shared else f" with {MARGIN:.0%} to spare"
        most = f"not even one sample{length} per rank fits"
        if largest:
            most = f"micro-batches of up to about {largest:,} samples{length} fit (now {layout.micro_batch:,})"
        sentence = f"Under {requested.strategy}, {most}{margin}"
        if device.shared or not layout.options.get("cpu_offload"):
            size = bytes_per_parameter(layout, device)
            most = _in_words(int(device.usable_by(layout.ranks) / size))
            sentence += f"; at {size:.3g} bytes per parameter a rank has room for the states of at most {most}"
        yield f"{sentence}."


def _in_words(count: int) -> str:
    """12.3 million · 1.5 billion"""
    return f"{words.quantity(count / 1e9)} billion" if count >= 1e9 else f"{words.quantity(count / 1e6)} million"


def _beyond(rows: list[Candidate], best: Candidate | None, search: Search) -> Iterator[str]:
    """Name what else would change the choice: 16 bits for a choice in fp32, and methods that labkit does not vary or
    have."""
    requested, half = rows[0], half_of(search.device)
    if best and best.step and best.layout and best.layout.precision == "fp32" and half:
        others = search.ways(best.strategy, best.ranks, {**best.parameters, "precision": half}, best.layout)
        quickest = fastest(others)
        if quickest and quickest.step and quickest.step.seconds * ALIKE < best.step.seconds:
            ratio = best.step.seconds / quickest.step.seconds
            tf32 = "; TF32 (torch.set_float32_matmul_precision('high')) is in between" if half == "bf16" else ""
            arguments = _arguments(quickest, requested)
            yield f"In {half}, {best.strategy} would be {ratio:.2g} times as fast ({arguments}){tf32}."
    yield from _fused(best, search)
    yield from _in_backward(requested, best, search)
    yield from _other_methods(requested, best, search)


def _fused(best: Candidate | None, search: Search) -> Iterator[str]:
    """Say what the choice gains if a GPU updates all parameters in one kernel."""
    if not (best and best.step and best.layout and (fused := fused_adamw(best.layout, search.device))):
        return
    other = search.look(best.strategy, best.ranks, {**best.parameters, **fused}, best.changes)
    if other.step and other.step.seconds * ALIKE < best.step.seconds:
        ratio = best.step.seconds / other.step.seconds
        yield (
            f"With fused AdamW (optimizer='adamw_fused'), {other.strategy} would be {ratio:.2g} times as fast, in "
            f"{gib(held_by(other))}."
        )


def _in_backward(requested: Candidate, best: Candidate | None, search: Search) -> Iterator[str]:
    """Say which strategy would fit if all gradients never existed at once: the requested one, or any if nothing else
    does."""
    if requested.fits or not requested.peak:
        return
    usable, on_gpu = search.device.usable_by(requested.ranks), not search.device.shared
    for name in (requested.strategy, *(search.scripts if _offloads(best) else ())):
        ranks = strategy_named(name).ranks_of(requested.ranks)
        parameters = own_parameters(search.scripts[name], requested.parameters)
        layout = search.look(name, ranks, parameters | {"optimizer_in_backward": True}).layout
        if layout is None or refusal(search.facts, layout):
            continue
        usual = replace(layout, options={**layout.options, "optimizer_in_backward": False})
        try:
            backward = [each for each in moments(search.facts, usual, on_gpu=on_gpu) if each.phase != "optimizer"]
        except LabError:  # not covered by formulas
            continue
        largest = max(sum(unit.parameters) for unit in search.facts.units) * search.facts.itemsize
        held = largest + max(each.bytes - each.categories.get("gradients", 0) for each in backward)
        if held <= usable:
            yield (
                f"{name} with optimizer_in_backward=True frees each gradient as soon as its parameter is updated: it "
                f"would then need about {gib(held)}, which fits."
            )
            return


def _offloads(best: Candidate | None) -> bool:
    """Whether nothing fits, or only with states in the host's memory."""
    return best is None or bool(best.parameters.get("cpu_offload"))


def _waits(one: Candidate) -> bool:
    """Whether communication takes a quarter of the step."""
    return one.step is not None and 4 * one.step.parts.get("communication", 0.0) > one.step.seconds


def _other_trainings(requested: Candidate, best: Candidate | None, search: Search) -> Iterator[str]:
    """Say what strategies that train otherwise would save of a step that waits for communication."""
    alone = best and best.ranks < requested.ranks  # because several would wait
    if not best or not best.step or not (alone or _waits(best)):
        return
    for strategy in (each for each in STRATEGIES.values() if not each.trains_alike and each.name != requested.strategy):
        script = under(requested.script, strategy.name, extras_of(requested.script))
        blank = Candidate(strategy.name, script, requested.ranks, own_parameters(script, requested.parameters))
        other = evaluate(blank, search.facts, search.device, search.speed_model)
        if other.layout and other.fits and other.step and other.step.seconds * ALIKE < best.step.seconds:
            yield (
                f"{strategy.name}, {strategy.difference(other.layout)}, fits, and its step takes "
                f"{words.seconds(other.step.seconds)}."
            )


def _other_methods(requested: Candidate, best: Candidate | None, search: Search) -> Iterator[str]:
    """Name methods that the comparison does not vary, or that labkit does not have, where they would decide."""
    facts, device = search.facts, search.device
    if requested.peak and not requested.fits and _offloads(best):
        held = requested.peak.categories
        states = sum(held.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
        if 2 * states > requested.peak.bytes:
            yield (
                "Most of it is the model's states: LoRA (lora_rank=8) trains a small part of a pretrained model, and "
                "an 8-bit AdamW (optimizer='adamw8bit', with torchao) holds 2 instead of 8 bytes per parameter; plan "
                "with either to see whether it fits."
            )
        else:
            yield (
                "Most of it is activations: offload_activations=True keeps those of blocks in host memory, at the "
                "speed of the link to it."
            )
    if best and best.layout and best.layout.activation_checkpointing and not requested.fits:
        yield "selective_checkpointing=True recomputes less and holds more: plan with it to see whether that fits, too."
    step = best.step if best else None
    wanted = requested.ranks > 1 and (best is None or _waits(best))
    if wanted:
        yield from filter(None, (each.hint(facts) for each in STRATEGIES.values()))
    yield from _other_trainings(requested, best, search)
    if best and step and best.layout and best.layout.precision in HALF and device.has_fp8 and device.bandwidth:
        share = matrix_share(facts, device, best.layout.precision, best.layout.micro_batch)
        if share > 0.5:
            yield (
                f"Matrix products are {share:.0%} of the GPU's work: fp8 (torchao.float8) would at best halve their "
                "time; labkit's scripts do not use it."
            )
    yield from _symmetric_memory(requested, best, device)


def _symmetric_memory(requested: Candidate, best: Candidate | None, device: Device) -> Iterator[str]:
    """Name what would shorten the communication of tensor ranks within a box."""
    for one in filter(None, (requested, best)):
        layout, step = one.layout, one.step
        if layout and step and 1 < layout.tensor <= device.box and device.has_symmetric_memory:
            overlap = ASYNC if "sequence_parallel" in layout.options else ""
            yield (
                f"Communication is {step.parts['communication'] / step.seconds:.0%} of {one.name}'s step: torch's "
                f"symmetric memory, which labkit's scripts do not use, would shorten it{overlap}."
            )
            return
