"""Checks of what a ring kernel is made with, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.ring.backend import KernelSpec, Parallel
from ringmem.ring.slots import message_dtype

__all__ = ["MAX_CPU_RINGS", "KernelSettings", "check_fits", "check_spec"]

# A ring on the CPU has a thread, which when idle takes about 1 % of a core: 256 of them are up in
# 0.16 s on two cores and then take one of the two, 1024 take 2.4 s and both.
MAX_CPU_RINGS = 256


def _number(name: str, value: float) -> None:
    if not isinstance(value, Real):
        raise InvalidValueError(f"{name}={value!r:.80} must be a number of seconds")


def _positive(name: str, value: float) -> None:
    _number(name, value)
    if not value > 0:
        raise InvalidValueError(f"{name}={value} must be greater than 0")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int | np.integer) or not low <= value <= high:
        raise InvalidValueError(f"{name}={value!r} must be a whole number from {low} to {high}")


def _power_of_two(name: str, value: int) -> None:
    _whole(name, value, 1, 1 << 30)
    if value & (value - 1):
        raise InvalidValueError(
            f"{name}={value} must be a power of two; {1 << value.bit_length()} would do"
        )


@dataclass(frozen=True)
class KernelSettings:
    """What the host needs to know beside the :class:`KernelSpec`; see :class:`RingKernel`."""

    heartbeat_timeout_s: float | None
    stall_s: float
    dead_letters: int
    isolated: bool
    on_stall: Callable[[Any, tuple[int, ...]], object] | None

    def __post_init__(self) -> None:
        if self.on_stall is not None and not callable(self.on_stall):
            raise InvalidValueError(
                f"on_stall={self.on_stall!r:.80} must be a callable (kernel, rings), or None"
            )
        if self.heartbeat_timeout_s is not None:
            _number("heartbeat_timeout_s", self.heartbeat_timeout_s)
        if self.heartbeat_timeout_s is not None and not 0.1 <= self.heartbeat_timeout_s <= 4e6:
            raise InvalidValueError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be 0.1 to 4e6 seconds, or "
                "None for no end; the heart beats every 20 ms"
            )
        _positive("stall_s", self.stall_s)
        _power_of_two("dead_letters", self.dead_letters)


def check_spec(
    message: npt.DTypeLike,
    reply: npt.DTypeLike | None,
    state: npt.DTypeLike | None,
    capacity: int,
    rings: int,
    workers: int | None,
    blocks: int,
    deadline_s: float | None,
    parallel: Parallel,
) -> KernelSpec:
    """Return the checked specification.

    Raises
    ------
    InvalidValueError
        Names the argument, its value and what would do.
    """
    _power_of_two("capacity", capacity)
    _whole("rings", rings, 1, 65536)
    _whole("blocks", blocks, 1, 65536)
    if workers is not None:
        _whole("workers", workers, 1, 31)
    if deadline_s is not None:
        _positive("deadline_s", deadline_s)
    if parallel not in get_args(Parallel):
        raise InvalidValueError(f"parallel={parallel!r} must be None, 'warp' or 'block'")
    message_type = message_dtype(message)
    return KernelSpec(
        message=message_type,
        reply=message_type if reply is None else message_dtype(reply, "reply"),
        state=None if state is None else message_dtype(state, "state"),
        capacity=int(capacity),
        rings=int(rings),
        workers=workers,
        blocks=int(blocks),
        deadline_s=deadline_s,
        parallel=parallel,
    )


def check_fits(spec: KernelSpec, platform: str) -> None:
    """Refuse more rings than threads of a CPU can serve; a GPU knows at the launch.

    Raises
    ------
    NotSupportedError
        Names the rings and how many fit.
    """
    if platform == "cpu" and spec.rings > MAX_CPU_RINGS:
        raise NotSupportedError(
            f"rings={spec.rings} cannot be resident at once on the CPU, where each has a thread: "
            f"{MAX_CPU_RINGS} rings fit; use fewer, with more messages on each"
        )
