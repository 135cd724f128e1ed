"""The files that a rank writes, and the variables that it finds in its environment.

A rank loads this module by its path before its script's first line, so it imports nothing but `os`.
"""

import os

# Set in the environment of every process of a run, so that all of them can be found.
MARKER = "LABKIT_RUN"
NODE_MARKER = "LABKIT_NODE"  # the process's node, in a run on several nodes
# Settings for the guest (worker/guest.py), which takes them out of the environment before the script's first line.
GUEST = "LABKIT_GUEST_"
FOLDER = f"{GUEST}FOLDER"  # the attempt's
MODULES = f"{GUEST}MODULES"  # where a script that is not the user's own file finds modules of the user's
PROFILE, TRACE_MEMORY = f"{GUEST}PROFILE", f"{GUEST}TRACE_MEMORY"  # "1"
WITNESS = f"{GUEST}WITNESS"  # "0" or "1", as the launch was told
REACHABLE = f"{GUEST}REACHABLE"  # for the supervisor: "0" or "1", as the launch was told
CELLS = f"{GUEST}CELLS"  # of ranks that wait for cells: the seconds without a notebook after which they end
HIDDEN = f"{GUEST}HIDDEN"  # names of other variables that it takes out, separated by commas
HOST = "LABKIT_HOST"  # the host's name in this run: hosts may share a name, and nodes a host

SCRIPT, RANKS = "script.py", "ranks"
METRICS, HEARTBEAT, STACKS, ERROR = "metrics.jsonl", "heartbeat.json", "stacks.txt", "error.json"
COLLECTIVES = "collectives.json"
RING, WITNESSED = "ring.bin", "witness.jsonl"
LOG_SIZES = "log_sizes.jsonl"  # by the sampler, see record/log_numbers.py
DIGESTS = "digests.jsonl"  # what is only read if a line of WITNESSED differs between ranks
INQUIRY, REQUESTS = "inquiry.json", "requests"  # in the attempt's folder, like RANKS
EVENTS, RESERVE = "events.jsonl", "reserve"

# The signal on which a rank's faulthandler dumps its stacks. Scripts use those that have names.
DUMP_SIGNAL = 62
# A heartbeat is written in place, so that its file never grows and is never incomplete.
HEARTBEAT_BYTES = 1024
HIGHEST_DESCRIPTOR = 1023  # the highest that select() takes
CHILD_STACKS = "labkit-stacks"  # the memory into which a child that a rank has forked dumps its stacks


class RankFile:
    """A file that a rank writes or reads, at a descriptor out of its script's way: scripts count theirs from 3 upwards.

    It is opened again when the script has closed all descriptors, as a daemon does: another file may have its number.
    """

    def __init__(self, path: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        self.path, self._flags = path, flags
        self._open()

    def _open(self) -> None:
        limit = os.sysconf("SC_OPEN_MAX")
        self.descriptor = min(HIGHEST_DESCRIPTOR, limit - 1) if limit > 0 else HIGHEST_DESCRIPTOR
        while self._status() is not None:
            self.descriptor -= 1
        file = os.open(self.path, self._flags | os.O_CLOEXEC, 0o600)
        try:
            os.dup2(file, self.descriptor, inheritable=False)
        finally:
            os.close(file)
        self._identity = self._status()

    def _status(self) -> "tuple[int, int] | None":
        """Which file has the descriptor now, if any."""
        try:
            status = os.fstat(self.descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def keep_open(self) -> bool:
        """Whether it had to be opened again, at another descriptor. Raises OSError."""
        if was_lost := self._status() != self._identity:
            self._open()
        return was_lost

    def write(self, data: bytes) -> None:
        """Append whole lines. Raises OSError."""
        self.keep_open()
        os.write(self.descriptor, data)

    def overwrite(self, data: bytes) -> None:
        """Write from the start of the file. Raises OSError."""
        self.keep_open()
        os.pwrite(self.descriptor, data, 0)

    def read(self, size: int) -> bytes:
        """The first bytes. Raises OSError."""
        self.keep_open()
        return os.pread(self.descriptor, size, 0)

    def let_go(self) -> None:
        """Discard what a forked child writes from now on, including what faulthandler writes."""
        if self._status() == self._identity:
            os.close(self.descriptor)
        self.path = os.devnull
        self._open()

    def keep_in_memory(self) -> None:
        """Write what a forked child writes from now on into memory of its own, where others can read it: in /proc."""
        try:
            file = os.memfd_create(CHILD_STACKS)
        except (AttributeError, OSError):  # macOS, or a sandbox
            self.let_go()
        else:
            if self._status() == self._identity:
                os.dup2(file, self.descriptor, inheritable=False)
            os.close(file)
