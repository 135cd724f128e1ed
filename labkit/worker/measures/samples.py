"""Counts the samples that each step of a training uses.

torch's DataLoader says from how many indices it collates a batch; the batch itself cannot: its first dimension may be
time, a channel, or the nodes of all graphs. Samples that cannot be counted are nan.

A step uses a batch of each loader for each of its backward passes, the oldest first: a script may fetch batches ahead,
in another thread, or all micro-batches of a step at once.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

MOST_UNUSED = 4096  # batches
AHEAD = {"accelerate.data_loader": 1}  # how many batches a library's module fetches ahead
OURS = __name__.rpartition(".measures")[0]
# What is stored on the iterator of a DataLoader: the size of its newest batch, by number the sizes of those that its
# workers make, whether its batches lie along the first dimension of their tensors, and its stream.
SIZE, SIZES, IS_BATCH_FIRST, STREAM = "_labkit_size", "_labkit_sizes", "_labkit_batch_first", "_labkit_stream"


def take_index(iterator: Any, index: Any) -> None:
    """Store how many samples the batch of this index, which has just been drawn, will have. Never raises."""
    own = iterator.__dict__
    try:
        size = len(index) if own["_auto_collation"] or type(index) is list else math.nan
    except Exception:  # the script's own index may be anything
        size = math.nan
    if "_send_idx" in own and not own["_dataset_kind"]:  # workers make batches ahead
        sizes = own.setdefault(SIZES, {})
        sizes[own["_send_idx"]] = size
        sizes.pop(own["_rcvd_idx"] - 2, None)  # of an evaluation's batch, whose size nobody asks for
    else:
        own[SIZE] = size


def _size(own: dict[str, Any], batch: Any) -> float:
    """How many samples the batch that an iterator has just returned has. `own` are the iterator's attributes."""
    if own.get("_dataset_kind"):
        return _size_in_stream(own, batch)
    sizes: dict[int, float] | None = own.get(SIZES)
    if sizes is None:
        size: float = own.get(SIZE, math.nan)
        return size
    returned = own["_rcvd_idx"] - 1
    if not own["_in_order"]:
        returned = max(number for number in sizes if number not in own["_task_info"])
    return sizes.pop(returned, math.nan)


def _size_in_stream(own: dict[str, Any], batch: Any) -> float:
    """The size of an IterableDataset's batch, which is smaller than announced where the data, or a worker's part of
    them, end. Then the batch tells it, if the first batch has shown in which dimension."""
    size: float = own.get(SIZE, math.nan)
    fetcher = own.get("_dataset_fetcher")  # None with workers
    if size != size or own["_drop_last"]:
        return size
    if IS_BATCH_FIRST not in own:
        is_default = own["_collate_fn"] is sys.modules["torch"].utils.data.default_collate
        shapes = [*_shapes(batch)]
        own[IS_BATCH_FIRST] = is_default or all(shape[0] == size and size not in shape[1:] for shape in shapes)
    if fetcher is not None and not fetcher.ended:
        return size
    sizes = {shape[0] for shape in _shapes(batch)} if own[IS_BATCH_FIRST] else set()
    return sizes.pop() if len(sizes) == 1 else math.nan


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors in a batch, and the lengths of its lists of text."""
    if shape := getattr(value, "shape", None):
        yield tuple(shape)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _shapes(each)
    elif isinstance(value, list | tuple):
        if value and isinstance(value[0], str | bytes):
            yield (len(value),)
        else:
            for each in value:
                yield from _shapes(each)


class Stream:
    """The unused batches of one loader, through its epochs. `sampler` is a weak reference. `ahead`: how many batches
    the script fetches ahead of their use at most, None if unknown. `in_excess`: how many steps in turn had more.
    `is_used`: steps have used it. `is_continued`: an earlier step has followed a batch of the same epoch."""

    __slots__ = ("ahead", "has_ended", "in_excess", "is_continued", "is_used", "sampler", "sizes")

    def __init__(self, sampler: Callable[[], Any]):
        self.sampler = sampler
        self.sizes: deque[float] = deque(maxlen=MOST_UNUSED)
        self.ahead: float | None = None
        self.in_excess = 0
        self.is_used = self.is_continued = self.has_ended = False

    def use(self, passes: int) -> float:
        """The samples of a step's batches. More batches than `passes` may have been skipped, joined, or fetched ahead:
        unknown; and after the second time in turn all later steps are, too."""
        self.is_used = True
        sizes, ahead = self.sizes, self.ahead
        if self.in_excess > 1:
            sizes.clear()
            return math.nan
        unused = max(0, len(sizes) - passes) if passes else 0
        is_known = unused <= (ahead or 0)
        if is_known or ahead is None:
            self.in_excess = 0
            if not self.has_ended and ahead != math.inf:
                self.ahead = unused
        else:
            self.in_excess += 1
            unused = int(ahead)
        samples = sum([sizes.popleft() for _ in range(len(sizes) - unused)])
        return samples if is_known else math.nan


class Batches:
    """The batches that the script has fetched for its training and not used yet."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []  # the one that was fetched from last is last

    def fetched(self, iterator: Any, batch: Any, *, elsewhere: bool = False) -> None:
        """Add a batch. `elsewhere`: another thread has fetched it, any number of steps ahead."""
        own = iterator.__dict__
        stream: Stream | None = own.get(STREAM)
        if stream is None or own.get("_num_yielded") == 1:  # persistent workers have one iterator for all epochs
            stream = own[STREAM] = self._stream_of(own.get("_index_sampler"), elsewhere)
        stream.sizes.append(_size(own, batch))
        if elsewhere:
            stream.ahead = math.inf
        streams = self._streams
        if not streams or streams[-1] is not stream:
            if stream in streams:
                streams.remove(stream)
            streams.append(stream)

    def ended(self, iterator: Any) -> None:
        """Note that an iterator has no more batches."""
        if stream := iterator.__dict__.get(STREAM):
            stream.has_ended = True

    def _stream_of(self, sampler: Any, elsewhere: bool) -> Stream:
        """The stream of the loader's last epoch, if the training uses it, or a new one."""
        for stream in self._streams:
            is_same = sampler is not None and stream.sampler() is sampler
            if stream.is_used and (is_same or (elsewhere and stream.has_ended)):
                break
        else:
            stream = Stream(weakref.ref(sampler) if hasattr(type(sampler), "__weakref__") else lambda: None)
            stream.ahead = AHEAD.get(_fetching_module())
        stream.has_ended = stream.is_continued = False
        if stream.ahead == 0:
            stream.sizes.clear()  # the last epoch skipped them, or an evaluation used them
        return stream

    def of_pass(self, number: int) -> float | None:
        """The samples of the batch that a step's backward pass uses, None if an earlier pass uses it, too."""
        sizes = self._streams[-1].sizes if self._streams else ()
        return sizes[number] if number < len(sizes) else None

    def of_step(self, passes: int) -> float:
        """The samples of all batches that a step has used in so many whole backward passes, or, with none, of all that
        were fetched; nan if they are unknown."""
        streams = self._streams
        if len(streams) == 1 and len(sizes := streams[0].sizes) == 1:  # the usual step
            stream = streams[0]
            if not stream.in_excess:
                stream.is_used = True
                if not stream.has_ended:
                    stream.ahead = 0
                return sizes.popleft()
        return self._of_several(passes)

    def _of_several(self, passes: int) -> float:
        """As `of_step`, if several loaders may be meant. One that no step has used before, and that goes on, may be the
        training's or an evaluation's; one that has ended before the next backward pass is an evaluation's."""
        fetched = [stream for stream in self._streams if stream.sizes]
        if not fetched:
            return math.nan
        used = [stream for stream in fetched if stream.is_used or stream.is_continued]
        new = [stream for stream in fetched if stream not in used and not stream.has_ended]
        if not used and len(new or fetched) == 1:
            used, new = new or fetched, []
        samples = sum([stream.use(passes) for stream in used])
        for stream in new:
            stream.is_continued = True
            stream.sizes.clear()
        self._streams = [*new, *used]
        return math.nan if new or not used else samples


def _fetching_module() -> str:
    """The name of the module that fetches a batch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))).startswith(OURS):
        frame = frame.f_back
    return "" if frame is None else name
