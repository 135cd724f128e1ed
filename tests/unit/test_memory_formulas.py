"""The planner's memory formulas on facts written here: small numbers that one can add up by hand."""

import itertools
from dataclasses import replace

import pytest
from textbook import block_activations

import labkit
from labkit.errors import LaunchError
from labkit.planner.layout import layout_of
from labkit.planner.memory import fsdp
from labkit.planner.memory.ledger import UnknownToFormulas
from labkit.planner.memory.peak import moments, peak
from labkit.planner.memory.pipeline import actions
from labkit.planner.memory.whole import adamw_state, adamw_temporary
from labkit.planner.model.facts import (
    ByteCount,
    ModelFacts,
    Moment,
    Profile,
    Unit,
    Variant,
    facts_from_json,
    facts_to_json,
)
from labkit.planner.speed.collectives import COUNT
from labkit.planner.strategies.known import CUSTOM
from labkit.planner.strategies.zero1 import dealt

BLOCK, ENDS = (4096, 64), (1024,)
KEPT, OUT = 1000, 100


def profile(parameters, itemsize=4, *, kept=KEPT):
    gradients = itemsize * sum(parameters)
    return Profile(
        parameters=parameters,
        rows=tuple(size // 16 for size in parameters),
        input=ByteCount(0, OUT),
        output=ByteCount(0, OUT),
        forward=(Moment(ByteCount(0, kept + OUT), ByteCount(0, kept), 0),),
        saved=ByteCount(0, kept),
        keeps_input=True,
        keeps_output=False,
        cached=0,
        backward=(
            Moment(ByteCount(gradients, kept + 2 * OUT), ByteCount(0, kept), 0),
            Moment(ByteCount(0, 2 * OUT), ByteCount(), gradients),
        ),
        backward_in_stage=(
            Moment(ByteCount(gradients, kept + OUT), ByteCount(0, kept), 0),
            Moment(ByteCount(0, OUT), ByteCount(), gradients),
        ),
    )


def model(blocks=4):
    """Ends of 1,024 parameters, blocks of 4,160; a block keeps 1,000 bytes of a sample and hands on 100."""
    names = ["embed", *(f"blocks.{i}" for i in range(blocks)), "unembed"]
    sizes = [BLOCK if name.startswith("blocks") else ENDS for name in names]
    units = tuple(Unit(name, of, 0, 0, 0, 25) for name, of in zip(names, sizes, strict=True))
    profiles = {}
    for precision, half, recomputed in itertools.product(["fp32", "16", "fp64"], [False, True], [False, True]):
        variant = Variant(precision, half, recomputed)
        each = [profile(of, variant.itemsize, kept=OUT if recomputed else KEPT) for of in sizes]
        profiles[variant] = (*each, replace(profile(()), parameters=(), rows=()))
    return ModelFacts(units, 4, 25, 16, 1000, profiles)


FACTS = model()
P = 2 * sum(ENDS) + 4 * sum(BLOCK)
TENSORS = 10


def layout(strategy, ranks=1, **options):
    return layout_of(labkit.Script.load(strategy), ranks, {"global_batch_size": 8 * ranks, **options})


def states(facts, where, rank=0):
    """Bytes of parameters, gradients and optimizer state after backward."""
    at_end = moments(facts, where, rank)[-1].categories
    return {name: at_end.get(name, 0) for name in ("parameters", "gradients", "optimizer")}


def test_adamw_keeps_two_moments_of_each_parameter_and_a_step_of_each_tensor():
    assert adamw_state([10, 20], 4) == 2 * 4 * 30 + 2 * 4


def test_adamw_one_by_one_needs_twice_a_tensor_and_the_one_before():
    assert adamw_temporary([10, 20, 5], 4, foreach=False) == 4 * (2 * 20 + 10)
    assert adamw_temporary([10, 20, 5], 4, foreach=True) == 4 * 35
    assert adamw_temporary([], 4, foreach=False) == 0


def test_zero1_deals_the_largest_parameter_to_the_rank_with_the_least():
    assert dealt([1, 8, 3, 4], 2) == [[8], [4, 3, 1]]


def test_alone_a_rank_holds_sixteen_bytes_of_each_parameter():
    held = states(FACTS, layout("single"))
    assert held == {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P + 4 * TENSORS}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ddp_holds_as_much_on_any_number_of_ranks(ranks):
    assert states(FACTS, layout("ddp", ranks)) == states(FACTS, layout("single"))


def test_fsdp_shards_a_tied_embedding_whose_gradient_the_last_unit_makes():
    first, *others, last = FACTS.units
    units = (first, *others, replace(last, parameters=()))
    made_last = {
        variant: (replace(each[0], parameters=(), rows=()), *each[1:]) for variant, each in FACTS.profiles.items()
    }
    held = states(replace(FACTS, units=units, profiles=made_last), layout("fsdp", 2))
    of_ends = sum(ENDS) // 2
    assert held["parameters"] == states(FACTS, layout("fsdp", 2))["parameters"] - 4 * of_ends


def test_without_bucket_views_ddp_holds_the_buckets_too():
    views = moments(FACTS, layout("ddp", 2))[-1]
    copies = moments(FACTS, layout("ddp", 2, gradient_as_bucket_view=False))[-1]
    assert copies.bytes - views.bytes == 4 * P
    assert copies.categories["communication"] == 4 * P


def test_zero1_splits_the_optimizer_state_alone():
    held = [states(FACTS, layout("zero1", 4), rank) for rank in range(4)]
    assert {each["gradients"] for each in held} == {4 * P}
    assert sum(each["optimizer"] for each in held) == 8 * P + 4 * TENSORS


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_fully_shard_splits_every_state_over_the_ranks(strategy):
    assert states(FACTS, layout(strategy, 4)) == {
        "parameters": P,
        "gradients": P,
        "optimizer": 2 * P + 4 * TENSORS,
    }


def test_rows_that_do_not_divide_are_padded():
    three = states(FACTS, layout("fsdp", 3))  # 256 rows of 16 become 3 x 86, 4 rows 3 x 2, 64 rows 3 x 22
    assert three["parameters"] == 4 * 16 * (4 * (86 + 2) + 2 * 22)
    last = states(FACTS, layout("fsdp", 3), 2)["optimizer"]
    assert last == 2 * 4 * 16 * (4 * (84 + 0) + 2 * 20) + 4 * TENSORS


def test_fsdp_gathers_a_block_while_it_computes_and_zero2_keeps_them_all():
    whole, root = 4 * sum(BLOCK), 2 * 4 * sum(ENDS)

    def communication(name, operation):
        of = {moment.operation: moment.categories for moment in moments(FACTS, layout(name, 4))}
        return of[operation].get("communication", 0)

    # the root, the block, the buffer into which it was gathered
    assert communication("fsdp", "forward of blocks.3") == root + 2 * whole + COUNT
    assert communication("zero2", "forward of blocks.3") == root + 5 * whole + COUNT
    assert communication("fsdp", "loss") == root + COUNT
    assert communication("zero2", "loss") == root + 4 * whole + COUNT


def test_since_torch_2_15_a_gathering_buffer_is_freed_before_the_next_is_made(monkeypatch):
    def gathering():
        each = moments(FACTS, layout("zero2", 4))
        return max(m.categories["communication"] for m in each if m.operation == "gathering blocks.3")

    monkeypatch.setattr(fsdp, "RELEASES_FIRST", False)
    before = gathering()
    monkeypatch.setattr(fsdp, "RELEASES_FIRST", True)
    assert before - gathering() == 4 * sum(BLOCK)


def test_replicas_of_fsdp_split_over_fewer_ranks():
    assert states(FACTS, layout("fsdp", 4, replicas=2)) == states(FACTS, layout("fsdp", 2))


def test_what_blocks_keep_is_there_at_the_loss():
    held = {moment.operation: moment for moment in moments(FACTS, layout("single"))}
    inputs = 8 * FACTS.inputs
    assert held["loss"].categories["activations"] == inputs + 8 * 7 * KEPT
    recomputing = moments(FACTS, layout("single", activation_checkpointing=True))
    assert {m.operation: m for m in recomputing}["loss"].categories["activations"] == inputs + 8 * (6 * OUT + KEPT)


def test_the_second_micro_batch_finds_the_gradients_of_the_first():
    one, more = layout("single", global_batch_size=8), layout("single", global_batch_size=16, accumulate=2)
    difference = {m.operation: m.bytes for m in moments(FACTS, more)}["loss"]
    difference -= {m.operation: m.bytes for m in moments(FACTS, one)}["loss"]
    assert difference == 4 * P + 8 * FACTS.inputs


def test_a_peak_is_the_largest_moment_and_the_sum_of_its_categories():
    for strategy in ("single", "ddp", "zero1", "zero2", "fsdp"):
        plan = layout(strategy, 1 if strategy == "single" else 2)
        found = peak(FACTS, plan)
        assert found.bytes == max(moment.bytes for moment in moments(FACTS, plan)) == sum(found.categories.values())


def test_sixteen_bits_are_cast_by_autocast_or_gathered_by_fsdp():
    assert layout("ddp", 2, precision="bf16").variant == Variant("16", half_parameters=False)
    assert layout("fsdp", 2, precision="bf16").variant == Variant("16", half_parameters=True)
    assert states(FACTS, layout("fsdp", 2, precision="bf16")) == states(FACTS, layout("fsdp", 2))


def under_way(schedule, ranks, rank, stages, micro_batches):
    """The most micro-batches of which the rank holds activations, a stage's share of one for each stage."""
    most = now = 0
    for what, *_ in actions(schedule, ranks, rank, stages, micro_batches):
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[what]
        most = max(most, now)
    assert now == 0
    return most / len(stages)


# Measured with hooks in real pipelines of four ranks and eight micro-batches.
UNDER_WAY = {
    "GPipe": [8, 8, 8, 8],
    "1F1B": [4, 3, 2, 1],
    "Interleaved1F1B": [5.5, 4.5, 3.5, 2.5],
    "LoopedBFS": [8, 8, 8, 8],
}


@pytest.mark.parametrize("schedule", UNDER_WAY)
def test_a_schedule_has_so_many_micro_batches_under_way(schedule):
    stages = {
        "GPipe": lambda rank: [rank],
        "1F1B": lambda rank: [rank],
    }.get(schedule, lambda rank: [rank, rank + 4])
    assert [under_way(schedule, 4, rank, stages(rank), 8) for rank in range(4)] == UNDER_WAY[schedule]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_the_ranks_of_a_pipeline_hold_the_model_once(schedule):
    plan = layout("pipeline", 2, accumulate=4, schedule=schedule, global_batch_size=16)
    held = [states(FACTS, plan, rank) for rank in range(2)]
    assert {name: sum(each[name] for each in held) for name in held[0]} == states(FACTS, layout("single"))


def test_blocks_that_are_not_there_are_neither_recomputed_nor_made_stages_of():
    one = replace(FACTS, units=(replace(FACTS.units[0], name="model"),))
    plain = {variant: each[:1] + each[-1:] for variant, each in FACTS.profiles.items() if not variant.recomputed}
    one = replace(one, profiles=plain)
    with pytest.raises(LaunchError, match="was not counted"):
        peak(one, layout("single", activation_checkpointing=True))
    with pytest.raises(LaunchError, match="0 blocks cannot be split into 2 pipeline stages"):
        peak(one, layout("pipeline", 2))
    with pytest.raises(LaunchError, match="4 blocks cannot be split into 3 pipeline stages"):
        peak(FACTS, layout("pipeline", 3))


def test_what_formulas_do_not_know_they_say():
    whole = replace(FACTS, units=(replace(FACTS.units[0], name="model"),), layers=4)
    for facts, where, why in (
        (FACTS, layout("ddp", 2, selective_checkpointing=True), "they do not cover selective checkpointing"),
        (
            FACTS,
            layout("context_parallel", 2, attention="ring"),
            "they do not cover the scores that a ring of attention",
        ),
        (FACTS, replace(layout("ddp", 2), strategy=CUSTOM), "the strategy cell is not one of labkit's"),
        (FACTS, layout("pipeline", 2, accumulate=4, schedule="ZBVZeroBubble"), "they do not cover ZBVZeroBubble"),
        (FACTS, layout("fsdp1", 2), "its memory is rehearsed only"),
        (whole, layout("pipeline", 2), "they cover pipelines only for models of embed, blocks and unembed"),
    ):
        with pytest.raises(UnknownToFormulas, match=why):
            peak(facts, where)


def test_facts_survive_being_written():
    more = replace(FACTS, uncut="no", layers=4, looked_at=64)
    assert facts_from_json(facts_to_json(FACTS)) == FACTS
    assert facts_from_json(facts_to_json(more)) == more


def test_fused_attention_leaves_sixteen_elements_for_each_of_the_input():
    assert block_activations(1, 128, 128, 4) == 16 * 128 * 128 * 4 + 4 * 128 * (4 + 4)
    assert block_activations(2, 128, 128, 4, kept="input") == 2 * 128 * 128 * 4


def test_what_is_offloaded_is_in_the_hosts_memory_not_in_a_gpus():
    kept, offloaded = layout("fsdp", 2), layout("fsdp", 2, cpu_offload=True)
    held, left = peak(FACTS, kept, on_gpu=True), peak(FACTS, offloaded, on_gpu=True)

    assert held.bytes - left.bytes >= 3 * 4 * P // 2  # half of the parameters and of their two moments
    assert "parameters" not in left.categories
    assert "optimizer" not in left.categories
    assert peak(FACTS, offloaded) == peak(FACTS, kept)  # on a CPU the host's memory is the ranks'
