"""Streams: own ones, the default one, and those of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ringmem.device.event import Event
from ringmem.device.stream_handles import OTHER, STREAM, Argument, device_of_handle, handle_of
from ringmem.native import _native
from ringmem.native.errors import (
    ClosedError,
    InvalidDeviceError,
    InvalidValueError,
    NotSupportedError,
)

if TYPE_CHECKING:
    from types import TracebackType

    from ringmem.device.device import Device

__all__ = ["Stream", "as_stream", "current_stream"]

# CUSTREAM_PER_THREAD; 0 and 1 are the legacy default stream. All exist on every device.
_LAST_DEFAULT_HANDLE = 2


class Stream(_native.StreamBase):
    """A queue of work for one device, done in order.

    ``Stream(device)`` and :meth:`Device.create_stream` create one, which is closed with
    ``close()``, or when nobody holds it any more; :func:`as_stream` makes one of another library's
    stream, which is then kept alive and never destroyed. As a context manager it is this thread's
    current stream of its device; the work goes on afterwards, and the stream stays open. Every
    method may be called from any thread.

    Parameters
    ----------
    device : Device or str, optional
        By default :func:`default_device`.
    priority : int, default 0
        Lower is more urgent; clamped to what the device has.
    non_blocking : bool, default True
        Not ordered with the legacy default stream.

    Raises
    ------
    InvalidDeviceError
        There is no such device.
    InvalidValueError
        `priority` is no integer, or `non_blocking` no bool.
    DriverError
        The driver refused.

    Examples
    --------
    >>> from ringmem import Device, Stream, current_stream
    >>> device = Device("cpu")
    >>> stream = Stream(device)
    >>> with stream:
    ...     current_stream(device) is stream
    True
    >>> stream.synchronize(timeout_s=10)
    >>> stream.close()
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        priority: int = 0,
        non_blocking: bool = True,
    ) -> None:
        if not isinstance(device, _native.DeviceBase):
            device = _device(device)
        super().__init__(device, priority=priority, non_blocking=non_blocking)

    @classmethod
    def _of_handle(cls, device: Device, handle: int, owner: object = None) -> Stream:
        """Wrap a stream that is somebody's; `owner` is kept alive."""
        stream = cls.__new__(cls)
        _native.StreamBase.__init__(stream, device, handle, owner)
        return stream

    @property
    def device(self) -> Device:
        """Device: where the stream's work runs."""
        return cast("Device", super().device)

    def query(self) -> bool:
        """Return whether all submitted work is done; never waits.

        Raises
        ------
        ClosedError
            The stream is closed.
        DriverError
            The device failed, for instance with an illegal address.
        """
        return super().query()

    @property
    def is_capturing(self) -> bool:
        """bool: whether work given to the stream is captured into a CUDA graph instead of run.

        What may be done meanwhile, here and on other streams, is in the guide "CUDA graphs". False
        on the CPU, which has no graphs.
        """
        return super().is_capturing

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until the submitted work is done, with the GIL released.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds. With a limit the stream is polled, with pauses of up to 1 ms, and Ctrl-C
            works; without one (the default) the driver waits.

        Raises
        ------
        TimeoutError
            The time was up; the work goes on.
        InvalidValueError
            `timeout_s` is negative or not a number.
        ClosedError
            The stream is closed.
        """
        super().synchronize(timeout_s)

    def wait(self, other: Event | Stream | object) -> None:
        """Let later work of this stream wait, on the device, for an event or a stream.

        Parameters
        ----------
        other : Event or stream-like
            Of any device of the same driver. For a stream: the work submitted to it so far.

        Raises
        ------
        InvalidDeviceError
            `other` belongs to a different driver (``cpu`` and ``cuda``).
        ClosedError
            This stream or `other` is closed.
        InvalidValueError
            `other` is neither an event nor a stream.
        """
        if isinstance(other, _native.EventBase):
            self.wait_event(other)
        elif isinstance(other, _native.StreamBase):
            self.wait_stream(other)
        else:
            self.wait_stream(_foreign_stream(other, self.device, OTHER, any_device=True))

    def record(self, event: Event | None = None) -> Event:
        """Record an event behind the work submitted so far.

        Parameters
        ----------
        event : Event, optional
            Of this stream's device; by default a new one without timing.

        Returns
        -------
        Event
            The event recorded.

        Raises
        ------
        InvalidValueError
            `event` is no event.
        InvalidDeviceError
            The event belongs to another device.
        ClosedError
            The stream or the event is closed.
        """
        if event is None:
            event = self.device.create_event()
        try:
            _native.EventBase.record(event, self)
        except TypeError:
            raise InvalidValueError(
                f"event is {event!r}: give an Event of {self.device.name}, or None for a new one"
            ) from None
        return event

    def close(self) -> None:
        """Destroy the stream if it is an own one. Idempotent; never waits: queued work goes on.

        Whoever reads, frees or moves memory that ringmem used on it waits for that work still. Of a
        foreign stream ringmem forgets where its work ends: they wait for the whole device, and
        work on other streams does not wait.

        Call it when no other thread is in a call that uses the stream: a driver need not tell a
        handle that is gone from one that it has given out again.

        Raises
        ------
        DriverError
            The driver could not destroy it. The stream is closed all the same.
        """
        super().close()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return ``(0, handle)``: the protocol by which libraries hand streams to each other."""
        return (0, self.handle)

    def __enter__(self) -> Stream:
        self.push()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.pop()

    def __reduce__(self) -> Any:
        raise NotSupportedError(
            f"{self!r} cannot be copied or pickled: it is this process's; create another"
        )

    def __repr__(self) -> str:
        if not _native.is_ready(self):
            return f"<{type(self).__name__}, never initialized>"
        kind = "own" if self.owned else "foreign"
        if self.raw_handle <= _LAST_DEFAULT_HANDLE:
            kind = "default"
        closed = ", closed" if self.closed else ""
        return f"<Stream {self.raw_handle:#x} of {self.device.name}, {kind}{closed}>"


def current_stream(device: Device | str | None = None) -> Stream:
    """Return this thread's current stream of a device.

    Parameters
    ----------
    device : Device or str, optional
        By default :func:`default_device`.

    Returns
    -------
    Stream
        The innermost ``with stream:`` on this thread, else the device's default stream.

    Examples
    --------
    >>> from ringmem import current_stream
    >>> current_stream("cpu")
    <Stream 0x0 of cpu:0, default>
    """
    of = _device(device)
    current = cast("Stream | None", _native.current_stream(of))
    return of.default_stream if current is None else current


def as_stream(stream: object | None, device: Device | str) -> Stream:
    """Convert anything that names a stream of `device` to a :class:`Stream`.

    Parameters
    ----------
    stream : object
        ``None`` (this thread's current stream), a :class:`Stream`, an integer handle (0 and 1 are
        the legacy default stream, 2 the per-thread one), an object with ``__cuda_stream__``
        (a method or an attribute), or a stream of PyTorch (``cuda_stream``), CuPy (``ptr``), Numba
        or cuda.core (``handle``). None of these libraries is imported.
    device : Device or str
        The device that the stream must belong to.

    Returns
    -------
    Stream
        `stream` itself where it is one; else one that keeps `stream` alive and never destroys it.

    Raises
    ------
    InvalidDeviceError
        The stream belongs to another device.
    ClosedError
        The stream is closed, or the driver does not know the handle (any more).
    InvalidValueError
        `stream` names no stream, or `device` no device.
    """
    if stream is None:
        try:  # a hot path: whether `device` is a name is asked only where it matters
            current = cast("Stream | None", _native.current_stream(device))  # type: ignore[arg-type]
        except TypeError:
            return as_stream(None, _device(device))
        if current is None:
            return device.default_stream  # type: ignore[union-attr]
        stream = current
    if isinstance(stream, Stream):
        if stream.closed:
            raise ClosedError(
                f"{stream!r} is closed: give an open stream of {_device(device).name}"
            )
        _check_device(stream, stream.device, device)
        return stream
    return _foreign_stream(stream, _device(device), STREAM)


def _device(device: Device | str | None) -> Device:
    if isinstance(device, _native.DeviceBase):
        return device
    from ringmem.device.device import as_device

    return as_device(device)


def _check_device(stream: object, actual: Device, wanted: Device | str) -> None:
    if actual is not wanted and actual is not (named := _device(wanted)):
        raise InvalidDeviceError(
            f"{stream!r} belongs to {actual.name}, but the work is for "
            f"{_native.name_beside(named, actual)}: give a stream of {named.name}"
        )


def _foreign_stream(
    stream: object, device: Device, argument: Argument, *, any_device: bool = False
) -> Stream:
    handle = handle_of(stream, argument)
    if handle <= _LAST_DEFAULT_HANDLE:
        return device.default_stream if handle == 0 else Stream._of_handle(device, handle, stream)
    actual = device_of_handle(handle, stream, device, argument)
    if not any_device:
        _check_device(stream, actual, device)
    return Stream._of_handle(actual, handle, stream)


def _convert(stream: object, device: object) -> Stream:
    return as_stream(stream, cast("Device", device))


_native.set_stream_hook(_convert)
