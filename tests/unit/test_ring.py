import os
from pathlib import Path

import pytest

from labkit.ring import (
    CALLS,
    DTYPES,
    IN_BACKWARD,
    OPERATIONS,
    SIZE,
    STEPS,
    Now,
    PythonCall,
    RingReader,
    RingWriter,
    decoded,
)


@pytest.fixture
def ring(tmp_path):
    return RingWriter(tmp_path / "ring.bin"), RingReader(tmp_path / "ring.bin")


def fill(writer, steps, fetched=1):
    for step in range(1, steps + 1):
        writer.after_step((fetched, 2, 3 * step, 0, 4, 2**63 + step), (10 * step, 21, 0.5, 3 * step - 1))


def test_a_step_is_read_as_it_was_written(ring):
    writer, reader = ring
    fill(writer, 3)

    step = decoded(reader.counted(1, 3))[3]
    assert (step.fetched, step.passes, step.calls, step.flags, step.sum) == (1, 2, 9, 4, 2**63 + 3)
    seen = reader.seen(3)
    assert (seen.step, seen.line, seen.loss, seen.before) == (30, 21, 0.5, 8)


def test_what_a_rank_did_after_its_newest_step_is_known(ring):
    writer, reader = ring
    fill(writer, 2)
    writer.at_backward(5, 1, 7, 33, 0.25, IN_BACKWARD)

    assert reader.now() == Now(2, 5, 1, 7, 33, 0.25, IN_BACKWARD)


def test_where_a_rank_is_and_its_new_steps_are_read_together(ring):
    writer, reader = ring
    fill(writer, STEPS + 5)

    now, steps = reader.since(STEPS - 1)
    assert now == reader.now()
    assert [*decoded(steps)] == [*range(STEPS - 1, STEPS + 6)]


def test_the_ring_keeps_the_newest_steps(ring):
    writer, reader = ring
    fill(writer, STEPS + 10)

    kept = decoded(reader.counted(1, STEPS + 10))
    assert (min(kept), max(kept)) == (11, STEPS + 10)
    assert len(kept) == STEPS
    assert decoded(reader.counted(STEPS - 1, STEPS + 2)).keys() == {STEPS - 1, STEPS, STEPS + 1, STEPS + 2}


def test_steps_of_two_ranks_are_equal_as_bytes(tmp_path):
    readers = []
    for name in "ab":
        fill(RingWriter(tmp_path / name), 5)
        readers.append(RingReader(tmp_path / name))

    assert readers[0].counted(1, 5) == readers[1].counted(1, 5) != b""


def test_large_counts_stay_in_their_fields(ring):
    writer, reader = ring
    fill(writer, 1, fetched=10**6)

    assert decoded(reader.counted(1, 1))[1].fetched == 0xFFFF


def test_a_rank_without_a_ring_has_nothing(tmp_path):
    reader = RingReader(tmp_path / "none")

    assert (reader.now(), reader.counted(1, 3), reader.seen(1)) == (None, b"", None)
    assert reader.since(1) == (None, b"")


def test_the_ring_leaves_no_descriptor_and_no_hole_in_its_file(tmp_path):
    before = len([*Path("/proc/self/fd").iterdir()])
    writer = RingWriter(tmp_path / "ring.bin")

    assert len([*Path("/proc/self/fd").iterdir()]) == before
    status = (tmp_path / "ring.bin").stat()
    assert status.st_size == SIZE <= status.st_blocks * 512
    del writer


def test_a_killed_process_leaves_its_steps(tmp_path):
    if (pid := os.fork()) == 0:
        fill(RingWriter(tmp_path / "ring.bin"), 7)
        os.abort()
    os.waitpid(pid, 0)

    assert RingReader(tmp_path / "ring.bin").now().number == 7


def test_the_newest_calls_are_kept_as_they_were_made(ring):
    writer, reader = ring
    fill(writer, 2)
    for number in range(1, CALLS + 4):
        writer.before_call(3, OPERATIONS.index("broadcast"), number, 2**40 + 7, DTYPES.index("int64"), 1, 52)
    writer.at_backward(5, 1, 7, 33, 0.25, IN_BACKWARD)
    writer.before_call(3, OPERATIONS.index("barrier"), 99, 0, 0, 1, 53)

    *calls, last = reader.calls()
    assert [call.index for call in calls] == [*range(5, CALLS + 4)]
    assert calls[0] == PythonCall(3, "broadcast", 5, 7, "int64", 1, 52, 2, 5, False)
    assert (last.operation, last.dtype, last.in_backward) == ("barrier", "", True)
