"""Each guard taken out once: the fault test that is there for it must fail, otherwise it proves nothing.

    python benchmarks/mutants.py [part of a name …]        (some ten minutes for all)

Works on a copy of the checkout; prints one line per guard, exits with 1 when a test passed without its guard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODES, HOSTS = "../cluster/test_nodes.py", "../cluster/test_hosts.py"  # the latter needs root
LAUNCHER, WORKER, RECORD = "labkit/launcher/", "labkit/worker/", "labkit/record/"
CAUSES = LAUNCHER + "causes/"
CHECKPOINTS, STREAMING = "scripts/extras/checkpoints.py", "scripts/extras/streaming.py"


@dataclass(frozen=True)
class Mutant:
    """In `file`, `guard` is replaced by `without`; then `test` (a file and a -k expression) must fail."""

    name: str
    file: str
    guard: str
    without: str
    test: tuple[str, str]


def matrix(expression: str) -> tuple[str, str]:
    return "test_matrix.py", expression


MUTANTS = [
    Mutant(
        "collateral ranks below primary",
        CAUSES + "evidence.py",
        "bool(COLLATERAL.search(self.text))",
        "False",
        matrix("I6-return-2"),
    ),
    Mutant("who left early", CAUSES + "waits.py", "if not finished or not running:", "if True:", matrix("I6-return-2")),
    Mutant(
        "who vanished",
        CAUSES + "waits.py",
        "if evidence.failures and evidence",
        "if False and evidence",
        matrix("I6v-vanish-2"),
    ),
    Mutant("who was waited for", CAUSES + "waits.py", "if not timed_out or", "if True or", matrix("I7-hang")),
    Mutant(
        "whose calls differ",
        CAUSES + "waits.py",
        "if differ else None",
        "if False else None",
        matrix("I9-collective"),
    ),
    Mutant("killed by a signal", CAUSES + "killed.py", "    if not ranks:", "    if True:", matrix("I3-sigkill-2")),
    Mutant(
        "where a signal hit",
        WORKER + "guest.py",
        "faulthandler.enable(self.stacks.descriptor)",
        "pass",
        matrix("I5-sigsegv"),
    ),
    Mutant("what C++ threw", CAUSES + "sentences.py", "if thrown else", "if False else", matrix("I9s")),
    Mutant(
        "the GIL before a group is destroyed",
        WORKER + "measures/communication.py",
        "time.sleep(RELEASE_SECONDS)",
        "pass",
        ("../integration/test_launch.py", "freed_right_after"),
    ),
    Mutant(
        "an overflow is not fed back",
        "scripts/extras/ddp_options.py",
        ".nan_to_num_(0, 0, 0)",
        "",
        ("../strategies/test_talk_less.py", "overflow"),
    ),
    Mutant("host memory", WORKER + "failure.py", "HOST_MEMORY.search(text)", "False", matrix("I4")),
    Mutant("the other failure", CAUSES + "sentences.py", "others[:NAMED_FAILURES]", "others[:0]", matrix("I2")),
    Mutant(
        "ranks that see no TERM",
        LAUNCHER + "supervisor.py",
        "not (pids := closing.overdue(seconds))",
        "not (pids := set[int]())",
        ("test_gpus.py", "term_are_ended"),
    ),
    Mutant(
        "the original class",
        "labkit/errors.py",
        "if original is not None and",
        "if False and",
        ("test_matrix.py", "original_exception"),
    ),
    Mutant(
        "ranks answer",
        WORKER + "guest.py",
        "[self.answer, self.beat]",
        "[self.beat]",
        ("test_stuck.py", "is_found and hang"),
    ),
    Mutant(
        "a signal while the GIL is held",
        CAUSES + "stacks.py",
        "LIBC.syscall(call, pid, thread, number)",
        "1",
        ("test_stuck.py", "is_found and gil"),
    ),
    Mutant(
        "the signal to the answering thread",
        CAUSES + "stacks.py",
        "(call, pid, thread, number)",
        "(call, pid, pid, number)",
        ("test_stuck.py", "inquiry"),
    ),
    Mutant(
        "what a supervisor has inherited",
        LAUNCHER + "stopping.py",
        "for p in descendants(supervisor, folder.marker)}",
        "for p in ()}",
        ("test_orphans.py", "stopped_supervisor"),
    ),
    Mutant(
        "what descended from a dead supervisor",
        LAUNCHER + "stopping.py",
        "candidates += recorded",
        "pass",
        ("test_orphans.py", "supervisor_was_killed"),
    ),
    Mutant(
        "other runs",
        LAUNCHER + "stopping.py",
        "process.ppid() in pids and not _is_another_runs(process, run_id)",
        "process.ppid() in pids",
        ("test_orphans.py", "another_run"),
    ),
    Mutant(
        "a final state is final",
        LAUNCHER + "supervisor.py",
        "        if State.is_settled(self.home):  # by a process that did not wait for us\n            return\n",
        "",
        ("../unit/test_state.py", "takes_long_to_start"),
    ),
    Mutant(
        "a stopped process",
        CAUSES + "stuck.py",
        'if r.process == "stopped"',
        "if False",
        ("test_stuck.py", "is_found and sigstop"),
    ),
    Mutant(
        "the notice",
        LAUNCHER + "stalls.py",
        "stalled and set(stalled) != self._ranks and is_settled:",
        "False:",
        ("test_stuck.py", "is_found and hang"),
    ),
    Mutant(
        "slow is not stuck",
        LAUNCHER + "stalls.py",
        "PATIENCE_SECONDS + 2 * self._step_seconds",
        "1.2",
        ("test_stuck.py", "slow"),
    ),
    Mutant(
        "the watchdog",
        LAUNCHER + "supervisor.py",
        "progress.idle_seconds <= self.watchdog:",
        "True:",
        ("test_stuck.py", "watchdog"),
    ),
    Mutant(
        "retries",
        LAUNCHER + "supervisor.py",
        "self.manifest.retries",
        "0",
        ("test_retries.py", "as_if_nothing and single"),
    ),
    Mutant(
        "only failures are restarted",
        LAUNCHER + "supervisor.py",
        'final.state != "failed" or',
        "False or",
        ("test_retries.py", "as_if_nothing and single"),
    ),
    Mutant(
        "checksums",
        CHECKPOINTS,
        "if digest(path / name) != files.get(name)]",
        "if False]",
        ("test_checkpoints.py", "flipped and distcp"),
    ),
    Mutant(
        "random states",
        CHECKPOINTS,
        "set_random_state(saved)",
        "pass",
        ("test_checkpoints.py", "mid_epoch"),
    ),
    Mutant(
        "the command line's learning rate",
        CHECKPOINTS,
        "if name not in own}",
        "if True}",
        ("test_checkpoints.py", "weight_decay"),
    ),
    Mutant(
        "what validation noted",
        CHECKPOINTS,
        'self.notes.update(state.get("notes", {}))',
        "pass",
        ("test_checkpoints.py", "best_is_kept"),
    ),
    Mutant(
        "where a stream was",
        STREAMING,
        'self.dataset.load_state_dict(notes["stream"])',
        "pass",
        ("test_checkpoints.py", "stream"),
    ),
    Mutant(
        "a stream's next pass",
        STREAMING,
        "self.dataset.load_state_dict(self.fresh)",
        "pass",
        ("test_checkpoints.py", "stream"),
    ),
    Mutant(
        "a stop waits for a checkpoint",
        RECORD + "folder.py",
        "            return any(\n",
        "            return False and any(\n",
        ("test_checkpoints.py", "lets_the_checkpoint"),
    ),
    Mutant(
        "room for a checkpoint",
        CHECKPOINTS,
        "if final.exists() or free < needed:",
        "if final.exists():",
        ("test_disk.py", "not_started"),
    ),
    Mutant(
        "room for the last words",
        RECORD + "folder.py",
        "self.reserve.write_bytes(bytes(RESERVE_BYTES))",
        "pass",
        ("test_disk.py", "fills_the_disk"),
    ),
    Mutant(
        "the probe on a full disk",
        WORKER + "recorder.py",
        "            self.drop(error)\n\n",
        "            raise\n\n",
        ("test_disk.py", "continues"),
    ),
    Mutant(
        "a deleted folder",
        LAUNCHER + "supervisor.py",
        "if not is_deleted(self.folder.state):",
        "if True:",
        ("test_disk.py", "deleted"),
    ),
    Mutant(
        "a folder that was moved",
        LAUNCHER + "supervisor.py",
        "            link.replace(old)  # also the link of an earlier move\n",
        "",
        ("test_identity.py", "is_renamed"),
    ),
    Mutant(
        "a copy of a folder",
        LAUNCHER + "stopping.py",
        "    if not State.written(folder).is_final:  # else there is nothing to stop",
        "    if False:",
        ("test_identity.py", "a_copy_reaches"),
    ),
    Mutant(
        "the run of another user",
        LAUNCHER + "stopping.py",
        'folder.check_own("stop it")',
        "pass",
        ("test_identity.py", "another_user"),
    ),
    Mutant(
        "a name server that does not answer",
        LAUNCHER + "stalls.py",
        "SLOW_SECONDS = 2.0",
        "SLOW_SECONDS = 2000.0",
        ("test_host_names.py", "does_not_answer"),
    ),
    Mutant(
        "the host's own name",
        LAUNCHER + "torchrun_command.py",
        ', "--local-addr", "localhost"]',
        "]",
        ("test_host_names.py", "own_name"),
    ),
    Mutant(
        "the sweep",
        LAUNCHER + "stopping.py",
        "                process.kill()\n",
        "                pass\n",
        ("test_orphans.py", "ranks_have_started"),
    ),
    Mutant(
        "bounded logs", "labkit/run.py", "file.seek(omitted)", "omitted = 0; file.seek(0)", ("test_load.py", "flood")
    ),
    Mutant("no terminal codes", "labkit/text.py", 'ANSI.sub("", ', "str(", ("test_load.py", "hostile")),
    Mutant(
        "held GPUs",
        LAUNCHER + "starting.py",
        "if not shares_gpus and",
        "if False and",
        ("test_gpus.py", "refused_to_the_next"),
    ),
    Mutant(
        "the ladder",
        "labkit/link/measure.py",
        "for rung in NCCL_LADDER",
        "for rung in NCCL_LADDER[:1]",
        ("test_gpus.py", "climbed"),
    ),
    Mutant(
        "the allowlist",
        LAUNCHER + "torchrun_command.py",
        "if (k in RECORDED or k.startswith(RECORDED_PREFIXES))",
        "if (True)",
        ("test_secrets.py", ""),
    ),
    Mutant(
        "another node's agent",
        CAUSES + "explain.py",
        "        or agent_killed(evidence)\n",
        "",
        (NODES, "killed_agent"),
    ),
    Mutant("a node that is gone", CAUSES + "explain.py", "        or lost(evidence)\n", "", (NODES, "is_gone")),
    Mutant(
        "a node ends with the others",
        LAUNCHER + "node.py",
        "self.peer_ended < OWN_FAILURE_SECONDS",
        "self.peer_ended >= 0",
        (NODES, "do_not_notice"),
    ),
    Mutant(
        "a node that is done waits", LAUNCHER + "node.py", "math.inf if went_well else ", "", (NODES, "takes_longer")
    ),
    Mutant(
        "a node's own processes", LAUNCHER + "stopping.py", "{NODE_MARKER: str(node)}", "{}", (NODES, "killed_agent")
    ),
    Mutant(
        "the word for the dead",
        LAUNCHER + "node.py",
        "in_parallel(partial(_write_missing_state, final), list(self.peers.values()))",
        "pass",
        (NODES, "is_gone"),
    ),
    Mutant(
        "the interface between hosts",
        LAUNCHER + "node.py",
        "modules, self.interface())",
        "modules, 'lo')",
        (HOSTS, "whatever and 127"),
    ),
    Mutant(
        "a cable that is cut", CAUSES + "explain.py", "        or lost_contact(evidence)\n", "", (HOSTS, "cut_cable")
    ),
    Mutant(
        "an interrupt for the ranks",
        LAUNCHER + "shutdown.py",
        "os.kill(self._agent.pid, signal.SIGINT)",
        "os.kill(self._agent.pid, signal.SIGTERM)",
        ("test_interrupts.py", "keyboard_interrupt"),
    ),
    Mutant(
        "time to save after an interrupt",
        LAUNCHER + "shutdown.py",
        "return now - max(worked, self._changed) if hearing else math.inf",
        "return math.inf",
        ("test_interrupts.py", "cut_it_off"),
    ),
    Mutant(
        "ranks that hear of it later",
        LAUNCHER + "shutdown.py",
        " or left.keys() != self._ranks.keys():",
        ":",
        ("test_interrupts.py", "may_save_too"),
    ),
    Mutant(
        "ranks that never see an interrupt",
        LAUNCHER + "shutdown.py",
        "            if activity.seconds_idle() > IDLE_SECONDS:\n                return\n",
        "",
        ("test_interrupts.py", "c_code"),
    ),
    Mutant(
        "ranks that ignore an interrupt",
        LAUNCHER + "shutdown.py",
        'signal.SIGINT) != "ignored"]',
        "signal.SIGINT)]",
        ("test_interrupts.py", "ignore_an_interrupt"),
    ),
    Mutant(
        "ranks that save on another node",
        LAUNCHER + "node.py",
        "self.peers[0].reports(ONE_WORKS)",
        "False",
        (NODES, "time_to_save and True"),
    ),
    Mutant(
        "time for a handler of TERM",
        LAUNCHER + "shutdown.py",
        "torchrun_seconds() if handling and not is_idle else GRACE_SECONDS",
        "GRACE_SECONDS",
        ("test_interrupts.py", "handles_term"),
    ),
    Mutant(
        "a handler that puts itself away",
        LAUNCHER + "shutdown.py",
        "            handling &= left.keys()\n",
        '            handling = {r for r in left if disposition(left[r].pid, signal.SIGTERM) == "handled"}\n',
        ("test_interrupts.py", "handles_term"),
    ),
    Mutant(
        "what a rank leaves running",
        LAUNCHER + "supervisor.py",
        "        if code or why:\n",
        "        if True:\n",
        ("test_left_running.py", "an_upload"),
    ),
    Mutant(
        "its time is limited",
        LAUNCHER + "shutdown.py",
        "time.monotonic() < self._until and ",
        "",
        ("test_left_running.py", "time_is_up"),
    ),
    Mutant(
        "the checkpoint folder is free",
        LAUNCHER + "supervisor.py",
        "            unlock_checkpoints(self.folder.checkpoint_folder())\n",
        "",
        ("test_left_running.py", "another_run_may_save"),
    ),
    Mutant(
        "shared memory is freed",
        LAUNCHER + "stopping.py",
        "(cleans_up(process) and seconds < CLEANING_SECONDS)",
        "False",
        ("test_left_running.py", "shared_memory and raise"),
    ),
    Mutant(
        "a final state is final for a stop",
        LAUNCHER + "stopping.py",
        'if before.is_final and before.state != "lost":',
        "if False:",
        ("test_left_running.py", "final_state_stays"),
    ),
    Mutant(
        "threads that raised",
        LAUNCHER + "supervisor.py",
        'if name == "succeeded":',
        "if False:",
        ("test_background_errors.py", "named"),
    ),
    Mutant(
        "what only looks like a report",
        CAUSES + "background_errors.py",
        "if outermost and",
        "if False and",
        ("test_background_errors.py", "no_alarm"),
    ),
    Mutant(
        "ranks that are other programs",
        LAUNCHER + "supervisor.py",
        "                programs.update()\n",
        "                pass\n",
        ("test_programs.py", "neither_stuck"),
    ),
    Mutant(
        "a rank that is still itself",
        LAUNCHER + "rank_processes.py",
        " and _has_open(process.pid, self._attempt.heartbeat(rank)) is False",
        "",
        ("test_programs.py", "before_it_execs"),
    ),
]


def survives(mutant: Mutant) -> str:
    """Why the test did not fail; empty when it did, as it must."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch, "labkit")
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        file = copy / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.guard) != 1:
            return f"its guard is {text.count(mutant.guard)} times in {mutant.file}"
        file.write_text(text.replace(mutant.guard, mutant.without), encoding="utf-8")
        name, expression = mutant.test
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/faults/{name}"]
        done = subprocess.run(
            [*command, "-m", "not kaggle", "-k", expression],
            cwd=copy,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(copy)},
        )
    return "" if done.returncode == 1 else f"pytest exited with {done.returncode}: {done.stdout.strip()[-200:]}"


def main() -> int:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    alive = 0
    for mutant in chosen:
        problem = survives(mutant)
        alive += bool(problem)
        said = f"SURVIVES ({problem})" if problem else "caught"
        print(f"{mutant.name:<34} {' -k '.join(mutant.test):<48} {said}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} guards, taken out, make their test fail")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
