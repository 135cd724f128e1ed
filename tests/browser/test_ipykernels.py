"""The live view as a front end hears it, without one: the messages of real kernels, over the releases of ipykernel that
route what a thread sends in different ways."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipykernel
import pytest
from browser.conftest import KAGGLE, KAGGLE_PINS, need
from faults.scene import ENDLESS, FAULTY, Kernel, marked, stopped_at_the_end, the_run

# As Kaggle has it, the last of the 6 and the first of the 7 that a view can live in, and the one of this environment.
RELEASES = {
    "6.17.1": (KAGGLE, KAGGLE_PINS),
    "6.29.5": (Path("build/ipykernel-6.29.5").absolute(), ["--no-deps", "ipykernel==6.29.5", "nest-asyncio"]),
    "7.1.0": (Path("build/ipykernel-7.1.0").absolute(), ["--no-deps", "ipykernel==7.1.0", "nest-asyncio"]),
    ipykernel.__version__: None,
}
WATCH_SECONDS = 6
UPDATES_PER_SECOND = (1.0, 2.3)
UPDATE_BYTES = 40_000
SHOWN_BYTES = 100_000
VIEW = "application/vnd.jupyter.widget-view+json"
LAUNCH = f"import labkit\nrun = labkit.launch({str(FAULTY)!r}, nproc_per_node=2, steps=STEPS, sleep=0.1)"
OTHER = "import time\nfor i in range(30):\n    print(i, flush=True)\n    time.sleep(0.1)"
OTHER_SECONDS = 3


class FrontEnd:
    """What a notebook makes of a kernel's messages: the outputs of each cell, of which some are replaced in place."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.messages: list[dict[str, Any]] = []
        self.outputs: dict[str, list[dict[str, Any]]] = {}
        self.displayed: dict[str, dict[str, Any]] = {}
        self.idle: set[str] = set()

    def run(self, code: str) -> str:
        """Start a cell; its id."""
        cell = self.kernel.client.execute(code)
        self.outputs[cell] = []
        return cell

    def hear(self, until: Callable[[], Any], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, [m["msg_type"] for m in self.messages[-20:]]
            try:
                self.take(self.kernel.client.get_iopub_msg(timeout=0.1))
            except queue.Empty:
                continue

    def hear_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.hear(lambda: time.monotonic() > end, seconds + 1)

    def take(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        kind, content, cell = message["msg_type"], message["content"], message["parent_header"].get("msg_id", "")
        if kind == "status" and content["execution_state"] == "idle":
            self.idle.add(cell)
        if kind in ("display_data", "execute_result", "stream", "error"):
            self.outputs.setdefault(cell, []).append(content)
        name = content.get("transient", {}).get("display_id")
        if kind == "display_data" and name:
            self.displayed[name] = content
        if kind == "update_display_data":
            self.displayed[name] |= content  # a name that was never displayed is shown nowhere: an error here

    def finish(self, cell: str, seconds: float = 60) -> None:
        self.hear(lambda: cell in self.idle, seconds)

    def text(self, cell: str) -> str:
        return "".join(content.get("text", "") for content in self.outputs[cell])


def updates(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that change a widget."""
    return [m for m in messages if m["msg_type"] == "comm_msg"]


def comms(messages: list[dict[str, Any]], kind: str) -> set[str]:
    """The ids of the widgets that messages of this kind are about."""
    return {m["content"]["comm_id"] for m in messages if m["msg_type"] == kind}


def size(message: dict[str, Any]) -> int:
    return len(json.dumps(message, default=str, ensure_ascii=False).encode())


BETWEEN = ("6.29.5", "7.1.0")  # as those before and after them, so far


@pytest.fixture(params=[pytest.param(r, marks=pytest.mark.soak) if r in BETWEEN else r for r in RELEASES])
def front_end(request: pytest.FixtureRequest) -> Iterator[FrontEnd]:
    overlay, path = RELEASES[request.param], os.environ.get("PYTHONPATH", "")
    if overlay:
        folder, packages = overlay
        path = os.pathsep.join([str(need(folder, *packages)), path])
    kernel = Kernel(os.environ | {"PYTHONPATH": path, "LABKIT_UI": "svg"})
    assert kernel.run("import ipykernel\nprint(ipykernel.__version__)").strip() == request.param
    with stopped_at_the_end():
        yield FrontEnd(kernel)
    kernel.close()


def start(front_end: FrontEnd, steps: int) -> tuple[str, str]:
    """A run of that many steps whose view is live: the id of its cell, and of the widget."""
    cell = front_end.run(LAUNCH.replace("STEPS", str(steps)))
    front_end.finish(cell)
    assert front_end.text(cell) == ""
    model = front_end.outputs[cell][0]["data"][VIEW]["model_id"]
    assert sum(map(size, front_end.messages)) <= SHOWN_BYTES
    front_end.hear(lambda: any("step 3" in str(m["content"]) for m in updates(front_end.messages)))
    return cell, model


def assert_static(front_end: FrontEnd, cell: str, model: str, ended: str) -> None:
    """The view's place holds the static figures, and nothing in the notebook refers to a widget any more."""
    front_end.hear(lambda: VIEW not in str(front_end.outputs), 30)
    (output,) = front_end.outputs[cell]
    assert {"text/html", "text/plain"} <= output["data"].keys()
    assert "data:image/svg+xml" in output["data"]["text/html"]
    assert ended in output["data"]["text/plain"].splitlines()[0]
    assert len(str(output["data"])) <= 60_000
    front_end.hear(lambda: model in comms(front_end.messages, "comm_close"), 10)


def test_updates_are_few_and_small_and_no_other_cell_holds_any_of_it(front_end) -> None:
    cell, model = start(front_end, ENDLESS)
    front_end.messages.clear()
    front_end.hear_for(WATCH_SECONDS)
    alone = front_end.messages[:]
    assert UPDATES_PER_SECOND[0] <= len(updates(alone)) / WATCH_SECONDS <= UPDATES_PER_SECOND[1]
    assert max(map(size, alone)) <= UPDATE_BYTES
    assert {m["parent_header"]["msg_id"] for m in alone} == {cell}

    front_end.messages.clear()
    other = front_end.run(OTHER)
    front_end.finish(other)
    beside = front_end.messages[:]
    assert front_end.text(other) == "".join(f"{i}\n" for i in range(30))
    assert {output["name"] for output in front_end.outputs[other]} == {"stdout"}
    assert len(front_end.outputs[cell]) == 1
    assert len(updates(beside)) / OTHER_SECONDS >= UPDATES_PER_SECOND[0]
    # A kernel may name the cell that runs now as the parent of what a thread sends; a widget is found by its own id.
    assert comms(beside, "comm_msg") == comms(alone, "comm_msg")

    waiting = front_end.run("run.wait()")
    front_end.hear_for(1)
    front_end.kernel.manager.interrupt_kernel()
    front_end.finish(waiting)
    assert "interrupted: stopping the run" in front_end.text(waiting)
    assert_static(front_end, cell, model, "stopped")
    assert not marked(the_run())


def test_a_run_that_ends_by_itself_leaves_static_figures_in_its_cell(front_end) -> None:
    cell, model = start(front_end, 40)

    assert_static(front_end, cell, model, "succeeded")


@pytest.mark.parametrize("front_end", [ipykernel.__version__], indirect=True)
def test_a_run_that_is_shown_again_and_again_has_one_view(front_end) -> None:
    """Whoever runs a cell again wants no second thread, and no second stream of messages."""
    first, model = start(front_end, ENDLESS)
    again = [front_end.run("run = labkit.attach('latest')\nrun") for _ in range(4)]
    front_end.finish(again[-1])
    assert [VIEW in str(front_end.outputs[cell]) for cell in (first, *again)] == [False, False, False, False, True]
    assert "detached; the run continues" in str(front_end.outputs[first])

    heard = len(front_end.messages)
    front_end.hear_for(WATCH_SECONDS)

    assert len(updates(front_end.messages[heard:])) / WATCH_SECONDS <= UPDATES_PER_SECOND[1]
    front_end.finish(front_end.run("run.stop()"))
    front_end.hear(lambda: comms(front_end.messages, "comm_close") == comms(front_end.messages, "comm_open"), 20)
