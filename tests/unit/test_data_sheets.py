import pytest

from labkit.errors import LaunchError
from labkit.hardware.machine import Gpu, Hardware
from labkit.planner.data_sheets import DEVICES, device_named, devices_named, this_machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("T4", "T4"),
        ("tesla t4", "T4"),
        ("a100-40", "A100 40"),
        ("A100 40GB", "A100 40"),
        ("NVIDIA A100-SXM4-80GB", "A100 80"),
        ("Tesla V100-SXM2-16GB", "V100 16"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
    ],
)
def test_a_device_is_found_however_it_is_spelled(spelled, name):
    assert device_named(spelled).name == name


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("2xT4", 2, "T4"),
        ("T4 x2", 2, "T4"),
        ("8 x H100", 8, "H100"),
        ("2 T4", 2, "T4"),
        ("4090x2", 2, "RTX 4090"),
        ("Kaggle P100", 1, "P100"),
        ("rtx 3090", None, "RTX 3090"),
        ("2xrtx3090", 2, "RTX 3090"),
        ("H200", None, "H200"),
        ("NVIDIA A100 80GB PCIe", None, "A100 PCIe 80"),
        ("8 x AMD Instinct MI300X", 8, "MI300X"),
        ("Tesla V100-PCIE-16GB", None, "V100 PCIe 16"),
        ("Kaggle", 2, "T4"),
        ("colab a100", 1, "A100 40"),
    ],
)
def test_several_devices_are_counted(text, count, name):
    found, device = devices_named(text)

    assert (found, device.name) == (count, name)


@pytest.mark.parametrize("name", ["TPU", "RTX 2080", "NVIDIA A16", "0xT4"])
def test_an_unknown_device_is_refused_with_the_nearest_and_all_there_are(name):
    with pytest.raises(LaunchError, match=f"unknown device '{name}'; the closest name is .*T4, P100, L4"):
        device_named(name)


def test_a_service_is_named_if_it_is_the_nearest():
    with pytest.raises(LaunchError, match="closest name is Kaggle"):
        device_named("Kaggel")


@pytest.mark.parametrize("name", ["A100", "8xA100"])
def test_a_name_of_two_devices_is_not_guessed(name):
    with pytest.raises(LaunchError, match="use A100 40 or A100 80"):
        devices_named(name)


@pytest.mark.parametrize("name", ["T4", "P100", "V100 16", "V100 32"])
def test_older_devices_have_no_bf16(name):
    assert "bf16" not in device_named(name).flops


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_figure_has_a_source_and_the_right_unit(device):
    assert "data sheet" in device.source or "white paper" in device.source
    assert 14 * GIB < device.usable < device.memory < 192 * GIB
    assert 1e12 < device.flops["fp32"] < device.flops["fp16"] < 2.5e15
    assert 2e11 < device.bandwidth < 1e13
    assert 1e9 < device.network < device.link < 1e12


def machine(*gpus):
    return Hardware(
        "linux", gpus, cores=4, memory=32 * GIB, memory_available=24 * GIB, shared_memory=None, visible_devices=None
    )


def test_ranks_on_a_cpu_share_its_memory_and_nothing_is_known_of_its_speed():
    here = this_machine(machine())

    assert here.usable_by(1) == 24 * GIB - here.outside
    assert here.usable_by(2) == 12 * GIB - here.outside
    assert here.usable_by(1000) == 0
    assert (here.flops, here.link) == ({}, None)


def test_a_gpu_here_has_the_speed_of_its_preset_and_the_memory_its_driver_tells():
    here = this_machine(machine(Gpu("Tesla T4", 15 * GIB, (7, 5)), Gpu("Tesla T4", 15 * GIB, (7, 5))))

    assert here.memory == 15 * GIB
    assert here.flops == device_named("T4").flops
    assert here.usable_by(2) == here.usable_by(1)
    assert here.box == 2


def test_an_unknown_gpu_here_has_memory_but_no_speed():
    here = this_machine(machine(Gpu("NVIDIA B300", 288 * GIB, (10, 3))))

    assert here.memory == 288 * GIB
    assert here.flops == {}
    assert here.bandwidth is None
