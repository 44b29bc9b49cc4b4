"""The CUDA array interface, version 3, both ways, with its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ringmem.buffers.kinds import Kind
from ringmem.device import Device, as_stream, current_stream
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringmem.buffers.base import Buffer
    from ringmem.device import Stream

__all__ = ["borrow_array_interface", "describe"]

_KINDS = {
    _native.PointerKind.device: Kind.DEVICE,
    _native.PointerKind.pinned: Kind.PINNED,
    _native.PointerKind.managed: Kind.MANAGED,
}


def describe(buffer: Buffer) -> dict[str, Any]:
    """Return the interface's dictionary; the consumer orders its work after ``"stream"``.

    Raises
    ------
    InvalidValueError
        The dtype has no type string that others would read.
    """
    dtype = buffer.dtype
    if dtype.kind == "V" and dtype.names is None and dtype.type is not np.void:
        raise InvalidValueError(
            f"dtype is {dtype}: the CUDA array interface has no such type; use DLPack, or "
            f"view('u{dtype.itemsize}')"
        )
    handle, _ = _native.buffer_order(buffer, None)
    # Work on other streams comes first: the consumer is told of one stream only.
    _native.buffer_let_wait(buffer, buffer.device, handle)
    interface: dict[str, Any] = {
        "shape": buffer.shape,
        "typestr": dtype.str,
        "data": (buffer.ptr, buffer.readonly),
        "strides": None,
        "stream": handle or 1,  # 0 is not allowed: the legacy default stream is 1
        "version": 3,
    }
    if dtype.names is not None:
        interface["descr"] = dtype.descr
    return interface


def borrow_array_interface(
    producer: Any, device: Device | str | None = None, stream: object | None = None
) -> Buffer:
    """Return a buffer on the producer's own memory, which it keeps alive.

    Work on the buffer is ordered after the producer's stream. `device` is where the address is
    valid; by default the driver says, or the first CUDA device.

    Raises
    ------
    InvalidValueError
        The memory is not contiguous, masked, or does not belong to `device`; the interface is
        not one of the protocol.
    """
    interface: Mapping[str, Any] = producer.__cuda_array_interface__
    try:
        ptr, readonly, shape, strides, dtype = _read(interface)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{type(producer).__name__}.__cuda_array_interface__ is {interface!r:.300}: it must "
            f"be a dict with shape, typestr and data, as the protocol says ({error!r})"
        ) from error
    if interface.get("mask") is not None:
        raise InvalidValueError(f"{type(producer).__name__} has a mask: give unmasked memory")
    _check_contiguous(strides, shape, dtype, producer)
    kind, device = _locate(ptr, device)
    order = current_stream(device) if stream is None else as_stream(stream, device)
    _wait_for_producer(interface.get("stream"), order)
    return cast(
        "Buffer",
        _native.borrow_memory(kind, ptr, shape, dtype, device, order, readonly, producer),
    )


def _read(
    interface: Mapping[str, Any],
) -> tuple[int, bool, tuple[int, ...], tuple[int, ...] | None, np.dtype[Any]]:
    """Take the interface apart; what is wrong with it raises whatever Python raises."""
    ptr, readonly = interface["data"]
    ptr = int(ptr or 0)
    ptr.to_bytes(8, "little")  # OverflowError for what is no address
    shape = tuple(int(extent) for extent in interface["shape"])
    strides = interface.get("strides")
    if strides is not None:
        strides = tuple(int(stride) for stride, _ in zip(strides, shape, strict=True))
    return ptr, bool(readonly), shape, strides, _dtype_of(interface)


def _dtype_of(interface: Mapping[str, Any]) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(interface["typestr"])
    descr = interface.get("descr")
    if dtype.kind == "V" and descr is not None and len(descr) > 0 and descr[0][0]:
        dtype = np.dtype([tuple(field) for field in descr])
    return dtype


def _check_contiguous(
    strides: tuple[int, ...] | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    producer: object,
) -> None:
    if strides is None or 0 in shape:
        return
    expected = dtype.itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise InvalidValueError(
                f"the {type(producer).__name__} of shape {shape} has strides {strides}: "
                "buffers are contiguous; make it so first"
            )
        expected *= extent


def _locate(ptr: int, device: Device | str | None) -> tuple[Kind, Device]:
    """Ask the driver what the address is and whose."""
    found = Device("cuda:0" if device is None else device)
    if ptr == 0:
        return Kind.DEVICE, found
    info = found.driver.pointer_info(found.ordinal, ptr)
    if info.kind not in _KINDS:
        raise InvalidValueError(f"the address {ptr:#x} is no memory that {found.name} knows")
    if info.device in (-1, found.ordinal):
        return _KINDS[info.kind], found
    owner = Device(f"{found.platform}:{info.device}")
    if device is not None:
        raise InvalidValueError(
            f"device is {found.name}, but the memory at {ptr:#x} is on {owner.name}: give that"
        )
    return _KINDS[info.kind], owner


def _wait_for_producer(handle: int | None, order: Stream) -> None:
    """Order our stream after the producer's; ``None``: nothing is under way."""
    if handle is None:
        return
    if isinstance(handle, bool) or not isinstance(handle, int) or handle <= 0:
        raise InvalidValueError(
            f"the interface's stream is {handle!r}: the protocol allows None, 1, 2 or a handle"
        )
    if handle != (order.handle or 1):
        order.wait(handle)
