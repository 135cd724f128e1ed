"""The process that owns one node of a run on several: a prefix before a plain torchrun line, which works without it.

    python -m labkit.launcher.node RUN_FOLDER NODE_RANK [--attempt N] -- torchrun --nnodes 2 … train.py

It meets the other nodes in the run folder, which all hosts share, starts torchrun, and ends it when another node has
ended. Then it writes down how it went, waits for the others to do the same, and all come to the same cause. Exits with
0 when the run succeeded, 143 when it was stopped, otherwise with torchrun's code.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.errors import LabError, LaunchError
from labkit.launcher import checks
from labkit.launcher.causes.conclusion import conclusion
from labkit.launcher.causes.node_loss import MEETING_SECONDS
from labkit.launcher.causes.signals import oom_kills
from labkit.launcher.checkpoint_lock import lock_checkpoints
from labkit.launcher.hardware import usable_cores
from labkit.launcher.interface import interface_of, is_loopback, own_address_towards, resolved
from labkit.launcher.progress import Progress
from labkit.launcher.stop import GRACE_SECONDS, SAVING_SECONDS
from labkit.launcher.supervisor import Supervisor, prepare
from labkit.launcher.torchrun import rank_environment, script_folder
from labkit.record import Identity, Nodes, RunFolder, State, read_state, write_state
from labkit.record.files import ask_anew
from labkit.record.folder import NODE_MARKER, read_json, write_json
from labkit.record.identity import HOST, boot_id, host_name
from labkit.record.nodes import beat, is_on_this_host, last_beat, supervisor_of

__all__ = ["main"]

BEAT_SECONDS = 1.0
# So long may another node's heartbeat stand still: the attributes of a file on NFS may be 3 to 60 s old, but a file
# that is opened is asked for anew.
UNHEARD_SECONDS = 15.0
# When torchrun has ended here, for a node from which nothing more may come: with that, a shorter silence is telling.
PEER_SILENT_SECONDS = 6.0
# When another node has ended, ranks here nearly always fail by themselves within seconds, and say more than a TERM.
OWN_WORDS_SECONDS = 5.0
# A node may save its checkpoint before it ends, and be slow about it.
AGREE_SECONDS = SAVING_SECONDS + 30.0
LOOK_SECONDS = 0.2
# While all goes well. Every node opens files of every other, on one file server: of many it looks more rarely.
LOOK_AROUND_SECONDS = 0.5
PEERS_PER_SECOND = 16.0
CONCLUSIONS = ("succeeded", "failed", "stopped")
STOPPED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    where = words.index("--") if "--" in words else len(words)  # the first: the script may have one of its own
    parser = argparse.ArgumentParser("python -m labkit.launcher.node", usage="%(prog)s FOLDER NODE -- torchrun …")
    parser.add_argument("run_folder", type=RunFolder)
    parser.add_argument("node", type=int)
    parser.add_argument("--attempt", type=int, default=1)
    given = parser.parse_args(words[:where])
    command = words[where + 1 :]
    if not command:
        parser.error("no command: what follows -- is the torchrun line of this node")
    try:
        nodes = check_folder(given.run_folder, given.node)
        return NodeSupervisor(given.run_folder, nodes, given.node, given.attempt, command).see_to_the_end()
    except LabError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2


def check_folder(folder: RunFolder, node: int) -> Nodes:
    """Raises LaunchError when this host does not see the run that was launched."""
    manifest = read_json(folder.manifest)
    if not isinstance(manifest, dict) or manifest.get("id") != folder.id:
        raise LaunchError(
            f"host {host_name()} does not see {folder.path}: runs_dir must be on a file system that all hosts share"
        )
    nodes = Nodes.read(manifest)
    if nodes is None:
        raise LaunchError(f"{folder.id} is a run on one machine; it was not launched for several nodes")
    if not 0 <= node < nodes.count:
        raise LaunchError(f"{folder.id} has nodes 0 to {nodes.count - 1}; got node rank {node}")
    return nodes


class NodeSupervisor(Supervisor):
    """One node of one attempt, from before the others are there to the cause that all agree on."""

    def __init__(self, folder: RunFolder, nodes: Nodes, node: int, attempt: int, command: Sequence[str]):
        self.nodes, self.command, self.place = nodes, list(command), folder.attempt(attempt)
        home = self.place.node(node)
        _check_is_free(folder, self.place, nodes, node)
        os.environ[HOST] = self.name = os.environ.get(HOST) or nodes.name(node) or host_name()
        home.path.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, home=home, node=node)
        self.node: int = node
        self.called = f"the supervisor on {self.name}"
        self.state = replace(self.state, attempt=attempt)
        self.peers = {n: _Peer(self.place.node(n)) for n in range(nodes.count) if n != node}
        self.head = _option(self.command, "--master-addr") or "localhost"
        self.address = None
        with suppress(LaunchError):  # said when the others are there to read it
            self.address = own_address_towards(resolved(self.head))
        self.looks_every = min(max(LOOK_AROUND_SECONDS, len(self.peers) / PEERS_PER_SECOND), PEER_SILENT_SECONDS / 2)
        self.looked = 0.0  # when last at the others
        self.bereft: float | None = None  # since when another node is known to have ended

    def see_to_the_end(self) -> int:
        self.write(self.state)
        if self.node == 0:
            prepare(self.folder, self.place)
        self.home.keep_reserve()
        self.home.outcome.write_text("null\n")  # there before anybody looks for it, see `ask_anew`
        threading.Thread(target=self.beat, name="labkit-node", daemon=True).start()
        outcome: dict[str, Any] = {"exit_code": None, "killed": 0, "why": None}
        try:
            if (why := self.meet()) is not None:
                outcome["why"] = why
            else:
                code, why, killed = self.train()
                outcome |= {"exit_code": code, "why": why, "killed": killed}
        except LabError as error:  # something of this host's is not what it must be
            outcome["why"] = {"kind": "host", "sentence": f"{self.name}: {error}"}
        except Exception as error:  # nothing of the run stays behind, whatever became of this process's own work
            sentence = f"labkit's supervisor on {self.name} failed, and the run was ended: {error!r}"
            outcome |= {"why": {"kind": "supervisor", "sentence": sentence}, "killed": self.sweep()}
        final = self.agree(outcome)
        for folder in (self.home, *([self.place] if self.node == 0 else [])):
            folder.reserve.unlink(missing_ok=True)
        if final.state == "stopped":
            return STOPPED
        code = final.exit_code or 0
        return 0 if final.state == "succeeded" else code if 0 < code < 256 else 1

    def beat(self) -> None:
        while True:
            with suppress(OSError):  # a full disk, a deleted folder; the others will notice
                beat(self.home, self.name, self.address)
            ask_anew(self.folder.path)  # for stop.json
            time.sleep(BEAT_SECONDS)

    def meet(self) -> dict[str, Any] | None:
        """Until all nodes have begun; why not, when they do not. Raises LaunchError when this one cannot take part."""
        if self.node == 0:
            check_port(_option(self.command, "--master-port"), self.name)
            if chosen := self.manifest["parameters"].get("checkpoint_dir"):
                lock_checkpoints(Path(self.manifest["cwd"], chosen), self.folder)  # for as long as this process lives
        deadline = time.monotonic() + MEETING_SECONDS
        while not all(peer.has_begun() for peer in self.peers.values()):
            if found := self.reason_to_stop():
                return found[0]
            if time.monotonic() > deadline:
                return {"kind": "missing", "sentence": "not all nodes have begun"}
        return None

    def train(self) -> tuple[int, dict[str, Any] | None, int]:
        """Start torchrun and see it through."""
        logs = str(self.folder.node(self.node).torchrun_logs)
        command = [str(self.home.torchrun_logs) if word == logs else word for word in self.command]
        agent = self.start_agent(command, self.environment(), self.place, self.home.torchrun_log)
        return self.see_through(agent, self.place)

    def environment(self) -> dict[str, str]:
        """What the ranks of this node are given: the settings of this host. Raises LaunchError."""
        path = self.manifest["script"]["path"]
        environment, _ = rank_environment(
            os.environ,
            self.place,
            nproc_per_node=self.nodes.nproc_per_node,
            cores=usable_cores() // self.nodes.sharing(self.node),
            script_dir=script_folder(path) if path else str(self.manifest["cwd"]),
            interface=self.interface(),
        )
        checks.check_interface(environment["GLOO_SOCKET_IFNAME"])
        return environment | {NODE_MARKER: str(self.node)}

    def interface(self) -> str:
        """The network interface towards the other nodes. Raises LaunchError where names lead nowhere.

        On the first node the name of the head is its own, which installers write into /etc/hosts as 127.0.1.1.
        """
        alone = all(is_on_this_host(peer.home) for peer in self.peers.values())
        if self.address is None or alone or not is_loopback(self.address):
            return interface_of(self.address or own_address_towards(resolved(self.head)))
        if self.node:
            raise LaunchError(
                f"the first host, {self.head}, resolves to {resolved(self.head)} here, which is this host itself; "
                "correct /etc/hosts, or give its address instead of its name"
            )
        theirs = (peer.address for peer in self.peers.values())
        return interface_of(own_address_towards(next(filter(None, theirs), self.address)))

    def reason_to_stop(self) -> tuple[dict[str, Any], float] | None:
        found = super().reason_to_stop()
        if found is None and time.monotonic() - self.looked > self.looks_every:
            self.looked = time.monotonic()
            if self.bereft is None and not all(peer.is_fine() for peer in self.peers.values()):
                self.bereft = self.looked
        if found is not None or self.bereft is None:
            return found
        if time.monotonic() - self.bereft < OWN_WORDS_SECONDS:
            return None
        return {"kind": "others", "sentence": "another node of the run has ended"}, GRACE_SECONDS

    def watch(self, folder: RunFolder, progress: Progress) -> tuple[dict[str, Any], float] | None:
        """One node looks whether ranks move, for all of them; an end that is under way is no stand-still."""
        try:
            return super().watch(folder, progress) if self.node == 0 and self.bereft is None else None
        except OSError as error:  # a file server that stumbles is no reason to end a run
            print(f"whether the ranks move could not be seen: {error}", flush=True)
            return None

    def agree(self, outcome: Mapping[str, Any]) -> State:
        """Say how it ended here, hear how it ended elsewhere, and write what follows from all of it."""
        ended = {"decided": self.decided or time.time(), "ended": time.time()}
        own = {**outcome, **ended, "oom_kills": oom_kills(), "notice": self.state.notice}
        with suppress(OSError):
            write_json(self.home.outcome, own, reserve=self.home.reserve)
        went_well = outcome["exit_code"] == 0 and outcome["why"] is None  # then the others may take their time
        deadline = math.inf if went_well else time.monotonic() + AGREE_SECONDS
        while not all(peer.is_over() for peer in self.peers.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        ask_anew(self.place.ranks)
        kept = {"exit_code": outcome["exit_code"], "killed": outcome["killed"]}
        settled = next((state for peer in self.peers.values() if (state := peer.conclusion()) is not None), None)
        try:
            name, cause = (settled.state, settled.cause) if settled else conclusion(self.folder, self.place)
        except Exception as error:  # a true "failed" matters more than its explanation
            sentence = f"torchrun exited with code {outcome['exit_code']}; explaining it failed: {error!r}"
            name, cause = "failed", {"kind": "unknown", "sentence": sentence}
        final = self.ended(name, cause=cause, checkpoint=self.folder.newest_checkpoint(), **kept)
        self.write(final)
        self.speak_for_the_dead(final)
        return final

    def speak_for_the_dead(self, final: State) -> None:
        """Of those that are left the first writes down the end of those that cannot."""
        alive = [node for node, peer in self.peers.items() if peer.is_there(PEER_SILENT_SECONDS)]
        for node, peer in self.peers.items():
            if node not in alive and self.node <= min([self.node, *alive]) and peer.conclusion() is None:
                with suppress(OSError):  # a full disk; a run that was deleted stays so
                    peer.home.path.mkdir(exist_ok=True)
                    write_state(peer.home, replace(final, exit_code=None, killed=0))


class _Peer:
    """Another node, as its files tell."""

    def __init__(self, home: RunFolder):
        self.home = home
        self._beat: Any = None
        self._identity: Identity | None = None  # both are written once
        self._outcome: dict[str, Any] | None = None
        self._heard = time.monotonic()
        self._looked = -LOOK_SECONDS

    def has_begun(self) -> bool:
        self._look()
        return self._beat is not None

    @property
    def address(self) -> str | None:
        """Its own, where it is one that others can reach."""
        said = (last_beat(self.home) or {}).get("address")
        return said if isinstance(said, str) and not is_loopback(said) else None

    def is_there(self, patience: float = UNHEARD_SECONDS) -> bool:
        """Whether it has begun and can still be heard. By this host's clock only: theirs may differ."""
        self._look()
        if self._beat is None or time.monotonic() - self._heard > patience:
            return False
        self._identity = identity = self._identity or supervisor_of(self.home)
        return identity is None or identity.boot != boot_id() or identity.is_alive()

    def is_fine(self) -> bool:
        """Whether nothing is known to be amiss there: not yet begun, under way, or ended well."""
        if (end := self._end()) is not None:
            return end.get("exit_code") == 0 and end.get("why") is None
        return not self.has_begun() or self.is_there() or self._end() is not None

    def is_over(self) -> bool:
        """Whether nothing more is to be heard of it."""
        return self._end() is not None or not self.is_there(PEER_SILENT_SECONDS)

    def conclusion(self) -> State | None:
        """What it has concluded, if it has."""
        state = read_state(self.home) if self.home.state.exists() else None
        return state if state is not None and state.state in CONCLUSIONS else None

    def _end(self) -> dict[str, Any] | None:
        if self._outcome is None and isinstance(end := read_json(self.home.outcome), dict):
            self._outcome = end
        return self._outcome

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._beat is None:
            ask_anew(self.home.path.parent)
            ask_anew(self.home.path)
        said = last_beat(self.home)
        if said != self._beat:
            self._beat, self._heard = said, self._looked


def _check_is_free(run: RunFolder, place: RunFolder, nodes: Nodes, node: int) -> None:
    """A node of an attempt begins once, and not when the others have ended: its line may have been pasted late, or its
    job put back into the queue after somebody has stopped the run."""
    identity = supervisor_of(place.node(node))
    if identity is not None:
        where = f"pid {identity.pid} on {identity.host}"
        raise LaunchError(f"node {node} of this run has been started before ({where}); launch the run anew")
    for home in (run, place, *(place.node(n) for n in range(nodes.count))):
        said = read_json(home.state)
        if isinstance(said, dict) and said.get("state") in CONCLUSIONS:
            sentence = (said.get("cause") or {}).get("sentence") or said["state"]
            raise LaunchError(f"the run was over before node {node} began: {sentence}")


def check_port(port: str | None, host: str) -> None:
    """Nobody else listens where the ranks are to meet; torchrun would wait there for a store that never answers."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", int(port or 0)))
        except OSError:
            raise LaunchError(f"port {port}, where the ranks are to meet, is in use on {host}; launch anew") from None
        except (ValueError, OverflowError):
            raise LaunchError(f"--master-port must be a port, 1 to 65535, got {port!r}") from None


def _option(command: Sequence[str], name: str) -> str | None:
    """The value of one of torchrun's options, `--name value` or `--name=value`."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name or word.startswith(f"{name}="):
            return following if word == name else word.removeprefix(f"{name}=")
    return None


if __name__ == "__main__":
    sys.exit(main())
