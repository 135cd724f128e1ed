"""The machines of a run, from `hosts/<host>.jsonl`: samples of NVML, the CPU and the memory.

{"k": "meta", "v": 1, "t": …, "time": …, "host": …, "cores": 2, "memory_total": bytes,
 "devices": [{"name": …, "uuid": …, "memory_total": bytes}]}
{"k": "host", "t": …, "cpu": percent, "memory_used": bytes,
 "devices": [{"utilisation": percent, "memory_used": bytes, "power": watts, "temperature": Celsius}]}   null: unknown
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from labkit.record.measured.metrics_file import Tail, finite

__all__ = ["HostHistory"]

READINGS = ("utilisation", "memory_used", "power", "temperature")


class HostHistory:
    """One machine, in memory that does not grow with the run. Each of `devices` has `name`, `uuid`,
    `memory_total` and the newest READINGS, None if the machine does not report them."""

    def __init__(self, name: str, path: Path):
        self.name = name
        self._tail = Tail(path, self._take)
        self.memory_total: float | None = None
        self.cores: float | None = None
        self.cpu: float | None = None
        self.memory_used: float | None = None
        self.devices: list[dict[str, Any]] = []

    def poll(self) -> bool:
        """Read the new records; returns whether there were any."""
        return bool(self._tail.poll())

    def as_dict(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("memory_total", "cores", "cpu", "memory_used", "devices")}

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any]) -> HostHistory:
        """From `as_dict`. Raises TypeError, KeyError or AttributeError for anything else."""
        host = cls(name, Path(name))
        host.memory_total, host.cores = finite(values["memory_total"]), finite(values["cores"])
        host.cpu, host.memory_used = finite(values["cpu"]), finite(values["memory_used"])
        host.devices = [
            {"name": str(d["name"]), "uuid": str(d["uuid"])} | {k: finite(d[k]) for k in ("memory_total", *READINGS)}
            for d in values["devices"]
        ]
        return host

    def used_by(self, uuids: Collection[str]) -> list[dict[str, Any]]:
        """The devices with these UUIDs, as torch writes them; all devices if none of them is known."""
        used = [d for d in self.devices if d["uuid"].removeprefix("GPU-") in uuids]
        return used or self.devices

    def _take(self, record: dict[str, Any]) -> bool:
        devices = [d for d in record.get("devices") or [] if isinstance(d, dict)]
        if record.get("k") == "meta":
            self.memory_total, self.cores = finite(record.get("memory_total")), finite(record.get("cores"))
            self.devices = [
                {"name": str(d.get("name")), "uuid": str(d.get("uuid") or ""), **dict.fromkeys(READINGS)}
                | {"memory_total": finite(d.get("memory_total"))}
                for d in devices
            ]
        elif record.get("k") == "host":
            self.cpu, self.memory_used = finite(record.get("cpu")), finite(record.get("memory_used"))
            for device, sample in zip(self.devices, devices, strict=False):
                device.update({reading: finite(sample.get(reading)) for reading in READINGS})
        return True
