import pytest

from labkit.errors import LaunchError
from labkit.hardware.machine import Gpu, Hardware
from labkit.planner.data_sheets import DEVICES, device_named, devices_in, devices_named, this_machine

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


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Quantum", "; there"),
        ("RTX 3091", "; did you mean 'RTX 3090'. There"),
        ("0xT4", "; did you mean 'T4'. There"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest_and_all_there_are(name, near):
    with pytest.raises(LaunchError, match=f"unknown device '{name}'{near} are: T4, P100, L4"):
        device_named(name)


def test_a_service_is_named_if_it_is_the_nearest():
    with pytest.raises(LaunchError, match="did you mean 'Kaggle'"):
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


HEADER = (
    "name, memory_gib, fp32_tflops, fp16_tflops, bf16_tflops, bandwidth_gb_s, memory_type, link, box, network_gb_s, "
    "capability, reached, aliases, source\n"
)


@pytest.mark.parametrize(
    ("name", "capability", "reached", "moved", "network"),
    [
        ("P100", (6, 0), 0.8, 0.6, 3.125e9),
        ("V100 32", (7, 0), 0.8, 0.6, 50e9),
        ("T4", (7, 5), 0.5, 0.8, 3.125e9),
        ("A100 80", (8, 0), 0.87, 0.6, 200e9),
        ("A100 PCIe 80", (8, 0), 0.81, 0.6, 12.5e9),
        ("A10G", (8, 6), 0.8, 0.8, 12.5e9),
        ("RTX 3090", (8, 6), 0.95, 0.8, 3.125e9),
        ("L40S", (8, 9), 0.8, 0.8, 12.5e9),
        ("H200", (9, 0), 0.8, 0.6, 400e9),
        ("MI300X", (9, 4), 0.51, 0.6, 400e9),
        ("B200", (10, 0), 0.78, 0.6, 400e9),
    ],
)
def test_a_preset_has_the_facts_of_its_row(name, capability, reached, moved, network):
    device = device_named(name)

    assert (device.capability, device.reached, device.moved, device.network) == (capability, reached, moved, network)


def test_a_new_device_needs_one_row_whatever_its_name():
    h20, gaudi = devices_in(
        HEADER
        + "H20, 95.0, 44, 148, 148, 4000, HBM, NVLink 4, 8, 400, 9.0, 0.9, h2096 h20141, NVIDIA H20 data sheet\n"
        + 'Gaudi 3, 126.0, 14, none, 1835, 3700, , PCIe 5 x16, 8, , , , , "a data sheet, with a comma"\n'
    )

    assert (h20.moved, h20.reached, h20.capability, h20.assumed) == (0.6, 0.9, (9, 0), ())
    assert (h20.link, h20.link_share, h20.network, h20.aliases) == (450e9, 0.75, 400e9, ("h2096", "h20141"))
    assert gaudi.flops == {"fp32": 14e12, "bf16": 1835e12}
    assert gaudi.source == "a data sheet, with a comma"
    assert gaudi.assumed == (
        "Gaudi 3 has compute capability 8.0",
        "Gaudi 3 reaches 80% of its peak in matrix products",
        "Gaudi 3 reaches 60% of its memory's bandwidth in other operators",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "X, many, 1, 2, 2, 3, HBM, NVLink 4, 8, , 8.0, , , a",
            "row 'X', column 'memory_gib': it has 'many'; data_sheets.py says",
        ),
        (
            "X, 1, , 2, 2, 3, HBM, NVLink 4, 8, , 8.0, , , a",
            "row 'X', column 'fp32_tflops': it has nothing; data_sheets.py says",
        ),
        ("X, 1, 1, 2, 2, 3, DDR, NVLink 4, 8, , 8.0, , , a", "column 'memory_type': it has 'DDR'; data_sheets.py says"),
        ("X, 1, 1, 2, 2, 3, HBM, NVLink, 8, , 8.0, , , a", "column 'link': it has 'NVLink'; data_sheets.py says"),
        ("X, 1, 1, 2, 2, 3, HBM, NVLink 4, 8, , 8, , , a", "column 'capability': it has '8'; data_sheets.py says"),
        ("X, 1, 1, 2, 2, 3, HBM, NVLink 4, 8, , 8.0, , , a, b", "row 'X': it has more fields than columns"),
        ("X, 1, 1, 2, 2, 3, HBM, NVLink 4, 8, , 8.0, , , ", "column 'source': it has nothing"),
        ("X, 1, 1", "row 'X', column 'fp16_tflops': it has nothing"),
    ],
)
def test_a_wrong_row_is_refused_with_its_column(row, message):
    with pytest.raises(ValueError, match=f"devices.csv, .*{message}"):
        devices_in(HEADER + row)


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
