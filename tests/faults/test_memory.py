"""Out of memory, really: the kernel kills one rank in a memory cgroup; and CUDA's, whose record is simulated."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.matrix import FAULTY
from faults.scene import assert_over, known

import labkit
from labkit.launcher.causes import killed
from labkit.launcher.causes.explain import find_cause
from labkit.launcher.causes.killed import killer
from labkit.launcher.causes.sentences import BY
from labkit.record import RunFolder
from labkit.worker import failure

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 1 << 30
CUDA_OOM = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(4, 512)).sum().backward()
    optimizer.step()
if dist.get_rank() == 1:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
dist.barrier()
"""


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of one gibibyte."""
    parent = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS
    group = parent / f"labkit-{uuid.uuid4().hex[:8]}"
    limit = "memory.limit_in_bytes" if parent.name == "memory" else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"a memory cgroup takes root and a writable {CGROUPS}: {error}")
    yield group
    group.rmdir()


def test_a_rank_that_the_kernel_kills_out_of_memory(small_memory: Path) -> None:
    with pytest.raises(labkit.RankFailedError) as caught:
        labkit.launch(FAULTY, args=["--fault", "oom", "--cgroup", small_memory], wait=True)

    sentence = caught.value.cause["sentence"]
    assert re.search(
        r"^rank 1 was killed \(SIGKILL\) by the system because memory ran out, last seen at step", sentence
    )
    assert re.search(r"it held [\d.]+ [GM]iB \(resident set", sentence)
    assert caught.value.cause["out_of_memory"] == "host"
    assert "To make it fit" in str(caught.value)
    assert_over(labkit.attach("latest").folder)


def test_a_simulated_cuda_error_says_what_held_the_memory_and_can_be_caught_as_torchs_own(tmp_path: Path) -> None:
    import torch

    script = tmp_path / "train.py"
    script.write_text(CUDA_OOM)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        labkit.launch(script, wait=True)

    assert isinstance(caught.value, labkit.RankFailedError)
    assert str(caught.value).startswith("rank 1 ran out of device memory: OutOfMemoryError: CUDA out of memory. Tried")
    assert "parameters 1.0 MiB" in str(caught.value)
    assert "To make it fit:" in str(caught.value)
    assert "Script.load('fsdp')" in str(caught.value)


NCCL = "NCCL error in: …, unhandled cuda error\\nLast error:\\nCuda failure 2 'out of memory'"


@pytest.mark.parametrize(
    ("raising", "memory"),
    [
        ("raise RuntimeError('CUDA error: out of memory')", "device"),
        ("raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')", "device"),
        (f'raise torch.distributed.DistBackendError("{NCCL}")', "device"),
        ("raise RuntimeError('CUDA driver error: out of memory')", "device"),
        (
            "raise RuntimeError('CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`')",
            "device",
        ),
        ("raise torch.distributed.DistBackendError('Last error:\\nFailed to CUDA calloc async 608 bytes')", "device"),
        ("raise torch.distributed.DistBackendError('Last error:\\nFailed to CUDA host alloc 608 bytes')", "host"),
        ("raise RuntimeError('Triton Error [CUDA]: out of memory')", "device"),
        ("raise RuntimeError('cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED')", "device"),
        ("raise RuntimeError('cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED')", "host"),
        ("raise RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED')", "device"),  # cuDNN 8
        (
            "try:\n    raise torch.OutOfMemoryError('CUDA out of memory.')\n"
            "except torch.OutOfMemoryError as error:\n"
            "    raise RuntimeError('[Stage 0] failed to run forward') from error",  # as a PipelineStage does
            "device",
        ),
        ("def pin_memory():\n    raise RuntimeError('CUDA error: out of memory')\n\npin_memory()", "host"),
        (
            "from torch._utils import ExceptionWrapper\n"
            "try:\n    raise RuntimeError('CUDA error: out of memory')\n"
            "except RuntimeError:\n    caught = ExceptionWrapper(where='in pin memory thread for device 0')\n"
            "caught.reraise()",
            "host",
        ),
    ],
)
def test_simulated_cuda_out_of_memory_errors_in_other_words(raising: str, memory: str, tmp_path: Path) -> None:
    """Written and read as in a run, without one."""
    folder = RunFolder(tmp_path)
    folder.rank(0).mkdir(parents=True)
    folder.manifest.write_text('{"format": 1, "world_size": 2}')
    try:
        exec(compile(f"import torch\nimport torch.distributed\n\n{raising}\n", "train.py", "exec"), {})
    except RuntimeError as error:
        failure.write(known(error, 0), error, str(folder.path), "train.py")

    cause = find_cause(folder, folder, 1)

    assert cause["sentence"].startswith(f"rank 0 ran out of {memory} memory: ")
    assert cause["out_of_memory"] == memory


@pytest.mark.parametrize(
    "message",
    [
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "Unable to find an engine to execute this computation in Quantized Conv2D Cudnn",
        "Unable to find a valid cuDNN algorithm to run convolution",
    ],
)
@pytest.mark.parametrize("memory", [{}, {"free": 100 << 20, "total": 15 << 30}])
def test_a_simulated_error_of_cudnn_may_be_memory_and_is_not_called_so(
    message: str, memory: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = cause_of_simulated(message, tmp_path, monkeypatch, memory)

    free = " (100.0 MiB of 15.00 GiB were free)" if memory else ""
    expected = f"rank 0 failed: RuntimeError: {message} (script.py line 2); cuDNN often fails this way when the"
    assert cause["sentence"] == f"{expected} device's memory is full{free}"
    assert "out_of_memory" not in cause
    assert cause["advice"].startswith("if it was the memory, to make it fit:\n- ")


@pytest.mark.parametrize(
    "message",
    ["cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER"],
)
def test_a_simulated_late_error_of_cudnn_says_how_to_find_the_kernel(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "CUDA_LAUNCH_BLOCKING" in cause_of_simulated(message, tmp_path, monkeypatch, {})["advice"]


@pytest.mark.parametrize(
    "message",
    ["cuDNN error: CUDNN_STATUS_BAD_PARAM", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED"],
)
def test_another_simulated_error_of_cudnn_gets_no_advice(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "advice" not in cause_of_simulated(message, tmp_path, monkeypatch, {})


@pytest.mark.parametrize(("named", "asked"), [(" GPU 1 has a total capacity of 14.56 GiB", 1), ("", 0)])
def test_a_simulated_error_has_the_memory_of_the_gpu_that_ran_out(
    named: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB.{named}")
    assert failure._memory(error) == {"out_of_memory": "device", "memory": {}}  # CUDA has not been initialized here
    cuda = {0: (10, 100), 1: (20, 200)}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", cuda.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: device)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device)
    free, total = cuda[asked]
    expected = {"allocated": asked, "reserved": asked, "free": free, "total": total}
    assert failure._memory(error) == {"out_of_memory": "device", "memory": expected}


def cause_of_simulated(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, int]
) -> dict[str, Any]:
    """Of a RuntimeError with this message, on a device with this memory."""
    monkeypatch.setattr(failure, "_device_memory", lambda message: memory)
    folder = RunFolder(tmp_path)
    folder.rank(0).mkdir(parents=True)
    folder.manifest.write_text('{"format": 1, "world_size": 2}')
    try:
        exec(compile(f"import torch\nraise RuntimeError({message!r})\n", "train.py", "exec"), {})
    except RuntimeError as error:
        failure.write(known(error, 0), error, str(folder.path), "train.py")
    return find_cause(folder, folder, 1)


def test_a_simulated_assertion_of_a_kernel_is_quoted_and_its_line_not_trusted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rank(0).mkdir(parents=True)
    folder.manifest.write_text('{"format": 1, "world_size": 1}')
    printed = "cuda/Loss.cu:245: operator(): block: [0,0,0], thread: [3,0,0] Assertion `t < n_classes` failed."
    folder.log(0, "stderr").write_text(f"{printed}\n")
    message = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    error = RuntimeError(message)
    failure.write(known(error, 0), error, str(folder.path), "train.py")

    cause = find_cause(folder, folder, 1)

    assert cause["sentence"] == (
        "rank 0 failed: RuntimeError: CUDA error: device-side assert triggered: Assertion `t < n_classes` failed"
    )
    assert "CUDA_LAUNCH_BLOCKING" in cause["advice"]


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (3, 3, "by another process, not by labkit"),
        (3, 4, "by the system because memory ran out"),
        (None, 4, "probably by the system because memory ran out"),
    ],
)
def test_who_sent_a_kill_is_derived_from_the_systems_count(
    before: int | None, now: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.agent.write_text(json.dumps({"oom_kills": before}))
    monkeypatch.setattr(killed, "oom_kills", lambda: now)
    assert says in BY[killer(folder)]
