"""Reads the user's own files: what is not a file of Python text is refused in one sentence."""

from __future__ import annotations

import stat
from pathlib import Path

from labkit.errors import ScriptError
from labkit.files import LARGEST_BYTES, decoded

__all__ = ["read_file", "text_of"]

OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_file(path: Path, expected: str = "a Python script") -> bytes:
    """The content of a file. Raises ScriptError if it is not a regular file, or too large, or cannot be read."""
    name = str(path).replace("\0", "")
    try:
        status = path.stat()  # opening a pipe would wait for a writer, and opening a device may do something
        if (kind := stat.S_IFMT(status.st_mode)) in OTHER_KINDS:
            raise ScriptError(f"{name} is {OTHER_KINDS[kind]}; expected {expected}")
        if status.st_size > LARGEST_BYTES:
            raise ScriptError(
                f"{name} has {status.st_size:,} bytes; expected {expected} of at most {LARGEST_BYTES:,} bytes"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        link = f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else error.strerror
        raise ScriptError(f"script not found: {name} ({link})") from None
    except PermissionError as error:
        raise ScriptError(f"{name} cannot be read: {error.strerror}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ScriptError(f"script not found: {name} ({getattr(error, 'strerror', None) or error})") from None


def text_of(source: bytes, path: Path) -> str:
    """The text of a file of Python. Raises ScriptError if Python could not decode it."""
    try:
        return decoded(source)
    except (SyntaxError, UnicodeError) as error:
        raise ScriptError(
            f"{path} cannot be decoded: {error}. Save it as UTF-8, or declare its encoding in the first line: "
            "# -*- coding: latin-1 -*-"
        ) from None
