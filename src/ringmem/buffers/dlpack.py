"""DLPack, both ways: which device type memory has, who waits for whom, and when to copy."""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ringmem.buffers.arguments import optional_flag, refuse_masked
from ringmem.buffers.dtypes import dlpack_code, dtype_of_dlpack
from ringmem.buffers.kinds import Kind
from ringmem.device import Device, as_stream, current_stream
from ringmem.native import _native
from ringmem.native.errors import ClosedError, InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringmem.buffers.base import Buffer
    from ringmem.device import Stream

__all__ = ["CPU", "borrow_dlpack", "device_of", "export"]

# DLDeviceType of DLPack 1.x.
CPU = 1
CUDA = 2
CUDA_HOST = 3
CUDA_MANAGED = 13

_VERSION = (1, 0)
_KINDS = {CPU: Kind.HOST, CUDA: Kind.DEVICE, CUDA_HOST: Kind.PINNED, CUDA_MANAGED: Kind.MANAGED}
_CUDA_TYPES = {Kind.DEVICE: CUDA, Kind.PINNED: CUDA_HOST, Kind.MANAGED: CUDA_MANAGED}


def device_of(buffer: Buffer) -> tuple[int, int]:
    """Return ``(device type, device id)``.

    Raises
    ------
    NotSupportedError
        Memory of a CPU device that hides it, for which DLPack has no device; managed memory that
        host and device cannot use at the same time, since a consumer may do either.
    """
    kind = Kind(_native.buffer_kind(buffer))
    if kind is Kind.MANAGED and not buffer.device.capabilities.concurrent_managed_access:
        raise NotSupportedError(
            f"{buffer!r} cannot be shared: {buffer.device.name} has no concurrent managed access; "
            "use host() or to_numpy()"
        )
    if kind is not Kind.HOST and buffer.device.platform == "cuda":
        return _CUDA_TYPES[kind], buffer.device.ordinal
    if not _native.buffer_host_readable(buffer):
        raise NotSupportedError(
            f"{buffer!r} is on a strict CPU device, whose memory DLPack cannot name: to_numpy()"
        )
    return CPU, 0


def export(
    buffer: Buffer,
    stream: object | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> object:
    """Make a capsule; the rules are the protocol's, see :meth:`Buffer.__dlpack__`."""
    copy = optional_flag("copy", copy)
    versioned = max_version is not None and _pair("max_version", max_version) >= _VERSION
    wanted = None if dl_device is None else _pair("dl_device", dl_device)
    if wanted == (CPU, 0) and (copy is True or not _host_may_share(buffer)):
        return _export_to_host(buffer, stream, versioned, copy)
    own = device_of(buffer)
    wanted = own if wanted is None else wanted
    if wanted != own and wanted != (CPU, 0):
        raise InvalidValueError(
            f"dl_device is {dl_device}: {buffer!r} is on {own}; give that, or (1, 0) for the host"
        )
    if copy is True:
        with _own_stream_named(buffer):
            duplicate = buffer.copy()
        _handshake(duplicate, wanted[0], stream)
        return _capsule(duplicate, wanted, versioned, copied=True)
    if buffer.readonly and not versioned:
        raise InvalidValueError(
            f"{buffer!r} is read-only, which DLPack before 1.0 cannot say: give max_version=(1, 0) "
            "or copy=True"
        )
    _handshake(buffer, wanted[0], stream)
    return _capsule(buffer, wanted, versioned, copied=False)


def _host_may_share(buffer: Buffer) -> bool:
    """Whether DLPack's host may use the memory where it is."""
    kind = Kind(_native.buffer_kind(buffer))
    if kind is Kind.MANAGED:
        device = buffer.device
        return device.platform != "cuda" and device.capabilities.concurrent_managed_access
    return kind is not Kind.DEVICE or _native.buffer_host_readable(buffer)


def _export_to_host(
    buffer: Buffer, stream: object | None, versioned: bool, copy: bool | None
) -> object:
    """Make a capsule of a copy in host memory, complete when this returns."""
    from ringmem.buffers.interop import borrow_array

    if copy is False:
        raise InvalidValueError(
            f"copy is False, but dl_device is (1, 0) and {buffer!r} is where the host cannot share "
            "it: allow the copy"
        )
    if buffer.device.platform == "cuda":
        _check_handle(stream)
    else:
        _refuse_stream(stream)
    dlpack_code(buffer.dtype)  # before the copy: it may be large
    with _own_stream_named(buffer):
        copied = borrow_array(buffer.to_numpy())
    return _capsule(copied, (CPU, 0), versioned, copied=True)


@contextmanager
def _own_stream_named(buffer: Buffer) -> Iterator[None]:
    """Say what helps when the buffer's own stream is closed: the protocol has no other."""
    try:
        yield
    except ClosedError:
        if buffer.closed:
            raise
        raise ClosedError(
            f"the stream of {buffer!r} is closed, and copy=True cannot name another: give "
            "buffer.copy(stream=…) or buffer.to_numpy(stream=…)"
        ) from None


def _pair(name: str, value: Any) -> tuple[int, int]:
    try:
        first, second = value
        return operator.index(first), operator.index(second)
    except (TypeError, ValueError):
        raise InvalidValueError(f"{name} is {value!r}: give two integers in a tuple") from None


def _capsule(buffer: Buffer, device: tuple[int, int], versioned: bool, *, copied: bool) -> object:
    code, bits = dlpack_code(buffer.dtype)
    hold = _native.buffer_hold(buffer)
    return _native.dlpack_capsule(buffer, hold, *device, code, bits, versioned, copied)


def _handshake(buffer: Buffer, device_type: int, stream: object | None) -> None:
    """Order the consumer's work after everything that is under way on the buffer."""
    if device_type == CPU:
        _refuse_stream(stream)
        _native.buffer_synchronize(buffer)
        return
    if device_type in (CUDA_HOST, CUDA_MANAGED) and stream is None:  # the host may be the reader
        _native.buffer_synchronize(buffer)
        return
    handle = _check_handle(stream)
    if handle != -1:
        _native.buffer_let_wait(buffer, buffer.device, handle)


def _refuse_stream(stream: object | None) -> None:
    if stream is not None:
        raise InvalidValueError(f"stream is {stream!r}: host memory has none, give None")


def _check_handle(stream: object | None) -> int:
    handle = 1 if stream is None else stream
    if not isinstance(handle, int) or isinstance(handle, bool) or handle < -1 or handle == 0:
        raise InvalidValueError(
            f"stream is {stream!r}: give a handle, 1 for the legacy default stream, 2 for the "
            "per-thread one, or -1 for no synchronization"
        )
    return handle


# --- importing -----------------------------------------------------------------------------------


def borrow_dlpack(producer: Any, copy: bool | None, stream: object | None = None) -> Buffer:
    """Return a buffer on the producer's own memory, which it keeps alive.

    Raises
    ------
    InvalidValueError
        The memory is not contiguous, or of a type or a device that ringmem does not know.
    """
    device_type, device_id = _pair(
        f"{type(producer).__name__}.__dlpack_device__()", producer.__dlpack_device__()
    )
    kind = _KINDS.get(device_type)
    if kind is None:
        raise InvalidValueError(
            f"the memory is on DLPack device type {device_type}: ringmem reads the host (1), CUDA "
            "(2), pinned (3) and managed memory (13)"
        )
    refuse_masked("obj", producer)
    device = Device("cpu") if kind is Kind.HOST else Device(f"cuda:{device_id}")
    order = current_stream(device) if stream is None else as_stream(stream, device)
    tensor = _take(producer, None if kind is Kind.HOST else order, copy)
    dtype = dtype_of_dlpack(*tensor.dtype)
    _check_contiguous(tensor, producer)
    return cast(
        "Buffer",
        _native.borrow_memory(
            kind, tensor.ptr, tensor.shape, dtype, device, order, tensor.readonly, tensor
        ),
    )


def _take(producer: Any, stream: Stream | None, copy: bool | None) -> _native.ImportedTensor:
    # 1 is the protocol's number of the legacy default stream.
    handle = None if stream is None else stream.handle or 1
    options: dict[str, object] = {"stream": handle, "max_version": _VERSION}
    if copy is not None:
        options["copy"] = copy
    try:
        capsule = producer.__dlpack__(**options)
    except TypeError:
        # A producer of before DLPack 1.0 knows only `stream`, and never copies.
        capsule = producer.__dlpack__(stream=handle)
    return cast("_native.ImportedTensor", _native.take_dlpack_capsule(capsule))


def _check_contiguous(tensor: _native.ImportedTensor, producer: object) -> None:
    strides = cast("tuple[int, ...] | None", tensor.strides)
    if strides is None or 0 in tensor.shape:
        return
    expected = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise InvalidValueError(
                f"the {type(producer).__name__} of shape {tensor.shape} has strides {strides}: "
                "buffers are contiguous; make it so first, or copy_from() a NumPy array"
            )
        expected *= extent
