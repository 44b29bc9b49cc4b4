"""A ring kernel as asyncio sees it: replies are awaited, and one eventfd wakes the loop for all.

Sending costs no system call. While calls wait, one native thread looks at all rings at a stated
interval (:func:`ringmem.ring.poll_interval_us`) and wakes the loop when something is there; each
wake completes everything that is there, each task in place of its turn in the loop's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.errors import ClosedError, RingmemError
from ringmem.native.locks import Lock
from ringmem.ring.lifecycle import KernelState

if TYPE_CHECKING:
    from ringmem.ring.kernel import RingKernel

__all__ = ["AsyncKernel"]

_CHECK_S = 0.1  # how often a waiting loop looks whether the kernel still runs


class AsyncKernel:
    """The messages of a :class:`RingKernel` for asyncio; ``kernel.aio``, or ``async with kernel``.

    It serves one event loop at a time, in that loop's thread; a second one is refused while calls
    wait in the first.

    Examples
    --------
    >>> import asyncio
    >>> from ringmem import RingKernel
    >>> def add(message, reply, state):
    ...     reply.total = message.a + message.b
    ...     return 0
    >>> async def main():
    ...     pair, total = [("a", "i8"), ("b", "i8")], [("total", "i8")]
    ...     async with RingKernel(add, message=pair, reply=total, device="cpu") as kernel:
    ...         replies = await asyncio.gather(*(kernel.call((i, 1)) for i in range(3)))
    ...     return [int(reply["total"]) for reply in replies]
    >>> asyncio.run(main())
    [1, 2, 3]
    """

    def __init__(self, kernel: RingKernel) -> None:
        _native.set_asyncio_errors(asyncio.CancelledError, asyncio.InvalidStateError)
        self.kernel = kernel
        self._lock = Lock()  # over which loop it is; a finalizer may come in between
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fd = -1
        self._caller: Any = _native.make_async_caller(
            [pair.producer._native for pair in kernel._pairs],
            [pair.consumer._native for pair in kernel._pairs],
            _weak(self, AsyncKernel._bind),
            _weak(self, AsyncKernel._check),
        )
        self.__dict__["call"] = self._caller  # shadows the method below: no Python frame a call

    def call(self, message: Any, *, ring: int = 0) -> Awaitable[Any]:
        """Send one message now and return its reply to be awaited.

        Parameters
        ----------
        message, ring
            As for :meth:`RingKernel.call`. Any number of calls may wait at once; where a ring is
            full they are sent as soon as there is room, and until then nothing else may be sent on
            that ring.

        Returns
        -------
        awaitable of numpy scalar
            A future of the running loop, for ``await``, ``gather``, ``wait_for``, ``create_task``
            and task groups (``asyncio.wait`` takes tasks of it); cancelling it drops the reply when
            it comes.

        Raises
        ------
        HandlerError, KernelFailedError, CorruptedError, InvalidValueError, ClosedError
            As for :meth:`RingKernel.call`; the first three when awaited.

        Notes
        -----
        A wake-up of the loop costs the poller's interval and 10 to 40 µs beside, several times the
        round trip itself: where one message at a time matters, the synchronous call is the faster.
        """
        raise ClosedError("the kernel is closed")  # only reached once close() removed the shadow

    async def batches(self, ring: int = 0) -> AsyncIterator[npt.NDArray[Any]]:
        """Yield replies to messages of :meth:`RingKernel.send` in order, as they come, as copies.

        Ends when the kernel was drained or terminated and every reply was read.

        Raises
        ------
        KernelFailedError, CorruptedError
            The kernel ended by itself.
        """
        try:
            while True:
                batch = self.kernel.recv(timeout_s=0, ring=ring)
                if len(batch):
                    yield batch
                else:
                    await self._readable(ring)
        except ClosedError:  # the end, and every reply was read
            if self.kernel.state is KernelState.NEW:
                raise

    def __aiter__(self) -> AsyncIterator[npt.NDArray[Any]]:
        return self.batches()

    @property
    def pending(self) -> int:
        """Calls that wait."""
        return int(self._caller.pending())

    def close(self) -> None:
        """Give the event loop back; whoever still waits gets a :class:`ClosedError`. Idempotent."""
        if self.pending:
            self._caller.fail(ClosedError("the asyncio side of the kernel was closed"))
        self._unbind()

    # --- inside ----------------------------------------------------------------------------------

    async def _readable(self, ring: int) -> None:
        """Wait until a ring may have a reply; ClosedError: none will come."""
        loop = asyncio.get_running_loop()
        consumer = self.kernel._pairs[ring].consumer._native
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        watch = _native.RingWatch(fd)
        ready = asyncio.Event()
        loop.add_reader(fd, ready.set)
        try:
            watch.arm_receive(consumer)
            while not ready.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await ready.wait()
                self._check_reading(consumer)
        finally:
            loop.remove_reader(fd)
            watch.close()
            os.close(fd)

    def _check_reading(self, consumer: Any) -> None:
        """Raise what makes a wait for replies hopeless, unless one came just before."""
        if consumer.ready(1):
            return
        try:
            self.kernel._check_waiting()
        except RingmemError:
            if not consumer.ready(1):
                raise

    def _leave_closed_loop(self) -> None:
        """Give up the calls of a loop that will not come back for them."""
        loop = self._loop
        if loop is None or not loop.is_closed() or not self._lock.acquire(blocking=False):
            return
        try:
            if self._loop is loop:  # and no other was bound meanwhile
                self.close()
        finally:
            self._lock.release()

    def _bind(self) -> None:
        """Called by the native caller in a loop that it does not know yet."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop is not None and not self._loop.is_closed() and not self._caller.let_go():
                raise RingmemError(
                    "calls wait in another event loop; the kernel serves one at a time"
                )
            self.close()
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            loop.add_reader(fd, self._caller.drain)
            self._loop, self._fd = loop, fd
            self._caller.attach(loop, fd)

    def _unbind(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
            fd, self._fd = self._fd, -1
            timer, self._timer = self._timer, None
            if loop is None:
                return
            self._caller.attach(None, -1)
            self._caller.checked(False)
        _leave(loop, fd, timer)

    def _check(self) -> None:
        """Raise what ended the kernel, or look again from time to time while calls wait."""
        self.kernel._check_waiting()
        loop = asyncio._get_running_loop()
        with self._lock:
            if self._timer is None and loop is not None and loop is self._loop:
                self._timer = loop.call_later(_CHECK_S, self._tick)

    def _tick(self) -> None:
        with self._lock:
            if self._loop is not asyncio._get_running_loop():
                return  # another loop has it, with a timer of its own
            self._timer = None
        self._caller.checked(False)
        if not self.pending:
            return
        try:
            self._check()
            self._caller.checked(True)
        except RingmemError as error:
            self._caller.fail(error)

    def __del__(self) -> None:
        if self.__dict__.get("_fd", -1) >= 0:
            self._unbind()

    def __repr__(self) -> str:
        return f"AsyncKernel({self.kernel!r}, pending={self.pending})"


def _leave(loop: asyncio.AbstractEventLoop, fd: int, timer: asyncio.TimerHandle | None) -> None:
    """Take the reader and the timer out of a loop, in its own thread where it still runs."""

    def leave() -> None:
        if timer is not None:
            timer.cancel()
        if not loop.is_closed():
            loop.remove_reader(fd)
        os.close(fd)

    if loop.is_running() and asyncio._get_running_loop() is not loop:
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile: its thread is done
            loop.call_soon_threadsafe(leave)
            return
    leave()


def _weak(target: AsyncKernel, method: Callable[[AsyncKernel], None]) -> Callable[[], None]:
    """Return a call of a method that does not keep its object alive."""
    reference = weakref.ref(target)

    def call() -> None:
        found = reference()
        if found is not None:
            method(found)

    return call
