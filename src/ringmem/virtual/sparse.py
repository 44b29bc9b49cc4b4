"""A buffer with holes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.buffers import DeviceBuffer
from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.closing import Closing
from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.virtual.ledger import StreamLedger
from ringmem.virtual.locations import AccessMap, checked_nbytes, plain_grants
from ringmem.virtual.views import as_shape, borrow

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["SparseBuffer"]

_DEFAULT_CACHE_NBYTES = 64 * 2**20


class SparseBuffer(Closing):
    """An array on a device of which any pages are mapped, and the others cost no memory.

    For paged key-value caches: the addresses for all pages are reserved at once, pages are mapped
    and unmapped in any order, contiguous ones together (one access call and one unmap call a
    run). Every page has a handle of its own, about 37 µs to map on an H200 whatever its size: use
    pages of 32 MiB and more where the use allows. A page must not be in use by running work while
    it is mapped, nor afterwards be unmapped without naming the streams that use it.

    Callable from any thread; nothing synchronizes a device.

    Parameters
    ----------
    shape : int or tuple of int
        The whole array.
    dtype : dtype, optional
        By default bytes.
    device : Device or str, optional
        By default the default device.
    page_nbytes : int, optional
        A multiple of the granularity, which is the default.
    read_zero : bool, optional
        Pages that are not mapped read as zero instead of faulting (guard mode): one page of zeros
        is mapped read-only in their place. Writing there still faults. Costs a mapping a page at
        the start (about 20 µs each) and one more for every map and unmap.
    access : dict, optional
        Device → ``"read"`` or ``"readwrite"``; by default its own device reads and writes.
    cache_nbytes : int, optional
        Bytes of unmapped pages kept for the next :meth:`map`, by default 64 MiB.

    Raises
    ------
    InvalidValueError
        A shape is negative or too large, or `page_nbytes` is no multiple of the granularity.
    NotSupportedError
        The device has no virtual memory management.
    OutOfMemoryError
        There are not that many addresses; for `read_zero`, not that many mappings.

    Examples
    --------
    >>> from ringmem.virtual import SparseBuffer
    >>> blocks = SparseBuffer(1 << 26, "uint8", "cpu")
    >>> blocks.map([0, 1, 2, 7])
    >>> blocks.mapped
    [range(0, 3), range(7, 8)]
    >>> blocks.unmap(range(1, 3))
    >>> blocks.mapped
    [range(0, 1), range(7, 8)]
    >>> blocks.close()
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike = "uint8",
        device: Device | str | None = None,
        *,
        page_nbytes: int | None = None,
        read_zero: bool = False,
        access: AccessMap | None = None,
        cache_nbytes: int = _DEFAULT_CACHE_NBYTES,
    ) -> None:
        self._device = Device(device)
        self._dtype = np.dtype(dtype)
        self._shape = as_shape(shape, "shape")
        nbytes = checked_nbytes(math.prod(self._shape), self._dtype.itemsize, "shape")
        if page_nbytes is not None:
            checked_nbytes(page_nbytes, 1, "page_nbytes")
        if cache_nbytes < 0:
            raise InvalidValueError(f"cache_nbytes is {cache_nbytes}: give 0 (none) or more")
        self._nbytes = nbytes
        self._row_nbytes = nbytes // self._shape[0]
        self._ledger = StreamLedger(self._device)
        self._core = _native.Sparse.create(
            self._device,
            nbytes,
            page_nbytes or 0,
            plain_grants(access, self._device),
            False,
            read_zero,
            cache_nbytes,
        )

    # --- pages -----------------------------------------------------------------------------------

    def map(self, pages: int | Iterable[int]) -> None:
        """Map pages, all of them or none.

        The bytes of a page are undefined, except where its unmapping still waited for work: then
        it comes back as it was.

        Parameters
        ----------
        pages : int, range or iterable of int
            Page numbers, in any order; contiguous ones are mapped together.

        Raises
        ------
        InvalidValueError
            A page is mapped already, named twice, or beyond the buffer. Nothing has changed.
        OutOfMemoryError
            There is not that much memory, or the process has as many mappings as it may. Nothing
            has changed.
        """
        runs = _runs(pages)
        if runs:
            self._core.map(runs)

    def unmap(self, pages: int | Iterable[int], streams: object = None) -> None:
        """Give pages back when the work that uses them is done.

        Returns at once, but for what recorded streams left that were closed meanwhile.

        Parameters
        ----------
        pages : int, range or iterable of int
            Page numbers, in any order; contiguous ones are unmapped together.
        streams : stream-like or list of them, optional
            What may still use the pages. By default the thread's current stream, and those given
            to :meth:`record_stream`.

        Raises
        ------
        InvalidValueError
            A page is not mapped, or a live view needs it. Nothing has changed.
        """
        runs = _runs(pages)
        if runs:
            self._core.unmap(runs, self._ledger.plain(streams))

    def pages_of(self, start: int, stop: int) -> range:
        """Return the pages that hold rows `start` to `stop` of the first axis."""
        if not 0 <= start < stop <= self._shape[0]:
            raise InvalidValueError(
                f"start is {start} and stop is {stop}: rows go from 0 to {self._shape[0]}"
            )
        page = self.page_nbytes
        first = start * self._row_nbytes // page
        return range(first, -(-stop * self._row_nbytes // page))

    @property
    def mapped(self) -> list[range]:
        """The mapped pages, in order, contiguous ones together."""
        return [range(first, first + count) for first, count in self._core.runs()]

    @property
    def page_nbytes(self) -> int:
        """int: bytes of a page."""
        return self._core.page_nbytes

    @property
    def page_count(self) -> int:
        """int: pages of the whole buffer."""
        return self._core.page_count

    def settle(self) -> None:
        """Wait until the pages that were unmapped so far are given back."""
        self._core.settle()

    def record_stream(self, stream: object) -> None:
        """Say that work on another stream uses the buffer: unmap and close wait for it too."""
        self._ledger.record(stream)

    # --- data ------------------------------------------------------------------------------------

    def view(self, start: int, stop: int) -> DeviceBuffer:
        """Return rows of the first axis as a :class:`DeviceBuffer`; all their pages must be mapped.

        Raises
        ------
        InvalidValueError
            A page is not mapped. While the view lives its pages cannot be unmapped.
        """
        pages = self.pages_of(start, stop)
        hold = _Pin(self, pages)
        offset = start * self._row_nbytes
        return borrow(
            ptr=self._core.ptr + offset,
            limit=(stop - start) * self._row_nbytes,
            shape=(stop - start, *self._shape[1:]),
            dtype=self._dtype,
            device=self._device,
            hold=hold,
            streams=self._ledger.pending(),
        )

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
        """Extents of the whole array."""
        return self._shape

    @property
    def size(self) -> int:
        """int: elements of the whole array."""
        return math.prod(self._shape)

    @property
    def ptr(self) -> int:
        """int: the address of the first element; never changes."""
        return self._core.ptr

    @property
    def nbytes(self) -> int:
        """int: bytes of the whole array."""
        return self._nbytes

    @property
    def committed(self) -> int:
        """int: bytes of physical memory held now, with cached pages and the page of zeros."""
        return self._core.committed

    @property
    def reserved(self) -> int:
        """int: bytes of addresses reserved."""
        return self._core.nbytes

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
            it is still open, what is mapped is unknown, and a second call tries again. Else it is
            `closed`, and all that could be given back is.
        """
        if not self.closed:
            self._core.close(self._ledger.plain(streams))

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.closed:
            # The mapping thread waits for the work and releases; nothing waits or raises here.
            core.abandon(self._ledger.plain_for_finalizer())

    def __reduce__(self) -> Any:
        raise NotSupportedError(
            f"{self!r} cannot be pickled: its memory is this process's; pickle a view's to_numpy()"
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._core.mapped_pages} of {self.page_count} pages"
        return f"<SparseBuffer {self.shape} {self._dtype} on {self._device.name}, {state}>"


def _runs(pages: int | Iterable[int]) -> list[tuple[int, int]]:
    """Return pages as (first, count); the native side joins adjacent runs and refuses overlap."""
    if isinstance(pages, int):
        pages = (pages,)
    if isinstance(pages, range) and pages.step == 1:
        runs = [(pages.start, len(pages))] if len(pages) else []
    else:
        try:
            runs = [(operator.index(page), 1) for page in pages]
        except TypeError:
            raise InvalidValueError(
                f"pages is {pages!r}: give a page number, a range, or several numbers"
            ) from None
    for first, _ in runs:
        if first < 0:
            raise InvalidValueError(f"pages names page {first}: pages are numbered from 0")
    return runs


class _Pin:
    """One view of pages of a sparse buffer, for as long as this lives."""

    def __init__(self, buffer: SparseBuffer, pages: range) -> None:
        self._buffer: SparseBuffer | None = None
        buffer._core.pin(pages.start, len(pages))
        self._buffer = buffer
        self._pages = pages

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer._core.unpin(self._pages.start, len(self._pages))
