"""A buffer that grows in place."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.buffers import DeviceBuffer
from ringmem.device import Device
from ringmem.device.sizes import parse_nbytes
from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import ClosedError, InvalidValueError, NotSupportedError
from ringmem.virtual.ledger import StreamLedger
from ringmem.virtual.locations import AccessMap, checked_nbytes, plain_grants
from ringmem.virtual.sharing import ShareAccess, Ticket, make_ticket
from ringmem.virtual.views import as_shape, borrow

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["GrowableBuffer"]

_GIB = 2**30


class GrowableBuffer(Closing):
    """An array on a device that grows and shrinks along its first axis and never moves.

    The addresses for `max_shape` are reserved at once and cost no memory; physical memory is
    mapped as the buffer grows, in few large handles (up to a quarter of the buffer's size each,
    see `max_handle_nbytes`), and given back by the mapping thread as it shrinks. New elements are
    undefined.

    Callable from any thread. Growth that needs new memory makes driver calls (28 µs for 2 MiB on
    an H200) without the GIL; growth into memory that is there already, because
    :meth:`reserve_ahead` mapped it or a shrink has not given it back yet, is a step of the books.
    Nothing synchronizes a device.

    Parameters
    ----------
    max_shape : int or tuple of int
        The largest shape. Its bytes are rounded up to whole pages.
    dtype : dtype, optional
        By default bytes.
    device : Device or str, optional
        By default the default device.
    shape : int or tuple of int, optional
        Length of the first axis at the start, or a whole shape; by default 0.
    access : dict, optional
        Device → ``"read"`` or ``"readwrite"``; by default its own device reads and writes.
    shareable : bool, optional
        It can be shared with other processes. On CPU devices that costs a descriptor a handle.
    max_handle_nbytes : int, optional
        The largest handle. Memory is given back in whole handles, so smaller ones shrink more
        exactly and cost more: a handle costs about 0.1 ms to grow, whatever its size.

    Raises
    ------
    InvalidValueError
        A shape is negative or too large, or `shape` exceeds `max_shape`.
    NotSupportedError
        The device has no virtual memory management, or cannot export and `shareable` is set.
    OutOfMemoryError
        There are not that many addresses, or not that much memory for `shape`.

    Examples
    --------
    >>> from ringmem.virtual import GrowableBuffer
    >>> cache = GrowableBuffer((1 << 20, 8), "float32", "cpu")
    >>> before = cache.ptr
    >>> cache.resize(1000)
    >>> cache.shape, cache.ptr == before
    ((1000, 8), True)
    >>> cache.close()
    """

    def __init__(
        self,
        max_shape: int | tuple[int, ...],
        dtype: npt.DTypeLike = "uint8",
        device: Device | str | None = None,
        *,
        shape: int | tuple[int, ...] = 0,
        access: AccessMap | None = None,
        shareable: bool = True,
        max_handle_nbytes: int = _GIB,
    ) -> None:
        self._device = Device(device)
        self._dtype = np.dtype(dtype)
        self._max_shape = as_shape(max_shape, "max_shape")
        if not self._max_shape:
            raise InvalidValueError("max_shape is (): give at least one axis, the one that grows")
        nbytes = checked_nbytes(math.prod(self._max_shape), self._dtype.itemsize, "max_shape")
        checked_nbytes(max_handle_nbytes, 1, "max_handle_nbytes")
        self._row_nbytes = nbytes // self._max_shape[0]
        self._ledger = StreamLedger(self._device)
        self._core = _native.Growable.create(
            self._device, nbytes, plain_grants(access, self._device), shareable, max_handle_nbytes
        )
        self._shareable = shareable
        self.resize(shape)

    # --- size ------------------------------------------------------------------------------------

    def resize(self, shape: int | tuple[int, ...], streams: object = None) -> None:
        """Grow or shrink along the first axis. The address and what stays keep as they are.

        Parameters
        ----------
        shape : int or tuple of int
            The new length of the first axis, or a shape whose other axes are the buffer's.
        streams : stream-like or list of them, optional
            For a shrink: what may still use the memory that goes. Its pages are given back when
            the work submitted so far is done; nothing waits here, but for what recorded streams
            left that were closed meanwhile. By default the thread's current stream, and those
            given to :meth:`record_stream`.

        Raises
        ------
        InvalidValueError
            Larger than `max_shape`, or a shrink below a live view. Nothing has changed.
        OutOfMemoryError
            There is not that much memory. Nothing has changed.
        ClosedError
            The buffer is closed.
        """
        length = self._length_of(shape)
        nbytes = length * self._row_nbytes
        if self._core.resize_in_place(nbytes):
            return
        if nbytes < self._core.nbytes:
            self._core.resize(nbytes, self._ledger.plain(streams))
        else:  # frees nothing, also where another thread grows further meanwhile; needs no streams
            self._core.grow(nbytes)

    def reserve_ahead(self, nbytes: int | str) -> None:
        """Keep up to `nbytes` (or ``"64 MiB"``) mapped beyond the size.

        The mapping thread does that, without the GIL. Growth then finds its memory mapped and is a
        step of the books (at most 5 µs). 0 turns it off. Memory mapped ahead is used memory of the
        device; when there is none left it is silently not mapped, and a growth that needs it says
        so. 32 MiB and more are mapped in handles that large.

        Raises
        ------
        InvalidValueError
            `nbytes` is negative, or no size.
        """
        self._core.reserve_ahead(min(parse_nbytes(nbytes, "nbytes"), self.reserved))

    def settle(self) -> None:
        """Wait until the mapping thread has nothing left to do for this buffer.

        Waits, with the GIL released, for the work that shrinks were told to wait for. For tests
        and measurements; nothing needs it.
        """
        self._core.settle()

    def record_stream(self, stream: object) -> None:
        """Say that work on another stream uses the buffer: shrink and close wait for it too."""
        self._ledger.record(stream)

    # --- access ----------------------------------------------------------------------------------

    def set_access(self, access: AccessMap) -> None:
        """Change who may access the buffer, now and as it grows, in one driver call.

        Raises
        ------
        NotSupportedError
            A device cannot access the memory (no peer access).
        """
        self._core.set_access(plain_grants(access, self._device))

    def view(self, length: int | None = None) -> DeviceBuffer:
        """Return the first `length` rows (by default all) as a :class:`DeviceBuffer`.

        What it exports to the host waits for work on the thread's current stream and the recorded
        streams. It shares the memory, and everything a DeviceBuffer can (copies, DLPack, CUDA array
        interface, NumPy on CPU devices). As long as it lives, the buffer does not shrink below it
        and cannot be closed.

        Raises
        ------
        InvalidValueError
            `length` is more than the buffer has.
        ClosedError
            The buffer is closed.
        """
        have = len(self)
        length = have if length is None else length
        if not 0 <= length <= have:
            if self.closed:
                raise ClosedError("the buffer is closed")
            raise InvalidValueError(f"length is {length}: the buffer has {have} rows")
        nbytes = length * self._row_nbytes
        hold = _Pin(self, nbytes)
        return borrow(
            ptr=self._core.ptr,
            limit=nbytes,
            shape=(length, *self._max_shape[1:]),
            dtype=self._dtype,
            device=self._device,
            hold=hold,
            streams=self._ledger.pending(),
        )

    def fill(self, value: Any, stream: object = None) -> None:
        """Set all elements to `value`, in stream order; see :meth:`DeviceBuffer.fill`."""
        if len(self):
            if stream is not None:
                self.record_stream(stream)
            self.view().fill(value, stream=stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The whole buffer, for other libraries. Unlike :meth:`view` it cannot hold off a shrink:
        the protocol has no end. Prefer DLPack, or give them a view.
        """
        return self.view().__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> object:
        """Export the whole buffer; it does not shrink as long as the importer has it."""
        return self.view().__dlpack__(**options)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Return the elements as an array where the host can read them, like a view's."""
        return self.view().__array__(dtype, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type and number of the device."""
        return self.view(0).__dlpack_device__()

    def share(self, access: ShareAccess = "readwrite", uses: int = 1) -> Ticket:
        """Return a ticket with which other processes of the same user attach to the memory.

        What is shared is the buffer as it is now: growth afterwards is not seen, a shrink below it
        makes the ticket stale. The ticket does not keep the buffer; attachments keep the memory.

        Parameters
        ----------
        access : str, optional
            ``"readwrite"`` or ``"read"``: the most that attachments may have.
        uses : int, optional
            How many may attach with it.

        Raises
        ------
        InvalidValueError
            The buffer is empty, or an argument is wrong.
        NotSupportedError
            It was made with ``shareable=False``.
        """
        if not self._shareable:
            raise NotSupportedError("the buffer was made with shareable=False")
        return make_ticket(
            self,
            _memories,
            shape=self.shape,
            dtype=self._dtype,
            device=self._device,
            access=access,
            uses=uses,
        )

    # --- what it is ------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """Device: where the memory lives."""
        return self._device

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype: of the elements."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents now."""
        return (len(self), *self._max_shape[1:])

    @property
    def max_shape(self) -> tuple[int, ...]:
        """Extents at most."""
        return self._max_shape

    @property
    def size(self) -> int:
        """int: elements now."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self._core.nbytes // self._row_nbytes

    def __bool__(self) -> bool:  # a handle, as every buffer: also before it grows
        return True

    @property
    def ptr(self) -> int:
        """int: the address; never changes."""
        return self._core.ptr

    @property
    def nbytes(self) -> int:
        """int: bytes of the elements now."""
        return self._core.nbytes

    @property
    def committed(self) -> int:
        """int: bytes of physical memory held now, with what is mapped ahead or not yet released."""
        return self._core.committed

    @property
    def reserved(self) -> int:
        """int: bytes of addresses reserved."""
        return self._core.reserved

    @property
    def handles(self) -> int:
        """int: physical handles that make up the committed memory."""
        return self._core.handles

    @property
    def closed(self) -> bool:
        """bool: it is closed."""
        return self._core.closed

    # --- life ------------------------------------------------------------------------------------

    def close(self, streams: object = None) -> None:
        """Give everything back. Idempotent.

        Waits on the host, with the GIL released, for the work submitted so far to `streams` (by
        default the thread's current stream) and the recorded streams.

        Raises
        ------
        InvalidValueError
            A view is alive; the buffer is as before.
        DriverError
            The driver failed. If it could not wait, the buffer is as before. If it could not unmap,
            the buffer is empty and still open (nobody knows what is mapped), and a second call
            tries again. Else it is `closed`, and all that could be given back is.
        """
        if not self.closed:
            self._core.close(self._ledger.plain(streams))

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.closed:
            # The mapping thread waits for the work and releases; nothing waits or raises here.
            core.abandon(self._ledger.plain_for_finalizer())

    def __reduce__(self) -> Any:
        raise NotSupportedError(f"{self!r} cannot be pickled: send the ticket that share() makes")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.committed} of {self.reserved} bytes committed"
        return f"<GrowableBuffer {self.shape} {self._dtype} on {self._device.name}, {state}>"

    # --- inside ----------------------------------------------------------------------------------

    def _length_of(self, shape: int | tuple[int, ...]) -> int:
        try:
            extents = (operator.index(shape), *self._max_shape[1:])  # type: ignore[arg-type]
        except TypeError:
            try:
                extents = tuple(operator.index(extent) for extent in shape)  # type: ignore[union-attr]
            except TypeError as error:
                raise InvalidValueError(
                    f"shape is {shape!r}: give the length of the first axis, or a tuple of integers"
                ) from error
        if extents[1:] != self._max_shape[1:] or len(extents) != len(self._max_shape):
            raise InvalidValueError(
                f"shape is {shape!r}: only the first axis of {self._max_shape} can change"
            )
        if not 0 <= extents[0] <= self._max_shape[0]:
            raise InvalidValueError(
                f"shape is {shape!r}: the first axis goes from 0 to {self._max_shape[0]}; "
                "make the buffer with a larger max_shape"
            )
        return extents[0]


def _memories(buffer: GrowableBuffer) -> list[_native.PhysicalMemory]:
    return buffer._core.memories()


class _Pin:
    """One view of the first `nbytes` of a growable buffer, for as long as this lives."""

    def __init__(self, buffer: GrowableBuffer, nbytes: int) -> None:
        self._buffer: GrowableBuffer | None = None
        buffer._core.pin(nbytes)
        self._buffer = buffer
        self._nbytes = nbytes

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer._core.unpin(self._nbytes)
