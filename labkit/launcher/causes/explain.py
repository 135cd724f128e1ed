"""Why a run failed: the first rank with a failure of its own, in one sentence.

torchrun blames the rank that exited first, which for hangs, early returns and mismatched collectives is a victim.
Here every rank writes its own record, and a rank that only lost its peer counts for less than the others.
"""

from __future__ import annotations

import re
from typing import Any

from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence, tail_text
from labkit.launcher.causes.failure_advice import BLOCKING, disk_advice, fragmented, memory_advice, memory_in_words
from labkit.launcher.causes.no_error import disagreed, exited, hung, left_early, vanished
from labkit.launcher.causes.node_loss import agent_killed, gone, parted
from labkit.launcher.causes.signals import killed, killer, signal_name
from labkit.record import End, RunFolder, number
from labkit.text import first_line, gib, last_line

__all__ = ["explain", "find_cause", "own_failures"]

# What a rank reports when another one is gone.
COLLATERAL = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|connectFullMesh"
    r"|remote process exited|ncclRemoteError|communicator was aborted|NCCL communicator|Socket Timeout"
    r"|Timed out waiting|failed to recv, got 0 bytes|Stop_waiting|SIGTERM",
    re.IGNORECASE,
)
# Later calls report these errors of a kernel.
LATE = re.compile(
    r"CUDA error: (device-side assert|an illegal|misaligned|unspecified launch|CUBLAS)|CUDNN_STATUS_EXECUTION_FAILED"
)
DEVICE_ASSERTION = re.compile(r": block: \[.*(Assertion `.*` failed)")  # printed by the kernel
WORKER_KILLED = "is killed by signal: Killed"  # a DataLoader's
NAMED_FAILURES = 3
UNFLUSHED = "120"  # the exit code of a Python that has run a script but cannot write what was printed


def find_cause(run: RunFolder, folder: RunFolder, exit_code: int, notice: str | None = None) -> dict[str, Any]:
    """The cause of an attempt that ended with torchrun's `exit_code`: `sentence`, and the details as fields
    (`kind`, `rank`, `exception`, `message`, `line`, `cell`, `origin`, `step`, `traceback`, `advice`).

    `folder` is the attempt's. `notice` is what the supervisor last reported about stalled ranks.
    """
    return explain(Evidence.gather(run, folder), exit_code, notice)


def explain(evidence: Evidence, exit_code: int, notice: str | None = None) -> dict[str, Any]:
    """The same from the evidence."""
    return (
        _failed(own_failures(evidence), evidence)
        or killed(evidence)
        or agent_killed(evidence)
        or gone(evidence)
        or _failed([failure for failure in exited(evidence) if not _mentions_others(failure)], evidence)
        or disagreed(evidence)
        or left_early(evidence)
        or parted(evidence)
        or hung(evidence, notice)
        or vanished(evidence)
        or _failed(evidence.failures, evidence)
        or _unexplained(evidence, exit_code)
    )


def own_failures(evidence: Evidence) -> list[dict[str, Any]]:
    """The records of ranks that failed for a reason of their own, oldest first."""
    return [failure for failure in evidence.failures if not is_collateral(failure)]


def is_collateral(failure: dict[str, Any]) -> bool:
    """Whether a rank failed only because another one was gone."""
    return failure["kind"] == "exception" and _mentions_others(failure)


def _mentions_others(failure: dict[str, Any]) -> bool:
    # Search the whole traceback: a library may have wrapped the connection error in its own.
    text = "".join(failure["traceback"]) + failure["message"]
    return bool(COLLATERAL.search(text))


def _failed(failures: list[dict[str, Any]], evidence: Evidence) -> dict[str, Any] | None:
    """The first of these failures as a cause, if there is one."""
    for failure in failures:
        _add_last_words(evidence.folder, failure)
    return _with_advice(_failure(failures, evidence), failures[0], evidence) if failures else None


def _add_last_words(folder: RunFolder, failure: dict[str, Any]) -> None:
    """A bare exit code explains nothing; the last line printed before it, such as argparse's, often does."""
    if failure["kind"] == "exit" and failure["message"].lstrip("-").isdigit():
        last = last_line(tail_text(folder.log(failure["rank"], "stderr"), LAST_WORDS_BYTES))
        end = End.read(folder.metrics(failure["rank"]))
        ended = end is not None and end.outcome == "finished"
        if ended and failure["message"] == UNFLUSHED:
            last = f"its script ended, and then Python could not flush stdout or stderr{f': {last}' if last else ''}"
        failure["message"] += f": {last}" if last else ""


def _failure(failures: list[dict[str, Any]], evidence: Evidence) -> dict[str, Any]:
    first = failures[0]
    same = [f for f in failures if _summary(f) == _summary(first)]  # further lines may name the rank
    who = (
        f"rank {first['rank']}{evidence.on_host(first['rank'])}"
        if len(same) == 1
        else f"ranks {', '.join(str(r) for r in sorted(f['rank'] for f in same))}"
    )
    what = first_line(first["message"])
    if first["kind"] == "exit":
        sentence = f"{who} exited with {what}" if re.match(r"-?\d+(:|$)", what) else f"{who} stopped: {what}"
    else:
        sentence = f"{who} failed: {_summary(first)}"
    if causes := [line for line in map(first_line, first.get("causes", [])[:NAMED_FAILURES]) if line]:
        sentence += f", caused by {'; '.join(causes)}"
    cause = {k: first[k] for k in ("kind", "rank", "exception", "message", "step", "time_ns")}
    if first["kind"] == "exception":
        cause["traceback"] = first["traceback"]
    where = evidence.locate(first.get("script_line"))
    others = [f for f in failures if f not in same and not is_collateral(f)]
    more = "".join(f"; rank {f['rank']} also failed: {_summary(f)}" for f in others[:NAMED_FAILURES])
    return cause | where | {"sentence": sentence + where.get("place", "") + more}


def _summary(failure: dict[str, Any]) -> str:
    return ": ".join(filter(None, (failure["exception"].split(".")[-1], first_line(failure["message"]))))


def _with_advice(cause: dict[str, Any], failure: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
    """Add what was in memory to an out-of-memory error, or the state of the disk, and what to change."""
    if WORKER_KILLED in " ".join([failure["message"], *failure.get("causes", [])]):
        by, out_of_memory = killer(evidence.home(failure["rank"]))
        who = cause["sentence"].partition(" failed: ")[0]  # its line is where the rank happened to be
        cause |= {"sentence": f"{who} failed: a DataLoader worker was killed (SIGKILL){by}"}
        host = {"out_of_memory": "host", "advice": memory_advice("host", evidence.script, {})}
        return cause | (host if out_of_memory else {})
    kind, memory = failure.get("out_of_memory"), failure.get("memory")
    if not kind and LATE.search(failure["message"]):
        first, also, others = cause["sentence"].partition("; rank ")
        printed = DEVICE_ASSERTION.search(tail_text(evidence.folder.log(failure["rank"], "stderr")))
        first += f": {printed[1]}" if printed else ""
        return cause | {"sentence": first + also + others, "advice": BLOCKING}
    options = evidence.manifest.parameters
    parameters = options if isinstance(options, dict) else {}
    measured = memory if isinstance(memory, dict) else {}
    if not kind and failure.get("perhaps_out_of_memory"):
        first, also, others = cause["sentence"].partition("; rank ")
        free, total = number(measured.get("free")), number(measured.get("total"))
        shown = f" ({gib(free)} of {gib(total)} were free)" if free is not None and total else ""
        advice = f"if it was the memory, {memory_advice('device', evidence.script, parameters)}"
        first += f"; cuDNN often fails this way when the device's memory is full{shown}"
        return cause | {"memory": memory, "sentence": first + also + others, "advice": advice}
    if not kind:
        advice = disk_advice(evidence.run, "".join(failure.get("traceback") or [str(failure.get("message"))]))
        return cause | ({"sentence": f"{cause['sentence']}; the disk is full", "advice": advice} if advice else {})
    history = evidence.history(failure["rank"])
    where = memory_in_words(kind, measured, history)
    has_expandable = "expandable_segments:True" in str(evidence.manifest.env)
    return cause | {
        "out_of_memory": kind,
        "memory": memory,
        "sentence": cause["sentence"].replace(" failed: ", f" ran out of {kind} memory: ", 1) + where,
        "advice": memory_advice(kind, evidence.script, parameters, 0.0 if has_expandable else fragmented(measured)),
    }


def _unexplained(evidence: Evidence, exit_code: int) -> dict[str, Any]:
    """No rank left a record: how torchrun ended, or the last line that the interpreter or torchrun printed."""
    if exit_code < 0:
        name = signal_name(-exit_code)
        return {"kind": "agent", "sentence": f"torchrun was killed ({name}), and its ranks with it"}
    logs = (path for home in evidence.homes() for path in sorted(home.torchrun_logs.rglob("stderr.log")))
    early = (tail_text(path, LAST_WORDS_BYTES) for path in logs)
    text = next((t for t in early if t.strip()), evidence.log).strip()
    if text in evidence.log and evidence.exits:
        rank, code = [*evidence.exits.items()][-1]
        last = f"according to its log, rank {rank}{evidence.on_host(rank)} ended first, with exit code {code}"
    else:
        last = f"the last line of its log: {last_line(text) or 'the log is empty'}"
    sentence = f"torchrun exited with code {exit_code} and no rank recorded why; {last}"
    return {"kind": "torchrun", "sentence": sentence, "traceback": text.splitlines(keepends=True)[-40:]}
