"""The harness notices a guest that is not the same program: each of these mistakes is one that a worker could make."""

from __future__ import annotations

import pytest

from labkit.launcher.warm import process
from same_program.differences import differences
from same_program.harness import programs, under_labkit, under_torchrun

pytestmark = pytest.mark.timeout(400)
PROGRAMS = {program.name: program for program in programs()}
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
    program = PROGRAMS[name]
    return differences(under_torchrun(program), under_labkit(program, warm=False))
