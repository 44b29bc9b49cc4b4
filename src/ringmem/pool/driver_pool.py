"""The driver's own stream-ordered pools (``cuMemPool``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ringmem.device import Device
from ringmem.device.sizes import format_nbytes, parse_nbytes
from ringmem.native import _native
from ringmem.native.errors import DriverError, InvalidValueError, NotSupportedError
from ringmem.pool.pool import KnownSettings

__all__ = ["DriverPoolStatistics", "NativePool"]

_KEEP_ALL = (1 << 64) - 1
Access = Literal["none", "read", "readwrite"]
_ACCESS: dict[Access, Any] = {
    "none": _native.Access.none,
    "read": _native.Access.read,
    "readwrite": _native.Access.readwrite,
}


@dataclass(frozen=True)
class DriverPoolStatistics:
    """What the driver says about a pool, in bytes.

    Attributes
    ----------
    used, reserved : int
        Allocated now; held by the pool now.
    peak_used, peak_reserved : int
        The most there was since :meth:`NativePool.reset_peaks`.
    """

    used: int
    reserved: int
    peak_used: int
    peak_reserved: int

    @property
    def cached(self) -> int:
        """int: reserved and not used."""
        return self.reserved - self.used


class NativePool(KnownSettings, _native.DriverPoolBase):
    """A stream-ordered pool of the driver.

    Parameters
    ----------
    device : Device or str, optional
        By default :func:`ringmem.default_device`.
    max_size : int or str, default 0
        Bytes that the pool may hold; 0 is unlimited.
    shareable : bool, default False
        It can be exported to other processes, as a file descriptor.
    release_threshold : int or str, optional
        Bytes that stay cached at a synchronization; by default all. (The driver's own default is
        0, which never caches.)

    Raises
    ------
    NotSupportedError
        The device has no pools, or cannot export and `shareable` is set.

    Examples
    --------
    >>> from ringmem import NativePool
    >>> with NativePool("cpu") as pool:
    ...     with pool.allocate(1 << 20):
    ...         pool.statistics().used >= 1 << 20
    True
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        max_size: int | str = 0,
        shareable: bool = False,
        release_threshold: int | str | None = None,
    ) -> None:
        where = _with_pools(device)
        location = _native.Location(_native.LocationKind.device, where.ordinal)
        most = parse_nbytes(max_size, "max_size")
        props = _native.PoolProps(location, most, bool(shareable))
        threshold = (
            _KEEP_ALL
            if release_threshold is None
            else parse_nbytes(release_threshold, "release_threshold")
        )
        handle = where.driver.pool_create(where.ordinal, props)
        try:
            where.driver.pool_set(
                where.ordinal, handle, _native.PoolAttribute.release_threshold, threshold
            )
            super().__init__(where, handle, True, False)
        except BaseException:
            where.driver.pool_destroy(where.ordinal, handle)
            raise
        self._max_size = most
        self._shareable = bool(shareable)

    @classmethod
    def default(cls, device: Device | str | None = None) -> NativePool:
        """Return the device's default pool, which belongs to the driver and the whole process.

        ``destroy()`` lets go of it and destroys nothing. Its release threshold is as it was.
        """
        where = _with_pools(device)
        return cls._adopt(where, where.driver.pool_default(where.ordinal), False, False)

    @classmethod
    def import_fd(cls, fd: int, device: Device | str | None = None) -> NativePool:
        """Open a pool that another process exported; `fd` stays the caller's.

        An imported pool gives no memory of its own: :meth:`import_pointer` opens the exporter's.

        Raises
        ------
        DriverError
            The descriptor is no pool's.
        """
        where = _with_pools(device)
        handle = where.driver.pool_import(where.ordinal, fd)
        try:
            return cls._adopt(where, handle, True, True)
        except BaseException:
            where.driver.pool_destroy(where.ordinal, handle)
            raise

    @classmethod
    def _adopt(cls, device: Device, handle: int, owned: bool, imported: bool) -> NativePool:
        self = cls.__new__(cls)
        _native.DriverPoolBase.__init__(self, device, handle, owned, imported)
        self._max_size = 0
        self._shareable = imported
        return self

    # --- properties ------------------------------------------------------------------------------

    @property
    def max_size(self) -> int:
        """int: bytes that the pool may hold; 0 is unlimited, or not known (imported)."""
        return self._max_size

    @property
    def handle_type(self) -> str:
        """str: ``"posix_fd"`` if it can be exported, else ``"none"``."""
        return "posix_fd" if self._shareable else "none"

    @property
    def release_threshold(self) -> int | None:
        """Int or None: bytes that stay cached at a synchronization; None is all. Can be set."""
        value = self._get(_native.PoolAttribute.release_threshold)
        return None if value == _KEEP_ALL else value

    @release_threshold.setter
    def release_threshold(self, nbytes: int | str | None) -> None:
        value = _KEEP_ALL if nbytes is None else parse_nbytes(nbytes, "release_threshold")
        self._set(_native.PoolAttribute.release_threshold, value)

    def statistics(self) -> DriverPoolStatistics:
        """Return what the driver says now; four driver calls."""
        kinds = _native.PoolAttribute
        return DriverPoolStatistics(
            self._get(kinds.used_current),
            self._get(kinds.reserved_current),
            self._get(kinds.used_high),
            self._get(kinds.reserved_high),
        )

    def reset_peaks(self) -> None:
        """Let the peaks start again from what there is now."""
        self._set(_native.PoolAttribute.used_high, 0)
        self._set(_native.PoolAttribute.reserved_high, 0)

    def _get(self, attribute: Any) -> int:
        return int(self.device.driver.pool_get(self.device.ordinal, self.handle, attribute))

    def _set(self, attribute: Any, value: int) -> None:
        self.device.driver.pool_set(self.device.ordinal, self.handle, attribute, value)

    def trim(self, keep_bytes: int | str = 0) -> None:
        """Give memory that no live block needs back, down to `keep_bytes`."""
        keep = parse_nbytes(keep_bytes, "keep_bytes")
        self.device.driver.pool_trim(self.device.ordinal, self.handle, keep)

    # --- peers and other processes ---------------------------------------------------------------

    def set_access(self, peer: Device | str, access: Access = "readwrite") -> None:
        """Let another device use the pool's memory, what is allocated already included.

        Raises
        ------
        InvalidValueError
            No such access, or `peer` is the pool's own device or another driver's.
        DriverError
            The devices cannot reach each other.
        """
        if access not in _ACCESS:
            raise InvalidValueError(f"access is {access!r}: give one of {', '.join(_ACCESS)}")
        location = self._location(peer)
        if location.id == self.device.ordinal:
            raise InvalidValueError(f"peer is {self.device.name}: a device always has its own pool")
        self.device.driver.pool_set_access(
            self.device.ordinal, self.handle, [(location, _ACCESS[access])]
        )

    def access(self, peer: Device | str) -> Access:
        """Return what a device may do with the pool's memory."""
        given = self.device.driver.pool_get_access(
            self.device.ordinal, self.handle, self._location(peer)
        )
        return next(name for name, value in _ACCESS.items() if value == given)

    def _location(self, peer: Device | str) -> Any:
        other = Device(peer)
        if other.driver is not self.device.driver:
            raise InvalidValueError(
                f"peer is {other.name}, of another driver (such as a simulation's) than "
                f"{self.device.name}: give a device of the pool's own driver"
            )
        return _native.Location(_native.LocationKind.device, other.ordinal)

    def export_fd(self) -> int:
        """Return a new file descriptor of the pool, for another process; it is the caller's.

        Raises
        ------
        NotSupportedError
            The pool was not made shareable.
        """
        if not self._shareable:
            raise NotSupportedError(f"{self!r} is not shareable: make it with shareable=True")
        return int(self.device.driver.pool_export(self.device.ordinal, self.handle))

    def import_pointer(self, data: bytes) -> int:
        """Open a block that the exporting process named with ``export_pointer(ptr)``.

        Returns
        -------
        int
            The address here. Free it with :meth:`free_pointer`, before the exporter frees it.
        """
        return int(self.native_import_pointer(data))

    def free_pointer(self, ptr: int, stream: object | None = None) -> None:
        """Free an address that :meth:`import_pointer` gave, in the order of `stream`."""
        handle = _native.stream_handle(stream, self.device)
        self.device.driver.mem_free_async(self.device.ordinal, ptr, handle)

    # --- the end ---------------------------------------------------------------------------------

    def destroy(self, when_unused: bool = False) -> None:
        """Destroy the pool; of the default one only let go. Idempotent.

        Parameters
        ----------
        when_unused : bool, default False
            With blocks alive: take no more allocations, and destroy the pool when the last of them
            is freed.

        Raises
        ------
        InvalidValueError
            Blocks are alive, the message says how many, and `when_unused` is not set. The pool is
            as it was. (Drivers take a pool with live blocks, too; some break the process by it.)
        DriverError
            The driver refused. The pool is closed, and its handle is not left behind: destruction
            is tried again in the background.
        """
        alive = self.live, self.live_nbytes
        refused, status = self.native_destroy(bool(when_unused))
        if refused:
            raise InvalidValueError(
                f"{self!r} has {alive[0]} live blocks of {format_nbytes(alive[1])}: close them "
                "first, or destroy(when_unused=True)"
            )
        if status != 0:
            name = f"CUDA_ERROR_{status}"
            raise DriverError(
                f"cuMemPoolDestroy failed with {name} on {self.device.name}; no block was alive",
                operation="cuMemPoolDestroy",
                code=status,
                name=name,
            )

    close = destroy

    def __enter__(self) -> NativePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy(when_unused=exc[0] is not None)

    def __repr__(self) -> str:
        if self.closed:
            return f"<NativePool on {self.device.name}, closed>"
        kind = "imported" if self.imported else "own" if self.owned else "default"
        return (
            f"<NativePool on {self.device.name}, {kind}: "
            f"{format_nbytes(self.live_nbytes)} in {self.live} blocks>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a driver's pool cannot be pickled: send export_fd() over a Unix socket")


def _with_pools(device: Device | str | None) -> Device:
    where = Device(device)
    if not where.capabilities.memory_pools:
        raise NotSupportedError(f"{where.name} has no stream-ordered pools: use a Pool")
    return where
