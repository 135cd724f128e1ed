"""Sends text to where the user wants it: an address of the web, or a shell command. Both may hold a secret, which is
never part of a message, a file, a command line or an environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from labkit.beside import start_beside
from labkit.errors import LaunchError
from labkit.files import Json
from labkit.record import RunFolder

SENDER = "labkit.alerts.sender"
FACTS = "LABKIT_ALERT"  # the variable in which a command finds the event as JSON
WEB_SECONDS, COMMAND_SECONDS, RETRY_SECONDS = 10.0, 30.0, 3.0
WORD = re.compile(r"[\w./~+-]+")
SHELL = "/bin/sh"
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
LONGEST, MOST = 2048, 4  # characters of an address, and addresses: less than a pipe holds, as JSON
EXPECTED = (
    "alert takes an address such as 'https://hooks.slack.com/…', a shell command such as 'mail -s labkit me@a.org', or "
    "'@FILE' with one of them in a file"
)


class Address:
    """An address or a command. Raises LaunchError, without its text, if it is neither."""

    def __init__(self, text: str):
        self._text = text.strip()
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", self._text)
        self._is_web = bool(scheme and scheme[1].lower() in ("http", "https"))
        if not self._text or len(text) > LONGEST or not text.isprintable():
            why = f"is empty, longer than {LONGEST} characters, or not of one line"
            raise LaunchError(f"an alert's address {why}. {EXPECTED}")
        if scheme and not self._is_web:
            raise LaunchError(f"an alert cannot be sent by {scheme[1]}://. {EXPECTED}")
        self.name = "the alert's command"
        word = "" if self._is_web else self._text.split()[0]
        if WORD.fullmatch(word) and subprocess.run(SHELL, input=f"command -v {word}".encode(), **QUIET).returncode:
            raise LaunchError(f"an alert's command is not found on this machine. {EXPECTED}")
        if self._is_web:
            try:
                parts = urlsplit(self._text)
                host, _ = parts.hostname, parts.port
            except ValueError:
                host = None
            if not host or "@" in parts.netloc or not self._text.isascii() or " " in self._text:
                why = "must name a host, without a user or a password, in ASCII and without spaces"
                raise LaunchError(f"an alert's http address {why}. {EXPECTED}")
            self.name = host

    def send(self, text: str, facts: Mapping[str, Json]) -> str:
        """Send it; returns why that failed, or an empty string."""
        if not self._is_web:
            return self._run(text, facts)
        if why := self._post(text, facts):
            time.sleep(RETRY_SECONDS)
            why = self._post(text, facts)
        return why

    def _post(self, text: str, facts: Mapping[str, Json]) -> str:
        """POST a JSON object. A redirection would arrive without it, so it is an error."""
        body = json.dumps({"text": text, **facts}).encode()
        request = urllib.request.Request(self._text, body, {"Content-Type": "application/json", "User-Agent": "labkit"})
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=WEB_SECONDS):
                return ""
        except urllib.error.HTTPError as error:
            return f"{self.name} answers with HTTP {error.code}"
        except OSError as error:  # as urllib wraps it
            why = getattr(getattr(error, "reason", error), "strerror", None)
            return f"{self.name} cannot be reached: {why or 'no answer in time'}"
        except Exception as error:  # what it answers is not HTTP; the error may quote the address
            return f"{self.name} cannot be reached: {type(error).__name__}"

    def _run(self, text: str, facts: Mapping[str, Json]) -> str:
        """Run the command, which the shell reads from a pipe, with the text on its stdin. What it starts is killed with
        it after COMMAND_SECONDS."""
        reader, writer = os.pipe()
        os.write(writer, f"{self._text}\n".encode())  # less than a pipe holds
        os.close(writer)
        try:
            process = subprocess.Popen(
                [SHELL, f"/dev/fd/{reader}"],
                env={**os.environ, FACTS: json.dumps(facts)},
                pass_fds=[reader],
                stdin=subprocess.PIPE,
                **QUIET,
                start_new_session=True,
            )
        except OSError as error:
            return f"the alert's command cannot be started: {error.strerror}"
        finally:
            os.close(reader)
        try:
            process.communicate(f"{text}\n".encode(), timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"the alert's command was killed after {COMMAND_SECONDS:g} s"
        return f"the alert's command exited with {process.returncode}" if process.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def addresses_of(alert: str | Sequence[Any] | None) -> list[str]:
    """The addresses of a launch, those in files read. Raises LaunchError."""
    texts = []
    for each in [alert] if isinstance(alert, str) else list(alert or ()):
        if not isinstance(each, str):
            raise LaunchError(f"an alert's address must be text, got a {type(each).__name__}. {EXPECTED}")
        text = each.strip()
        if text.startswith("@"):
            try:
                text = Path(text[1:]).expanduser().read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "it is not text in UTF-8"
                raise LaunchError(f"alert={each!r} cannot be read: {why}. {EXPECTED}") from None
        Address(text)
        texts.append(text)
    if len(texts) > MOST:
        raise LaunchError(f"alerts are sent to {MOST} addresses at most, got {len(texts)}; let a command tell others")
    return texts


def start_sender(folder: RunFolder, addresses: Sequence[str]) -> None:
    """Start the process that sends the alerts of a run to these addresses. It ends by itself soon after the run."""
    try:
        start_beside(SENDER, folder.path, log=folder.alert_log, told=json.dumps([*addresses]))
    except OSError as error:
        print(f"{folder.id} will send no alerts: {error}", flush=True)
