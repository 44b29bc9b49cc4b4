"""Copies between buffers and host arrays: what is pinned goes asynchronously, the rest waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ringmem.buffers.kinds import Kind
from ringmem.buffers.strided import StridedPlan, plan_strided
from ringmem.native import _native
from ringmem.native.errors import DriverError, InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringmem.buffers.base import Buffer

__all__ = ["download", "to_numpy", "upload"]


def upload(buffer: Buffer, array: NDArray[Any], stream: object | None) -> None:
    """Copy a host array, strided as it may be, into a buffer.

    Pageable memory may be reused when this returns. An array over a PinnedBuffer is copied
    asynchronously; that buffer is kept for as long as the copy needs it.
    """
    _check_pair(buffer, array, f"the source is an array {array.shape} {array.dtype}, the target is")
    if buffer.readonly:
        raise InvalidValueError(f"the target, {buffer!r}, is read-only: give another")
    if not buffer.nbytes:
        return
    _check_overlap(buffer, array)
    plan = plan_strided(array.shape, array.strides, array.itemsize)
    _check_capture(buffer, array, plan, stream)
    _finish_others(buffer, array, plan, stream)
    source = np.ascontiguousarray(array) if plan.staged else array
    with _native.buffer_hold(buffer):
        _submit(buffer, source, plan, stream, into_buffer=True)
        if _pinned_holder(buffer, source) is None and _is_page_locked(buffer, source):
            _synchronize(buffer, stream)


def download(buffer: Buffer, array: NDArray[Any], stream: object | None) -> None:
    """Copy a buffer into a host array, strided as it may be.

    With pageable memory the array is complete when this returns. An array over a PinnedBuffer is
    written asynchronously.
    """
    _check_pair(buffer, array, f"the target is an array {array.shape} {array.dtype}, the source is")
    if not array.flags.writeable:
        raise InvalidValueError(
            f"the target is a read-only array {array.shape} {array.dtype}: give a writable one"
        )
    if not buffer.nbytes:
        return
    _check_overlap(buffer, array)
    plan = plan_strided(array.shape, array.strides, array.itemsize)
    _check_capture(buffer, array, plan, stream)
    _finish_others(buffer, array, plan, stream)
    target = np.empty(array.shape, array.dtype) if plan.staged else array
    with _native.buffer_hold(buffer):
        _submit(buffer, target, plan, stream, into_buffer=False)
        if _pinned_holder(buffer, target) is None:  # which waits when it is freed
            _synchronize(buffer, stream)
    if plan.staged:
        array[...] = target


def to_numpy(buffer: Buffer, stream: object | None) -> NDArray[Any]:
    """Return a new array with the buffer's content, complete."""
    if stream is None:
        _native.buffer_synchronize(buffer)
    if _native.buffer_kind(buffer) == Kind.HOST:
        return cast("NDArray[Any]", _native.buffer_host_array(buffer, True)).copy()
    array: NDArray[Any] = np.empty(buffer.shape, buffer.dtype)
    download(buffer, array, stream)
    return array


def _check_pair(buffer: Buffer, array: NDArray[Any], said: str) -> None:
    if array.shape != buffer.shape:
        raise InvalidValueError(f"shapes differ: {said} {buffer!r}; slice or reshape one of them")
    if array.dtype != buffer.dtype:
        raise InvalidValueError(
            f"dtypes differ: {said} {buffer!r}; convert the array, or view the buffer"
        )


def _check_overlap(buffer: Buffer, array: NDArray[Any]) -> None:
    low, high = _byte_bounds(array)
    if low < buffer.ptr + buffer.nbytes and buffer.ptr < high:
        raise InvalidValueError(
            f"source and target overlap: the array is at {low:#x} to {high:#x}, inside {buffer!r}; "
            "copy through another array"
        )


def _check_capture(
    buffer: Buffer, array: NDArray[Any], plan: StridedPlan, stream: object | None
) -> None:
    if not plan.staged and _pinned_holder(buffer, array) is not None:
        return
    handle, _ = _native.buffer_order(buffer, stream)
    if buffer.device.driver.stream_capturing(buffer.device.ordinal, handle):
        raise InvalidValueError(
            f"stream is being captured into a graph, which would copy between {buffer!r} and the "
            "array's memory at each launch: give an array over a PinnedBuffer that lives as long "
            "as the graph"
        )


def _finish_others(
    buffer: Buffer, array: NDArray[Any], plan: StridedPlan, stream: object | None
) -> None:
    """Wait for the work on the array's memory where the host itself will read or write that.

    A copy that the device makes comes in the order of its stream.
    """
    holder = _holder(array)
    if holder is None:
        return
    in_order = _pinned_holder(buffer, array) is not None
    if in_order and not plan.staged:
        _, owner = _native.buffer_order(buffer, stream)
        _native.buffer_note_use(holder, owner or buffer.device.default_stream)
        return
    _native.buffer_synchronize(holder)
    if in_order:  # kernels of others may use it in the order of the stream
        _synchronize(buffer, stream)


def _byte_bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the first address and the one behind the last of an array with elements."""
    low = high = _address(array)
    for extent, stride in zip(array.shape, array.strides, strict=True):
        span = (extent - 1) * stride
        low, high = low + min(span, 0), high + max(span, 0)
    return low, high + array.itemsize


def _address(array: NDArray[Any]) -> int:
    return cast(int, array.__array_interface__["data"][0])


def _holder(array: object) -> Buffer | None:
    """Return the buffer that an array is a host view of, through however many views."""
    base: object = array
    while base is not None:
        if isinstance(base, _native.Hold):
            return cast("Buffer", base.buffer)
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return None


def _submit(
    buffer: Buffer,
    array: NDArray[Any],
    plan: StridedPlan,
    stream: object | None,
    *,
    into_buffer: bool,
) -> None:
    """Make the driver calls of a plan; a staged one has a packed `array` by now."""
    _native.buffer_check_device_may_use(buffer)
    driver, ordinal = buffer.device.driver, buffer.device.ordinal
    handle, owner = _native.buffer_order(buffer, stream)
    _native.buffer_note_use(buffer, owner or buffer.device.default_stream)
    host, packed = _address(array), buffer.ptr
    if not plan.rows:
        ends = (packed, host) if into_buffer else (host, packed)
        driver.copy_async(ordinal, *ends, buffer.nbytes, handle)
    for rows in plan.rows:
        inside = (packed + rows.packed_offset, rows.width)
        outside = (host + rows.host_offset, rows.pitch)
        dst, src = (inside, outside) if into_buffer else (outside, inside)
        driver.copy_2d_async(ordinal, *dst, *src, rows.width, rows.height, handle)


def _pinned_holder(buffer: Buffer, array: NDArray[Any]) -> Buffer | None:
    """Return the PinnedBuffer, of the buffer's driver, that the array is over."""
    pinned = _holder(array)
    if pinned is None or _native.buffer_kind(pinned) != Kind.PINNED:
        return None
    return pinned if pinned.device.driver is buffer.device.driver else None


def _synchronize(buffer: Buffer, stream: object | None) -> None:
    handle, _ = _native.buffer_order(buffer, stream)
    buffer.device.driver.stream_synchronize(buffer.device.ordinal, handle)


def _is_page_locked(buffer: Buffer, array: NDArray[Any]) -> bool:
    """Whether somebody else pinned the memory: then the copy is still reading it."""
    device = buffer.device
    try:
        info = device.driver.pointer_info(device.ordinal, _address(array))
    except DriverError:
        return False
    return info.kind != _native.PointerKind.unregistered
