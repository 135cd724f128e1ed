"""A script does under labkit what it does under bare torchrun; what differs is in docs/same_program.md."""

from __future__ import annotations

import pytest
from same_program.differences import differences
from same_program.harness import programs, under_labkit, under_torchrun

pytestmark = pytest.mark.timeout(400)
PROGRAMS = {program.name: program for program in programs()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hand_written_program(name):
    program = PROGRAMS[name]
    bare = under_torchrun(program)
    assert differences(bare, under_labkit(program, warm=False)) == []
    assert differences(bare, under_labkit(program, warm=True)) == []
