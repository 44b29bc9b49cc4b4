"""A ring kernel's life from inside: launching, waiting for an end, noticing one, finding out why.

The lock is held for what is quick and never while somebody waits, so that one thread can end what
another waits for. A `Run` says which launch a waiter means: when it is no longer the kernel's, it
has ended.

:class:`ringmem.ring.kernel.RingKernel` has what users call.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from ringmem.device import Device
from ringmem.native import _native, errors
from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.ring.backend import RingMemory
from ringmem.ring.endings import has_drained, why_ended
from ringmem.ring.lifecycle import KernelEvent, KernelState, next_state
from ringmem.ring.settings import KernelSettings
from ringmem.ring.stalls import StallWatcher
from ringmem.ring.state_access import StateAccess

__all__ = ["KernelLife", "Run", "never", "weak_check"]

_left_behind: list[object] = []  # memory of kernels that could not be ended: it must stay mapped


class Run:
    """One launch: who watches it, and how it ended."""

    __slots__ = ("drained", "error", "left_behind", "stalls", "told_to_end", "watch")

    def __init__(self, watch: Any) -> None:
        self.watch = watch
        self.stalls: StallWatcher | None = None
        self.told_to_end = False
        self.drained = False  # every ring answered all that was sent before
        self.left_behind = False  # a handler did not return
        self.error: BaseException | None = None


def never() -> bool:
    """Nothing but the end of the run is waited for."""
    return False


def _some(rings: list[int]) -> str:
    """Return ring numbers, not all of a thousand."""
    return str(rings) if len(rings) <= 16 else f"{str(rings[:16])[:-1]}, … ({len(rings)} in all)]"


class KernelLife(StateAccess):
    """What a :class:`RingKernel` does to keep its promises."""

    device: Device
    settings: KernelSettings
    _pid: int
    _memory: RingMemory
    _run: Run | None  # while it runs
    _error: BaseException | None
    _looked = 0.0  # when poll() last looked whether it ended
    _told: bool  # whether anybody met the error

    @property
    def stalled(self) -> tuple[int, ...]:
        """The rings that make no progress although messages wait."""
        run = self._run
        return () if run is None else tuple(run.watch.stalled())

    # --- launching -------------------------------------------------------------------------------

    def _launch(self) -> Run:
        """Prepare the rings and let the backend launch. With the lock."""
        if not self._backend.ended():
            raise InvalidValueError(
                "a handler of the last run has not returned, and only the end of its process can "
                "end it; make another kernel"
            )
        beat_ms = 0
        if self.settings.heartbeat_timeout_s is not None:
            beat_ms = max(int(self.settings.heartbeat_timeout_s * 1000), 1)
        raw = [pair.raw for pair in self._pairs]
        for pair in raw:
            _native.kernel_reset(pair, beat_ms)
        run = Run(_native.KernelWatch(raw, self.settings.stall_s))
        self._error, self._told = None, False
        started = next_state(self._state, KernelEvent.START)
        try:
            self._run, self._state = run, started
            run.stalls = StallWatcher(self, run.watch, self.settings.on_stall)
            self._backend.start([pair.addresses for pair in self._pairs])
        except BaseException as error:
            self._abandon_launch(run, error)
            raise
        return run

    def _abandon_launch(self, run: Run, error: BaseException) -> None:
        with self._lock:
            if self._run is not run:  # another thread ended it
                return
            for pair in self._pairs:
                pair.control.should_terminate = 1
            with contextlib.suppress(Exception):
                self._backend.join(1.0)
            self._error = run.error = error if isinstance(error, Exception) else None
            self._told = True
            self._end_run(run, KernelEvent.FAILED)

    def _has_started(self) -> bool:
        """Whether every ring is served; then the kernel is active."""
        served = all(p.control.active or p.control.has_terminated for p in self._pairs)
        told_to_end = self._run is None or self._run.told_to_end
        if told_to_end or not (served or self._backend.ended()):
            return False
        self._go(KernelEvent.ACTIVATED)
        self._open_calls()
        return True

    def _has_paused(self) -> bool:
        """Whether nothing is in work; then the kernel is paused."""
        if not all(pair.control.should_pause for pair in self._pairs):
            raise InvalidValueError("another thread resumed or drained the kernel before it paused")
        if not all(pair.control.is_paused for pair in self._pairs):
            return False
        self._go(KernelEvent.PAUSE)
        return True

    # --- ending ----------------------------------------------------------------------------------

    def _tell_to_end(self, run: Run) -> None:
        run.told_to_end = True
        self._close_calls()
        for pair in self._pairs:
            pair.control.should_terminate = 1

    def _wait_for_end(self, run: Run, timeout_s: float, force: bool) -> None:
        """Wait for a run that was told to end; without the lock."""
        kill = getattr(self._backend, "kill", None)
        try:
            self._wait(run, never, timeout_s, "end")
            if run.left_behind:
                raise errors.TimeoutError("the kernel did not end: a handler does not return")
            return
        except errors.TimeoutError as error:
            if kill is None:
                raise errors.TimeoutError(
                    f"{error}: its handler does not return, and only the end of its process can "
                    "end it; RingKernel(isolated=True) runs it in a child, which "
                    "terminate(force=True) ends"
                ) from None
            if not force:
                raise errors.TimeoutError(
                    f"{error}; terminate(force=True) ends its process"
                ) from None
        except errors.RingmemError:  # it could not be asked how it stands
            if kill is None or not force:
                raise
        with self._lock:
            if self._run is run:
                kill()
                self._finish(run)
                self._told = True

    def _give_back(self) -> None:
        """Give back all that the kernel has, now that it has ended. With the lock. Idempotent."""
        if self._state is KernelState.CLOSED:
            return
        if not self._has_left():
            self._leave_behind()
            raise errors.TimeoutError(
                "a handler of the failed kernel does not return, and only the end of its process "
                "can end it; until then its memory stays"
            )
        for pair in self._pairs:
            pair.close()
        self._backend.close()
        self._state = KernelState.CLOSED  # not before: what is interrupted is done again
        self._memory.close()

    def _has_left(self) -> bool:
        """Whether no handler is in work, also of a kernel that failed."""
        with contextlib.suppress(errors.RingmemError):
            if self._backend.join(1.0):
                return True
        kill = getattr(self._backend, "kill", None)
        if kill is not None:
            kill()
        return kill is not None

    def _leave_behind(self) -> None:
        """Close a kernel that cannot be ended; its memory must stay mapped. Idempotent."""
        with self._lock:
            if self._state is KernelState.CLOSED:
                return
            kill = getattr(self._backend, "kill", None)
            if kill is not None:  # no child outlives its kernel
                with contextlib.suppress(Exception):
                    kill()
            _left_behind.append((self._memory, self._backend, self._pairs))
            if self._run is not None:
                self._run.left_behind = True
                self._end_run(self._run, KernelEvent.ENDED)
            self._state = KernelState.CLOSED

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self, run: Run, done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Look until `done` or the end of the run, first often, then every millisecond.

        The lock is held for each look alone, what `done` does among it: another thread may end the
        run meanwhile. Who calls finds out what happened.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        nap = 20e-6
        while True:
            self._tidy()
            with self._lock:
                if self._run is run:
                    self._refresh()
                if self._run is not run or done():
                    return
                if deadline is not None and time.monotonic() > deadline:
                    left = [ring for ring, pair in enumerate(self._pairs) if pair.control.active]
                    raise errors.TimeoutError(
                        f"the kernel did not {what} within timeout_s={timeout_s}; rings "
                        f"{_some(left)} run, {self._unread()} replies are unread"
                    )
            time.sleep(nap)
            nap = min(nap * 1.5, 1e-3)

    def _require_still(self, run: Run, what: str) -> None:
        """Raise unless the run goes on, or ended as it was to end."""
        if self._run is run:
            return
        if run.error is not None:
            self._told = True
            raise run.error
        how = "closed" if self._state is KernelState.CLOSED else "terminated"
        raise ClosedError(f"another thread {how} the kernel while it was to {what}")

    def _refresh(self) -> None:
        """Notice an end. Whoever holds the lock does that anyway."""
        if self._pid != os.getpid() or not self._state.running:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            run = self._run
            if run is not None and self._state.running and self._is_over(run):
                self._tell_to_end(run)
                self._finish(run)
        finally:
            self._lock.release()

    def _is_over(self, run: Run) -> bool:
        """Whether all rings ended, or one that was not told to: then the others are to follow."""
        if self._backend.failure() is not None:
            return True
        if self._state is KernelState.LAUNCHED and not run.told_to_end:
            return False
        ended = [pair.control for pair in self._pairs if pair.control.has_terminated]
        if len(ended) == len(self._pairs) or self._backend.ended():
            return True
        return not run.told_to_end and not all(has_drained(control) for control in ended)

    def _finish(self, run: Run) -> None:
        """After the end of every ring: find out why, and let waiters go. With the lock."""
        self._backend.join(1.0)
        run.drained = all(has_drained(pair.control) for pair in self._pairs)
        error = why_ended(self._pairs, self._backend.failure(), self.spec, self.settings)
        for pair in self._pairs:
            _native.kernel_close_ends(pair.raw)
        if self._run is run:  # else a signal's handler came between and did all this
            self._error = run.error = error
            self._end_run(run, KernelEvent.ENDED if error is None else KernelEvent.FAILED)

    def _end_run(self, run: Run, event: KernelEvent) -> None:
        self._close_calls()
        run.watch.forget()  # first: nothing looks at memory that the next close() gives back
        state = next_state(self._state, event)
        self._run, self._state = None, state  # together, and before what a signal may interrupt
        if run.stalls is not None:
            run.stalls.join()

    def _check_waiting(self) -> None:
        """Called every 20 ms of a wait for messages or room: raises if waiting is hopeless."""
        self._tidy()
        self._refresh()
        self._raise_if_failed()
        if self._state is KernelState.CLOSED:
            raise ClosedError("the ring kernel is closed")
        if not self._state.running:
            raise ClosedError(f"the kernel is {self._state.value}; start() it first")

    def _check_failed(self) -> None:
        """Raise what ended the kernel, if it ended by itself. Looks every 20 ms."""
        now = time.monotonic()
        if now - self._looked > 0.02:
            self._looked = now
            self._refresh()
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._state is KernelState.FAILED and self._error is not None:
            self._told = True
            raise self._error

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("the ring kernel belongs to the parent process; make one of your own")

    def _require_running(self, event: KernelEvent) -> Run:
        """Return the run of a kernel for which `event` is possible. With the lock."""
        self._require_process()
        self._refresh()
        self._raise_if_failed()
        next_state(self._state, event)
        assert self._run is not None  # or the table would have refused
        return self._run

    def _go(self, event: KernelEvent) -> None:
        self._state = next_state(self._state, event)


def weak_check(kernel: KernelLife) -> Callable[[], None]:
    """Return `_check_waiting` of a kernel that the endpoints do not keep alive."""
    reference = weakref.ref(kernel)

    def check() -> None:
        found = reference()
        if found is not None:
            found._check_waiting()

    return check
