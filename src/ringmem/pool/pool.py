"""The pool of device memory."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ringmem.device import Device
from ringmem.device.sizes import format_nbytes, parse_nbytes
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError
from ringmem.native.locks import Lock
from ringmem.pool.statistics import PEAKS, PoolStatistics, StatisticsRegion

__all__ = ["DebugReport", "Pool"]

Callback = Callable[[int, PoolStatistics], bool]
_POLICIES = ("best_fit", "power_of_two", "exact")
_NAMED = 5  # live blocks that close() names


@dataclass(frozen=True)
class DebugReport:
    """What debug mode found.

    Attributes
    ----------
    kind : str
        ``underrun`` or ``overrun`` (written before or after a block), ``double_free``,
        ``foreign``, ``unordered_use`` or ``unordered_free`` (a stream that never waited for the
        one that the block belongs to).
    ptr, nbytes : int
        The block.
    allocated_at : str
        ``file:line``; empty where it is not known.
    message : str
        A sentence.
    """

    kind: str
    ptr: int
    nbytes: int
    allocated_at: str
    message: str


class KnownSettings:
    """A pool takes no attribute that it does not know: a misspelled limit would limit nothing."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            kind = type(self).__name__
            raise AttributeError(f"a {kind} has no setting {name!r}: see help({kind})")
        super().__setattr__(name, value)


class Pool(KnownSettings, _native.PoolBase):
    """A stream-ordered pool of device memory.

    Freed memory is reused at once on its stream, and on other streams behind an event that they
    wait for on the device; nothing waits on the host. Small sizes come from size classes, large
    ones by best fit from pages that are remapped into one run before memory is declared out.

    A pool serves every buffer of a device inside ``with device.use(pool):``, single buffers with
    ``allocator=pool``, and raw memory with :meth:`allocate`. It is thread-safe, and reserves
    nothing until its first allocation. In a forked child it refuses.

    Parameters
    ----------
    device : Device or str, optional
        By default :func:`ringmem.default_device`.
    limit : int or str, optional
        Bytes that may be reserved, ``"8 GiB"``, at least one page of the device (mostly 2 MiB);
        by default no limit.
    release_threshold : int or str, optional
        Bytes that may stay cached after a free; by default everything stays.
    tight : bool, default False
        Move free pages before new ones are created, always: the least memory, at the price of
        mapping calls. Without it pages move only when the limit or the device is reached.
    policy : {'best_fit', 'power_of_two', 'exact'}
        How sizes are rounded and which freed block serves. ``best_fit``: at most 12.5 % waste up
        to 32 KiB, steps of 512 bytes above. The other two keep freed blocks in bins, of powers of
        two or of exact sizes (in steps of 512 bytes).
    debug : bool, optional
        Poison, red zones, order checks, places of allocation; slow. By default whether the
        environment variable ``RINGMEM_POOL_DEBUG`` is set to something but ``0``.
    shareable, rdma : bool, default False
        The memory can be exported to other processes; can be used for GPUDirect RDMA.
    peers : iterable of Device or str
        Devices that may use the memory, too.

    Raises
    ------
    InvalidValueError
        A size, the policy or a peer makes no sense.
    InvalidDeviceError, NotInitializedError
        There is no such device.

    Examples
    --------
    >>> from ringmem import Pool
    >>> pool = Pool("cpu", limit="1 GiB")
    >>> with pool.allocate(1000) as block:
    ...     block.nbytes, pool.statistics().live
    (1000, 1)
    >>> x = pool.empty((2, 3), "float32")
    >>> x.close()
    >>> pool.close()
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        limit: int | str | None = None,
        release_threshold: int | str | None = None,
        tight: bool = False,
        policy: Literal["best_fit", "power_of_two", "exact"] = "best_fit",
        debug: bool | None = None,
        shareable: bool = False,
        rdma: bool = False,
        peers: Iterable[Device | str] = (),
    ) -> None:
        where = Device(device)
        if policy not in _POLICIES:
            raise InvalidValueError(f"policy is {policy!r}: give one of {', '.join(_POLICIES)}")
        if debug is None:
            debug = os.environ.get("RINGMEM_POOL_DEBUG", "0") not in ("", "0")
        self._callbacks: list[Callback] = []
        self._lock = Lock()  # over what follows; finalizers may come in between
        self._regions: list[tuple[PoolStatistics, StatisticsRegion]] = []
        self._peaks = dict.fromkeys(PEAKS, 0)
        super().__init__(
            where,
            None if limit is None else parse_nbytes(limit, "limit"),
            None
            if release_threshold is None
            else parse_nbytes(release_threshold, "release_threshold"),
            bool(tight),
            policy,
            bool(debug),
            bool(shareable),
            bool(rdma),
            _peer_ordinals(where, peers),
        )
        self.connect_callbacks()

    # --- memory held -----------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """Int or None: bytes that may be reserved; None is no limit.

        Setting it gives back what it no longer allows. Blocks do not move, so below the pages in
        which some live, or one page of the device, it raises :class:`InvalidValueError` with what
        would do, and nothing has changed.
        """
        limit: int | None = self.native_limit
        return limit

    @limit.setter
    def limit(self, nbytes: int | str | None) -> None:
        self.set_limit(None if nbytes is None else parse_nbytes(nbytes, "limit"))

    @property
    def release_threshold(self) -> int | None:
        """Int or None: bytes that may stay cached after a free; None keeps all.

        Setting it trims at once.
        """
        threshold: int | None = self.native_release_threshold
        return threshold

    @release_threshold.setter
    def release_threshold(self, nbytes: int | str | None) -> None:
        self.set_release_threshold(
            None if nbytes is None else parse_nbytes(nbytes, "release_threshold")
        )

    def reserve(self, nbytes: int | str, stream: object | None = None) -> None:
        """Make sure that one allocation of `nbytes` needs no memory from the driver.

        Raises
        ------
        OutOfMemoryError
            There is not that much. Nothing has changed.
        InvalidValueError, ClosedError
            `nbytes` is 0, negative or no size; the pool is closed.
        """
        self.native_reserve(parse_nbytes(nbytes, "nbytes"), stream)

    def trim(self, keep_bytes: int | str = 0) -> None:
        """Give cached memory back until at most `keep_bytes` are cached.

        Never waits: what streams may still use leaves the device when their work is done.

        Raises
        ------
        DriverError
            The driver refused to take it back; the pool is as it was.
        """
        self.native_trim(parse_nbytes(keep_bytes, "keep_bytes"))

    # --- out of memory ---------------------------------------------------------------------------

    def add_out_of_memory_callback(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(requested, statistics)` when memory is out; True asks for one more try.

        It runs on the thread that allocates, with no lock held, after everything cached was
        tried. It may free and close what it likes. Allocations that it makes from the pool are
        served from what is free, and call no callbacks. What it raises becomes the ``__cause__``
        of the :class:`OutOfMemoryError`, unless another callback helped.

        Returns
        -------
        callable
            Takes the callback off again.
        """
        if not callable(callback):
            raise InvalidValueError(f"callback is {callback!r}: give a callable")
        self._callbacks.append(callback)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return remove

    def _ask(self, requested: int, figures: dict[str, int]) -> tuple[bool, BaseException | None]:
        """Ask all callbacks; native code calls this. (Whether to try again, the first failure)."""
        again, failure = False, None
        for callback in tuple(self._callbacks):
            try:
                again |= bool(callback(requested, PoolStatistics(**figures)))
            except BaseException as error:
                failure = failure or error
        return again, failure

    # --- figures ---------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Return the figures now; in a ``with`` statement, those of the block.

        Examples
        --------
        >>> from ringmem import Pool
        >>> pool = Pool("cpu")
        >>> with pool.statistics() as s:
        ...     pool.allocate(4096).close()
        >>> s.allocations, s.frees, s.peak_requested
        (1, 1, 4096)
        """
        with self._lock:  # else peaks could be missed that another thread moves meanwhile
            values = self.native_statistics()
            values.update({name: max(values[name], self._peaks[name]) for name in PEAKS})
        return PoolStatistics(**values, _pool=self)

    def reset_peaks(self) -> None:
        """Let the peaks start again from what there is now. Regions keep theirs."""
        with self._lock:
            self._absorb_peaks()
            self._peaks = dict.fromkeys(PEAKS, 0)

    def _absorb_peaks(self) -> None:
        """Start the native peaks again, and keep what they were for whoever still wants it."""
        values = self.native_statistics()
        self.native_reset_peaks()
        self._peaks = {name: max(self._peaks[name], values[name]) for name in PEAKS}
        for _, region in self._regions:
            region._absorb(values)

    def _open_region(self, opener: PoolStatistics) -> StatisticsRegion:
        with self._lock:
            self._absorb_peaks()
            region = StatisticsRegion(self)
            self._regions.append((opener, region))
        return region

    def _close_region(self, opener: PoolStatistics) -> None:
        with self._lock:
            at = max(i for i, (by, _) in enumerate(self._regions) if by is opener)
            self._regions.pop(at)[1]._finish()

    def debug_reports(self) -> list[DebugReport]:
        """Return what debug mode found since the last call; nothing without debug mode.

        Findings are made on the device's time: synchronize the streams first to see all.
        """
        return [DebugReport(*found) for found in self.native_reports()]

    # --- addresses -------------------------------------------------------------------------------

    def deallocate(self, ptr: int, nbytes: int | None = None, stream: object | None = None) -> None:
        """Free by address what :meth:`allocate_ptr` gave, for code that keeps addresses only.

        Raises
        ------
        DoubleFreeError
            No live block of the pool starts at `ptr`.
        InvalidValueError
            The block has another size than `nbytes`.
        """
        self.deallocate_ptr(ptr, nbytes, stream)

    # --- the end ---------------------------------------------------------------------------------

    def close(self, when_unused: bool = False) -> None:
        """Give all memory back. Waits for the work that still uses freed blocks. Idempotent.

        Parameters
        ----------
        when_unused : bool, default False
            With blocks alive: take no more allocations, and give the memory back when the last
            of them is freed.

        Raises
        ------
        InvalidValueError
            Blocks are alive, the message names them, and `when_unused` is not set. The pool is as
            it was.
        DriverError
            The driver refused to take memory back.
        """
        if not self.native_close(bool(when_unused)):
            raise InvalidValueError(
                f"{self!r} has {describe_live(self.live_blocks(), self.places())}: close them "
                "first, or close(when_unused=True)"
            )
        for report in self.debug_reports():
            warnings.warn(f"{report.message} ({report.allocated_at})", RuntimeWarning, stacklevel=2)
        self._callbacks.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(when_unused=exc[0] is not None)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Pool on {self.device.name}, closed>"
        s = self.native_statistics()
        limit = "" if self.limit is None else f", limit {format_nbytes(self.limit)}"
        return (
            f"<Pool on {self.device.name}: {format_nbytes(s['allocated'])} in {s['live']} blocks, "
            f"{format_nbytes(s['reserved'])} reserved{limit}>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a pool cannot be pickled or copied")


def describe_live(blocks: list[tuple[int, int]], places: dict[int, str] | None = None) -> str:
    """Name the largest of the blocks (ptr, nbytes), and where they come from if that is known."""
    largest = sorted(blocks, key=lambda block: -block[1])[:_NAMED]
    of = {ptr: f" of {place}" for ptr, place in (places or {}).items() if place}
    names = ", ".join(
        f"{format_nbytes(nbytes)} at {ptr:#x}{of.get(ptr, '')}" for ptr, nbytes in largest
    )
    more = f" and {len(blocks) - _NAMED} more" if len(blocks) > _NAMED else ""
    return f"{len(blocks)} live block{'s' if len(blocks) != 1 else ''} ({names}{more})"


def _peer_ordinals(device: Device, peers: Iterable[Device | str]) -> list[int]:
    ordinals = []
    if isinstance(peers, str) or not isinstance(peers, Iterable):
        raise InvalidValueError(f"peers is {peers!r}: give a list of devices")
    for entry in peers:
        peer = Device(entry)
        if peer.driver is not device.driver or peer is device:
            raise InvalidValueError(
                f"peers holds {_native.name_beside(peer, device)}: give other devices of the "
                f"driver of {device.name}"
            )
        ordinals.append(peer.ordinal)
    return ordinals
