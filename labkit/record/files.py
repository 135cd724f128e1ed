"""Opening files of a run folder that somebody else may have put together."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["ask_anew", "is_deleted", "opened", "read_text"]

LARGEST_BYTES = 8 << 20  # of a script or a record that is read whole


def opened(path: Path) -> BinaryIO:
    """A file, open for reading; never what a link in its place leads to, nor a pipe to wait at. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def ask_anew(folder: Path) -> None:
    """Let this host see what others have just put into a folder that they share.

    NFS keeps for up to a minute what was not there. Setting a folder's time brings its current attributes along, and
    with them the end of that memory; a file that is there needs none of it, for opening it asks the server.
    """
    with suppress(OSError):
        os.utime(folder)


def is_deleted(path: Path) -> bool:
    """Whether it is not there, as far as the file system says so: a server that cannot tell just now has not."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # a stale handle, a ticket that has expired
        return False
    return False


def read_text(path: Path) -> str:
    """The text of such a file, whatever bytes are in it. Raises OSError, also when it is far too large to be ours."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_BYTES:
            raise OSError(errno.EFBIG, "too large", str(path))
        return file.read().decode("utf-8", "replace")
