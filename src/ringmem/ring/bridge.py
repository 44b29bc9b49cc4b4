"""A pair of rings between the host and a device, and the flushes that carry messages across.

What a flush does is the strategy's: nothing at all, or a copy, by native code (mover.hpp).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.device import Device, MemoryVisibility, as_stream
from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import (
    ClosedError,
    TimeoutError,  # noqa: A004 - the field's word
)
from ringmem.native.locks import Lock
from ringmem.ring.bridge_memory import DeviceRing, Direction
from ringmem.ring.endpoints import check_count, check_timeout
from ringmem.ring.slots import message_dtype
from ringmem.ring.strategies import Async, DmaPolling, Strategy, Unified, choose_strategy

__all__ = ["BridgeCounters", "RingBufferBridge"]


@dataclass(frozen=True)
class BridgeCounters:
    """Messages over the life of a bridge, in each direction.

    Attributes
    ----------
    sent, received : int
        By the host: given to :meth:`RingBufferBridge.send`, returned by ``recv``.
    moved_to_device, moved_to_host : int
        Copied by flushes; 0 where the strategy copies nothing.
    taken_by_device, written_by_device : int
        As the device's indices say.
    """

    sent: int
    received: int
    moved_to_device: int
    moved_to_host: int
    taken_by_device: int
    written_by_device: int


def _refuse() -> int:
    raise ClosedError("the bridge is closed")


class RingBufferBridge(Closing):
    """Messages of one dtype between the host and a device, each way through a ring.

    The host uses :meth:`send` and :meth:`recv`. Device code finds its ends at :attr:`device_input`
    and :attr:`device_output`: it takes messages below the input's ``producer.tail``, stores
    ``consumer.head``, writes messages with their sequences (layout.hpp) to the output, and stores
    ``producer.tail``.

    Parameters
    ----------
    message : dtype-like
        Of one message, both ways.
    capacity : int
        Slots of each ring, a power of two.
    device : Device or str, optional
        By default :func:`ringmem.default_device`.
    strategy : Mapped, Unified, Sync, Async or DmaPolling, optional
        How messages cross. By default ``Mapped()``, or ``Sync()`` where host and device do not see
        each other's stores while a kernel runs.

    Raises
    ------
    NotSupportedError
        The strategy cannot work on this device; the message says why, and what to use.
    InvalidValueError
        The capacity is no power of two, or the dtype or the strategy is none.

    Notes
    -----
    One thread at a time may call :meth:`send`, and one :meth:`recv`; any thread may flush. A forked
    child makes a bridge of its own.

    Examples
    --------
    >>> from ringmem import RingBufferBridge, Sync
    >>> with RingBufferBridge("u8", 8, "cpu", strategy=Sync()) as bridge:
    ...     bridge.send([1, 2, 3]), bridge.flush_to_device(), bridge.counters.moved_to_device
    (3, 3, 3)
    """

    def __init__(
        self,
        message: npt.DTypeLike,
        capacity: int,
        device: Device | str | None = None,
        *,
        strategy: Strategy | None = None,
    ) -> None:
        self._closed = True  # until everything below succeeded
        self.message = message_dtype(message)
        self.device = Device(device)
        decision = self.device.memory_visibility()
        self.strategy = choose_strategy(strategy, decision)
        wanted = self.strategy.stream if isinstance(self.strategy, Async) else None
        self._owns_stream = wanted is None
        self._stream = (
            self.device.create_stream() if wanted is None else as_stream(wanted, self.device)
        )
        mapped = decision.visibility is not MemoryVisibility.EXPLICIT_DMA
        self._in, self._out = (
            Direction(
                self.message,
                capacity,
                self.device,
                self._stream,
                to_device=to_device,
                copies=self.strategy.copies,
                unified=isinstance(self.strategy, Unified),
                mapped_counters=mapped,
                waits=not isinstance(self.strategy, Async),
            )
            for to_device in (True, False)
        )
        # As near to native code as can be (Mover::flush says why).
        self._push, self._pull = self._in.flush, self._out.flush
        self.capacity = self._in.ring.capacity
        self._closing = Lock()  # of two threads that close, one does
        self._producer = self._in.ring.producer("refuse")
        self._consumer = self._out.ring.consumer()
        self._thread: _native.BridgeMoverThread | None = None
        if isinstance(self.strategy, DmaPolling):
            assert self._in.mover is not None
            assert self._out.mover is not None
            self._thread = _native.BridgeMoverThread(
                self._in.mover, self._out.mover, self.strategy.interval_us
            )
            # Also at the interpreter's exit, while the driver still is there.
            weakref.finalize(self, self._thread.stop)
        self._closed = False

    # --- the host's ends -------------------------------------------------------------------------
    def send(self, batch: npt.ArrayLike) -> int:
        """Put messages into the host's ring, as many as there is room for; never waits.

        Parameters
        ----------
        batch : array-like
            Messages of the bridge's dtype.

        Returns
        -------
        int
            Messages accepted. There is room again when the device has taken messages.
        """
        self._check()
        if self._in.mover is not None:
            self._in.mover.take_back()
        return self._producer.send(batch)

    def recv(
        self,
        max: int | None = None,  # noqa: A002
        timeout_s: float | None = 0.0,
    ) -> npt.NDArray[Any]:
        """Take messages out of the host's ring.

        Parameters
        ----------
        max : int, optional
            At most so many; default all.
        timeout_s : float or None, default 0
            How long to wait for the first one. 0: not at all, None: for good.

        Returns
        -------
        numpy.ndarray
            Copies; empty only where `timeout_s` or `max` is 0.

        Raises
        ------
        TimeoutError
            None arrived in time. With a copying strategy they arrive by :meth:`flush_to_host`.
        InvalidValueError
            `timeout_s` is no time, or `max` no number of messages.
        CorruptedError
            The device wrote a message that does not belong there.
        """
        self._check()
        timeout_s = check_timeout(timeout_s)
        limit = self.capacity if max is None else check_count("max", max)
        if limit == 0:
            return np.empty(0, self.message)
        mover = self._out.mover
        if mover is None:
            return self._consumer.recv(limit, timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (landed := mover.moved - self._consumer.head) == 0 and timeout_s != 0:
            self._check()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no message within timeout_s={timeout_s}")
            time.sleep(20e-6)
        got = self._consumer.recv(min(limit, landed), 0)
        if len(got):
            mover.tell_head(self._consumer.head)
        return got

    # --- flushes ---------------------------------------------------------------------------------
    def flush_to_device(self) -> int:
        """Let the device have what was sent.

        Returns
        -------
        int
            Messages moved; 0 where the strategy has nothing to move.

        Raises
        ------
        DriverError
            A copy failed.
        """
        return self._push()

    def flush_to_host(self) -> int:
        """Let the host have what the device wrote.

        Returns
        -------
        int
            Messages moved; 0 where the strategy has nothing to move.

        Raises
        ------
        DriverError
            A copy failed.
        CorruptedError
            The device's index is impossible.
        """
        return self._pull()

    async def flush_to_device_async(self) -> int:
        """:meth:`flush_to_device` without blocking the event loop; a thread waits."""
        return await asyncio.to_thread(self.flush_to_device)

    async def flush_to_host_async(self) -> int:
        """:meth:`flush_to_host` without blocking the event loop; a thread waits."""
        return await asyncio.to_thread(self.flush_to_host)

    # --- what there is ---------------------------------------------------------------------------
    @property
    def device_input(self) -> DeviceRing:
        """The device's receiving end, as addresses for device code."""
        self._check()
        return self._in.device_ring

    @property
    def device_output(self) -> DeviceRing:
        """The device's sending end."""
        self._check()
        return self._out.device_ring

    @property
    def counters(self) -> BridgeCounters:
        """Counts in both directions, as they are now."""
        self._check()
        return BridgeCounters(
            sent=self._producer.tail,
            received=self._consumer.head,
            moved_to_device=self._in.moved,
            moved_to_host=self._out.moved,
            taken_by_device=self._in.device_index(_native.RingIndex.HEAD),
            written_by_device=self._out.device_index(_native.RingIndex.TAIL),
        )

    def _check(self) -> None:
        if self._closed:
            _refuse()
        if self._thread is not None:
            self._thread.check()

    def close(self) -> None:
        """Stop moving and give the memory back. Idempotent.

        Device code must not use its ends any more, and no other thread may be in a call.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._push = self._pull = _refuse
        if self._thread is not None:
            self._thread.stop()
        if self._owns_stream:
            self._stream.synchronize()
        for direction in (self._in, self._out):
            direction.close()
        if self._owns_stream:
            self._stream.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return (
            f"RingBufferBridge({self.message}, capacity={self.capacity}, {self.device.name}, "
            f"{self.strategy}{closed})"
        )
