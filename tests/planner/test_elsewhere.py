"""What a lab shows of other devices: one plan answers for all strategies of the same cells."""

from __future__ import annotations

import labkit
from labkit import Script
from labkit.text import gib
from labkit_labs.other_devices import elsewhere


def test_one_plan_for_each_device_answers_for_all_strategies(monkeypatch):
    planned = []

    def counted(script, **options):
        planned.append(options["device"])
        return labkit.plan(script, **options)

    monkeypatch.setattr("labkit_labs.other_devices.plan", counted)
    scripts = {name: Script.load(name, task="digits") for name in ("ddp", "fsdp")}
    shown = elsewhere(scripts, ["2xT4"], {"global_batch_size": 8}, "")

    assert planned == ["2xT4"]
    assert [row[""] for row in shown.rows] == ["ddp", "fsdp"]
    advised = next(row for row in shown.plans["ddp", "2xT4"].advice.rows if row.strategy == "fsdp")
    assert shown.rows[1]["peak"] == f"~{gib(advised.peak.bytes)}"
    assert shown.rows[1]["fits"] == "yes, of 14.24 GiB"
