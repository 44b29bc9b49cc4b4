"""Copies that the native path hands on: host arrays, other libraries' memory, two devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ringmem.buffers.arguments import refuse_masked
from ringmem.buffers.host_copies import download, upload
from ringmem.buffers.interop import borrow_foreign
from ringmem.buffers.kinds import Kind
from ringmem.device import as_stream, copy_peer
from ringmem.native import _native
from ringmem.native.errors import InvalidDeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringmem.buffers.base import Buffer
    from ringmem.device import Stream

__all__ = ["copy_general"]


def copy_general(target: object, source: object, stream: object | None) -> None:
    """Copy between any two things that hold memory; at least one of them is a Buffer."""
    if isinstance(target, _native.BufferBase):
        if isinstance(source, _native.BufferBase):
            _copy_between(cast("Buffer", target), cast("Buffer", source), stream)
        else:
            _copy_in(cast("Buffer", target), source, stream)
    else:
        _copy_out(target, cast("Buffer", source), stream)


def _copy_in(buffer: Buffer, source: object, stream: object | None) -> None:
    refuse_masked("source", source)
    array = _host_array_of(source)
    if array is not None:
        upload(buffer, array, stream)
        return
    foreign = borrow_foreign(source, "source", buffer.device)
    buffer.copy_from(foreign, stream)
    _outlive(foreign)


def _copy_out(target: object, buffer: Buffer, stream: object | None) -> None:
    refuse_masked("target", target)
    array = _host_array_of(target)
    if array is not None:
        download(buffer, array, stream)
        return
    foreign = borrow_foreign(target, "target", buffer.device)
    buffer.copy_to(foreign, stream)
    _outlive(foreign)


def _outlive(foreign: Buffer) -> None:
    """Wait where the copy may still read or write pageable memory that its owner may give up."""
    if _native.buffer_kind(foreign) == Kind.HOST:
        _native.buffer_synchronize(foreign)


def _host_array_of(holder: object) -> NDArray[Any] | None:
    """Return an array over `holder` without a copy; None where it has no host memory."""
    if isinstance(holder, np.ndarray):
        return holder
    if hasattr(holder, "__cuda_array_interface__"):
        return None
    try:
        view = memoryview(holder)  # type: ignore[arg-type]
    except (TypeError, BufferError, ValueError):
        return None
    return np.asarray(view)


def _copy_between(dst: Buffer, src: Buffer, stream: object | None) -> None:
    """Two devices, or memory of two drivers. Shape, dtype and overlap have been checked."""
    kinds = _native.buffer_kind(dst), _native.buffer_kind(src)
    if kinds == (Kind.DEVICE, Kind.DEVICE):
        _copy_devices(dst, src, stream)
    elif kinds[1] != Kind.DEVICE or (kinds[0] == Kind.DEVICE and src.device.host_accessible):
        _native.buffer_synchronize(src)
        upload(dst, cast("NDArray[Any]", _native.buffer_host_array(src, True)), stream)
        _native.buffer_synchronize(dst)  # the streams of two drivers cannot wait for each other
    else:
        _native.buffer_synchronize(dst)
        download(src, cast("NDArray[Any]", _native.buffer_host_array(dst, False)), stream)
        _native.buffer_synchronize(src)


def _copy_devices(dst: Buffer, src: Buffer, stream: object | None) -> None:
    if stream is None:
        ordered_on = dst.stream
    elif isinstance(stream, _native.StreamBase):
        if stream.device is not dst.device and stream.device is not src.device:
            raise InvalidDeviceError(
                f"stream is {stream!r}: give a stream of "
                f"{_native.name_beside(dst.device, stream.device)} or "
                f"{_native.name_beside(src.device, stream.device)}"
            )
        ordered_on = as_stream(stream, cast(Any, stream).device)
    else:
        ordered_on = as_stream(stream, dst.device)
    with _native.buffer_hold(dst), _native.buffer_hold(src):
        _order_after(ordered_on, dst, src)
        copy_peer(dst.ptr, dst.device, src.ptr, src.device, dst.nbytes, ordered_on)
        for buffer in (dst, src):
            if buffer.device.driver is ordered_on.device.driver:
                _native.buffer_note_use(buffer, ordered_on)
                _native.buffer_follow(buffer, ordered_on)


def _order_after(stream: Stream, *buffers: Buffer) -> None:
    """No stream orders the work of two devices, so a copy between them waits for that of both."""
    for buffer in buffers:
        if buffer.device.driver is stream.device.driver:
            _native.buffer_let_wait(buffer, stream.device, stream.handle)
        else:
            _native.buffer_synchronize(buffer)
