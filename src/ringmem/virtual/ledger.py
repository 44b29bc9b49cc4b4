"""The streams whose work a buffer must outlive, as the user named them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmem.device import as_stream
from ringmem.virtual.locations import plain_streams

if TYPE_CHECKING:
    from ringmem.device import Device, Stream

__all__ = ["StreamLedger"]


class StreamLedger:
    """Recorded streams of one buffer. Keeps them alive; those that were closed are forgotten."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[tuple[int, int], Stream] = {}

    def record(self, stream: object) -> None:
        """Remember a stream-like of the buffer's device."""
        found = as_stream(stream, self._device)
        self._streams[found.device.ordinal, found.handle] = found

    def open(self) -> list[Stream]:
        """Return the recorded streams that are not closed."""
        streams = list(self._streams.items())
        for key, stream in streams:
            if stream.closed:
                self._streams.pop(key, None)
        return [stream for _, stream in streams if not stream.closed]

    def plain(self, streams: object) -> list[tuple[int, int]]:
        """Return what to wait for: `streams` (None: the thread's current) and the recorded."""
        return [*plain_streams(streams, self._device), *self._recorded()]

    def plain_for_finalizer(self) -> list[tuple[int, int]]:
        """Return what a finalizer waits for: the default stream and the recorded."""
        return [(self._device.ordinal, 0), *self._recorded()]

    def _recorded(self) -> list[tuple[int, int]]:
        return [(stream.device.ordinal, stream.raw_handle) for stream in self.open()]
