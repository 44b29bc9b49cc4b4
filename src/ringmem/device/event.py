"""Events: points in the work of a stream, to wait for and to measure between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import NotSupportedError

if TYPE_CHECKING:
    from ringmem.device.device import Device
    from ringmem.device.stream import Stream

__all__ = ["Event"]


class Event(_native.EventBase, Closing):
    """A point in the work of a stream.

    ``Event(device)`` and :meth:`Device.create_event` create one. It happens when the work that was
    submitted to the stream before :meth:`record` is done; recording again moves it. An event that
    was never recorded counts as having happened. Every method may be called from any thread.

    Parameters
    ----------
    device : Device or str, optional
        By default :func:`default_device`.
    timing : bool, default False
        Keep the time, for :meth:`elapsed_ms`; costs a little.
    blocking_sync : bool, default False
        ``synchronize()`` without a timeout sleeps instead of spinning.

    Raises
    ------
    InvalidDeviceError
        There is no such device.
    InvalidValueError
        `timing` or `blocking_sync` is no bool.
    DriverError
        The driver refused.

    Examples
    --------
    >>> from ringmem import Device, Event
    >>> device = Device("cpu")
    >>> with Event(device, timing=True) as start, Event(device, timing=True) as end:
    ...     start.record()
    ...     end.record()
    ...     end.synchronize(timeout_s=10)
    ...     end.elapsed_ms(since=start) >= 0
    True
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        timing: bool = False,
        blocking_sync: bool = False,
    ) -> None:
        if not isinstance(device, _native.DeviceBase):
            from ringmem.device.device import as_device

            device = as_device(device)
        super().__init__(device, timing, blocking_sync)

    @property
    def device(self) -> Device:
        """Device: the device whose streams can record the event."""
        return cast("Device", super().device)

    def record(self, stream: Stream | object | None = None) -> None:
        """Record the event on a stream.

        Parameters
        ----------
        stream : stream-like, optional
            Of the event's device; by default the thread's current one.

        Raises
        ------
        InvalidDeviceError
            The stream belongs to another device.
        ClosedError
            The event or the stream is closed.
        """
        from ringmem.device.stream import as_stream

        super().record(as_stream(stream, self.device))

    def query(self) -> bool:
        """Return whether the event has happened; never waits.

        Raises
        ------
        ClosedError
            The event is closed.
        DriverError
            The device failed, for instance with an illegal address.
        """
        return super().query()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until the event has happened, with the GIL released.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds. With a limit the event is polled, with pauses of up to 1 ms, and Ctrl-C works;
            without one (the default) the driver waits.

        Raises
        ------
        TimeoutError
            The time was up; the event may still happen.
        InvalidValueError
            `timeout_s` is negative or not a number.
        ClosedError
            The event is closed.
        """
        super().synchronize(timeout_s)

    def elapsed_ms(self, since: _native.EventBase) -> float:
        """Return the device time from `since`, an earlier event, to this one, in milliseconds.

        Both must have been created with ``timing=True``, recorded, and have happened.

        Raises
        ------
        InvalidValueError
            An event has no timing or was never recorded, or `since` is no event.
        InvalidDeviceError
            The events belong to two devices.
        DriverError
            An event has not happened yet (``CUDA_ERROR_NOT_READY``).
        """
        return super().elapsed_ms(since)

    def close(self) -> None:
        """Destroy the event. Idempotent; waits that are queued on it stay in force.

        Call it when no other thread is in a call that uses the event.

        Raises
        ------
        DriverError
            The driver could not destroy it. The event is closed all the same.
        """
        super().close()

    def __reduce__(self) -> Any:
        raise NotSupportedError(
            f"{self!r} cannot be copied or pickled: it is this process's; create another"
        )

    def __repr__(self) -> str:
        if not _native.is_ready(self):
            return f"<{type(self).__name__}, never initialized>"
        state = "recorded" if self.recorded else "never recorded"
        if self.closed:
            state = "closed"
        return f"<Event of {self.device.name}, timing={self.timing}, {state}>"
