"""Finds ranks that read the wrong samples: the same ones, overlapping parts, those that others validate on.

Samples are compared by their indices where two ranks hold the same data, which is known by digests of what the data set
holds, or else of samples with equal indices; and by the contents of batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cached_property, reduce
from operator import or_
from typing import Any

from labkit.witness.evidence import Evidence, Line, Testimony
from labkit.witness.finding import Finding, named
from labkit.witness.rule import Rule

DIFFERENT = 3  # batches, inputs, losses or samples that a comparison needs at least
COUNTED = 16 << 20  # samples of a data set, of more not all are written


class Epoch:
    """What a rank has written of one iteration of a loader."""

    def __init__(self, testimony: Testimony, line: Line):
        self.rank, self.line, self._folder = testimony.rank, line, testimony.details.parent

    def __getattr__(self, name: str) -> Any:
        return self.line.values[name]

    @property
    def trains(self) -> bool:
        return bool(self.training) and self.passes > 1

    @property
    def evaluates(self) -> bool:
        return not self.training or (self.whole and not self.passes)

    @property
    def batches_read(self) -> tuple[tuple[int, ...], ...]:
        """The digests of each of the first batches."""
        return tuple(tuple(digest for digest, _ in batch) for batch in self.contents)

    @cached_property
    def indices(self) -> int:
        """One bit for each sample that was fetched, by its index in the data set below all Subsets."""
        return self._bits(f"indices-{self.n}.bin")

    @cached_property
    def declared(self) -> int:
        """One bit for each sample of its Subset."""
        return self._bits(f"subset-{self.n}.bin") if self.subset else 0

    def _bits(self, name: str) -> int:
        try:
            return int.from_bytes((self._folder / name).read_bytes(), "little")
        except OSError:
            return 0

    def has_data_of(self, other: Epoch) -> bool:
        """Whether both are known to read from the same data."""
        own, others = self.line.values, other.line.values
        if not own["length"] or any(own[name] != others[name] for name in ("length", "type", "print")):
            return False
        common = self.rows.keys() & other.rows.keys()
        same = {self.rows[index] for index in common if self.rows[index] == other.rows[index]}
        return bool(self.print) or (len(same) >= DIFFERENT and all(self.rows[i] == other.rows[i] for i in common))


def epochs_of(testimony: Testimony) -> list[Epoch]:
    """By their order of beginning, as they were last written."""
    newest = {line.values["n"]: line for line in testimony.of("epoch")}
    return [Epoch(testimony, newest[n]) for n in sorted(newest)]


def side_by_side(epochs: Iterable[Epoch]) -> Iterator[dict[int, Epoch]]:
    """By rank those that began as the same one of their place in the script."""
    places: defaultdict[tuple[str, int], dict[int, Epoch]] = defaultdict(dict)
    times: defaultdict[tuple[int, str], int] = defaultdict(int)
    for epoch in epochs:
        place = epoch.rank, epoch.place
        places[epoch.place, times[place]][epoch.rank] = epoch
        times[place] += 1
    yield from places.values()


def different(epochs: Iterable[Epoch]) -> list[Epoch]:
    """One of those that are the same samples in the same order: ranks that share their work read them, too."""
    return list({(epoch.order, epoch.count): epoch for epoch in epochs}.values())


class DataRule(Rule):
    """Judges again only when there are new lines."""

    def __init__(self) -> None:
        self._judged: Any = None
        self._found: list[Finding] = []

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        lines = [len(rank.of("epoch")) + len(rank.of("inputs")) for rank in evidence.ranks.values()]
        if (new := (lines, evidence.replicas, evidence.outcome)) != self._judged:
            self._judged = new
            self._found = list(self._judge(evidence, {r: epochs_of(each) for r, each in evidence.ranks.items()}))[:1]
        return self._found

    def _judge(self, evidence: Evidence, epochs: dict[int, list[Epoch]]) -> Iterator[Finding]:
        for group in evidence.replicas:
            yield from self.of_group(evidence, group, [epoch for rank in group for epoch in epochs[rank]])

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        """What is wrong among ranks that average their gradients."""
        raise NotImplementedError

    def about(self, epochs: Sequence[Epoch], what: str, why: str, advice: str, *, certain: bool = True) -> Finding:
        """What is wrong with these epochs, since the first of them."""
        first, ranks = epochs[0], tuple(sorted({epoch.rank for epoch in epochs}))
        return Finding(self.kind, what, why, advice, certain, since=first.since, ranks=ranks, line=first.line.line)

    def together(
        self, group: Sequence[int], epochs: Iterable[Epoch], wanted: Callable[[Epoch], bool]
    ) -> Iterator[list[Epoch]]:
        """The wanted ones that each rank of the group has, side by side."""
        for by_rank in side_by_side(epoch for epoch in epochs if wanted(epoch)):
            if len(by_rank) == len(group):
                yield list(by_rank.values())


class StreamCopies(DataRule):
    kind = "workers"
    title = "Each loader worker reads the whole stream"
    declared = "a DataLoader with several workers over an IterableDataset: each worker iterates over a copy of it"
    observed = "consecutive batches, one of each worker, are equal"
    silent = "fewer than three different batches; streams that each worker shuffles for itself"

    def _judge(self, evidence: Evidence, epochs: dict[int, list[Epoch]]) -> Iterator[Finding]:
        found = [epoch for each in epochs.values() for epoch in each if self._is_copied(epoch)]
        if found:
            first = found[0]
            yield self.about(
                found,
                f"each of the {first.workers} loader workers reads the whole stream, so every sample is trained on "
                f"{first.workers} times in an epoch{evidence.at(first.line.line)}",
                "the IterableDataset does not ask torch.utils.data.get_worker_info() for its part",
                "Let __iter__ yield only every num_workers-th sample, beginning with its worker's id.",
            )

    def _is_copied(self, epoch: Epoch) -> bool:
        batches, workers = epoch.batches_read, epoch.workers
        if epoch.length or workers < 2 or not all(batches):
            return False
        rounds = [set(batches[at : at + workers]) for at in range(0, len(batches) - workers + 1, workers)]
        return all(len(each) == 1 for each in rounds) and len(set.union(set(), *rounds)) >= DIFFERENT


class Leak(DataRule):
    kind = "leak"
    title = "Validation samples are trained on"
    declared = "Subsets of one data set, one trained on and one evaluated"
    observed = "a sample was fetched from both: on one rank, or on two that average their gradients"
    silent = (
        "all samples of one Subset are in the other, as when the accuracy on the training set is measured; the "
        "training before the evaluation had none of the samples, as in cross-validation and active learning"
    )
    limits = "data sets that wrap a Subset"
    explains = ("not split",)

    def _judge(self, evidence: Evidence, epochs: dict[int, list[Epoch]]) -> Iterator[Finding]:
        for each in epochs.values():
            for epoch, trained in self._pairs(each):
                both = epoch.declared & trained.declared
                is_partial = both and epoch.declared & ~both and trained.declared & ~both
                if is_partial and (seen := (epoch.indices & trained.indices).bit_count()):
                    yield self._finding(
                        evidence,
                        epoch,
                        f"{seen} of {epoch.indices.bit_count()} samples that {named([epoch.rank])} validates on are "
                        "trained on",
                        "the two Subsets of the data set overlap",
                        certain=2 * both.bit_count() <= epoch.declared.bit_count(),
                    )
                    return
        yield from super()._judge(evidence, epochs)

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        pairs = {id(epoch): trained for epoch, trained in self._pairs(epochs)}
        for together in self.together(group, epochs, lambda epoch: id(epoch) in pairs):
            trained = [pairs[id(epoch)] for epoch in together]
            is_clean = not any(a.declared & b.declared for a, b in zip(together, trained, strict=True))
            if not is_clean or not all(each.has_data_of(together[0]) for each in [*together, *trained]):
                continue
            everything = reduce(or_, (each.indices for each in trained))
            for epoch in together:
                if seen := epoch.indices & everything:
                    other = next(each.rank for each in trained if each.indices & seen)
                    yield self._finding(
                        evidence,
                        epoch,
                        f"{seen.bit_count()} of the {epoch.indices.bit_count()} samples that {named([epoch.rank])} "
                        f"validates on are trained on by other ranks, such as {named([other])}",
                        "the ranks split the data set differently",
                    )
                    return

    def _pairs(self, epochs: list[Epoch]) -> Iterator[tuple[Epoch, Epoch]]:
        """Evaluations, and the training before each, of Subsets of the same data set."""
        known = {(epoch.rank, epoch.n): epoch for epoch in epochs}
        for epoch in epochs:
            trained = known.get((epoch.rank, epoch.after))
            is_comparable = trained and epoch.base == trained.base and epoch.subset and trained.subset
            if trained and is_comparable and epoch.evaluates and trained.trains:
                yield epoch, trained

    def _finding(self, evidence: Evidence, epoch: Epoch, what: str, why: str, *, certain: bool = True) -> Finding:
        return self.about(
            [epoch],
            f"{what}{evidence.at(epoch.line.line)}, so the validation says too little of new data",
            why,
            "Split once, by a generator that has the same seed on every rank: "
            "random_split(data, lengths, generator=torch.Generator().manual_seed(0)).",
            certain=certain,
        )


class SameSamples(DataRule):
    kind = "same samples"
    title = "Ranks train on the same samples"
    declared = "the group over which DDP or FSDP averages gradients: equal gradients make the others of no use"
    observed = (
        "all compared batches of a loader are equal, and so are the inputs of the DDP model or the gradients that FSDP "
        "is given"
    )
    silent = (
        "fewer than three different batches; inputs or gradients that differ, as when each rank takes its part of a "
        "common batch; under DDP without a loader, or where inputs are on a GPU, it is a note"
    )
    explains = ("not split", "noise", "unread")

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        training = [epoch for epoch in epochs if epoch.trains and not epoch.time]
        for together in self.together(group, training, lambda epoch: len(epoch.contents) >= DIFFERENT):
            compared = min(len(epoch.contents) for epoch in together)
            alike: defaultdict[Any, list[Epoch]] = defaultdict(list)
            for epoch in together:
                alike[epoch.batches_read[:compared], epoch.order if epoch.count else 0].append(epoch)
            for (batches, _), same in alike.items():
                ranks = [epoch.rank for epoch in same]
                if len(same) < 2 or len(set(batches)) < DIFFERENT or not all(batches):
                    continue
                is_fed = fed_alike(evidence, ranks)
                if is_fed is not False:
                    yield self._finding(evidence, same, compared, certain=is_fed is True)
        if not training and not any(epoch.trains for epoch in epochs) and inputs_alike(evidence, group):
            yield Finding(
                self.kind,
                f"{named(group)} call the model with the same inputs in all compared steps",
                "the data, or the random numbers, do not depend on the rank",
                "Let each rank take its own part of the data.",
                certain=False,
                since=1,
                ranks=group,
            )

    def _finding(self, evidence: Evidence, same: list[Epoch], compared: int, *, certain: bool) -> Finding:
        epoch = same[0]
        reasons = {
            "random": "its RandomSampler, which torch does not split, has the same seed on these ranks",
            "sequential": "its SequentialSampler gives all samples to every rank",
            "distributed": "its DistributedSampler has the same rank on these ranks",
        }
        sampler = reasons.get(epoch.sampler, "its sampler does not depend on the rank")
        return self.about(
            same,
            f"{named([e.rank for e in same])} train on the same samples: all {compared} compared batches are equal"
            f"{evidence.at(epoch.line.line)}",
            sampler if epoch.length else "torch does not split the stream of an IterableDataset over ranks",
            "Give the loader a DistributedSampler."
            if epoch.length
            else "Let each rank yield its own part, by its rank and the number of ranks.",
            certain=certain,
        )


class NotSplit(DataRule):
    kind = "not split"
    title = "The ranks' parts of the data overlap"
    declared = "DistributedSampler, which splits an epoch, or a sampler of torch's that gives each sample once"
    observed = "the ranks fetch the same samples of the same data in an epoch, in different orders"
    silent = (
        "the samples that DistributedSampler adds to make parts equal; samplers of one's own, with replacement, or "
        "with weights; ranks that hold different data; without a DistributedSampler it is a note"
    )
    limits = "parts that a script takes without a DataLoader, or that each rank draws again in each epoch"

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        yield from self._of_parts(evidence, group, epochs)
        for readers in self.together(group, epochs, lambda epoch: epoch.trains and bool(epoch.sampler)):
            together = different(readers)
            first = together[0]
            kinds = {epoch.sampler for epoch in together}
            is_split = kinds == {"distributed"}
            if len(together) == 1 or not all(e.has_data_of(first) for e in together):
                continue
            union = reduce(or_, (epoch.indices for epoch in together)).bit_count()
            twice = sum(epoch.indices.bit_count() for epoch in together) - union
            is_whole = all(epoch.whole for epoch in together)
            if is_split and first.size >= 4 * len(together) and twice > len(together):
                differ = len({epoch.declared for epoch in together}) > 1
                yield self._finding(
                    evidence,
                    together,
                    f"the parts of {named(group)} overlap: {twice} samples are trained on more than once in an epoch"
                    + (f", and {first.size - union} by no rank" if is_whole and first.size > union else ""),
                    "the ranks split the data set differently"
                    if differ
                    else "their DistributedSamplers have different seeds or epochs",
                    "Give DistributedSampler the same data, seed and epoch on all ranks: it takes the rank itself.",
                    certain=True,
                )
            elif is_whole and not kinds & {"distributed"} and 2 * twice >= union:
                yield self._finding(
                    evidence,
                    together,
                    f"{named(group)} each train on the whole data set: an epoch has {union + twice} samples, of which "
                    f"{union} are different",
                    "the loader has no DistributedSampler",
                    "Give the loader a DistributedSampler, and call its set_epoch(epoch).",
                    certain=False,
                )

    def _of_parts(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        """Parts that stay the same, which together are as large as the data, but overlap as if drawn independently."""
        read: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for epoch in epochs:
            if epoch.trains and epoch.whole:
                read[epoch.rank, epoch.place].append(epoch.declared or epoch.indices)
        for together in self.together(group, epochs, lambda epoch: epoch.trains and not epoch.time):
            first, world, times = together[0], len(group), [read[epoch.rank, epoch.place] for epoch in together]
            parts = [each[0] for each in times if len(each) > 1 and len(set(each)) == 1]
            whole = first.length if first.subset else first.size
            total, union = sum(part.bit_count() for part in parts), reduce(or_, parts, 0).bit_count()
            is_split = len(parts) == world and abs(total - whole) < world and 16 * world <= whole <= COUNTED
            is_drawn = abs(union - whole * (1 - (1 - 1 / world) ** world)) < whole / 10
            if is_split and is_drawn and all(epoch.has_data_of(first) for epoch in together):
                yield self._finding(
                    evidence,
                    together,
                    f"the parts of {named(group)} are together as large as the data set, but {total - union} of its "
                    f"{whole} samples are in more than one of them, and {whole - union} in none",
                    "each rank takes its part of an order of its own",
                    "Shuffle by a generator that has the same seed on every rank before each rank takes its part.",
                    certain=False,
                )

    def _finding(
        self, evidence: Evidence, together: list[Epoch], what: str, why: str, advice: str, *, certain: bool
    ) -> Finding:
        return self.about(together, f"{what}{evidence.at(together[0].line.line)}", why, advice, certain=certain)


class Unread(DataRule):
    kind = "unread"
    title = "Samples that no rank trains on"
    declared = "DistributedSampler, or two samplers around one another, that know the rank and the number of ranks"
    observed = "no rank asks for a part, or each part is split twice; whole epochs of all ranks leave its samples out"
    silent = (
        "samplers of more, or fewer, replicas than ranks; parts that any rank reads in a loader of its own, also to "
        "validate; data that other samplers give as well, or of which it is not known whether it is the same; several "
        "samplers at one line; where not every rank has a loader, until the run has succeeded"
    )

    def _judge(self, evidence: Evidence, epochs: dict[int, list[Epoch]]) -> Iterator[Finding]:
        by_data: defaultdict[tuple[Any, ...], list[Epoch]] = defaultdict(list)
        for each in epochs.values():
            for epoch in each:
                by_data[epoch.type, epoch.length].append(epoch)
        for alike in by_data.values():
            yield from self._of_data(evidence, alike)
        yield from super()._judge(evidence, epochs)

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        """What is split twice."""
        for together in self.together(group, epochs, lambda e: e.trains and e.whole and len(e.splits) > 1):
            first, read = together[0], reduce(or_, (epoch.indices for epoch in together)).bit_count()
            is_same = len(group) == len(evidence.ranks) and all(epoch.has_data_of(first) for epoch in together)
            if is_same and first.length <= COUNTED and 3 * read <= 2 * first.size:
                yield self.about(
                    together,
                    f"{first.size - read} of {first.size} samples are trained on by no rank in an epoch"
                    f"{evidence.at(first.line.line)}",
                    f"{first.splits[-1]} splits them among the ranks, and {first.splits[0]} splits each part once more",
                    "Split once: where accelerate or Lightning splits the samples, leave out the other sampler.",
                )

    def _of_data(self, evidence: Evidence, epochs: list[Epoch]) -> Iterator[Finding]:
        world, trained = len(evidence.ranks), [epoch for epoch in epochs if epoch.trains]
        first = next((epoch for epoch in trained if epoch.whole and 0 < epoch.length <= COUNTED), None)
        if first is None or any((each.time and not each.again) or not each.has_data_of(first) for each in epochs):
            return
        common = [world, world], first.size, first.declared
        if any((each.part[1:], each.size, each.declared) != common for each in trained):
            return
        unread = sorted(set(range(world)) - {epoch.part[0] for epoch in epochs if epoch.part[1:] == [world, world]})
        begun = [epoch for epoch in trained if not epoch.time]
        is_known = len(begun) == world and len({epoch.time for epoch in trained if epoch.whole}) > 1
        read = reduce(or_, (epoch.indices for epoch in begun)).bit_count()
        most = -(-first.size // world) * (world - len(unread))
        if unread and all(e.whole for e in begun) and read <= most and (is_known or evidence.outcome == "succeeded"):
            yield self.about(
                [first, *begun],
                f"{first.size - read} of {first.size} samples are trained on by no rank in an epoch"
                f"{evidence.at(first.line.line)}",
                f"DistributedSampler splits them into {world} parts, and no rank asks for "
                + (f"part {unread[0]}" if len(unread) == 1 else f"{len(unread)} of these, such as part {unread[0]}"),
                "Let num_replicas be the number of ranks that read different samples, and rank this rank's place among "
                "them: those of the mesh's data dimension.",
            )


class SameOrder(DataRule):
    kind = "same order"
    title = "Epochs repeat the same order"
    declared = "DistributedSampler(shuffle=True), which shuffles by its epoch"
    observed = "two whole epochs of one sampler, of one training, fetch the same samples in the same order"
    silent = "fewer than eight samples; another sampler, or another optimizer since"

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        whole = [e for e in epochs if e.trains and e.whole and e.sampler == "distributed" and e.shuffle]
        before = {(e.rank, e.place, e.time, e.order, e.count): e for e in whole}
        found = [e for e in whole if e.again and (e.rank, e.place, e.time - 1, e.order, e.count) in before]
        if found and found[0].count >= 8:
            yield self.about(
                found,
                f"an epoch has the same order as the one before{evidence.at(found[0].line.line)}, although "
                "DistributedSampler is to shuffle",
                "sampler.set_epoch is not called",
                "Call sampler.set_epoch(epoch) before each epoch.",
            )


class SameNoise(DataRule):
    kind = "noise"
    title = "Random numbers are the same on all ranks"
    declared = "the group over which gradients are averaged: its ranks have samples of their own"
    observed = (
        "a floating-point tensor of the batches, or of the DDP model's inputs, or in these one of an integer for each "
        "sample, that is new each time is equal on all ranks, although the samples differ"
    )
    silent = (
        "tensors with another first dimension than the samples; integers in order, or a permutation, or from a loader, "
        "or without floating-point inputs that differ; always a note: somebody may mean it so"
    )
    limits = "noise that was added to a sample, or drawn within the model"

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        differ = False
        loaded = {digest for epoch in epochs for batch in epoch.batches_read for digest in batch}
        for together in self.together(group, epochs, lambda epoch: epoch.trains and bool(epoch.contents)):
            order = len({epoch.order for epoch in together if epoch.count}) > 1
            differ |= order or len({epoch.batches_read for epoch in together}) > 1
            contents = [dict(enumerate(epoch.contents)) for epoch in together]
            names = together[0].leaves
            yield from self._findings(evidence, group, "the batches", names, contents, order, together[0].line.line)
        for model in models_of(evidence, group):
            lines = evidence.ranks[group[0]].of("inputs", model=model)
            inputs = [inputs_of(evidence.ranks[rank], model, loaded) for rank in group]
            where = "the model's inputs"
            yield from self._findings(evidence, group, where, lines[0].values["leaves"], inputs, differ, lines[0].line)

    def _findings(
        self,
        evidence: Evidence,
        group: tuple[int, ...],
        where: str,
        names: list[str],
        by_rank: list[dict[int, Any]],
        differ: bool,
        line: int,
    ) -> Iterator[Finding]:
        common = sorted(set.intersection(*(set(each) for each in by_rank)))
        cells = [[each[n] for each in by_rank] for n in common]
        counts = {len(leaves) for row in cells for leaves in row}
        if len(cells) < DIFFERENT or len(counts) != 1:
            return
        columns = range(counts.pop())
        same = [all(len({leaves[i][0] for leaves in row}) == 1 for row in cells) for i in columns]
        kinds = [{leaves[i][1] for row in cells for leaves in row} for i in columns]
        new = [len({row[0][i][0] for row in cells}) == len(cells) for i in columns]
        sizes = [name.split()[-1].split("x")[0] for name in names]  # of the first dimension, usually the batch's
        differing = [(size, name) for size, name, is_same in zip(sizes, names, same, strict=False) if not is_same]
        others = {size for size, _ in differing}
        floats = {size for size, name in differing if name.startswith("float")}
        random = [kinds[i] == {1} or (kinds[i] == {2} and sizes[i] in floats) for i in columns]
        found = [i for i in columns if same[i] and random[i] and new[i] and (not others or sizes[i] in others)]
        if found and (differ or others):
            names = [names[i] for i in found if i < len(names)]
            yield Finding(
                self.kind,
                f"tensor {found[0] + 1} of {where} ({', '.join(names)}) has the same values on {named(group)} in all "
                f"{len(cells)} compared steps{evidence.at(line)}, although the samples differ",
                "the random numbers are drawn by a generator whose seed does not depend on the rank",
                "If it is noise, seed its generator with the rank, such as torch.manual_seed(seed + rank).",
                certain=False,
                since=1,
                ranks=group,
                line=line,
            )


class Padding(DataRule):
    kind = "padding"
    title = "An evaluation counts samples twice"
    declared = "DistributedSampler, which repeats samples to give all ranks equally many"
    observed = "an evaluation has fetched more samples than the data set has"
    silent = (
        "scripts that gather anything, or use accelerate, Lightning, transformers, torchmetrics or ignite: there the "
        "repeated samples may be dropped again; always a note"
    )

    def of_group(self, evidence: Evidence, group: tuple[int, ...], epochs: list[Epoch]) -> Iterator[Finding]:
        evaluations = (e for e in epochs if e.evaluates and e.whole and e.sampler == "distributed" and not e.gathers)
        for readers in self.together(group, evaluations, lambda epoch: True):
            together = different(readers)
            first, total = together[0], sum(epoch.count for epoch in together)
            union = reduce(or_, (epoch.indices for epoch in together)).bit_count()
            if first.size == union < total and all(epoch.has_data_of(first) for epoch in together):
                yield self.about(
                    readers,
                    f"the evaluation of {union} samples counts {total}{evidence.at(first.line.line)}: "
                    f"{total - union} of them twice",
                    "DistributedSampler repeats samples to give all ranks equally many",
                    "Drop the repeated samples before a metric is averaged, or give each rank "
                    "range(rank, len(data), world_size).",
                    certain=False,
                )


def models_of(evidence: Evidence, group: Sequence[int]) -> list[int]:
    """The DDP models whose inputs all of these ranks have written."""
    known = [{line.values["model"] for line in evidence.ranks[rank].of("inputs")} for rank in group]
    return sorted(set.intersection(*known))


def inputs_of(testimony: Testimony, model: int, loaded: Set[int] = frozenset()) -> dict[int, Any]:
    """By the number of the call the digests of a model's inputs, if there were any on the host; integers of these
    `loaded` digests do not count as random."""
    calls = [call for line in testimony.of("inputs", model=model) for call in line.values["inputs"]]
    return {n: [[d, 0 if kind == 2 and d in loaded else kind] for d, kind in leaves] for n, leaves in calls if leaves}


def inputs_alike(evidence: Evidence, ranks: Sequence[int]) -> bool | None:
    """Whether all DDP models have got the same inputs on these ranks; None if that is not known."""
    known = None
    for model in models_of(evidence, ranks):
        by_rank = [inputs_of(evidence.ranks[rank], model) for rank in ranks]
        common = set.intersection(*(set(each) for each in by_rank))
        if any(each[n] != by_rank[0][n] for each in by_rank for n in common):
            return False
        if len({str(by_rank[0][n]) for n in common}) >= DIFFERENT:
            known = True
    return known


def gradients_alike(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Whether FSDP is known to have got the same gradients of these ranks, so that their average is that of one."""
    by_rank = [{line.number: line.values["sum"] for line in evidence.ranks[rank].of("averaged")} for rank in ranks]
    common = sorted(set.intersection(*(set(each) for each in by_rank)))
    sums = [{each[number] for each in by_rank} for number in common]
    return all(len(each) == 1 for each in sums) and len(set.union(set(), *sums)) >= DIFFERENT


def fed_alike(evidence: Evidence, ranks: Sequence[int]) -> bool | None:
    """Whether these ranks' models have learnt from the same inputs, or FSDP from the same gradients; None if that is
    not known."""
    if any(evidence.ranks[rank].of("fsdp") for rank in ranks):
        return gradients_alike(evidence, ranks)
    return inputs_alike(evidence, ranks)


DATA_RULES: tuple[type[Rule], ...] = (StreamCopies, Leak, SameSamples, NotSplit, Unread, SameOrder, SameNoise, Padding)
