"""Which buffers stand on tagged memory, what was exported from them, which streams use them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from ringmem.buffers import DeviceBuffer
from ringmem.native import _native
from ringmem.native.errors import ClosedError

if TYPE_CHECKING:
    from ringmem.residency.tagged import Tag

__all__ = ["buffers_of", "closed_streams_of", "exports_of", "streams_in_use"]


def buffers_of(tag: Tag) -> list[DeviceBuffer]:
    """Return the live buffers in the tag's memory, views of them included.

    The garbage collector knows them all; asking it costs about 20 ms for a million objects, and
    costs those who never sleep nothing.
    """
    start, stop = tag.ptr, tag.ptr + tag.reserved
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), DeviceBuffer) and start <= _address(found) < stop
    ]


def _address(buffer: DeviceBuffer) -> int:
    """Return where an open buffer is, else 0: other threads make and close them meanwhile."""
    try:
        return buffer.ptr
    except (ClosedError, TypeError):  # TypeError: not made yet
        return 0


def exports_of(buffers: list[DeviceBuffer]) -> int:
    """Return how many exports (NumPy arrays, DLPack tensors) of these buffers are alive.

    A buffer counts its exports and its views together; the views are among `buffers`.
    """
    uses: dict[int, int] = {}
    views: dict[int, int] = {}
    for buffer in buffers:
        owner: Any = _native.buffer_owner(buffer)
        if isinstance(owner, DeviceBuffer):
            views[id(owner)] = views.get(id(owner), 0) + 1
        uses[id(buffer)] = _native.buffer_uses(buffer)
    return sum(count - views.get(key, 0) for key, count in uses.items())


def streams_in_use(buffers: list[DeviceBuffer]) -> list[tuple[int, int]]:
    """Return the open streams, as (device, handle), whose work may touch these buffers."""
    found: dict[tuple[int, int], None] = {}
    for buffer in buffers:
        for stream in _native.buffer_streams_in_use(buffer):
            found[tuple(stream)] = None
    return list(found)


def closed_streams_of(buffers: list[DeviceBuffer]) -> list[_native.StreamBase]:
    """Return the closed streams whose work may touch these buffers still."""
    found = {}
    for buffer in buffers:
        for stream in _native.buffer_closed_streams(buffer):
            found[id(stream)] = stream
    return list(found.values())
