"""The handler's state from the host's side: read, written, saved, restored while nothing runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.native.locks import Lock
from ringmem.ring.backend import Backend, KernelSpec
from ringmem.ring.channel import Messaging
from ringmem.ring.lifecycle import KernelState

__all__ = ["StateAccess"]


class StateAccess(Messaging):
    """State of a :class:`RingKernel`; `ring` is the number of the ring pair."""

    spec: KernelSpec
    _lock: Lock
    _backend: Backend

    def _refresh(self) -> None:
        raise NotImplementedError

    def _require_process(self) -> None:
        raise NotImplementedError

    def _require_quiet(self) -> None:
        self._require_process()
        self._refresh()
        if self._state is KernelState.CLOSED:
            raise ClosedError("the ring kernel is closed")
        if self._state.running and self._state is not KernelState.PAUSED:
            raise InvalidValueError("the handler is using its state; pause() the kernel first")

    def read_state(self, ring: int = 0) -> npt.NDArray[Any]:
        """Return a copy of the handler's state of a ring, shape ``()``.

        Raises
        ------
        InvalidValueError
            The kernel is handling messages (:meth:`pause` it), or has no state.
        """
        with self._lock:
            self._require_quiet()
            self._pair(ring)
            return self._backend.read_state(ring)

    def write_state(self, value: npt.ArrayLike, ring: int = 0) -> None:
        """Replace the handler's state of a ring; errors as for :meth:`read_state`."""
        with self._lock:
            self._require_quiet()
            self._pair(ring)
            try:
                record = np.asarray(value, dtype=self.spec.state)
            except (TypeError, ValueError) as error:
                raise InvalidValueError(
                    f"state {value!r:.80} is not of the dtype {self.spec.state}: {error}"
                ) from error
            if self.spec.state is not None and record.size != 1:
                raise InvalidValueError(
                    f"state {value!r:.80} has {record.size} records; a ring has one, and "
                    "write_state(value, ring) writes that of one ring"
                )
            self._backend.write_state(ring, record)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state of every ring to an ``.npz`` file: first beside it, then in its place."""
        states = np.stack([self.read_state(ring) for ring in range(self.spec.rings)])
        target = Path(path)
        part = target.with_name(target.name + ".part")
        with part.open("wb") as file:
            np.savez(file, state=states)
        part.replace(target)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the state of every ring by what :meth:`save` wrote.

        Raises
        ------
        InvalidValueError
            The file is damaged or none of :meth:`save`, or holds states of another dtype or number
            of rings.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                states = file["state"]
        except OSError:  # it is not there, or may not be read
            raise
        except Exception as error:  # of zip, pickle, NumPy: each has its own
            raise InvalidValueError(
                f"path={os.fspath(path)!r} is no file that save() wrote, or damaged: "
                f"{type(error).__name__}: {error}"
            ) from error
        if states.dtype != self.spec.state or states.shape != (self.spec.rings,):
            raise InvalidValueError(
                f"path={os.fspath(path)!r} holds {states.shape} states of {states.dtype}; this "
                f"kernel has {self.spec.rings} of {self.spec.state}"
            )
        for ring, state in enumerate(states):
            self.write_state(state, ring)
