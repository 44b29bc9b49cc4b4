"""A progress bar on stderr that only appears when the wait gets long."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, TaskID

__all__ = ["LateProgress"]

_QUIET_S = 2.0  # shorter waits need no progress bar


class LateProgress:
    """A context manager; :meth:`update` as often as you like."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, step: str, done: int, total: int) -> None:
        """`done` of `total` of a step; steps appear in the order of their first update."""
        if self._bar is None:
            if time.monotonic() - self._start < _QUIET_S:
                return
            console = Console(stderr=True)
            self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
            self._bar.start()
        if step not in self._tasks:
            self._tasks[step] = self._bar.add_task(step, total=total)
        self._bar.update(self._tasks[step], completed=done, total=total)

    def __enter__(self) -> LateProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
