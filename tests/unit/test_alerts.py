"""Where alerts are sent, and what of a run becomes one."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import labkit
from labkit.alerts import Address, Events, addresses_of
from labkit.alerts import addresses as addresses
from labkit.record import Cause, State
from labkit.witness import Finding, Findings

SECRET = "s3cr3t-t0ken"
RUNNING = State("running", 0.0)


@pytest.mark.parametrize(
    ("alert", "why"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        (f"echo {SECRET}\nls", "not of one line"),
        ("x" * 5000, "longer than 2048 characters"),
        (f"htps://hooks.slack.com/{SECRET}", "cannot be sent by htps://"),
        (f"https:///{SECRET}", "must name a host"),
        (f"https://host:port/{SECRET}", "must name a host"),
        (f"https://user:{SECRET}@host/", "without a user or a password"),
        (f"https://host/{SECRET} x", "without spaces"),
        (f"hooks.slack.com/{SECRET}", "command is not found on this machine"),
        (["true", 5], "must be text, got a int"),
        ([SECRET.encode()], "must be text, got a bytes"),
        ("@/nowhere/alert", "cannot be read: No such file"),
    ],
)
def test_what_is_no_address_is_refused_before_the_launch_without_being_shown(alert, why):
    with pytest.raises(labkit.LaunchError, match=why) as refused:
        labkit.launch("ddp", nproc_per_node=1, alert=alert)
    assert SECRET not in str(refused.value)
    assert "alert takes an address such as" in str(refused.value)
    assert not labkit.runs()


def test_a_value_of_another_type_is_not_shown():
    for alert in ({"url": SECRET}, SECRET.encode()):
        kind = type(alert).__name__
        with pytest.raises(labkit.LaunchError, match=f"^alert must be an address or a command, .*, got a {kind}$"):
            labkit.launch("ddp", nproc_per_node=1, alert=alert)


def test_there_are_no_more_addresses_than_a_pipe_takes():
    with pytest.raises(labkit.LaunchError, match="4 addresses at most, got 5"):
        addresses_of(["true"] * 5)
    longest = json.dumps(addresses_of([f"echo {'ä' * (addresses.LONGEST - 5)}"] * 4))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    assert os.write(writer, longest.encode()) == len(longest)
    os.close(reader)
    os.close(writer)


def test_a_sweep_says_what_to_do_instead():
    with pytest.raises(labkit.LaunchError, match="labkit watch --alert"):
        labkit.sweep("ddp", lr=[1e-3], alert="true")


def test_an_address_may_be_in_a_file(tmp_path):
    (tmp_path / "alert").write_text(f"https://host/{SECRET}\n")
    assert addresses_of(f"@{tmp_path}/alert") == [f"https://host/{SECRET}"]
    assert addresses_of(["if true; then cat; fi", " cat "]) == ["if true; then cat; fi", "cat"]
    assert addresses_of(None) == []


@pytest.fixture
def server(monkeypatch):
    """An HTTP server that keeps what it is sent, and answers with the number in the path, or not at all."""
    monkeypatch.setattr(addresses, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(addresses, "WEB_SECONDS", 0.5)

    class Handler(BaseHTTPRequestHandler):
        received = []

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.received.append((self.path, self.headers["Content-Type"], json.loads(body)))
            code = int(self.path.split("/")[1])
            if code == 0:
                time.sleep(0.7)
            self.send_response(code or 200)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/200/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    served = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    served.received = Handler.received
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def test_an_address_gets_a_json_object_with_the_text(server):
    address = Address(f"http://127.0.0.1:{server.server_port}/200/{SECRET}?a=b")

    assert address.send("rank 1 failed", {"kind": "failed", "step": 3}) == ""
    object_ = {"text": "rank 1 failed", "kind": "failed", "step": 3}
    assert server.received == [(f"/200/{SECRET}?a=b", "application/json", object_)]


@pytest.mark.parametrize(
    ("path", "why"), [("404", "answers with HTTP 404"), ("302", "answers with HTTP 302"), ("0", "no answer in time")]
)
def test_an_address_that_does_not_take_it_is_tried_twice_and_said_without_its_secret(server, path, why):
    address = Address(f"http://127.0.0.1:{server.server_port}/{path}/{SECRET}")

    said = address.send("text", {})

    assert why in said and said.startswith("127.0.0.1")
    assert SECRET not in said + repr(address)
    assert [sent[0] for sent in server.received] == [f"/{path}/{SECRET}"] * 2


def test_an_address_where_nobody_listens(monkeypatch):
    monkeypatch.setattr(addresses, "RETRY_SECONDS", 0.0)
    assert Address(f"http://127.0.0.1:9/{SECRET}").send("text", {}) == "127.0.0.1 cannot be reached: Connection refused"


def test_a_command_reads_the_text_and_finds_the_facts(tmp_path):
    out = tmp_path / "out"
    command = f'cat > {out}; echo "$LABKIT_ALERT" >> {out}; tr "\\0" " " < /proc/$$/cmdline >> {out}; : {SECRET}'

    assert Address(command).send("rank 1 failed", {"kind": "failed"}) == ""

    text, facts, command_line = out.read_text().splitlines()
    assert (text, json.loads(facts)) == ("rank 1 failed", {"kind": "failed"})
    assert command_line.startswith("/bin/sh /dev/fd/")


def test_a_command_that_fails_or_hangs_is_said_and_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "COMMAND_SECONDS", 0.5)
    assert Address("exit 3").send("text", {}) == "the alert's command exited with 3"

    started = time.monotonic()
    hangs = Address(f"sleep 300 & echo $! > {tmp_path}/child; wait")
    assert hangs.send("text", {}) == "the alert's command was killed after 0.5 s"

    assert time.monotonic() - started < 5
    child = (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def told(events: Events) -> list[tuple[str, str, bool]]:
    return [(event.kind, event.text, event.is_alert) for event in events.poll()]


@pytest.fixture
def watched(folder, write_metrics):
    """The events of a run of two ranks, whose state is `watched.state`."""
    for rank in (0, 1):
        write_metrics(rank, {"k": "meta", "t": 0.0}, {"k": "model", "t": 0.1, "device": "cpu", "limit": 1e10})
    events = Events(folder, lambda: events.state)
    events.state = RUNNING
    return events


def test_states_are_told_once_and_only_bad_ends_are_alerts(watched):
    assert told(watched) == [("running", "running", False)]
    assert told(watched) == []
    watched.state = replace(RUNNING, notice="paused; resume it")
    assert [kind for kind, *_ in told(watched)] == ["paused"]
    watched.state = replace(RUNNING, state="succeeded", ended=9.0)
    assert told(watched) == [("succeeded", "succeeded after 9.0 s", False)]
    assert watched.has_ended


@pytest.mark.parametrize(
    ("state", "kind", "is_alert"),
    [("failed", "python", True), ("lost", "lost", True), ("stopped", "stopped", False), ("stopped", "stop_if", True)],
)
def test_which_ends_are_alerts(watched, state, kind, is_alert):
    watched.state = State(state, 0.0, ended=9.0, cause=Cause(kind, "because"))
    assert told(watched) == [(state, f"{state} after 9.0 s: because", is_alert)]


def test_every_restart_is_an_alert(watched):
    ended = {"cause": {"kind": "python", "sentence": "rank 1 failed"}, "checkpoint": "step-40"}
    told(watched)
    watched.state = replace(RUNNING, attempt=2, earlier=[ended])
    assert told(watched) == [("restarted", "attempt 1 failed: rank 1 failed; restarted from step-40", True)]
    watched.state = replace(RUNNING, attempt=3, earlier=[ended, ended])
    assert [text for _, text, _ in told(watched)] == ["attempt 2 failed: rank 1 failed; restarted from step-40"]


def test_a_stall_is_told_after_a_minute_and_once_in_an_attempt(watched):
    told(watched)
    watched.state = replace(RUNNING, stuck_since=time.time() - 30, notice="no rank has made progress")
    assert (told(watched), told(watched)) == ([], [])
    watched.state = replace(watched.state, stuck_since=time.time() - 61)
    assert (told(watched), told(watched)) == ([], [("stuck", "no rank has made progress", True)])
    assert told(watched) == []


def test_a_loss_that_is_nan_is_told_when_it_stays_so(watched, write_metrics):
    told(watched)
    step = {"k": "step", "n": 1, "seconds": [0.1] * 3, "samples": 8}
    write_metrics(1, step | {"t": 1.0, "step": 1, "loss": 1.0}, step | {"t": 2.0, "step": 2, "loss": "nan"})
    assert told(watched) == []
    write_metrics(1, step | {"t": 3.0, "step": 3, "loss": 1.0})
    assert told(watched) == []
    write_metrics(1, step | {"t": 4.0, "step": 4, "loss": "nan"})
    assert told(watched) == []
    ((kind, text, is_alert),) = told(watched)
    assert (kind, is_alert) == ("nan", True)
    assert text.startswith("the loss is NaN or infinite on rank 1 since step 2")
    (event,) = watched_again(watched).poll()[-1:]
    assert event.facts()["loss"] is None  # JSON has no NaN
    assert json.loads(json.dumps(event.facts(), allow_nan=False))["run"] == event.run


def watched_again(events: Events) -> Events:
    again = Events(events._reader.folder, lambda: events.state)
    again.poll()
    again._told.clear()
    return again


def test_a_certain_finding_is_told_unless_it_is_the_cause(watched, folder):
    finding = Finding("parted", "the weights of ranks 0 and 1 differ", since=3)
    told(watched)
    Findings([replace(finding, certain=False)]).write(folder)
    assert (told(watched), told(watched)) == ([], [])
    Findings([finding]).write(folder)
    assert (told(watched), told(watched)) == ([], [("finding", finding.sentence, True)])
    again = Events(folder, lambda: State("failed", 0.0, cause=Cause("slip", finding.claim)))
    assert [kind for kind, *_ in told(again)] == ["failed"]
    assert [kind for kind, *_ in told(Events(folder, lambda: State("succeeded", 0.0)))] == ["finding", "succeeded"]


@pytest.mark.parametrize(("minutes", "each", "kinds"), [(1, 1e7, []), (5, 1e7, ["memory"]), (5, 1e6, []), (5, 0, [])])
def test_memory_is_told_that_grows_for_a_minute_by_what_matters(watched, write_metrics, minutes, each, kinds):
    told(watched)
    step = {"k": "step", "n": 1, "seconds": [1.0] * 3, "samples": 8, "loss": 1.0}
    count = 50 if minutes == 1 else 60 * minutes
    write_metrics(0, *(step | {"t": float(i), "step": i, "rss": 1e9 + i * each} for i in range(1, count)))
    told(watched)
    assert [kind for kind, *_ in told(watched)] == kinds
