"""The life of a ring kernel as a table: which request is allowed when, and where it leads.

Pure: `RingKernel` acts, this module decides.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from ringmem.native.errors import ClosedError, InvalidValueError

__all__ = ["TRANSITIONS", "KernelEvent", "KernelState", "next_state"]


class KernelState(Enum):
    """Where a ring kernel stands."""

    NEW = "new"
    """Compiled and not yet launched."""
    LAUNCHED = "launched"
    """Launched; not every ring has said that it runs."""
    ACTIVE = "active"
    """Every ring handles messages."""
    PAUSED = "paused"
    """No ring handles anything; the handler's state may be read and written."""
    DRAINING = "draining"
    """Handling what was sent, then ending."""
    TERMINATED = "terminated"
    """Ended as asked; may be started again."""
    FAILED = "failed"
    """Ended by itself or by force; may be started again unless the device's context, or the process
    of an isolated kernel, is lost."""
    CLOSED = "closed"
    """Everything was given back."""

    @property
    def running(self) -> bool:
        """Whether the loop is, or is about to be, on the device."""
        # By its value: a finalizer at the end of the interpreter asks when names are gone.
        return self.value in {"launched", "active", "paused", "draining"}


class KernelEvent(Enum):
    """What is asked of a kernel, or happens to it."""

    START = "start"
    ACTIVATED = "activated"
    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    ENDED = "ended"
    FAILED = "failed"
    CLOSE = "close"


_S, _E = KernelState, KernelEvent

TRANSITIONS: Final[dict[tuple[KernelState, KernelEvent], KernelState]] = {
    (_S.NEW, _E.START): _S.LAUNCHED,
    (_S.TERMINATED, _E.START): _S.LAUNCHED,
    (_S.FAILED, _E.START): _S.LAUNCHED,
    (_S.LAUNCHED, _E.ACTIVATED): _S.ACTIVE,
    (_S.ACTIVE, _E.PAUSE): _S.PAUSED,
    (_S.PAUSED, _E.PAUSE): _S.PAUSED,
    (_S.PAUSED, _E.RESUME): _S.ACTIVE,
    (_S.ACTIVE, _E.RESUME): _S.ACTIVE,
    (_S.ACTIVE, _E.DRAIN): _S.DRAINING,
    (_S.PAUSED, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.TERMINATED, _E.DRAIN): _S.TERMINATED,
    **{(state, _E.ENDED): _S.TERMINATED for state in _S if state.running},
    **{(state, _E.FAILED): _S.FAILED for state in _S if state.running},
    (_S.NEW, _E.CLOSE): _S.CLOSED,
    (_S.TERMINATED, _E.CLOSE): _S.CLOSED,
    (_S.FAILED, _E.CLOSE): _S.CLOSED,
    (_S.CLOSED, _E.CLOSE): _S.CLOSED,
}


def next_state(state: KernelState, event: KernelEvent) -> KernelState:
    """Return the state that `event` leads to.

    Raises
    ------
    ClosedError
        The kernel is closed.
    InvalidValueError
        The event is not possible in this state.

    Examples
    --------
    >>> next_state(KernelState.ACTIVE, KernelEvent.PAUSE)
    <KernelState.PAUSED: 'paused'>
    """
    found = TRANSITIONS.get((state, event))
    if found is not None:
        return found
    if state is KernelState.CLOSED:
        raise ClosedError("the ring kernel is closed")
    allowed = sorted(known.value for known, asked in TRANSITIONS if asked is event)
    raise InvalidValueError(
        f"{event.value} is not possible while the kernel is {state.value}; "
        f"it is while {' or '.join(allowed)}"
    )
