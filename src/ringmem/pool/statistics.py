"""A pool's figures as a value, and the figures of a region of code."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from ringmem.pool.pool import Pool

__all__ = ["PoolStatistics", "StatisticsRegion"]

TOTALS = (
    "allocations",
    "frees",
    "hits",
    "misses",
    "returns",
    "retries",
    "driver_calls",
    "device_waits",
    "handles_created",
    "handles_released",
    "remaps",
    "remapped",
    "growth_ns",
    "remap_ns",
)
PEAKS = ("peak_requested", "peak_allocated", "peak_reserved")


@dataclass(frozen=True)
class PoolStatistics:
    """The figures of a :class:`Pool` at one moment. Bytes, unless said otherwise.

    As a context manager it gives the :class:`StatisticsRegion` of the ``with`` block.

    Attributes
    ----------
    requested : int
        What callers asked for and have not freed.
    allocated : int
        The same with what rounding adds.
    reserved : int
        What the pool holds from the driver, in unreleased handles.
    cached : int
        `reserved` less `allocated`.
    live : int
        Blocks allocated and not freed.
    peak_requested, peak_allocated, peak_reserved : int
        The most there was since the peaks were reset; with several streams the first two are
        exact to 64 KiB and a block a stream.
    largest_free_block : int
        What one allocation could get without a driver call, at most.
    allocations, frees : int
        How many there were since the pool was made.
    hits, misses : int
        Allocations that needed no memory from the driver, and those that created or moved some
        (under a binning policy: that no bin could serve).
    returns : int
        Frees that went back to the pool's cache.
    retries : int
        Allocations tried again after a flush or a callback.
    driver_calls : int
        Calls of the driver for memory and for stream order.
    device_waits : int
        Times a stream was made to wait for another.
    handles_created, handles_released : int
        Pieces of physical memory.
    remaps, remapped : int
        Handles moved to another address, and the bytes in them.
    growth_ns, remap_ns : int
        Nanoseconds spent on creating, moving and mapping, and the part of it that moved handles.
    """

    requested: int
    allocated: int
    reserved: int
    cached: int
    live: int
    peak_requested: int
    peak_allocated: int
    peak_reserved: int
    largest_free_block: int
    allocations: int
    frees: int
    hits: int
    misses: int
    returns: int
    retries: int
    driver_calls: int
    device_waits: int
    handles_created: int
    handles_released: int
    remaps: int
    remapped: int
    growth_ns: int
    remap_ns: int
    _pool: Any = field(default=None, repr=False, compare=False)  # a Pool; what with() needs

    @property
    def internal_fragmentation(self) -> float:
        """float: the share of allocated bytes that nobody asked for."""
        return 1 - self.requested / self.allocated if self.allocated else 0.0

    @property
    def external_fragmentation(self) -> float:
        """float: the share of cached bytes that one allocation cannot use as they lie."""
        return max(0.0, 1 - self.largest_free_block / self.cached) if self.cached else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Return all figures by name, the two fragmentations included."""
        values: dict[str, int | float] = {
            f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")
        }
        values["internal_fragmentation"] = self.internal_fragmentation
        values["external_fragmentation"] = self.external_fragmentation
        return values

    def __enter__(self) -> StatisticsRegion:
        if self._pool is None:
            raise TypeError("only what pool.statistics() returns opens a region")
        region: StatisticsRegion = self._pool._open_region(self)
        return region

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._pool is not None
        self._pool._close_region(self)


class StatisticsRegion:
    """The figures of a ``with`` block: ``with pool.statistics() as s``.

    It has the attributes of :class:`PoolStatistics`. Totals count what happened since the block
    was entered; peaks are those since then; the rest is as it is now. They stand still once the
    block is left. Whatever other threads do with the pool meanwhile counts as well.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        now = pool.native_statistics()
        self._start = {name: now[name] for name in TOTALS}
        self._peaks = dict.fromkeys(PEAKS, 0)
        self._end: PoolStatistics | None = None

    def _absorb(self, peaks: dict[str, int]) -> None:
        for name in PEAKS:
            self._peaks[name] = max(self._peaks[name], peaks[name])

    def _now(self) -> PoolStatistics:
        if self._end is not None:
            return self._end
        values = self._pool.native_statistics()
        values.update({name: values[name] - self._start[name] for name in TOTALS})
        values.update({name: max(values[name], self._peaks[name]) for name in PEAKS})
        return PoolStatistics(**values)

    def _finish(self) -> None:
        self._end = self._now()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._now(), name)

    def __repr__(self) -> str:
        return f"<StatisticsRegion {self._now()!r}>"
