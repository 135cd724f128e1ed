"""Checks what must be true before a run starts. Each error says what was given, what was expected and what to do."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from labkit.errors import LaunchError
from labkit.hardware import Hardware, install_for, torch_report, without_kernels
from labkit.install import pip_install
from labkit.launch_options import LaunchOptions
from labkit.launcher.torchrun_command import LEFTOVER_PREFIXES
from labkit.version import TORCH_FLOOR, release_of
from labkit.write import Script, check_split, is_composed, options_of

MOST_RANKS = 1024
SECRET_FLAG = re.compile(
    r"^--(token|([\w-]*[-_])?("
    r"(hf|api|access|auth|bearer|session|refresh|github|gitlab|wandb|kaggle)[-_]token"
    r"|(api|access|secret|private|ssh|encryption)[-_]?key"
    r"|(secret|password|passwd|passphrase|credentials?)([-_][\w-]*)?))(=|$)",
    re.IGNORECASE,
)
SPLITS_REPLICAS = re.compile(r'mesh_dim_names=\([^)]*"(tensor|pipeline|context)"')
RUNS_CODE = (ast.Call, ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.Delete, ast.Attribute)
FIND = "import sys; sys.path.insert(0, sys.argv[1]); from importlib.util import find_spec; " + (
    "print(*(name for name in sys.argv[2:] if find_spec(name) is None))"
)
FIND_SECONDS = 10.0
LONGEST_NAME = 100
LONGEST_WORD = 100_000  # the limit on Linux is 131,072 bytes


def check_torch(platform: str) -> None:
    """Check that torch is installed and not older than 2.8, below which gloo hangs in pipelines or sums wrongly."""
    if platform == "windows":
        raise LaunchError("torch.distributed has no NCCL on native Windows. Use WSL2: https://aka.ms/wsl")
    try:
        installed = version("torch")
    except PackageNotFoundError:
        raise LaunchError(
            f"torch is not installed for {sys.executable}. Install it there: {pip_install('torch')}"
        ) from None
    if release_of(installed) < TORCH_FLOOR:
        raise LaunchError(
            f"torch {installed} is too old; labkit needs 2.8 or newer (older versions hang or sum wrongly with gloo): "
            f"{pip_install('torch>=2.8')}"
        )


def check_ranks(nproc_per_node: Any, backend: Any, hardware: Hardware) -> int:
    """The number of ranks. Raises LaunchError when it is not one, or does not fit the devices."""
    if nproc_per_node == "auto":
        nproc_per_node = hardware.default_ranks
    if isinstance(nproc_per_node, bool) or not isinstance(nproc_per_node, int):
        raise LaunchError(f"nproc_per_node must be an integer or 'auto', got {nproc_per_node!r}")
    if nproc_per_node < 1:
        raise LaunchError(f"nproc_per_node must be at least 1, got {nproc_per_node}")
    if nproc_per_node > MOST_RANKS:
        raise LaunchError(
            f"nproc_per_node={nproc_per_node:,} is too many for one machine; the maximum is {MOST_RANKS:,}"
        )
    if backend not in (None, "nccl", "gloo"):
        raise LaunchError(f"backend must be 'nccl' or 'gloo', got {backend!r}")
    gpus = len(hardware.gpus) if hardware.has_gpus() else 0
    if backend == "nccl" and not gpus:
        visible = hardware.visible_devices
        hidden = "" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
        why = f" ({hidden or hardware.unusable_gpus})" if hidden or hardware.unusable_gpus else ""
        raise LaunchError(f"backend='nccl' needs a GPU for every rank; none is visible here{why}. Leave backend out")
    if gpus and nproc_per_node > gpus and backend != "gloo":
        raise LaunchError(
            f"{nproc_per_node} ranks need {nproc_per_node} GPUs, but this machine has {gpus}. "
            f"Use nproc_per_node={gpus}, or backend='gloo' to let ranks share them"
        )
    if backend == "gloo" and 0 < nproc_per_node <= gpus:
        raise LaunchError(
            f"{nproc_per_node} ranks on {gpus} GPUs use nccl; backend='gloo' is for more ranks than GPUs. "
            "To train on the CPU, pass env={'CUDA_VISIBLE_DEVICES': ''}"
        )
    _check_kernels(hardware, nproc_per_node)
    return nproc_per_node


def _check_kernels(hardware: Hardware, ranks: int) -> None:
    """Check that torch has kernels for the ranks' GPUs. Without them `is_available()` is true, but every operation
    fails."""
    if not hardware.gpus:
        return
    report = torch_report(hardware.visible_devices)
    built = report["kernels"] if report else ()
    for gpu in without_kernels(hardware.gpus[:ranks], built):
        raise LaunchError(
            f"torch {version('torch')} has no kernels for {gpu.name} ({gpu.sm}), only for {', '.join(built)}: the "
            "first operation on it would fail. Use another GPU (on Kaggle: GPU T4 x2), pass "
            f"env={{'CUDA_VISIBLE_DEVICES': ''}} to train on the CPU, or install a torch that has {gpu.sm}"
            + (f": {command}" if (command := install_for([gpu], None)) else "")
        )


def check_precision(precision: Any, hardware: Hardware, ranks: int) -> None:
    """Check that the ranks' GPUs compute in bf16 in hardware, if one of labkit's scripts is to use it."""
    slow = [gpu for gpu in hardware.gpus[:ranks] if not gpu.has_bf16] if precision == "bf16" else []
    if slow:
        raise LaunchError(
            f"precision='bf16' on {slow[0].name} ({slow[0].sm}) would be emulated, which is slower than fp32: GPUs "
            "have it from sm_80 (A100) on. Use precision='fp16'"
        )


def check_batch(script: Script, parameters: Mapping[str, Any], ranks: int) -> None:
    """Check that the global batch splits into ranks x micro-batches, for scripts that have these options, and into
    ranks for a script composed of labkit's cells."""
    options = options_of(script)
    splits = "accumulate" in options
    if "global_batch_size" not in options or not (splits or is_composed(script)):
        return
    batch, parts = (
        parameters.get(name, options[name].default) if name in options else 1
        for name in ("global_batch_size", "accumulate")
    )
    # Ranks that split one replica share its samples; only the script knows how many replicas there are.
    shares = 1 if SPLITS_REPLICAS.search(str(script)) else ranks
    try:
        size, pieces = int(str(batch)), shares * int(str(parts))
    except ValueError:  # left to the script, or computed in it
        return
    check_split(size, shares, pieces // shares if splits else None)


def fewer_ranks(script: Script, parameters: Mapping[str, str], ranks: int, options: LaunchOptions) -> list[int]:
    """The numbers of ranks with which a retry may continue, the largest first. Raises LaunchError if `min_ranks` is not
    a number of ranks or allows none."""
    least = options.min_ranks
    if least is None:
        return []
    if least >= ranks:
        raise LaunchError(f"min_ranks must be an integer, at least 1 and less than {ranks}, got {least!r}")
    if options.retries < 2:
        raise LaunchError("min_ranks needs retries=2 or more: the first retry uses all ranks, the second one fewer")
    if SPLITS_REPLICAS.search(str(script)):
        raise LaunchError(
            "min_ranks needs ranks that each train on a part of the batch (ddp, zero1, zero2, fsdp, fsdp1); those of "
            f"{script.name} split one model or sequence"
        )
    fewer = []
    for count in range(ranks - 1, least - 1, -1):
        try:
            check_batch(script, parameters, count)
            fewer.append(count)
        except LaunchError as error:
            reason = error
    if not fewer:
        raise LaunchError(f"no number of ranks from min_ranks={least} to {ranks - 1} works: {reason}")
    return fewer


def check_numbers(script: Script, parameters: Mapping[str, str]) -> None:
    """Check that numeric options of labkit's own scripts are numbers of at least 0; anything else is a typo."""
    for name, option in options_of(script).items():
        if option.kind not in ("int", "float") or name not in parameters:
            continue
        try:
            value = float(parameters[name])
        except ValueError:
            raise LaunchError(f"{name} must be a number, got {parameters[name]!r}") from None
        if not 0 <= value < math.inf:
            raise LaunchError(f"{name} must be 0 or more, got {parameters[name]}")


def check_imports(script: Script, folders: list[str]) -> None:
    """Check that this interpreter, or one of the `folders`, has the modules that the script imports unconditionally."""
    missing = sorted(name for name in imported(script) if not _can_be_found(name, folders))
    if missing:
        raise LaunchError(
            f"{script.name}.py imports {', '.join(missing)}, which {sys.executable} cannot find. Install it: "
            f"{pip_install(*missing)}; or start labkit from an environment that has it. Your own modules must be in "
            "the current folder"
        )


def imports_in_doubt(script: Script, folder: str, python_path: str) -> list[str]:
    """One sentence for each module that the user's own script imports first and that a new interpreter does not find.

    Imports after the first statement that runs code are not judged: it may change where modules are found, as may a
    module of the user's own. So may a package that was installed after this process started; hence the new interpreter.
    """
    names: dict[str, int] = {}
    for statement in ast.parse(str(script)).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports = _packages(statement)
            if any(PathFinder.find_spec(name, [folder]) for name in imports):
                break
            for name in imports:
                names.setdefault(name, statement.lineno)
        elif any(isinstance(node, RUNS_CODE) for node in ast.walk(statement)):
            break
    missing = [name for name in names if not _can_be_found(name, [])]
    return [
        f"{script.name}.py:{names[name]}: imports {name}, which {sys.executable} does not find; to install it: "
        f"{pip_install(name)}"
        for name in (_not_found_in_new_interpreter(missing, folder, python_path) if missing else [])
    ]


def _not_found_in_new_interpreter(names: list[str], folder: str, python_path: str) -> list[str]:
    environment = os.environ | ({"PYTHONPATH": python_path} if python_path else {})
    try:
        command = [sys.executable, "-P", "-c", FIND, folder, *names]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FIND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def imported(script: Script) -> set[str]:
    """The top-level packages that the script imports unconditionally."""
    statements = [s for s in ast.parse(str(script)).body if isinstance(s, ast.Import | ast.ImportFrom)]
    return {name for statement in statements for name in _packages(statement)}


def _packages(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """The top-level packages of an import; a relative import has none."""
    if isinstance(statement, ast.Import):
        return [alias.name.split(".")[0] for alias in statement.names]
    return [statement.module.split(".")[0]] if statement.module and not statement.level else []


def _can_be_found(package: str, folders: list[str]) -> bool:
    try:
        beside = PathFinder.find_spec(package, folders) is not None
        return beside or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def check_arguments(args: Any) -> list[str]:
    """Raw arguments as text. Refuses what looks like a secret: every user of the machine can read a command line."""
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise LaunchError(f"args must be a list such as ['50', '--lr', '1e-3'], got {args!r}")
    texts = [str(arg) for arg in args]
    what = "an argument"
    for text in texts:
        if SECRET_FLAG.match(text):
            flag = text.split("=")[0]
            raise LaunchError(f"{flag} looks like a secret; other users can see command lines. Pass it with env={{…}}")
        _check_word(what, text)
        what = f"the value of {text}" if text.startswith("--") and len(text) < LONGEST_NAME else "an argument"
    return texts


def check_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables as text. Raises LaunchError if a name or value is not valid, or changes what torchrun does."""
    if not isinstance(env, Mapping):
        raise LaunchError(f"env must be a mapping such as {{'NCCL_DEBUG': 'INFO'}}, got {env!r}")
    for name in env:
        if str(name).startswith(LEFTOVER_PREFIXES):
            raise LaunchError(
                f"env must not set {name}, which changes what torchrun does; use launch's parameters (nproc_per_node=…)"
            )
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise LaunchError(f"env: {name!r} is not a valid environment variable name")
        _check_word(f"env[{name!r}]", str(value))
    return {name: str(value) for name, value in env.items()}


def _check_word(what: str, text: str) -> None:
    if "\0" in text or len(text) > LONGEST_WORD or text != text.encode("utf-8", "replace").decode():
        shown = text[:40] + ("…" if len(text) > 40 else "")
        raise LaunchError(
            f"{what} cannot be passed to a process: {shown!r} ({len(text):,} characters; at most {LONGEST_WORD:,}, "
            "UTF-8, no NUL byte). Put it in a file"
        )
