"""A script does under labkit what it does under bare torchrun; what differs is in docs/reference/same_program.md.

CI runs every hand-written program and a seeded part of the others; `make soak` runs all.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from same_program.composed import composed
from same_program.differences import ENTRIES, differences, page
from same_program.harness import PROGRAMS, programs, under_labkit, under_torchrun

pytestmark = pytest.mark.timeout(400)
HAND_WRITTEN = [program for program in programs() if program.source != "variants"]
OTHERS = [program for program in programs() if program.source == "variants"] + composed()
CHOSEN = {program.name for program in random.Random(41).sample(OTHERS, 30)}
CLONE_NEWNS = 0x20000


@pytest.fixture(scope="module", autouse=True)
def own_shared_memory():
    """What other tests leave in /dev/shm is not this one's. Without root they are told apart by their time only."""
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


def check(program):
    if program.needs and find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    bare = under_torchrun(program)
    found = {way: differences(bare, under_labkit(program, warm=way == "warm")) for way in ("cold", "warm")}
    assert not any(found.values()), "\n".join(f"{way}:\n" + "\n".join(lines) for way, lines in found.items() if lines)


@pytest.mark.parametrize("program", HAND_WRITTEN, ids=lambda program: program.name)
def test_a_program_is_the_same_under_labkit(program):
    check(program)


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[] if p.name in CHOSEN else pytest.mark.soak) for p in OTHERS],
    ids=lambda program: program.name,
)
def test_a_variant_or_a_composed_program_is_the_same_under_labkit(program):
    check(program)


def test_the_page_is_generated_from_the_entries():
    written = Path(__file__).parents[2] / "docs" / "reference" / "same_program.md"

    assert written.read_text() == page(len(HAND_WRITTEN) + len(OTHERS))
    assert len(ENTRIES) <= 8
    assert len(HAND_WRITTEN) + len(OTHERS) >= 150


def test_names_of_programs_are_unique():
    names = [program.name for program in HAND_WRITTEN + OTHERS]

    assert len(names) == len(set(names))
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {program.source for program in programs()}
