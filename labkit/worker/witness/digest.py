"""Computes exact digests of tensors: the sum of their bytes as 64-bit words, which no order of adding changes.

On a CPU numpy adds up the tensor's own memory. On CUDA the device does, and its sums are copied without waiting for it:
a digest is ready at some later step. Digests of the two kinds are not compared.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from labkit.worker.witness.later import Later

PIECE = 16 << 10  # bytes that a scrubber sums at a step
MOST_IN_PIECE = 8  # tensors
MOST_PIECES = 1024  # of larger models others are never summed
WORD = (1 << 64) - 1


def read_digests(torch: Any, tensors: Sequence[Any], later: Later, then: Callable[[list[int]], None]) -> None:
    """Call `then` with the digest of each of the tensors, at once or later; zero for one of another device than the
    first."""
    device = tensors[0].device if tensors else None
    if device is None or (device.type == "cpu" and numpy()):
        then([_sum_on_cpu(tensor) if tensor.device == device else 0 for tensor in tensors])
    elif device.type in ("cpu", "cuda"):
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        sums = [_sum_by_torch(torch, tensor) if tensor.device == device else nothing for tensor in tensors]
        later.read(torch.stack(sums), lambda values: then([value & WORD for value in values]))
    else:
        then([0] * len(tensors))


class Scrubber:
    """Sums the tensors on the CPU of a list in turn, a piece of 16 KiB at each call, at constant cost. Tensors are held
    weakly; one whose memory has moved is found again."""

    def __init__(self, find: Callable[[], Sequence[Any]]):
        self._find = find
        # Each tensor, where it was and how long, and its words.
        self.pieces: list[list[tuple[Callable[[], Any], tuple[int, int], Any]]] = []
        self.is_whole = True  # whether all of the tensors are summed in turn
        self.prepare()

    def prepare(self) -> None:
        """Find the tensors and where they are."""
        pieces: list[list[tuple[Callable[[], Any], tuple[int, int], Any]]] = []
        size = PIECE
        for tensor in self._find():
            if not _is_on_cpu(tensor) or (words := _words(tensor)) is None:
                continue
            for start in range(0, len(words), PIECE // 8):
                part = words[start : start + PIECE // 8]
                if size + part.nbytes > PIECE or len(pieces[-1]) == MOST_IN_PIECE:
                    pieces.append([])
                    size = 0
                size += part.nbytes
                pieces[-1].append((weakref.ref(tensor), (tensor.data_ptr(), tensor.nbytes), part))
        every = -(-len(pieces) // MOST_PIECES) or 1
        self.pieces, self.is_whole = pieces[::every], every == 1

    def sum(self, turn: int) -> int:
        """The sum of the piece whose turn it is; 0 if there is none."""
        if not self.pieces:
            return 0
        piece = self.pieces[turn % len(self.pieces)]
        for reference, memory, _ in piece:
            tensor = reference()
            if tensor is None or (tensor.data_ptr(), tensor.nbytes) != memory:
                self.prepare()
                piece = self.pieces[turn % len(self.pieces)] if self.pieces else []
                break
        total = 0
        for _, _, words in piece:
            total += int(_add(words))
        return total & WORD


def numpy() -> Any:
    return sys.modules.get("numpy")  # torch has imported it, if it is there


def _add(words: Any) -> Any:
    return numpy().add.reduce(words)


def _is_on_cpu(tensor: Any) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and numpy() is not None


def _words(tensor: Any) -> Any:
    """The memory of a contiguous tensor as 64-bit words, without a last one that is not full; None if there is none."""
    count = tensor.numel() * tensor.element_size() // 8
    if not count:
        return None
    return numpy().frombuffer((ctypes.c_uint64 * count).from_address(tensor.data_ptr()), "u8", count)


def _sum_on_cpu(tensor: Any) -> int:
    tensor = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    words, size = _words(tensor), tensor.numel() * tensor.element_size()
    rest = ctypes.string_at(tensor.data_ptr() + size // 8 * 8, size % 8) if size % 8 else b""
    return (int(_add(words)) if words is not None else 0) + int.from_bytes(rest, "little") & WORD


def _sum_by_torch(torch: Any, tensor: Any) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.numel() * tensor.element_size()
    word = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.int8) if size % kind.itemsize == 0)
    if tensor.storage_offset() * tensor.element_size() % word.itemsize:
        tensor = tensor.clone()
    return tensor.view(-1).view(word).sum(dtype=torch.int64)
