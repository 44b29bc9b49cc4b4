"""What all buffers can do. The hot half is native (``bind/buffer*.cpp``); here is the rest, and the
documentation of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import numpy as np

from ringmem.buffers import array_interface, dlpack, host_copies
from ringmem.buffers.arguments import optional_flag
from ringmem.buffers.elements import element_bytes
from ringmem.buffers.kinds import Kind
from ringmem.device import Stream
from ringmem.device.sizes import format_nbytes
from ringmem.native import _native
from ringmem.native.errors import ClosedError, InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import EllipsisType

    from numpy.typing import DTypeLike, NDArray

    from ringmem.device import Device

__all__ = ["Buffer"]


class Buffer(_native.BufferBase):
    """Memory with a shape and a dtype: base of DeviceBuffer, PinnedBuffer and UnifiedBuffer.

    A buffer owns its memory, or is a view of one that does, or borrows another library's. Memory
    is contiguous, in C order. It is given back in stream order by ``close()``, by the ``with``
    statement, or when nobody holds the buffer any more; nothing waits for the device. Work that
    ringmem submitted on other streams is waited for, on the device, before the memory is reused;
    :meth:`record_stream` says so of other work.

    Wherever a ``stream`` can be given, the default is the stream that the buffer was made on.
    Methods may be called from any thread. A buffer is a handle: it is true, also when it is empty,
    and no number.

    Attributes
    ----------
    ptr : int
        Address on the device (and, for pinned memory, on the host). 0 for size 0.
    nbytes, size, itemsize, ndim : int
        Bytes; elements; bytes of an element; dimensions.
    shape : tuple of int
        Extents.
    dtype : numpy.dtype
        Type of the elements.
    device : Device
        Whose memory it is; for host memory, the device that it was made for.
    readonly : bool
        The memory must not be written (borrowed read-only memory).
    is_view, closed : bool
        The memory belongs to another buffer; ``close()`` was called.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # native: only types and documentation here

        @property
        def dtype(self) -> np.dtype[Any]:
            """numpy.dtype: type of the elements."""

        @property
        def device(self) -> Device:
            """Device: whose memory it is, or who may reach it."""

        @property
        def shape(self) -> tuple[int, ...]:
            """Tuple of int: extents."""

        def __enter__(self) -> Self: ...

        def __getitem__(self, index: int | slice | EllipsisType) -> Self:
            """Return a view of one element, or of a slice with step 1, of the first axis.

            Raises
            ------
            InvalidValueError
                Out of range, a step, or an index of several axes.
            """

        def view(self, dtype: DTypeLike) -> Self:
            """Return a view of the same bytes as another dtype.

            Where the itemsize differs, the last axis becomes longer or shorter.

            Raises
            ------
            InvalidValueError
                The bytes of the last axis are no whole number of elements.
            """

        def reshape(self, *shape: int | tuple[int, ...]) -> Self:
            """Return a view of the same elements in another shape; one extent may be -1.

            Raises
            ------
            InvalidValueError
                The numbers of elements differ.
            """

        def close(self, stream: object | None = None) -> None:
            """Give the memory back; idempotent, never waits for the device.

            Parameters
            ----------
            stream : stream-like, optional
                The memory may be reused after the work on this stream and on all streams that the
                buffer was used on.

            Raises
            ------
            InvalidValueError
                Views or exports (arrays, memoryviews, DLPack tensors) are alive. The buffer stays
                usable.
            DriverError
                The driver refused. The buffer stays usable, and ``close()`` may be repeated.
            """

        def copy_from(self, source: object, stream: object | None = None) -> None:
            """Copy everything from a source of the same shape and dtype into this buffer.

            Parameters
            ----------
            source : object
                A buffer of any device, a NumPy array (strided as it may be), or an object with
                ``__cuda_array_interface__``, ``__dlpack__`` or the buffer protocol.
            stream : stream-like, optional
                Where the copy is ordered. Between buffers, and with arrays over pinned buffers,
                the call does not wait for it; pageable memory may be reused on return.

            Raises
            ------
            InvalidValueError
                Shapes or dtypes differ, the ranges overlap, or this buffer is read-only.
            ClosedError
                A side, or the stream, is closed.
            DriverError
                The driver failed; a part of the target may have been written.
            """

        def copy_to(self, target: object, stream: object | None = None) -> None:
            """Copy everything from this buffer into a target of the same shape and dtype.

            The same as :meth:`copy_from` the other way round. A pageable target is complete when
            the call returns; a read-only one is refused.
            """

        def record_stream(self, stream: object) -> None:
            """Say that work on another stream of the device uses the memory.

            Freeing the memory then waits for the work that is on that stream by that time; on the
            device, not here.
            """

    # --- what it is ------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """Stream: where the memory was allocated, and where work goes by default."""
        _, owner = _native.buffer_stream(self)
        return self.device.default_stream if owner is None else cast(Stream, owner)

    @property
    def capacity(self) -> int:
        """int: elements that fit into the memory from the buffer's start; ``size`` or more.

        More than ``size`` for a view that ends before the memory does.
        """
        start, nbytes = _native.buffer_root(self)
        if not nbytes:
            return self.size
        return int((start + nbytes - self.ptr) // self.itemsize)

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if not _native.is_ready(self):
            return f"<{type(self).__name__}, never initialized>"
        text = f"{type(self).__name__} {self.shape} {self.dtype} on {self.device.name}"
        try:
            text += f", {format_nbytes(self.nbytes)} at {self.ptr:#x}"
        except ClosedError:
            return f"<{text}, closed>"
        if self.is_view:
            return f"<{text}, view>"
        if _native.buffer_owner(self) is not None:
            return f"<{text}, borrowed>"
        handle, owner = _native.buffer_stream(self)
        closed = "closed " if owner is not None and cast(Stream, owner).closed else ""
        return f"<{text}, {closed}stream {handle:#x}>"

    def __bool__(self) -> bool:
        """Return True, whatever the memory holds: a buffer is a handle, and None is not."""
        return True

    def __reduce_ex__(self, protocol: object) -> Any:
        raise NotSupportedError(
            f"{self!r} cannot be pickled: its memory is this process's; pickle to_numpy(), or "
            "share physical memory (ringmem.virtual)"
        )

    # --- what it is not --------------------------------------------------------------------------

    # Python would make a number of the text in the bytes, and look for one in view after view.
    def _refuse_number(self) -> NoReturn:
        raise InvalidValueError(f"{self!r} is no number: read one with buffer.to_numpy().item()")

    __int__ = __float__ = __complex__ = _refuse_number

    def __contains__(self, value: object) -> NoReturn:
        raise InvalidValueError(
            f"{value!r:.80} is looked for in {self!r}, which compares no elements: look in "
            "buffer.to_numpy()"
        )

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise InvalidValueError(
            f"{self!r} takes no values by index: buffer[i].fill(value) sets an element, "
            "buffer[i:j].copy_from(array) several"
        )

    def __delitem__(self, index: object) -> NoReturn:
        raise InvalidValueError(f"{self!r} keeps its size: take a slice without the elements")

    # --- content ---------------------------------------------------------------------------------

    def fill(self, value: object, stream: object | None = None) -> None:
        """Set every element, in stream order; never waits.

        Parameters
        ----------
        value : scalar or tuple
            Anything that one element can hold, but for rounding; a tuple for a structured dtype.
            No text for a number, and for a bool nothing but True, False, 0 and 1.
        stream : stream-like, optional
            Where the fill is ordered.

        Raises
        ------
        InvalidValueError
            The dtype cannot hold the value, or the buffer is read-only.
        DriverError
            The driver failed; a part may have been written.

        Examples
        --------
        >>> import ringmem
        >>> buffer = ringmem.empty(3, "f8", device="cpu")
        >>> buffer.fill(0.5)
        >>> buffer.to_numpy().tolist()
        [0.5, 0.5, 0.5]
        """
        pattern = element_bytes(value, self.dtype)
        if _native.buffer_kind(self) != Kind.HOST:
            _native.buffer_fill(self, pattern, stream)
            return
        _native.buffer_synchronize(self)
        array = cast("NDArray[Any]", _native.buffer_host_array(self, False))
        array[...] = np.frombuffer(pattern, self.dtype)[0]

    def to_numpy(self, stream: object | None = None) -> NDArray[Any]:
        """Return a new array with the content; blocks until it is there.

        Parameters
        ----------
        stream : stream-like, optional
            Wait for the work on this stream only; by default for all work on the buffer that
            ringmem knows.

        Raises
        ------
        DriverError
            The driver failed.
        """
        return host_copies.to_numpy(self, stream)

    def copy(self, stream: object | None = None) -> Buffer:
        """Return a new buffer of the same kind with the same content, in stream order.

        Host memory that is borrowed becomes a DeviceBuffer of its CPU device.
        """
        _native.buffer_order(self, stream)  # whose error says that another stream can be given
        fresh = self._empty_like(self.stream if stream is None else stream)
        try:
            fresh.copy_from(self, stream)
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _empty_like(self, stream: object | None) -> Buffer:
        """Allocate a buffer of this kind, shape and dtype; not of a user's subclass."""
        raise NotImplementedError

    # --- interoperability ------------------------------------------------------------------------

    def _wait_for_host(self) -> None:
        """Block until the host may read the memory; refuse where it never may."""
        _native.buffer_synchronize(self)

    def _host_array(self, readonly: bool, *, wait: bool) -> NDArray[Any]:
        array = cast("NDArray[Any]", _native.buffer_host_array(self, readonly))
        if wait:
            self._wait_for_host()
        return array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the memory as an array where the host can read it; blocks for pending work.

        Raises
        ------
        NotSupportedError
            The host cannot read the memory: ``to_numpy()`` copies it.
        """
        copy = optional_flag("copy", copy)
        array = self._host_array(self.readonly, wait=True)
        wanted = array.dtype if dtype is None else np.dtype(dtype)
        if wanted != array.dtype:
            if copy is False:
                raise InvalidValueError(
                    f"copy is False, but {self!r} must be converted to {wanted}: allow the copy"
                )
            return array.astype(wanted)
        return array.copy() if copy else array

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Export the memory as a DLPack capsule (the array API's protocol).

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, which is made to wait for the work on the buffer: a handle, 1 or
            None for the legacy default stream, 2 for the per-thread one, -1 for no ordering. None
            for host memory; then the call blocks until the work is done.
        max_version : tuple of int, optional
            What the consumer reads; from (1, 0) on the capsule is versioned.
        dl_device : tuple of int, optional
            ``(1, 0)`` asks for host memory: a copy, unless the memory is pinned.
        copy : bool, optional
            True: always a copy. False: never. None: only if needed.

        Raises
        ------
        InvalidValueError
            DLPack has no such dtype or device, or a copy is needed and refused.
        NotSupportedError
            DLPack has no name for where the memory is (a CPU device that hides it, managed memory
            without concurrent access), and `dl_device` does not ask for the host.
        """
        return dlpack.export(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type (CPU 1, CUDA 2, pinned 3, managed 13) and device id."""
        return dlpack.device_of(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """dict: version 3, with the stream to wait for. Only on CUDA devices.

        The consumer keeps the buffer alive, but ringmem cannot see that it does: close the buffer
        only when the consumer is done.
        """
        if self.device.platform != "cuda" or _native.buffer_kind(self) == Kind.HOST:
            raise AttributeError(
                f"{self!r} is no CUDA memory: use DLPack or NumPy instead of "
                "__cuda_array_interface__"
            )
        return array_interface.describe(self)
