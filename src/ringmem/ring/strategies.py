"""How a bridge moves messages: the transfer strategies, which of them a device offers, and why not.

The choice is a pure function of the device's memory visibility.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar, TypeAlias

from ringmem.device import MemoryVisibility, VisibilityDecision
from ringmem.native.errors import InvalidValueError, NotSupportedError

__all__ = [
    "Async",
    "DmaPolling",
    "Mapped",
    "Strategy",
    "Sync",
    "Unified",
    "choose_strategy",
    "refusal",
]


@dataclass(frozen=True)
class Mapped:
    """One ring in pinned host memory that the device reads and writes through the link.

    Nothing is ever copied, so both flushes return 0. The default, and the fastest for messages: a
    store is seen on the other side after about a microsecond.
    """

    copies: ClassVar[bool] = False


@dataclass(frozen=True)
class Unified:
    """One ring in managed memory, whose pages the driver moves to whoever touches them.

    Both flushes return 0. For devices with a coherent link; over PCIe pages bounce.
    """

    copies: ClassVar[bool] = False


@dataclass(frozen=True)
class Sync:
    """A ring on each side; a flush copies what is new and returns when it has arrived."""

    copies: ClassVar[bool] = True


@dataclass(frozen=True)
class Async:
    """As :class:`Sync`, in the order of a stream.

    ``flush_to_device()`` returns at once: work submitted to the stream later sees the messages.
    ``flush_to_host()`` waits for the stream's work, which writes the messages.

    Parameters
    ----------
    stream : stream-like
        Of the bridge's device; by default one of the bridge's own.
    """

    stream: object | None = field(default=None, compare=False)
    copies: ClassVar[bool] = True


@dataclass(frozen=True)
class DmaPolling:
    """As :class:`Sync`, by a native thread that looks for new messages at an interval.

    Nobody needs to flush; a flush moves what the thread has not moved yet.

    Parameters
    ----------
    interval_us : float
        Microseconds between two looks, at least 1.
    """

    interval_us: float = 100.0
    copies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (isinstance(self.interval_us, Real) and self.interval_us >= 1):
            raise InvalidValueError(
                f"interval_us={self.interval_us!r} must be microseconds, at least 1"
            )


Strategy: TypeAlias = Mapped | Unified | Sync | Async | DmaPolling
_ALL = (Mapped, Unified, Sync, Async, DmaPolling)


def refusal(strategy: Strategy, decision: VisibilityDecision) -> str | None:
    """Return why a strategy cannot work where this was decided, and what to use; or None."""
    seen = decision.visibility
    because = f"host and device share memory in {seen.value} only ({decision.reasons[-1]})"
    if isinstance(strategy, Mapped) and seen is not MemoryVisibility.SYSTEM_SCOPE:
        return f"Mapped() needs stores that are seen while kernels run: {because}; use Sync()"
    if isinstance(strategy, DmaPolling) and seen is not MemoryVisibility.SYSTEM_SCOPE:
        return f"DmaPolling() needs counters that are seen while kernels run: {because}; use Sync()"
    if isinstance(strategy, Unified) and not decision.managed_concurrent:
        return (
            "Unified() needs managed memory that host and device may touch at the same time, which "
            "this device has not; use Mapped() or Sync()"
        )
    return None


def choose_strategy(strategy: Strategy | None, decision: VisibilityDecision) -> Strategy:
    """Return the strategy wanted, or the best one where None is.

    Raises
    ------
    NotSupportedError
        The one wanted cannot work; the message says why, and what to use.
    InvalidValueError
        It is none of the strategies.
    """
    if strategy is None:
        return Mapped() if refusal(Mapped(), decision) is None else Sync()
    if isinstance(strategy, type) and strategy in _ALL:
        strategy = strategy()
    if not isinstance(strategy, _ALL):
        names = ", ".join(f"{kind.__name__}()" for kind in _ALL)
        raise InvalidValueError(f"strategy={strategy!r} must be one of {names}")
    why = refusal(strategy, decision)
    if why is not None:
        raise NotSupportedError(why)
    return strategy
