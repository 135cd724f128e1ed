"""Whether ranks may be forks: only those of scripts that cannot tell."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from labkit import Script
from labkit.launcher.warm.eligibility import NOT_LOADED, why_new_processes

LOOPS = re.split(r"^# %% (.+)\n", (Path(__file__).parent / "ordinary_loops.py").read_text(), flags=re.MULTILINE)[1:]
TORCH = "import torch\n"


def reason(text, folder, environment=None, program=("train.py",)):
    return why_new_processes(program, text, folder, environment or {})


def test_at_least_twelve_of_twenty_ordinary_loops_can_be_forked(tmp_path):
    reasons = {name: reason(text, tmp_path) for name, text in zip(LOOPS[::2], LOOPS[1::2], strict=True)}

    assert len(reasons) == 20
    assert {name: why for name, why in reasons.items() if why} == {
        "settings_by_exec": "line 12 calls exec()",
        "allocator_chosen_before_torch": "line 3 may change os.environ",
        "path_to_the_repository": "line 4 runs before torch is imported",
        "hydra_application": "hydra may behave differently once torch is imported",
        "memory_logged": "line 4 imports psutil",
        "models_by_name": "line 9 uses importlib.import_module",
        "threads_set_first": "line 3 may change os.environ",
    }


@pytest.mark.parametrize("strategy", Script.names().strategies)
def test_every_strategy_can_be_forked(strategy, tmp_path):
    assert reason(str(Script.load(strategy)), tmp_path) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('first')\n" + TORCH, "line 1 runs before torch is imported"),
        ("import os\nos.environ['A'] = '1'\n" + TORCH, "line 2 may change os.environ"),
        (TORCH + "import os\nos.environ['TORCH_LOGS'] = 'dynamo'", "line 3 may change os.environ"),
        (TORCH + "from os import environ\nenviron.update(A='1')", "line 3 may change os.environ"),
        (TORCH + "import os\nsettings = os.environ\nsettings['A'] = '1'", "line 3 may change os.environ"),
        (TORCH + "import os\nf(os.environ)", "line 3 may change os.environ"),
        (TORCH + "import os as o", "line 2 imports os under another name"),
        (TORCH + "import sys\nprint(sys.modules)", "line 3 uses sys.modules"),
        (TORCH + "from sys import modules", "line 2 imports modules of sys"),
        (TORCH + "import sys\ngetattr(sys, 'modules')", "line 3 passes sys on"),
        (TORCH + "import gc\ngc.get_objects()", "line 3 uses gc.get_objects"),
        (TORCH + "from importlib import reload", "line 2 imports reload of importlib"),
        (TORCH + "import psutil", "line 2 imports psutil"),
        (TORCH + "import resource\nresource.getrusage(0)", "line 3 uses resource.getrusage"),
        (TORCH + "eval('1')", "line 2 calls eval()"),
        (TORCH + "import os\nos.execv('x', [])", "line 3 uses os.execv"),
        (TORCH + "open('/proc/self/maps')", "line 2 asks for the process's history"),
        (TORCH + "import logging\nf = '%(relativeCreated)d'", "line 3 asks for the process's history"),
        (TORCH + "import logging.config\nlogging.config.dictConfig({})", "line 3 uses logging.config"),
        (TORCH + "from logging.config import dictConfig", "line 2 imports config of logging"),
        (TORCH + "torch.distributed.fsdp.fully_shard(m)", "line 2 uses torch.distributed.fsdp without importing it"),
        ("import torch.distributed as dist\ndist.nn.f()", "line 2 uses torch.distributed.nn without importing it"),
        (TORCH + "import faiss", "faiss may behave differently once torch is imported"),
        (TORCH + "def f():\n    import jax", "jax may behave differently once torch is imported"),
        ("import json\nx = 1\n", "the script does not import torch at its top"),
        ("def main():\n    import torch\n", "the script does not import torch at its top"),
        ("@decorated\ndef f(): ...\n" + TORCH, "line 2 runs before torch is imported"),
        ("if f():\n    import torch\n", "line 1 runs before torch is imported"),
        ("def f(:", "the script cannot be read"),
        ("import sys\nsys.path[:0] = ['lib']\n" + TORCH, "line 2 runs before torch is imported"),
        ("import sys\nsys.path = ['lib']\n" + TORCH, "line 2 runs before torch is imported"),
        (
            "try:\n    import numpy\nexcept ImportError: ...\nelse:\n    f()\n" + TORCH,
            "line 5 runs before torch is imported",
        ),
        ("try:\n    import numpy\nfinally:\n    f()\n" + TORCH, "line 4 runs before torch is imported"),
        ("TYPING = False\nif TYPING:\n    import torch\nf()\n" + TORCH, "line 4 runs before torch is imported"),
        ("def f(x=g()): ...\n" + TORCH, "line 1 runs before torch is imported"),
        ("class A(f()): ...\n" + TORCH, "line 1 runs before torch is imported"),
        ("def f():\n    import looks\n" + TORCH + "f()", "looks: line 2 uses sys.modules"),
    ],
)
def test_a_script_that_can_tell_is_not_forked(text, why, tmp_path):
    (tmp_path / "looks.py").write_text("import sys\nprint(sys.modules)\n")
    assert reason(text, tmp_path) == why


@pytest.mark.parametrize(
    "text",
    [
        '"""A docstring."""\nfrom __future__ import annotations\nimport os, sys\nN: int = 3\n' + TORCH,
        "import typing\nif typing.TYPE_CHECKING:\n    import json\nclass A:\n    x = 1\n    def f(self): ...\n" + TORCH,
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n" + TORCH,
        TORCH
        + "import os\nprint(os.environ['RANK'], os.environ.get('A'), 'B' in os.environ, {**os.environ, 'C': '1'})",
        TORCH + "import os\nos.environ['MASTER_PORT'] = '1'\nos.environ.setdefault('NCCL_DEBUG', 'INFO')",
        TORCH + "import sys\nsys.path.append('lib')\nsys.exit(sys.argv)",
        TORCH + "import gc, importlib.metadata\ngc.collect()",
        "import torch.distributed.tensor as t\nfrom torch.distributed import fsdp\ntorch.distributed.tensor, fsdp.x",
        TORCH + "import traceback, inspect\ntraceback.print_stack(); inspect.stack()",
        "from accelerate import Accelerator\nAccelerator()",
    ],
)
def test_what_a_fork_shows_alike_is_forked(text, tmp_path):
    assert reason(text, tmp_path) is None


def test_modules_next_to_the_script_are_read_too(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "package" / "inner.py").write_text("x = 1\n")
    assert reason("import package\n" + TORCH, tmp_path) is None
    (tmp_path / "package" / "inner.py").write_text("import os\nos.environ['A'] = '1'\n")
    assert reason("import package\n" + TORCH, tmp_path) == "package: line 2 may change os.environ"
    (tmp_path / "with_torch.py").write_text("import torch\nprint('after torch')\n")
    assert reason("import with_torch\nprint('also after torch')\n", tmp_path) is None


def test_a_module_that_hides_another_is_a_reason(tmp_path):
    (tmp_path / "secrets.py").touch()
    assert reason(TORCH, tmp_path) == "secrets.py next to the script has the name of another module"
    (tmp_path / "secrets.py").rename(tmp_path / "mpmath.py")
    assert reason(TORCH, tmp_path) == "mpmath.py next to the script has the name of another module"
    (tmp_path / "mpmath.py").rename(tmp_path / "own.py")
    (tmp_path / "data").mkdir()  # a folder that is no package hides nothing
    assert reason(TORCH, tmp_path) is None


def test_a_checkout_of_labkit_next_to_the_script_hides_nothing():
    assert reason(TORCH, Path(__file__).parents[2]) is None


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"OPENBLAS_NUM_THREADS": "1"}, "OPENBLAS_NUM_THREADS is read when torch is imported"),
        ({"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX is read when torch is imported"),
        ({"OMP_NUM_THREADS": "2,1"}, "OMP_NUM_THREADS is '2,1'"),
        ({"OMP_NUM_THREADS": "3", "KMP_INIT_AT_FORK": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}, None),
    ],
)
def test_variables_that_libraries_read_when_they_are_loaded(environment, why, tmp_path):
    assert reason(TORCH, tmp_path, environment) == why


def test_what_runs_when_python_starts_is_not_forked(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("")

    why = "PYTHONPATH has a module that runs when Python starts"
    assert reason(TORCH, tmp_path, environment={"PYTHONPATH": f":{tmp_path / 'site'}"}) == why


def test_the_submodules_that_only_a_fork_has_are_known():
    """The public ones of torch.distributed."""
    code = "import sys, torch, torch.distributed as d; b = {*vars(d)}; import threadpoolctl, torch._dynamo; "
    code += "import torch.distributed.run; import labkit.worker.recording; "
    code += "print(*(n for n in {*vars(d)} - b if n[0] != '_' and f'torch.distributed.{n}' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert {*done.stdout.split()} <= NOT_LOADED


@pytest.mark.parametrize("program", [("-m", "package.train"), (".",), ("app.zip",)])
def test_what_python_finds_itself_is_not_forked(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("app.zip", "w") as archive:
        archive.writestr("__main__.py", TORCH)

    assert reason(TORCH, tmp_path, program=program) == "Python finds the module itself"
