"""The process that owns one node of a multi-node run: a prefix to a plain torchrun line, which also works without it.

    python -m labkit.launcher.node RUN_FOLDER NODE_RANK [--attempt N] -- torchrun --nnodes 2 … train.py

It waits for the other nodes in the run folder, which all hosts share, starts torchrun, and stops it when another node
has ended. Then it records its outcome and waits for the cause of the run, which the first live node derives from the
outcomes of all. Exits with 0 when the run succeeded, 143 when it was stopped, otherwise with torchrun's exit code.

Node 0 reads the files of all nodes, and its heartbeat tells the others what concerns them: if every node read those of
all others, the load of the file server would grow with the square of their number.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from labkit.errors import LabError, LaunchError
from labkit.files import in_parallel, log, read_object, refresh
from labkit.hardware import check_interface, interface_of, is_loopback, own_address_towards, resolved
from labkit.host import Identity, host_name
from labkit.launcher.carried import enter
from labkit.launcher.causes.explain import conclusion
from labkit.launcher.causes.killed import oom_kills
from labkit.launcher.locks import lock_checkpoints
from labkit.launcher.peers import (
    CONCLUSIONS,
    ENDING_TIMEOUT_SECONDS,
    MEETING_SECONDS,
    POLL_SECONDS,
    WORKS,
    Outcome,
    Peer,
)
from labkit.launcher.shutdown import LEFT_SECONDS, Leftovers
from labkit.launcher.stalls import Progress
from labkit.launcher.stop_condition import StopIf
from labkit.launcher.stopping import SAVING_SECONDS, StopRequest
from labkit.launcher.supervisor import Supervisor, prepare
from labkit.launcher.torchrun_command import rank_environment
from labkit.rank_files import HOST, MODULES, NODE_MARKER
from labkit.record import Cause, Node, NodeFold, Nodes, RunFolder, State
from labkit.witness import Judge

BEAT_SECONDS = 1.0
# When another node has ended, ranks here usually fail by themselves within seconds, with a better message than a TERM.
OWN_FAILURE_SECONDS = 5.0
# A node may save its checkpoint before it ends, which may be slow.
AGREE_SECONDS = SAVING_SECONDS + 30.0
# How often to read the peers' files during training. With many nodes it is less often: all share one file server.
PEER_POLL_SECONDS = 0.5
NODES_PER_SECOND = 128.0
PEERS_PER_SECOND = 32.0  # once the first node is gone, when all look at each other
LONGEST_POLL_SECONDS = ENDING_TIMEOUT_SECONDS / 2
# What node 0 tells the others in its heartbeat.
STARTED, ENDED, ONE_WORKS = "all_started", "one_ended", "one_works"
STOPPED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    where = words.index("--") if "--" in words else len(words)  # the first one; the script may have its own
    parser = argparse.ArgumentParser("python -m labkit.launcher.node", usage="%(prog)s FOLDER NODE -- torchrun …")
    parser.add_argument("run_folder", type=RunFolder)
    parser.add_argument("node", type=int)
    parser.add_argument("--attempt", type=int, default=1)
    options = parser.parse_args(words[:where])
    command = words[where + 1 :]
    if not command:
        parser.error("no command; expected this node's torchrun command after --")
    try:
        nodes = check_folder(options.run_folder, options.node)
        command = enter(options.run_folder, command)
        return NodeSupervisor(options.run_folder, nodes, options.node, options.attempt, command).run_node()
    except LabError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2


def check_folder(folder: RunFolder, node: int) -> Nodes:
    """Raise LaunchError when this host cannot see the run folder, or the run has no such node."""
    manifest = folder.glimpsed_manifest()
    if manifest.id != folder.id:
        raise LaunchError(
            f"host {host_name()} cannot see {folder.path}: runs_dir must be on a file system that all hosts share"
        )
    nodes = manifest.nodes
    if nodes is None:
        raise LaunchError(f"{folder.id} is a single-node run; expected a multi-node run")
    if not 0 <= node < nodes.count:
        raise LaunchError(f"{folder.id} has nodes 0 to {nodes.count - 1}; got node rank {node}")
    return nodes


class NodeSupervisor(Supervisor):
    """One node of one attempt, from waiting for the other nodes to the cause that all of them agree on."""

    def __init__(self, folder: RunFolder, nodes: Nodes, node: int, attempt: int, command: Sequence[str]):
        self.nodes, self.command, self.attempt_folder = nodes, list(command), folder.attempt(attempt)
        home = self.attempt_folder.node(node)
        _check_is_free(folder, self.attempt_folder, node)
        os.environ[HOST] = self.name = os.environ.get(HOST) or nodes.name(node) or host_name()
        home.path.mkdir(parents=attempt > 1, exist_ok=True)  # not a run folder that was removed meanwhile
        super().__init__(folder, home=home, node=node)
        self.node: int = node
        self.ranks = nodes.ranks_of(node)
        if node == 0:  # it judges for all ranks
            everyone = range(self.manifest.world_size)
            self.judge = Judge(self.attempt_folder, everyone, self.manifest.name, self.locate)
            self.stop_if = StopIf(self.manifest.stop_if, self.attempt_folder) if self.manifest.stop_if else None
        self.title = f"the supervisor on {self.name}"
        self.state = replace(self.state, attempt=attempt)
        self.peers = {n: Peer(self.attempt_folder.node(n)) for n in range(nodes.count) if n != node}
        self.head = _option(self.command, "--master-addr") or "localhost"
        self.address = None
        with suppress(LaunchError):  # raised later, by `interface`, where it becomes the outcome
            self.address = own_address_towards(resolved(self.head))
        self.look_seconds = min(nodes.count / NODES_PER_SECOND, LONGEST_POLL_SECONDS)
        self.polled = 0.0  # when the peers' files were last read
        self.unwritten: Outcome | None = None  # the outcome, until it is written
        self.may_fail = False  # whether there are ranks, which may fail on their own
        self.have_all_started = False
        self.peer_ended: float | None = None  # when a node, perhaps this one, was seen to have ended badly
        self.works: bool | None = None  # whether ranks here still work after an interrupt
        self.news = threading.Event()  # set if the next heartbeat has news

    def run_node(self) -> int:
        if self.node == 0:
            prepare(self.folder, self.attempt_folder)
        self.home.keep_reserve()
        self.home.outcome.write_text("null\n")  # exists before a peer looks for it, see `refresh`
        with suppress(OSError):
            Node(self.home).beat(self.name, self.address)
        self.write(self.state)  # after the heartbeat, because a node with a state and without one counts as lost
        threading.Thread(target=self.beat, name="labkit-node", daemon=True).start()
        if self.nodes.are_folded:
            threading.Thread(target=self.fold, name="labkit-fold", daemon=True).start()
        code, why, killed = None, None, 0
        try:
            if (why := self.meet()) is None:
                code, why, killed = self.train()
        except LabError as error:  # this host is misconfigured
            why = Cause("host", f"{self.name}: {error}")
        except Exception as error:  # whatever failed here, leave no process of the run behind
            why = Cause("supervisor", f"labkit's supervisor on {self.name} failed and the run was stopped: {error!r}")
            killed = self.sweep()
        final = self.agree(code, why, killed)
        for folder in (self.home, *([self.attempt_folder] if self.node == 0 else [])):
            folder.reserve.unlink(missing_ok=True)
        self.wait_for_leftovers()
        if final.state == "stopped":
            return STOPPED
        code = final.exit_code or 0
        return 0 if final.state == "succeeded" else code if 0 < code < 256 else 1

    def beat(self) -> None:
        while True:
            self.news.clear()
            news = {STARTED: self.have_all_started, ENDED: self.peer_ended is not None}
            if self.works is not None:
                others = self.node == 0 and any(in_parallel(Peer.works, list(self.peers.values())))
                news |= {WORKS: self.works, ONE_WORKS: self.works or others}
            with suppress(OSError):  # a full disk, a deleted folder; the peers will notice
                Node(self.home).beat(self.name, self.address, **news)
            refresh(self.folder.path)  # for stop.json
            self.news.wait(BEAT_SECONDS)

    def fold(self) -> None:
        """Fold this node's ranks for readers, as long as this process lives. Nothing depends on it."""
        fold = NodeFold(self.folder, self.attempt_folder, self.home, self.nodes.ranks_of(self.node))
        while True:
            with suppress(Exception):  # a full disk, a deleted folder
                fold.update()
            time.sleep(BEAT_SECONDS)

    def meet(self) -> Cause | None:
        """Wait until all nodes have started; returns the cause if they do not. Raises LaunchError."""
        if self.node == 0:
            check_port(_option(self.command, "--master-port"), self.name)
            if chosen := self.manifest.parameters.get("checkpoint_dir"):
                lock_checkpoints(Path(str(chosen)).absolute(), self.folder)  # for as long as this process lives
        deadline = time.monotonic() + MEETING_SECONDS
        while not self.all_have_started():
            if reason := self.reason_to_stop():
                return reason[0]
            if time.monotonic() > deadline:
                return Cause("missing", "not all nodes have started")
        return None

    def all_have_started(self) -> bool:
        refresh(self.attempt_folder.nodes)
        if self.node:
            return self.peers[0].reports(STARTED)
        if all(in_parallel(Peer.has_started, list(self.peers.values()))):
            self.have_all_started = True
            self.news.set()
        return self.have_all_started

    def train(self) -> tuple[int, Cause | None, int]:
        """Start torchrun and wait for it to exit."""
        logs = str(self.folder.node(self.node).torchrun_logs)
        command = [str(self.home.torchrun_logs) if word == logs else word for word in self.command]
        agent = self.start_agent(command, self.environment(), self.attempt_folder, self.home.torchrun_log)
        return self.supervise(agent, self.attempt_folder)

    def environment(self) -> dict[str, str]:
        """The environment of this node's ranks, with the settings of this host. Raises LaunchError."""
        modules = {} if self.manifest.script.path else {MODULES: str(Path.cwd())}
        environment, _ = rank_environment(os.environ, modules, self.interface())
        check_interface(environment["GLOO_SOCKET_IFNAME"])
        return environment | {NODE_MARKER: str(self.node)}

    def interface(self) -> str:
        """The network interface that leads to the other nodes. Raises LaunchError if a host name does not resolve.

        On the first node the head's name is its own, which Linux installers write into /etc/hosts as 127.0.1.1.
        """
        alone = all(Node(peer.home).is_on_this_host() for peer in self.peers.values())
        if self.address is None or alone or not is_loopback(self.address):
            return interface_of(self.address or own_address_towards(resolved(self.head)))
        if self.node:
            raise LaunchError(
                f"the first host, {self.head}, resolves to {resolved(self.head)} here, which is this host; "
                "fix /etc/hosts, or pass the IP address instead of the name"
            )
        addresses = (peer.address for peer in self.peers.values())
        return interface_of(own_address_towards(next(filter(None, addresses), self.address)))

    def reason_to_stop(self, *, wait: bool = True) -> tuple[Cause, StopRequest] | None:
        reason = super().reason_to_stop(wait=wait)
        if reason is None and time.monotonic() - self.polled > max(PEER_POLL_SECONDS, self.look_seconds):
            self.look_at_peers()
        if reason is not None or self.peer_ended is None:
            return reason
        self.may_fail = self.may_fail or bool(self.attempt_folder.started_ranks())
        if self.may_fail and time.monotonic() - self.peer_ended < OWN_FAILURE_SECONDS:
            return None
        return Cause("others", "another node of the run has ended"), StopRequest()

    def shut_down(self, agent: Identity, request: StopRequest) -> int:
        killed = super().shut_down(agent, request)
        self.works = None if self.works is None else False
        return killed

    def others_work(self, works: bool) -> bool:
        """Whether ranks of other nodes work, as far as the first node knows, which reads the files of all."""
        if works != self.works:
            self.works = works
            self.news.set()
        if self.node:
            return self.peers[0].reports(ONE_WORKS)
        return any(in_parallel(Peer.works, list(self.peers.values())))

    def look_at_peers(self) -> None:
        """Notice when another node has failed, was stopped or is gone, and tell the others."""
        self.polled = time.monotonic()
        if self.peer_ended is None and not self.peers_are_fine():
            self.peer_ended = self.polled
            self.news.set()

    def peers_are_fine(self) -> bool:
        """Whether no peer has a problem, as far as the first live node knows, which looks at all of them."""
        for node in range(self.node):
            if not self.peers[node].is_fine():
                return False
            if self.peers[node].is_alive():
                return not self.peers[node].reports(ENDED)
        return all(in_parallel(Peer.is_fine, list(self.peers.values())))

    def watch(self, folder: RunFolder, progress: Progress) -> tuple[Cause, StopRequest] | None:
        """Node 0 watches the progress of all ranks, until a node has ended: ranks that exit are not stalled."""
        try:
            return super().watch(folder, progress) if self.node == 0 and self.peer_ended is None else None
        except OSError as error:  # a transient error of the file server must not end the run
            log(f"the progress of the ranks could not be read: {error}")
            return None

    def agree(self, code: int | None, why: Cause | None, killed: int) -> State:
        """Write this node's outcome, wait for the others', and write the final state that follows from all."""
        decided = self.decided or time.time()
        self.unwritten = Outcome(code, killed, why, decided, time.time(), oom_kills(), self.state.notice)
        went_well = self.unwritten.went_well  # then wait for the others without a limit
        if not went_well and self.peer_ended is None:
            self.peer_ended = time.monotonic()
            self.news.set()  # a heartbeat can be written on a full disk
        settled = self.wait_for_others(math.inf if went_well else time.monotonic() + AGREE_SECONDS)
        refresh(self.attempt_folder.ranks)
        if self.node == 0 and self.peer_ended is not None:
            self.look_for_findings("failed")  # they may be the cause
        try:
            name, cause = (settled.state, settled.cause) if settled else conclusion(self.folder, self.attempt_folder)
        except Exception as error:  # a correct "failed" matters more than its explanation
            name = "failed"
            cause = Cause("unknown", f"torchrun exited with code {code}; finding the cause failed: {error!r}")
        if name == "succeeded":  # Slurm would have to hold the nodes of a job for them
            seconds = 0.0 if self.folder.job.exists() else LEFT_SECONDS
            self.leftovers = Leftovers(self.folder, self.home, self.node, self.name, seconds)
        elif went_well:
            killed += self.sweep()
        checkpoint = self.folder.newest_checkpoint()
        final = self.ended(name, cause=cause, checkpoint=checkpoint, exit_code=code, killed=killed)
        self.write(final)
        if settled is None:
            in_parallel(partial(_write_missing_state, final), list(self.peers.values()))
        return final

    def write_outcome(self) -> None:
        """Write the outcome once; on a full disk, try again at the next call, because the others wait for it."""
        if self.unwritten is not None:
            with suppress(OSError):
                self.unwritten.write(self.home)
                self.unwritten = None

    def wait_for_others(self, deadline: float) -> State | None:
        """The final state that another node has written, usually the first; None if this is the first live node and all
        others have ended."""
        earlier = [self.peers[node] for node in range(min(self.node, 1))]
        while time.monotonic() < deadline:
            self.write_outcome()
            if settled := next(filter(None, in_parallel(Peer.conclusion, earlier)), None):
                return settled
            if not any(in_parallel(Peer.is_alive_at_the_end, earlier)):
                if len(earlier) == self.node:
                    break
                earlier = [self.peers[node] for node in range(self.node)]  # the first node is gone
            pause = max(POLL_SECONDS, self.look_seconds / 2, len(earlier) / PEERS_PER_SECOND)
            time.sleep(min(pause, LONGEST_POLL_SECONDS))
        others = list(self.peers.values())
        while not all(in_parallel(Peer.has_ended, others)) and time.monotonic() < deadline:
            self.write_outcome()
            self.look_at_peers()  # those that are still training learn of a failure from this node's heartbeat
            time.sleep(max(POLL_SECONDS, self.look_seconds / 2))
        return next(filter(None, in_parallel(Peer.conclusion, others)), None)


def _write_missing_state(final: State, peer: Peer) -> None:
    """Write the final state of a node that is gone, unless it has one."""
    if not peer.is_alive_at_the_end() and peer.conclusion() is None:
        with suppress(OSError):  # a full disk; or the run was deleted
            peer.home.path.mkdir(exist_ok=True)
            replace(final, exit_code=None, killed=0).write(peer.home)


def _check_is_free(run: RunFolder, attempt: RunFolder, node: int) -> None:
    """Raise LaunchError if the node has started in this attempt, or the others have ended: its command may have been
    pasted late, or its job requeued after the run was stopped."""
    identity = Node(attempt.node(node)).supervisor()
    if identity is not None:
        where = f"pid {identity.pid} on {identity.host}"
        raise LaunchError(f"node {node} of this run was already started ({where}); launch the run again")
    for home in (run, attempt, attempt.node(0), attempt.node(node)):  # the last one is written for it, see `agree`
        state = read_object(home.state)
        if state.get("state") in CONCLUSIONS:
            cause = Cause.decode(state.get("cause"))
            why = cause.sentence if cause else state["state"]
            raise LaunchError(f"the run had ended before node {node} started: {why}")


def check_port(port: str | None, host: str) -> None:
    """Check that the rendezvous port is free; otherwise torchrun would wait for a store that never answers. Raises
    LaunchError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", int(port or 0)))
        except OSError:
            raise LaunchError(f"the rendezvous port {port} is in use on {host}; launch the run again") from None
        except (ValueError, OverflowError):
            raise LaunchError(f"--master-port must be a port number, 1 to 65535, got {port!r}") from None


def _option(command: Sequence[str], name: str) -> str | None:
    """The value of one of torchrun's options, `--name value` or `--name=value`."""
    for word, following in pairwise([*command, ""]):
        if word == name or word.startswith(f"{name}="):
            return following if word == name else word.removeprefix(f"{name}=")
    return None


if __name__ == "__main__":
    sys.exit(main())
