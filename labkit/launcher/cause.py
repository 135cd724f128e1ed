"""Why a run failed: the rank that failed first for a reason of its own, in one sentence.

torchrun blames the rank it saw exit first, which for hangs, early returns and mismatched collectives is a victim.
Here every rank has written its own record; those that merely lost their neighbour rank below the others.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from labkit.launcher.advice import CHECKED_CALLS, disk_advice, memory_advice, memory_in_words
from labkit.launcher.stacks import crash_frames
from labkit.launcher.stuck import disagreement, newest_of
from labkit.record import RankHistory, RunFolder, RunReader
from labkit.record.folder import read_json
from labkit.write import Script

__all__ = ["find_cause"]

# What a rank says when another one is gone.
COLLATERAL = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|connectFullMesh"
    r"|remote process exited|ncclRemoteError|communicator was aborted|NCCL communicator|Socket Timeout"
    r"|Timed out waiting|failed to recv, got 0 bytes|Stop_waiting|SIGTERM",
    re.IGNORECASE,
)
TIMEOUT = re.compile(r"Timed out waiting|Socket Timeout|collective operation timeout|timed out", re.IGNORECASE)
# torchrun's summary, one entry per rank it saw fail.
EXIT_CODE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
THROWN = re.compile(r"^\s*what\(\):\s*(.*)$", re.MULTILINE)  # of a C++ exception that nobody caught
NAMED_FAILURES = 3
CLOSED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
LOG_TAIL_BYTES = 200_000


def find_cause(run: RunFolder, folder: RunFolder, exit_code: int, notice: str | None = None) -> dict[str, Any]:
    """The cause of an attempt that ended with torchrun's `exit_code`: `sentence`, and what is known as fields
    (`kind`, `rank`, `exception`, `message`, `line`, `cell`, `origin`, `step`, `traceback`, `advice`).

    `folder` is the attempt's. `notice` is what the supervisor saw of ranks that did not move before the end.
    """
    manifest = run.read_manifest()
    name = Path(manifest["script"]["path"] or run.script).name
    script = Script.parse(folder.script.read_text(encoding="utf-8"), name=name)
    origins = manifest.get("cells", {})
    histories = RunReader(folder).read_all().ranks
    log = tail_text(folder.torchrun_log, LOG_TAIL_BYTES)
    exits = {int(rank): int(code) for rank, code in EXIT_CODE.findall(log)}
    failures = [e for rank in folder.started_ranks() if isinstance(e := read_json(folder.error(rank)), dict)]
    failures.sort(key=lambda e: e.get("time_ns", 0))
    own = [e for e in failures if not is_collateral(e)]
    # torchrun lists its root cause last. A rank that NCCL's watchdog aborted only waited for another.
    signalled = [r for r, c in exits.items() if c < 0 and -c != signal.SIGTERM and not _aborted_waiting(folder, r)]
    for failure in own:
        _add_last_words(folder, failure)
    if own:
        return _with_advice(_failure(own, script, origins), own[0], run, script, histories)
    if signalled:
        rank = signalled[-1]
        return _signal(run, folder, rank, -exits[rank], histories.get(rank), script)
    if differ := disagreement(_newest_collectives(folder)):
        return {"kind": "disagree", "sentence": f"the ranks disagree: {differ}"}
    if early := _left_early(histories):
        return early
    if hung := _hung(folder, failures, exits, histories):
        return hung | ({"sentence": f"{hung['sentence']}. Before that {notice}"} if notice else {})
    if gone := _vanished(folder, failures, exits, histories, log):
        return gone
    if failures:
        return _failure(failures, script, origins)
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return {"kind": "agent", "sentence": f"torchrun was killed ({name}); its ranks were ended with it"}
    return _unexplained(folder, log, exit_code)


def is_collateral(failure: dict[str, Any]) -> bool:
    """Whether a rank failed only because another one was gone."""
    # In the whole traceback: a library may have wrapped the broken connection into an error of its own.
    text = "".join(failure.get("traceback") or []) + str(failure.get("message", ""))
    return failure.get("kind") == "exception" and bool(COLLATERAL.search(text))


def oom_kills() -> int | None:
    """How many processes the system has killed for want of memory since boot; None where it does not tell."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def _add_last_words(folder: RunFolder, failure: dict[str, Any]) -> None:
    """A bare exit code says nothing; the line printed just before it, argparse's for one, often does."""
    if failure["kind"] == "exit" and failure["message"].lstrip("-").isdigit():
        lines = tail_text(folder.log(failure["rank"], "stderr"), 4000).strip().splitlines()
        if lines:
            failure["message"] += f": {lines[-1].strip()}"


def _failure(failures: list[dict[str, Any]], script: Script, origins: dict[str, Any]) -> dict[str, Any]:
    first = failures[0]
    same = [f for f in failures if (f["exception"], f["message"]) == (first["exception"], first["message"])]
    who = (
        f"rank {first['rank']}"
        if len(same) == 1
        else f"ranks {', '.join(str(r) for r in sorted(f['rank'] for f in same))}"
    )
    what = first["message"].splitlines()[0] if first["message"] else ""
    if first["kind"] == "exit":
        said = f"{who} exited with {what}" if re.match(r"-?\d+(:|$)", what) else f"{who} stopped: {what}"
    else:
        said = f"{who} failed: {first['exception'].split('.')[-1]}" + (f": {what}" if what else "")
    cause = {k: first[k] for k in ("kind", "rank", "exception", "message", "step", "time_ns")}
    if first["kind"] == "exception":
        cause["traceback"] = first["traceback"]
    where = locate(script, first.get("script_line"), origins)
    others = [f for f in failures if f not in same and not is_collateral(f)]
    more = "".join(f"; rank {f['rank']} also failed: {_in_short(f)}" for f in others[:NAMED_FAILURES])
    return cause | where | {"sentence": said + where.get("place", "") + more}


def _in_short(failure: dict[str, Any]) -> str:
    message = failure["message"].splitlines()
    return failure["exception"].split(".")[-1] + (f": {message[0]}" if message else "")


def locate(script: Script, line: int | None, origins: dict[str, Any]) -> dict[str, Any]:
    """Where a line of the script is: its cell, and the notebook cell it was taken from."""
    if not line:
        return {}
    found = script.cell_at(line)
    if found is None:
        return {"line": line, "place": f" ({script.name} line {line})"}
    cell, line_in_cell = found
    origin = (origins.get(cell.title) or {}).get("origin", "")
    from_notebook = f" from {origin}" if origin else ""
    place = f" ({script.name} line {line}, cell `{cell.title}`{from_notebook}, line {line_in_cell} of the cell)"
    return {"line": line, "cell": cell.title, "origin": origin, "line_in_cell": line_in_cell, "place": place}


def _with_advice(
    cause: dict[str, Any], failure: dict[str, Any], run: RunFolder, script: Script, histories: dict[int, RankHistory]
) -> dict[str, Any]:
    """With the memory that led to an error for want of it, or the state of the disk, and what to change."""
    kind, memory = failure.get("out_of_memory"), failure.get("memory")
    if not kind:
        advice = disk_advice(run, "".join(failure.get("traceback") or [str(failure.get("message"))]))
        return cause | ({"advice": advice} if advice else {})
    history = histories.get(failure["rank"])
    where = memory_in_words(kind, memory if isinstance(memory, dict) else {}, history)
    parameters = run.read_manifest().get("parameters") or {}
    return cause | {
        "out_of_memory": kind,
        "memory": memory,
        "sentence": cause["sentence"].replace(" failed: ", f" ran out of {kind} memory: ", 1) + where,
        "advice": memory_advice(kind, script, parameters),
    }


def _newest_collectives(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """The call that each rank made last, kept by the ranks that failed."""
    kept = {rank: read_json(folder.collectives(rank)) for rank in folder.started_ranks()}
    return {rank: newest_of(c["collectives"]) for rank, c in kept.items()
            if isinstance(c, dict) and isinstance(c.get("collectives"), list)}  # fmt: skip


def _signal(
    run: RunFolder, folder: RunFolder, rank: int, number: int, history: RankHistory | None, script: Script
) -> dict[str, Any]:
    """A rank that a signal ended: which, by whom, where in the script, with how much memory."""
    manifest = run.read_manifest()
    name = signal.Signals(number).name
    frames = crash_frames(folder.stacks(rank))  # faulthandler's; KILL leaves none
    path = str(manifest["script"]["path"] or run.script)
    line = next((frame.line for frame in frames if frame.file == path), None)
    where = locate(script, line, manifest.get("cells", {}))
    called = f" in `{frames[0].function}`" if frames and frames[0].file != path else ""
    by = _killer(run) if number == signal.SIGKILL else ""
    last = f", last seen at step {history.step}" if history else ""
    if history and history.memory_peak:
        last += f"; it held {history.memory_peak / 2**30:.2f} GiB ({history.memory_name}, peak)"
    thrown = THROWN.findall(tail_text(folder.log(rank, "stderr"), LOG_TAIL_BYTES))
    said = f": {thrown[-1].strip()}" if thrown else ""
    cause = {"kind": "signal", "rank": rank, "signal": name, "step": history.step if history else None} | where
    if number == signal.SIGABRT:
        cause["advice"] = f"if the ranks called collectives of different shapes or types, {CHECKED_CALLS}"
    return cause | {"sentence": f"rank {rank} was killed ({name}){by}{called}{where.get('place', '')}{last}{said}"}


def _killer(folder: RunFolder) -> str:
    before, now = (read_json(folder.agent) or {}).get("oom_kills"), oom_kills()
    if before is None or now is None:
        return " not by labkit: by the system, probably, because memory ran out"
    if now > before:
        return " by the system, because memory ran out"
    return " by another process, not by labkit (the system reports no kill for want of memory)"


def _aborted_waiting(folder: RunFolder, rank: int) -> bool:
    return "Watchdog caught collective operation timeout" in tail_text(folder.log(rank, "stderr"), LOG_TAIL_BYTES)


def _hung(
    folder: RunFolder, failures: list[dict[str, Any]], exits: dict[int, int], histories: dict[int, RankHistory]
) -> dict[str, Any] | None:
    """When ranks gave up waiting: the one that did not wait, or got least far, is who they waited for."""
    waited = {f["rank"] for f in failures if TIMEOUT.search(str(f.get("message", "")))}
    waited |= {rank for rank in exits if _aborted_waiting(folder, rank)}
    if not waited or len(histories) < 2:
        return None
    absent = [h for rank, h in histories.items() if rank not in waited] or list(histories.values())
    culprit = min(absent, key=lambda h: h.step)
    who = ", ".join(str(rank) for rank in sorted(waited - {culprit.rank}))
    sentence = (
        f"rank {culprit.rank} stopped answering (last seen at step {culprit.step}); rank {who} waited for it until the "
        "process group's time limit"
    )
    return {"kind": "hang", "rank": culprit.rank, "step": culprit.step, "sentence": sentence}


def _left_early(histories: dict[int, RankHistory]) -> dict[str, Any] | None:
    """A rank whose script ended without an error while others were still at it."""
    left = [h for h in histories.values() if h.end.get("outcome") in ("finished", "exited")]
    stayed = [h for h in histories.values() if h not in left]
    if not left or not stayed:
        return None
    first = min(left, key=lambda h: h.step)
    sentence = (
        f"rank {first.rank} ended at step {first.step} without an error while rank {stayed[0].rank} was at step "
        f"{stayed[0].step} and waited for it; do the ranks have different amounts of data, a `break` on one of them, "
        f"or does rank {stayed[0].rank} call one collective more?"
    )
    return {"kind": "early", "rank": first.rank, "step": first.step, "sentence": sentence}


def _vanished(
    folder: RunFolder,
    failures: list[dict[str, Any]],
    exits: dict[int, int],
    histories: dict[int, RankHistory],
    log: str,
) -> dict[str, Any] | None:
    """A rank that left no word, and that torchrun did not have to end: `os._exit`, or a library that calls it."""
    spoke = {f["rank"] for f in failures} | exits.keys()
    closed = set(CLOSED_BY_TORCHRUN.findall(log))
    for rank in histories.keys() - spoke:
        beat = read_json(folder.heartbeat(rank))
        if failures and isinstance(beat, dict) and str(beat.get("pid")) not in closed:
            step = histories[rank].step
            sentence = (
                f"rank {rank} ended without a word (os._exit?), last seen at step {step}; "
                f"rank {failures[0]['rank']} waited for it"
            )
            return {"kind": "early", "rank": rank, "step": step, "sentence": sentence}
    return None


def _unexplained(folder: RunFolder, log: str, exit_code: int) -> dict[str, Any]:
    """No rank left a record: what the interpreter or torchrun itself said last."""
    early = [tail_text(p, 4000) for p in sorted(folder.torchrun_logs.rglob("stderr.log"))]
    text = next((t for t in early if t.strip()), log).strip()
    last = text.splitlines()[-1].strip() if text else "it said nothing"
    sentence = f"torchrun exited with code {exit_code} and no rank said why; the last line of its log: {last}"
    return {"kind": "torchrun", "sentence": sentence, "traceback": text.splitlines(keepends=True)[-40:]}


def tail_text(path: Any, size: int) -> str:
    """The last `size` bytes of a log as text, whatever bytes are in it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
