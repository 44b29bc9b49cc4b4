"""Managed memory: one address for host and devices, pages that move."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ringmem.buffers.arguments import flag
from ringmem.buffers.base import Buffer
from ringmem.buffers.kinds import Kind
from ringmem.buffers.pinned_buffer import _device_for
from ringmem.device import Device
from ringmem.device.scalars import to_integer
from ringmem.native import _native
from ringmem.native.errors import DriverError, InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

__all__ = ["UnifiedBuffer"]

_ATTACH = {
    "global": _native.ManagedAttach["global_"],
    "host": _native.ManagedAttach.host,
    "single": _native.ManagedAttach.single,
}
_LAST_DEFAULT_HANDLE = 2
_ADVICE = {advice.name: advice for advice in _native.Advice}


class UnifiedBuffer(Buffer):
    """Managed memory, which migrates between the host and devices.

    The host sees it only inside :meth:`host`, which waits for the device first. Giving it back
    waits for kernels, so a background thread does it, after the work on all streams that used the
    buffer. Never allocate more of it than the device has free.

    Parameters
    ----------
    shape, dtype, device, stream, allocator
        As for :class:`DeviceBuffer`. The allocator gives managed memory; by default the driver.
    attach : {'global', 'host', 'single'}, default 'global'
        Who may use it on devices without concurrent managed access: work on any stream; the host
        only, until :meth:`attach` says otherwise; work on `stream` only, which must be an own
        stream then.

    Raises
    ------
    NotSupportedError
        The device has no managed memory.
    InvalidValueError, OutOfMemoryError, InvalidDeviceError, ClosedError
        As for :class:`DeviceBuffer`.

    Examples
    --------
    >>> from ringmem import UnifiedBuffer
    >>> buffer = UnifiedBuffer(3, "i4", device="cpu")
    >>> with buffer.host() as array:
    ...     array[:] = [1, 2, 3]
    >>> del array  # close() refuses while somebody holds a view
    >>> buffer.to_numpy().tolist()
    [1, 2, 3]
    >>> buffer.close()
    """

    __slots__ = ()

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: DTypeLike | None = None,
        *,
        device: Device | str | None = None,
        stream: object | None = None,
        allocator: object | None = None,
        attach: Literal["global", "host", "single"] = "global",
    ) -> None:
        _mode("attach", attach)
        where = _device_for(device, stream)
        if not where.capabilities.managed_memory:
            raise NotSupportedError(
                f"{where.name} has no managed memory: use a DeviceBuffer and a PinnedBuffer"
            )
        if allocator is None:
            allocator = _native.ManagedAllocator(where, attach)
        super().__init__(Kind.MANAGED, shape, dtype, where, stream, allocator)
        if attach != "global":
            try:
                self.attach(attach)
            except BaseException:
                self.close()
                raise

    def _empty_like(self, stream: object | None) -> UnifiedBuffer:
        return UnifiedBuffer(self.shape, self.dtype, device=self.device, stream=stream)

    # --- who may use it --------------------------------------------------------------------------

    @property
    def attached(self) -> str:
        """str: ``'global'``, ``'host'`` or ``'single'``; of a view, its buffer's."""
        mode = _native.buffer_attached(self)
        return next(name for name, known in _ATTACH.items() if known == mode)

    def attach(self, mode: Literal["global", "host", "single"]) -> None:
        """Say who may use the memory from now on; blocks until the work on it so far is done.

        It changes nothing where the device has concurrent managed access.

        Parameters
        ----------
        mode : {'global', 'host', 'single'}
            Work on any stream; the host only; work on the buffer's own stream only.

        Raises
        ------
        InvalidValueError
            There is no such mode; 'single' on a default stream; or the memory is inside
            :meth:`host`.
        DriverError
            The driver refused, and nothing has changed.
        """
        wanted = _mode("mode", mode)
        handle, _ = _native.buffer_order(self, None)
        if mode == "single" and handle <= _LAST_DEFAULT_HANDLE:  # the driver refuses them too
            raise InvalidValueError(
                "attach is 'single' on the default stream: give a stream of your own"
            )
        shared = self.device.capabilities.concurrent_managed_access
        with _native.buffer_hold(self):
            held = _native.buffer_set_host_only(self, True)  # no work begins meanwhile
            try:
                if held and self.attached != "host":
                    raise InvalidValueError(f"{self!r} is inside host(): leave that first")
                if not shared or "single" in (mode, self.attached):
                    _native.buffer_synchronize(self)
                    self._attach(mode, handle)
                    self.device.driver.stream_synchronize(self.device.ordinal, handle)
            except BaseException:
                _native.buffer_set_host_only(self, held)
                raise
            _native.buffer_set_attached(self, wanted)
            _native.buffer_set_host_only(self, mode == "host" and not shared)

    def _attach(self, mode: str, handle: int) -> None:
        ptr, nbytes = _native.buffer_root(self)
        if nbytes:
            driver, ordinal = self.device.driver, self.device.ordinal
            driver.stream_attach(ordinal, handle, ptr, nbytes, _ATTACH[mode])

    # --- the host --------------------------------------------------------------------------------

    def _wait_for_host(self) -> None:
        raise NotSupportedError(
            f"{self!r} is managed memory, which the host may touch only inside host(): "
            "`with buffer.host() as array:`, or to_numpy()"
        )

    @contextmanager
    def host(
        self, *, readonly: bool = False, stream: object | None = None
    ) -> Iterator[NDArray[Any]]:
        """Let the host use the memory inside a ``with``; blocks until the device is done with it.

        On a device without concurrent managed access the memory belongs to the host meanwhile, and
        ringmem refuses work of the device on it. The array that ``as`` names must be deleted
        before ``close()``.

        Parameters
        ----------
        readonly : bool, default False
            The array must not be written.
        stream : stream-like, optional
            Wait for the work on this stream only; by default for all work on the buffer that
            ringmem knows. Work of your own kernels must be on one of these streams, or be done.

        Yields
        ------
        numpy.ndarray
            Over the memory.

        Raises
        ------
        NotSupportedError
            The host would fault: the device cannot share the memory and cannot hand it over.
        InvalidValueError
            The memory is read-only and `readonly` is False; or the memory is with the host
            already, where only one may have it.
        """
        array = self._host_array(flag("readonly", readonly), wait=False)
        order, _ = _native.buffer_order(self, stream)
        if stream is None:
            _native.buffer_synchronize(self)
        for closed in _native.buffer_closed_streams(self):  # nobody can name them any more
            _native.synchronize_closed(closed)
        self.device.driver.stream_synchronize(self.device.ordinal, order)
        if self.device.capabilities.concurrent_managed_access or self.attached == "host":
            yield array
            return
        self._hand_to_host(order)
        try:
            yield array
        finally:
            self._hand_to_device(order)

    def _hand_to_host(self, order: int) -> None:
        # Set first, so that of two threads only one hands the memory over, and no work of the
        # device begins meanwhile.
        if _native.buffer_set_host_only(self, True):
            raise InvalidValueError(f"{self!r} is inside host() already: leave that first")
        try:
            self._attach("host", order)
            self.device.driver.stream_synchronize(self.device.ordinal, order)
        except BaseException as error:
            _native.buffer_set_host_only(self, False)
            if not isinstance(error, DriverError):
                raise
            raise NotSupportedError(
                f"{self.device.name} has no concurrent managed access and did not hand the memory "
                f"to the host ({error}): the host would fault; use to_numpy()",
                operation=error.operation,
                code=error.code,
                name=error.name,
            ) from error

    def _hand_to_device(self, order: int) -> None:
        own = _native.buffer_stream(self)[1]
        if own is None or not own.closed:  # "single" is the own stream's
            order, _ = _native.buffer_order(self, None)
        self._attach(self.attached, order)
        _native.buffer_set_host_only(self, False)

    def to_numpy(self, stream: object | None = None) -> NDArray[Any]:  # noqa: D102 - inherited
        if self.attached != "host":
            return super().to_numpy(stream)
        with self.host(readonly=True, stream=stream) as array:
            return array.copy()

    # --- hints -----------------------------------------------------------------------------------

    def prefetch(
        self,
        to: Device | Literal["host"] | None = None,
        *,
        nbytes: int | None = None,
        stream: object | None = None,
    ) -> None:
        """Move the memory to a device or the host ahead of its use, in stream order.

        Parameters
        ----------
        to : Device, 'host', or name of a device, optional
            By default the buffer's device.
        nbytes : int, optional
            How many **bytes** from the start; by default all.
        stream : stream-like, optional
            Where the migration is ordered.

        Raises
        ------
        InvalidValueError
            `nbytes` is negative or more than the buffer has.
        NotSupportedError
            The device cannot.
        """
        count = self.nbytes if nbytes is None else to_integer(nbytes)
        if count is None or not 0 <= count <= self.nbytes:
            raise InvalidValueError(
                f"nbytes is {nbytes!r}: give 0 to {self.nbytes}, the bytes of the buffer"
            )
        with _native.buffer_hold(self):
            _native.buffer_check_device_may_use(self)
            handle, owner = _native.buffer_order(self, stream)
            if not count:
                return
            _native.buffer_note_use(self, owner or self.device.default_stream)
            self.device.driver.prefetch(
                self.device.ordinal, self.ptr, count, self._location(to, "to"), handle
            )

    def advise(self, advice: str, location: Device | Literal["host"] | None = None) -> None:
        """Tell the driver how the memory will be used. Takes effect at once.

        Parameters
        ----------
        advice : str
            ``set_`` or ``unset_`` with ``read_mostly``, ``preferred_location`` or ``accessed_by``.
        location : Device, 'host', or name of a device, optional
            What the advice is about; by default the buffer's device.

        Raises
        ------
        InvalidValueError
            There is no such advice.
        NotSupportedError
            The device cannot.
        """
        if not isinstance(advice, str) or advice not in _ADVICE:
            raise InvalidValueError(f"advice is {advice!r:.80}: give one of {', '.join(_ADVICE)}")
        with _native.buffer_hold(self):
            if self.nbytes:
                self.device.driver.advise(
                    self.device.ordinal,
                    self.ptr,
                    self.nbytes,
                    _ADVICE[advice],
                    self._location(location, "location"),
                )

    def discard(self, stream: object | None = None) -> None:
        """Drop the content in stream order: pages need not be moved any more.

        Reading before the next write gives undefined values.

        Raises
        ------
        NotSupportedError
            The driver cannot.
        """
        with _native.buffer_hold(self):
            _native.buffer_check_device_may_use(self)
            handle, owner = _native.buffer_order(self, stream)
            if self.nbytes:
                _native.buffer_note_use(self, owner or self.device.default_stream)
                self.device.driver.discard(self.device.ordinal, self.ptr, self.nbytes, handle)

    def _location(self, place: Device | str | None, argument: str) -> _native.Location:
        if isinstance(place, str) and place == "host":
            return _native.Location(_native.LocationKind.host, 0)
        if place is not None and not isinstance(place, Device | str):
            raise InvalidValueError(
                f"{argument} is {place!r}: give 'host', a Device, or the name of one"
            )
        device = self.device if place is None else Device(place)
        if device.driver is not self.device.driver:
            raise InvalidValueError(
                f"{argument} is {_native.name_beside(device, self.device)}, but the buffer is on "
                f"{self.device.name}: give 'host' or a device of the buffer's driver"
            )
        if not device.capabilities.concurrent_managed_access:
            raise NotSupportedError(
                f"{device.name} has no concurrent managed access: its driver moves whole "
                "allocations when a kernel starts, and takes no hints about it"
            )
        return _native.Location(_native.LocationKind.device, device.ordinal)


def _mode(argument: str, mode: object) -> _native.ManagedAttach:
    if not isinstance(mode, str) or mode not in _ATTACH:
        raise InvalidValueError(f"{argument} is {mode!r:.80}: give 'global', 'host' or 'single'")
    return _ATTACH[mode]
