"""One direction of a bridge: a ring on the host's side, a ring on the device's, and what moves.

Where nothing is copied both are the same memory. Otherwise the device has slots of its own, and a
header of its own with the two indices, in pinned memory that both sides see (or in device memory
where none can be mapped); native code moves (mover.hpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmem.buffers import Buffer, DeviceBuffer, PinnedBuffer, UnifiedBuffer, zeros
from ringmem.device import Device, Stream
from ringmem.native import _native
from ringmem.ring.ring import Ring
from ringmem.ring.slots import host_bytes

__all__ = ["DeviceRing", "Direction", "SharedWords"]

HEADER = int(_native.ring_header_nbytes)
TAIL, HEAD = 128, 256  # of RingHeader: producer.tail, consumer.head
_ALIGNMENT = 4096


@dataclass(frozen=True)
class DeviceRing:
    """What device code needs to know of its end.

    Attributes
    ----------
    header_ptr : int
        Address, as the device sees it, of a ``RingHeader`` (layout.hpp).
    slots_ptr : int
        Address of the first slot.
    capacity, slot_nbytes : int
        Slots, and bytes of each.
    """

    header_ptr: int
    slots_ptr: int
    capacity: int
    slot_nbytes: int


class SharedWords:
    """A window of host memory that stays alive with its buffer, as :class:`Ring` takes it."""

    def __init__(self, buffer: Buffer, ptr: int, nbytes: int) -> None:
        self._buffer = buffer
        self.ptr = ptr
        self.nbytes = nbytes


class Direction:
    """One direction of a bridge. `to_device` says which.

    One thread at a time may move.
    """

    def __init__(
        self,
        message: np.dtype[Any],
        capacity: int,
        device: Device,
        stream: Stream,
        *,
        to_device: bool,
        copies: bool,
        unified: bool,
        mapped_counters: bool,
        waits: bool,
    ) -> None:
        self.device, self.stream = device, stream
        self.to_device, self.copies = to_device, copies
        self.mapped_counters = mapped_counters
        self.mover: _native.BridgeMover | None = None  # where anything is copied
        nbytes = Ring.nbytes_for(message, capacity)
        whole = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        kind = UnifiedBuffer if unified else PinnedBuffer
        # The host's ring, the device's header, and a word that a copy may read from.
        self._host = kind(whole + _ALIGNMENT + 64, device=device)
        base = self._host.ptr
        view = np.frombuffer(host_bytes(base, self._host.nbytes, self._host), np.uint8)
        view[...] = 0
        self.ring = Ring(message, capacity, memory=SharedWords(self._host, base, nbytes))
        self._header = base + whole if copies else base
        self._device: DeviceBuffer | None = None
        if copies:
            # A header and the slots behind it, as in a ring of one piece.
            self._device = zeros(nbytes, device=device, stream=stream)
            stream.synchronize()
            self._describe()
            self.mover = _native.BridgeMover(
                stream,
                (self._host, self._device),
                ring=base,
                header=self._header,
                device_header=self._device_header(),
                host_slots=base + HEADER,
                device_slots=self._device.ptr + HEADER,
                word=base + whole + _ALIGNMENT,
                capacity=self.ring.capacity,
                slot_nbytes=self.ring.slot_nbytes,
                to_device=to_device,
                mapped=mapped_counters,
                waits=waits,
            )

    def _describe(self) -> None:
        """Give the device's header the description that the host's ring has."""
        raw = host_bytes(self.ring.ptr, HEADER, self._host)
        target = np.frombuffer(host_bytes(self._header, HEADER, self._host), np.uint8)
        target[:TAIL] = np.frombuffer(raw, np.uint8)[:TAIL]
        if not self.mapped_counters:
            device, to = self.device, self._device_header()
            device.driver.copy_async(device.ordinal, to, self._header, TAIL, self.stream.handle)
            self.stream.synchronize()

    # --- where things are ------------------------------------------------------------------------
    @property
    def device_ring(self) -> DeviceRing:
        """The device's end."""
        header = self._device_header()
        slots = header + HEADER if self._device is None else self._device.ptr + HEADER
        return DeviceRing(header, slots, self.ring.capacity, self.ring.slot_nbytes)

    def _device_header(self) -> int:
        if self.copies and not self.mapped_counters:
            assert self._device is not None
            return self._device.ptr
        offset = self._header - self._host.ptr
        base = self._host.device_ptr if isinstance(self._host, PinnedBuffer) else self._host.ptr
        return base + offset

    @property
    def flush(self) -> Callable[[], int]:
        """What a flush calls: native code, or nothing where nothing is copied."""
        return int if self.mover is None else self.mover.flush

    # --- indices ---------------------------------------------------------------------------------
    @property
    def moved(self) -> int:
        """Messages moved, or submitted to; 0 where nothing is copied."""
        return 0 if self.mover is None else self.mover.moved

    def device_index(self, index: _native.RingIndex) -> int:
        """Return an index that the device writes."""
        if self.mover is not None:
            return self.mover.device_index(index)
        offset = TAIL if index is _native.RingIndex.TAIL else HEAD
        return int(_native.load_u64(self._header + offset))

    def close(self) -> None:
        """Give the device's memory back, in stream order."""
        self.ring.close()
        if self._device is not None:
            self._device.close(self.stream)
