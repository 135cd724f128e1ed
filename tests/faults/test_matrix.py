"""Every fault of the matrix: the culprit is named, nothing written before is lost, nothing is left running."""

from __future__ import annotations

import re
import time

import pytest
from faults.matrix import FAULTS, FAULTY, GROUP_TIMEOUT, Fault
from faults.scene import assert_over, read

import labkit

SECONDS_PER_RANK = 6.0  # start-up, on two cores that others use too
BOUND = 20.0
# Of I3, I5, I6, I9s, test_last_words.py and test_the_original_exception_can_be_caught.
TWINS = ("I1", "I1l", "I1m", "I3w", "I5a", "I6q", "I6x", "I6z", "I9d")


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        pytest.param(
            f, n, id=f"{f.id}-{f.fault}-{n}", marks=[pytest.mark.soak] if n != f.ranks[0] or f.id in TWINS else []
        )
        for f in FAULTS
        for n in f.ranks
    ],
)
def test_the_culprit_is_named_and_nothing_is_left(fault: Fault, ranks: int) -> None:
    began = time.monotonic()
    run = labkit.launch(FAULTY, nproc_per_node=ranks, args=fault.arguments(), wait=False)

    with pytest.raises(labkit.RankFailedError) as caught:
        run.wait(timeout=120)

    assert_explained(fault, run, caught.value)
    assert time.monotonic() - began < BOUND + GROUP_TIMEOUT + ranks * SECONDS_PER_RANK


def assert_explained(fault: Fault, run: labkit.Run, error: labkit.RankFailedError) -> None:
    """The same sentence everywhere, and what was recorded until then."""
    sentence = error.cause["sentence"]
    assert re.search(fault.says, sentence), sentence
    assert fault.rank is None or error.rank == fault.rank
    assert sentence in str(error)
    assert sentence in repr(run)
    assert sentence == read(run.folder.state)["cause"]["sentence"]
    assert_over(run.folder)
    assert run.metrics().groupby("rank")["step"].max().min() >= 3


def test_the_original_exception_can_be_caught() -> None:
    fault = next(f for f in FAULTS if f.id == "I1")
    with pytest.raises(ValueError, match="boom") as caught:
        labkit.launch(FAULTY, args=fault.arguments(), wait=True)

    assert isinstance(caught.value, labkit.RankFailedError)
    assert_explained(fault, labkit.attach("latest"), caught.value)
    assert (caught.value.rank, caught.value.exception, caught.value.step) == (1, "ValueError", 4)
    assert caught.value.line
