"""`labkit` in a real terminal: Ctrl-C once, twice, three times, at any moment; Ctrl-Z; a window that is closed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from faults.scene import (
    ENDLESS,
    FAULTY,
    SHARED_MACHINE,
    assert_clean,
    assert_goes_on,
    last_step,
    read,
    stopped_at_the_end,
    the_run,
    wait_for_step,
    wait_until,
    written,
)

import labkit
from labkit.stored_runs import list_runs

CTRL_C, CTRL_Z = b"\x03", b"\x1a"
LAUNCH = ["labkit", "launch", str(FAULTY), "--nproc-per-node", "2"]
BOUND = 8.0  # seconds
# Exit codes by how often Ctrl-C was pressed: a late one may reach Python when it has already begun to leave.
INTERRUPTED = {1: (130,), 3: (130, -signal.SIGINT)}
CLOSED = (-signal.SIGHUP, 129)  # 129 when it was just writing to the terminal that was closed


STUCK = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.ones(2, 2) * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
if dist.get_rank() == 0:
    dist.broadcast(torch.ones(3), src=0)
    dist.barrier()
else:
    dist.all_reduce(torch.ones(4))
"""


class Terminal:
    """A window: a pseudo terminal, and the program that leads its session, which keys and its end reach."""

    def __init__(self, command: list[str]):
        self.window, screen = pty.openpty()
        settings = termios.tcgetattr(screen)
        settings[3] |= termios.NOFLSH  # else a key that interrupts discards what was printed and not yet read here
        termios.tcsetattr(screen, termios.TCSANOW, settings)
        # setsid --ctty makes the screen the controlling terminal of the command that takes its place
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=screen, stdout=screen, stderr=screen, env=os.environ | {"PS1": "$ "}
        )
        os.close(screen)
        os.set_blocking(self.window, False)
        self.screen = ""

    def type(self, keys: bytes) -> None:
        os.write(self.window, keys)

    def read(self) -> str:
        """Everything that was on the screen so far."""
        try:
            while text := os.read(self.window, 1 << 16):
                self.screen += text.decode(errors="replace")
        except OSError:  # nothing more for now, or nobody left to write
            pass
        return self.screen

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.read(), what=lambda: f"{text} in {self.screen[-2000:]!r}")

    def wait_for_step_after(self, step: int) -> None:
        """Until it is seen to follow the run."""
        seen = re.compile(r"step ([\d,]+)")
        wait_until(
            lambda: max((int(n.replace(",", "")) for n in seen.findall(self.read())), default=0) > step,
            what=lambda: f"step {step} and on in {self.screen[-2000:]!r}",
        )

    def cursor_is_shown(self) -> bool:
        return self.read().rfind("\x1b[?25l") <= self.screen.rfind("\x1b[?25h")

    def wait(self) -> int:
        """The exit code; what is written meanwhile is read, or it would never end."""

        def ended() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_until(ended, BOUND * SHARED_MACHINE, lambda: self.screen[-2000:])
        return self.process.returncode

    def close(self) -> None:
        """The window is closed: the kernel sends SIGHUP."""
        if self.window >= 0:
            os.close(self.window)
            self.window = -1

    def end(self) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """`terminal(*command)` opens one."""
    opened: list[Terminal] = []

    def open_one(*command: str) -> Terminal:
        opened.append(Terminal(list(command)))
        return opened[-1]

    yield open_one
    for one in opened:
        one.end()


def launched(*options: str) -> list[str]:
    return [*LAUNCH, "--", "--steps", str(ENDLESS), *options]


@pytest.mark.parametrize(
    ("presses", "apart", "fault"),
    [
        (1, 0.0, "none"),
        (3, 0.7, "deaf"),
        *(
            pytest.param(*more, marks=pytest.mark.soak)
            for more in ((3, 0.0, "none"), (1, 0.0, "deaf"), (3, 0.7, "none"), (3, 0.0, "deaf"))
        ),
    ],
)
def test_ctrl_c_stops_the_run_however_often_it_is_pressed(presses, apart, fault, terminal) -> None:
    window = terminal(*launched("--fault", fault))
    folder = wait_for_step(the_run())
    before = written(folder)

    for _ in range(presses):
        window.type(CTRL_C)
        time.sleep(apart)
    told = assert_clean(folder, before)

    assert window.wait() in INTERRUPTED[presses]
    assert window.cursor_is_shown()
    assert told["cause"]["sentence"] in ("stopped on request", "the process that started this run has exited")
    if presses == 1:
        assert told["cause"]["sentence"] == "stopped on request"
        assert "interrupted: stopping the run; interrupt again to kill it" in window.read()
        assert "Traceback" not in window.read()


@pytest.mark.parametrize("presses", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "moment",
    ["folder", *(pytest.param(m, marks=pytest.mark.soak) for m in ("agent.json", "torchrun.log", "ranks/0"))],
)
def test_ctrl_c_while_torchrun_is_still_starting(moment, presses, terminal) -> None:
    window = terminal(*launched())
    wait_until(lambda: list_runs() and (moment == "folder" or (list_runs()[0].path / moment).exists()))
    for _ in range(presses):
        window.type(CTRL_C)

    assert window.wait() in INTERRUPTED[presses]
    if list_runs():  # an interrupt before the supervisor was started takes the folder back
        assert_clean(list_runs()[0])
    assert presses > 1 or "Traceback" not in window.read()


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("program", signal.SIGKILL),
        *(pytest.param("labkit launch", end, marks=pytest.mark.soak) for end in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_a_killed_launch_takes_its_run_with_it(what, end, terminal, tmp_path) -> None:
    """A program's too, which has not said whether its run is tied to it."""
    program = tmp_path / "program.py"
    program.write_text(f"import labkit\nlabkit.launch({str(FAULTY)!r}, nproc_per_node=2, steps={ENDLESS})\n")
    window = terminal("python", str(program)) if what == "program" else terminal(*launched())
    folder = wait_for_step(the_run())
    before = written(folder)

    window.process.send_signal(end)
    told = assert_clean(folder, before)

    assert window.wait() == -end
    assert told["cause"]["sentence"] == "the process that started this run has exited"


@pytest.mark.parametrize("shell", [pytest.param(False, marks=pytest.mark.soak), True], ids=["alone", "in a shell"])
def test_a_closed_terminal_takes_its_run_with_it(shell, terminal) -> None:
    window = terminal("bash", "--norc", "-i") if shell else terminal(*launched())
    if shell:
        window.type(f"{' '.join(launched())}\n".encode())
    folder = wait_for_step(the_run())
    before = written(folder)

    window.close()
    told = assert_clean(folder, before)

    assert window.wait() in CLOSED
    assert told["cause"]["sentence"] == "the process that started this run has exited"


def test_what_a_run_waits_for_is_told_once_while_it_lives_and_once_at_its_end(terminal, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STUCK)
    window = terminal("labkit", "launch", str(script), "--nproc-per-node", "2")
    window.wait_for("no rank has made progress since")
    time.sleep(2)  # for what must not be told again
    assert window.read().count("called `all_reduce`") == 1
    assert window.read().count("is at step") == 2

    window.type(CTRL_C)

    assert window.wait() == 130
    assert window.read().count("stopped on request; until then no rank had made progress since") == 1
    assert window.read().count("called `all_reduce`") == 2


def test_ctrl_z_leaves_the_run_going_and_fg_takes_it_up_again(terminal) -> None:
    window = terminal("bash", "--norc", "-i")
    window.type(f"{' '.join(launched())}; echo code=$?\n".encode())
    folder = wait_for_step(the_run())
    (follower,) = [p for p in psutil.Process(window.process.pid).children() if "launch" in p.cmdline()]
    before = written(folder)

    window.type(CTRL_Z)
    wait_until(lambda: follower.status() == psutil.STATUS_STOPPED, BOUND * SHARED_MACHINE)
    assert_goes_on(folder, before)

    window.type(b"fg\n")
    wait_until(lambda: follower.status() != psutil.STATUS_STOPPED, BOUND * SHARED_MACHINE)
    assert_goes_on(folder, before)
    before = written(folder)
    window.type(CTRL_C)
    assert_clean(folder, before)
    wait_until(lambda: not follower.is_running(), BOUND * SHARED_MACHINE)
    assert "Traceback" not in window.read()


def test_a_detached_run_outlives_its_terminal_and_attach_leaves_it_running(terminal) -> None:
    window = terminal("bash", "--norc", "-i")
    with stopped_at_the_end():
        window.type(f"{' '.join([*LAUNCH, '--detach', '--', '--steps', str(ENDLESS)])}; echo code=$?\n".encode())
        window.wait_for("outlives this process")
        window.wait_for("code=0")
        folder = wait_for_step(the_run())
        before = written(folder)
        window.type(CTRL_C)
        window.close()
        assert window.wait() == -signal.SIGHUP
        assert_goes_on(folder, before)

        for presses in (1, 3):
            another = terminal("labkit", "attach")
            another.wait_for(folder.id)
            another.wait_for_step_after(last_step(folder, 0))
            before = written(folder)
            for _ in range(presses):
                another.type(CTRL_C)
            assert another.wait() in INTERRUPTED[presses]
            if "^C" in another.read():  # else the kernel has discarded the end of its output, as a session's end may
                assert another.cursor_is_shown()
            assert_goes_on(folder, before)
            if presses == 1:
                assert f"{folder.id} is still running; stop it with: labkit stop {folder.id}" in another.read()
                assert "Traceback" not in another.read()

        another = terminal("labkit", "attach", folder.id)
        another.wait_for_step_after(last_step(folder, 0))
        another.close()
        assert another.wait() in CLOSED
        assert_goes_on(folder, before)

        before = written(folder)
        stopped = subprocess.run(["labkit", "stop"], capture_output=True, text=True, timeout=60)
        assert "0 processes left" in stopped.stdout
        assert_clean(folder, before)


def test_the_end_of_a_run_ends_who_is_attached(terminal) -> None:
    """Stopped elsewhere while a terminal launched it and another one looks on."""
    first = terminal(*launched())
    folder = wait_for_step(the_run())
    second = terminal("labkit", "attach")
    second.wait_for(folder.id)
    before = written(folder)

    assert labkit.attach(folder.path).stop().state == "stopped"

    assert_clean(folder, before)
    for window in (first, second):
        assert window.wait() == 0
        assert window.cursor_is_shown()
        assert "stopped on request" in window.read()
    assert read(folder.state)["cause"]["sentence"] == "stopped on request"
