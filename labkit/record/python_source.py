"""The text of Python source code in whatever encoding it declares, as Python itself reads it (PEP 263)."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

from labkit.record.files import read_bytes

__all__ = ["decoded", "encoded", "lines_of", "read_source"]


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
