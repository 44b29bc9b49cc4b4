"""One tag: its memory, its state, and what must happen around its sleep."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from ringmem.device import Device, Stream, as_stream
from ringmem.device.scalars import to_seconds
from ringmem.native import _native, errors
from ringmem.native.errors import InvalidValueError
from ringmem.residency.exports import (
    buffers_of,
    closed_streams_of,
    exports_of,
    streams_in_use,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Backup", "Progress", "State", "Tag"]

Backup = Literal["host", "discard", "keep"]
State = Literal["awake", "sleeping", "asleep", "waking", "closed"]

_BACKUPS: tuple[Backup, ...] = ("host", "discard", "keep")  # in the order of native Backup


@dataclass(frozen=True)
class Progress:
    """How far a sleep or a wake has come.

    Attributes
    ----------
    tag : str
        Whose turn it is.
    phase : str
        ``"sleep"`` or ``"wake"``.
    done_nbytes, total_nbytes : int
        Bytes copied, and to copy; both 0 when nothing is.
    """

    tag: str
    phase: Literal["sleep", "wake"]
    done_nbytes: int
    total_nbytes: int


class _Scopes(threading.local):
    """The `with` statements of each thread over one tag, innermost last."""

    def __init__(self) -> None:
        self.entered: list[AbstractContextManager[object]] = []


class Tag:
    """Memory of one device under one name. Made, and found again, by :func:`ringmem.residency.tag`.

    As a context manager it is what this thread's buffers on the device are allocated from. It is
    also an allocator to pass on: ``DeviceBuffer(…, allocator=tag)``. Callable from any thread.

    Attributes
    ----------
    before_unmap, after_map : list of callable
        Called with the tag before its memory goes, and when it is there again: to take memory out
        of communicators and put it back. What a `before_unmap` raises calls the sleep off. When a
        sleep is called off, `after_map` of those that ran are called.
    """

    def __init__(
        self,
        name: str,
        backup: Backup,
        device: Device,
        *,
        reserve_nbytes: int,
        min_handle_nbytes: int,
        slot_nbytes: int,
        piece_nbytes: int,
        forget: Callable[[Tag], None],
    ) -> None:
        if backup not in _BACKUPS:
            raise InvalidValueError(f"backup is {backup!r}: use 'host', 'discard' or 'keep'")
        self._name = name
        self._backup = backup
        self._device = device
        self._forget = forget
        self._scopes = _Scopes()
        self.before_unmap: list[Callable[[Tag], object]] = []
        self.after_map: list[Callable[[Tag], object]] = []
        self._core = _native.Resident.create(
            device,
            name,
            _BACKUPS.index(backup),
            reserve_nbytes,
            min_handle_nbytes,
            slot_nbytes,
            piece_nbytes,
        )

    # --- what it is ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """str: the name."""
        return self._name

    @property
    def backup(self) -> Backup:
        """str: what becomes of the bytes in sleep.

        ``"host"`` keeps them in pinned host memory, ``"discard"`` loses them, ``"keep"`` leaves
        them, and the memory, where they are.
        """
        return self._backup

    @property
    def device(self) -> Device:
        """Device: where the memory lives."""
        return self._device

    @property
    def state(self) -> State:
        """str: ``"awake"``, ``"sleeping"``, ``"asleep"``, ``"waking"`` or ``"closed"``."""
        return self._core.state  # type: ignore[return-value]

    @property
    def native_allocator(self) -> _native.Allocator:
        """Allocator: for buffers."""
        return self._core

    @property
    def ptr(self) -> int:
        """int: start of the addresses of the tag."""
        return self._core.ptr

    @property
    def reserved(self) -> int:
        """int: bytes of addresses reserved."""
        return self._core.reserved

    @property
    def nbytes(self) -> int:
        """int: bytes of live allocations."""
        return self._core.live_nbytes

    @property
    def committed(self) -> int:
        """int: bytes of device memory held now."""
        return self._core.committed

    @property
    def backup_nbytes(self) -> int:
        """int: bytes of host memory that hold the content now."""
        return self._core.backup_nbytes

    def __repr__(self) -> str:
        return (
            f"<Tag {self._name!r} on {self._device.name}, {self.state}, "
            f"{self.nbytes} bytes, backup {self._backup!r}>"
        )

    # --- allocation ------------------------------------------------------------------------------

    def __enter__(self) -> Tag:
        scope = self._device.use(self)
        scope.__enter__()
        self._scopes.entered.append(scope)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scopes.entered.pop().__exit__(exc_type, exc, traceback)

    def trim(self) -> int:
        """Give back the memory at the end that no allocation needs; returns its bytes."""
        return self._core.trim()

    # --- sleep and wake --------------------------------------------------------------------------

    def sleep(
        self,
        streams: object = None,
        *,
        timeout_s: float | None = None,
        progress: Callable[[Progress], object] | None = None,
        allow_exports: bool = False,
    ) -> None:
        """Give the physical memory back; see :func:`ringmem.residency.sleep`."""
        self._require("awake", "sleep")
        if self._backup == "keep":
            self._core.sleep([], None)
            return
        buffers = buffers_of(self)
        exports = 0 if allow_exports else exports_of(buffers)
        if exports > 0:
            raise InvalidValueError(
                f"sleep: {exports} exports (NumPy arrays, DLPack tensors) of memory of tag "
                f"{self._name!r} are alive; drop them, or pass allow_exports=True and do not "
                "touch them before wake()"
            )
        self._finish_frees(timeout_s)
        closed = closed_streams_of(buffers)
        plain = self._wait(streams, streams_in_use(buffers), closed, timeout_s)
        del buffers
        called: list[Callable[[Tag], object]] = []
        try:
            for hook in self.before_unmap:
                hook(self)
                called.append(hook)
            self._core.sleep(plain, self._reporter("sleep", progress))
        except BaseException:
            if called and self.state == "awake":
                self._run_after_map()
            raise

    def wake(self, *, progress: Callable[[Progress], object] | None = None) -> None:
        """Have the physical memory, and the bytes, again; see :func:`ringmem.residency.wake`."""
        self._require("asleep", "wake")
        self._core.wake(self._reporter("wake", progress))
        if self._backup != "keep":
            self._run_after_map()

    def drop_backup(self) -> int:
        """Return host memory of the device's backup arena that holds nothing; see
        :func:`ringmem.residency.drop_backup`.
        """
        return self._core.drop_backup()

    def close(self) -> None:
        """Give everything back. Idempotent.

        Raises
        ------
        InvalidValueError
            Allocations are live.
        DriverError
            The driver failed; a second call tries again.
        """
        self._core.close()
        self._forget(self)

    # --- inside ----------------------------------------------------------------------------------

    def _require(self, state: State, operation: str) -> None:
        now = self.state
        if now not in (state, "closed"):
            raise InvalidValueError(f"{operation}: tag {self._name!r} is {now}; it must be {state}")

    def _wait(
        self,
        streams: object,
        used: list[tuple[int, int]],
        closed: list[_native.StreamBase],
        timeout_s: float | None,
    ) -> list[tuple[int, int]]:
        """Return the streams to wait for; with a time limit, wait for them here.

        Closed ones are waited for here in any case: they have no handle to return.
        """
        items = list(streams) if isinstance(streams, list | tuple | set) else [streams]
        named = [as_stream(item, self._device) for item in items]
        plain = dict.fromkeys([*((s.device.ordinal, s.handle) for s in named), *used])
        if timeout_s is None:
            for stream in closed:
                _native.synchronize_closed(stream)
            return list(plain)
        limit_s = to_seconds(timeout_s)
        if limit_s is None or limit_s < 0:
            raise InvalidValueError(f"timeout_s is {timeout_s!r}: give seconds, 0 or more, or None")
        deadline = time.monotonic() + limit_s
        waits: list[Callable[[float], None]] = [
            *(partial(_native.synchronize_closed, stream) for stream in closed),
            *(self._stream(*one, named).synchronize for one in plain),
        ]
        for wait in waits:
            try:
                wait(max(0.0, deadline - time.monotonic()))
            except errors.TimeoutError:
                raise errors.TimeoutError(
                    f"sleep: a stream still uses tag {self._name!r} after {timeout_s} s; "
                    "nothing has changed"
                ) from None
        return list(plain)

    def _finish_frees(self, timeout_s: float | None) -> None:
        """Wait for frees behind closed streams: until then their work may use the memory."""
        limit_s = to_seconds(timeout_s)
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        while not _native.flush_reaper(min(0.05, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise errors.TimeoutError(
                    f"sleep: memory freed behind closed streams is still in use after {timeout_s} "
                    "s; nothing has changed"
                )

    def _stream(self, ordinal: int, handle: int, named: list[Stream]) -> Stream:
        for stream in named:
            if (stream.device.ordinal, stream.handle) == (ordinal, handle):
                return stream
        return as_stream(handle, self._device)

    def _reporter(
        self, phase: Literal["sleep", "wake"], progress: Callable[[Progress], object] | None
    ) -> Callable[[int, int], None] | None:
        if progress is None:
            return None

        def report(done: int, total: int) -> None:
            progress(Progress(self._name, phase, done, total))

        return report

    def _run_after_map(self) -> None:
        for hook in self.after_map:
            hook(self)
