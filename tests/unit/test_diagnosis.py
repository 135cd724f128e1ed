"""What the doctor finds, on recorded machines: `machines/*.json` are the facts of one each, as `labkit doctor --json`
writes them. Each says in `source` whether it was recorded or made from documentation; only laptop-cpu was recorded."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

import labkit
from labkit import cli, data, frontend, session
from labkit.diagnosis import Diagnosis, MachineFacts, detections, diagnose, gather, probes
from labkit.diagnosis.detections import COLUMNS
from labkit.diagnosis.facts import (
    UNLIMITED,
    Kaggle,
    NotebookKernel,
    Preflight,
    Process,
    TorchBuild,
    Wsl,
    nvml_from_json,
)
from labkit.errors import LabError, LaunchError
from labkit.hardware import container
from labkit.hardware import machine as hardware_module
from labkit.hardware.machine import (
    ASKED_AGAIN,
    DRIVER_FILES,
    Gpu,
    Hardware,
    driver_version,
    hardware,
    has_kernels,
    install_for,
)
from labkit.hardware.nvml import report
from labkit.link.measure import remembered_preflight, try_link
from labkit.machine import Machine
from labkit.planner.data_sheets import this_machine
from labkit.record.folder import RunFolder
from labkit.worker.measures import memory as worker_memory

MACHINES = sorted((Path(__file__).parent / "machines").glob("*.json"))
NAMES = [path.stem for path in MACHINES]


def facts_from_json(value):
    nested = {
        "hardware": hardware_from_json,
        "torch_build": from_json(TorchBuild),
        "nvml": nvml_from_json,
        "kernel": from_json(NotebookKernel),
        "kaggle": from_json(Kaggle),
        "preflight": from_json(Preflight),
        "wsl": from_json(Wsl),
        "leftovers": tuple,
    }
    return MachineFacts(**{k: nested[k](v) if k in nested and v is not None else v for k, v in value.items()})


def from_json(kind):
    """A constructor from JSON, which has lists where the classes have tuples."""
    return lambda value: kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})


def hardware_from_json(value):
    gpus = (Gpu(gpu["name"], gpu["memory"], tuple(gpu["capability"])) for gpu in value["gpus"])
    return Hardware(**{**value, "gpus": tuple(gpus)})


def facts_of(name):
    recorded = json.loads((Path(__file__).parent / "machines" / f"{name}.json").read_text(encoding="utf-8"))
    return facts_from_json(recorded["facts"])


def found(facts):
    return {each.what: each for each in diagnose(facts)}


def with_hardware(name, **changes):
    facts = facts_of(name)
    return dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, **changes))


@pytest.fixture(params=NAMES)
def machine(request):
    facts = facts_of(request.param)
    return Machine(facts.hardware, facts)


# (what, level): a machine on which the doctor says so, and one on which it does not.
CASES = {
    (".wslconfig", "warning"): ("wsl2-rtx", "wsl1"),
    ("GLOO_SOCKET_IFNAME", "stop"): ("shared-box-busy", "laptop-cpu"),
    ("address space", "warning"): ("shared-box-busy", "laptop-cpu"),
    ("runs folder", "stop"): ("docker-small-shm", "laptop-cpu"),
    ("/dev/shm", "fine"): ("8xa100", "mac"),
    ("/dev/shm", "warning"): ("docker-small-shm", "8xa100"),
    ("GPU memory", "warning"): ("wsl2-rtx", "8xa100"),
    ("GPUs in WSL2", "note"): ("wsl2-rtx", "kaggle-2xt4-interactive"),
    ("GPUs in use", "warning"): ("shared-box-busy", "8xa100"),
    ("Kaggle", "fine"): ("kaggle-batch", "kaggle-2xt4-interactive"),
    ("Kaggle", "note"): ("kaggle-2xt4-interactive", "kaggle-batch"),
    ("NCCL settings", "note"): ("kaggle-batch", "kaggle-2xt4-interactive"),
    ("NVML", "note"): ("wsl2-rtx", "8xa100"),
    ("WSL memory", "note"): ("wsl2-rtx", "wsl1"),
    ("WSL kernel", "warning"): ("wsl2-troubled", "wsl2-rtx"),
    ("WSL GPU", "note"): ("wsl2-troubled", "wsl2-rtx"),
    ("WSL network", "fine"): ("wsl2-rtx", "wsl2-troubled"),
    ("Linux driver", "warning"): ("wsl2-troubled", "wsl2-rtx"),
    ("clock", "warning"): ("wsl2-troubled", "wsl2-rtx"),
    ("detached runs", "note"): ("wsl2-rtx", "wsl1"),
    ("localhost", "warning"): ("wsl2-troubled", "wsl2-rtx"),
    ("WSL", "fine"): ("wsl2-rtx", "laptop-cpu"),
    ("WSL", "warning"): ("wsl1", "wsl2-rtx"),
    ("accelerator", "fine"): ("kaggle-batch", "kaggle-p100"),
    ("accelerator", "warning"): ("kaggle-p100", "kaggle-batch"),
    ("all_reduce of 8", "fine"): ("8xa100", "laptop-cpu"),
    ("attention", "note"): ("kaggle-2xt4-interactive", "8xa100"),
    ("backend", "fine"): ("laptop-cpu", "windows"),
    ("bandwidth", "fine"): ("laptop-cpu", "8xa100"),
    ("cores", "fine"): ("laptop-cpu", "docker-small-shm"),
    ("cores", "warning"): ("docker-small-shm", "laptop-cpu"),
    ("devices", "fine"): ("laptop-cpu", "windows"),
    ("disk", "fine"): ("laptop-cpu", "docker-small-shm"),
    ("disk", "warning"): ("docker-small-shm", "laptop-cpu"),
    ("environment", "fine"): ("docker-small-shm", "laptop-cpu"),
    ("front end", "fine"): ("laptop-cpu", "shared-box-busy"),
    ("front end", "stop"): ("shared-box-busy", "laptop-cpu"),
    ("inputs", "fine"): ("kaggle-2xt4-interactive", "laptop-cpu"),
    ("internet", "fine"): ("kaggle-2xt4-interactive", "kaggle-batch"),
    ("internet", "note"): ("kaggle-batch", "kaggle-2xt4-interactive"),
    ("ipykernel", "warning"): ("wsl2-rtx", "8xa100"),
    ("Colab", "note"): ("colab-t4", "kaggle-batch"),
    ("widgets", "note"): ("colab-t4", "laptop-cpu"),
    ("kernels", "stop"): ("kaggle-p100", "kaggle-2xt4-interactive"),
    ("links", "fine"): ("8xa100", "kaggle-2xt4-interactive"),
    ("links", "note"): ("kaggle-2xt4-interactive", "8xa100"),
    ("locked memory", "fine"): ("docker-small-shm", "laptop-cpu"),
    ("memory limit", "note"): ("docker-small-shm", "8xa100"),
    ("memory", "fine"): ("laptop-cpu", "shared-box-busy"),
    ("memory", "warning"): ("shared-box-busy", "laptop-cpu"),
    ("undetermined", "note"): ("shared-box-busy", "laptop-cpu"),
    ("open files", "fine"): ("laptop-cpu", "mac"),
    ("open files", "warning"): ("mac", "laptop-cpu"),
    ("pinned memory", "note"): ("wsl2-rtx", "8xa100"),
    ("platform", "fine"): ("laptop-cpu", "mac"),
    ("platform", "note"): ("mac", "laptop-cpu"),
    ("platform", "stop"): ("windows", "wsl2-rtx"),
    ("precision", "fine"): ("8xa100", "kaggle-p100"),
    ("precision", "note"): ("kaggle-p100", "8xa100"),
    ("preflight", "fine"): ("8xa100", "shared-box-busy"),
    ("preflight", "stop"): ("shared-box-busy", "8xa100"),
    ("ranks", "fine"): ("laptop-cpu", "windows"),
    ("runs folder", "fine"): ("wsl1", "laptop-cpu"),
    ("runs folder", "warning"): ("wsl2-rtx", "wsl1"),
    ("session", "fine"): ("kaggle-2xt4-interactive", "laptop-cpu"),
    ("session", "stop"): ("kaggle-p100", "kaggle-batch"),
    ("session", "warning"): ("kaggle-batch", "kaggle-2xt4-interactive"),
    ("this process", "warning"): ("shared-box-busy", "8xa100"),
    ("torch", "stop"): ("new-torch-old-driver", "laptop-cpu"),
    ("unseen GPUs", "warning"): ("new-torch-old-driver", "laptop-cpu"),
    ("versions", "fine"): ("laptop-cpu", "windows"),
    ("widgets", "fine"): ("kaggle-2xt4-interactive", "laptop-cpu"),
}


@pytest.mark.parametrize(("what", "level"), CASES)
def test_a_finding_is_there_where_it_belongs_and_only_there(what, level):
    where, elsewhere = ({(each.what, each.level) for each in diagnose(facts_of(name))} for name in CASES[what, level])

    assert (what, level) in where
    assert (what, level) not in elsewhere


def test_a_torch_for_amds_gpus_does_not_train_on_the_cpu():
    facts = facts_of("laptop-cpu")
    assert "CPU" in found(facts)["devices"].why
    rocm = dataclasses.replace(facts, packages={"torch": "2.13.0+rocm7.0"})
    assert "CPU" not in found(rocm)["devices"].why


def test_kaggles_disk_has_a_quota_of_its_own():
    full, roomy = (found(facts_of(name))["disk"] for name in ("kaggle-batch", "kaggle-2xt4-interactive"))

    assert (full.level, roomy.level) == ("warning", "fine")
    assert "/kaggle/working" in full.value


def test_every_finding_of_every_machine_has_its_two_cases():
    everywhere = {(each.what, each.level) for name in NAMES for each in diagnose(facts_of(name))}

    assert everywhere == set(CASES)


@pytest.mark.parametrize(
    "function", detections._detections, ids=lambda f: f"{f.__module__.split('.')[-1]}.{f.__name__}"
)
def test_every_detection_says_something_somewhere(function):
    assert any(detections._findings_of(function, facts_of(name)) for name in NAMES)


@pytest.mark.parametrize("path", MACHINES, ids=NAMES)
def test_a_machine_says_where_it_comes_from_and_survives_json(path):
    recorded = json.loads(path.read_text(encoding="utf-8"))
    facts = facts_from_json(recorded["facts"])

    assert re.match("made from documentation: |recorded ", recorded["source"])
    assert json.loads(json.dumps(facts.to_json())) == recorded["facts"]


def test_every_finding_says_why_and_what_to_do(machine):
    for each in machine.diagnosis:
        assert each.value
        assert each.why
        assert each.todo or each.level == "fine"


def test_what_needs_doing_comes_first(machine):
    levels = [detections.LEVELS.index(each.level) for each in machine.diagnosis]

    assert levels == sorted(levels)
    assert machine.can_train == (0 not in levels)


def test_every_machine_is_shown_whole_and_within_the_width_of_a_terminal(machine):
    text, bundle = str(machine), machine._repr_mimebundle_()

    assert bundle["text/plain"] == text
    assert max(map(len, text.splitlines())) <= COLUMNS
    for each in machine.diagnosis:
        assert f"  {each.what} " in text
        assert each.level == "fine" or f"<b>{each.what}</b>" in bundle["text/html"]
    assert "<script" not in bundle["text/html"]
    assert json.loads(machine.to_json())["facts"] == json.loads(json.dumps(machine.facts.to_json()))


def test_what_a_machine_says_is_escaped():
    facts = dataclasses.replace(facts_of("laptop-cpu"), release="<script>\x1b[31m")
    bundle = Machine(facts.hardware, facts)._repr_mimebundle_()

    assert "<script>" not in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"]


def test_a_headline_names_the_devices():
    facts = facts_of("kaggle-2xt4-interactive")

    assert str(Machine(facts.hardware, facts)).startswith("2 x Tesla T4, nccl, fp16, 2 ranks on 4 cores: 4 notes\n")


def test_findings_are_still_what_value_and_advice():
    facts = facts_of("docker-small-shm")
    machine = Machine(facts.hardware, facts)

    assert {what: advice for what, _, advice in machine.findings}["open files"].startswith("few: ")


def test_on_native_windows_there_is_nothing_else_to_say():
    assert [each.what for each in diagnose(facts_of("windows"))] == ["platform"]


# What the recorded machines do not have.


def test_a_driver_that_cannot_be_queried_is_reported():
    problem = f"torch could not list the GPUs: error in f(). Did you …. {ASKED_AGAIN} Do this"
    said = found(with_hardware("laptop-cpu", gpu_problem=problem))["devices"]

    assert (said.value, said.level, said.todo) == ("unknown", "stop", "Do this")
    assert "Did you …: a launch is refused" in said.why


@pytest.mark.parametrize("visible", ["", "7"])
def test_hidden_gpus_are_reported(visible):
    said = found(with_hardware("laptop-cpu", visible_devices=visible))["devices"]

    assert said.level == "note"
    assert f"CUDA_VISIBLE_DEVICES={visible!r} determines the visible GPUs" in said.why


def test_different_gpus_are_listed_one_by_one():
    t4, a100 = Gpu("T4", 15 << 30, (7, 5)), Gpu("A100", 40 << 30, (8, 0))
    value = found(with_hardware("8xa100", gpus=(t4, a100, t4)))["devices"].value

    assert value == "2 x T4 (14.50 GiB usable of 15.00 GiB, sm_75), A100 (39.50 GiB usable of 40.00 GiB, sm_80)"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((6, 0), ["sm_70", "sm_75"], False),
        ((6, 0), ["sm_50", "sm_60"], True),
        ((6, 1), ["sm_60"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((8, 0), ["sm_75"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f"], False),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_kernels_run_on_the_gpus_they_are_compiled_for(capability, built, runs):
    """By the CUDA C++ programming guide: binaries within a major version, PTX on all newer."""
    assert has_kernels(capability, built) is runs


@pytest.mark.parametrize(
    ("capability", "driver", "wheels"),
    [
        ((6, 0), "12.4", "'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"),  # P100
        ((6, 0), "13.0", "'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"),
        ((7, 0), None, "'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"),  # V100
        ((7, 5), "13.0", "'torch>=2.8' --index-url https://download.pytorch.org/whl/cu130"),  # T4
        ((7, 5), "12.2", "'torch<2.12' --index-url https://download.pytorch.org/whl/cu128"),
        ((10, 0), "12.8", "'torch<2.12' --index-url https://download.pytorch.org/whl/cu128"),  # B200
        ((12, 0), "13.2", "'torch>=2.8' --index-url https://download.pytorch.org/whl/cu130"),  # RTX 5090
        ((7, 5), "11.8", ""),
        ((3, 7), "13.0", ""),
    ],
)
def test_the_newest_torch_for_a_made_up_gpu_and_driver(capability, driver, wheels):
    command = install_for([Gpu("made up", 16 << 30, capability)], driver)

    assert command == (f"{sys.executable} -m pip install {wheels}" if wheels else "")


def test_the_doctor_names_the_wheel_for_a_p100_and_for_an_old_driver():
    assert "whl/cu126" in found(facts_of("kaggle-p100"))["kernels"].todo
    assert "whl/cu128" in found(facts_of("new-torch-old-driver"))["unseen GPUs"].todo


def test_colab_is_a_platform_and_its_simulated_shell_a_notebook(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab_20261101")
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    shell = type("Shell", (type("ZMQInteractiveShell", (), {}),), {})()
    monkeypatch.setattr(frontend, "_shell", lambda: shell)
    monkeypatch.setattr(frontend, "version", lambda _: "8.1.7")

    assert hardware().platform == "colab"
    assert frontend.ui() == "display"
    assert not frontend.is_headless()
    monkeypatch.setattr(frontend, "version", lambda _: "7.7.1")
    assert frontend.ui() == "svg"
    monkeypatch.setenv("LABKIT_UI", "svg")
    assert frontend.ui() == "svg"


def test_a_torch_that_does_not_tell_its_kernels_is_not_blamed():
    assert "kernels" not in found(dataclasses.replace(facts_of("kaggle-p100"), torch_build=None))


@pytest.mark.parametrize(
    ("cuda", "driver", "why"),
    [
        (None, "12.4", "built without CUDA"),
        ("13.0", "12.4", "built for CUDA 13.0, but the driver 550.54.15 supports up to 12.4"),
        ("12.8", "12.4", "torch gives no reason"),
    ],
)
def test_gpus_that_torch_does_not_see_have_a_reason(cuda, driver, why):
    facts = facts_of("new-torch-old-driver")
    nvml = dataclasses.replace(facts.nvml, cuda=driver)
    said = found(dataclasses.replace(facts, torch_build=TorchBuild(cuda, (), ()), nvml=nvml))["unseen GPUs"]

    assert why in said.why


def test_gpus_that_a_made_up_variable_excludes_are_still_named_as_nvml_names_them():
    facts = with_hardware("new-torch-old-driver", visible_devices="9", unusable_gpus="RuntimeError: No CUDA GPUs")
    said = found(dataclasses.replace(facts, torch_build=TorchBuild("12.4", (), ())))["unseen GPUs"]

    assert said.value == "Tesla T4, Tesla T4"
    assert said.why.startswith("RuntimeError: No CUDA GPUs")


def test_a_missing_torch_is_told_with_the_command_that_installs_it():
    facts = facts_of("laptop-cpu")
    said = found(dataclasses.replace(facts, packages={**facts.packages, "torch": None}))["torch"]

    assert (said.level, said.todo) == ("stop", f"{sys.executable} -m pip install 'torch>=2.8'")


def test_settings_that_nccl_needs_are_no_trouble_but_slower():
    said = "2 ranks communicate over nccl with NCCL_P2P_DISABLE=1"
    known = Preflight(said, {"NCCL_P2P_DISABLE": "1"}, "now")
    facts = dataclasses.replace(facts_of("wsl2-rtx"), preflight=known)

    assert found(facts)["preflight"].level == "note"
    assert "GPUs in WSL2" not in found(facts)


def test_a_small_memory_limit_is_a_warning():
    assert found(dataclasses.replace(facts_of("docker-small-shm"), memory_limit=2 << 30))["memory limit"].level == (
        "warning"
    )


def test_unlimited_files_are_enough():
    assert found(dataclasses.replace(facts_of("laptop-cpu"), open_files=UNLIMITED))["open files"].value == "unlimited"


def test_the_links_are_those_of_the_gpus_in_use():
    assert found(facts_of("shared-box-busy"))["links"].value == "NVLink: 2-3"
    assert found(facts_of("8xa100"))["links"].value == "NVLink: all pairs"
    assert found(facts_of("wsl2-rtx"))["links"].value == "n/a"


def test_methods_that_only_newer_gpus_have_are_named_where_they_would_work():
    a100s = facts_of("8xa100")
    h100s = with_hardware("8xa100", gpus=(Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0)),) * 8)

    assert ["fp8" in found(facts)["precision"].why for facts in (a100s, h100s)] == [False, True]
    assert all("async tensor parallelism" in found(facts)["links"].why for facts in (a100s, h100s))
    for name in ("kaggle-2xt4-interactive", "laptop-cpu", "wsl2-rtx"):
        assert not any(word in each.why for each in diagnose(facts_of(name)) for word in ("fp8", "symmetric memory"))


def test_processes_are_named_on_the_gpus_in_use_and_runs_by_their_id():
    said = found(facts_of("shared-box-busy"))["GPUs in use"]

    assert said.value == (
        "GPU 2 (8.00 GiB free of 40.00 GiB): python 4242 20.00 GiB, run 20261121T101112Z-ddp-0a1b 12.00 GiB"
    )
    assert "labkit stop 20261121T101112Z-ddp-0a1b" in said.todo


def with_processes(name, *processes):
    facts = facts_of(name)
    cards = tuple(dataclasses.replace(card, processes=processes) for card in facts.nvml.cards)
    return dataclasses.replace(facts, nvml=dataclasses.replace(facts.nvml, cards=cards))


def test_a_process_beside_much_free_memory_is_a_note():
    assert found(with_processes("8xa100", Process(7, 1 << 20)))["GPUs in use"].level == "note"
    assert "GPUs in use" not in found(with_processes("8xa100", Process(7, 1 << 20, mine=True)))


def test_a_kernel_that_a_container_hides_from_nvml_is_told_to_be_among_them():
    facts = dataclasses.replace(facts_of("docker-small-shm"), kernel=NotebookKernel(True, (0, 5 << 20), (0, 6 << 20)))
    said = found(facts)

    assert said["GPUs in use"].why.endswith("this kernel is one of them")
    assert said["this process"].value == "holds memory on cuda:1: 6.0 MiB reserved"


def test_a_kernel_with_no_more_than_a_context_is_a_note():
    said = found(dataclasses.replace(facts_of("laptop-cpu"), kernel=NotebookKernel(True)))["this process"]

    assert said.level == "note"


@pytest.mark.parametrize(
    ("free", "used", "left"),
    [(5 << 30, None, "5.00 GiB left"), (None, None, "n/a"), (50 << 30, 25 * 10**9, "0 left"), (3 << 30, 0, "3.00 GiB")],
)
def test_what_is_left_of_kaggles_disk_is_the_less_of_two(free, used, left):
    facts = facts_of("kaggle-batch")
    kaggle = dataclasses.replace(facts.kaggle, disk_free=free, disk_used=used)

    assert found(dataclasses.replace(facts, kaggle=kaggle))["disk"].value.startswith(left)


def test_a_session_of_unknown_age_is_shown_as_not_available():
    facts = facts_of("kaggle-batch")
    kaggle = dataclasses.replace(facts.kaggle, session_seconds=None)

    assert found(dataclasses.replace(facts, kaggle=kaggle))["session"].value == "n/a"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (7200.0, "started now, save and stop after 9 h 30 min;"),
        (43200.0 - 1800, "started now, save and stop after 15 min 0 s"),
        (43200.0, "it has ended, so runs get no deadline"),
    ],
)
def test_the_doctor_says_when_a_run_would_stop_as_the_launch_reckons(seconds, says):
    facts = facts_of("kaggle-batch")
    kaggle = dataclasses.replace(facts.kaggle, session_seconds=seconds)

    assert says in found(dataclasses.replace(facts, kaggle=kaggle))["session"].todo


def test_kaggle_without_an_accelerator_is_a_note_and_a_tpu_a_warning():
    facts = with_hardware("kaggle-batch", gpus=())

    assert found(facts)["accelerator"].level == "note"
    assert "TPUs" in found(facts_of("kaggle-tpu"))["accelerator"].why
    assert found(facts_of("kaggle-tpu"))["session"].value == "8 h 0 min left"


# Asking.


def test_this_machine_is_asked_in_moments_and_nothing_fails(monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    facts = gather()

    assert facts.problems == {}
    assert facts.python
    assert facts_from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_what_a_launch_would_refuse_here_is_a_stop(monkeypatch, tmp_path, on_made_up_kaggle):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "file"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", "9h")

    told = found(gather())
    for what in ("runs folder", "GLOO_SOCKET_IFNAME", "session"):
        assert told[what].level == "stop"

    for what, variable in (("GLOO_SOCKET_IFNAME",) * 2, ("runs folder", "LABKIT_RUNS")):
        with pytest.raises(LabError) as refused:
            labkit.launch("single", steps=1)
        assert str(refused.value) == told[what].value
        monkeypatch.delenv(variable)


def test_a_folder_that_cannot_be_written_to_is_found_without_a_trace(monkeypatch, tmp_path):
    RunFolder.check_root(tmp_path / "not" / "yet" / "there")
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(LabError, match="runs cannot be stored in .*there: Permission denied"):
        RunFolder.check_root(tmp_path / "not" / "yet" / "there")


def test_a_preflight_that_the_shell_prevents_is_not_kept_as_the_machines(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    here = hardware()
    before = remembered_preflight(here, 2, "gloo")

    assert "no interface eth99" in str(try_link(here, 2, "gloo"))
    assert remembered_preflight(here, 2, "gloo") == before


def test_a_session_is_as_long_as_its_variable_says(monkeypatch, on_made_up_kaggle):
    monkeypatch.setenv("LABKIT_SESSION_SECONDS", "32400")

    assert "9 h 0 min per session" in found(gather())["session"].why


def test_a_failed_probe_is_none_and_reported(monkeypatch):
    def broken(here):
        raise RuntimeError("boom")

    for name in ("nvml", "release", "packages", "preflight", "kernel"):
        monkeypatch.setattr(probes, name, broken)
    facts = gather()

    assert facts.nvml is None
    assert facts.problems["nvml"] == "RuntimeError: boom"
    assert "nvml: RuntimeError: boom" in found(facts)["undetermined"].why
    assert str(Machine(facts.hardware, facts))


def test_no_single_fact_is_needed_to_say_something():
    for name in NAMES:
        facts = facts_of(name)
        for each in dataclasses.fields(MachineFacts):
            if each.name not in ("hardware", "problems"):
                said = diagnose(dataclasses.replace(facts, **{each.name: None}))
                assert not [f for f in said if "the detection failed" in f.why], (name, each.name)


def test_a_detection_that_fails_does_not_silence_the_others(monkeypatch):
    def broken_one(facts):
        raise ZeroDivisionError

    monkeypatch.setattr(detections, "_detections", [broken_one, *detections._detections])
    said = found(facts_of("laptop-cpu"))

    assert said["broken one"].value == "n/a"
    assert "cores" in said


def test_a_detection_is_one_function(monkeypatch):
    monkeypatch.setattr(detections, "_detections", [])

    @detections.detection
    def many_cores(facts):
        return Diagnosis("many cores", str(facts.hardware.cores), "why", level="note")

    assert [each.what for each in diagnose(facts_of("8xa100"))] == ["many cores"]


def test_asking_does_not_open_cuda_in_this_process(monkeypatch):
    class Cuda:
        def is_initialized(self):
            return False

        def __getattr__(self, name):
            raise AssertionError(f"torch.cuda.{name} was asked")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=Cuda()))

    assert probes.kernel(hardware()) == NotebookKernel(False)


def test_a_torch_that_has_opened_cuda_says_what_it_holds(monkeypatch):
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda device: device * 100,
        memory_reserved=lambda device: device * 200,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))

    assert probes.kernel(hardware()) == NotebookKernel(True, (0, 100), (0, 200))


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, UNLIMITED),
        ("0::/\n", {"memory.max": "1048576"}, 1 << 20),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "2097152"}, 2 << 20),
        ("0::/host/only\n", {"memory.max": "1048576"}, 1 << 20),
        ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "4194304"}, 4 << 20),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, UNLIMITED),
        ("1:cpu:/\n", {}, UNLIMITED),
    ],
)
def test_the_memory_of_a_control_group_is_the_least_of_all_above_it(tmp_path, monkeypatch, own, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(container, "GROUPS", tmp_path)
    monkeypatch.setattr(container, "OWN_GROUPS", tmp_path / "own")

    assert probes.memory_limit(hardware()) == expected
    assert worker_memory.host_memory() == (psutil.virtual_memory().total if expected == UNLIMITED else expected)


@pytest.mark.parametrize(
    ("own", "folder", "most", "now", "cached"),
    [
        ("0::/a\n", "a", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:/x\n", "memory/x", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_planner_reckons_with_what_a_container_has_left(tmp_path, monkeypatch, own, folder, most, now, cached):
    group = tmp_path / folder
    group.mkdir(parents=True)
    (group / most).write_text("80000000\n")
    (group / now).write_text("50000000\n")
    (group / "memory.stat").write_text(f"anon 1\n{cached} 20000000\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(container, "GROUPS", tmp_path)
    monkeypatch.setattr(container, "OWN_GROUPS", tmp_path / "own")

    here = hardware("")

    assert here.memory_available == this_machine(here).usable == 50_000_000
    (group / now).write_text("200000000\n")  # a moment's excess
    assert hardware("").memory_available == 0


def test_the_file_system_of_the_runs_is_that_of_the_longest_mount(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sdc / ext4 rw 0 0\nC: /mnt/c 9p rw 0 0\nD: /mnt/c/a\\040b drvfs rw 0 0\n")
    monkeypatch.setattr(probes, "MOUNTS", mounts)

    for root, kind in (("/home/me", "ext4"), ("/mnt/c/me", "9p"), ("/mnt/c/a b/runs", "drvfs"), ("/mnt/cc", "ext4")):
        monkeypatch.setenv("LABKIT_RUNS", root)
        assert probes.runs_filesystem(hardware()) == kind


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[wsl2]\nmemory=12GB\n", ""),
        (b"[wsl2]\r\nmemory=12GB\r\n", "lines end in CR LF"),
        ("[wsl2]\n".encode("utf-16"), "UTF-16"),
        (None, None),
    ],
)
def test_a_wslconfig_that_windows_would_ignore_is_known(tmp_path, monkeypatch, text, problem):
    """From documentation: microsoft/WSL #6322, #7851, #13142."""
    (tmp_path / "me").mkdir()
    if text is not None:
        (tmp_path / "me" / ".wslconfig").write_bytes(text)
    monkeypatch.setattr(probes, "WINDOWS_USERS", tmp_path)

    assert probes.wslconfig(facts_of("wsl2-rtx").hardware) == problem
    assert probes.wslconfig(facts_of("laptop-cpu").hardware) is None


WSLINFO = "#!/bin/sh\necho {mode}; exit {code}\n"


@pytest.mark.parametrize(("code", "mode"), [(0, "mirrored"), (1, None)])
def test_what_made_up_files_of_wsl_say(tmp_path, monkeypatch, code, mode):
    """Files and a program as NVIDIA's guide, learn.microsoft.com and issues of microsoft/WSL describe them."""
    device, driver, clock = tmp_path / "dxg", tmp_path / "libcuda.so.1", tmp_path / "since_epoch"
    for name, path in (("WSL_DEVICE", device), ("WSL_DRIVER", driver), ("CLOCK", clock)):
        monkeypatch.setattr(probes, name, path)
    monkeypatch.setattr(probes, "PACKAGES_INSTALLED", tmp_path)
    monkeypatch.setattr(probes, "WINDOWS_USERS", tmp_path / "users")
    monkeypatch.setenv("PATH", str(tmp_path))
    hardware = facts_of("wsl2-rtx").hardware
    assert probes.wsl(facts_of("laptop-cpu").hardware) is None
    assert probes.wsl(hardware) == Wsl(gpu_device=False, windows_driver=False)

    for path in (device, driver, tmp_path / "libnvidia-compute-550:amd64.list", tmp_path / "libnvidia-ml-dev.list"):
        path.touch()
    clock.write_text(f"{int(time.time()) + 3600}\n")
    program = tmp_path / "wslinfo"
    program.write_text(WSLINFO.format(mode="mirrored", code=code))
    program.chmod(0o700)
    (tmp_path / "users" / "me").mkdir(parents=True)
    (tmp_path / "users" / "me" / ".wslconfig").write_bytes(b"[wsl2]\r\nLocalhostForwarding = False\r\n")

    found = probes.wsl(hardware)
    assert found.clock_error == pytest.approx(3600, abs=2)
    expected = Wsl(True, True, ("libnvidia-compute-550",), mode, False, found.clock_error)
    assert found == expected


def test_wsl_says_of_a_gpu_what_is_missing_and_of_a_network_what_it_means():
    """From documentation: no such machine was at hand."""
    without_driver = dataclasses.replace(facts_of("wsl2-troubled"), wsl=Wsl(gpu_device=True, windows_driver=False))
    assert found(without_driver)["WSL GPU"].value == "no driver of NVIDIA's for Windows"
    mirrored = Wsl(True, True, networking="mirrored", localhost_forwarding=False)
    said = found(dataclasses.replace(facts_of("wsl2-troubled"), wsl=mirrored))
    assert said["WSL network"].value == "mirrored"
    assert "localhost" not in said and "WSL GPU" not in said and "clock" not in said
    late = dataclasses.replace(facts_of("wsl2-troubled"), wsl=Wsl(True, True, clock_error=3725.0))
    assert found(late)["clock"].value == "3,725 s behind the computer's"


def test_a_driver_that_crashes_who_asks_it_does_not_crash_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware_module, "DRIVER_FILES", (tmp_path,))
    (tmp_path / "pynvml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(labkit.__file__).parents[1]}")

    assert gather().problems["nvml"] == "OSError: NVML failed: exit code -11"


class NoNvml(Exception):
    """In the place of pynvml.NVMLError."""


def made_up_nvml(*, silent=()):
    """NVML's functions with the answers of two made-up GPUs; those in `silent` raise."""

    def answer(name, value):
        def function(*_):
            if name in silent:
                raise NoNvml
            return value

        return function

    answers = {
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetName": b"Tesla T4",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=16, free=15),
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=0),
        "nvmlDeviceGetPowerUsage": 27000,
        "nvmlDeviceGetTemperature": 40,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44,  # a power cap, and heat
        "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)],
        "nvmlDeviceGetP2PStatus": 0,
        "nvmlDeviceGetTopologyCommonAncestor": 30,
        "nvmlSystemGetCudaDriverVersion": 12040,
        "nvmlSystemGetDriverVersion": "550.54.15",
    }
    constants = {"NVML_TEMPERATURE_GPU": 0}
    functions = {name: answer(name, value) for name, value in answers.items()}
    return types.SimpleNamespace(
        **functions, **constants, NVML_P2P_STATUS_OK=0, NVMLError=NoNvml, nvmlDeviceGetHandleByIndex=lambda index: index
    )


def test_nvml_is_asked_about_each_gpu_and_each_pair():
    """Made from NVML's reference: no driver was here."""
    said = nvml_from_json(json.loads(json.dumps(report(made_up_nvml()))))

    assert (said.driver, said.cuda) == ("550.54.15", "12.4")
    assert [card.index for card in said.cards] == [0, 1]
    assert (said.cards[0].name, said.cards[0].free, said.cards[0].power) == ("Tesla T4", 15, 27.0)
    assert said.cards[0].processes == (Process(2**22 + 1, None),)
    assert [(link.path, link.peer, link.nvlink) for link in said.links] == [("PHB", True, True)]
    assert [card["throttled"] for card in report(made_up_nvml())["cards"]] == [True, True]


def test_nvidias_own_module_passes_what_it_is_asked_to_a_simulated_driver(monkeypatch):
    """Whatever it calls is libc's sched_yield, which returns 0, as NVML does on success: all answers are 0."""
    import pynvml

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda name: ctypes.CDLL(None).sched_yield)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    said = nvml_from_json(report(pynvml))

    assert [(link.path, link.peer, link.nvlink) for link in said.links] == [("same board", True, True)]
    assert [card.temperature for card in said.cards] == [0, 0]


def test_what_nvml_does_not_tell_is_none():
    nvml = made_up_nvml()
    silent = [name for name in vars(nvml) if name.startswith("nvml") and not name.endswith(("Count", "Index"))]
    said = nvml_from_json(report(made_up_nvml(silent=silent)))

    assert (said.driver, said.cuda) == (None, None)
    assert {value for card in said.cards for name, value in vars(card).items() if name != "index"} == {None}
    assert (said.links[0].path, said.links[0].peer) == (None, None)


@pytest.fixture
def on_made_up_kaggle(tmp_path, monkeypatch):
    """The two folders of a session, and a network that answers when the list it returns is empty."""
    working, given = tmp_path / "working", tmp_path / "input"
    (given / "mnist-in-idx" / "raw").mkdir(parents=True)
    working.mkdir()
    (working / "model.pt").write_bytes(b"x" * 1000)
    for file in data.MNIST:
        (given / "mnist-in-idx" / "raw" / file.removesuffix(".gz")).touch()
    monkeypatch.setenv("LABKIT_KAGGLE_ROOT", str(tmp_path))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    asked = []

    def connect(address, timeout):
        asked.append((address, timeout))
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    return asked


def test_a_made_up_kaggle_session_is_asked_about_itself(on_made_up_kaggle):
    """From documentation: nothing was run on Kaggle."""
    said = gather().kaggle

    assert (said.run_type, said.disk_used, said.inputs, said.data_sets) == (
        "Batch",
        1000,
        ("mnist-in-idx",),
        ("mnist",),
    )
    assert said.internet is False
    assert on_made_up_kaggle == [(probes.OUTSIDE, 0.5)]  # once, and no name is looked up
    assert said.session_seconds > 0


@pytest.mark.parametrize(
    ("says", "tpu", "length"),
    [(None, False, 43200), (None, True, 32400), ("7200", True, 7200), ("9h", False, None), ("inf", False, None)],
)
def test_the_doctor_and_the_launch_know_one_length_of_a_session(
    on_made_up_kaggle, tmp_path, monkeypatch, says, tpu, length
):
    monkeypatch.delenv("LABKIT_SESSION_SECONDS", raising=False)
    monkeypatch.setattr(session, "TPU_FILES", (tmp_path / ("working" if tpu else "no such file"),))
    if says is not None:
        monkeypatch.setenv("LABKIT_SESSION_SECONDS", says)

    facts = gather()
    told = {each.what: each for each in diagnose(facts)}["session"]

    assert facts.kaggle.session_length == length
    if length is None:
        assert (told.value, told.level) == ("n/a", "stop")
        with pytest.raises(LabError, match="must be a number of seconds"):
            session.seconds_left()
    else:
        assert session.seconds_left() == pytest.approx(length - facts.kaggle.session_seconds, abs=5)
        assert f"estimated: {length // 3600} h 0 min per session" in told.why


def test_a_folder_of_too_many_files_is_given_up(on_made_up_kaggle, monkeypatch):
    monkeypatch.setattr(probes, "LOOK_SECONDS", -1)
    said = gather().kaggle

    assert (said.disk_used, said.data_sets) == (None, ())
    assert said.disk_free


# A torch that is simulated, and really asked, in a process of its own.

ONE_T4 = """
class cuda:
    device_count = staticmethod(lambda: 1)
    get_arch_list = staticmethod(lambda: ["sm_75"])
    class get_device_properties:
        name, total_memory, major, minor, uuid = "Tesla T4", 2**34, 7, 5, "ab"
        __init__ = lambda self, index: None
class version:
    cuda = "12.8"
"""
T4_ALONE = (Gpu("Tesla T4", 2**34, (7, 5)),)
NO_DEVICE = """
class cuda:
    device_count = staticmethod(lambda: 0)
    get_arch_list = staticmethod(lambda: [])
    def init():
        raise RuntimeError("No CUDA GPUs are available")
class version:
    cuda = {cuda}
__version__ = "2.13.0+cpu"
"""


@pytest.fixture
def simulated_torch(tmp_path, monkeypatch):
    """`simulated_torch(text)`: the torch that an interpreter finds, where a driver is installed."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # one version of the file must not be taken for another
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware_module, "DRIVER_FILES", (tmp_path,))
    monkeypatch.setattr(hardware_module, "DEVICES", tmp_path / "dev")
    hardware_module._listing.cache_clear()
    yield (tmp_path / "torch.py").write_text
    hardware_module._listing.cache_clear()


def test_what_a_simulated_torch_says_of_gpus_is_asked_elsewhere(simulated_torch):
    simulated_torch("print('a word of a library')" + ONE_T4)

    assert hardware("0").gpus == T4_ALONE
    assert probes.torch_build(hardware("0")) == TorchBuild("12.8", ("sm_75",), ("ab",))


def test_a_simulated_torch_that_fails_leaves_the_gpus_unknown_and_is_asked_again(simulated_torch, tmp_path):
    simulated_torch("raise RuntimeError('CUDA unknown error')")

    with pytest.raises(
        labkit.LaunchError, match=r"could not list the GPUs: RuntimeError: CUDA unknown error\. The next"
    ):
        hardware()
    with pytest.raises(labkit.LaunchError, match=r"could not list the GPUs.*env=\{'CUDA_VISIBLE_DEVICES': ''\}"):
        labkit.launch("ddp", nproc_per_node=2, runs_dir=tmp_path / "runs")
    assert not list((tmp_path / "runs").glob("*"))
    machine = Machine(here := hardware(may_be_unknown=True))
    said = {finding.what: finding for finding in machine.diagnosis}
    assert (said["devices"].value, said["devices"].level, machine.can_train) == ("unknown", "stop", False)
    assert "CUDA unknown error" in said["devices"].why
    assert said.keys().isdisjoint({"backend", "precision", "ranks"})
    assert machine.facts.problems.keys() <= {"nvml"}  # which is not here
    assert "unknown GPUs" in str(machine)
    for derived in ("backend", "precision", "default_ranks"):
        with pytest.raises(labkit.LaunchError, match="CUDA unknown error"):
            getattr(here, derived)

    simulated_torch(ONE_T4)
    assert hardware().gpus == T4_ALONE
    simulated_torch("raise RuntimeError('asked again')")
    assert hardware().gpus == T4_ALONE


def test_a_slow_import_of_a_simulated_torch_is_announced_and_limited(simulated_torch, monkeypatch, capsys):
    monkeypatch.setattr(hardware_module, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(hardware_module, "LISTING_SECONDS", 0.5)
    simulated_torch("import time; time.sleep(60)")

    with pytest.raises(labkit.LaunchError, match="importing it and asking took more than 0.5 s"):
        hardware()

    assert capsys.readouterr().err == "importing torch to list the GPUs; from a cold disk this may take minutes\n"


@pytest.mark.parametrize("visible", ["", " ", "-1", "-1,0", "NoDevFiles", "void"])
def test_simulated_gpus_that_are_all_hidden_need_no_torch(simulated_torch, visible):
    simulated_torch("raise RuntimeError('asked')")

    assert hardware(visible).gpus == ()
    assert hardware(visible).backend == "gloo"


def test_a_sandbox_without_the_drivers_proc_file_has_a_driver(simulated_torch, tmp_path, monkeypatch):
    """gVisor shows /dev/nvidiactl only."""
    simulated_torch(ONE_T4)
    assert Path("/dev/nvidiactl") in DRIVER_FILES
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(hardware_module, "DRIVER_FILES", (tmp_path / "version", tmp_path / "nvidiactl"))

    assert hardware().gpus == T4_ALONE
    assert driver_version() == ""


@pytest.mark.parametrize(
    ("cuda", "device", "reason"),
    [
        ("None", "a file", "torch 2.13.0+cpu is built without CUDA"),
        ("'12.8'", "a file", "RuntimeError: No CUDA GPUs are available"),
        ("'12.8'", "not accessible", "this user may not read and write "),
        ("'12.8'", None, ""),  # a container without GPUs on a host that has some
        ("'12.8'", "WSL2's driver", "RuntimeError: No CUDA GPUs are available"),
    ],
)
def test_gpus_that_a_simulated_torch_cannot_use_are_named_at_a_launch(
    simulated_torch, tmp_path, capsys, monkeypatch, cuda, device, reason
):
    simulated_torch(NO_DEVICE.format(cuda=cuda))
    monkeypatch.setattr(hardware_module, "WSL_DRIVER", tmp_path / "libcuda.so.1")
    (tmp_path / "dev").mkdir()
    if device == "a file":
        (tmp_path / "dev" / "nvidia0").touch()
    elif device == "WSL2's driver":  # which makes no files of devices
        (tmp_path / "libcuda.so.1").touch()
    elif device:  # root may read everything that exists
        (tmp_path / "dev" / "nvidia0").symlink_to(tmp_path / "nowhere")

    assert hardware().gpus == ()
    assert hardware().unusable_gpus.startswith(reason)
    assert bool(hardware().unusable_gpus) is bool(reason)
    assert hardware("").unusable_gpus == ""
    unseen = {finding.what: finding for finding in Machine(hardware()).diagnosis}.get("unseen GPUs")
    assert unseen is None if not reason else unseen.level == "warning"
    nowhere = {"PYTHONHOME": str(tmp_path / "nowhere")}  # no interpreter starts there
    labkit.launch("ddp", nproc_per_node=2, env=nowhere, wait=False, runs_dir=tmp_path / "runs").stop(grace=0)
    assert ("but the ranks train on the CPU" in capsys.readouterr().out) is bool(reason)


# In a terminal, and on native Windows.


@pytest.mark.parametrize(("name", "code"), [("laptop-cpu", 0), ("wsl2-rtx", 0), ("kaggle-p100", 1), ("windows", 1)])
def test_the_doctors_exit_code_says_whether_something_stops_a_launch(name, code, monkeypatch, capsys):
    facts = facts_of(name)
    monkeypatch.setattr(cli.labkit, "doctor", lambda **_: Machine(facts.hardware, facts), raising=False)

    assert cli.main(["doctor", "--json"]) == code
    assert facts_from_json(json.loads(capsys.readouterr().out)["facts"]) == facts
    assert cli.main(["doctor"]) == code
    assert str(Machine(facts.hardware, facts)) in capsys.readouterr().out


def test_this_machine_is_shown_by_the_command(capsys):
    assert cli.main(["doctor"]) == 0
    assert "\n  cores " in capsys.readouterr().out


WINDOWS = """
import os, platform, signal, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}")

import psutil, subprocess, tempfile, socket, shutil, random, asyncio, logging, uuid
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in ("getuid", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
for name in ("SIGKILL", "SIGUSR1", "SIGHUP"):
    delattr(signal, name)
platform.system = lambda: "Windows"
import labkit
"""


def test_simulated_native_windows_is_told_to_use_wsl2_in_one_sentence():
    """A Python without what only POSIX has; nothing was run on Windows."""
    code = f"{WINDOWS}print(labkit.doctor(preflight=True))\nlabkit.launch('ddp', nproc_per_node=2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "use WSL2: https://aka.ms/wsl" in done.stdout
    assert done.stderr.splitlines()[-1].endswith(
        "LaunchError: torch.distributed has no NCCL on native Windows. Use WSL2: https://aka.ms/wsl"
    )
    assert issubclass(LaunchError, LabError)


def test_simulated_native_windows_says_so_in_the_terminal_too():
    for verb, code in (("doctor", 1), ("launch", 2)):
        run = f"{WINDOWS}import labkit.cli\nsys.exit(labkit.cli.main({[verb, *(['ddp'] if verb == 'launch' else [])]}))"
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)

        assert done.returncode == code
        assert re.search("use WSL2: https://aka.ms/wsl", done.stdout + done.stderr, re.IGNORECASE)
        assert "Traceback" not in done.stderr
