"""How the demo checks what it sees: marks in every block, and copies both ways on two streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ringmem.buffers import DeviceBuffer, PinnedBuffer
    from ringmem.device import Device, Stream

__all__ = ["Copies", "Marker", "Progress", "copy_both_ways", "pattern"]

Progress = Callable[[str, int, int], object]  # step, done, total

_COPY_NBYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
_COPY_REPEATS = 5
_WORD = 4  # bytes of a mark


@dataclass(frozen=True)
class Copies:
    """Bandwidths in bytes a second, each direction; `both` is one direction while both run."""

    nbytes: int
    to_device: float
    to_host: float
    both: float
    verified: bool


class Marker:
    """Allocates blocks marked at both ends with their number, and reads the marks before freeing.

    Marks and answers are work on the stream, like any program's: the host waits for nothing.
    """

    def __init__(self, device: Device, answers: PinnedBuffer) -> None:
        self._device = device
        self._answers = answers  # two words a block
        np.asarray(answers)[:] = 0
        self._number = 0
        self.marked = 0

    def allocate(self, nbytes: int, stream: Stream) -> tuple[DeviceBuffer, int]:
        """Allocate a block and mark it, if two marks fit."""
        from ringmem.buffers import DeviceBuffer

        buffer = DeviceBuffer(nbytes, device=self._device, stream=stream)
        number = self._number
        self._number += 1
        if nbytes >= 2 * _WORD:
            self.marked += 1
            first, last = _ends(buffer)
            first.fill(number + 1, stream=stream)
            last.fill(number + 1, stream=stream)
        return buffer, number

    def free(self, block: tuple[DeviceBuffer, int], stream: Stream) -> None:
        """Read the block's marks, then free it, all in stream order."""
        buffer, number = block
        if buffer.nbytes >= 2 * _WORD:
            first, last = _ends(buffer)
            first.copy_to(self._answers[2 * number : 2 * number + 1], stream=stream)
            last.copy_to(self._answers[2 * number + 1 : 2 * number + 2], stream=stream)
            del first, last  # a buffer with live views cannot be closed
        buffer.close(stream=stream)

    def count_right(self) -> int:
        """How many blocks had their own number at both ends; the streams are synchronized."""
        words = np.asarray(self._answers).reshape(-1, 2)
        numbers = np.arange(1, len(words) + 1, dtype=np.uint32)
        return int(np.count_nonzero((words == numbers[:, None]).all(axis=1)))


def _ends(buffer: DeviceBuffer) -> tuple[DeviceBuffer, DeviceBuffer]:
    """The first and the last whole word of a block."""
    last = buffer.nbytes // _WORD * _WORD - _WORD
    return buffer[:_WORD].view(np.uint32), buffer[last : last + _WORD].view(np.uint32)


def copy_both_ways(device: Device, up: Stream, down: Stream, progress: Progress) -> Copies:
    """Copy on two streams, one way, the other way, and both at once; compare every byte."""
    from ringmem.buffers import DeviceBuffer, PinnedBuffer

    nbytes = _COPY_NBYTES[device.platform]
    words = nbytes // 8
    with ExitStack() as stack:
        sources, targets = (
            [stack.enter_context(PinnedBuffer(words, np.uint64, device=device)) for _ in range(2)]
            for _ in range(2)
        )
        stores = [
            stack.enter_context(DeviceBuffer(words, np.uint64, device=device, stream=stream))
            for stream in (up, down)
        ]
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            np.asarray(source)[:] = pattern(words, number)
            np.asarray(target)[:] = 0

        def upload(which: int) -> None:
            stores[which].copy_from(sources[which], stream=up)

        def download(which: int) -> None:
            stores[which].copy_to(targets[which], stream=down)

        def both() -> None:
            upload(1)
            download(0)

        seconds = {}
        for done, (name, copy) in enumerate(
            (("up", lambda: upload(0)), ("down", lambda: download(0)), ("both", both))
        ):
            progress("copies", done, 4)
            seconds[name] = _fastest(copy, (up, down))
        progress("copies", 3, 4)
        download(1)
        down.synchronize()
        verified = all(
            np.array_equal(np.asarray(source), np.asarray(target))
            for source, target in zip(sources, targets, strict=True)
        )
    return Copies(
        nbytes, nbytes / seconds["up"], nbytes / seconds["down"], nbytes / seconds["both"], verified
    )


def pattern(words: int, seed: int) -> np.ndarray[Any, Any]:
    """Return words that differ from each other and between seeds: a misplaced byte is seen."""
    odd = np.uint64(0x9E3779B97F4A7C15)
    return (np.arange(words, dtype=np.uint64) + np.uint64(seed << 40)) * odd


def _fastest(copy: Callable[[], object], streams: tuple[Stream, ...]) -> float:
    """Seconds of the fastest of a few copies, until all of the streams are done."""
    best = float("inf")
    for _ in range(_COPY_REPEATS):
        start = time.perf_counter()
        copy()
        for stream in streams:
            stream.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
