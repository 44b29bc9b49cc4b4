"""Where a buffer's memory lives, as the native half counts it."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Kind"]


class Kind(IntEnum):
    """Kinds of memory; the values are ``MemoryKind``'s in ``bind/buffer.hpp``."""

    DEVICE = 0
    PINNED = 1
    MANAGED = 2
    HOST = 3
    """Pageable memory of somebody else."""
