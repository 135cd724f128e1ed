"""Much at once: five launches, floods of output, lines that no terminal should be shown."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from faults.matrix import FAULTY
from faults.scene import assert_over, wait_for_step

import labkit
from labkit.launcher.stopping import processes_of

HOSTILE = r"""
import sys
sys.stdout.buffer.write(b"\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07 \x1b[2J\x00 \xff\xfe ")
sys.stdout.buffer.write(b"</script><img src=x onerror=alert(1)>\n")
sys.stdout.buffer.write(b"progress 1\rprogress 2\r\n" + b"x" * (1 << 19))
sys.stdout.flush()
"""


@pytest.mark.soak
def test_five_launches_at_once() -> None:
    def one(_: int) -> labkit.Run:
        return labkit.launch(FAULTY, args=["--steps", "3"], wait=True)

    with ThreadPoolExecutor(5) as pool:
        started = list(pool.map(one, range(5)))

    assert len({run.id for run in started}) == 5
    assert [run.status().state for run in started] == ["succeeded"] * 5
    assert len(labkit.runs()) == 5
    for run in started:
        assert_over(run.folder)


def test_a_flood_of_lines_stays_in_its_file_and_the_view_is_bounded() -> None:
    run = labkit.launch(FAULTY, args=["--steps", "3", "--lines", "200000"], wait=True)

    log = run.folder.log(1)
    assert log.stat().st_size > 10 << 20
    assert log.read_bytes().splitlines()[-1] == b"rank 1 step 3 line 199999"
    shown = run.logs(rank=1, stream="stdout")
    assert len(shown) < 1.1 * (1 << 20)
    assert shown.endswith("line 199999\n")
    assert str(log) in shown.splitlines()[0]
    began = time.monotonic()
    assert run.report().stat().st_size < 1 << 20
    assert time.monotonic() - began < 5


def test_hostile_output_is_kept_as_it_is_and_shown_as_text(tmp_path: Path) -> None:
    script = tmp_path / "hostile.py"
    script.write_text(HOSTILE)
    run = labkit.launch(script, nproc_per_node=1, wait=True)

    assert b"\x1b]8;;javascript" in run.folder.log(0).read_bytes()
    for shown in (run.logs(rank=0), run.report().read_text(encoding="utf-8"), repr(run)):
        assert "\x1b" not in shown
        assert "\x00" not in shown
    page = run.report().read_text(encoding="utf-8")
    assert "<img" not in page
    assert "<script" not in page
    assert "link" in run.logs(rank=0, stream="stdout")
    assert "]8;;" not in run.logs(rank=0, stream="stdout")
    assert "progress 1" not in run.logs(rank=0, stream="stdout")


def listening(pids: set[int]) -> set[int]:
    """The ports on which these processes listen."""
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids}


def test_labkit_opens_no_port_and_a_stopped_run_leaves_none() -> None:
    run = labkit.launch(FAULTY, args=["--steps", "600"], wait=False)
    wait_for_step(run.folder, 2)

    supervisor = psutil.Process(int(json.loads(run.folder.agent.read_text())["supervisor"]["pid"]))
    everything = {supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))}
    ranks = {process.pid for process in processes_of(run.folder)} - {supervisor.pid}
    assert listening(ranks)  # torchrun's own stores
    assert not supervisor.net_connections()
    assert not listening(everything - ranks)

    run.stop()

    assert not listening(everything | ranks)
