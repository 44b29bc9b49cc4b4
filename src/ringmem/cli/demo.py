"""``ringmem demo``: a real program's allocations on a device, and real data both ways, checked.

Four steps. The trace is replayed on the driver's stream-ordered pool, once cold and once warm, and
nothing touches the memory. It is replayed again with marks: every block is marked on the device
at its start and at its end with its own number, and both are read back just before it is freed, so
two blocks that overlap while both live are found. Then data goes up on one stream and down on
another, alone and both at once, and every byte is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.native import _native
from ringmem.observe import ReplayTimes, Trace, replay

if TYPE_CHECKING:
    from ringmem.buffers import DeviceBuffer, PinnedBuffer
    from ringmem.device import Device, Stream

__all__ = ["Copies", "Demo", "DemoResult"]

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


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the demo saw; see :meth:`to_dict` for the units."""

    device: Device
    trace: Trace
    cold: ReplayTimes[DeviceBuffer, Stream]
    warm: ReplayTimes[DeviceBuffer, Stream]
    marked_s: float
    marks: int
    marks_right: int
    reserved_peak_bytes: int | None
    copies: Copies
    picture: Path | None = None

    @property
    def verified(self) -> bool:
        """Whether everything that was read back is what was written."""
        return self.marks_right == self.marks and self.copies.verified

    def to_dict(self) -> dict[str, Any]:
        """One JSON object: times in their named unit, bandwidth in GB/s (10^9 bytes)."""
        return {
            "device": self.device.name,
            "product_name": self.device.product_name,
            "trace": {
                "name": self.trace.name,
                "events": self.trace.events,
                "allocations": self.trace.allocations,
                "peak_live_bytes": self.trace.peak_live_bytes,
            },
            "replay": {
                "allocator": "driver pool, through DeviceBuffer",
                "reserved_peak_bytes": self.reserved_peak_bytes,
                "cold": _times(self.cold),
                "warm": _times(self.warm),
            },
            "marks": {"checked": self.marks, "right": self.marks_right, "seconds": self.marked_s},
            "copies": {
                "nbytes": self.copies.nbytes,
                "to_device_gb_per_s": self.copies.to_device / 1e9,
                "to_host_gb_per_s": self.copies.to_host / 1e9,
                "both_ways_gb_per_s": self.copies.both / 1e9,
                "verified": self.copies.verified,
            },
            "verified": self.verified,
            "picture": str(self.picture) if self.picture else None,
        }


def _times(times: ReplayTimes[DeviceBuffer, Stream]) -> dict[str, float]:
    def at(values: np.ndarray[Any, Any], percent: float) -> float:
        return float(np.percentile(values, percent)) / 1000 if len(values) else 0.0

    return {
        "seconds": times.seconds,
        "allocate_us_p50": at(times.allocate_ns, 50),
        "allocate_us_p99": at(times.allocate_ns, 99),
        "free_us_p50": at(times.free_ns, 50),
        "free_us_p99": at(times.free_ns, 99),
    }


@dataclass(frozen=True, eq=False)
class Demo:
    """A device and a trace, both found to be good."""

    device: Device
    trace: Trace

    @classmethod
    def prepare(cls, device: str | None, trace: Path | None) -> Demo:
        """Find the device and read the trace; a wrong argument is found before any work.

        Raises
        ------
        InvalidDeviceError, NotInitializedError, InvalidValueError
            There is no such device, or the file is no trace.
        """
        from ringmem.device import Device

        return cls(Device(device), Trace.shipped() if trace is None else Trace.load(trace))

    def run(self, progress: Progress) -> DemoResult:
        """Do the four steps.

        Raises
        ------
        OutOfMemoryError
            The device has less memory free than the trace needs.
        DriverError
            The driver failed otherwise. All memory is given back.
        """
        with ExitStack() as open_until_end:
            streams = [
                open_until_end.enter_context(closing(self.device.create_stream()))
                for _ in range(max(2, self.trace.streams))
            ]
            reserved = _ReservedPeak(self.device)
            cold = self._replay(streams, progress, "replay, cold")
            warm = self._replay(streams, progress, "replay, warm")
            start = time.perf_counter()
            marks, right = self._replay_marked(streams, progress)
            marked_s = time.perf_counter() - start
            reserved_peak = reserved.read()
            copies = _copy_both_ways(self.device, streams[0], streams[1], progress)
        return DemoResult(
            self.device, self.trace, cold, warm, marked_s, marks, right, reserved_peak, copies
        )

    def _replay(
        self, streams: list[Stream], progress: Progress, step: str
    ) -> ReplayTimes[DeviceBuffer, Stream]:
        from ringmem.buffers import DeviceBuffer

        def allocate(nbytes: int, stream: Stream) -> DeviceBuffer:
            return DeviceBuffer(nbytes, device=self.device, stream=stream)

        def free(buffer: DeviceBuffer, stream: Stream) -> None:
            buffer.close(stream=stream)

        times = replay(
            self.trace, allocate, free, streams, lambda n: progress(step, n, self.trace.events)
        )
        while times.remaining:
            times.remaining.pop()[0].close()
        return times

    def _replay_marked(self, streams: list[Stream], progress: Progress) -> tuple[int, int]:
        """Replay with marks; return how many blocks were marked and how many came back right."""
        from ringmem.buffers import PinnedBuffer

        with PinnedBuffer(2 * self.trace.allocations, np.uint32, device=self.device) as answers:
            marker = _Marker(self.device, answers)
            times = replay(
                self.trace,
                marker.allocate,
                marker.free,
                streams,
                lambda n: progress("replay, marked", n, self.trace.events),
            )
            for block, stream in times.remaining:
                marker.free(block, stream)
            times.remaining.clear()
            for stream in streams:
                stream.synchronize()
            return marker.marked, marker.count_right()


class _Marker:
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


def _copy_both_ways(device: Device, up: Stream, down: Stream, progress: Progress) -> Copies:
    """Copy on two streams, one way, the other way, and both at once; compare every byte."""
    from ringmem.buffers import DeviceBuffer, PinnedBuffer

    nbytes = _COPY_NBYTES[device.platform]
    words = nbytes // 8
    with ExitStack() as stack:
        sources, targets, stores = (
            [
                stack.enter_context(kind(words, np.uint64, device=device, **on))
                for on in ({"stream": up}, {"stream": down})
            ]
            for kind in (PinnedBuffer, PinnedBuffer, DeviceBuffer)
        )
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            np.asarray(source)[:] = _pattern(words, number)
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


def _pattern(words: int, seed: int) -> np.ndarray[Any, Any]:
    """Words that differ from each other and between seeds: a misplaced byte is seen."""
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


class _ReservedPeak:
    """The most that the driver's pool has held since this was made; None where there is no pool."""

    def __init__(self, device: Device) -> None:
        self._device = device
        allocator = device.allocator
        self._pool = (
            allocator.pool if isinstance(allocator, _native.StreamOrderedAllocator) else None
        )
        if self._pool is not None:
            high = _native.PoolAttribute.reserved_high
            device.driver.pool_set(device.ordinal, self._pool, high, 0)

    def read(self) -> int | None:
        if self._pool is None:
            return None
        high = _native.PoolAttribute.reserved_high
        return self._device.driver.pool_get(self._device.ordinal, self._pool, high)
