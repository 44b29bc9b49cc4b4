"""Allocation traces: what a real program asked of its allocator, checked when it is loaded.

A trace is a NumPy ``.npz`` file with four arrays of equal length, one entry an event, in program
order. Everything that a replay relies on is checked here, so that a replay never meets a block it
does not know.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ALLOCATE", "FREE_COMPLETED", "FREE_REQUESTED", "Trace"]

ALLOCATE = 1
FREE_REQUESTED = 2
FREE_COMPLETED = 3

_DTYPES: dict[str, type[np.unsignedinteger[Any]]] = {
    "kind": np.uint8,
    "id": np.uint32,
    "size": np.uint64,
    "stream": np.uint8,
}
_SHIPPED = "graph-net-7k.npz"
# More than any address space holds; below it, sums of int64 in a trace cannot overflow unseen.
_MOST_BYTES = 1 << 60


@dataclass(frozen=True, eq=False)
class Trace:
    """The allocations and frees of one program, checked.

    Make one with :meth:`load`, :meth:`shipped` or :meth:`from_arrays`; all three check every event.

    Attributes
    ----------
    name : str
        What to call the trace in a report.
    kind : ndarray of uint8
        1 allocate, 2 free requested, 3 free completed.
    id : ndarray of uint32
        The allocation that the event is about, numbered from 0 in the order of allocation.
    size : ndarray of uint64
        Bytes requested at kind 1; 0 at the other kinds.
    stream : ndarray of uint8
        The stream, numbered from 0.

    Examples
    --------
    >>> from ringmem.observe import Trace
    >>> trace = Trace.from_arrays(kind=[1, 1, 2, 3], id=[0, 1, 0, 0], size=[512, 64, 0, 0])
    >>> trace.events, trace.allocations, trace.peak_live_bytes
    (4, 2, 576)
    """

    name: str
    kind: NDArray[np.uint8]
    id: NDArray[np.uint32]
    size: NDArray[np.uint64]
    stream: NDArray[np.uint8]

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read and check a trace file.

        Parameters
        ----------
        path : str or Path
            An ``.npz`` file with the arrays ``kind``, ``id``, ``size`` and ``stream``.

        Raises
        ------
        InvalidValueError
            There is no such file, it is no trace, or its events contradict each other. The message
            names the array and the first event that is wrong.
        """
        if isinstance(path, str) and not path:
            raise InvalidValueError("path is '': give the name of an .npz file")
        path = Path(path)
        try:
            arrays = _read(path)
        except InvalidValueError:
            raise
        except FileNotFoundError:
            raise InvalidValueError(f"trace: there is no file {str(path)!r}") from None
        except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as e:
            # What NumPy would unpickle is no trace: its advice to allow that is dropped.
            pickled = "pickle" in str(e)
            why = f"; one with the arrays {', '.join(_DTYPES)} would do" if pickled else f" ({e})"
            raise InvalidValueError(
                f"trace: {str(path)!r} cannot be read as an .npz file{why}"
            ) from (None if pickled else e)
        return cls.from_arrays(name=path.stem, **arrays)

    @classmethod
    def shipped(cls) -> Trace:
        """The small trace that comes with the package: 7,042 events of a graph network's training.

        Its origin is told in ``ringmem/observe/data/README.md``.
        """
        with as_file(files("ringmem.observe").joinpath("data", _SHIPPED)) as path:
            return cls.load(path)

    @classmethod
    def from_arrays(
        cls,
        *,
        kind: Any,
        id: Any,  # noqa: A002 - the array's name in the file
        size: Any,
        stream: Any = None,
        name: str = "trace",
    ) -> Trace:
        """Check arrays of events and make a trace of them.

        Parameters
        ----------
        kind, id, size : array_like of int, one entry an event
            As in the attributes of the class.
        stream : array_like of int, optional
            By default every event is on stream 0.
        name : str
            What to call the trace.

        Raises
        ------
        InvalidValueError
            As :meth:`load`.
        """
        given = {"kind": kind, "id": id, "size": size}
        given["stream"] = np.zeros(np.shape(kind), np.uint8) if stream is None else stream
        arrays = {key: _integers(key, np.asarray(value)) for key, value in given.items()}
        lengths = {key: len(value) for key, value in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise InvalidValueError(
                f"trace: arrays differ in length ({lengths}); equal ones would do"
            )
        if lengths["kind"] == 0:
            raise InvalidValueError("trace: it has no event; at least one allocation would do")
        trace = cls(name=name, **{key: _frozen(value) for key, value in arrays.items()})
        _check_events(trace)
        return trace

    @property
    def events(self) -> int:
        """Number of events of all kinds."""
        return len(self.kind)

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes requested by each allocation, indexed by ``id``."""
        return _frozen(self.size[self.kind == ALLOCATE].astype(np.int64))

    @property
    def allocations(self) -> int:
        """Number of allocations."""
        return len(self.nbytes)

    @property
    def streams(self) -> int:
        """Number of streams: one more than the largest stream number."""
        return int(self.stream.max()) + 1

    @cached_property
    def live_bytes(self) -> NDArray[np.int64]:
        """Bytes requested and not yet asked to be freed, after each event."""
        change = np.zeros(self.events, np.int64)
        change[self.kind == ALLOCATE] = self.nbytes
        freed = self.kind == FREE_REQUESTED
        change[freed] = -self.nbytes[self.id[freed]]
        return _frozen(np.cumsum(change))

    @property
    def peak_live_bytes(self) -> int:
        """The largest of :attr:`live_bytes`."""
        return int(self.live_bytes.max())

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, events={self.events}, allocations={self.allocations}, "
            f"peak_live_bytes={self.peak_live_bytes})"
        )


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _read(path: Path) -> dict[str, NDArray[Any]]:
    archive = np.load(path, allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise InvalidValueError(
            f"trace: {str(path)!r} is a single array; "
            f"an .npz file with the arrays {', '.join(_DTYPES)} would do"
        )
    with archive:
        missing = [name for name in _DTYPES if name not in archive.files]
        if missing:
            raise InvalidValueError(
                f"trace: {str(path)!r} lacks the arrays {missing}; it has {sorted(archive.files)}"
            )
        return {name: archive[name] for name in _DTYPES}


def _integers(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """One dimension, integers, every value within the array's own type."""
    if array.ndim != 1:
        raise InvalidValueError(f"trace: {name} has {array.ndim} dimensions; one would do")
    dtype = np.dtype(_DTYPES[name])
    if array.size and array.dtype.kind not in "iu":
        raise InvalidValueError(f"trace: {name} has dtype {array.dtype}; {dtype} would do")
    if array.size:
        low, high = int(array.min()), int(array.max())
        most = _MOST_BYTES if name == "size" else 2 ** (8 * dtype.itemsize) - 1
        if low < 0 or high > most:
            worst = low if low < 0 else high
            raise InvalidValueError(
                f"trace: {name} holds {worst}; values from 0 to {most} would do"
            )
    return np.array(array, dtype=dtype)


def _refuse(wrong: NDArray[np.bool_], what: str, values: NDArray[Any], remedy: str) -> None:
    """Raise for the first event that `wrong` marks."""
    if wrong.any():
        event = int(np.argmax(wrong))
        raise InvalidValueError(f"trace: event {event}: {what} {int(values[event])}; {remedy}")


def _check_events(trace: Trace) -> None:
    kind, ids, size = trace.kind, trace.id, trace.size
    _refuse((kind < ALLOCATE) | (kind > FREE_COMPLETED), "kind is", kind, "1, 2 or 3 would do")
    allocates = kind == ALLOCATE
    _refuse(allocates & (size == 0), "an allocation of size", size, "at least 1 byte would do")
    _refuse(~allocates & (size != 0), "a free with size", size, "0 would do")
    if float(size.sum(dtype=np.float64)) > _MOST_BYTES:
        raise InvalidValueError(f"trace: the sizes add up to more than {_MOST_BYTES} bytes")

    seen = np.cumsum(allocates)  # allocations up to and with each event
    expected = (seen - 1).astype(np.int64)
    _refuse(allocates & (ids != expected), "an allocation with id", ids, "count from 0, in order")
    _refuse(~allocates & (ids >= seen), "a free of unknown id", ids, "allocate it before")
    for which, word in ((FREE_REQUESTED, "free"), (FREE_COMPLETED, "completed free")):
        marks = kind == which
        first = np.zeros(trace.events, bool)
        places = np.flatnonzero(marks)
        first[places[np.unique(ids[places], return_index=True)[1]]] = True
        _refuse(marks & ~first, f"a second {word} of id", ids, "once would do")
    requested = np.full(int(seen[-1]), trace.events, np.int64)
    places = np.flatnonzero(kind == FREE_REQUESTED)
    requested[ids[places]] = places
    completes = np.flatnonzero(kind == FREE_COMPLETED)
    early = np.zeros(trace.events, bool)
    early[completes] = requested[ids[completes]] > completes
    _refuse(early, "a completed free that nobody requested, id", ids, "put a kind 2 before it")
