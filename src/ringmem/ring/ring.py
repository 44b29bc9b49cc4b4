"""A ring in host memory: made, attached to, and handed its two ends.

Between threads, between processes (the memory has a file descriptor), or in memory that a device
can see too, such as a pinned buffer.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.native.locks import Lock
from ringmem.ring.endpoints import Consumer, Full, Producer, check_full
from ringmem.ring.slots import Slots, host_bytes, message_dtype

__all__ = ["Ring", "poll_interval_us", "set_poll_interval_us"]


class Ring(Closing):
    """A single-producer, single-consumer ring of fixed-size messages.

    Parameters
    ----------
    message : dtype-like
        Of one message; up to 56 bytes cost one 64-byte line, each further 56 another.
    capacity : int
        Slots, a power of two.
    memory : object, optional
        Where to make it: host memory at a multiple of 128 bytes, as a writable buffer or as an
        object with ``ptr`` and ``nbytes`` (a pinned buffer); at least :meth:`nbytes_for` bytes.
        Default: new memory that other processes can map through :attr:`fd`.

    Raises
    ------
    InvalidValueError
        The capacity is no power of two, the dtype holds objects, or the memory does not fit.

    Examples
    --------
    >>> ring = Ring([("key", "u8"), ("value", "f8")], 1024)
    >>> ring.capacity, ring.slot_nbytes
    (1024, 64)
    >>> ring.close()
    """

    def __init__(self, message: npt.DTypeLike, capacity: int, *, memory: Any = None) -> None:
        dtype = message_dtype(message)
        nbytes = self.nbytes_for(dtype, capacity)
        zeroed = memory is None or getattr(memory, "zeroed", False) is True
        if memory is None:
            memory = _native.SharedMemory.create(nbytes)
        ptr, available, owner = _host_memory(memory)
        _native.ring_format(ptr, available, capacity, dtype.itemsize, zeroed)
        self._open(dtype, ptr, available, owner)

    @classmethod
    def attach(cls, memory: Any, message: npt.DTypeLike) -> Self:
        """Open a ring that somebody else made.

        Parameters
        ----------
        memory : int or object
            A file descriptor (another ring's :attr:`fd`, inherited or received over a socket; it
            stays the caller's), or memory as the constructor takes it.
        message : dtype-like
            The dtype its maker used; the size must agree.

        Raises
        ------
        CorruptedError
            There is no ring, or its description is damaged.
        InvalidValueError
            The message size differs, or the descriptor's memory could be shrunk by others.
        """
        dtype = message_dtype(message)
        if isinstance(memory, int):
            memory = _native.SharedMemory.map(memory)
        ptr, available, owner = _host_memory(memory)
        _, message_nbytes = _native.ring_geometry(ptr, available)
        if message_nbytes != dtype.itemsize:
            raise InvalidValueError(
                f"message={dtype} has {dtype.itemsize} bytes; the ring's have {message_nbytes}"
            )
        ring = cls.__new__(cls)
        ring._open(dtype, ptr, available, owner)
        return ring

    def _open(self, dtype: np.dtype[Any], ptr: int, nbytes: int, owner: Any) -> None:
        self.capacity: int = _native.ring_geometry(ptr, nbytes)[0]
        self.message = dtype
        self.ptr = ptr
        self.nbytes = nbytes
        self._owner = owner
        self._slots: Slots | None = Slots(host_bytes(ptr, nbytes, owner), dtype, self.capacity)
        self._lock = Lock()  # over the list of ends, and whether it still grows
        self._ends: list[Producer | Consumer] = []

    @staticmethod
    def nbytes_for(message: npt.DTypeLike, capacity: int) -> int:
        """Return the bytes that a ring of `capacity` slots needs, header included."""
        if not isinstance(capacity, int | np.integer) or not 1 <= capacity < 1 << 63:
            raise InvalidValueError(f"capacity={capacity!r} must be a power of two of slots")
        return int(_native.ring_nbytes(capacity, message_dtype(message).itemsize))

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: a multiple of 64."""
        return -(-self.message.itemsize // int(_native.line_payload_nbytes)) * int(
            _native.line_nbytes
        )

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for another process to :meth:`attach` to.

        Raises
        ------
        InvalidValueError
            The ring is in memory that was passed in, or attached to.
        """
        fd = int(getattr(self._owner, "fd", -1))
        if fd < 0:
            raise InvalidValueError("this ring's memory has no descriptor; share its maker's")
        return fd

    def producer(self, full: Full = "wait", *, force: bool = False) -> Producer:
        """Attach the sending end; it goes on where the last one stopped, even if that was killed.

        Parameters
        ----------
        full : {"wait", "refuse", "drop"}
            What to do when the ring is full: wait for room, accept what fits, or accept what fits
            and count the rest as dropped.
        force : bool
            Attach although another living process says it holds this end.

        Raises
        ------
        InvalidValueError
            The end is held already, or `full` is none of the three.
        ClosedError
            The ring is closed.
        """
        check_full(full)  # before the consumer sees an end that comes and goes
        slots = self._live()
        native = _native.RingProducer(self.ptr, self.nbytes, self.message, self._owner, force)
        # Who attaches to memory of our own takes messages in order: the endpoints do.
        native.allow_streaming(isinstance(self._owner, _native.SharedMemory))
        producer = Producer(native, slots, full)
        self._keep(producer)
        return producer

    def consumer(self, *, force: bool = False) -> Consumer:
        """Attach the receiving end; it goes on behind what the last one released.

        Parameters and errors are those of :meth:`producer`.
        """
        slots = self._live()
        native = _native.RingConsumer(self.ptr, self.nbytes, self.message, self._owner, force)
        consumer = Consumer(native, slots)
        self._keep(consumer)
        return consumer

    def _keep(self, end: Producer | Consumer) -> None:
        with self._lock:
            if self._slots is not None:
                self._ends = [*(other for other in self._ends if not other.closed), end]
                return
        end.close()
        raise ClosedError("the ring is closed")

    def _live(self) -> Slots:
        slots = self._slots
        if slots is None:
            raise ClosedError("the ring is closed")
        return slots

    def close(self) -> None:
        """Close the ends that this object made. Idempotent.

        The memory goes when the last view of it and the last process that maps it are gone.
        """
        with self._lock:
            ends, self._ends = self._ends, []
            self._slots = None
        for end in ends:
            end.close()

    def __repr__(self) -> str:
        state = ", closed" if self._slots is None else ""
        return f"Ring({self.message}, capacity={self.capacity}, nbytes={self.nbytes}{state})"


def _host_memory(memory: Any) -> tuple[int, int, Any]:
    """Return (address, bytes, what keeps it alive) of host memory in any of its forms."""
    if hasattr(memory, "ptr") and hasattr(memory, "nbytes"):
        return int(memory.ptr), int(memory.nbytes), memory
    try:
        raw = np.frombuffer(memory, dtype=np.uint8)
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"memory={memory!r:.80} must be a buffer, or have ptr and nbytes: {error}"
        ) from error
    if not raw.flags.writeable:
        raise InvalidValueError(f"memory={memory!r:.80} is read-only; both ends write to a ring")
    return raw.ctypes.data, raw.nbytes, raw


def set_poll_interval_us(interval_us: int) -> None:
    """Set how often the one native poller looks for parked waiters and event loops.

    Parameters
    ----------
    interval_us : int
        1 to 1000000 microseconds; default 20. Its thread runs only while somebody waits.
    """
    _native.set_poll_interval_us(interval_us)


def poll_interval_us() -> int:
    """Return the poller's interval in microseconds."""
    return int(_native.poll_interval_us())
