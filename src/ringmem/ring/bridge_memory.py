"""One direction of a bridge: a ring on the host's side, a ring on the device's, and what moves.

Where nothing is copied both are the same memory. Otherwise the device has slots of its own, and a
header of its own with the two indices, in pinned memory that both sides see (or in device memory
where none can be mapped). A direction copies whole slots, in one run or two at the wrap, and
publishes the producer's index behind them: on the copied side that index, not the sequence of a
line, says what has arrived, because a copy may arrive in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmem.buffers import Buffer, DeviceBuffer, PinnedBuffer, UnifiedBuffer, zeros
from ringmem.device import Device, Stream
from ringmem.native import _native
from ringmem.native.errors import CorruptedError
from ringmem.ring.ring import Ring
from ringmem.ring.slots import host_bytes

__all__ = ["DeviceRing", "Direction", "SharedWords"]

HEADER = int(_native.ring_header_nbytes)
TAIL, HEAD = 128, 256  # of RingHeader: producer.tail, consumer.head
_ALIGNMENT = 4096
_WORDS = 512  # indices under way to the device at the same time


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
    ) -> None:
        self.device, self.stream = device, stream
        self.to_device, self.copies = to_device, copies
        self.mapped_counters = mapped_counters
        self.moved = 0  # messages that have been moved, or submitted to
        nbytes = Ring.nbytes_for(message, capacity)
        whole = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        kind = UnifiedBuffer if unified else PinnedBuffer
        # The host's ring, the device's header, and the indices under way.
        self._host = kind(whole + _ALIGNMENT + 8 * _WORDS, device=device)
        base = self._host.ptr
        view = np.frombuffer(host_bytes(base, self._host.nbytes, self._host), np.uint8)
        view[...] = 0
        self.ring = Ring(message, capacity, memory=SharedWords(self._host, base, nbytes))
        self._slots = base + HEADER
        self._header = base + whole if copies else base
        self._words = base + whole + _ALIGNMENT
        self._word = 0
        self._device: DeviceBuffer | None = None
        if copies:
            # A header and the slots behind it, as in a ring of one piece.
            self._device = zeros(nbytes, device=device, stream=stream)
            stream.synchronize()
            self._describe(nbytes)

    def _describe(self, nbytes: int) -> None:
        """Give the device's header the description that the host's ring has."""
        raw = host_bytes(self.ring.ptr, HEADER, self._host)
        target = np.frombuffer(host_bytes(self._header, HEADER, self._host), np.uint8)
        target[:TAIL] = np.frombuffer(raw, np.uint8)[:TAIL]
        if not self.mapped_counters:
            self._copy(self._device_header(), self._header, TAIL)
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

    # --- indices ---------------------------------------------------------------------------------
    def device_index(self, offset: int) -> int:
        """Return an index (`TAIL` or `HEAD`) that the device writes."""
        if self.mapped_counters or not self.copies:
            return int(_native.load_u64(self._header + offset))
        self._copy(self._header + offset, self._device_header() + offset, 8)
        self.stream.synchronize()
        return int(_native.load_u64(self._header + offset))

    def tell_device(self, offset: int, value: int, *, ordered: bool) -> None:
        """Write an index that the device reads; `ordered`: behind the stream's work."""
        if self.mapped_counters and not ordered:
            _native.store_u64(self._header + offset, value)
            return
        word = self._words + 8 * self._word
        self._word = (self._word + 1) % _WORDS
        if self._word == 0:  # the first one is used again
            self.stream.synchronize()
        _native.store_u64(word, value)
        self._copy(self._device_header() + offset, word, 8)

    # --- moving ----------------------------------------------------------------------------------
    def push(self, tail: int, *, wait: bool) -> int:
        """Copy the messages up to `tail` to the device; return how many."""
        count = tail - self.moved
        if count == 0:
            return 0
        self._copy_slots(self.moved, count)
        if wait:
            if not self.mapped_counters:
                self.tell_device(TAIL, tail, ordered=True)
            self.stream.synchronize()
            if self.mapped_counters:
                self.tell_device(TAIL, tail, ordered=False)
        else:
            self.tell_device(TAIL, tail, ordered=True)
        self.moved = tail
        return count

    def pull(self) -> int:
        """Copy what the device has written to the host, and wait for it; return how many."""
        tail = self.device_index(TAIL)
        count = tail - self.moved
        if count == 0:
            return 0
        if not 0 < count <= self.ring.capacity:
            raise CorruptedError(
                f"the device says that it wrote {tail} messages; {self.moved} were moved, and the "
                f"ring holds {self.ring.capacity}"
            )
        self._copy_slots(self.moved, count)
        self.stream.synchronize()
        self.moved = tail
        return count

    def _copy_slots(self, start: int, count: int) -> None:
        """Copy whole slots from message `start` on: one run, or two at the wrap."""
        nbytes, capacity = self.ring.slot_nbytes, self.ring.capacity
        first = start & (capacity - 1)
        straight = min(count, capacity - first)
        self._copy_run(first * nbytes, straight * nbytes)
        if straight < count:
            self._copy_run(0, (count - straight) * nbytes)

    def _copy_run(self, offset: int, nbytes: int) -> None:
        assert self._device is not None
        ends = (self._device.ptr + HEADER + offset, self._slots + offset)
        dst, src = ends if self.to_device else ends[::-1]
        self._copy(dst, src, nbytes)

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        device = self.device
        device.driver.copy_async(device.ordinal, dst, src, nbytes, self.stream.handle)

    def take_back(self, head: int) -> None:
        """The device has taken the messages below `head`: their slots are free for the host.

        Raises
        ------
        CorruptedError
            That cannot be.
        """
        known = int(_native.load_u64(self.ring.ptr + HEAD))
        if not 0 <= head - known <= self.moved - known:
            raise CorruptedError(
                f"the device says that it took {head} messages; {self.moved} were moved"
            )
        _native.store_u64(self.ring.ptr + HEAD, head)

    def close(self) -> None:
        """Give the device's memory back, in stream order."""
        self.ring.close()
        if self._device is not None:
            self._device.close(self.stream)
