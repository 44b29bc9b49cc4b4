"""The streams whose work a buffer must outlive, as the user named them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ringmem.device import as_stream
from ringmem.native import _native
from ringmem.native.errors import DriverError
from ringmem.native.locks import Lock
from ringmem.virtual.locations import plain_streams

if TYPE_CHECKING:
    from ringmem.device import Device, Stream

__all__ = ["StreamLedger"]


class StreamLedger:
    """Recorded streams of one buffer, which it keeps: closed ones until their work is done."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = Lock()  # over what follows; never held around a wait
        self._streams: dict[tuple[int, int], Stream] = {}
        self._closed: list[Stream] = []

    def record(self, stream: object) -> None:
        """Remember a stream-like of the buffer's device."""
        found = as_stream(stream, self._device)
        with self._lock:
            self._sort_out()  # the handle of a closed stream may be that of another now
            self._streams[found.device.ordinal, found.handle] = found

    def pending(self) -> list[Stream]:
        """Return the recorded streams that may have work: open ones, and what closed ones left."""
        with self._lock:
            self._sort_out()
            return [*self._streams.values(), *self._closed]

    def plain(self, streams: object) -> list[tuple[int, int]]:
        """Return what to wait for: `streams` (None: the thread's current) and the recorded.

        What closed streams left has no handle; it is waited for here.
        """
        named = plain_streams(streams, self._device)
        recorded, closed = self._now()
        for stream in closed:
            _native.synchronize_closed(stream)
        if closed:
            self._now()  # they are done
        return [*named, *recorded]

    def plain_for_finalizer(self) -> list[tuple[int, int]]:
        """Return what a finalizer waits for: the default stream and the recorded."""
        recorded, closed = self._now()
        for stream in closed:
            try:
                _native.order_after_closed(stream, self._device, 0)
            except DriverError:  # a capture is in the way
                with contextlib.suppress(DriverError):
                    _native.synchronize_closed(stream)
        return [(self._device.ordinal, 0), *recorded]

    def _now(self) -> tuple[list[tuple[int, int]], list[Stream]]:
        with self._lock:
            self._sort_out()
            return list(self._streams), list(self._closed)

    def _sort_out(self) -> None:
        """With the lock: keep closed streams apart, and those no longer that are done."""
        for key, stream in list(self._streams.items()):
            if stream.closed:
                del self._streams[key]
                self._closed.append(stream)
        self._closed = [one for one in self._closed if not _native.closed_and_done(one)]
