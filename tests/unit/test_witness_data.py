"""The witness's rules of data, by made-up lines: what they find, and when they are silent."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from labkit.record import RunFolder
from labkit.witness.data import DATA_RULES
from labkit.witness.evidence import Evidence

SIZE = 64


def epoch(n: int = 0, samples: Any = range(SIZE), **values: Any) -> dict[str, Any]:
    """An epoch of a training, of these samples in batches of four, with one tensor that holds the indices."""
    samples = list(samples)
    contents = [[[hash(tuple(samples[at : at + 4])) & 0xFFFF, 0]] for at in range(0, len(samples), 4)]
    described = {"n": n, "place": "9:Data:64:64", "time": n, "since": 1 + n, "base": 0, "type": "Data", "length": SIZE}
    described |= {"size": SIZE, "print": "a1", "subset": False, "sampler": "distributed", "shuffle": True}
    described |= {
        "part": [],
        "splits": [],
        "again": n > 0,
        "workers": 0,
        "after": n - 1,
        "batches": len(contents),
        "passes": len(contents),
    }
    described |= {"count": len(samples), "order": hash(tuple(samples)) & 0xFFFFFFFF, "training": True, "whole": True}
    described |= {"rows": {}, "leaves": ["int64 4"], "contents": contents, "gathers": False, "samples": samples}
    return described | values


def evaluation(n: int, samples: Any, **values: Any) -> dict[str, Any]:
    return epoch(n, samples, place="20:Data:64:16", training=False, passes=0, contents=[], **values)


def inputs(*digests: list[int], leaf: str = "float32 4") -> dict[str, Any]:
    """The inputs of model 0: for each call, for each tensor, a digest; those above 1000 are of random numbers, those
    above 70000 of random integers."""
    calls = [
        [n, [[digest, (digest > 1000) + (digest > 70_000)] for digest in call]]
        for n, call in enumerate(digests, start=1)
    ]
    return {"k": "inputs", "model": 0, "leaves": [leaf] * len(digests[0]), "inputs": calls}


def found(folder: Path, *ranks: list[dict[str, Any]], group: bool = True, outcome: str = "") -> dict[str, Any]:
    """The findings about ranks with these lines, by their kinds."""
    attempt = RunFolder(folder)
    for rank, lines in enumerate(ranks):
        path = attempt.witnessed(rank)
        path.parent.mkdir(parents=True)
        ddp = {"k": "ddp", "n": 0, "ranks": list(range(len(ranks))) if group else [rank], "parameters": 1}
        for line in lines:
            for name in ("samples", "declared"):
                bits = np.zeros(SIZE, dtype=bool)
                bits[list(line.get(name, []))] = True
                file = f"{'indices' if name == 'samples' else 'subset'}-{line.get('n')}.bin"
                (path.parent / file).write_bytes(np.packbits(bits, bitorder="little").tobytes())
        common = {"t": 1.0, "step": 0, "number": 0, "line": 9, "k": "epoch"}
        path.write_text(
            "".join(
                f"{json.dumps(common | {k: v for k, v in line.items() if k != 'declared'})}\n" for line in [ddp, *lines]
            )
        )
    evidence = Evidence(attempt, range(len(ranks)), "train.py")
    evidence.read()
    evidence.outcome = outcome
    return {each.kind: each for rule in DATA_RULES for each in rule().judge(evidence)}


EVEN, ODD = range(0, SIZE, 2), range(1, SIZE, 2)
SAME = [[n] for n in range(1, 9)]


def test_ranks_that_split_the_data_are_right(tmp_path: Path) -> None:
    parts = [[epoch(0, part), epoch(1, reversed(part)), inputs(*([part[n]] for n in range(8)))] for part in (EVEN, ODD)]
    assert found(tmp_path, *parts) == {}


def test_ranks_that_read_the_same_batches(tmp_path: Path) -> None:
    rank = [epoch(sampler="random"), inputs(*SAME)]
    finding = found(tmp_path, rank, rank)["same samples"]
    assert finding.certain and finding.ranks == (0, 1) and finding.line == 9
    assert "all 16 compared batches are equal (train.py line 9)" in finding.what and "RandomSampler" in finding.why


def sharded(*ranks: int, sums: Any = range(4)) -> list[dict[str, Any]]:
    """FSDP's averages over these ranks, and what this rank gives to it from step 2 on."""
    given = [{"k": "averaged", "number": number, "sum": sum_} for number, sum_ in enumerate(sums, 2)]
    return [{"k": "fsdp", "ranks": list(ranks)}, *given]


def test_ranks_that_read_the_same_batches_and_give_fsdp_the_same_gradients(tmp_path: Path) -> None:
    rank = [epoch(sampler="random"), *sharded(0, 1)]
    finding = found(tmp_path, rank, rank, group=False)["same samples"]
    assert finding.certain and finding.ranks == (0, 1) and "RandomSampler" in finding.why


@pytest.mark.parametrize(
    "sums", [range(1, 5), [], [0, 1], [0, 0, 1, 1], [0, 1, 2, 4]], ids=["others", "none", "few", "constant", "one"]
)
def test_equal_batches_of_which_fsdp_gets_other_gradients_or_it_is_not_known(tmp_path: Path, sums: Any) -> None:
    first, second = sharded(0, 1), sharded(0, 1, sums=sums)
    if sums == [0, 0, 1, 1]:
        first = second
    batches = epoch(sampler="random")
    assert found(tmp_path, [batches, *first], [batches, *second], group=False) == {}


def test_a_group_of_fsdp_that_not_all_of_its_ranks_declare(tmp_path: Path) -> None:
    batches = epoch(sampler="random")
    ranks = [[batches, *sharded(0, 1)], [batches, *sharded(1)]]
    assert found(tmp_path, *ranks, group=False) == {}
    narrowed = [[batches, *sharded(0, 1), *sharded(rank)[:1]] for rank in (0, 1)]
    assert found(tmp_path / "narrowed", *narrowed, group=False) == {}


def test_pairs_of_ranks_that_share_their_samples(tmp_path: Path) -> None:
    """As under context parallelism: they train on, and evaluate, the same ones on purpose."""
    parts = [
        [epoch(0, part), evaluation(1, part, sampler="distributed"), *sharded(0, 1, 2, 3, sums=range(rank, rank + 4))]
        for rank, part in enumerate((EVEN, EVEN, ODD, ODD))
    ]
    assert found(tmp_path, *parts, group=False) == {}
    for rank, part in enumerate((EVEN, EVEN, ODD, ODD)):
        parts[rank][1] = evaluation(1, [*part, rank // 2], sampler="distributed")
    assert list(found(tmp_path / "padded", *parts, group=False)) == ["padding"]


def of_part(part: int, n: int = 0, of: int = 4, **values: Any) -> dict[str, Any]:
    """An epoch of one part of so many that a DistributedSampler gives to one of four ranks."""
    return epoch(n, range(part, SIZE, of), part=[part, of, 4], **values)


def test_samples_of_parts_that_no_rank_asks_for(tmp_path: Path) -> None:
    ranks = [[of_part(part), of_part(part, 1)] for part in (0, 0, 1, 1)]
    finding = found(tmp_path, *ranks, group=False)["unread"]
    assert finding.certain and finding.ranks == (0, 1, 2, 3) and finding.line == 9
    assert finding.what == "32 of 64 samples are trained on by no rank in an epoch (train.py line 9)"
    assert "no rank asks for 2 of these, such as part 2" in finding.why


def test_readers_for_others_are_judged_at_the_end(tmp_path: Path) -> None:
    ranks = [[of_part(0), of_part(0, 1)], [], [of_part(2), of_part(2, 1)], []]
    assert found(tmp_path, *ranks, group=False) == {}
    finding = found(tmp_path / "end", *ranks, group=False, outcome="succeeded")["unread"]
    assert finding.ranks == (0, 2) and "such as part 1" in finding.why


@pytest.mark.parametrize(
    "ranks",
    [
        [[of_part(part), of_part(part, 1)] for part in (0, 1, 2, 3)],
        [[of_part(part, of=8), of_part(part, 1, of=8)] for part in (0, 1, 2, 3)],
        [[of_part(part, of=2), of_part(part, 1, of=2)] for part in (0, 0, 0, 0)],
        [[of_part(part), of_part(part + 2, 1, training=False, passes=0)] for part in (0, 0, 1, 1)],
        [[of_part(part), of_part(part, 1, again=False)] for part in (0, 0, 1, 1)],
        [[of_part(part, print=""), of_part(part, 1, print="")] for part in (0, 0, 1, 1)],
        [[of_part(part), epoch(1, sampler="random", again=True)] for part in (0, 0, 1, 1)],
        [[of_part(part, whole=part < 1), of_part(part, 1)] for part in (0, 0, 1, 1)],
        [[of_part(part) | {"samples": list(range(SIZE))}, of_part(part, 1)] for part in (0, 0, 1, 1)],
    ],
    ids=["all", "more", "fewer", "held out", "several samplers", "other data", "random", "not whole", "all read"],
)
def test_parts_that_are_read_or_may_be(tmp_path: Path, ranks: list[list[dict[str, Any]]]) -> None:
    assert "unread" not in found(tmp_path, *ranks, group=False, outcome="succeeded")


TWICE = ["BatchSamplerShard", "DistributedSampler"]


def test_parts_that_are_split_twice(tmp_path: Path) -> None:
    ranks = [[epoch(0, range(part, SIZE, 4), sampler="", splits=TWICE)] for part in (0, 1)]
    finding = found(tmp_path, *ranks)["unread"]
    assert finding.certain and finding.ranks == (0, 1)
    assert finding.sentence == (
        "since step 1: 32 of 64 samples are trained on by no rank in an epoch (train.py line 9): DistributedSampler "
        "splits them among the ranks, and BatchSamplerShard splits each part once more"
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"splits": TWICE[1:]}, (EVEN[::2], ODD[::2])),
        ({"whole": False}, (EVEN[::2], ODD[::2])),  # left early
        ({"print": ""}, (EVEN[::2], ODD[::2])),
        ({}, (EVEN, ODD)),  # the inner one only seeds by the rank
    ],
    ids=["once", "not whole", "other data", "all read"],
)
def test_parts_that_are_split_once(tmp_path: Path, change: dict[str, Any], parts: tuple[range, range]) -> None:
    values = {"sampler": "", "splits": TWICE} | change
    assert found(tmp_path, *([epoch(0, part, **values)] for part in parts)) == {}


def test_two_of_four_ranks_that_read_the_same_batches(tmp_path: Path) -> None:
    ranks = [[epoch(0, part), inputs(*([part[n]] for n in range(8)))] for part in (EVEN, ODD, EVEN, range(40, 60))]
    assert found(tmp_path, *ranks)["same samples"].ranks == (0, 2)


@pytest.mark.parametrize(
    "why", ["other inputs", "no group", "few batches", "constant", "rank 0 alone", "no inputs on the host"]
)
def test_when_equal_batches_are_no_certain_fault(tmp_path: Path, why: str) -> None:
    first = epoch(sampler="")
    second, fed = dict(first), [inputs(*SAME), inputs(*SAME)]
    if why == "other inputs":  # each takes its part of a common batch
        fed[1] = inputs(*([n + 100] for [n] in SAME))
    if why in ("few batches", "constant"):
        contents = first["contents"][:2] if why == "few batches" else [first["contents"][0]] * 16
        first["contents"] = second["contents"] = contents
    if why == "rank 0 alone":
        second = epoch(0, ODD, place="11:Data:64:64", sampler="")
    lines = [[first], [second]] if why == "no inputs on the host" else [[first, fed[0]], [second, fed[1]]]
    findings = found(tmp_path, *lines, group=why != "no group")
    assert not any(finding.certain for finding in findings.values())
    assert set(findings) == ({"same samples"} if why == "no inputs on the host" else set())


def test_equal_inputs_without_a_loader_are_a_note(tmp_path: Path) -> None:
    finding = found(tmp_path, [inputs(*SAME)], [inputs(*SAME)])["same samples"]
    assert not finding.certain and "same inputs" in finding.what


def test_one_input_again_and_again_is_none(tmp_path: Path) -> None:
    assert found(tmp_path, [inputs(*[[7]] * 9)], [inputs(*[[7]] * 9)]) == {}


def parts(*ranges: range, epochs: int = 2, **values: Any) -> list[list[dict[str, Any]]]:
    """Of each rank epochs of its part, in other orders."""
    return [
        [epoch(n, part if n % 2 else reversed(part), sampler="", **values) for n in range(epochs)] for part in ranges
    ]


def test_parts_of_orders_of_each_ranks_own(tmp_path: Path) -> None:
    finding = found(tmp_path / "sampler", *parts(range(32), range(16, 48)))["not split"]
    assert (finding.certain, finding.ranks, finding.since) == (False, (0, 1), 1)
    assert finding.sentence == (
        "since step 1: the parts of ranks 0 and 1 are together as large as the data set, but 16 of its 64 samples are "
        "in more than one of them, and 16 in none (train.py line 9): each rank takes its part of an order of its own"
    )
    subsets = parts(range(32), range(16, 48), subset=True, size=32)
    for rank in subsets:
        for each in rank:  # the last batch is dropped
            each |= {"declared": each["samples"], "samples": each["samples"][: 30 - each["n"]]}
    assert "16 in none" in found(tmp_path / "subset", *subsets)["not split"].what


@pytest.mark.parametrize(
    "ranks",
    [
        parts(range(32), range(32, 64)),
        parts(range(24), range(16, 48)),  # federated clients
        parts(range(32), range(16, 48), epochs=1),
        parts(range(32), range(16, 48), print=""),
        parts(range(32), range(16, 48), whole=False),
        parts(range(32), range(2, 34)),  # repeated augmentation
        [[epoch(0, range(at, at + 32), sampler=""), epoch(1, range(32), sampler="")] for at in (0, 16)],  # drawn anew
    ],
    ids=["split", "other sizes", "one epoch", "other data", "not whole", "the same half", "drawn anew"],
)
def test_parts_that_overlap_on_purpose_or_not_at_all(tmp_path: Path, ranks: list[list[dict[str, Any]]]) -> None:
    assert found(tmp_path, *ranks) == {}


def test_parts_of_distributed_samplers_that_overlap(tmp_path: Path) -> None:
    finding = found(tmp_path, [epoch(0, range(32))], [epoch(0, range(20, 52))])["not split"]
    assert finding.certain and "12 samples" in finding.what and "12 by no rank" in finding.what


def test_padding_is_no_overlap(tmp_path: Path) -> None:
    assert found(tmp_path, [epoch(0, range(33))], [epoch(0, range(32, 64))]) == {}


@pytest.mark.parametrize(
    ("change", "is_found"),
    [({}, True), ({"sampler": ""}, False), ({"print": "other"}, False), ({"whole": False}, False)],
)
def test_ranks_that_shuffle_everything_are_a_note(tmp_path: Path, change: dict[str, Any], is_found: bool) -> None:
    values = {"sampler": "random"} | change
    findings = found(tmp_path, [epoch(sampler="random")], [epoch(0, reversed(range(SIZE)), **values)])
    assert [(kind, each.certain) for kind, each in findings.items()] == [("not split", False)] * is_found


def test_data_without_a_digest_are_known_by_their_samples(tmp_path: Path) -> None:
    rows = {str(index): index for index in range(8)}
    lines = [
        [epoch(sampler="random", print="", rows=rows)],
        [epoch(0, reversed(range(SIZE)), sampler="random", print="", rows=rows)],
    ]
    assert set(found(tmp_path / "same", *lines)) == {"not split"}
    lines[1][0]["rows"] = rows | {"3": 77}
    assert found(tmp_path / "other", *lines) == {}


@pytest.mark.parametrize("again", [True, False])
def test_an_order_that_is_repeated(tmp_path: Path, again: bool) -> None:
    ranks = [[epoch(0, part), epoch(1, part, again=again)] for part in (EVEN, ODD)]
    findings = found(tmp_path, *ranks)
    assert set(findings) == ({"same order"} if again else set())
    if again:
        assert findings["same order"].ranks == (0, 1) and findings["same order"].since == 2


def test_workers_that_read_the_whole_stream(tmp_path: Path) -> None:
    stream = {"length": 0, "size": 0, "count": 0, "order": 0, "sampler": "", "print": "", "workers": 2}
    twice = [[[n // 2, 0]] for n in range(16)]
    once = [[[n, 0]] for n in range(16)]
    assert "2 loader workers" in found(tmp_path / "twice", [epoch(contents=twice, **stream)])["workers"].what
    assert found(tmp_path / "once", [epoch(contents=once, **stream)]) == {}


def test_subsets_that_overlap(tmp_path: Path) -> None:
    train = epoch(0, range(50), declared=range(50), subset=True)
    finding = found(tmp_path, [train, evaluation(1, range(40, 64), declared=range(40, 64), subset=True)])["leak"]
    assert finding.certain and "10 of 24 samples that rank 0 validates on" in finding.what


@pytest.mark.parametrize("declared", [range(50, 64), range(10, 30), range(64)])
def test_subsets_that_do_not_overlap_by_mistake(tmp_path: Path, declared: range) -> None:
    train = epoch(0, range(50), declared=range(50), subset=True)
    assert found(tmp_path, [train, evaluation(1, declared, declared=declared, subset=True)]) == {}


def test_a_fold_of_an_earlier_training_is_no_leak(tmp_path: Path) -> None:
    folds = [epoch(n, part, declared=part, subset=True) for n, part in enumerate([range(50), range(20, 64)])]
    assert found(tmp_path, [*folds, evaluation(2, range(20), declared=range(20), subset=True)]) == {}


def test_ranks_that_split_differently(tmp_path: Path) -> None:
    ranks = [
        [
            epoch(0, train, declared=train, subset=True, size=48, place="9:Data:64:48"),
            evaluation(1, val, declared=val, subset=True),
        ]
        for train, val in ((range(48), range(48, 64)), (range(16, 64), range(16)))
    ]
    finding = found(tmp_path, *ranks)["leak"]
    assert finding.certain and finding.ranks == (0,) and "16 of the 16 samples" in finding.what
    assert "rank 1" in finding.what


def test_an_evaluation_that_counts_padding(tmp_path: Path) -> None:
    parts = [evaluation(0, range(33), after=-1), evaluation(0, range(32, 64), after=-1)]
    finding = found(tmp_path / "counted", *([part] for part in parts))["padding"]
    assert not finding.certain and "64 samples counts 65" in finding.what
    assert found(tmp_path / "gathered", *([part | {"gathers": True}] for part in parts)) == {}


def test_equal_noise_among_different_samples(tmp_path: Path) -> None:
    ranks = [[epoch(0, part), inputs(*([part[n], 2000 + n] for n in range(8)))] for part in (EVEN, ODD)]
    finding = found(tmp_path / "noise", *ranks)["noise"]
    assert not finding.certain and "tensor 2 of the model's inputs" in finding.what
    constant = [[epoch(0, part), inputs(*([part[n], 2000] for n in range(8)))] for part in (EVEN, ODD)]
    assert found(tmp_path / "constant", *constant) == {}


def test_equal_integers_beside_different_samples(tmp_path: Path) -> None:
    def ranks(**values: Any) -> list[list[dict[str, Any]]]:
        return [[epoch(0, p), inputs(*([p[n], 80_000 + n] for n in range(8)), **values)] for p in (EVEN, ODD)]

    finding = found(tmp_path / "times", *ranks())["noise"]
    assert not finding.certain and "tensor 2 of the model's inputs" in finding.what
    assert found(tmp_path / "no floats", *ranks(leaf="int64 4")) == {}
    loaded = ranks()
    for rank in loaded:  # the places of the samples in each rank's own data
        for n, batch in enumerate(rank[0]["contents"]):
            batch.append([80_000 + n, 0])
    assert found(tmp_path / "loaded", *loaded) == {}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array([7, 3, 99, 4, 61, 12, 5, 80]), 2),
        (np.array([[7], [3], [99], [4], [61], [12], [5], [80]], dtype=np.int32), 2),
        (np.array([7, 3, 99, 4, 61, 12, 5, 5]), 0),  # few that differ, as labels
        (np.arange(40, 72), 0),
        (np.array([3, 1, 7, 5, 0, 2, 6, 4]), 0),  # a permutation
        (np.array([[7, 3, 99, 4], [61, 12, 5, 80]]), 0),  # tokens
        (np.array([7, 3, 99, 4, 61, 12, 5, 80], dtype=np.int16), 0),  # how bfloat16 is seen
        (np.array(5), 0),
        (np.linspace(0, 1, 8), 1),
    ],
)
def test_integers_that_look_drawn(values: Any, kind: int) -> None:
    from labkit.worker.witness.batches import _input

    assert _input(values)[1] == kind


def test_samplers_that_split_are_found_below_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils.data import BatchSampler, DistributedSampler

    from labkit.worker.witness.batches import _length, _splits

    own = DistributedSampler(range(90), num_replicas=2, rank=1)
    batches = BatchSampler(own, 8, drop_last=False)
    shard = SimpleNamespace(batch_sampler=batches, process_index=1, num_processes=2)
    assert _splits(torch, shard) == []  # there are no ranks
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert _splits(torch, shard) == ["SimpleNamespace", "DistributedSampler"]
    wrapping = SimpleNamespace(dataset=SimpleNamespace(_sampler=own), rank=1, num_replicas=2)
    assert _splits(torch, wrapping) == ["SimpleNamespace", "DistributedSampler"]
    own.num_replicas = 4
    assert _splits(torch, shard) == ["SimpleNamespace"]
    assert (_length(torch, batches), _length(torch, BatchSampler(range(90), 8, drop_last=False))) == (6, 0)


class FakeWitness(SimpleNamespace):
    step = made = 0
    unseen = staticmethod(nullcontext)

    def is_hidden(self) -> bool:
        return False

    def line(self) -> int:
        return 9

    def write(self, kind: str, **values: Any) -> None:
        self.lines.append(values | {"k": kind})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_writes_the_samples_that_its_script_has_got(tmp_path: Path, workers: int) -> None:
    import torch
    from torch.utils.data import DataLoader, Subset, TensorDataset

    from labkit.worker.witness.batches import Batches

    witness = FakeWitness(torch=torch, lines=[])
    batches: Any = Batches(witness, tmp_path)
    data = Subset(Subset(TensorDataset(torch.randn(100, 3), torch.arange(100)), range(50, 100)), range(0, 50, 5))
    loader = DataLoader(data, batch_size=2, num_workers=workers)
    draw: Any = torch.utils.data.dataloader._BaseDataLoaderIter._next_index

    def observed(iterator: Any) -> Any:
        try:
            index = draw(iterator)
        except StopIteration:
            batches.after_draw(iterator, None)
            raise
        batches.after_draw(iterator, index)
        return index

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data.dataloader._BaseDataLoaderIter, "_next_index", observed)
        iterator = iter(loader)
        for _ in range(3):
            batches.after_fetch(iterator, next(iterator), True)
            batches.after_backward()
        assert witness.lines == []
        for batch in iterator:
            batches.after_fetch(iterator, batch, True)
            batches.after_backward()
    last = witness.lines[-1]
    assert (last["batches"], last["count"], last["whole"], last["length"], last["size"]) == (5, 10, True, 100, 10)
    assert last["passes"] == 5
    bits = [
        np.unpackbits(np.frombuffer((tmp_path / f"{name}-0.bin").read_bytes(), dtype=np.uint8), bitorder="little")
        for name in ("indices", "subset")
    ]
    assert [np.flatnonzero(each).tolist() for each in bits] == [list(range(50, 100, 5))] * 2
    assert last["leaves"] == ["float32 2x3", "int64 2"] and len(last["contents"]) == 5
