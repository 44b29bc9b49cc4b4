"""How to copy between packed memory and a strided host array: a pure plan, no driver call.

The driver copies one run of bytes, or rows at a regular distance (2-D). Whatever does not fit that
goes through a packed temporary array.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Rows", "StridedPlan", "plan_strided"]

# Rows shorter than this are cheaper packed by the host: a copy engine moves them one by one.
_MIN_ROW_NBYTES = 64
# A call costs about 2 µs; packing that many rows costs more.
_MAX_CALLS = 64
# CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far.
_MAX_PITCH = (1 << 31) - 1


@dataclass(frozen=True)
class Rows:
    """One 2-D copy, in bytes from the start of either side.

    Attributes
    ----------
    host_offset, packed_offset : int
        Where the first row starts.
    width, height : int
        Bytes of a row; number of rows. The packed side has its rows `width` bytes apart.
    pitch : int
        Distance of the rows on the host.
    """

    host_offset: int
    packed_offset: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True)
class StridedPlan:
    """What to do: one run (`contiguous`), some 2-D copies (`rows`), or neither (stage it)."""

    contiguous: bool = False
    rows: tuple[Rows, ...] = ()

    @property
    def staged(self) -> bool:
        """bool: a packed temporary array is needed."""
        return not self.contiguous and not self.rows


def plan_strided(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> StridedPlan:
    """Decide how to copy an array that has at least one element; pure.

    Parameters
    ----------
    shape, strides : sequence of int
        Of the host array; strides in bytes, of any sign.
    itemsize : int
        Bytes of an element.

    Examples
    --------
    >>> plan_strided((2, 100), (400, 4), 4).contiguous
    True
    >>> plan_strided((2, 100), (512, 4), 4).rows
    (Rows(host_offset=0, packed_offset=0, width=400, height=2, pitch=512),)
    >>> plan_strided((100,), (-4,), 4).staged
    True
    """
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    width = itemsize
    while axes and axes[-1][1] == width:
        width *= axes.pop()[0]
    if not axes:
        return StridedPlan(contiguous=True)
    axes = _merge(axes)
    height, pitch = axes[-1]
    calls = math.prod(n for n, _ in axes[:-1])
    if (
        width < _MIN_ROW_NBYTES
        or calls > _MAX_CALLS
        or not width <= pitch <= _MAX_PITCH
        or any(stride < 0 for _, stride in axes)
    ):
        return StridedPlan()
    block = width * height
    offsets = (
        sum(i * stride for i, (_, stride) in zip(index, axes, strict=False))
        for index in itertools.product(*(range(n) for n, _ in axes[:-1]))
    )
    return StridedPlan(
        rows=tuple(
            Rows(offset, i * block, width, height, pitch) for i, offset in enumerate(offsets)
        )
    )


def _merge(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours that step through memory like one axis."""
    merged = [axes[0]]
    for extent, stride in axes[1:]:
        outer_extent, outer_stride = merged[-1]
        if outer_stride == stride * extent:
            merged[-1] = (outer_extent * extent, stride)
        else:
            merged.append((extent, stride))
    return merged
