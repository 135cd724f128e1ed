"""Judges a Kaggle session. Limits are from kaggle.com/docs/notebooks, copies of August and September 2026."""

from __future__ import annotations

from labkit import words
from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import MachineFacts
from labkit.session import before_saving
from labkit.text import gib

SAVED = 20_000_000_000  # bytes of /kaggle/working
LITTLE_TIME = 3600
LITTLE_DISK = 2 << 30


@detection
def run_type(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    if facts.kaggle.run_type == "Batch":
        return Diagnosis("Kaggle", "batch (Save & Run All)", "launch waits for the end; static figures are kept")
    return Diagnosis(
        "Kaggle",
        "interactive" if facts.kaggle.run_type == "Interactive" else facts.kaggle.run_type,
        "an idle session ends after 20 minutes (another page of Kaggle says 60), and its runs end with it",
        "for long training: Save & Run All, which continues with the browser closed",
        "note",
    )


@detection
def time_left(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    whole = facts.kaggle.session_length
    if whole is None:
        why = "LABKIT_SESSION_SECONDS, the length of the session, is not a number of seconds; launch would fail, too"
        return Diagnosis("session", "n/a", why, "correct or unset LABKIT_SESSION_SECONDS", "stop")
    why = f"estimated: {words.seconds(whole)} per session, minus the age of its oldest process"
    if facts.kaggle.session_seconds is None:
        return Diagnosis("session", "n/a", why)
    left = max(0.0, whole - facts.kaggle.session_seconds)
    todo = "by this estimate it has ended, so runs get no deadline: set deadline_seconds= or LABKIT_SESSION_SECONDS"
    if seconds := before_saving(left):
        after = words.seconds(seconds)
        todo = f"labkit's own scripts, started now, save and stop after {after}; deadline_seconds= overrides that"
    return Diagnosis("session", f"{words.seconds(left)} left", why, todo, "fine" if left >= LITTLE_TIME else "warning")


@detection
def disk(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    free, used = facts.kaggle.disk_free, facts.kaggle.disk_used
    known = [size for size in (free, None if used is None else max(0, SAVED - used)) if size is not None]
    why = "20 GB of /kaggle/working are kept when the session ends; everything else is lost"
    if not known:
        return Diagnosis("disk", "n/a", why)
    left = min(known)
    value = f"{gib(left)} left in /kaggle/working" + ("" if used is None else f", {gib(used)} used")
    if left >= LITTLE_DISK:
        return Diagnosis("disk", value, why)
    todo = "delete old runs and checkpoints: a new checkpoint is written before an old one is deleted"
    return Diagnosis("disk", value, why, todo, "warning")


@detection
def internet(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    if facts.kaggle.internet:
        return Diagnosis("internet", "yes", "pip and labkit.fetch can download")
    return Diagnosis(
        "internet",
        "n/a" if facts.kaggle.internet is None else "no",
        "pip and labkit.fetch cannot download",
        "Settings > Internet (asks for a verified phone number), or add what you need with Add Input",
        "note",
    )


@detection
def accelerator(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    names = [gpu.name for gpu in facts.hardware.gpus]
    if len(names) == 2 and all("T4" in name for name in names):
        return Diagnosis("accelerator", "GPU T4 x2", "one rank on each")
    value = ", ".join(names) or ("a TPU" if facts.kaggle.tpu else "none")
    why = "labkit does not use TPUs: ranks train on the CPU" if facts.kaggle.tpu else "two ranks need two GPUs"
    todo = "Settings > Accelerator > GPU T4 x2; with kaggle kernels push: --accelerator NvidiaTeslaT4"
    return Diagnosis("accelerator", value, why, todo, "note" if not names and not facts.kaggle.tpu else "warning")


@detection
def widgets(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    why = "widgets installed by pip (anywidget, plotly 6's FigureWidget) stay empty in the editor; labkit uses none"
    return Diagnosis("widgets", "those of ipywidgets only", why)


@detection
def inputs(facts: MachineFacts) -> Diagnosis | None:
    if facts.kaggle is None:
        return None
    known = ", ".join(f"labkit.fetch({name!r}) uses it" for name in facts.kaggle.data_sets)
    return Diagnosis("inputs", ", ".join(facts.kaggle.inputs) or "none", known or "read-only, below /kaggle/input")
