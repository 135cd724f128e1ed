import argparse
import importlib.metadata
import os
import re
import sys
from dataclasses import replace

import pytest

import labkit
from labkit.errors import LabError, LaunchError, ScriptError
from labkit.hardware import machine as hardware_module
from labkit.hardware.machine import Gpu, Hardware
from labkit.launch_options import LaunchOptions
from labkit.launcher import Module, checks, prepare_launch
from labkit.launcher.checks import (
    check_arguments,
    check_batch,
    check_imports,
    check_precision,
    check_ranks,
    check_torch,
    imports_in_doubt,
)
from labkit.write import Script

BATCH = Script.parse(
    'parser.add_argument("--global-batch-size", type=int, default=64)\n'
    'parser.add_argument("--accumulate", type=int, default=1)\n'
)


def made_up(gpus, *, cores=8, visible=None, capability=(7, 5)):
    """A machine that does not exist: no test here needs or sees a real GPU."""
    cards = tuple(Gpu("made-up GPU", 16 << 30, capability) for _ in range(gpus))
    return Hardware("linux", cards, cores, 64 << 30, 32 << 30, 1 << 30, visible)


@pytest.fixture
def torch_version(monkeypatch):
    """`torch_version("2.7.1")` pretends that one is installed, `torch_version(None)` that none is."""
    real = importlib.metadata.distribution

    def pretend(version):
        def distribution(name):
            if name != "torch":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return type("Distribution", (), {"version": version})()

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)

    return pretend


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0a0+git123", "2.13.0+cpu", "3.0", "10.1.2"])
def test_a_torch_that_is_new_enough_passes(torch_version, version):
    torch_version(version)

    check_torch("linux")


@pytest.mark.parametrize("version", ["2.7.1", "2.7.1+cu118", "1.13.1", "0.4"])
def test_a_torch_that_is_too_old_is_refused_with_both_versions(torch_version, version):
    torch_version(version)

    with pytest.raises(LaunchError, match=rf"torch {re.escape(version)} is too old; labkit needs 2\.8 or newer"):
        check_torch("linux")


def test_a_missing_torch_is_refused_with_the_command_that_installs_it(torch_version):
    torch_version(None)

    with pytest.raises(LaunchError) as caught:
        check_torch("linux")

    assert f"{sys.executable} -m pip install 'torch>=2.8'" in str(caught.value)


def test_native_windows_is_refused_with_the_way_out():
    with pytest.raises(LaunchError, match="Use WSL2"):
        check_torch("windows")


@pytest.mark.parametrize(("gpus", "cores", "ranks"), [(0, 8, 2), (0, 1, 1), (1, 8, 1), (2, 8, 2), (8, 4, 8)])
def test_auto_is_one_rank_per_made_up_gpu_or_two_on_the_cpu(gpus, cores, ranks):
    assert check_ranks("auto", None, made_up(gpus, cores=cores)) == ranks


@pytest.mark.parametrize(
    ("ranks", "backend", "gpus"),
    [
        (1, None, 0),
        (16, None, 0),
        (4, "gloo", 0),
        (1, None, 2),
        (2, None, 2),
        (2, "nccl", 2),
        (3, "gloo", 2),
        (2, "gloo", 1),
    ],
)
def test_ranks_that_fit_the_made_up_gpus_pass(ranks, backend, gpus):
    assert check_ranks(ranks, backend, made_up(gpus)) == ranks


@pytest.mark.parametrize("value", ["2", 2.0, None, True, [2], "AUTO"])
def test_an_invalid_number_of_ranks_raises(value):
    with pytest.raises(LaunchError, match="must be an integer or 'auto', got"):
        check_ranks(value, None, made_up(0))


@pytest.mark.parametrize("value", [0, -1])
def test_fewer_than_one_rank_is_refused(value):
    with pytest.raises(LaunchError, match=f"at least 1, got {value}"):
        check_ranks(value, None, made_up(0))


@pytest.mark.parametrize("backend", ["mpi", "NCCL", "", 3])
def test_an_unknown_backend_is_refused(backend):
    with pytest.raises(LaunchError, match="backend must be 'nccl' or 'gloo', got"):
        check_ranks(2, backend, made_up(2))


@pytest.mark.parametrize("ranks", [3, 100])
def test_more_ranks_than_made_up_gpus_are_refused_with_both_ways_out(ranks):
    with pytest.raises(LaunchError, match=f"{ranks} ranks need {ranks} GPUs, but this machine has 2") as caught:
        check_ranks(ranks, None, made_up(2))

    assert "nproc_per_node=2" in str(caught.value)
    assert "backend='gloo'" in str(caught.value)


def test_more_ranks_than_made_up_gpus_are_refused_on_nccl_too():
    with pytest.raises(LaunchError, match="3 ranks need 3 GPUs"):
        check_ranks(3, "nccl", made_up(2))


def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(LaunchError, match=r"none is visible here\. Leave backend out"):
        check_ranks(2, "nccl", made_up(0))


def test_nccl_with_hidden_gpus_is_refused_with_what_hides_them():
    with pytest.raises(LaunchError, match=r"none is visible here \(CUDA_VISIBLE_DEVICES=''\)"):
        check_ranks(2, "nccl", made_up(0, visible=""))


def test_gloo_with_a_made_up_gpu_for_every_rank_is_refused():
    with pytest.raises(LaunchError, match=r"backend='gloo' is for more ranks than GPUs.*CUDA_VISIBLE_DEVICES"):
        check_ranks(2, "gloo", made_up(2))


def test_a_gpu_for_which_torch_has_no_kernels_is_refused_before_anything_starts(torch_version, monkeypatch, tmp_path):
    """A P100 and today's wheels; the second of two only when a rank would use it."""
    torch_version("2.10.0")
    p100, t4 = Gpu("Tesla P100-PCIE-16GB", 16 << 30, (6, 0)), Gpu("Tesla T4", 16 << 30, (7, 5))
    said = {"kernels": ["sm_75", "sm_80", "compute_120"]}
    monkeypatch.setattr(checks, "torch_report", lambda visible: said)
    monkeypatch.setattr(
        hardware_module,
        "torch_report",
        lambda visible: said | {"gpus": [[gpu.name, gpu.memory, list(gpu.capability)] for gpu in (t4, p100)]},
    )
    refusal = (
        r"torch 2.10.0 has no kernels for Tesla P100-PCIE-16GB \(sm_60\), only for sm_75, sm_80, compute_120: .* "
        r"Use another GPU \(on Kaggle: GPU T4 x2\), pass env=\{'CUDA_VISIBLE_DEVICES': ''\}"
    )

    with pytest.raises(LaunchError, match=refusal):
        labkit.launch("ddp", runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    assert check_ranks(1, None, Hardware(**{**vars(made_up(0)), "gpus": (t4, p100)})) == 1
    for unknown in ({"kernels": []}, {"kernels": ["gfx942"]}, None):
        monkeypatch.setattr(checks, "torch_report", lambda visible, unknown=unknown: unknown)
        assert check_ranks(1, None, Hardware(**{**vars(made_up(0)), "gpus": (p100,)})) == 1


@pytest.mark.parametrize(("backend", "gpus"), [("mpi", 0), ("nccl", 0), ("gloo", 2)])
def test_auto_ranks_do_not_excuse_a_wrong_backend(backend, gpus):
    with pytest.raises(LaunchError):
        check_ranks("auto", backend, made_up(gpus))


@pytest.mark.parametrize(
    ("gpus", "capability", "precision"),
    [(0, (0, 0), "fp32"), (2, (7, 5), "fp16"), (1, (8, 0), "bf16"), (1, (9, 0), "bf16")],
)
def test_the_precision_follows_the_made_up_gpus(gpus, capability, precision):
    assert made_up(gpus, capability=capability).precision == precision


def test_one_older_gpu_among_made_up_ones_decides_the_precision():
    machine = made_up(0)
    mixed = Hardware(**{**vars(machine), "gpus": (Gpu("new", 1, (9, 0)), Gpu("old", 1, (7, 5)))})

    assert (mixed.precision, mixed.backend) == ("fp16", "nccl")


@pytest.mark.parametrize(
    ("parameters", "ranks"),
    [
        ({}, 2),
        ({"global_batch_size": 6}, 3),
        ({"accumulate": 4}, 4),
        ({"global_batch_size": 8, "accumulate": 2}, 4),
        ({"global_batch_size": "64"}, 2),
    ],
)
def test_a_batch_that_splits_passes(parameters, ranks):
    check_batch(BATCH, parameters, ranks)


@pytest.mark.parametrize(
    ("parameters", "ranks", "message"),
    [
        ({}, 3, "global_batch_size=64 cannot be split evenly into 3 data ranks x 1 micro-batches; .* 63 or 66"),
        (
            {"global_batch_size": 10, "accumulate": 3},
            2,
            "=10 cannot be split evenly into 2 data ranks x 3 micro-batches; .* 6 or 12",
        ),
        ({"global_batch_size": 1}, 2, "=1 cannot be split evenly into 2 data ranks x 1 micro-batches; .* is 2"),
    ],
)
def test_a_batch_that_does_not_split_is_refused_with_the_nearest_that_do(parameters, ranks, message):
    with pytest.raises(LaunchError, match=message):
        check_batch(BATCH, parameters, ranks)


@pytest.mark.parametrize("parameters", [{"accumulate": 0}, {"global_batch_size": 0}, {"global_batch_size": -64}])
def test_an_empty_batch_raises(parameters):
    with pytest.raises(LaunchError, match="must be at least 1"):
        check_batch(BATCH, parameters, 2)


def test_ranks_that_split_one_replica_share_its_batch():
    mesh = 'init_device_mesh(kind, (1, ranks), mesh_dim_names=("data", "pipeline"))\n'
    split = Script.parse(str(BATCH) + mesh)

    check_batch(split, {"global_batch_size": 8, "accumulate": 8}, 4)
    with pytest.raises(LaunchError, match="=9 cannot be split evenly into 8 micro-batches; .* 8 or 16"):
        check_batch(split, {"global_batch_size": 9, "accumulate": 8}, 4)


def test_a_script_without_those_parameters_has_no_batch_to_check():
    check_batch(Script.parse('parser.add_argument("--global-batch-size", type=int, default=7)\n'), {}, 2)


@pytest.mark.parametrize("value", ["many", None, [64]])
def test_a_batch_size_that_is_no_number_raises_no_bare_error(value):
    try:
        check_batch(BATCH, {"global_batch_size": value}, 2)
    except LabError:
        return


def test_a_default_that_cannot_be_read_is_not_checked():
    check_batch(Script.parse(str(BATCH).replace("64", "DEFAULT_BATCH")), {}, 2)


@pytest.mark.parametrize(
    "text",
    [
        "import os, sys\nfrom pathlib import Path\n",
        "import torch.nn.functional as F\n",
        "import beside\nfrom package_beside.sub import x\n",
        "try:\n    import nowhere_to_be_found\nexcept ImportError:\n    pass\n",
        "if False:\n    import nowhere_to_be_found\n",
        "def f():\n    import nowhere_to_be_found\n",
        "from . import sibling\n",
    ],
)
def test_imports_that_can_be_found_or_may_fail_pass(tmp_path, text):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "package_beside").mkdir()
    (tmp_path / "package_beside" / "__init__.py").write_text("")

    check_imports(Script.parse(text), [str(tmp_path)])


def test_imports_that_cannot_be_found_are_refused_with_the_interpreter_that_lacks_them(tmp_path):
    script = Script.parse("# %% a\nimport not_there_b.sub, os\n# %% b\nfrom not_there_a import x\n", name="train")

    with pytest.raises(LaunchError) as caught:
        check_imports(script, [str(tmp_path)])

    assert "train.py imports not_there_a, not_there_b, which" in str(caught.value)
    assert f"{sys.executable} -m pip install" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "import os, torch\nfrom pathlib import Path\n",
        "import beside\nimport nowhere\n",  # beside may change sys.path
        "import sys\nsys.path.append('lib')\nimport nowhere\n",
        "import sys\nsys.path += ['lib']\nimport nowhere\n",
        "import os\nos.chdir('lib')\nimport nowhere\n",
        "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None\n",
        "try:\n    import torch\nexcept ImportError:\n    pass\nimport nowhere\n",
        "if True:\n    import nowhere\n",
        "def f():\n    import nowhere\n",
        "from . import nowhere\nfrom .nowhere import x\n",
        "import space.inner\n",  # a package without an __init__.py
        "with open('x'):\n    import nowhere\n",
        "import from_python_path\n",
        "from __future__ import annotations\n",
    ],
)
def test_an_import_of_a_users_own_script_that_may_work_raises_no_doubt(tmp_path, text):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "space" / "inner").mkdir(parents=True)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "from_python_path.py").write_text("")
    path = os.pathsep.join([str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")])

    assert imports_in_doubt(Script.parse(text), str(tmp_path), path) == []


def test_a_package_that_was_installed_after_this_process_started_raises_no_doubt(tmp_path, monkeypatch):
    """Only a new interpreter reads new `.pth` files."""
    monkeypatch.setattr(checks, "FIND", f"import site; site.addsitedir({str(tmp_path)!r}); {checks.FIND}")
    (tmp_path / "editable").mkdir()
    (tmp_path / "editable" / "just_installed.py").write_text("")
    (tmp_path / "new.pth").write_text(f"{tmp_path / 'editable'}\n")

    assert imports_in_doubt(Script.parse("import just_installed\n"), str(tmp_path), "") == []


def test_an_import_that_fails_for_sure_is_named_with_its_line_and_its_package(tmp_path):
    script = Script.parse('"""Doc."""\n\nX = 3\nimport not_there.sub, os\nfrom not_there_b import x\n', name="train")

    assert imports_in_doubt(script, str(tmp_path), "") == [
        f"train.py:4: imports not_there, which {sys.executable} does not find; to install it: "
        f"{sys.executable} -m pip install not_there",
        f"train.py:5: imports not_there_b, which {sys.executable} does not find; to install it: "
        f"{sys.executable} -m pip install not_there_b",
    ]


def test_looking_for_imports_imports_nothing(tmp_path):
    (tmp_path / "beside_and_dangerous.py").write_text("raise SystemExit('imported')\n")

    check_imports(Script.parse("import beside_and_dangerous\n"), [str(tmp_path)])

    assert "beside_and_dangerous" not in sys.modules


def test_arguments_become_text():
    assert check_arguments([50, "--lr", 1e-3, True, ""]) == ["50", "--lr", "0.001", "True", ""]


@pytest.mark.parametrize(
    "argument",
    ["--token", "--hf-token", "--hf_token=abc123", "--api-key=abc123", "--wandb_api_key", "--apikey", "--password=x"]
    + ["--client-secret", "--TOKEN", "--db-password"],
)
def test_what_looks_like_a_secret_is_refused_without_its_value(argument):
    with pytest.raises(LaunchError, match=r"looks like a secret; .*env=") as caught:
        check_arguments(["--steps", "3", argument, "abc123"])

    assert argument.split("=")[0] in str(caught.value)
    assert "abc123" not in str(caught.value)


@pytest.mark.parametrize("argument", ["token", "--key-size", "--steps=3", "a --token in words"])
def test_what_is_no_flag_for_a_secret_passes(argument):
    assert check_arguments([argument]) == [argument]


@pytest.mark.parametrize("argument", ["--tokenizer", "--max-tokens", "--num_tokens=9", "--tokens-per-batch"])
def test_a_flag_about_a_models_tokens_is_no_secret(argument):
    assert check_arguments([argument]) == [argument]


def test_a_nul_byte_in_an_argument_is_refused():
    with pytest.raises(LaunchError, match=r"'a\\x00b' .*no NUL byte"):
        check_arguments(["a\0b"])


def test_made_up_gpus_that_torch_could_not_list_are_not_trained_on_unchecked():
    machine = replace(
        made_up(0), gpu_problem="an NVIDIA driver is installed, but torch could not list the GPUs: timeout"
    )
    with pytest.raises(LaunchError, match="could not list the GPUs: timeout"):
        check_ranks(1, None, machine)


def test_nccl_without_a_made_up_gpu_is_refused_with_the_reason_that_torch_gives():
    machine = replace(made_up(0), visible_devices=None, unusable_gpus="torch 2.13.0+cpu is built without CUDA")
    with pytest.raises(LaunchError, match=r"none is visible here \(torch 2\.13\.0\+cpu is built without CUDA\)"):
        check_ranks(2, "nccl", machine)


def test_bf16_is_refused_where_a_made_up_gpu_would_emulate_it():
    turing, ampere = Gpu("Tesla T4", 15 << 30, (7, 5)), Gpu("A100", 40 << 30, (8, 0))
    machine = replace(made_up(0), gpus=(ampere, turing))

    with pytest.raises(LaunchError, match=r"Tesla T4 \(sm_75\) would be emulated.*precision='fp16'"):
        check_precision("bf16", machine, 2)
    check_precision("bf16", machine, 1)
    check_precision("fp16", machine, 2)
    check_precision("bf16", replace(machine, gpus=()), 2)


def test_a_module_that_is_nowhere_has_no_options():
    with pytest.raises(
        ScriptError, match="module 'nowhere.train' was not found in .*Correct its name, or pass its arg"
    ):
        prepare_launch(Module("nowhere.train"), LaunchOptions(), {"steps": 3})


def test_the_number_of_ranks_may_be_written_as_for_torchrun():
    parser = argparse.ArgumentParser()
    LaunchOptions.add_arguments(parser)
    assert parser.parse_args(["--nproc_per_node", "3"]).nproc_per_node == 3
