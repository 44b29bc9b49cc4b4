"""``ringmem replay``: a recorded program's allocations on an allocator, timed, and what it held.

ringmem's allocators are replayed natively. Other libraries' run in a loop of Python, as their users
call them; what the loop itself costs is measured with an empty one and subtracted.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.cli.allocators import FOREIGN_ALLOCATORS, ForeignAllocator, open_allocator
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, OutOfMemoryError, RingmemError
from ringmem.observe import Trace

if TYPE_CHECKING:
    from ringmem.device import Device, Stream

__all__ = ["ALLOCATORS", "ReplaySettings", "find_capacity", "run_replay"]

ALLOCATORS = ("ringmem", "native", *FOREIGN_ALLOCATORS)
Progress = Callable[[str, int, int], object]  # step, done, total
Result = dict[str, Any]

_MIB = 1 << 20
_MOST, _MOST_THREADS = (1 << 31) - 1, 1024
_POLL_S = 0.05
_EVERY = 1024  # events between two looks at the progress in a loop of Python


@dataclass(frozen=True)
class ReplaySettings:
    """What ``ringmem replay`` was asked; see its options."""

    trace: Trace
    device: str | None = None
    allocator: str = "ringmem"
    capacity: int | None = None
    tight: bool = False
    threads: int = 1
    streams: int | None = None
    late: int = 0
    repetitions: int = 1

    def __post_init__(self) -> None:
        if self.allocator not in ALLOCATORS:
            raise InvalidValueError(
                f"allocator is {self.allocator!r}: give one of {', '.join(ALLOCATORS)}"
            )
        for name, least in (("threads", 1), ("late", 0), ("repetitions", 1), ("streams", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST:
                raise InvalidValueError(f"{name} is {value}: give {least} to {_MOST}")
        if self.threads > _MOST_THREADS:
            raise InvalidValueError(f"threads is {self.threads}: give 1 to {_MOST_THREADS}")
        if self.capacity is not None and self.capacity < 2 * _MIB:
            raise InvalidValueError(f"capacity is {self.capacity}: give 2 MiB, a page, or more")
        if self.allocator != "ringmem":
            for name in ("tight", "late"):
                if getattr(self, name):
                    raise InvalidValueError(f"{name} is an option of the allocator ringmem only")
        if self.allocator in FOREIGN_ALLOCATORS and self.threads != 1:
            raise InvalidValueError(f"threads is {self.threads}: a loop of Python has one thread")

    @property
    def stream_count(self) -> int:
        """As many streams as were asked for; the trace's own by default."""
        return self.trace.streams if self.streams is None else self.streams


# --- one replay -----------------------------------------------------------------------------------


def run_replay(
    settings: ReplaySettings, progress: Progress = lambda *_: None, *, series: bool = False
) -> Result:
    """Replay once (with its repetitions) and return the figures by name.

    Raises
    ------
    InvalidDeviceError, NotInitializedError, NotSupportedError, InvalidValueError
        There is no such device or allocator here.
    """
    runner = _run_foreign if settings.allocator in FOREIGN_ALLOCATORS else _run_native
    result = runner(settings, progress, series)
    result = {
        "trace": settings.trace.name,
        "allocator": settings.allocator,
        "capacity_bytes": settings.capacity,
        "tight": settings.tight,
        "threads": settings.threads,
        "streams": settings.stream_count,
        "late": settings.late,
        **result,
    }
    live, reserved = result["peak_live_bytes"], result["peak_reserved_bytes"]
    result["reserved_over_live"] = None if reserved is None else reserved / live
    return result


def _summary(found: Result) -> Result:
    """The first repetition is how a program meets the allocator; the others are listed."""
    first = found["repetitions"][0]
    return {
        "events": found["events"],
        "operations": first["operations"],
        "peak_live_bytes": found["peak_live_bytes"],
        "peak_reserved_bytes": found["peak_reserved_bytes"],
        "ns_per_operation": {key: first[key] for key in ("p50", "p99", "mean", "max")},
        "driver_calls": first["driver_calls"],
        "completed": found["completed"],
        "failed_event": None if found["completed"] else found["failed_event"],
        "error": found["error"] or None,
        "repetitions": found["repetitions"],
        "reserved_series": found["reserved"],
    }


def _run_native(settings: ReplaySettings, progress: Progress, series: bool) -> Result:
    trace = settings.trace
    with ExitStack() as stack:
        device = stack.enter_context(_device_for(settings))
        streams = [
            stack.enter_context(closing(device.create_stream()))
            for _ in range(settings.stream_count)
        ]
        pool = stack.enter_context(closing(_pool_for(settings, device)))
        replay = _native.Replay(
            device,
            pool,
            trace.kind,
            trace.id,
            trace.size,
            trace.stream,
            [stream.handle for stream in streams],
        )
        found = _watched(
            replay,
            lambda: replay.run(settings.repetitions, settings.threads, series),
            lambda done: progress("replay", done, trace.events * settings.repetitions),
        )
        summary = _summary(found)
        summary["device"] = device.name
        if settings.allocator == "native":
            # One driver call an operation, by what it is.
            for one in summary["repetitions"]:
                one["driver_calls"] = one["operations"]
            summary["driver_calls"] = summary["operations"]
        else:
            statistics = pool.statistics()
            summary["remaps"] = statistics.remaps
            summary["remap_seconds"] = statistics.remap_ns / 1e9
            summary["growth_seconds"] = statistics.growth_ns / 1e9
        _synchronize(streams)
    return summary


def _synchronize(streams: list[Stream]) -> None:
    for stream in streams:
        stream.synchronize()


def _pool_for(settings: ReplaySettings, device: Device) -> Any:
    from ringmem.pool import NativePool, Pool

    if settings.allocator == "native":
        return NativePool(device, max_size=settings.capacity or 0)
    return Pool(device, limit=settings.capacity, tight=settings.tight, debug=False)


@contextmanager
def _device_for(settings: ReplaySettings) -> Iterator[Device]:
    """The device; on the CPU a simulated one that is as large as the trace can need."""
    from ringmem.device import Device, devices_of, simulate

    device = Device(settings.device)
    with ExitStack() as stack:
        if device.platform == "cpu":
            roomy = 4 * settings.trace.peak_live_bytes + (1 << 30)
            capacity = settings.capacity or roomy
            # Whole pages, and on a device as small as the limit one that the limit cannot use.
            capacity = (capacity + 2 * _MIB - 1) // (2 * _MIB) * (2 * _MIB)
            simulation = stack.enter_context(simulate(capacity=capacity))
            device = simulation.devices[device.ordinal if device.ordinal < 1 else 0]
        if settings.late:
            ordinal = device.ordinal
            device = devices_of(_native.LateDriver(device.driver, settings.late))[ordinal]
        yield device


def _watched(replay: Any, run: Callable[[], Result], progress: Callable[[int], object]) -> Result:
    """Run in a thread, so that Ctrl-C and the progress bar work meanwhile."""
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(run())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="ringmem-replay", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            progress(replay.position)
    except BaseException:
        replay.cancel()
        thread.join()
        raise
    if failure:
        raise failure[0]
    return outcome[0]


# --- other libraries' allocators ------------------------------------------------------------------


def _run_foreign(settings: ReplaySettings, progress: Progress, series: bool) -> Result:
    from ringmem.device import Device

    if Device(settings.device).platform != "cuda":
        raise InvalidValueError(
            f"allocator is {settings.allocator!r}: it needs a CUDA device, not "
            f"{Device(settings.device).name}"
        )
    if Device(settings.device).ordinal != 0:
        raise InvalidValueError(
            f"device is {Device(settings.device).name}: allocators of other libraries are replayed "
            "on cuda:0"
        )
    trace = settings.trace
    with open_allocator(
        settings.allocator, streams=settings.stream_count, capacity=settings.capacity
    ) as allocator:
        nothing = ForeignAllocator(
            "nothing", lambda nbytes, stream: None, lambda token, stream: None, None, (), ""
        )
        overhead = float(np.median(_Loop(settings, nothing, lambda *_: None).run()["ns"]))
        found = []
        for number in range(settings.repetitions):
            loop = _Loop(
                settings,
                allocator,
                lambda done, n=number: progress(  # type: ignore[misc]
                    "replay", n * trace.events + done, trace.events * settings.repetitions
                ),
            )
            found.append(loop.run())
            if found[-1]["error"]:
                break
        version = allocator.version
    last = found[-1]
    reserved = [nbytes for one in found for nbytes in one["reserved"]]
    summary = _summary(
        {
            "events": trace.events,
            "peak_live_bytes": trace.peak_live_bytes,
            "peak_reserved_bytes": max(reserved) if reserved else None,
            "completed": not last["error"],
            "failed_event": last["event"],
            "error": last["error"],
            "repetitions": [_repetition(one["ns"], overhead) for one in found],
            "reserved": found[0]["reserved"] if series else [],
        }
    )
    return {**summary, "device": "cuda:0", "version": version, "harness_ns": overhead}


def _repetition(ns: np.ndarray[Any, Any], overhead: float) -> Result:
    net = np.maximum(ns - overhead, 0.0) if len(ns) else np.zeros(1)
    return {
        "operations": len(ns),
        "driver_calls": None,  # the libraries do not say
        "seconds": float(net.sum()) / 1e9,
        "mean": float(net.mean()),
        "p50": float(np.percentile(net, 50)),
        "p99": float(np.percentile(net, 99)),
        "max": float(net.max()),
    }


class _Loop:
    """One pass over the trace in Python; every call timed, what is reserved looked at between."""

    def __init__(
        self, settings: ReplaySettings, allocator: ForeignAllocator, progress: Callable[[int], Any]
    ) -> None:
        self._trace = settings.trace
        self._streams = settings.stream_count
        self._allocator = allocator
        self._progress = progress
        self._live: dict[int, tuple[Any, int]] = {}

    def run(self) -> Result:
        """Return ``ns`` of each operation, ``reserved`` after each, and where it failed."""
        ns: list[int] = []
        reserved: list[int] = []
        result: Result = {"event": None, "error": None}
        gc.disable()
        try:
            self._play(ns, reserved, result)
        finally:
            gc.enable()
            for token, stream in self._live.values():
                self._allocator.free(token, stream)
            self._live.clear()
        return {**result, "ns": np.array(ns, np.float64), "reserved": reserved}

    def _play(self, ns: list[int], reserved: list[int], result: Result) -> None:
        trace, live, now = self._trace, self._live, time.perf_counter_ns
        allocate, free, held = (
            self._allocator.allocate,
            self._allocator.free,
            self._allocator.reserved,
        )
        events = zip(
            trace.kind.tolist(), trace.id.tolist(), trace.size.tolist(), trace.stream.tolist(),
            strict=True,
        )  # fmt: skip
        for number, (kind, id_, nbytes, in_trace) in enumerate(events):
            if number % _EVERY == 0:
                self._progress(number)
            if kind == 1:
                stream = (id_ if trace.streams == 1 else in_trace) % self._streams
                try:
                    start = now()
                    token = allocate(nbytes, stream)
                    ns.append(now() - start)
                except self._allocator.out_of_memory as error:
                    result.update(event=number, error=f"{type(error).__name__}: {error}"[:400])
                    return
                live[id_] = (token, stream)
                del token
            elif kind == 2:
                cell = live.pop(id_)
                start = now()
                free(*cell)
                ns.append(now() - start)
            else:
                continue
            if held is not None:
                reserved.append(held())


# --- the smallest capacity ------------------------------------------------------------------------


def find_capacity(settings: ReplaySettings, progress: Progress = lambda *_: None) -> Result:
    """Find the smallest capacity that the trace survives, to 2 MiB, by bisection.

    Returns
    -------
    dict
        ``minimum_capacity_bytes``, ``minimum_over_live`` and ``probes``; the first two None where
        even four times the peak is too little.
    """
    if settings.threads != 1:
        raise InvalidValueError(
            f"threads is {settings.threads}: the capacity that several threads need changes from "
            "run to run; give 1"
        )
    page = 2 * _MIB
    live = settings.trace.peak_live_bytes
    probes: list[Result] = []

    def survives(pages: int) -> bool:
        try:
            one = _with_capacity(settings, pages * page)
            ok = bool(run_replay(one)["completed"])
        except OutOfMemoryError:
            ok = False
        except RingmemError as error:
            if not isinstance(error, InvalidValueError):
                raise
            ok = False  # too small to be a limit at all
        probes.append({"capacity_bytes": pages * page, "survived": ok})
        progress("capacity", len(probes), len(probes) + 8)
        return ok

    low = max(1, live // page) - 1  # does not survive: less than what must live
    width = max(1, low // 64)
    high = low + width
    while not survives(high):
        if high > 4 * low + 64:
            return {"minimum_capacity_bytes": None, "minimum_over_live": None, "probes": probes}
        low, width = high, 2 * width
        high = low + width
    while high - low > 1:
        middle = (low + high) // 2
        if survives(middle):
            high = middle
        else:
            low = middle
    return {
        "minimum_capacity_bytes": high * page,
        "minimum_over_live": high * page / live,
        "probes": probes,
    }


def _with_capacity(settings: ReplaySettings, capacity: int) -> ReplaySettings:
    from dataclasses import replace

    return replace(settings, capacity=capacity, repetitions=1)


def load(trace: Path | None) -> Trace:
    """The trace of a file, or the shipped one."""
    return Trace.shipped() if trace is None else Trace.load(trace)
