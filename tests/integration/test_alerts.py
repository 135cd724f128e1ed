"""Alerts of real ranks: to an address and a command that hold a secret, in a terminal; a rank that slows down."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from json_page import problems

import labkit
from labkit.cli import main
from labkit.record import RunReader, pace
from labkit.view.live import slowdowns

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "slowing.py")
SECRET = "s3cr3t-t0ken"


@pytest.fixture
def server():
    """An HTTP server and the objects that it has received."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    received = []
    served = HTTPServer(("127.0.0.1", 0), Handler)
    served.received = received
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def test_a_run_that_loses_its_loss_and_fails_tells_it_and_keeps_the_secrets(server, tmp_path, capsys):
    address = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    command = f"cat >> {tmp_path}/told; : {SECRET}; exit 3"
    args = ["2000", "--seconds", "0.1", "--nan-at", "10", "--raise-at", "60"]
    run = labkit.launch(SCRIPT, nproc_per_node=2, args=args, alert=[address, command], wait=False)
    while not any(history.step for history in RunReader(run.folder).read_all().ranks.values()):
        time.sleep(0.1)
    seen = everything_shown()
    assert sum("slowing.py" in text for text in seen) > 1  # the ranks were seen
    assert any("labkit.alerts.sender" in text for text in seen)
    assert not [text for text in seen if SECRET in text]

    capsys.readouterr()
    assert main(["watch", run.id, "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [problem for line in lines for problem in problems(line, "labkit.event/1")] == []
    events = [json.loads(line) for line in lines]
    assert [(event["kind"], event["alert"]) for event in events] == [
        ("running", False),
        ("nan", True),
        ("failed", True),
    ]
    assert {event["run"] for event in events} == {run.id}

    deadline = time.monotonic() + 10
    while len(server.received) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [(sent["kind"], sent["text"]) for sent in server.received] == [
        (event["kind"], f"{run.id}: {event['sentence']}") for event in events[1:]
    ]
    assert "rank 1 failed: ValueError: the learning rate is too high" in server.received[1]["text"]
    while len((tmp_path / "told").read_text().splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "told").read_text().splitlines() == [sent["text"] for sent in server.received]
    assert repr(run).count("an alert was not sent: the alert's command exited with 3") == 1
    assert run.folder.alert_log.read_text() == "an alert was not sent: the alert's command exited with 3\n"
    assert not [file for file in run.path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def everything_shown() -> list[str]:
    """The command and the environment of every process."""
    texts = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            texts.append("".join((process / name).read_text(errors="replace") for name in ("cmdline", "environ")))
    return texts


def test_a_run_that_ends_well_is_watched_to_its_end(capsys):
    run = labkit.launch(SCRIPT, nproc_per_node=1, args=["40"], wait=False)
    capsys.readouterr()

    assert main(["watch"]) == 0  # all active runs
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split(" ", 2)[1:2] == [f"{run.id}:"]
    assert " succeeded after " in lines[-1]
    assert main(["watch"]) == 2
    assert "no run is active" in capsys.readouterr().err


def test_a_rank_whose_forward_slows_down_is_found_while_it_trains(monkeypatch):
    for name in ("SINCE_SECONDS", "DISTURBED_SECONDS"):
        monkeypatch.setattr(slowdowns, name, 4.0)
    monkeypatch.setattr(pace, "BEFORE", 4)
    args = ["20000", "--slow", "forward", "--at", "250", "--extra", "0.03"]
    run = labkit.launch(SCRIPT, nproc_per_node=2, args=args, wait=False)
    reader, deadline, found = RunReader(run.folder), time.monotonic() + 60, []
    while not found and time.monotonic() < deadline:
        time.sleep(0.5)
        reader.poll()
        found = [each for each in slowdowns.slowdowns(reader, run.status()) if each.is_own]
    run.stop(grace=0)

    (slow,) = found
    assert (slow.who, slow.phase) == ("rank 1", "forward")
    assert abs(slow.step - 250) <= 25
    assert 0.02 < slow.now - slow.before < 0.045
