"""A notebook's kernel in which a tool for interactive ranks is used, for interactive_peers.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
from interactive_tools import Tool
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "build" / "interactive_peers"
MARK = "INTERACTIVE_PEERS"  # the environment variable of all processes of one notebook
LIMIT_SECONDS, ENDING_SECONDS = 90.0, 20.0  # of a cell, and of an interrupted one
QUOTED = 110  # characters
TRIES, LEFT_SECONDS = 4, 5.0


@dataclass
class Seen:
    """What one cell showed."""

    seconds: float = 0.0
    first: float | None = None  # seconds until the first output
    texts: dict[str, str] = field(default_factory=dict)
    error: str = ""
    pictures: int = 0
    limited: str = ""  # how it ended, if not within the limit

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.texts.values())).strip()

    @property
    def quoted(self) -> str:
        """The error, or else the output, as one line."""
        return quoted(self.error or self.text)


def quoted(text: str) -> str:
    line = " / ".join(part.strip() for part in text.splitlines() if part.strip()).replace("`", "'")
    return f"`{line[:QUOTED]}{'…' if len(line) > QUOTED else ''}`" if line else "nothing"


class Notebook:
    """A kernel in which a tool is used; `seconds` is how long it took until all ranks had met in a barrier."""

    def __init__(self, tool: Tool, folder: Path):
        began = time.monotonic()
        self.tool, self.mark = tool, f"{tool.name} {time.monotonic_ns()}"
        paths = os.pathsep.join([str(PEERS), str(ROOT)])
        own = {MARK: self.mark, "LABKIT_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        own["JPY_SESSION_NAME"] = str(folder / "notebook.ipynb")  # as Jupyter's server does
        own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.manager = KernelManager(kernel_name="python3")
        if tool.kernel and (spec := self.manager.kernel_spec) is not None:
            spec.argv = [sys.executable, "-m", "jupyter_distributed.kernel", "-f", "{connection_file}"]
            spec.interrupt_mode = "message"
        self.manager.start_kernel(env=os.environ | own | tool.kernel, cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        for cell in tool.start:
            self.run(cell)
        for _ in range(TRIES if tool.start else 0):  # a start may return before its ranks are there
            if "ready 1" in self.on_all("dist.barrier()\nprint(f'ready {rank}')").text:
                break
        self.seconds = time.monotonic() - began

    def run(self, source: str, limit: float = LIMIT_SECONDS) -> Seen:
        """Execute a cell; interrupt it after `limit` seconds."""
        seen, began = Seen(), time.monotonic()
        request = self.client.execute(source)
        while True:
            seen.seconds = time.monotonic() - began
            if seen.seconds > limit + ENDING_SECONDS:
                seen.limited = f"still running {ENDING_SECONDS:.0f} s after an interrupt at {limit:.0f} s"
                return seen
            if seen.seconds > limit and not seen.limited:
                seen.limited = f"interrupted after {limit:.0f} s"
                self.manager.interrupt_kernel()
            try:
                message = self.client.get_iopub_msg(timeout=0.5)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") == request and _read(message, seen, began):
                seen.seconds = time.monotonic() - began
                break
        with contextlib.suppress(Empty):
            while (reply := self.client.get_shell_msg(timeout=5))["parent_header"]["msg_id"] != request:
                pass
            if reply["content"]["status"] == "error" and not seen.error:
                seen.error = f"{reply['content']['ename']}: {reply['content']['evalue']}"
        return seen

    def on_all(self, source: str, limit: float = LIMIT_SECONDS) -> Seen:
        return self.run(self.tool.on_all + source, limit)

    def stopped_at(self, source: str, line: int) -> list[str]:
        """Who stops at that line of a cell, if JupyterLab's debugger has a breakpoint there."""
        lines = {"linesStartAt1": True, "columnsStartAt1": True}
        self._debug("initialize", adapterID="python", pathFormat="path", **lines)
        self._debug("attach")
        path = self._debug("dumpCell", code=self.tool.on_all + source)["sourcePath"]
        breakpoints = [{"line": line + self.tool.on_all.count("\n")}]
        self._debug("setBreakpoints", source={"path": path}, breakpoints=breakpoints)
        self._debug("configurationDone")
        request, stopped = self.client.execute(self.tool.on_all + source), []
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                message = self.client.get_iopub_msg(timeout=0.5)
                if message["msg_type"] == "debug_event" and message["content"]["event"] == "stopped":
                    thread = message["content"]["body"]["threadId"]
                    stopped.append(message["content"]["body"].get("description", f"thread {thread}"))
                    deadline = min(deadline, time.monotonic() + ENDING_SECONDS / 4)  # for others
                if message["parent_header"].get("msg_id") == request and _read(message, Seen(), 0.0):
                    break
        self._debug("disconnect", restart=False, terminateDebuggee=False)  # which lets them go on
        return sorted(stopped)

    def _debug(self, command: str, **arguments: Any) -> dict[str, Any]:
        content = {"type": "request", "seq": 1, "command": command, "arguments": arguments}
        request = self.client.session.msg("debug_request", content)
        self.client.control_channel.send(request)
        while True:
            reply = self.client.get_control_msg(timeout=ENDING_SECONDS)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                body: dict[str, Any] = reply["content"].get("body") or {}
                return body

    def restart(self) -> None:
        self.manager.restart_kernel()
        self.client.wait_for_ready(timeout=120)

    def processes(self, *, with_kernel: bool = False) -> list[psutil.Process]:
        """What of the notebook still runs."""
        kernel = getattr(self.manager.provisioner, "pid", None)
        return [each for each in psutil.process_iter() if self._has(each) and (with_kernel or each.pid != kernel)]

    def left(self) -> int:
        """How many are left without the kernel; a few seconds may pass until they have ended."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for each in alive:
            with contextlib.suppress(psutil.Error):
                print(f"left of {self.tool.name}: {each.cmdline()}", file=sys.stderr)
        return len(alive)

    def _has(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
            return marked and "debugpy" not in " ".join(process.cmdline())  # the kernel's, since stopped_at
        return False

    def cpu_seconds(self) -> dict[int, float]:
        """What each process of the notebook has used."""
        return {each.pid: sum(each.cpu_times()[:2]) for each in self.processes(with_kernel=True)}

    def close(self) -> Seen:
        """Shut the kernel down."""
        if self.manager.has_kernel:
            self.client.stop_channels()
            self.manager.shutdown_kernel()
        return Seen(texts={"": "(the kernel is shut down)"})

    def kill(self) -> None:
        self.close()
        for process in self.processes(with_kernel=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _read(message: dict[str, Any], seen: Seen, began: float) -> bool:
    """Note what a message shows; return whether the cell has ended."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        key, text = str(len(seen.texts)), content["text"]
    elif kind in ("display_data", "update_display_data", "execute_result"):
        key = content.get("transient", {}).get("display_id") or str(len(seen.texts))
        text = content["data"].get("text/plain", "")
        seen.pictures += "image/png" in json.dumps(content["data"])
        if "application/javascript" in content["data"]:  # which nobody sees
            return False
    elif kind == "error":
        seen.error, key, text = f"{content['ename']}: {content['evalue']}", "error", "\n".join(content["traceback"])
    else:
        return bool(kind == "status" and content["execution_state"] == "idle")
    seen.texts[key] = text
    seen.first = seen.first or time.monotonic() - began
    return False
