"""The two ends of a ring on the host: batches in place, batches by copy, and what a full ring does.

The protocol itself is native. Here are the views, the policies and the words of the errors.
"""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from ringmem.device.scalars import to_seconds
from ringmem.native import errors
from ringmem.native.closing import Closing
from ringmem.native.errors import InvalidValueError
from ringmem.ring.slots import Slots

__all__ = ["Consumer", "Full", "Producer", "check_count", "check_full", "check_timeout"]

Full = Literal["wait", "refuse", "drop"]
"""What a producer does when the ring is full: wait for room, accept what fits, or accept what fits
and count the rest as dropped."""


def check_count(name: str, value: int) -> int:
    """Return a number of messages as an int; refuse what is none."""
    try:
        count = index(value)
    except TypeError:
        count = -1
    if not 0 <= count < 1 << 63:
        raise InvalidValueError(f"{name}={value!r} must be a whole number from 0 to 2**63 - 1")
    return count


def check_full(full: Full) -> None:
    """Refuse what is no policy."""
    if full not in get_args(Full):
        raise InvalidValueError(f"full={full!r} must be 'wait', 'refuse' or 'drop'")


@overload
def check_timeout(timeout_s: float) -> float: ...


@overload
def check_timeout(timeout_s: float | None) -> float | None: ...


def check_timeout(timeout_s: float | None) -> float | None:
    """Return seconds from 0 on, or None; a wait until nan would never end."""
    seconds = None if timeout_s is None else to_seconds(timeout_s)
    if timeout_s is not None and (seconds is None or seconds < 0):
        raise InvalidValueError(
            f"timeout_s={timeout_s!r} must be seconds from 0 on, or None to wait for good"
        )
    return seconds


class _Endpoint(Closing):
    """What both ends share: the slots, closing, and how long a wait spins."""

    _native: Any

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.message = slots.message
        self.capacity = slots.capacity

    @property
    def spin_us(self) -> float:
        """Microseconds that a wait spins before it parks; negative: it spins to the end.

        A spinning wait sees a message after about 0.1 µs and takes a core. A parked one is woken
        by the poller, after its interval (:func:`ringmem.ring.poll_interval_us`) and a thread
        wake-up. The GIL is released in both.
        """
        return float(self._native.spin_us)

    @spin_us.setter
    def spin_us(self, value: float) -> None:
        if not isinstance(value, Real):
            raise InvalidValueError(f"spin_us={value!r} must be a number of microseconds")
        self._native.spin_us = value

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return bool(self._native.closed)

    @property
    def peer_closed(self) -> bool:
        """Whether the other end was closed."""
        return bool(self._native.peer_closed)

    def close(self) -> None:
        """Tell the peer that this end is done. Idempotent; another end may be attached later."""
        self._native.close()


class Producer(_Endpoint):
    """The sending end of a :class:`Ring`; :meth:`Ring.producer` makes it.

    One thread at a time; a second one gets a :class:`RingmemError`.

    Examples
    --------
    >>> from ringmem.ring import Ring
    >>> with Ring("u8", 8) as ring, ring.producer() as producer, ring.consumer() as consumer:
    ...     for view in producer.reserve(3):
    ...         view[:] = [1, 2, 3]
    ...     producer.commit(3)
    ...     consumer.recv().tolist()
    [1, 2, 3]
    """

    def __init__(self, native: Any, slots: Slots, full: Full) -> None:
        super().__init__(slots)
        check_full(full)
        self._native = native
        self._staged: npt.NDArray[Any] | None = None
        self.full: Full = full

    def reserve(self, n: int, timeout_s: float | None = None) -> tuple[npt.NDArray[Any], ...]:
        """Return up to `n` free slots to write messages into, in order.

        Parameters
        ----------
        n : int
            Slots, at most :attr:`capacity` when waiting.
        timeout_s : float or None
            With ``full="wait"``: how long to wait for all `n`; None waits for good.

        Returns
        -------
        tuple of numpy.ndarray
            Views of the slots: one, two where the ring wraps, none where nothing is free. Nothing
            is visible to the consumer before :meth:`commit`. Where a field of the message lies
            across a line (see :func:`ringmem.ring.slots.slot_dtype`), one array that commit copies.

        Raises
        ------
        TimeoutError
            With ``full="wait"``: fewer than `n` slots were free in time.
        InvalidValueError
            `n` is negative, or more than the capacity when waiting.
        CorruptedError
            The consumer's index is impossible.
        ClosedError
            This end is closed; or the other is, and the ring is full.
        """
        start, count = self._native.reserve(check_count("n", n), self.full == "wait", timeout_s)
        if self.full == "drop" and count < n:
            self._native.drop(n - count)
        if self._slots.messages is not None:
            return self._slots.runs(self._slots.messages, start, count)
        self._staged = np.empty(count, self.message)
        return (self._staged,) if count else ()

    def commit(self, n: int | None = None) -> None:
        """Make the first `n` reserved slots visible (default: all) and give the others back.

        Raises
        ------
        InvalidValueError
            More than were reserved.
        """
        reserved = self._native.reserved
        n = reserved if n is None else check_count("n", n)
        if self._staged is None or n > reserved:
            self._native.commit(n)
            return
        staged, self._staged = self._staged, None
        self._native.commit(0)
        self._native.send(staged[:n], False, 0)

    def send(self, batch: npt.ArrayLike, timeout_s: float | None = None) -> int:
        """Copy messages into the ring.

        Parameters
        ----------
        batch : array-like
            Messages of the ring's dtype; an array of it that is C-contiguous goes without a copy
            of its own. A tuple or number is one message.
        timeout_s : float or None
            With ``full="wait"``: how long to wait for room; None waits for good.

        Returns
        -------
        int
            Messages accepted: all of them with ``full="wait"``, what fitted otherwise. With
            ``full="drop"`` the rest is counted in :attr:`dropped`.

        Raises
        ------
        TimeoutError
            With ``full="wait"``: not everything was accepted in time.
        InvalidValueError
            The batch is of another dtype; or slots are reserved: :meth:`commit` first.
        CorruptedError
            The consumer's index is impossible.
        ClosedError
            This end is closed; or the other is, and the ring is full.

        Notes
        -----
        What ends a wait for room, be it one of these errors or Ctrl-C, has the attribute ``sent``:
        how many messages were accepted before. They will be delivered.
        """
        sent, given = self._native.send(batch, self.full == "wait", timeout_s)
        if sent < given:
            if self.full == "drop":
                self._native.drop(given - sent)
            elif self.full == "wait":
                error = errors.TimeoutError(
                    f"{sent} of {given} messages were accepted within timeout_s={timeout_s}"
                )
                error.sent = sent  # type: ignore[attr-defined]
                raise error
        return int(sent)

    @property
    def free(self) -> int:
        """Slots that are free now."""
        return int(self._native.free_slots())

    @property
    def dropped(self) -> int:
        """Messages given up for want of room, over the life of the ring."""
        return int(self._native.dropped)

    @property
    def tail(self) -> int:
        """Messages committed over the life of the ring: the number of the next one."""
        return int(self._native.tail)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"tail={self.tail}, dropped={self.dropped}"
        return f"Producer({self.message}, capacity={self.capacity}, full={self.full!r}, {state})"


class Consumer(_Endpoint):
    """The receiving end of a :class:`Ring`; :meth:`Ring.consumer` makes it.

    One thread at a time; a second one gets a :class:`RingmemError`.

    Examples
    --------
    >>> from ringmem.ring import Ring
    >>> with Ring("u8", 8) as ring, ring.producer() as producer, ring.consumer() as consumer:
    ...     producer.send([4, 5, 6])
    ...     [view.tolist() for view in consumer.poll(2)]
    ...     consumer.release(2)
    ...     consumer.recv().tolist()
    3
    [[4, 5]]
    [6]
    """

    def __init__(self, native: Any, slots: Slots) -> None:
        super().__init__(slots)
        self._native = native

    def poll(self, max: int | None = None) -> tuple[npt.NDArray[Any], ...]:  # noqa: A002
        """Return the messages that wait, in place and without waiting.

        Parameters
        ----------
        max : int, optional
            At most so many; default all.

        Returns
        -------
        tuple of numpy.ndarray
            Read-only by agreement: the slots stay the reader's until :meth:`release`, after which
            the producer writes over them. One view, two at the wrap, none where nothing waits.
            Where a field lies across a line, one array with copies.

        Raises
        ------
        CorruptedError
            A line carries a sequence that does not belong there.
        """
        start, count = self._native.poll(self.capacity if max is None else check_count("max", max))
        if self._slots.messages is not None:
            return self._slots.runs(self._slots.messages, start, count)
        if count == 0:
            return ()
        copies = np.empty(count, self.message)
        return (copies[: self._native.peek(copies)],)

    def statuses(self) -> npt.NDArray[np.int32]:
        """Return a copy of the handler statuses of the polled messages (0 for plain ones).

        These are the messages that the last :meth:`poll` returned and that were not released yet.
        """
        start, count = self._native.head & (self.capacity - 1), self._native.shown
        runs = self._slots.runs(self._slots.statuses, start, count)
        return np.concatenate(runs) if runs else np.empty(0, np.int32)

    def release(self, n: int | None = None) -> None:
        """Give the first `n` polled slots back to the producer.

        Parameters
        ----------
        n : int, optional
            Default: all that the last :meth:`poll` returned and that were not released yet. What
            an earlier poll returned beyond them, or what :meth:`wait` saw, comes again.

        Raises
        ------
        InvalidValueError
            More than that.
        """
        if n is None:
            self._native.release_shown()
        else:
            self._native.release(check_count("n", n))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a message is there; False if none came within `timeout_s`. It takes none.

        Raises
        ------
        ClosedError
            None will come: the producer closed, or its process ended.
        """
        return bool(self._native.wait(timeout_s))

    def recv(
        self,
        max: int | None = None,  # noqa: A002
        timeout_s: float | None = None,
    ) -> npt.NDArray[Any]:
        """Wait for messages and return copies of what is there.

        Parameters
        ----------
        max : int, optional
            At most so many; default :attr:`capacity`.
        timeout_s : float or None
            How long to wait for the first; None waits for good, 0 takes what is there.

        Returns
        -------
        numpy.ndarray
            1 to `max` messages in order; none only where `timeout_s` or `max` is 0.

        Raises
        ------
        TimeoutError
            Nothing came in time.
        ClosedError
            Nothing will come: the producer closed, or its process ended.
        CorruptedError
            A line carries a sequence that does not belong there.
        """
        limit = self.capacity if max is None else check_count("max", max)
        if limit and not self._native.wait(timeout_s) and timeout_s:
            raise errors.TimeoutError(f"no message within timeout_s={timeout_s}")
        out = np.empty(self._native.ready(limit), self.message)
        if not len(out):
            return out
        got = self._native.receive(out, len(out), 0, None)
        if not got:
            raise errors.RingmemError(
                "another thread took the messages; an endpoint serves one thread at a time"
            )
        return out[:got] if got < len(out) else out

    def recv_into(
        self,
        out: npt.NDArray[Any],
        timeout_s: float | None = None,
        statuses: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Wait for messages and copy what is there into `out`.

        Parameters
        ----------
        out : numpy.ndarray
            C-contiguous, of the ring's dtype.
        timeout_s : float or None
            As for :meth:`recv`.
        statuses : numpy.ndarray, optional
            int32; receives the handler status of each message.

        Returns
        -------
        int
            Messages copied, at most ``out.size``; 0 only where `timeout_s` or the size is 0.

        Raises
        ------
        TimeoutError, ClosedError, CorruptedError
            As for :meth:`recv`.
        InvalidValueError
            `out` is of another dtype, read-only or not contiguous.
        """
        try:
            size = out.size
        except AttributeError:
            raise InvalidValueError(
                f"out={out!r:.80} must be a NumPy array of dtype {self.message}"
            ) from None
        count = self._native.receive(out, size, timeout_s, statuses)
        if count == 0 and timeout_s and size:
            raise errors.TimeoutError(f"no message within timeout_s={timeout_s}")
        return int(count)

    @property
    def depth(self) -> int:
        """Messages that wait, as far as the producer has said."""
        return int(self._native.depth)

    @property
    def dropped(self) -> int:
        """Messages that the producer gave up for want of room."""
        return int(self._native.dropped)

    @property
    def head(self) -> int:
        """Messages released over the life of the ring: the number of the next one."""
        return int(self._native.head)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"head={self.head}, depth={self.depth}"
        return f"Consumer({self.message}, capacity={self.capacity}, {state})"
