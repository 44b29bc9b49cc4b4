"""Pools of memory that the host uses too: page-locked, and managed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringmem.device import Device
from ringmem.device.sizes import format_nbytes, parse_nbytes
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.pool.pool import KnownSettings, describe_live

__all__ = ["HostPoolStatistics", "PinnedPool", "UnifiedPool"]


@dataclass(frozen=True)
class HostPoolStatistics:
    """The figures of a :class:`PinnedPool` or :class:`UnifiedPool`. Bytes, unless said otherwise.

    Attributes
    ----------
    requested, allocated : int
        What callers asked for and have not freed; the same rounded to 512 bytes.
    reserved : int
        Bytes of arenas.
    pending : int
        Bytes freed that streams may still use.
    live : int
        Blocks allocated and not freed.
    peak_requested, peak_allocated, peak_reserved : int
        The most there was since the peaks were reset.
    largest_free_block : int
        The largest free block as it lies.
    arenas : int
        How many there are.
    allocations, frees : int
        How many there were since the pool was made.
    misses : int
        Allocations that asked for an arena.
    retries : int
        Allocations that waited for work on freed blocks before memory was declared out.
    """

    requested: int
    allocated: int
    reserved: int
    pending: int
    live: int
    peak_requested: int
    peak_allocated: int
    peak_reserved: int
    largest_free_block: int
    arenas: int
    allocations: int
    frees: int
    misses: int
    retries: int

    @property
    def cached(self) -> int:
        """int: reserved and not allocated."""
        return self.reserved - self.allocated


class _HostPool(KnownSettings, _native.ArenaPoolBase):
    """What the two pools share."""

    def __init__(
        self,
        device: Device | str | None,
        managed: bool,
        limit: int | str | None,
        arena_nbytes: int | str,
    ) -> None:
        arena = parse_nbytes(arena_nbytes, "arena_nbytes")
        if not 0 < arena <= 1 << 40:
            raise InvalidValueError(f"arena_nbytes is {arena_nbytes!r}: give 1 to 2**40 bytes")
        super().__init__(
            Device(device), managed, None if limit is None else parse_nbytes(limit, "limit"), arena
        )

    @property
    def limit(self) -> int | None:
        """Int or None: bytes of arenas there may be; None is no limit. Can be set."""
        limit: int | None = self.native_limit
        return limit

    @limit.setter
    def limit(self, nbytes: int | str | None) -> None:
        self.set_limit(None if nbytes is None else parse_nbytes(nbytes, "limit"))

    def reserve(self, nbytes: int | str) -> None:
        """Make sure that one allocation of `nbytes` needs no arena.

        Raises
        ------
        OutOfMemoryError
            There is not that much.
        """
        self.native_reserve(parse_nbytes(nbytes, "nbytes"))

    def trim(self, keep_bytes: int | str = 0) -> None:
        """Give arenas that nobody uses back until at most `keep_bytes` are cached.

        Never waits: a background thread gives them back, which waits for kernels.
        """
        self.native_trim(parse_nbytes(keep_bytes, "keep_bytes"))

    def statistics(self) -> HostPoolStatistics:
        """Return the figures now."""
        return HostPoolStatistics(**self.native_statistics())

    def reset_peaks(self) -> None:
        """Let the peaks start again from what there is now."""
        self.native_reset_peaks()

    def close(self) -> None:
        """Hand all memory to the background thread that gives it back. Idempotent; never waits.

        Raises
        ------
        InvalidValueError
            Blocks are alive; the message names them. The pool is as it was.
        """
        if not self.native_close():
            raise InvalidValueError(
                f"{self!r} has {describe_live(self.live_blocks())}: close them first"
            )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.closed:
            return f"<{name} of {self.device.name}, closed>"
        s = self.statistics()
        return (
            f"<{name} of {self.device.name}: {format_nbytes(s.allocated)} in {s.live} blocks, "
            f"{format_nbytes(s.reserved)} reserved>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a pool cannot be pickled or copied")


class PinnedPool(_HostPool):
    """A pool of page-locked host memory.

    Locking pages is slow (1.3 ms for 1 MiB, 0.4 s for 1 GiB), so it is done for large arenas:
    their pages are touched by several threads first, then locked by one registration. Giving
    arenas back waits for kernels, so a background thread does it.

    The host writes to this memory without asking a stream. So a block that a stream used is free
    when that work is done, also for the same stream; a block that no stream used is free at once.
    Copies of buffers note their streams by themselves. For raw memory name them: with
    ``allocate(nbytes, stream)``, ``close(stream)`` or ``record_stream(stream)``.

    Parameters
    ----------
    device : Device or str, optional
        Whose driver locks the pages; every device of that driver can use them.
    limit : int or str, optional
        Bytes of arenas there may be.
    arena_nbytes : int or str, default "64 MiB"
        The first arena; later ones double what there is, up to 1 GiB each.

    Examples
    --------
    >>> from ringmem import PinnedPool
    >>> with PinnedPool("cpu", arena_nbytes="2 MiB") as pool:
    ...     with pool.empty(3, "i4") as buffer:
    ...         buffer.fill(7)
    ...         buffer.to_numpy().tolist()
    [7, 7, 7]
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        limit: int | str | None = None,
        arena_nbytes: int | str = "64 MiB",
    ) -> None:
        super().__init__(device, False, limit, arena_nbytes)


class UnifiedPool(_HostPool):
    """A pool of managed memory, with the rules of :class:`PinnedPool` for reuse.

    An arena never takes more than the device has free.

    Raises
    ------
    NotSupportedError
        The device has no managed memory.

    Examples
    --------
    >>> from ringmem import UnifiedPool
    >>> with UnifiedPool("cpu", arena_nbytes="2 MiB") as pool:
    ...     with pool.empty(3, "i4") as buffer:
    ...         buffer.nbytes
    12
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        limit: int | str | None = None,
        arena_nbytes: int | str = "64 MiB",
    ) -> None:
        where = Device(device)
        if not where.capabilities.managed_memory:
            raise NotSupportedError(f"{where.name} has no managed memory: use a PinnedPool")
        super().__init__(where, True, limit, arena_nbytes)
