"""The handler's state from the host's side: read, written, saved, restored while nothing runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.native.locks import Lock
from ringmem.native.records import as_bytes
from ringmem.ring.backend import Backend, KernelSpec
from ringmem.ring.channel import Messaging
from ringmem.ring.lifecycle import KernelState
from ringmem.ring.pairs import Pair

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

    def _pair_at(self, ring: int) -> Pair:
        """Return a pair off the path of messages, where there is time to look at the type."""
        if not isinstance(ring, int | np.integer):
            raise InvalidValueError(f"ring={ring!r:.80} must be a whole number, of a ring pair")
        return self._pair(ring)

    def read_state(self, ring: int = 0) -> npt.NDArray[Any]:
        """Return a copy of the handler's state of a ring, shape ``()``.

        Raises
        ------
        InvalidValueError
            The kernel is handling messages (:meth:`pause` it), or has no state.
        """
        with self._lock:
            self._require_quiet()
            self._pair_at(ring)
            return self._backend.read_state(ring)

    def write_state(self, value: npt.ArrayLike, ring: int = 0) -> None:
        """Replace the handler's state of a ring by one record: what :meth:`send` takes for one.

        Raises
        ------
        InvalidValueError
            As for :meth:`read_state`, or `value` is not one record of the state's dtype.
        """
        with self._lock:
            self._require_quiet()
            self._pair_at(ring)
            dtype = self.spec.state
            if dtype is None:
                raise InvalidValueError("this kernel has no state; pass state=dtype to RingKernel")
            records = as_bytes(value, dtype, "state").view(dtype)
            if records.size != 1:
                raise InvalidValueError(
                    f"state={value!r:.80} has {records.size} records; a ring has one, and "
                    "write_state(value, ring) writes that of one ring"
                )
            self._backend.write_state(ring, records.reshape(()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state of every ring to an ``.npz`` file: first beside it, then in its place.

        Raises
        ------
        InvalidValueError
            As for :meth:`read_state`, or fields of the state overlap.
        """
        states = np.zeros(
            self.spec.rings, self.read_state().dtype
        )  # np.stack would pack the fields
        for ring in range(self.spec.rings):
            states[ring] = self.read_state(ring)
        states = states.view(_as_stored(states.dtype))
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
        if (
            self.spec.state is None
            or states.dtype != _as_stored(self.spec.state)
            or states.shape != (self.spec.rings,)
        ):
            raise InvalidValueError(
                f"path={os.fspath(path)!r} holds {states.shape} states of {states.dtype}; this "
                f"kernel has {self.spec.rings} of {self.spec.state}"
            )
        for ring, state in enumerate(states.view(self.spec.state)):
            self.write_state(state, ring)


def _as_stored(state: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype with its fields in the order of memory: a file has no other."""
    if state.fields is None or state.names is None:
        return state
    offsets = {name: field[1] for name, field in state.fields.items() if name in state.names}
    names = sorted(state.names, key=offsets.__getitem__)
    stored = np.dtype(
        {
            "names": names,
            "formats": [state[name] for name in names],
            "offsets": [offsets[name] for name in names],
            "itemsize": state.itemsize,
        }
    )
    try:
        np.lib.format.dtype_to_descr(stored)
    except ValueError as error:
        raise InvalidValueError(f"state={state} has no form in a file: {error}") from error
    return stored
