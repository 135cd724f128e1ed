"""Keeps a rank's newest steps and collectives in a file of fixed size, which is complete even if the rank is killed.

The rank writes it through shared memory, without a system call; others read it meanwhile. A step here is one of any
optimizer of the script, counted from 1. A call is a collective that Python calls; those of DDP's backward passes, which
C++ calls, are only counted. What must be equal on all ranks that average their gradients lies together, so that readers
compare the bytes of many steps at once and decode only those that differ.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

STEPS = 4096  # that are kept
HEAD = struct.Struct("=8sIIIIIfI")  # the format, the newest step, and where the rank is since then
COUNTED = struct.Struct("=IHHIHHQ")
SEEN = struct.Struct("=IIfI")
CALL = struct.Struct("=HHIIHHIII")
CALLS = 64  # that are kept
FORMAT = b"labkit 2"
COUNTED_AT = 64
SEEN_AT = COUNTED_AT + STEPS * COUNTED.size
CALLS_AT = SEEN_AT + STEPS * SEEN.size
SIZE = CALLS_AT + CALLS * CALL.size
# What calls are of, by their numbers here. The first dtype stands for none, and for one that is not listed.
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)
CALLED_IN_BACKWARD = 0x8000  # added to the number of a call's dtype
DTYPES = ("", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "int8", "bool", "complex64")
CHECKED = {1, 2, 5, 10, 20, 35, 50, 75, 100, 200, 500}  # and every 1000th
MOST, WORD = 0xFFFF, 0xFFFFFFFF
UNKNOWN = WORD  # how many elements a call has
NO_LOSS = 0x7FC00000  # the bits of nan
# Flags of the newest backward pass: a DDP model was within no_sync, or within Join, which allows uneven inputs; its
# loss was a leaf; it called collectives; since the last step the script called one within Join; it has not ended; a DDP
# model was called for it.
NOT_SYNCHRONIZED, JOINED, NO_GRAPH, REDUCED, CALLED_IN_JOIN, IN_BACKWARD, OF_DDP = 1, 2, 4, 8, 16, 32, 64


@dataclass(frozen=True, slots=True)
class Counted:
    """What must be equal on the ranks of a group at the end of step `number`: the batches fetched and the backward
    passes of this step, the collectives of the group until the newest pass had ended, where all ranks meet, the
    optimizer, and a sum of some parameters' bits."""

    number: int
    fetched: int
    passes: int
    calls: int
    optimizer: int
    flags: int
    sum: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What may differ: the script's own count of its steps, the line of the newest backward pass (0: unknown), its loss
    (nan, unless it had no graph: others are not read), and how many collectives the group had called when it began."""

    step: int
    line: int
    loss: float
    before: int


@dataclass(frozen=True, slots=True)
class Now:
    """Where a rank is in the step after step `number`: in a backward pass, if `flags` say so, or else after its newest
    one. `passes` and `calls` count those that have ended."""

    number: int
    fetched: int
    passes: int
    calls: int
    line: int
    loss: float
    flags: int


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A collective that Python called, the `index`-th of this rank: the `number`-th of its `group`, which a line of the
    witness names, with so many elements (UNKNOWN if ranks may have different ones) of a dtype. It was called at `line`
    (0: unknown), after step `step` and then so many backward passes, or `in_backward`."""

    group: int
    operation: str
    number: int
    elements: int
    dtype: str
    passes: int
    line: int
    step: int
    index: int
    in_backward: bool

    @classmethod
    def unpack(cls, fields: tuple[int, ...]) -> PythonCall:
        group, operation, number, elements, flags, passes, line, step, index = fields
        dtype, in_backward = DTYPES[flags & ~CALLED_IN_BACKWARD], bool(flags & CALLED_IN_BACKWARD)
        return cls(group, OPERATIONS[operation], number, elements, dtype, passes, line, step, index, in_backward)


def is_checked(number: int) -> bool:
    """Whether what is expensive is looked at after this step: the same on all ranks."""
    return number in CHECKED or (number > 0 and number % 1000 == 0)


def next_checked(number: int) -> int:
    """The first step after this one that is checked."""
    return next(later for later in count(number + 1) if is_checked(later))


class RingWriter:
    """Writes one rank's ring. Raises OSError if the file cannot be made."""

    def __init__(self, path: Path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A page that the disk has no room for would kill the process when it is written.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, SIZE)
            else:
                os.write(file, bytes(SIZE))
            # Python's mmap would keep a descriptor among the script's.
            c = ctypes.CDLL(None, use_errno=True)
            c.mmap.restype = ctypes.c_void_p
            c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            place = c.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
            if place == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "the ring cannot be mapped")
        finally:
            os.close(file)
        memory = (ctypes.c_char * SIZE).from_address(place)
        HEAD.pack_into(memory, 0, FORMAT, 0, 0, 0, 0, 0, 0.0, 0)
        # Single words are written, which costs a third of packing when nothing of it is in the processor's caches.
        self._words = memoryview(memory).cast("B").cast("I")
        self._newest = self._called = 0

    def at_backward(self, fetched: int, passes: int, calls: int, line: int, loss: float, flags: int) -> None:
        """When a backward pass begins or has ended: the fields of Now after `number`."""
        words = self._words
        words[3] = fetched
        words[4] = passes
        words[5] = calls & WORD
        words[6] = line
        words[7] = NO_LOSS if loss != loss else _bits(loss)
        words[8] = flags

    def after_step(self, counted: tuple[int, int, int, int, int, int], seen: tuple[int, int, float, int]) -> None:
        """The fields of Counted after `number`, and those of Seen."""
        words, number = self._words, self._newest + 1
        fetched, passes, calls, optimizer, flags, total = counted
        step, line, loss, before = seen
        at = (SEEN_AT + number % STEPS * SEEN.size) // 4
        words[at] = step
        words[at + 1] = line
        words[at + 2] = NO_LOSS if loss != loss else _bits(loss)
        words[at + 3] = before & WORD
        at = (COUNTED_AT + number % STEPS * COUNTED.size) // 4
        words[at] = number
        words[at + 1] = (fetched if fetched < MOST else MOST) | (passes if passes < MOST else MOST) << 16
        words[at + 2] = words[5] = calls & WORD
        words[at + 3] = (optimizer & MOST) | flags << 16
        words[at + 4] = total & WORD
        words[at + 5] = total >> 32
        words[3] = words[4] = words[6] = words[7] = words[8] = 0
        self._newest = words[2] = number

    def before_call(
        self, group: int, operation: int, number: int, elements: int, dtype: int, passes: int, line: int
    ) -> None:
        """The fields of PythonCall before a collective is called."""
        words, index = self._words, self._called + 1
        at = (CALLS_AT + index % CALLS * CALL.size) // 4
        words[at] = group | operation << 16
        words[at + 1] = number & WORD
        words[at + 2] = elements & WORD
        flags = dtype | CALLED_IN_BACKWARD if words[8] & IN_BACKWARD else dtype
        words[at + 3] = flags | (passes if passes < MOST else MOST) << 16
        words[at + 4] = line
        words[at + 5] = self._newest
        words[at + 6] = self._called = index

    def passes(self, steps: int) -> list[int]:
        """How many backward passes each of so many of the newest steps had."""
        numbers = range(max(1, self._newest - min(steps, STEPS) + 1), self._newest + 1)
        return [self._words[(COUNTED_AT + number % STEPS * COUNTED.size) // 4 + 1] >> 16 for number in numbers]


class RingReader:
    """Reads a rank's ring while it is written. What cannot be read is empty."""

    def __init__(self, path: Path):
        self._path = path

    def now(self) -> Now | None:
        """Where the rank is; None if it has no ring."""
        return _now(self._read([(0, HEAD.size)])[0])

    def counted(self, first: int, last: int) -> bytes:
        """The bytes of the steps from `first` to `last`, at most STEPS of them; see `decoded`. Those that have been
        overwritten meanwhile have other numbers."""
        return b"".join(self._read(_pieces(first, last)))

    def since(self, first: int) -> tuple[Now | None, bytes]:
        """Where the rank is, and the bytes of its steps from `first` on, for little more than the price of one."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None, b""
        try:
            now = _now(os.pread(file, HEAD.size, 0))
            pieces = _pieces(first, now.number) if now else []
            return now, b"".join(os.pread(file, size, start) for start, size in pieces)
        except OSError:
            return None, b""
        finally:
            os.close(file)

    def seen(self, number: int) -> Seen | None:
        """What was seen at a step that is still in the ring."""
        data = self._read([(SEEN_AT + number % STEPS * SEEN.size, SEEN.size)])[0]
        return Seen(*SEEN.unpack(data)) if len(data) == SEEN.size else None

    def calls(self) -> list[PythonCall]:
        """The newest collectives that Python called, oldest first."""
        data = self._read([(CALLS_AT, CALLS * CALL.size)])[0]
        calls = CALL.iter_unpack(data[: len(data) // CALL.size * CALL.size])
        made = sorted((fields for fields in calls if fields[-1]), key=lambda fields: fields[-1])
        return [PythonCall.unpack(fields) for fields in made]

    def _read(self, pieces: list[tuple[int, int]]) -> list[bytes]:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return [b""] * len(pieces)
        try:
            return [os.pread(file, size, start) for start, size in pieces]
        except OSError:
            return [b""] * len(pieces)
        finally:
            os.close(file)


def _now(head: bytes) -> Now | None:
    return Now(*HEAD.unpack(head)[1:]) if len(head) == HEAD.size and head[:8] == FORMAT else None


def _pieces(first: int, last: int) -> list[tuple[int, int]]:
    """`(start, size)` of the bytes in the file that hold these steps, at most STEPS of them."""
    first = max(first, last - STEPS + 1)
    if last < first:
        return []
    start, end = first % STEPS, last % STEPS + 1
    places = [(start, end)] if start < end else [(start, STEPS), (0, end)]
    return [(COUNTED_AT + a * COUNTED.size, (b - a) * COUNTED.size) for a, b in places]


def decoded(counted: bytes) -> dict[int, Counted]:
    """Steps by their numbers, from the bytes that a reader has returned."""
    steps = (Counted(*fields) for fields in COUNTED.iter_unpack(counted[: len(counted) // COUNTED.size * COUNTED.size]))
    return {step.number: step for step in steps}


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("=f", value), sys.byteorder)
