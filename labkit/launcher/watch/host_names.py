"""Whether this host resolves the names that torchrun looks up before it starts the ranks. A name server that does not
answer delays each lookup by 10 s, and torchrun waits without a message."""

from __future__ import annotations

import socket
import threading
import time

from labkit.record import RunFolder

__all__ = ["HostNames"]

START_SECONDS = 3.0  # ranks have usually started after this time
SLOW_SECONDS = 2.0


class HostNames:
    """Of one attempt. `notice` says why no rank has started, if a name is the reason."""

    def __init__(self, attempt: RunFolder):
        self.notice: str | None = None
        self._attempt = attempt
        self._started = time.monotonic()
        self._thread: threading.Thread | None = None
        self._lookup: tuple[str, float] | None = None  # the name that is being looked up, and since when

    def update(self) -> None:
        """Look the names up if no rank starts. A lookup may take a minute, so a thread does it."""
        if self._attempt.started_ranks():
            self.notice = None
        elif self._thread is None and time.monotonic() - self._started > START_SECONDS:
            self._thread = threading.Thread(target=self._look_up, name="labkit-host-names", daemon=True)
            self._thread.start()
        elif (lookup := self._lookup) is not None and time.monotonic() - lookup[1] > SLOW_SECONDS:
            name = lookup[0]
            self.notice = (
                f"no name server answers for {name}, which torchrun looks up several times before it starts the ranks: "
                f"add the line `127.0.0.1 {name}` to /etc/hosts"
            )

    def _look_up(self) -> None:
        for name in ("localhost", socket.gethostname()):  # torchrun's rendezvous is at the first
            self._lookup = name, time.monotonic()
            try:
                socket.getaddrinfo(name, None)
            except OSError as error:
                if name == "localhost":
                    self.notice = (
                        f"localhost, to which torchrun connects, cannot be resolved ({error.strerror}): add the line "
                        "`127.0.0.1 localhost` to /etc/hosts"
                    )
                    break
        self._lookup = None
