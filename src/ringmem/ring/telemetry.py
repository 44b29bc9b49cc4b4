"""What a ring kernel says of itself, read without disturbing it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native.layouts import TelemetryBuffer

__all__ = ["Telemetry", "read_telemetry"]


@dataclass(frozen=True)
class Telemetry:
    """One moment of one ring, counted since the kernel was started.

    Attributes
    ----------
    processed : int
        Messages answered.
    dropped : int
        Dead letters that found no room.
    latency_mean_ns, latency_min_ns, latency_max_ns : float or int
        Of a message inside the kernel, from seen to answered, by the kernel's clock; messages that
        were found together count with the time of their batch. 0 before the first message.
    queue_depth : int
        Messages that were sent and are not answered, as far as the kernel has said: those in work
        are among them. Told by the ring itself, also while the kernel is paused or does not run.
    last_error : int
        The last status of a handler that was not 0; 0: there was none.
    last_processed_ns : int
        The kernel's clock at the last message; 0: there was none.
    record : numpy.ndarray
        The block as the kernel last wrote it (:class:`ringmem.TelemetryBuffer`), shape ``()``.
    """

    processed: int
    dropped: int
    latency_mean_ns: float
    latency_min_ns: int
    latency_max_ns: int
    queue_depth: int
    last_error: int
    last_processed_ns: int
    record: npt.NDArray[Any] = field(repr=False, compare=False)

    def asdict(self) -> dict[str, int | float]:
        """Return the figures alone, by name."""
        names = (one.name for one in dataclasses.fields(self) if one.name != "record")
        return {name: getattr(self, name) for name in names}


def read_telemetry(block: TelemetryBuffer, queue_depth: int) -> Telemetry:
    """Read a telemetry block that a kernel may be writing; the depth is of the ring's indices."""
    record = block.to_numpy()
    processed = int(record["processed"])
    none_yet = processed == 0
    return Telemetry(
        processed=processed,
        dropped=int(record["dropped"]),
        latency_mean_ns=0.0 if none_yet else int(record["latency_total_ns"]) / processed,
        latency_min_ns=0 if none_yet else int(record["latency_min_ns"]),
        latency_max_ns=int(record["latency_max_ns"]),
        queue_depth=queue_depth,
        last_error=int(record["last_error"]),
        last_processed_ns=int(record["last_processed_ns"]),
        record=np.asarray(record),
    )
