"""Asks NVML about the GPUs. This happens in a process of its own, because broken drivers have crashed the caller, and
opens nothing on a GPU. Unavailable values are None; WSL2's driver lacks several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any, TypedDict

# nvmlGpuTopologyLevel_t, as `nvidia-smi topo -m` abbreviates it.
PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
HEAT = 0x20 | 0x40  # of nvmlClocksEventReasons: slowed down by software or hardware, because it is hot
READ, NVLINK = 0, 2  # of nvmlGpuP2PCapsIndex_t; nvidia-ml-py 12 and 13 have a tuple, (0,), for the first


class NvmlProcess(TypedDict):
    pid: int
    memory: int | None


class NvmlCard(TypedDict):
    """A GPU: memory in bytes, `utilisation` in percent, `power` in W, whether heat slows it down (`throttled`), and the
    processes that have memory on it."""

    index: int
    name: str | None
    uuid: str | None
    memory: int | None
    free: int | None
    utilisation: int | None
    power: float | None
    temperature: int | None
    throttled: bool | None
    processes: list[NvmlProcess] | None


class NvmlLink(TypedDict):
    """Two GPUs: the `path` between them, whether each can read the other's memory, and whether over NVLink."""

    first: int
    second: int
    path: str | None
    peer: bool | None
    nvlink: bool | None


class NvmlReport(TypedDict):
    """The driver's version, the newest CUDA version that it supports, and the GPUs."""

    driver: str | None
    cuda: str | None
    cards: list[NvmlCard]
    links: list[NvmlLink]


def ask_nvml(seconds: float) -> NvmlReport:
    """What NVML says. Raises OSError, ValueError or subprocess.TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(f"NVML failed: {last}")
    answer: NvmlReport = json.loads(done.stdout)
    return answer


def main() -> None:
    import pynvml

    pynvml.nvmlInit()
    print(json.dumps(report(pynvml)))


def report(nvml: Any) -> NvmlReport:
    """What NVML says about the driver, the GPUs and the links between them. `nvml` is the initialized pynvml."""
    ask = partial(_ask, nvml)

    def link(first: int, second: int) -> NvmlLink:
        pair = handles[first], handles[second]
        read = ask(nvml.nvmlDeviceGetP2PStatus, *pair, READ)
        nvlink = ask(nvml.nvmlDeviceGetP2PStatus, *pair, NVLINK)
        return {
            "first": first,
            "second": second,
            "path": PATHS.get(ask(nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)),
            "peer": None if read is None else read == nvml.NVML_P2P_STATUS_OK,
            "nvlink": None if nvlink is None else nvlink == nvml.NVML_P2P_STATUS_OK,
        }

    handles = handles_of(nvml)
    number = ask(nvml.nvmlSystemGetCudaDriverVersion)
    return {
        "driver": ask(nvml.nvmlSystemGetDriverVersion),
        "cuda": number and f"{number // 1000}.{number % 1000 // 10}",
        "cards": cards_of(nvml, handles),
        "links": [link(first, second) for first, second in combinations(range(len(handles)), 2)],
    }


def handles_of(nvml: Any) -> list[Any]:
    """NVML's handles of all GPUs."""
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def cards_of(nvml: Any, handles: Sequence[Any]) -> list[NvmlCard]:
    """What NVML says about each GPU, in bytes, percent, watts and degrees Celsius; None where NVML does not say."""
    return [_card(nvml, partial(_ask, nvml), index, handle) for index, handle in enumerate(handles)]


def _card(nvml: Any, ask: Callable[..., Any], index: int, handle: Any) -> NvmlCard:
    memory, rates = ask(nvml.nvmlDeviceGetMemoryInfo, handle), ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {
        "index": index,
        "name": ask(nvml.nvmlDeviceGetName, handle),
        "uuid": ask(nvml.nvmlDeviceGetUUID, handle),
        "memory": memory and memory.total,
        "free": memory and memory.free,
        "utilisation": rates and rates.gpu,
        "power": milliwatts and milliwatts / 1000,
        "temperature": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "throttled": None if reasons is None else bool(reasons & HEAT),
        "processes": processes and [{"pid": p.pid, "memory": p.usedGpuMemory} for p in processes],
    }


def _ask(nvml: Any, function: Callable[..., Any], *args: Any) -> Any:
    try:
        value = function(*args)
    except nvml.NVMLError:
        return None
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
