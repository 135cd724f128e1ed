"""Reads the files of a run folder as untrusted, because they may come from another user, and replaces them
atomically."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import stat
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from labkit.errors import RunFolderError

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
"""What a JSON file holds."""


def decoded(source: bytes) -> str:
    """The text in the encoding of its byte order mark or its first two lines, by default UTF-8, with newlines as "\\n".

    Raises SyntaxError or UnicodeError for what Python would refuse.
    """
    text = source.decode(_encoding_of(source))
    return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)


def encoded(text: str) -> bytes:
    """The text in the encoding that its first two lines declare. Raises SyntaxError or UnicodeError."""
    return text.encode(_encoding_of(text.encode()))


def lines_of(text: str) -> list[str]:
    """The lines with their ends, as Python numbers them: unlike `str.splitlines`, a form feed or U+2028 ends none."""
    return io.StringIO(text).readlines()


def read_source(path: Path) -> str:
    """The text of a recorded script, with invalid characters replaced. Raises OSError."""
    source = read_bytes(path)
    try:
        return decoded(source)
    except (SyntaxError, UnicodeError):
        return source.decode("utf-8", "replace")


def _encoding_of(source: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    try:
        "".encode(encoding)
    except LookupError as error:  # a codec that is not one of text, such as rot13
        raise SyntaxError(str(error)) from None
    return encoding


SLOW_SECONDS, READERS = 0.005, 128
Item = TypeVar("Item")
Result = TypeVar("Result")
LARGEST_BYTES = 8 << 20  # the largest script or record that is read as a whole
TAIL_BYTES = 200_000  # of a log


def opened(path: Path) -> BinaryIO:
    """A file opened for reading. Raises OSError, including for a symbolic link, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def in_parallel(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`read` of each item, many at the same time once one of them shows that the file server is slow."""
    results: list[Result] = []
    for item in items:
        started = time.perf_counter()
        results.append(read(item))
        if time.perf_counter() - started > SLOW_SECONDS:
            break
    if not (rest := items[len(results) :]):
        return results
    try:
        with ThreadPoolExecutor(READERS, "labkit-reader") as pool:
            return [*results, *pool.map(read, rest)]
    except RuntimeError:  # no more threads, because of a process limit
        return [*results, *map(read, rest)]


def refresh(folder: Path) -> None:
    """Let this host see the files that other hosts have just created in a shared folder.

    NFS caches for up to a minute that a file does not exist. Setting the folder's time fetches its current attributes,
    which invalidates that cache. A file that exists needs no refresh, because opening it revalidates it.
    """
    with suppress(OSError):
        os.utime(folder)


def is_a(test: Callable[[Path], bool], path: Path) -> bool:
    """`test(path)`; False for a path that is invalid, such as one that is too long or contains a NUL."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


def is_deleted(path: Path) -> bool:
    """Whether the file system reports that it does not exist; any other error means that it is unknown."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # a stale handle, an expired ticket
        return False
    return False


def read_bytes(path: Path) -> bytes:
    """The content of such a file. Raises OSError, even if it is only larger than LARGEST_BYTES."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_BYTES:
            raise OSError(errno.EFBIG, "too large", str(path))
        return file.read()


def read_text(path: Path) -> str:
    """The text of such a file, with invalid UTF-8 replaced. Raises OSError as `read_bytes` does."""
    return read_bytes(path).decode("utf-8", "replace")


def tail_text(path: Path, size: int = TAIL_BYTES) -> str:
    """The last `size` bytes of such a file as text, with invalid UTF-8 replaced; empty if it cannot be read."""
    try:
        with opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def read_json(path: Path) -> Any:
    """The JSON value in a file, or None if it cannot be read."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, such as a heartbeat; empty if there is none that can be read."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Mapping[str, Any], *, reserve: Path | None = None) -> None:
    """Replace a JSON file atomically: a reader sees either the old text or the new text.

    On a full disk half of the `reserve` file, if there is one, is released for it. Raises OSError.
    """
    try:
        _replace(path, value)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or reserve is None or not reserve.exists():
            raise
        os.truncate(reserve, reserve.stat().st_size // 2)
        _replace(path, value)


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(2).hex()}")
    # ASCII only: a file name that is not UTF-8 contains surrogates, which cannot be encoded
    text = json.dumps(value, indent=1) + "\n"
    try:
        new.write_text(text, encoding="ascii")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def log(text: str) -> None:
    """Print a line into a supervisor's log, which may be on a full disk."""
    with suppress(OSError):
        print(text, flush=True)


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    n = value if type(value) is float else number(value)
    return n if n is not None and math.isfinite(n) else None


def number(value: Any) -> float | None:
    """A metric's value: numbers, and the strings "nan", "inf" and "-inf" (which JSON lacks) as floats; else None."""
    if type(value) is float or value is None:  # the usual case: halves the time to read a long run
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def is_only_writable_by(user: int, *paths: Path) -> bool:
    """Whether these files and folders belong to the user, are not links, and can be written by nobody else."""
    stats = [path.lstat() for path in paths]
    return all(each.st_uid == user and not each.st_mode & 0o022 and not stat.S_ISLNK(each.st_mode) for each in stats)


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a folder if filling it fails. Raises RunFolderError for errors of the disk."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # labkit's, seconds old, and nothing has run in it
        if isinstance(error, OSError):
            raise RunFolderError(f"the run could not be started in {folder}: {error}") from None
        raise
