"""Tells the user about rings that make no progress. Seeing them is the native watchdog's work."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmem.ring.kernel_life import KernelLife

__all__ = ["StallWatcher"]


class StallWatcher:
    """A thread that sleeps in native code until the set of stalled rings changes."""

    def __init__(
        self,
        kernel: KernelLife,
        watch: Any,
        on_stall: Callable[[Any, tuple[int, ...]], object] | None,
    ) -> None:
        self._kernel = weakref.ref(kernel)
        self._watch = watch
        self._on_stall = on_stall
        self._thread = threading.Thread(target=self._run, name="ringmem-stall", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        known: list[int] = []
        while True:
            stalled = self._watch.wait_for_change(known, 3600.0)
            if stalled is None:  # the native watch was ended
                return
            new, known = set(stalled).difference(known), stalled
            kernel = self._kernel()
            if kernel is None:
                return
            if new:
                try:
                    self._tell(kernel)
                except Exception:  # the user's callback, or a warning made an error: tell, go on
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            del kernel

    def _tell(self, kernel: KernelLife) -> None:
        rings = kernel.stalled
        if not rings:
            return
        if self._on_stall is not None:
            self._on_stall(kernel, rings)
            return
        warnings.warn(
            f"ring kernel on {kernel.device.name}: rings {list(rings)} handled nothing for "
            f"{kernel.settings.stall_s} s although messages wait; their handler may not return",
            RuntimeWarning,
            stacklevel=1,
        )

    def join(self) -> None:
        """Wait for the thread, unless it is the one that asks."""
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
