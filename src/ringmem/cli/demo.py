"""``ringmem demo``: a real program's allocations on a device, and real data both ways, checked.

Seven steps. The trace is replayed on the driver's stream-ordered pool, once cold and once warm, and
nothing touches the memory. It is replayed again with marks: every block is marked on the device
at its start and at its end with its own number, and both are read back just before it is freed, so
two blocks that overlap while both live are found. Then data goes up on one stream and down on
another, alone and both at once, and every byte is compared. The trace is played by native code on
ringmem's pool and on the driver's, for their figures side by side. A buffer grows in place. Last,
the trace's events are streamed through a ring kernel that keeps the live and peak curve.

What a device or an installation lacks for a step is said in its place; the other steps are done.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.cli.demo_checks import Copies, Marker, Progress, copy_both_ways
from ringmem.cli.demo_growable import Growth, grow
from ringmem.cli.demo_ring import Streamed, stream_events
from ringmem.native import _native
from ringmem.observe import ReplayTimes, Trace, replay

if TYPE_CHECKING:
    from ringmem.buffers import DeviceBuffer
    from ringmem.device import Device, Stream

__all__ = ["Demo", "DemoResult"]


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
    pools: dict[str, dict[str, Any]]
    growable: Growth
    ring: Streamed
    picture: Path | None = None

    @property
    def verified(self) -> bool:
        """Whether everything that was done gave what it must; what was skipped does not count."""
        return (
            self.marks_right == self.marks
            and self.copies.verified
            and all(pool["completed"] for pool in self.pools.values())
            and self.growable.verified is not False
            and self.ring.verified is not False
        )

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
            "pools": self.pools,
            "marks": {"checked": self.marks, "right": self.marks_right, "seconds": self.marked_s},
            "copies": {
                "nbytes": self.copies.nbytes,
                "to_device_gb_per_s": self.copies.to_device / 1e9,
                "to_host_gb_per_s": self.copies.to_host / 1e9,
                "both_ways_gb_per_s": self.copies.both / 1e9,
                "verified": self.copies.verified,
            },
            "growable": self.growable.to_dict(),
            "ring": self.ring.to_dict(),
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
        """Do the seven steps.

        Raises
        ------
        OutOfMemoryError
            The device has less memory free than the trace needs.
        DriverError
            The driver failed otherwise. All memory is given back.
        TimeoutError, KernelFailedError
            The ring kernel did not answer, or ended by itself.
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
            copies = copy_both_ways(self.device, streams[0], streams[1], progress)
            pools = self._pools(streams, progress)
            growable = grow(self.device, streams[0], progress)
        ring = stream_events(self.device, self.trace, progress)
        return DemoResult(
            self.device,
            self.trace,
            cold,
            warm,
            marked_s,
            marks,
            right,
            reserved_peak,
            copies,
            pools,
            growable,
            ring,
        )

    def _pools(self, streams: list[Stream], progress: Progress) -> dict[str, dict[str, Any]]:
        """The same trace natively, twice, on ringmem's pool and on the driver's."""
        from ringmem.pool import NativePool, Pool

        kinds = {"ringmem": Pool, "native": NativePool}
        if not self.device.capabilities.memory_pools:
            del kinds["native"]
        figures = {}
        for number, (name, kind) in enumerate(kinds.items()):
            progress("pools", number, len(kinds))
            with closing(kind(self.device)) as pool:
                trace, handles = self.trace, [stream.handle for stream in streams]
                arrays = trace.kind, trace.id, trace.size, trace.stream
                found: Any = _native.Replay(self.device, pool, *arrays, handles).run(2)
                for stream in streams:
                    stream.synchronize()
            cold, warm = found["repetitions"]
            figures[name] = {
                "completed": found["completed"],
                "peak_reserved_bytes": found["peak_reserved_bytes"],
                "reserved_over_live": found["peak_reserved_bytes"] / trace.peak_live_bytes,
                "cold_ns_mean": cold["mean"],
                "warm_ns_mean": warm["mean"],
                "warm_ns_p50": warm["p50"],
            }
        return figures

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
            marker = Marker(self.device, answers)
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
