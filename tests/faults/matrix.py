"""The faults that a run must survive being explained: what is done to it, and whom labkit must name for what.

Read by the tests and by the command that writes docs/evidence/faults.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from faults.scene import FAULTY

__all__ = ["FAULTS", "FAULTY", "GROUP_TIMEOUT", "HANGS", "LEAVING", "Fault"]

HANGS, LEAVING = FAULTY.with_name("hangs.py"), FAULTY.with_name("leaving.py")
GROUP_TIMEOUT = 12  # seconds, of the process group


@dataclass(frozen=True)
class Fault:
    """`fault` is faulty.py's; `says` must be found in the sentence; `rank` is the culprit, None where there is none."""

    id: str
    what: str
    fault: str
    says: str
    rank: int | None = 1
    ranks: tuple[int, ...] = (2,)
    args: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        return ["--fault", self.fault, "--timeout", str(GROUP_TIMEOUT), *self.args]


FAULTS = [
    Fault("I1", "one rank raises", "raise", r"^rank 1 failed: ValueError: boom <script>.* line \d+\)$", ranks=(2, 4)),
    Fault("I1l", "one rank raises a message of 5 MB", "long", r"^rank 1 failed: ValueError: boom \(.* line \d+\)$"),
    Fault("I1m", "an exception whose __str__ raises", "mute", r"^rank 1 failed: .*Mute: <exception str\(\) failed>"),
    Fault("I2", "two ranks raise, differently", "both", r"the (first|second).*also failed: .*the (first|second)", None),
    Fault("I3", "SIGKILL", "sigkill", r"^rank 1 was killed \(SIGKILL\).*memory.* last seen at step \d", ranks=(2, 4)),
    Fault(
        "I3w", "SIGKILL with DataLoader workers", "sigkill", r"^rank 1 was killed \(SIGKILL\)", args=("--workers", "2")
    ),
    Fault("I4", "out of memory (RLIMIT_AS)", "memory", r"^rank 1 ran out of host memory: .* line \d+\); it held up to"),
    Fault("I5", "SIGSEGV", "sigsegv", r"^rank 1 was killed \(SIGSEGV\) \(faulty.py line \d+\)"),
    Fault("I5a", "SIGABRT", "sigabrt", r"^rank 1 was killed \(SIGABRT\) \(faulty.py line \d+\)"),
    Fault("I6", "one rank returns early", "return", r"^rank 1 ended at step 4 without an error while", ranks=(2, 4)),
    Fault(
        "I6z", "sys.exit(0) on one rank", "zero", r"^rank 1 exited at step 4 \(faulty.py line \d+: `sys.exit\(0\)`\)"
    ),
    Fault("I6x", "sys.exit(3)", "exit", r"^rank 1 exited with 3"),
    Fault("I6m", "sys.exit with a message", "message", r"^rank 1 stopped: the data folder is empty"),
    Fault("I6v", "os._exit(0)", "vanish", r"^rank 1 ended without an error \(os._exit\?\)", ranks=(2, 4)),
    Fault("I6q", "os._exit(3)", "quit", r"^rank 1 exited with 3"),
    Fault(
        "I7",
        "one rank hangs, to the group's time limit",
        "hang",
        r"^rank 1 had been in .*line \d+: `time.sleep\(600\)`\) for \d+ s when rank 0 \(.*all_reduce",
    ),
    Fault(
        "I9",
        "another collective",
        "collective",
        r"^in step 5 rank 0 called `all_reduce` \(faulty.py line \d+\) while rank 1 called `broadcast` \(faulty.py",
        None,
    ),
    Fault(
        "I9s", "another shape", "shape", r"called `all_reduce` of 8 float32 elements .* of 1,000 float32 elements", None
    ),
    Fault("I9d", "another dtype", "dtype", r"called `all_reduce` of 8 float32 elements .* of 8 \w+ elements", None),
    Fault("I9n", "one collective more", "count", r"in step 5 rank 0 called one collective fewer than rank 1", None),
]
