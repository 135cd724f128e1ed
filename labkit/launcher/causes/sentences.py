"""Words the sentences that state a cause: each kind of cause has its words here, and nowhere else."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from labkit.launcher.causes.evidence import MOSTLY, Failure, Whereabouts
from labkit.launcher.causes.failure_advice import fragmented
from labkit.launcher.causes.flight_recorder import RecordedCall
from labkit.record import Place, RankHistory
from labkit.text import first_line, gib

NAMED_FAILURES, NAMED_WAITERS = 3, 4
IDLE = 0.1  # of a core
Killer = Literal["system", "process", "unknown"]
BY = {
    "system": " by the system because memory ran out",
    "process": " by another process, not by labkit (the system reports no out-of-memory kill)",
    "unknown": ", not by labkit; probably by the system because memory ran out",
}


def failed(who: str, failure: Failure, where: Place | None, detail: str = "", others: Sequence[Failure] = ()) -> str:
    """Say that a rank raised or exited. `detail` follows its place in the script, then the failures of other ranks."""
    what = first_line(failure.message)
    if failure.kind == "exit":
        ended = f"exited with {what}" if re.match(r"-?\d+(:|$)", what) else f"stopped: {what}"
    elif failure.out_of_memory:
        ended = f"ran out of {failure.out_of_memory} memory: {failure.summary}"
    else:
        ended = f"failed: {failure.summary}"
    origins = [line for line in map(first_line, failure.causes[:NAMED_FAILURES]) if line]
    caused = f", caused by {'; '.join(origins)}" if origins else ""
    more = "".join(f"; rank {other.rank} also failed: {other.summary}" for other in others[:NAMED_FAILURES])
    waited = "; it then waited for the others while it handled this" if failure.handles else ""
    return f"{who} {ended}{caused}{at(where)}{waited}{detail}{more}"


def worker_died(who: str, pid: str, code: int | None, by: Killer | None) -> str:
    """Say how a DataLoader worker died, without the script's line, which is where the rank happened to be."""
    if code is None:
        how = "exited unexpectedly"
    elif code < 0:
        how = f"was killed ({signal_name(-code)}){BY[by] if by else ''}"
        how += "; perhaps its shared memory (/dev/shm) is full" * (code == -signal.SIGBUS)
    else:
        how = f"exited with code {code}"
    return f"{who} failed: its DataLoader worker (pid {pid}) {how}"


def perhaps_out_of_memory(free: float | None, total: float | None) -> str:
    shown = f" ({gib(free)} of {gib(total)} were free)" if free is not None and total else ""
    return f"; cuDNN often fails this way when the device's memory is full{shown}"


def memory_in_words(kind: str, memory: Mapping[str, float], history: RankHistory | None) -> str:
    """What a rank's memory held when it ran out: `; 13.9 of 14.7 GiB were allocated (parameters 3.1 GiB, …)`."""
    peak = history.memory_peak if history else 0.0
    if kind == "host":
        most = memory.get("peak") or peak
        return f"; it held up to {gib(most)} (resident set)" if most else ""
    if history and history.memory_name == "resident set":  # a CPU's, which says nothing of the device that is full
        peak = 0.0
    allocated, total = memory.get("allocated") or peak, memory.get("total") or 0.0
    held = {name: size for name, size in (history.held if history else {}).items() if size}
    shares = [f"{name} {gib(size)}" for name, size in held.items()]
    if held and allocated > sum(held.values()):
        shares.append(f"activations and buffers {gib(allocated - sum(held.values()))}")
    usage = f"; {gib(allocated)}{f' of {gib(total)}' if total else ''} were allocated" if allocated else ""
    others = total - memory.get("free", 0.0) - memory.get("reserved", 0.0)
    outside = f", {gib(others)} of the device were held by other processes, CUDA or NCCL" if others > 2**30 else ""
    idle = fragmented(memory)
    apart = f", {gib(idle)} reserved but unallocated" if idle else ""
    if not usage and shares:
        usage, shares = f"; after its first step it held {', '.join(shares)}", []
    return usage + (f" ({', '.join(shares)})" if shares else "") + apart + outside


def unflushed(last_line: str) -> str:
    """Say what exit code 120 means."""
    return f"its script ended, and then Python could not flush stdout or stderr{f': {last_line}' if last_line else ''}"


def killed(
    who: str,
    name: str,
    by: Killer | None,
    *,
    function: str,
    where: Place | None,
    history: RankHistory | None,
    held: float,
    thrown: str,
) -> str:
    """Say that a signal killed a rank, in `function` of a library, when it `held` so many bytes."""
    called = f" in `{function}`" if function else ""
    last = f", last seen at step {history.step}" if history else ""
    most = f"; it held {gib(held)} ({history.memory_name}, peak)" if history and held else ""
    message = f": {thrown}" if thrown else ""
    return f"{who} was killed ({name}){BY[by] if by else ''}{called}{at(where)}{last}{most}{message}"


def other_message(who: str, name: str, function: str, where: Place | None, got: str, expected: str) -> str:
    """Say that gloo killed a rank whose receive met a longer message."""
    return (
        f"{who} received a message of {int(got):,} bytes in a `{function}` for {int(expected):,} bytes{at(where)}, "
        f"for which gloo aborted it ({name})"
    )


def met(who: str, function: str, where: Place | None) -> str:
    """Say where a rank was killed because its collective met another one."""
    call = f" in `{function}`" if function and not function.startswith("_") else ""
    return f". gloo aborted {who}{call}{at(where)} because its collective met another one, or one of another size"


def in_text(line: int, message: str) -> str:
    """Say what `labkit check` finds in a line of the script."""
    return f"`labkit check` says of line {line}: {message}"


def in_past(notice: str) -> str:
    """A notice about ranks that have stalled, of a run that has ended."""
    return re.sub(r"\b(has|have) made (?=(no )?progress since)", "had made ", notice)


def capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def torchrun_killed(number: int, host: str = "") -> str:
    return f"torchrun{f' on {host}' if host else ''} was killed ({signal_name(number)}), and its ranks with it"


def disagreed(first: tuple[int, RecordedCall], other: tuple[int, RecordedCall]) -> str:
    """Say in which collective two ranks differ."""
    (rank, call), (other_rank, other_call) = first, other
    return (
        f"the ranks disagree: as collective #{call.number}{call.group_in_words} rank {rank} called "
        f"{call.name}({call.shapes}), rank {other_rank} called {other_call.name}({other_call.shapes})"
    )


def hung(who: str, program: str, step: int, waiting: Sequence[int], notice: str | None) -> str:
    """Say that a rank stopped answering; `notice` is what the supervisor reported before."""
    what = f"had become `{program}`, which labkit cannot see into" if program else "stopped answering"
    before = f". Before that {in_past(notice)}" if notice else ""
    waited = f"{ranks_in_words(waiting)} waited for it until the process group's timeout"
    return f"{who} {what} (last seen at step {step}); {waited}{before}"


def never_joined(who: str, instead: str, waiter: str, seconds: float) -> str:
    """Say that a rank had not called init_process_group; `instead` is what it did, if that is known."""
    did = f": {instead}" if instead else ""
    return f"{who} never joined the process group{did}; {waiter} waited for it for {seconds:g} s"


def too_many_ranks(missing: int, size: int, waiter: str) -> str:
    """Say that a script waits for ranks that torchrun has not started."""
    return (
        f"rank {missing} never joined the process group, because it does not exist: the run has {size} ranks, and the "
        f"script asks for more (world_size=… or os.environ['WORLD_SIZE']?); {waiter} waited for it"
    )


def instead(at: Whereabouts, place: str) -> str:
    """Say that a rank was still at a place."""
    function = " at its top level" if at.function == "<module>" else f" in `{at.function}`"
    return f"had been{function}{place} for {at.seconds:.0f} s"


def waited_for(who: str, at: Whereabouts, place: str, waiter: str, more: int) -> str:
    """Say that a rank was still at a place when another one, and so many `more`, reached the time limit."""
    others = f" and {more} more" if more else ""
    did = "was idle" if at.busy < IDLE else "was computing" if at.busy >= MOSTLY else "used the CPU"
    cpu = f"it {did} ({at.busy:.0%} of a core)"
    pool = ": a multiprocessing.Pool waits for ever if one of its processes was killed" if at.pooled else ""
    return f"{who} {instead(at, place)} when {waiter}{others} timed out waiting for it; {cpu}{pool}"


def waited_for_worker(who: str, at: Whereabouts, waiter: str, more: int, notice: str | None) -> str:
    """As `waited_for`, of a rank that itself waited for a worker of its DataLoader, of which the `notice` has told."""
    others = f" and {more} more" if more else ""
    before = f". Before that {in_past(notice)}" if notice else ""
    return (
        f"{who} had waited for its DataLoader's worker (pid {at.worker}) for {at.seconds:.0f} s when {waiter}{others} "
        f"timed out waiting for it{before}"
    )


def waiter(who: str, call: str, place: str) -> str:
    """``rank 0 in `recv` from rank 1 (train.py line 7)``"""
    return f"{who}{f' in {call}' if call else ''}{place}"


def waited_mutually(places: Sequence[str]) -> str:
    """Say that ranks waited for each other, each at its place."""
    more = f" and {len(places) - NAMED_WAITERS} more" if len(places) > NAMED_WAITERS else ""
    shown = ", ".join(places[:NAMED_WAITERS])
    return f"the ranks waited for each other until the process group's timeout: {shown}{more}"


def exited_early(who: str, step: int, place: str, waiting: RankHistory) -> str:
    """Say that a rank left by sys.exit, without an error, while another one waited for it."""
    return f"{who} exited at step {step}{place} without an error, while rank {waiting.rank} waited for it"


def left_early(who: str, step: int, waiting: RankHistory, place: str, in_backward: Place | None) -> str:
    """Say that a rank ended while another one waited for it at a place, or in a backward pass."""
    rank, done = f"rank {waiting.rank}", f"{who} ended at step {step} without an error while"
    if in_backward:
        return (
            f"{done} {rank} had gone on to the backward pass after step {waiting.step}{at(in_backward)} and waited for "
            f"it: {who} had less data, left its loop early (`break`) or skipped a step (`continue`)"
        )
    return (
        f"{done} {rank}, at step {waiting.step}, waited for it{place}. Check whether ranks have different amounts of "
        f"data, one of them leaves its loop early (`break`), or {rank} calls one more collective"
    )


def vanished(who: str, program: str, step: int, waiting: int) -> str:
    how = f"had become `{program}`, which ended without an error" if program else "ended without an error (os._exit?)"
    return f"{who} {how}, last seen at step {step}; rank {waiting} waited for it"


def missing(nodes: Sequence[str], count: int, seconds: float) -> str:
    """Say which nodes, such as `1 (hB)`, did not connect."""
    return f"node{'s' * (len(nodes) != 1)} {', '.join(nodes)} of {count} did not connect within {seconds:.0f} s"


def lost(hosts: Sequence[str], since: float) -> str:
    """Say which hosts have sent no heartbeat since then, in seconds since the epoch."""
    who, why = f"host {hosts[0]} was", "its supervisor is gone (killed, or the machine went down)"
    if len(hosts) > 1:
        who, why = f"hosts {', '.join(hosts)} were", "their supervisors are gone (killed, or the machines went down)"
    return f"{who} lost at {_clock(since)}: {why}"


def parted(hosts: Sequence[str], since: float, limit: float) -> str:
    """Say which hosts lost contact; `limit` is the process group's timeout in seconds, 0 if it is unknown."""
    return (
        f"hosts {', '.join(hosts[:-1])} and {hosts[-1]} lost contact at {_clock(since)}: their ranks waited for each "
        f"other until the process group's timeout{f' ({limit:g} s)' if limit else ''}"
    )


def unexplained(code: int, last_line: str, ended_first: tuple[str, int] | None) -> str:
    """Say how torchrun ended; `ended_first` is a rank and its exit code, if its log says no more than that."""
    if ended_first:
        last = f"according to its log, {ended_first[0]} ended first, with exit code {ended_first[1]}"
    else:
        last = f"the last line of its log: {last_line or 'the log is empty'}"
    return f"torchrun exited with code {code} and no rank recorded why; {last}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 1` · `ranks 0, 2`"""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def at(where: Place | None) -> str:
    """` (train.py line 3)`"""
    return f" ({where})" if where else ""


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
