"""How messages go to a ring kernel and come back: batches in place, batches by copy, one by one.

Message i of a ring is answered by reply i. So a `call` needs the ring for itself: it is refused
while replies to messages of `send` or `commit` are unread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.ring.endpoints import Full, Producer
from ringmem.ring.lifecycle import KernelState
from ringmem.ring.pairs import Pair

if TYPE_CHECKING:
    from ringmem.ring.aio import AsyncKernel

__all__ = ["Messaging"]


class Messaging:
    """The messages of a :class:`RingKernel`; `ring` is the number of the ring pair."""

    _state: KernelState
    _pairs: tuple[Pair, ...]
    _caller: Any
    _aio: AsyncKernel | None

    def _attach(self, full: Full, spin_us: float, on_wait: Any, in_order: bool) -> None:
        for pair in self._pairs:
            pair.attach(full, spin_us, on_wait, in_order)
        self._caller = _native.make_caller(
            [pair.producer._native for pair in self._pairs],
            [pair.consumer._native for pair in self._pairs],
        )
        self._close_calls()

    # While the kernel runs, the native callable shadows the method: an attribute of the instance is
    # found at once, and calling it costs no Python frame.
    def _open_calls(self) -> None:
        for pair in self._pairs:
            pair.producer._native.takes_calls = True
        self.__dict__["call"] = self._caller

    def _close_calls(self) -> None:
        for pair in self._pairs:
            pair.producer._native.takes_calls = False
        self.__dict__.pop("call", None)

    def _pair(self, ring: int) -> Pair:
        if self._state is KernelState.CLOSED:
            raise ClosedError("the ring kernel is closed")
        try:
            if ring >= 0:
                return self._pairs[ring]
        except (TypeError, ValueError, IndexError):
            pass
        raise InvalidValueError(f"ring={ring!r:.80} must be 0 to {len(self._pairs) - 1}")

    def _sending(self, ring: int) -> Producer:
        pair = self._pair(ring)
        if self._state is KernelState.DRAINING:
            raise ClosedError("the kernel is draining; it takes no more messages")
        return pair.producer

    def _check_waiting(self) -> None:
        raise NotImplementedError

    def _check_failed(self) -> None:
        raise NotImplementedError

    def _tidy(self) -> None:
        """Drop late replies where nobody reads, and the calls of an event loop that was closed."""
        self._caller.settle()
        if self._aio is not None:
            self._aio._leave_closed_loop()

    def _unread(self) -> int:
        return sum(int(self._caller.unread(ring)) for ring in range(len(self._pairs)))

    def call(
        self,
        message: Any,
        timeout_s: float | None = None,
        *,
        ring: int = 0,
        out: npt.NDArray[Any] | None = None,
    ) -> Any:
        """Send one message and wait for its reply.

        Parameters
        ----------
        message : numpy scalar, one-element array, bytes, or tuple
            A record of the message dtype is the fastest; a tuple is converted.
        timeout_s : float or None
            How long to wait; None waits for good.
        ring : int, default 0
            The ring to use.
        out : numpy.ndarray, optional
            One element of the reply dtype, to be filled and returned.

        Returns
        -------
        numpy scalar, or `out`
            The reply.

        Raises
        ------
        TimeoutError
            No reply in time. It will be dropped when it comes.
        HandlerError
            The handler returned a status other than 0.
        KernelFailedError, CorruptedError
            The kernel ended by itself.
        InvalidValueError
            The message does not fit, or replies of messages that were sent are unread.
        ClosedError
            The kernel does not run.

        Notes
        -----
        Several threads may call on one ring: they take turns. The wait spins for 5 µs with the GIL
        held, then :attr:`spin_us` without it, then parks.
        """
        if self._pair(
            ring
        ).producer._native.takes_calls:  # this method was kept from before start()
            return self._caller(message, timeout_s, ring=ring, out=out)
        self._check_waiting()
        how = "not up yet" if self._state is KernelState.LAUNCHED else "told to end"
        raise ClosedError(f"the kernel is {self._state.value} and {how}; it takes no calls")

    def send(self, batch: npt.ArrayLike, timeout_s: float | None = None, *, ring: int = 0) -> int:
        """Copy messages to the kernel: :meth:`Producer.send` of a ring."""
        return self._sending(ring).send(batch, timeout_s)

    def reserve(
        self, n: int, timeout_s: float | None = None, *, ring: int = 0
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return free slots to write messages into: :meth:`Producer.reserve` of a ring."""
        return self._sending(ring).reserve(n, timeout_s)

    def commit(self, n: int | None = None, *, ring: int = 0) -> None:
        """Hand reserved slots to the kernel: :meth:`Producer.commit` of a ring."""
        self._sending(ring).commit(n)

    def poll(self, max: int | None = None, *, ring: int = 0) -> tuple[npt.NDArray[Any], ...]:  # noqa: A002
        """Return replies in place, without waiting: :meth:`Consumer.poll` of a ring.

        Raises
        ------
        KernelFailedError, CorruptedError
            Nothing is there, and the kernel ended by itself.
        """
        found = self._pair(ring).consumer.poll(max)
        if not found:
            self._check_failed()
        return found

    def statuses(self, *, ring: int = 0) -> npt.NDArray[np.int32]:
        """Return the handler's status of each polled reply."""
        return self._pair(ring).consumer.statuses()

    def release(self, n: int | None = None, *, ring: int = 0) -> None:
        """Give polled slots back: :meth:`Consumer.release` of a ring."""
        self._pair(ring).consumer.release(n)

    def recv(
        self,
        max: int | None = None,  # noqa: A002
        timeout_s: float | None = None,
        *,
        ring: int = 0,
    ) -> npt.NDArray[Any]:
        """Wait for replies and return copies of what is there: :meth:`Consumer.recv` of a ring."""
        return self._pair(ring).consumer.recv(max, timeout_s)

    def recv_into(
        self,
        out: npt.NDArray[Any],
        timeout_s: float | None = None,
        statuses: npt.NDArray[np.int32] | None = None,
        *,
        ring: int = 0,
    ) -> int:
        """Wait for replies and copy them into `out`: :meth:`Consumer.recv_into` of a ring."""
        return self._pair(ring).consumer.recv_into(out, timeout_s, statuses)

    @property
    def dropped(self) -> int:
        """Messages of all rings that ``full="drop"`` gave up for want of room, over their life."""
        return sum(pair.producer.dropped for pair in self._pairs)

    def unread(self, ring: int = 0) -> int:
        """Return how many messages of a ring were sent whose replies were not read."""
        self._pair(ring)
        return int(self._caller.unread(ring))
