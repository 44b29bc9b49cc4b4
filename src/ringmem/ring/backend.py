"""What a ring kernel asks of the place where it runs: the contract between `RingKernel` and the
CPU and CUDA backends.

`RingKernel` owns the rings, the control blocks and the waiting; a backend owns memory that both
sides see, the compiled handler, the running loop and the handler's state. Everything that steers a
running kernel goes through the control block, so no method here is on the path of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Backend", "KernelSpec", "PairAddresses", "Parallel", "Record", "RingMemory"]

Parallel: TypeAlias = Literal[None, "warp", "block"]
"""Who shares a message: one lane (None), the lanes of a warp, or the threads of a block."""

Record: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class KernelSpec:
    """Everything a backend needs to know of a kernel, checked by `RingKernel`.

    Attributes
    ----------
    message, reply : numpy.dtype
        Of one message and of one reply.
    state : numpy.dtype or None
        Of the handler's state, one record a ring; None where it has none.
    capacity : int
        Slots of the input and of the output ring, a power of two.
    rings : int
        Ring pairs, each served by itself.
    workers : int or None
        Polling warps of a block; None lets the backend choose. The CPU has one thread a ring.
    blocks : int
        Blocks that serve one ring (CUDA).
    deadline_s : float or None
        The kernel ends itself so long after each start; None: never.
    parallel : "warp", "block" or None
        Who shares a message.
    """

    message: np.dtype[Any]
    reply: np.dtype[Any]
    state: np.dtype[Any] | None
    capacity: int
    rings: int
    workers: int | None
    blocks: int
    deadline_s: float | None
    parallel: Parallel


@dataclass(frozen=True)
class PairAddresses:
    """One ring pair, as host addresses inside memory that the backend allocated.

    `control` and `telemetry` are blocks of :mod:`ringmem.native.layouts`; `input`, `output` and
    `dead_letter` are ring headers. Indices in the rings are where an earlier run left them, so a
    restarted kernel goes on there.
    """

    control: int
    telemetry: int
    input: int
    output: int
    dead_letter: int


class RingMemory(Protocol):
    """Zeroed memory that the host and the kernel read and write, at a multiple of 4096 bytes."""

    @property
    def ptr(self) -> int:
        """Host address."""

    @property
    def device_ptr(self) -> int:
        """The same memory as the kernel addresses it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def close(self) -> None:
        """Give it back; only after the kernel ended. Idempotent."""


class Backend(Protocol):
    """A place where a ring kernel runs. One object serves one `RingKernel`.

    Calls come from one thread at a time, in this order: `prepare`, `allocate`, then any number of
    rounds of `start` and `join`, then `close`.
    """

    @property
    def in_order(self) -> bool:
        """Whether the loop takes the messages of a ring one after the other.

        Then the host may write batches past its caches, which gives up the order of the slots.
        """

    def allocate(self, nbytes: int) -> RingMemory:
        """Memory for rings and control blocks."""

    def prepare(self, handler: Any, spec: KernelSpec) -> None:
        """Compile and load; raises what is wrong with the handler before anything runs.

        Allocates one zeroed state record for each ring, which keeps its value between starts.
        """

    def start(self, pairs: Sequence[PairAddresses]) -> None:
        """Launch. Returns when launched; `ControlBlock.active` says when it runs.

        Raises `NotSupportedError` where not all rings can be resident at once.
        """

    def read_state(self, ring: int) -> npt.NDArray[Any]:
        """A copy of one ring's state, shape ``()``. Only while paused or not running."""

    def write_state(self, ring: int, value: npt.ArrayLike) -> None:
        """Replace one ring's state. Only while paused or not running."""

    def ended(self) -> bool:
        """Whether nothing runs any more. Never blocks."""

    def failure(self) -> BaseException | None:
        """What broke the kernel (an illegal address, a handler that raised), else None.

        Polled by waits; never blocks.
        """

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it still runs."""

    def close(self) -> None:
        """Give back everything but the memory of `allocate`. The kernel has ended. Idempotent."""
