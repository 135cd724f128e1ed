import pytest

from labkit.planner.model.facts import ModelFacts, Unit
from labkit.planner.speed.collectives import COUNT, wire
from labkit.planner.strategies.ddp import buckets
from labkit.planner.strategies.known import strategy_named
from labkit.planner.strategies.strategy import Layout
from labkit.planner.strategies.strategy import volume as everything
from labkit.planner.strategies.tensor_parallel import held

MIB = 1 << 20
WIDTH = 8
BLOCK = (WIDTH,) * 4 + (3 * WIDTH**2, 3 * WIDTH, WIDTH**2, WIDTH, 4 * WIDTH**2, 4 * WIDTH, 4 * WIDTH**2, WIDTH)
FACTS = ModelFacts(
    (
        Unit("embed", (100 * WIDTH,), 0, 0, 0, 64),
        *(Unit(f"blocks.{i}", BLOCK, 0, 0, 0, 64) for i in range(4)),
        Unit("unembed", (100 * WIDTH,), 0, 0, 0, 800),
    ),
    itemsize=4,
    predictions=8,
    inputs=128,
    samples=100,
    profiles={},
)
P = FACTS.elements * 4
FSDP = {"reshard_after_forward": "auto", "cpu_offload": False, "replicas": 1}


def layout(strategy, ranks, **more):
    return Layout(strategy=strategy_named(strategy), ranks=ranks, **({"micro_batch": 2, "data": ranks} | more))


def volume(*asked):
    """Without the number of predictions, which all strategies add up first."""
    return [each for each in everything(*asked) if (each.kind, each.bytes) != ("all_reduce", COUNT)]


def total(found, kind, of="count"):
    return sum(getattr(each, of) for each in found if each.kind == kind)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("send", 1),
    ],
)
def test_a_ring_sends_as_much_as_the_formula_says(kind, factor):
    assert wire(kind, 4) == factor


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for ranks in (2, 3, 8, 1024):
        assert wire("all_reduce", ranks) == wire("reduce_scatter", ranks) + wire("all_gather", ranks)


@pytest.mark.parametrize(
    ("sizes", "mib", "expected"),
    [
        ([MIB // 2] * 4, 0.0, [MIB, MIB]),
        ([3 * MIB, MIB, 30 * MIB, MIB], 0.0, [3 * MIB, 31 * MIB, MIB]),
        ([MIB] * 5, 2.0, [2 * MIB, 2 * MIB, MIB]),
        ([10], 0.0, [10]),
    ],
)
def test_buckets_close_when_they_have_reached_their_size(sizes, mib, expected):
    assert buckets(sizes, mib) == expected


def test_a_single_rank_says_nothing():
    assert volume(FACTS, layout("single", 1)) == []
    assert volume(FACTS, layout("ddp", 1)) == []


def test_data_ranks_add_up_how_many_predictions_they_have():
    for strategy in ("ddp", "zero1", "zero2"):
        first = everything(FACTS, layout(strategy, 2, accumulate=4))[0]
        assert (first.kind, first.bytes, first.count, first.hidden) == ("all_reduce", COUNT, 1, False)
    assert not [
        each
        for each in everything(FACTS, layout("tensor_parallel", 2, data=1, tensor=2, options={}))
        if each.bytes == COUNT
    ]


def test_ddp_and_zero1_differ_by_a_broadcast_of_each_parameter():
    ddp, zero1 = (volume(FACTS, layout(name, 2, accumulate=4)) for name in ("ddp", "zero1"))

    assert total(ddp, "all_reduce", "bytes") == P
    assert [each for each in zero1 if each not in ddp] == zero1[len(ddp) :]
    assert (zero1[-1].kind, zero1[-1].bytes, zero1[-1].count) == ("broadcast", P, 50)


@pytest.mark.parametrize(
    ("strategy", "options", "gathers"),
    [
        ("fsdp", FSDP, 9),
        ("fsdp", FSDP | {"reshard_after_forward": "always"}, 10),
        ("fsdp", FSDP | {"reshard_after_forward": "never"}, 5),
        ("zero2", {}, 5),
    ],
)
def test_sharding_gathers_as_often_as_its_design_says(strategy, options, gathers):
    found = volume(FACTS, layout(strategy, 2, options=options))

    assert total(found, "all_gather") == gathers
    assert total(found, "reduce_scatter") == 5
    assert total(found, "reduce_scatter", "bytes") == P


def test_zero2_gathers_once_and_scatters_for_every_micro_batch():
    found = volume(FACTS, layout("zero2", 2, accumulate=3))

    assert total(found, "all_gather", "bytes") == P
    assert total(found, "reduce_scatter", "bytes") == 3 * P


def test_in_16_bits_gathers_halve_and_gradients_do_not():
    full, half = (volume(FACTS, layout("fsdp", 2, options=FSDP, precision=p)) for p in ("fp32", "bf16"))

    assert total(half, "all_gather", "bytes") * 2 == total(full, "all_gather", "bytes")
    assert total(half, "reduce_scatter", "bytes") == total(full, "reduce_scatter", "bytes")


def test_copies_of_a_sharded_model_sum_their_shards():
    found = volume(FACTS, layout("fsdp", 8, options=FSDP | {"replicas": 2}))
    between = [each for each in found if each.kind == "all_reduce"]

    assert [(each.group, each.bytes) for each in between] == [(2, P // 4)]
    assert {each.group for each in found if each.kind != "all_reduce"} == {4}


def test_tensor_parallel_sums_twice_a_block_each_way():
    found = volume(FACTS, layout("tensor_parallel", 2, data=1, tensor=2, options={"sequence_parallel": False}))

    assert total(found, "all_reduce") == 16
    assert total(found, "all_reduce", "bytes") == 16 * 2 * 64 * 4


def test_sequence_parallel_moves_as_much_besides_its_ends_and_norms():
    plain, sequence = (
        volume(FACTS, layout("tensor_parallel", 2, data=1, tensor=2, options={"sequence_parallel": on}))
        for on in (False, True)
    )
    ends = 2 * 2 * 64 * 4

    assert total(sequence, "all_gather") == 18
    assert total(sequence, "reduce_scatter") == 16
    assert total(sequence, "all_gather", "bytes") - ends == total(plain, "all_reduce", "bytes")


def test_tensor_ranks_hold_norms_and_biases_of_sums_alike():
    whole = 6 * WIDTH

    assert held(FACTS.units[1], 2) == whole + (sum(BLOCK) - whole) // 2
    assert held(FACTS.units[0], 2) == 100 * WIDTH


@pytest.mark.parametrize(("rank", "sends"), [(0, 3), (1, 6), (3, 3)])
def test_stages_send_to_both_neighbours_for_each_micro_batch(rank, sends):
    options = {"schedule": "1F1B", "virtual_stages": 2}
    found = volume(FACTS, layout("pipeline", 4, data=1, pipeline=4, accumulate=3, options=options), rank)

    assert total(found, "send") == sends
    assert total(found, "send", "bytes") == sends * 2 * 64 * 4
    assert total(found, "broadcast") == 1


def test_where_a_schedule_turns_a_rank_keeps_its_activations():
    options = {"schedule": "ZBVZeroBubble", "virtual_stages": 2}
    where = layout("pipeline", 2, data=1, pipeline=2, accumulate=4, options=options)

    assert total(volume(FACTS, where, 1), "send") == 2 * 4  # stages 1 and 2 are both here
    assert total(volume(FACTS, where, 0), "send") == 2 * 4
