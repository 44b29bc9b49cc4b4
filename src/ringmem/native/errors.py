"""The one hierarchy of errors. It lives on the lowest floor because native code raises it.

Everything that ringmem raises on purpose is a :class:`RingmemError`. Classes that also belong to a
built-in family say so (``except MemoryError`` catches :class:`OutOfMemoryError`).
"""

from __future__ import annotations

import builtins

__all__ = [
    "AllocationFailedError",
    "ClosedError",
    "CorruptedError",
    "DoubleFreeError",
    "DriverError",
    "HandlerError",
    "InvalidDeviceError",
    "InvalidValueError",
    "KernelFailedError",
    "NotInitializedError",
    "NotSupportedError",
    "OutOfMemoryError",
    "RingmemError",
    "TimeoutError",
]


class RingmemError(Exception):
    """Base of every error that ringmem raises on purpose."""


class DriverError(RingmemError):
    """A driver call failed.

    Attributes
    ----------
    operation : str or None
        The driver's name of the call, for instance ``"cuMemCreate"``.
    code : int or None
        The driver's number of the error (``CUresult``).
    name : str or None
        The driver's name of the error, for instance ``"CUDA_ERROR_ILLEGAL_ADDRESS"``.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        code: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.code = code
        self.name = name


class OutOfMemoryError(DriverError, MemoryError):
    """Memory ran out.

    Attributes
    ----------
    requested, free, largest_free_block, reserved : int or None
        Bytes; ``None`` where whoever raised it could not know.
    holders : list of str
        The largest users of the memory, largest first; empty unless tracking is on.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        code: int | None = None,
        name: str | None = None,
        requested: int | None = None,
        free: int | None = None,
        largest_free_block: int | None = None,
        reserved: int | None = None,
        holders: list[str] | None = None,
    ) -> None:
        super().__init__(message, operation=operation, code=code, name=name)
        self.requested = requested
        self.free = free
        self.largest_free_block = largest_free_block
        self.reserved = reserved
        self.holders = holders or []


class AllocationFailedError(OutOfMemoryError):
    """An allocator gave a null address where memory was due."""


class NotInitializedError(DriverError):
    """There is no usable driver on this machine."""


class NotSupportedError(DriverError):
    """The device, its driver or the platform cannot do this."""


class InvalidDeviceError(DriverError):
    """There is no such device, or the object belongs to another one."""


class InvalidValueError(RingmemError, ValueError):
    """An argument is wrong: the message names it, its value and what would do."""


class ClosedError(RingmemError):
    """The object was used after ``close()``."""


class CorruptedError(RingmemError):
    """Shared memory holds what no correct peer writes; nothing was read or written outside it."""


class HandlerError(RingmemError):
    """A ring kernel's handler answered a message with a status other than 0.

    Attributes
    ----------
    status : int
        What the handler returned.
    reply : numpy scalar
        What it had written into the reply by then.
    """

    def __init__(self, status: int, reply: object = None) -> None:
        super().__init__(f"the handler returned status {status}; the message is a dead letter")
        self.status = status
        self.reply = reply

    def __reduce__(self) -> tuple[type[HandlerError], tuple[int, object]]:
        return type(self), (self.status, self.reply)


class KernelFailedError(RingmemError):
    """A ring kernel ended by itself and will not answer: the message says why.

    Attributes
    ----------
    reason : str
        ``"orphaned"``, ``"faulted"``, ``"killed"`` or ``"driver"``.
    """

    def __init__(self, message: str, reason: str = "faulted") -> None:
        super().__init__(message)
        self.reason = reason


class DoubleFreeError(RingmemError):
    """Memory was freed that is not allocated."""


class TimeoutError(RingmemError, builtins.TimeoutError):  # noqa: A001 - the field's word
    """The time given was up; the work goes on and the object is still usable."""
