"""Sends values between a notebook and its ranks: tensors, arrays, numbers, text, and tuples, lists and dictionaries of
them, in torch's own format. Reading it executes nothing, which a pickle of anything else might."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CannotBeSentError(ValueError):
    """A value is not made of what can be sent."""


def values_to(values: Mapping[str, Any], *, together: bool = True) -> bytes:
    """Named values as bytes, tensors without their graph. `together`: every rank sends them, so that sharded tensors
    are gathered; otherwise only this rank's shard is sent. Raises CannotBeSentError."""
    import torch

    buffer = io.BytesIO()
    try:
        torch.save({name: _plain(value, together) for name, value in values.items()}, buffer)
        buffer.seek(0)
        _load(buffer)
    except Exception as error:  # of pickle, of a lambda, of an object's own methods
        wrong = [f"{name} is of type {_kind(value)}" for name, value in values.items() if not _is_sent(value, together)]
        expected = "tensors, arrays, numbers, text, and tuples, lists and dictionaries of these can be sent"
        raise CannotBeSentError(f"{'; '.join(wrong) or error}: only {expected}") from None
    return buffer.getvalue()


def values_from(path: Path, *, remove: bool = False) -> dict[str, Any]:
    """The values that `values_to` has written, with tensors on the CPU. `remove`: they were for this reader alone."""
    with path.open("rb") as file:
        values: dict[str, Any] = _load(file)
    if remove:
        path.unlink(missing_ok=True)
    return values


def _load(file: Any) -> Any:
    import torch

    with torch.serialization.safe_globals(_of_numpy()):
        return torch.load(file, map_location="cpu", weights_only=True)


def _of_numpy() -> list[Any]:
    """What an array's bytes are made of."""
    try:
        import numpy as np
    except ImportError:
        return []
    kinds = {type(np.dtype(code)) for code in (*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "?", "S", "U")}
    return [np.ndarray, np.dtype, np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0], *kinds]


def _plain(value: Any, together: bool) -> Any:
    """The value with every tensor on the CPU, without its graph."""
    import torch

    if hasattr(value, "full_tensor"):
        value = value.full_tensor() if together else value.to_local()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # a part would bring the whole of what it is a part of
        return (
            value.clone()
            if value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes
            else value
        )
    if isinstance(value, dict):
        return {name: _plain(each, together) for name, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(each, together) for each in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _is_sent(value: Any, together: bool) -> bool:
    import torch

    if isinstance(value, dict):
        return all(_is_sent(each, together) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_is_sent(each, together) for each in value)
    try:
        buffer = io.BytesIO()
        torch.save(value if not hasattr(value, "detach") else 0, buffer)
        buffer.seek(0)
        _load(buffer)
    except Exception:
        return False
    return True


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
