"""What closes at the end of a ``with`` block."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

__all__ = ["Closing"]


class _HasClose(Protocol):
    def close(self) -> None: ...


class Closing:
    """Closed at the end of a ``with`` block, whatever ends it."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _HasClose,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
