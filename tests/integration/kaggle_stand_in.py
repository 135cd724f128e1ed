"""A stand-in for Kaggle's service on this machine: it answers the HTTP calls that Kaggle's client makes (read from the
source of kaggle 2.2.4 and kagglesdk 0.1.37), and runs what is pushed with papermill, as Save & Run All does.

How the real service times its answers, and what else it may refuse, it cannot tell.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kagglesdk import kaggle_env

from labkit.kaggle import following

TOKEN, USER = "not-a-secret", "me"
PAGE = 20  # files of an output in one answer


class StandIn:
    """One user, one kernel, its newest session. `calls` holds what the client has asked for, in order."""

    def __init__(self, root: Path):
        self.root = root
        self.working = root / "working"
        for folder in (self.working, root / "input"):
            folder.mkdir(parents=True)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.saved: dict[str, Any] = {}
        self.status, self.message = "COMPLETE", ""
        self.log = ["of the version before\n"]
        self.late: list[str] = []  # what is answered before the truth when the status is asked for
        self.used_hours = 2.0  # of 30 GPU hours; half an hour more is reserved
        self.cut_after = 0  # events after which the first connection to the log ends
        self.process: subprocess.Popen[str] | None = None

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((name, body))
        return getattr(self, f"_{name}")(body)

    def _IntrospectToken(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"active": body["token"] == TOKEN, "username": USER}

    def _GetAcceleratorQuotaStatistics(self, body: dict[str, Any]) -> dict[str, Any]:
        seconds = {"timeUsed": self.used_hours * 3600, "timeReserved": 1800, "totalTimeAllowed": 30 * 3600}
        return {"gpuQuota": {name: f"{value:.0f}s" for name, value in seconds.items()}}

    def _SaveKernel(self, body: dict[str, Any]) -> dict[str, Any]:
        self.saved, slug = body, body["slug"]
        threading.Thread(target=self._run, daemon=True).start()
        return {"ref": f"/code/{slug}", "url": f"https://www.kaggle.com/code/{slug}", "versionNumber": 2}

    def _GetKernelSessionStatus(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": self.late.pop(0) if self.late else self.status, "failureMessage": self.message}

    def _ListKernelSessionOutput(self, body: dict[str, Any]) -> dict[str, Any]:
        files = sorted(path for path in self.working.rglob("*") if path.is_file())
        start = int(body.get("pageToken") or 0)
        names = [path.relative_to(self.working).as_posix() for path in files[start : start + PAGE]]
        listed = [{"fileName": name, "url": f"{self.url}/files/{name}"} for name in names]
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(files) else {}
        return {"files": listed, "log": json.dumps(self.events())} | more

    def events(self) -> list[dict[str, Any]]:
        return [{"stream_name": "stderr", "time": 0.1 * i, "data": line} for i, line in enumerate(self.log)]

    def _run(self) -> None:
        """papermill in a folder that holds nothing else."""
        (self.working / "__notebook__.ipynb").write_text(self.saved["text"])
        kaggles = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "LABKIT_KAGGLE_ROOT": str(self.root)}
        kaggles["LABKIT_SESSION_SECONDS"] = "1000000000"
        env = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")} | kaggles
        papermill = [sys.executable, "-m", "papermill", "--log-output", "--no-progress-bar", "--kernel", "python3"]
        self.log, self.status = [], "RUNNING"
        self.process = subprocess.Popen(
            [*papermill, "__notebook__.ipynb", "__notebook__.ipynb"],
            cwd=self.working,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with self.process.stdout as said:
            self.log.extend(said)
        self.status, self.message = ("ERROR", "the notebook failed") if self.process.wait() else ("COMPLETE", "")

    def said(self) -> Iterator[str]:
        """The log as it grows, until the session is over."""
        number = 0
        while True:
            over = self.status != "RUNNING"
            while number < len(self.log):
                yield self.log[number]
                number += 1
            if over:
                return
            threading.Event().wait(0.05)


@contextmanager
def stand_in(root: Path) -> Iterator[StandIn]:
    service = StandIn(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"service": service}))
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield service
    finally:
        service.status = "CANCEL_ACKNOWLEDGED"
        if service.process and service.process.poll() is None:
            service.process.kill()
            service.process.wait()
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    service: StandIn
    protocol_version = "HTTP/1.1"  # of which chunked answers are a part: the client passes each on when it comes

    def do_POST(self) -> None:
        """`/v1/<service>/<call>`, JSON in and out."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.path.rpartition("/")[2]
        assert name == "IntrospectToken" or self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.answer(json.dumps(self.service.call(name, body)).encode(), "application/json")

    def do_GET(self) -> None:
        if self.path.startswith("/files/"):
            self.answer((self.service.working / self.path.removeprefix("/files/")).read_bytes(), "text/plain")
            return
        assert self.path.startswith(f"/v1/kernels/logs/stream/{USER}/")
        if self.service.status == "RUNNING":
            self.stream()
        else:  # it then sends what was kept, as one JSON array
            self.answer(json.dumps(self.service.events()).encode(), "application/json")

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, line in enumerate(self.service.said()):
            self.chunk(json.dumps({"stream_name": "stderr", "time": 0.1 * number, "data": line}))
            if number + 1 == self.service.cut_after:
                self.service.cut_after, self.close_connection = 0, True
                return
        self.chunk("END_OF_LOG")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        with suppress(ConnectionError):  # who followed has left
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing on the test's stderr."""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in, to which Kaggle's own client goes."""
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.1)
    monkeypatch.setenv("KAGGLE_API_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))
    with stand_in(tmp_path / "kaggle") as service:
        # the client's own table of addresses; all else in it is as Kaggle made it
        monkeypatch.setitem(kaggle_env._env_to_endpoint, kaggle_env.KaggleEnv.PROD, service.url)
        yield service
