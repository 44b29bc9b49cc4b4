"""The ring kernel: a handler that stays on a device and answers messages for as long as it runs.

This file has what users ask of its life: start, pause, drain, terminate, close. What that takes is
in `kernel_life.py`, messages are in `channel.py`; where the loop runs is the backend's business.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from ringmem.device import Device, default_device
from ringmem.native import errors
from ringmem.native.closing import Closing
from ringmem.native.errors import ClosedError
from ringmem.native.layouts import ControlBlock
from ringmem.native.locks import Lock
from ringmem.ring.aio import AsyncKernel
from ringmem.ring.backend import Parallel
from ringmem.ring.backends import backend_for
from ringmem.ring.endpoints import Full, check_timeout
from ringmem.ring.kernel_life import KernelLife, never, weak_check
from ringmem.ring.lifecycle import KernelEvent, KernelState, next_state
from ringmem.ring.pairs import make_pairs, plan_pair
from ringmem.ring.settings import KernelSettings, check_fits, check_spec
from ringmem.ring.telemetry import Telemetry, read_telemetry

__all__ = ["RingKernel"]

_live: weakref.WeakSet[RingKernel] = weakref.WeakSet()


class RingKernel(KernelLife, Closing):
    """A kernel that stays on a device and answers messages through rings.

    Parameters
    ----------
    handler : function, str, NativeHandler, ctypes function, or what the device's compiler takes
        ``(message, reply, state) -> int status``, called for each message. A status other than 0
        sends a copy of the message to the dead letters; of a wide integer its low 32 bits count.
        `reply` is zeroed before.
    message, reply, state : dtype-like
        Of one message, its reply (default: as `message`) and, one a ring, the handler's state.
        Up to 56 bytes of a message or reply cost one line of 64.
    device : Device or str, optional
        Where to run; default :func:`ringmem.default_device`.
    rings : int, default 1
        Ring pairs, each with a state of its own. Every ring is served independently: on the CPU
        by a thread, 256 at most; on CUDA by blocks, as many as are resident at once.
    capacity : int, default 4096
        Slots of each ring, a power of two.
    workers : int, optional
        Polling warps of a block (CUDA); default: measured.
    blocks : int, default 1
        Blocks that serve one ring (CUDA).
    full : {"wait", "refuse", "drop"}
        What :meth:`send` and :meth:`reserve` do when a ring is full; :attr:`dropped` counts.
    deadline_s : float, optional
        The kernel ends itself so long after its start, whatever happens.
    heartbeat_timeout_s : float or None, default 5
        The kernel ends itself so long after this process died or, on a GPU, stopped; None: never.
    stall_s : float, default 1
        The watchdog reports a ring that handled nothing for so long although messages wait.
    on_stall : callable, optional
        Called as ``on_stall(kernel, rings)`` by the watchdog's thread with the ring numbers;
        default: a :class:`RuntimeWarning`.
    dead_letters : int, default 256
        How many of them are kept for each ring, a power of two; more are counted as dropped.
    isolated : bool, default False
        Run in a child process, which ``terminate(force=True)`` can end even if the handler never
        returns. It starts in a few tenths of a second on the CPU, in some seconds on CUDA, where
        the context is the child's.
    parallel : {None, "warp", "block"}
        Who shares a message: the handler then takes ``(message, reply, state, lane, lanes)``.
    initial_state : array-like, optional
        State of every ring before the first message; default zeros.
    spin_us : float, default 50
        How long a wait spins before it parks (:attr:`Producer.spin_us`).

    Raises
    ------
    InvalidValueError
        An argument is wrong, or the handler cannot be compiled.
    NotSupportedError
        The device cannot run it, or not so many rings.

    Notes
    -----
    Used as a context manager it starts on entry; on exit it ends without waiting for messages that
    were not handled yet: :meth:`drain` first where they matter. Lifecycle methods may be called
    from any thread; :meth:`call` too; each ring's batch methods from one thread at a time. A forked
    child cannot use it, and cannot disturb it.

    Examples
    --------
    >>> import numpy as np
    >>> from ringmem import RingKernel
    >>> def add(message, reply, state):
    ...     reply.total = message.a + message.b
    ...     return 0
    >>> pair, total = [("a", "i8"), ("b", "i8")], [("total", "i8")]
    >>> with RingKernel(add, message=pair, reply=total, device="cpu") as kernel:
    ...     int(kernel.call((2, 3))["total"])
    5
    """

    def __init__(
        self,
        handler: Any,
        *,
        message: npt.DTypeLike,
        reply: npt.DTypeLike | None = None,
        state: npt.DTypeLike | None = None,
        device: Device | str | None = None,
        rings: int = 1,
        capacity: int = 4096,
        workers: int | None = None,
        blocks: int = 1,
        full: Full = "wait",
        deadline_s: float | None = None,
        heartbeat_timeout_s: float | None = 5.0,
        stall_s: float = 1.0,
        on_stall: Callable[[RingKernel, tuple[int, ...]], object] | None = None,
        dead_letters: int = 256,
        isolated: bool = False,
        parallel: Parallel = None,
        initial_state: npt.ArrayLike | None = None,
        spin_us: float = 50.0,
    ) -> None:
        self._lock = Lock()
        self._state = KernelState.CLOSED  # until everything below succeeded
        self._pid = os.getpid()
        self.spec = check_spec(
            message, reply, state, capacity, rings, workers, blocks, deadline_s, parallel
        )
        self.settings = KernelSettings(
            heartbeat_timeout_s, stall_s, dead_letters, isolated, on_stall
        )
        self.device = default_device() if device is None else Device(device)
        check_fits(self.spec, self.device.platform)
        self._backend = backend_for(self.device, isolated)
        self._run = self._error = None
        self._told = self._closing = False
        self._aio: AsyncKernel | None = None
        self._aio_lock = Lock()  # not that of the life, which a launch holds long
        with contextlib.ExitStack() as undo:
            undo.callback(self._backend.close)
            self._backend.prepare(handler, self.spec)
            plan = plan_pair(self.spec, dead_letters)
            self._memory = self._backend.allocate(plan.nbytes * self.spec.rings)
            undo.callback(self._memory.close)
            self._pairs = make_pairs(self.spec, dead_letters, self._memory, plan)
            self._attach(full, spin_us, weak_check(self), self._backend.in_order)
            undo.pop_all()
        self._state = KernelState.NEW
        _live.add(self)
        if isolated:
            _close_isolated_first()
        if initial_state is not None:
            try:
                for ring in range(self.spec.rings):
                    self.write_state(initial_state, ring)
            except BaseException:
                self.close()
                raise

    # --- where it stands -------------------------------------------------------------------------

    @property
    def state(self) -> KernelState:
        """Where the kernel stands now (not the handler's state: see :meth:`read_state`)."""
        self._refresh()
        self._told |= self._state is KernelState.FAILED
        return self._state

    def control(self, ring: int = 0) -> ControlBlock:
        """Return the live control block of a ring."""
        return self._pair_at(ring).control

    def telemetry(self, ring: int = 0) -> Telemetry:
        """Return what the kernel counted and timed on a ring, read without disturbing it."""
        pair = self._pair_at(ring)
        return read_telemetry(pair.telemetry, pair.waiting())

    def dead_letters(self, ring: int = 0) -> list[tuple[Any, int]]:
        """Take the messages whose handler returned a status other than 0.

        Returns
        -------
        list of (numpy scalar, int)
            Each message as it was sent, with the status; oldest first. They are not kept.
        """
        return self._pair_at(ring).take_dead_letters()

    # --- requests --------------------------------------------------------------------------------

    def start(self, timeout_s: float = 30.0) -> Self:
        """Launch, and wait until every ring is served. After an end it goes on where it stopped.

        Raises
        ------
        InvalidValueError
            It is running.
        TimeoutError
            It did not come up; the launch is taken back.
        ClosedError
            It is closed, or another thread ended it meanwhile.
        """
        timeout_s = check_timeout(timeout_s)
        self._require_process()
        with self._lock:
            self._refresh()
            if self._closing:
                raise ClosedError("the ring kernel is closed")
            next_state(self._state, KernelEvent.START)
            run = self._launch()
        try:
            self._wait(run, self._has_started, timeout_s, "start")
            self._require_still(run, "start")
        except BaseException as error:
            self._abandon_launch(run, error)
            raise
        return self

    def pause(self, timeout_s: float = 5.0) -> None:
        """Stop handling messages, and wait until nothing is in work. Messages may be sent on.

        Raises
        ------
        TimeoutError
            A handler did not return in time; the request stands.
        """
        timeout_s = check_timeout(timeout_s)
        with self._lock:
            run = self._require_running(KernelEvent.PAUSE)
            for pair in self._pairs:
                pair.control.should_pause = 1
        self._wait(run, self._has_paused, timeout_s, "pause")
        self._require_still(run, "pause")

    def resume(self) -> None:
        """Handle messages again."""
        with self._lock:
            self._require_running(KernelEvent.RESUME)
            self._go(KernelEvent.RESUME)
            for pair in self._pairs:
                pair.control.should_pause = 0

    def drain(self, timeout_s: float | None = None) -> None:
        """Let the kernel answer everything that was sent, and end it. Nothing more can be sent.

        Replies stay readable. Where more replies are unread than a ring has slots, another thread
        must read on, or this one after the TimeoutError; then drain again. Awaited calls that still
        wait for room on a full ring are not sent: they get a :class:`ClosedError`.

        Raises
        ------
        TimeoutError
            Not everything was answered in time; the kernel goes on draining.
        ClosedError
            Another thread terminated or closed it before everything was answered.
        KernelFailedError, CorruptedError
            It ended by itself before.
        """
        timeout_s = check_timeout(timeout_s)
        self._require_process()
        with self._lock:
            self._refresh()
            self._raise_if_failed()
            self._go(KernelEvent.DRAIN)
            run = self._run
            if run is None:
                return
            self._close_calls()
            for pair in self._pairs:
                pair.control.should_pause = 0
                pair.control.should_drain = 1
        self._wait(run, never, timeout_s, "drain")
        if not run.drained or run.error is not None:
            self._require_still(run, "drain")

    def terminate(self, timeout_s: float = 5.0, *, force: bool = False) -> None:
        """End the kernel now. Messages that wait are kept for the next start. Idempotent.

        Parameters
        ----------
        timeout_s : float
            How long to wait for handlers in work.
        force : bool
            Then end the process that runs them: for ``isolated=True`` alone.

        Raises
        ------
        TimeoutError
            A handler does not return. Only the end of its process can end it.
        """
        timeout_s = check_timeout(timeout_s)
        self._require_process()
        with self._lock:
            self._refresh()
            if self._state is KernelState.CLOSED:
                raise ClosedError("the ring kernel is closed")
            run = self._run
            if run is None:
                return
            self._tell_to_end(run)
        self._wait_for_end(run, timeout_s, force)

    def close(self) -> None:
        """End the kernel and give everything back. Idempotent.

        Where Ctrl-C or another signal interrupts it, the kernel takes no more calls, and the next
        `close`, the kernel's finalizer or the end of the interpreter does the rest.

        Raises
        ------
        TimeoutError
            A handler does not return: its thread, or its kernel, and its memory stay until the end
            of the process.
        """
        if self._state is KernelState.CLOSED or self._pid != os.getpid():
            self._state = KernelState.CLOSED
            return
        with self._lock:
            self._closing = True
            self._refresh()
            run = self._run
            if run is not None:
                self._tell_to_end(run)
        if run is not None:
            try:
                self._wait_for_end(run, 5.0, self.settings.isolated)
            except errors.TimeoutError:
                with self._lock:
                    if self._run is run or run.left_behind:  # else another thread saw its end
                        self._leave_behind()
                        raise
        with self._lock:
            self._give_back()
        if self._error is not None and not self._told:
            self._told = True
            warnings.warn(f"{self!r} failed, and nobody was told: {self._error}", RuntimeWarning, 2)

    def __enter__(self) -> Self:
        self.start()
        return self

    # --- asyncio ---------------------------------------------------------------------------------

    @property
    def aio(self) -> AsyncKernel:
        """The same kernel for asyncio: ``await kernel.aio.call(message)``."""
        if self._aio is None:
            with self._aio_lock:
                if self._aio is None:  # two of them would bind two event loops
                    self._aio = AsyncKernel(self)
        return self._aio

    async def __aenter__(self) -> AsyncKernel:
        await asyncio.to_thread(self.start)
        return self.aio

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.aio.close()
        await asyncio.to_thread(self.close)

    def __del__(self) -> None:
        # At the end of the interpreter the module's names may be gone; then it was closed before,
        # and this looks at nothing but its own.
        state = getattr(self, "_state", None)
        if state is not None and state.running and self._pid == os.getpid():
            warnings.warn(f"{self!r} was dropped while it ran", ResourceWarning, stacklevel=1)
            with contextlib.suppress(Exception):
                self.close()

    def __repr__(self) -> str:
        return (
            f"RingKernel(message={self.spec.message}, device={self.device.name}, "
            f"rings={self.spec.rings}, {self._state.value})"
        )


def _all_live() -> list[RingKernel]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread makes or drops one
            return list(_live)


def _close_isolated_first() -> None:
    """Let these come before multiprocessing's own end, which waits for every child."""
    atexit.unregister(_close_isolated)
    atexit.register(_close_isolated)


def _close_isolated() -> None:
    for kernel in _all_live():
        if kernel.settings.isolated:
            with contextlib.suppress(Exception):
                kernel.close()


@atexit.register
def _close_all() -> None:
    """At the end of the interpreter no kernel may spin on."""
    for kernel in _all_live():
        with contextlib.suppress(Exception):
            kernel.close()
