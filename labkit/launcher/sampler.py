"""Samples the machine during a run: `hosts/<host>.jsonl`, once a second, and `processes.json`, the descendants of the
run's supervisor and which of them NVML lists on GPUs. It is a separate process, because querying a broken driver can
crash the caller. Values that the machine does not report are null.

    python -m labkit.launcher.sampler <run folder> <the supervisor's folder>
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from labkit.files import write_json
from labkit.host import Identity, host_name
from labkit.launcher.stopping import descendants
from labkit.record import RunFolder

__all__ = ["main"]

PERIOD_SECONDS = 1.0


def main() -> None:
    folder, home, parent = RunFolder(sys.argv[1]), RunFolder(sys.argv[2]), os.getppid()
    folder.hosts.mkdir(exist_ok=True)
    host = host_name()
    file = os.open(folder.host(host), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    devices = _devices()
    psutil.cpu_percent()  # the first call only starts the interval
    names = [{k: v for k, v in device().items() if k in ("name", "uuid", "memory_total")} for device in devices]
    memory = psutil.virtual_memory()
    _write(
        file,
        {
            "k": "meta",
            "v": 1,
            "time": time.time(),
            "host": host,
            "cores": psutil.cpu_count(),
            "memory_total": memory.total,
            "devices": names,
        },
    )
    supervisor, processes, on_gpus = psutil.Process(parent), set[psutil.Process](), set[int]()
    while os.getppid() == parent:
        time.sleep(PERIOD_SECONDS)
        readings = [device() for device in devices]
        before, processes = (processes, on_gpus), set(descendants(supervisor, folder.marker))
        listed = {pid for reading in readings for pid in reading["pids"]}
        on_gpus = {process.pid for process in processes if process.pid in listed} or on_gpus
        if (processes, on_gpus) != before and os.getppid() == parent:  # otherwise another process has adopted them
            _record(home, processes, on_gpus)
        sample = {"k": "host", "cpu": psutil.cpu_percent(), "memory_used": psutil.virtual_memory().used}
        changing = ("utilisation", "memory_used", "power", "temperature")
        _write(file, sample | {"devices": [{k: d[k] for k in changing} for d in readings]})


def _record(home: RunFolder, processes: set[psutil.Process], on_gpus: set[int]) -> None:
    identities = [identity.as_dict() for process in processes if (identity := Identity.of(process.pid))]
    with suppress(OSError):  # a full disk
        write_json(home.processes, {"processes": identities, "on_gpus": sorted(on_gpus)})


def _write(file: int, record: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk
        os.write(file, (json.dumps({"t": time.monotonic(), **record}) + "\n").encode())


def _devices() -> list[Callable[[], dict[str, Any]]]:
    """A reader for each GPU that NVML reports; none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, no driver, or a driver of another version
        return []
    return [_reader(pynvml, handle) for handle in handles]


def _reader(nvml: Any, handle: Any) -> Callable[[], dict[str, Any]]:
    """NVML's values for one device: percent, bytes, watts, degrees Celsius; WSL2 does not report all of them."""

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(handle, *args)
        except nvml.NVMLError:
            return None

    def text(value: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else value

    def read() -> dict[str, Any]:
        rates, memory = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
        return {
            "name": text(ask(nvml.nvmlDeviceGetName)),
            "uuid": text(ask(nvml.nvmlDeviceGetUUID)),
            "memory_total": memory.total if memory else None,
            "utilisation": rates.gpu if rates else None,
            "memory_used": memory.used if memory else None,
            "power": milliwatts / 1000 if milliwatts is not None else None,
            "temperature": ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "pids": [process.pid for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()],
        }

    return read


if __name__ == "__main__":
    main()
