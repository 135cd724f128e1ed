"""Why a run failed: the rank that failed first for a reason of its own, in one sentence.

torchrun blames the rank it saw exit first, which for hangs, early returns and mismatched collectives is a victim.
Here every rank has written its own record; those that merely lost their neighbour rank below the others.
"""

from __future__ import annotations

import re
from typing import Any

from labkit.launcher.causes.advice import disk_advice, memory_advice, memory_in_words
from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence, tail_text
from labkit.launcher.causes.no_error import disagreed, exited, hung, left_early, vanished
from labkit.launcher.causes.node_loss import agent_killed, gone, parted
from labkit.launcher.causes.signals import killed, signal_name
from labkit.record import RunFolder
from labkit.record.text import first_line, last_line

__all__ = ["explain", "find_cause", "own_failures"]

# What a rank says when another one is gone.
COLLATERAL = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|connectFullMesh"
    r"|remote process exited|ncclRemoteError|communicator was aborted|NCCL communicator|Socket Timeout"
    r"|Timed out waiting|failed to recv, got 0 bytes|Stop_waiting|SIGTERM",
    re.IGNORECASE,
)
NAMED_FAILURES = 3


def find_cause(run: RunFolder, folder: RunFolder, exit_code: int, notice: str | None = None) -> dict[str, Any]:
    """The cause of an attempt that ended with torchrun's `exit_code`: `sentence`, and what is known as fields
    (`kind`, `rank`, `exception`, `message`, `line`, `cell`, `origin`, `step`, `traceback`, `advice`).

    `folder` is the attempt's. `notice` is what the supervisor saw of ranks that did not move before the end.
    """
    return explain(Evidence.gather(run, folder), exit_code, notice)


def explain(found: Evidence, exit_code: int, notice: str | None = None) -> dict[str, Any]:
    """The same from what was found."""
    return (
        _failed(own_failures(found), found)
        or killed(found)
        or agent_killed(found)
        or gone(found)
        or _failed([failure for failure in exited(found) if not _speaks_of_others(failure)], found)
        or disagreed(found)
        or left_early(found)
        or parted(found)
        or hung(found, notice)
        or vanished(found)
        or _failed(found.failures, found)
        or _unexplained(found, exit_code)
    )


def own_failures(found: Evidence) -> list[dict[str, Any]]:
    """What ranks said that failed for a reason of their own, oldest first."""
    return [failure for failure in found.failures if not is_collateral(failure)]


def is_collateral(failure: dict[str, Any]) -> bool:
    """Whether a rank failed only because another one was gone."""
    return failure["kind"] == "exception" and _speaks_of_others(failure)


def _speaks_of_others(failure: dict[str, Any]) -> bool:
    # In the whole traceback: a library may have wrapped the broken connection into an error of its own.
    text = "".join(failure["traceback"]) + failure["message"]
    return bool(COLLATERAL.search(text))


def _failed(failures: list[dict[str, Any]], found: Evidence) -> dict[str, Any] | None:
    """The first of these failures as a cause, if there is one."""
    for failure in failures:
        _add_last_words(found.folder, failure)
    return _with_advice(_failure(failures, found), failures[0], found) if failures else None


def _add_last_words(folder: RunFolder, failure: dict[str, Any]) -> None:
    """A bare exit code says nothing; the line printed just before it, argparse's for one, often does."""
    if failure["kind"] == "exit" and failure["message"].lstrip("-").isdigit():
        last = last_line(tail_text(folder.log(failure["rank"], "stderr"), LAST_WORDS_BYTES))
        failure["message"] += f": {last}" if last else ""


def _failure(failures: list[dict[str, Any]], found: Evidence) -> dict[str, Any]:
    first = failures[0]
    same = [f for f in failures if (f["exception"], f["message"]) == (first["exception"], first["message"])]
    who = (
        f"rank {first['rank']}{found.on_host(first['rank'])}"
        if len(same) == 1
        else f"ranks {', '.join(str(r) for r in sorted(f['rank'] for f in same))}"
    )
    what = first_line(first["message"])
    if first["kind"] == "exit":
        said = f"{who} exited with {what}" if re.match(r"-?\d+(:|$)", what) else f"{who} stopped: {what}"
    else:
        said = f"{who} failed: {_in_short(first)}"
    if causes := [line for line in map(first_line, first.get("causes", [])[:NAMED_FAILURES]) if line]:
        said += f", caused by {'; '.join(causes)}"
    cause = {k: first[k] for k in ("kind", "rank", "exception", "message", "step", "time_ns")}
    if first["kind"] == "exception":
        cause["traceback"] = first["traceback"]
    where = found.locate(first.get("script_line"))
    others = [f for f in failures if f not in same and not is_collateral(f)]
    more = "".join(f"; rank {f['rank']} also failed: {_in_short(f)}" for f in others[:NAMED_FAILURES])
    return cause | where | {"sentence": said + where.get("place", "") + more}


def _in_short(failure: dict[str, Any]) -> str:
    return ": ".join(filter(None, (failure["exception"].split(".")[-1], first_line(failure["message"]))))


def _with_advice(cause: dict[str, Any], failure: dict[str, Any], found: Evidence) -> dict[str, Any]:
    """With the memory that led to an error for want of it, or the state of the disk, and what to change."""
    kind, memory = failure.get("out_of_memory"), failure.get("memory")
    if not kind:
        advice = disk_advice(found.run, "".join(failure.get("traceback") or [str(failure.get("message"))]))
        return cause | ({"sentence": f"{cause['sentence']}; the disk is full", "advice": advice} if advice else {})
    history = found.histories.get(failure["rank"])
    where = memory_in_words(kind, memory if isinstance(memory, dict) else {}, history)
    given = found.manifest.get("parameters")
    parameters = given if isinstance(given, dict) else {}
    return cause | {
        "out_of_memory": kind,
        "memory": memory,
        "sentence": cause["sentence"].replace(" failed: ", f" ran out of {kind} memory: ", 1) + where,
        "advice": memory_advice(kind, found.script, parameters),
    }


def _unexplained(found: Evidence, exit_code: int) -> dict[str, Any]:
    """No rank left a record: what became of torchrun, or what the interpreter or torchrun itself said last."""
    if exit_code < 0:
        name = signal_name(-exit_code)
        return {"kind": "agent", "sentence": f"torchrun was killed ({name}); its ranks were ended with it"}
    logs = [place.torchrun_logs for place in found.homes()]
    early = [tail_text(p, 4000) for place in logs for p in sorted(place.rglob("stderr.log"))]
    text = next((t for t in early if t.strip()), found.log).strip()
    if text in found.log and found.exits:
        rank, code = [*found.exits.items()][-1]
        last = f"by its log, rank {rank}{found.on_host(rank)} was the first to end, with exit code {code}"
    else:
        last = f"the last line of its log: {last_line(text) or 'it said nothing'}"
    sentence = f"torchrun exited with code {exit_code} and no rank said why; {last}"
    return {"kind": "torchrun", "sentence": sentence, "traceback": text.splitlines(keepends=True)[-40:]}
