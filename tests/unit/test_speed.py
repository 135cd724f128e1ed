import dataclasses
import math

import pytest

from labkit.link.measure import KINDS, CollectiveTime, Link, fit
from labkit.planner.data_sheets import DEVICES, device_named
from labkit.planner.model.facts import ByteCount, ModelFacts, Profile, Unit, Variant, Work
from labkit.planner.networks import Hosts
from labkit.planner.speed.collectives import wire
from labkit.planner.speed.rates import COMPUTED, HOST, SHORTEST, Rates, alone, assumed_link, assumed_rates
from labkit.planner.speed.step_time import DISPATCH, FORMULA_ERROR, HOST_LINK, HOST_STEP, UNIT_HOST, scaling, step_time
from labkit.planner.strategies.known import strategy_named
from labkit.planner.strategies.strategy import Layout
from labkit.write import Script

MIB = 1 << 20
FACTS = ModelFacts(
    (
        Unit("embed", (MIB,), 0, 0, 0, 1000),
        *(Unit(f"blocks.{i}", (MIB, 1000, 1000), 0, 0, 10**9, 1000) for i in range(8)),
        Unit("unembed", (MIB,), 0, 0, 10**9, 2000),
    ),
    itemsize=4,
    predictions=100,
    inputs=1600,
    samples=1000,
    profiles={},
)


def doing(*work):
    """The profile of a unit with this work."""
    empty = ByteCount()
    return Profile((), (), empty, empty, (), empty, False, False, 0, (), work=work)


def work(kind, flops=0, moved=0, calls=1, phase="forward"):
    return Work(kind, phase, ByteCount(0, flops), ByteCount(0, moved), calls)


UNIT = doing(work("matmul", 10**9), work("matmul", 2 * 10**9, phase="backward"))
COUNTED = dataclasses.replace(
    FACTS, profiles={Variant(precision): (doing(), *[UNIT] * 9, doing()) for precision in ("fp32", "16")}
)
# Powers of two and round numbers: a sample takes 1 s, of which the head 0.2
RATES = Rates(ranks=4, both=(0.0, 1.0), forward=(0.0, 0.3), ends=(0.0, 0.2), alike=(0.0, 0.1), optimizer=0.0, copy=0.0)
FREE = Link("nccl", 4, {kind: CollectiveTime(0.0, 0.0, 0.0) for kind in KINDS}, 1.0)
SLOW = Link("nccl", 4, {kind: CollectiveTime(0.0, 1e-6, 0.0) for kind in KINDS}, 1.0)
FSDP = {"reshard_after_forward": "auto", "cpu_offload": False, "replicas": 1}


def layout(strategy, ranks, micro_batch=1, **more):
    return Layout(strategy=strategy_named(strategy), ranks=ranks, micro_batch=micro_batch, **({"data": ranks} | more))


def test_without_communication_a_step_is_its_computing():
    found = step_time(FACTS, layout("ddp", 4, 2), RATES, FREE)

    assert found.parts == {"compute": 2.0}
    assert found.samples == 8
    assert found.predictions_per_second == 400.0


@pytest.mark.parametrize(
    ("schedule", "stages", "share"), [("GPipe", 1, 1), ("1F1B", 1, 1), ("Interleaved1F1B", 2, 1 / 2)]
)
def test_a_pipelines_bubble_is_the_formulas(schedule, stages, share):
    rates = dataclasses.replace(RATES, ends=(0.0, 0.0))
    options = {"schedule": schedule, "virtual_stages": stages}
    found = step_time(FACTS, layout("pipeline", 4, data=1, pipeline=4, accumulate=8, options=options), rates, FREE)

    assert found.parts["compute"] == pytest.approx(8 / 4)
    assert found.parts["bubble"] == pytest.approx(share * 3 / 4)
    assert found.parts["bubble"] / found.seconds == pytest.approx(3 / (stages * 8 + 3))


def test_a_zero_bubble_schedule_waits_less():
    def bubble(schedule):
        options = {"schedule": schedule, "virtual_stages": 2}
        where = layout("pipeline", 2, data=1, pipeline=2, accumulate=4, options=options)
        return step_time(FACTS, where, RATES, FREE).parts["bubble"]

    assert bubble("InterleavedZeroBubble") < bubble("Interleaved1F1B") < bubble("1F1B")


def test_ranks_that_share_cores_have_more_of_them_while_others_wait():
    options = {"schedule": "GPipe", "virtual_stages": 1}
    where = layout("pipeline", 4, data=1, pipeline=4, accumulate=4, options=options)
    own = step_time(FACTS, where, dataclasses.replace(RATES, ends=(0.0, 0.0)), FREE)
    shared = dataclasses.replace(RATES, ends=(0.0, 0.0), cores=2, contention=2.0)

    # slots with 1, 2, 3, 4, 3, 2, 1 ranks at work take 1, 1, 1.5, 2, 1.5, 1 and 1 of a slot alone, which is 1/2 of one
    # at full work
    assert own.parts["bubble"] == pytest.approx(3 / 4)
    assert step_time(FACTS, where, shared, FREE).parts["bubble"] == pytest.approx((9 / 2 - 4) / 4)


def test_ddp_hides_all_but_its_last_bucket_on_gpus():
    link = dataclasses.replace(SLOW, kinds={kind: CollectiveTime(0.0, 1e-9, 0.0) for kind in KINDS})
    found = step_time(FACTS, layout("ddp", 4), RATES, link)
    # from the last parameter: the head closes the first bucket; seven blocks the next, and the rest is left
    last = FACTS.elements * 4 - 4 * MIB - 4 * 7 * (MIB + 2000)

    assert found.parts["communication"] == pytest.approx(last * 1e-9)


def test_communication_slower_than_backward_shows():
    found = step_time(FACTS, layout("ddp", 4), RATES, SLOW)

    assert found.parts["communication"] == pytest.approx(FACTS.elements * 4 * 1e-6 - 2 / 3)


def test_on_shared_cores_hidden_communication_is_work_for_them():
    rates = dataclasses.replace(RATES, cores=2, contention=2.0)
    kinds = {kind: CollectiveTime(0.0, 1e-8, 0.0, cpu=0.25e-8) for kind in KINDS}
    gloo = Link("gloo", 4, kinds, 1.0)
    ddp = step_time(FACTS, layout("ddp", 4), rates, gloo).parts["communication"]
    none = dataclasses.replace(gloo, kinds={kind: dataclasses.replace(line, cpu=1.0) for kind, line in kinds.items()})

    assert ddp < step_time(FACTS, layout("ddp", 4), rates, none).parts["communication"]
    assert ddp >= 0.5 * FACTS.elements * 4 * 1e-8  # 4 ranks x 0.25 on 2 cores


def test_sharding_says_more_than_ddp_when_nothing_is_hidden():
    rates, gloo = dataclasses.replace(RATES, cores=2), dataclasses.replace(SLOW, backend="gloo")
    said = [
        step_time(FACTS, layout("fsdp", 4, options=FSDP | {"reshard_after_forward": how}), rates, gloo).seconds
        for how in ("never", "auto", "always")
    ]

    assert said == sorted(said)
    assert said[0] < said[1] < said[2]


def test_offloading_costs_the_hosts_time_and_says_so():
    def planned(rates=RATES, accumulate=1, **options):
        return step_time(FACTS, layout("fsdp", 4, accumulate=accumulate, options=FSDP | options), rates, FREE)

    kept, moved = planned(), planned(cpu_offload=True)
    elements = FACTS.elements / 4  # parameters there for forward and backward, gradients back, and a step by the host

    assert "offload" not in kept.parts
    assert moved.parts["offload"] == pytest.approx(elements * (3 * 4 / HOST_LINK + HOST_STEP))
    assert moved.seconds - kept.seconds == pytest.approx(moved.parts["offload"])
    assert moved.low - kept.low < moved.parts["offload"] < moved.high - kept.high
    assert any("offloaded" in text for text in moved.assumed)
    assert not any("offloaded" in text for text in kept.assumed)
    assert planned(accumulate=2, cpu_offload=True).parts["offload"] > moved.parts["offload"]
    never = planned(cpu_offload=True, reshard_after_forward="never")
    assert never.parts["offload"] == pytest.approx(elements * (2 * 4 / HOST_LINK + HOST_STEP))
    assert "offload" not in planned(dataclasses.replace(RATES, cores=2), cpu_offload=True).parts


def test_what_sharding_costs_besides_waiting_is_per_unit_and_per_byte():
    rates, costs = dataclasses.replace(RATES, cores=4), dataclasses.replace(FREE, sharding=(1e-3, 1e-9))
    never, always = (
        step_time(FACTS, layout("fsdp", 4, options=FSDP | {"reshard_after_forward": how}), rates, costs).parts[
            "strategy"
        ]
        for how in ("never", "always")
    )

    assert never == pytest.approx(9e-3 + 2 * FACTS.elements * 4e-9)
    assert always == pytest.approx(9e-3 + 3 * FACTS.elements * 4e-9)
    assert "strategy" not in step_time(FACTS, layout("ddp", 4), rates, costs).parts


def test_a_gpu_hides_the_host_work_of_fsdp_behind_computation_but_not_its_copies():
    def overhead(launching):
        rates = dataclasses.replace(RATES, copy=1e-9, launching=launching)  # a step computes for 1 s
        never = FSDP | {"reshard_after_forward": "never"}
        return step_time(FACTS, layout("fsdp", 4, options=never), rates, FREE).parts["strategy"]

    copies = 2 * FACTS.elements * 4e-9  # gathered and scattered

    assert overhead(launching=0.5) == pytest.approx(copies)
    assert overhead(launching=1.0) == pytest.approx(9 * UNIT_HOST + copies)


def test_checkpointing_adds_a_forward_of_the_blocks():
    plain = step_time(FACTS, layout("ddp", 4, 2), RATES, FREE)
    again = step_time(FACTS, layout("ddp", 4, 2, activation_checkpointing=True), RATES, FREE)

    assert again.seconds - plain.seconds == pytest.approx(2 * (0.3 - 0.2 / 3))


def test_tensor_ranks_divide_blocks_but_not_what_they_do_alike():
    options = {"sequence_parallel": False}
    found = step_time(FACTS, layout("tensor_parallel", 4, data=1, tensor=4, options=options), RATES, FREE)

    assert found.parts["compute"] == pytest.approx(0.2 + 0.1 + (0.8 - 0.1) / 4)


def test_the_optimizer_of_a_sharded_model_updates_a_share():
    rates = dataclasses.replace(RATES, optimizer=1e-6)
    whole = step_time(FACTS, layout("ddp", 4), rates, FREE).parts["optimizer"]

    for strategy, options in (("zero1", {}), ("zero2", {}), ("fsdp", FSDP)):
        assert step_time(FACTS, layout(strategy, 4, options=options), rates, FREE).parts["optimizer"] * 4 == whole


def test_a_gpu_that_updates_one_parameter_at_a_time_waits_for_its_host():
    """AdamW launches 8 operators per parameter. 8 blocks have 12 parameters each, of which 8 are split; with the
    embedding and the head that is 98 parameters, 64 of them DTensors."""
    blocks = [Unit(f"blocks.{i}", (1000,) * 12, 0, 0, 10**9, 1000) for i in range(8)]
    facts = dataclasses.replace(FACTS, units=(FACTS.units[0], *blocks, FACTS.units[-1]))
    options = {"sequence_parallel": False, "expert_ranks": 0}

    def updating(strategy, rates=RATES, **axes):
        where = layout(strategy, 4, **({"options": FSDP | options} | axes))
        return step_time(facts, where, rates, FREE).parts.get("optimizer", 0.0)

    divided = {"data": 1, "tensor": 4}
    assert updating("tensor_parallel", **divided) == pytest.approx(98 * 8 * HOST + 64 * 8 * DISPATCH)
    assert updating("expert_parallel") == pytest.approx(98 * 8 * (HOST + DISPATCH))  # sharded, too
    assert updating("fsdp") == updating("ddp") == 0  # all together
    slow = dataclasses.replace(RATES, optimizer=1e-3)  # the GPU takes longer than its host
    assert updating("tensor_parallel", slow, **divided) == pytest.approx(1e-3 * (2 * MIB + 8 * 12000 / 4), rel=0.1)
    measured = dataclasses.replace(RATES, cores=2, tensor=1e-5, dtensor=1e-4)  # on a CPU
    assert updating("tensor_parallel", measured, **divided) == pytest.approx(34 * 1e-5 + 64 * 1e-4)


def test_the_band_holds_the_prediction_and_widens_with_what_is_not_known():
    near = dataclasses.replace(RATES, spread=(0.01, 0.1))
    found = step_time(FACTS, layout("ddp", 4), near, FREE)

    assert found.low == pytest.approx(1 - FORMULA_ERROR)
    assert found.high == pytest.approx(1.1)
    assert not found.assumed


def test_weak_scaling_goes_on_to_1024_ranks_with_a_widening_band():
    link = dataclasses.replace(SLOW, kinds={kind: CollectiveTime(1e-5, 1e-9, 0.1) for kind in KINDS})
    found = scaling(FACTS, layout("fsdp", 4, options=FSDP), RATES, link, box=8, network=1e8)
    width = {n: (t.high - t.low) / t.seconds for n, t in found.items()}

    assert list(found) == [2**i for i in range(11)]
    assert found[1024].samples == 1024
    assert found[1].seconds <= found[8].seconds < found[16].seconds <= found[1024].seconds
    assert width[1] <= width[4] < width[16] < width[1024]
    assert "the link between more than 4 ranks" in found[1024].assumed


@pytest.mark.parametrize(
    ("strategy", "options", "counts"),
    [
        ("single", {}, [1]),
        ("tensor_parallel", {"sequence_parallel": False}, [1, 2, 4, 8]),
        ("pipeline", {"schedule": "GPipe", "virtual_stages": 2}, [1, 2, 4]),
    ],
)
def test_a_strategy_scales_to_as_many_ranks_as_it_has_use_for(strategy, options, counts):
    axis = {"tensor_parallel": {"tensor": 1}, "pipeline": {"pipeline": 1}}.get(strategy, {})
    where = layout(strategy, 1, data=1, accumulate=4, options=options, **axis)

    assert list(scaling(FACTS, where, RATES, FREE, box=8, network=1e9)) == counts


def test_what_is_assumed_of_a_device_is_said_and_the_band_is_wide():
    device = device_named("T4")
    rates = assumed_rates(COUNTED, device, "fp16", 1)
    found = step_time(COUNTED, layout("ddp", 2), rates, assumed_link(device, 2))

    assert found.parts["compute"] == pytest.approx(9 * 3e9 / (COMPUTED["matmul"] * device.reached * 65e12))
    assert found.high - found.low > 0.3 * found.seconds
    assert any("T4's data-sheet speed" in each for each in found.assumed)
    assert any("link" in each for each in found.assumed)


def test_a_fact_that_is_unknown_of_a_device_is_said_to_be_assumed():
    assert (
        "L4 reaches 80% of its peak in matrix products" in assumed_rates(COUNTED, device_named("L4"), "fp16", 1).assumed
    )


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_collectives_reach_a_part_of_every_link(device):
    line = assumed_link(device, 2).kinds["all_reduce"]

    assert 0.3 * device.link < wire("all_reduce", 2) / line.per_byte < 0.8 * device.link


def test_no_speed_is_assumed_in_a_precision_that_the_hardware_lacks():
    assert assumed_rates(COUNTED, device_named("T4"), "bf16", 1) is None


def test_a_line_is_found_again_in_what_it_gives():
    measured = [(size, 1e-4 + size * 1e-9) for size in (4096, 1 << 16, 1 << 20, 1 << 26)]
    latency, per_byte, residual = fit(measured)

    assert latency == pytest.approx(1e-4)
    assert per_byte == pytest.approx(1e-9)
    assert residual < 1e-6


def test_a_fit_never_has_a_negative_latency_or_bandwidth():
    bent = [(1000, 1e-6), (1 << 20, 1e-1), (1 << 26, 1e1)]
    latency, per_byte, residual = fit(bent)
    falling = fit([(1000, 1.0), (100_000, 0.5)])

    assert latency >= 0
    assert per_byte > 0
    assert math.isfinite(residual)
    assert falling[1] == 0.0


def test_rates_are_of_the_model_without_its_strategy():
    ddp, fsdp = (alone(Script.load(name)) for name in ("ddp", "fsdp"))
    text = Script.load("ddp").cells["model"].text.replace("layers=4", "layers=2")

    assert ddp.sha256 == fsdp.sha256 == Script.load("single").sha256
    assert alone(Script.load("ddp").with_cells(model=text)).cells["model"].text == text


def test_ranks_that_share_cores_take_turns():
    shared = dataclasses.replace(RATES, cores=2, contention=1.5, ranks=2)

    crowd = shared.shared_by(8)

    assert crowd.both == (0.0, 4.0)  # four times as many on the same cores
    assert crowd.contention == 6.0
    assert "8 ranks share 2 cores, measured with 2: 4.0 times as long" in crowd.assumed
    assert shared.shared_by(2) is shared
    assert RATES.shared_by(64) is RATES  # each with a device of its own
    alone = step_time(FACTS, layout("ddp", 2, 2), shared, FREE)
    together = step_time(FACTS, layout("ddp", 8, 2), crowd, FREE)
    assert together.parts["compute"] == 4 * alone.parts["compute"]


def test_fewer_ranks_than_were_measured_compute_faster_until_each_has_a_core():
    shared = dataclasses.replace(RATES, cores=2, contention=2.0)

    times = [step_time(FACTS, layout("ddp", ranks, 2), shared, FREE).parts["compute"] for ranks in (4, 3, 2, 1)]

    assert times == [2.0, 1.5, 1.0, 1.0]


def one_unit(*work):
    return dataclasses.replace(FACTS, units=FACTS.units[:1], profiles=dict.fromkeys(
        (Variant("fp32"), Variant("16")), (doing(*work),)
    ))  # fmt: skip


def seconds(facts, device="A100 80", precision="fp32", samples=64):
    return assumed_rates(facts, device_named(device), precision, samples).both[0]


def test_an_operator_takes_the_longer_of_computing_and_moving():
    long, wide = work("matmul", 10**12, 10**3), work("matmul", 10**3, 10**10)

    assert seconds(one_unit(long)) == seconds(one_unit(work("matmul", 10**12)))
    assert seconds(one_unit(wide)) == seconds(one_unit(work("matmul", 0, 10**10)))
    assert seconds(one_unit(long), samples=128) == pytest.approx(2 * seconds(one_unit(long)))


def test_small_operators_take_the_hosts_time_to_launch_them():
    tiny = one_unit(work("memory", moved=1, calls=100))

    assert seconds(tiny) == pytest.approx(100 * max(HOST, SHORTEST))


def test_in_fp32_convolutions_use_tf32_where_there_is_some_and_products_do_not():
    def ratio(device):
        product, convolution = (seconds(one_unit(work(kind, 10**12)), device) for kind in ("matmul", "convolution"))
        return product / convolution

    assert ratio("V100 32") == pytest.approx(1)
    assert ratio("A100 80") > 2


def test_a_ring_over_many_hosts_is_late_in_proportion_to_them():
    link = dataclasses.replace(FREE, kinds={kind: CollectiveTime(2e-5, 0.0, 0.0) for kind in KINDS})

    def said(ranks, strategy="fsdp", **options):
        where = layout(strategy, ranks, options=FSDP | options)
        return step_time(FACTS, where, RATES, link, Hosts(8, 1e12)).parts["communication"]

    assert said(16384) > 10 * said(1024) > 10 * said(64)
    assert said(16384, replicas=16384 // 64) < said(1024)
    assert said(16384, "ddp") < 3 * said(64, "ddp")  # a sum follows a tree
