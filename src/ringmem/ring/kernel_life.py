"""A ring kernel's life from inside: launching, waiting for an end, noticing one, finding out why.

:class:`ringmem.ring.kernel.RingKernel` has what users call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from ringmem.device import Device
from ringmem.native import _native, errors
from ringmem.native.errors import ClosedError
from ringmem.ring.endings import why_ended
from ringmem.ring.lifecycle import KernelEvent, KernelState, next_state
from ringmem.ring.settings import KernelSettings
from ringmem.ring.stalls import StallWatcher
from ringmem.ring.state_access import StateAccess

__all__ = ["KernelLife"]


class KernelLife(StateAccess):
    """What a :class:`RingKernel` does to keep its promises."""

    device: Device
    settings: KernelSettings
    _pid: int
    _error: BaseException | None
    _watch: Any
    _stalls: StallWatcher | None

    @property
    def stalled(self) -> tuple[int, ...]:
        """The rings that make no progress although messages wait."""
        watch = self._watch
        return () if watch is None else tuple(watch.stalled())

    def _launch(self, timeout_s: float) -> None:
        self._error = None
        beat_ms = 0
        if self.settings.heartbeat_timeout_s is not None:
            beat_ms = max(int(self.settings.heartbeat_timeout_s * 1000), 1)
        for pair in self._pairs:
            _native.kernel_reset(pair.raw, beat_ms)
        raw = [pair.raw for pair in self._pairs]
        self._watch = _native.KernelWatch(raw, self.settings.stall_s)
        self._stalls = StallWatcher(self, self._watch, self.settings.on_stall)
        self._backend.start([pair.addresses for pair in self._pairs])
        self._wait(
            lambda: all(p.control.active or p.control.has_terminated for p in self._pairs),
            timeout_s,
            "start",
        )

    def _abandon_launch(self, error: BaseException) -> None:
        for pair in self._pairs:
            pair.control.should_terminate = 1
        with contextlib.suppress(Exception):
            self._backend.join(1.0)
        self._end_watch()
        self._error = error if isinstance(error, Exception) else None
        if self._state.running:
            self._go(KernelEvent.FAILED)

    def _terminate(self, timeout_s: float, force: bool) -> None:
        for pair in self._pairs:
            pair.control.should_terminate = 1
        try:
            self._wait(self._all_ended, timeout_s, "end")
        except errors.TimeoutError as error:
            kill = getattr(self._backend, "kill", None)
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
            kill()
        self._finish()

    def _all_ended(self) -> bool:
        return all(pair.control.has_terminated for pair in self._pairs) or self._backend.ended()

    def _wait(self, done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Look until `done`, first often, then every millisecond."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        nap = 20e-6
        while not done():
            failure = self._backend.failure()
            if failure is not None and what not in ("end", "drain"):
                self._refresh()
                self._raise_if_failed()
            if self._backend.ended() or failure is not None:
                break
            if deadline is not None and time.monotonic() > deadline:
                left = [ring for ring, pair in enumerate(self._pairs) if pair.control.active]
                raise errors.TimeoutError(
                    f"the kernel did not {what} within timeout_s={timeout_s}; rings {left} run, "
                    f"{self._unread()} replies are unread"
                )
            time.sleep(nap)
            nap = min(nap * 1.5, 1e-3)

    def _refresh(self) -> None:
        """Notice an end that nobody asked for. Whoever holds the lock does that anyway."""
        if not self._state.running or not self._lock.acquire(blocking=False):
            return
        try:
            if self._state.running and self._ended_by_itself():
                self._close_calls()
                for pair in self._pairs:
                    pair.control.should_terminate = 1
                self._finish()
        finally:
            self._lock.release()

    def _ended_by_itself(self) -> bool:
        if any(pair.control.has_terminated for pair in self._pairs):
            return self._state is not KernelState.LAUNCHED
        return self._backend.failure() is not None or (
            self._state is not KernelState.LAUNCHED and self._backend.ended()
        )

    def _finish(self) -> None:
        """After the end of every ring: find out why, and let waiters go."""
        self._backend.join(1.0)
        self._end_watch()
        self._error = why_ended(self._pairs, self._backend.failure(), self.spec, self.settings)
        for pair in self._pairs:
            _native.kernel_close_ends(pair.raw)
        self._go(KernelEvent.ENDED if self._error is None else KernelEvent.FAILED)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()
        stalls, self._stalls = self._stalls, None
        if stalls is not None:
            stalls.join()

    def _check_waiting(self) -> None:
        """Called every 20 ms of a wait for messages or room: raises if waiting is hopeless."""
        self._refresh()
        self._raise_if_failed()
        if self._state is KernelState.CLOSED:
            raise ClosedError("the ring kernel is closed")
        if not self._state.running:
            raise ClosedError(f"the kernel is {self._state.value}; start() it first")

    def _raise_if_failed(self) -> None:
        if self._state is KernelState.FAILED and self._error is not None:
            raise self._error

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("the ring kernel belongs to the parent process; make one of your own")

    def _require_running(self) -> None:
        self._require_process()
        self._refresh()
        self._raise_if_failed()

    def _go(self, event: KernelEvent) -> None:
        self._state = next_state(self._state, event)
