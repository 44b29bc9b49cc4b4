"""The demo's growing buffer: it grows under a pointer that somebody holds, and keeps its content.

Every step writes its own words into what was added, while a view from the first step is held. At
the end all words are read back, those of the first step also through that view.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.cli.demo_checks import Progress, pattern

if TYPE_CHECKING:
    from ringmem.device import Device, Stream

__all__ = ["Growth", "grow"]

_WORD_NBYTES = 8
_FIRST_NBYTES = {"cuda": 2 << 20, "cpu": 1 << 20}
_LAST_NBYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
_RESERVED_NBYTES = 16 << 30  # addresses alone: they cost no memory


@dataclass(frozen=True)
class Growth:
    """What the growing buffer did; `skipped` says why it did nothing."""

    first_nbytes: int = 0
    nbytes: int = 0
    reserved_nbytes: int = 0
    handles: int = 0
    steps: int = 0
    moved: bool = False
    intact: bool = False
    seconds: float = 0.0
    skipped: str | None = None

    @property
    def verified(self) -> bool | None:
        """Whether it stayed where it was with all it held; None where it was skipped."""
        return None if self.skipped else self.intact and not self.moved

    def to_dict(self) -> dict[str, Any]:
        """One JSON object; the time is that of all growth steps, without the writing."""
        return {
            "first_nbytes": self.first_nbytes,
            "nbytes": self.nbytes,
            "reserved_nbytes": self.reserved_nbytes,
            "handles": self.handles,
            "steps": self.steps,
            "moved": self.moved,
            "verified": self.verified,
            "us_per_step": self.seconds * 1e6 / self.steps if self.steps else None,
            "skipped": self.skipped,
        }


def grow(device: Device, stream: Stream, progress: Progress) -> Growth:
    """Double a buffer until it is large, and look whether it moved and what it holds."""
    if not device.capabilities.virtual_memory:
        return Growth(skipped=f"{device.name} has no virtual memory management")
    from ringmem.virtual import GrowableBuffer

    first, last = (
        table[device.platform] // _WORD_NBYTES for table in (_FIRST_NBYTES, _LAST_NBYTES)
    )
    steps = (last // first).bit_length()
    # Views are closed one by one: a buffer with live views cannot be, nor hide what went wrong.
    with (
        GrowableBuffer(_RESERVED_NBYTES // _WORD_NBYTES, np.uint64, device) as buffer,
        ExitStack() as held,
    ):
        buffer.resize(first)
        holder = held.enter_context(buffer.view())  # somebody has the first view all the time
        begin, end, seconds, pointers = 0, first, 0.0, set()
        for step in range(steps):
            progress("growable", step, steps)
            start = time.perf_counter()
            buffer.resize(end)
            seconds += time.perf_counter() - start
            pointers.add(buffer.ptr)
            with buffer.view() as view, view[begin:] as added:
                added.copy_from(pattern(end - begin, step), stream=stream)
            begin, end = end, 2 * end
        with buffer.view() as view:
            content = view.to_numpy(stream=stream)
        intact = _holds(content, first, steps) and _holds(holder.to_numpy(stream=stream), first, 1)
        return Growth(
            first_nbytes=first * _WORD_NBYTES,
            nbytes=buffer.nbytes,
            reserved_nbytes=buffer.reserved,
            handles=buffer.handles,
            steps=steps,
            moved=pointers != {holder.ptr},
            intact=intact,
            seconds=seconds,
        )


def _holds(content: np.ndarray[Any, Any], first: int, steps: int) -> bool:
    """Whether each step's words are where the step wrote them."""
    begin, end = 0, first
    for step in range(steps):
        if not np.array_equal(content[begin:end], pattern(end - begin, step)):
            return False
        begin, end = end, 2 * end
    return begin == len(content)
