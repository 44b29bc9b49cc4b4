"""The demo's ring kernel: the trace's events go to a handler that stays on the device.

The handler keeps live and peak bytes as its state and answers every event with both, so the replies
are the two curves, which NumPy has computed too. The kernel cannot outlive its deadline.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.cli.demo_checks import Progress
from ringmem.native.errors import NotSupportedError
from ringmem.observe.trace import FREE_COMPLETED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ringmem.device import Device
    from ringmem.observe import Trace
    from ringmem.ring import RingKernel

__all__ = ["CUDA_SOURCE", "EVENT", "USAGE", "Streamed", "handle_event", "stream_events"]

EVENT = np.dtype([("kind", "i8"), ("nbytes", "i8")])
USAGE = np.dtype([("live", "i8"), ("peak", "i8")])

_BATCH = 512  # messages
_TIMEOUT_S = 20.0  # without any reply
_DEADLINE_S = 60.0  # the kernel ends itself then, whatever happens
_CALLS = 200


def handle_event(message: Any, reply: Any, state: Any) -> int:
    """Account for one event: 1 allocates, 2 asks to free, 3 says that a free is complete."""
    if message.kind == 1:
        state.live += message.nbytes
    elif message.kind == 2:
        state.live -= message.nbytes
    if state.live > state.peak:
        state.peak = state.live
    reply.live = state.live
    reply.peak = state.peak
    return 0


# The same, for a machine that has NVRTC and not numba-cuda.
CUDA_SOURCE = """
struct Event { long long kind, nbytes; };
struct Usage { long long live, peak; };
__device__ int handler(const Event* event, Usage* reply, Usage* state) {
  if (event->kind == 1) state->live += event->nbytes;
  else if (event->kind == 2) state->live -= event->nbytes;
  if (state->live > state->peak) state->peak = state->live;
  *reply = *state;
  return 0;
}
"""


@dataclass(frozen=True, eq=False)
class Streamed:
    """What went through the ring kernel; `skipped` says what was missing for it.

    `peak_curve` is the peak after each event, bytes, as the kernel answered.
    """

    messages: int = 0
    peak_live_bytes: int = 0
    right: bool = False
    seconds: float = 0.0
    handler: str | None = None
    call_us_p50: float = 0.0
    peak_curve: NDArray[np.int64] | None = None
    skipped: str | None = None

    @property
    def verified(self) -> bool | None:
        """Whether every answer is NumPy's; None where it was skipped."""
        return None if self.skipped else self.right

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "messages": self.messages,
            "peak_live_bytes": self.peak_live_bytes,
            "verified": self.verified,
            "messages_per_second": self.messages / self.seconds if self.seconds else None,
            "call_us_p50": self.call_us_p50 or None,
            "handler": self.handler,
            "skipped": self.skipped,
        }


def stream_events(device: Device, trace: Trace, progress: Progress) -> Streamed:
    """Send the trace through a ring kernel and compare the answers with NumPy's.

    Raises
    ------
    TimeoutError, KernelFailedError
        The kernel did not answer, or ended by itself.
    """
    progress("ring kernel", 0, trace.events)
    try:
        kernel, handler = _make_kernel(device)
    except NotSupportedError as error:
        return Streamed(skipped=str(error))
    events = events_of(trace)
    replies, statuses = np.zeros(len(events), USAGE), np.ones(len(events), np.int32)
    with kernel:
        start = time.perf_counter()
        for done in _echo(kernel, events, replies, statuses):
            progress("ring kernel", done, len(events))
        seconds = time.perf_counter() - start
        call_us = _time_calls(kernel)
        kernel.drain(_TIMEOUT_S)
        final = kernel.read_state()
    live = trace.live_bytes
    right = (
        not statuses.any()
        and np.array_equal(replies["live"], live)
        and np.array_equal(replies["peak"], np.maximum.accumulate(live))
        and (int(final["live"]), int(final["peak"])) == (int(live[-1]), int(live.max()))
    )
    return Streamed(
        messages=len(events),
        peak_live_bytes=int(final["peak"]),
        right=bool(right),
        seconds=seconds,
        handler=handler,
        call_us_p50=call_us,
        peak_curve=replies["peak"].copy(),
    )


def events_of(trace: Trace) -> NDArray[Any]:
    """Return the trace as messages; a free knows how much it frees."""
    events = np.zeros(trace.events, EVENT)
    events["kind"] = trace.kind
    events["nbytes"] = trace.nbytes[trace.id]
    return events


def _make_kernel(device: Device) -> tuple[RingKernel, str]:
    """Return a kernel with the handler in Python, or in CUDA C++ where only that can be compiled.

    Raises
    ------
    NotSupportedError
        The device or a compiler is missing something; says how to get it.
    """
    from ringmem.ring import CudaSource, RingKernel

    def make(handler: Any) -> RingKernel:
        return RingKernel(
            handler, message=EVENT, reply=USAGE, state=USAGE, device=device, deadline_s=_DEADLINE_S
        )

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            kernel, handler = make(handle_event), "Python, compiled by Numba"
        except NotSupportedError:
            if device.platform == "cpu":
                raise
            return make(CudaSource(CUDA_SOURCE)), "CUDA C++ (no numba-cuda for Python)"
    if any("plain Python" in str(warning.message) for warning in said):
        handler = "plain Python (pip install 'ringmem[kernels]' to compile it)"
    return kernel, handler


def _echo(
    kernel: RingKernel, events: NDArray[Any], replies: NDArray[Any], statuses: NDArray[Any]
) -> Iterator[int]:
    """Send batches as long as there is room, read what is there; yield how far it is."""
    room = kernel.spec.capacity
    sent = done = 0
    while done < len(events):
        while sent < len(events) and sent - done + _BATCH <= room:
            sent += kernel.send(events[sent : sent + _BATCH], timeout_s=_TIMEOUT_S)
        done += kernel.recv_into(replies[done:], timeout_s=_TIMEOUT_S, statuses=statuses[done:])
        yield done


def _time_calls(kernel: RingKernel) -> float:
    """Return the median microseconds of one message and its answer; the state stays as it is."""
    message = np.zeros(1, EVENT)[0]
    message["kind"] = FREE_COMPLETED
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter_ns()
        kernel.call(message, timeout_s=_TIMEOUT_S)
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times)) / 1000 if times else 0.0
