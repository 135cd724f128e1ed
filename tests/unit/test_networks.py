"""A plan for several hosts: what of a training's talk goes over the network between them, and how long that takes."""

import dataclasses

import pytest

import labkit
from labkit.errors import LaunchError
from labkit.link.measure import KINDS, CollectiveTime, Link
from labkit.planner.data_sheets import device_named
from labkit.planner.networks import NETWORK_SHARE, Hosts, bandwidth_of, between_hosts
from labkit.planner.speed.collectives import wire
from labkit.planner.speed.step_time import step_time
from labkit.planner.strategies.strategy import volume
from unit.test_speed import FACTS, FSDP, RATES, layout

# Within a host next to nothing. Of gloo, because NCCL's rings also have a latency for each host.
FAST = Link("gloo", 8, {kind: CollectiveTime(0.0, 1e-15, 0.5) for kind in KINDS}, 1.0)
NO_WORK = dataclasses.replace(RATES, both=(0.0, 0.0), forward=(0.0, 0.0), ends=(0.0, 0.0), alike=(0.0, 0.0))
FOUR = Hosts(8, 1e9)
HYBRID = {"schedule": "1F1B", "virtual_stages": 1, "sequence_parallel": False}


def talk(where, hosts, link=FAST):
    return step_time(FACTS, where, NO_WORK, link, hosts).parts["communication"]


@pytest.mark.parametrize(
    ("name", "gbit"),
    [
        ("100GbE", 100),
        ("10 gbe", 10),
        ("InfiniBand NDR", 400),
        ("infiniband-hdr", 200),
        ("EDR", 100),
        ("8 x InfiniBand NDR", 3200),
        ("2x25GbE", 50),
        (100e9, 100),
        (1_000_000_000, 1),
    ],
)
def test_a_network_by_its_name_or_its_bits_per_second(name, gbit):
    assert bandwidth_of(name) == gbit * 1e9 / 8


@pytest.mark.parametrize("name", ["token ring", "", "0 x 100GbE", 0, -1, 100, True, float("nan"), None])
def test_what_is_no_network_is_refused_in_one_sentence(name):
    with pytest.raises(LaunchError, match="^(unknown network|network must be) "):
        bandwidth_of(name)


def test_the_nearest_network_is_named():
    with pytest.raises(LaunchError, match="did you mean '100GbE'"):
        bandwidth_of("100G")


@pytest.mark.parametrize(
    ("group", "stride", "crosses"),
    [
        (32, 1, True),  # all of 4 x 8
        (8, 1, False),  # one host's
        (4, 1, False),
        (4, 8, True),  # one of each host
        (4, 2, False),
        (8, 4, True),
        (6, 1, True),  # do not fill a host: some lie on two
        (1, 1, False),
    ],
)
def test_which_groups_lie_on_more_than_one_host(group, stride, crosses):
    assert FOUR.cross(group, stride, 32) == crosses


def test_ranks_that_fit_on_one_host_cross_nothing():
    assert not FOUR.cross(6, 1, 6)
    assert not FOUR.cross(8, 1, 8)


def test_a_ring_over_all_ranks_has_the_whole_network_of_a_host():
    """2 (n-1)/n of the gradients go over the one edge from each host to the next."""
    gradients = 4 * FACTS.elements

    assert talk(layout("ddp", 32), FOUR) == pytest.approx(2 * 31 / 32 * gradients / (NETWORK_SHARE * 1e9), rel=1e-6)


def test_groups_side_by_side_share_the_network():
    """8 copies of a shard lie on each host: each of its 8 groups has an eighth, for an eighth of the gradients."""
    flat, copies = layout("ddp", 32), layout("fsdp", 32, options={**FSDP, "replicas": 4})
    crossing = [each for each in volume(FACTS, copies) if FOUR.cross(each.group, each.stride, 32)]

    assert [(each.kind, each.group, each.stride) for each in crossing if each.bytes > 8] == [("all_reduce", 4, 8)]
    assert talk(copies, FOUR) == pytest.approx(talk(flat, FOUR) * (3 / 4) / (31 / 32), rel=1e-4)


def test_shards_inside_a_host_are_faster_than_shards_across():
    inside = layout("fsdp", 32, options={**FSDP, "replicas": 4})

    assert talk(inside, FOUR) < 0.6 * talk(layout("fsdp", 32, options=FSDP), FOUR)


def test_tensor_ranks_inside_a_host_do_not_feel_the_network():
    inside = layout("hybrid", 32, data=4, tensor=8, options=HYBRID)
    tensor = [each for each in volume(FACTS, inside) if each.kind == "all_reduce" and each.group == 8]
    across = layout("tensor_parallel", 32, data=1, tensor=32, options={"sequence_parallel": False})

    assert tensor
    assert not any(FOUR.cross(each.group, each.stride, 32) for each in tensor)
    assert talk(across, Hosts(8, 1e7)) == pytest.approx(10 * talk(across, Hosts(8, 1e8)), rel=1e-3)


def test_stages_on_two_hosts_send_over_the_network_and_stages_on_one_do_not():
    options = {"schedule": "GPipe", "virtual_stages": 1}
    where = layout("pipeline", 4, data=1, pipeline=4, accumulate=4, options=options)

    assert talk(where, Hosts(4, 1e6)) < 1e-6
    assert talk(where, Hosts(2, 1e6)) > 1e-3


def test_a_fast_network_is_not_faster_than_the_link_inside():
    slow = Link("gloo", 8, {kind: CollectiveTime(0.0, 1e-9, 0.5) for kind in KINDS}, 1.0)

    within = talk(layout("ddp", 32), None, slow)
    assert talk(layout("ddp", 32), Hosts(8, 1e15), slow) == pytest.approx(within)
    assert within == pytest.approx(4 * FACTS.elements * 1e-9 * wire("all_reduce", 32) / wire("all_reduce", 8))


def test_the_band_is_wider_between_hosts_and_what_is_assumed_is_said():
    one, four = (step_time(FACTS, layout("ddp", n), NO_WORK, FAST, FOUR) for n in (8, 32))

    assert (four.high - four.low) / four.seconds > (one.high - one.low) / one.seconds
    assert any(each.startswith("80% of 1 GB/s between hosts of 8 ranks, with the latency") for each in four.assumed)
    assert not any("between hosts" in each for each in one.assumed)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (layout("ddp", 32), ["data (32) span hosts"]),
        (layout("fsdp", 32, options=FSDP), ["shards (32) span hosts", "replicas=4 keeps all_gathers within"]),
        (
            layout("fsdp", 32, options={**FSDP, "replicas": 4}),
            ["shards (8) stay within a host; copies (4) span hosts"],
        ),
        (
            layout("hybrid", 32, data=2, tensor=8, pipeline=2, options=HYBRID),
            ["tensor (8) stay within a host; shards (2), pipeline (2) span hosts"],
        ),
        (
            layout("tensor_parallel", 16, data=1, tensor=16, options={"sequence_parallel": False}),
            ["tensor (16) span hosts", "Tensor ranks communicate in every layer: keep them within a host"],
        ),
    ],
)
def test_advice_names_what_stays_inside_a_host(where, words):
    device = dataclasses.replace(device_named("A100 40"), nodes=where.ranks // 8, network=12.5e9)
    said = " ".join(between_hosts(where, device))

    assert all(each in said for each in words), said
    assert "100 Gbit/s per host" in said


def test_of_one_host_nothing_is_said():
    assert not [*between_hosts(layout("ddp", 8), device_named("A100 40"))]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 0}, "nodes must be an integer"),
        ({"nodes": 2.0}, "nodes must be an integer"),
        ({"nodes": 1 << 14}, "nodes must be an integer from 1 to 2,048 with 8 ranks each"),
        ({"network": "100GbE"}, "set nodes to 2 or more"),
        ({"nodes": 2, "network": "fast"}, "unknown network 'fast'"),
        ({"nodes": 2, "nproc_per_node": 8, "global_batch_size": 24}, "cannot be split evenly into 16 data ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_counted(given, words):
    with pytest.raises(LaunchError, match=words):
        labkit.plan("ddp", **{"nproc_per_node": 8, "device": "A100 40", "global_batch_size": 64, **given})


def test_memory_of_hosts_is_not_shared_between_them():
    here = device_named("this machine")
    if not here.shared:
        pytest.skip("this machine has GPUs")
    two = dataclasses.replace(here, nodes=2)

    assert two.usable_by(4) == here.usable_by(2)


def test_what_ranks_exchange_with_other_hosts_shares_their_network():
    hosts = Hosts(8, 1e9)

    assert hosts.exchanged(8, 1) == 0
    assert hosts.exchanged(16, 1) == pytest.approx(8 * (1 / 2) / (NETWORK_SHARE * 1e9))  # half of it, of eight ranks
    assert hosts.exchanged(2, 8) == pytest.approx(8 * (1 / 2) / (NETWORK_SHARE * 1e9))
