"""What may differ between a program under bare torchrun and under labkit, and why: the entries of docs/same_program.md."""

from __future__ import annotations

import difflib
import re

from same_program.harness import Seen

# Variables that labkit sets.
VARIABLES = re.compile(
    r"LABKIT_RUN|GLOO_SOCKET_IFNAME|TORCH_FR_\w+|TORCH_NCCL_\w+|MASTER_ADDR"
)


def differences(bare: Seen, ours: Seen) -> list[str]:
    found = []
    for name in ("codes", "succeeded", "running", "shared_memory"):
        if getattr(bare, name) != getattr(ours, name):
            found.append(f"{name}: {getattr(bare, name)} / {getattr(ours, name)}")
    for what, theirs, mine in (("output", bare.printed, ours.printed), ("file", bare.files, ours.files)):
        for name in sorted(theirs.keys() | mine.keys()):
            a, b = allowed(theirs.get(name, "(missing)")), allowed(mine.get(name, "(missing)"))
            if a != b:
                found += [f"{what} {name}:", *compared(a, b)]
    return found


def compared(a, b) -> list[str]:
    if isinstance(a, bytes) or isinstance(b, bytes):
        return [repr(a)[:300], repr(b)[:300]]
    lines = difflib.unified_diff(a.splitlines(), b.splitlines(), "bare", "labkit", lineterm="", n=0)
    return [line[:600] for line in lines][2:30]


def allowed(text):
    """The text without what is allowed to differ."""
    if isinstance(text, bytes):
        return text
    text = re.sub(r"\(?'(" + VARIABLES.pattern + r")'(, |: )'[^']*'\)?(, )?", "", text)
    return re.sub(r"^(" + VARIABLES.pattern + r")[ =].*\n", "", text, flags=re.MULTILINE)
