"""A script does under labkit what it does under bare torchrun; what differs is in docs/reference/same_program.md.

CI runs every hand-written program and a seeded part of the others; `make soak` runs all. A launch is cold, the first of
a session, or warm. CI launches all programs warm, and cold those that look at the interpreter, half of the others with
torch, and a third of those without, whose ranks are new processes either way.

The comparison must notice a guest that is not the same program: each mistake below is one that a worker could make.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from labkit.launcher.warm import process
from same_program.composed import composed
from same_program.differences import ENTRIES, differences, page
from same_program.harness import PROGRAMS, programs, under_labkit, under_torchrun

pytestmark = pytest.mark.timeout(400)
HAND_WRITTEN = [program for program in programs() if program.source != "variants"]
OTHERS = [program for program in programs() if program.source == "variants"] + composed()
CHOSEN = {program.name for program in random.Random(41).sample(OTHERS, 15)}
RARELY_COLD = [p for p in HAND_WRITTEN + OTHERS if p.source != "interpreter"]
WITH_TORCH, WITHOUT = ([p for p in RARELY_COLD if ("torch" in p.text) is torch] for torch in (True, False))
ONLY_WARM = random.Random(41).sample(WITHOUT, 2 * len(WITHOUT) // 3) + random.Random(41).sample(
    WITH_TORCH, len(WITH_TORCH) // 2
)
CLONE_NEWNS = 0x20000
# The program that notices, what the guest does, and what it does in its place.
MISTAKES = {
    "a module before the script": ("first_line", "import faulthandler\n", "import faulthandler, json\n"),
    "a thread that the script sees": (
        "first_line_two_ranks",
        "_thread.start_new_thread(self.live, (has_begun,))",
        "__import__('threading').Thread(target=self.live, args=(has_begun,), daemon=True).start()",
    ),
    "a variable that stays": ("environment", "os.environ.pop(name) for", "os.environ[name] for"),
    "its own folder on the path": ("own_folder_first", "[folder, *self.paths]", "self.paths"),
    "a setting of the process": ("process", "os.makedirs(self.home", "os.umask(0o077); os.makedirs(self.home"),
    "descriptors that the script counts": (
        "descriptors",
        "self.heartbeat: RankFile = ",
        "os.open('/', 0); self.heartbeat = ",
    ),
    "a signal that scripts use": ("user_signal", "self.files.DUMP_SIGNAL", "10"),
    "a word on stderr": (
        "exit_code_3",
        "        self.beat()\n",
        "        self.beat(); print('labkit', file=sys.stderr)\n",
    ),
    "no end of the interpreter": ("files_left_open", '        guest.outcome = "finished"\n', "        os._exit(0)\n"),
    "an error of its own": (
        "raises",
        "        raise\n\n\nclass Guest",
        "        sys.exit(1)\n\n\nclass Guest",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def own_shared_memory():
    """What other tests leave in /dev/shm is not this one's. Without root they are told apart by their time only."""
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


def check(program, ways):
    if program.needs and find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    bare = under_torchrun(program)
    found = {way: differences(bare, under_labkit(program, warm=way == "warm")) for way in ways}
    assert not any(found.values()), "\n".join(f"{way}:\n" + "\n".join(lines) for way, lines in found.items() if lines)


def ways(program):
    return ["warm"] if program in ONLY_WARM else ["cold", "warm"]


@pytest.mark.parametrize("program", HAND_WRITTEN, ids=lambda program: program.name)
def test_a_program_is_the_same_under_labkit(program):
    check(program, ways(program))


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[] if p.name in CHOSEN else pytest.mark.soak) for p in OTHERS],
    ids=lambda program: program.name,
)
def test_a_variant_or_a_composed_program_is_the_same_under_labkit(program):
    check(program, ways(program))


@pytest.mark.soak
@pytest.mark.parametrize("program", ONLY_WARM, ids=lambda program: program.name)
def test_the_first_launch_of_a_session_is_the_same_too(program):
    check(program, ["cold"])


def test_the_page_is_generated_from_the_entries():
    written = Path(__file__).parents[2] / "docs" / "reference" / "same_program.md"

    assert written.read_text() == page(len(HAND_WRITTEN) + len(OTHERS))
    assert len(ENTRIES) <= 8
    assert len(HAND_WRITTEN) + len(OTHERS) >= 150


def test_names_of_programs_are_unique():
    names = [program.name for program in HAND_WRITTEN + OTHERS]

    assert len(names) == len(set(names))
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {program.source for program in programs()}


def test_frames_that_can_be_seen_are_noticed(monkeypatch):
    monkeypatch.setattr(process, "with_late_resume", lambda code: code)

    assert noticed("stack")


@pytest.mark.parametrize(("program", "right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_guest_that_leaves_a_trace_is_noticed(program, right, wrong, monkeypatch, tmp_path):
    source = process.GUEST.read_text()
    assert source.count(right) >= 1
    # a module's folder tells the guest where labkit is, and this file has another
    source = source.replace("main.__code__.co_filename", repr(str(process.GUEST)))
    changed = tmp_path / "guest.py"
    changed.write_text(source.replace(right, wrong))
    monkeypatch.setattr(process, "GUEST", changed)

    assert noticed(program)


def noticed(name: str) -> list[str]:
    program = next(program for program in HAND_WRITTEN if program.name == name)
    return differences(under_torchrun(program), under_labkit(program, warm=False))
