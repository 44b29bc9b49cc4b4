"""``ringmem bench ring``: round trips and messages a second of a ring kernel, every word verified.

The handler changes every 8-byte word of a message; messages are made, and every word of every reply
is checked, in native code, so that Python is not what is measured. Where a figure goes through
Python, its name says so, and replies are kept and checked after the clock has stopped; those of
Python's batches, which nobody could keep, are checked in a further run of as many, and those of
asyncio, where keeping them costs a third, in the run that times the round trips.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.cli.bench_ring_first import first_replies
from ringmem.cli.bench_ring_peers import peers
from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError
from ringmem.ring import CudaSource, NativeHandler, RingKernel

__all__ = ["BATCHES", "PAYLOADS", "run"]

PAYLOADS = (56, 112, 240)  # bytes: one, two and five lines
BATCHES = (1, 8, 64, 512)
_PYTHON_BATCH = 512
_WARM = 2_000
_COMPARED = 11  # runs of each handler
_QUANTILES = {"min": 0.0, "p50": 50.0, "p99": 99.0, "p99.9": 99.9}

Progress = Callable[[str, int, int], object]


def _echo_7(message: Any, reply: Any, state: Any) -> int:
    for i in range(7):
        reply.words[i] = message.words[i] * np.uint64(3) + np.uint64(i + 1)
    return 0


def _echo_14(message: Any, reply: Any, state: Any) -> int:
    for i in range(14):
        reply.words[i] = message.words[i] * np.uint64(3) + np.uint64(i + 1)
    return 0


def _echo_30(message: Any, reply: Any, state: Any) -> int:
    for i in range(30):
        reply.words[i] = message.words[i] * np.uint64(3) + np.uint64(i + 1)
    return 0


_ECHO_SOURCE = """
__device__ int echo(const unsigned long long* message, unsigned long long* reply, void*) {
  for (int i = 0; i < %d; ++i) reply[i] = message[i] * 3 + (i + 1);
  return 0;
}
"""

_ECHOES = {7: _echo_7, 14: _echo_14, 30: _echo_30}


def run(
    device: str | None = None,
    messages: int = 2_000_000,
    rings: int = 1,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measure everything.

    Parameters
    ----------
    device : str, optional
        For instance ``"cuda:0"``; default: the first CUDA device, or cpu.
    messages : int
        Of each throughput figure; round trips are a hundredth of it, at least 1000.
    rings : int
        Ring pairs of the figure for all rings together, each with a host thread of its own.
    progress : callable
        Called with what is measured, and how many of how many parts are done.

    Returns
    -------
    dict
        ``rtt_us``, ``messages_per_second``, ``verified`` and more, ready for JSON.
    """
    if messages < 1000:
        raise InvalidValueError(f"messages={messages} must be at least 1000")
    where = Device(device)
    bench = _Bench(where, messages, rings)
    result: dict[str, Any] = {
        "device": where.name,
        "product_name": where.product_name,
        "messages": messages,
        "handler": "Python" if where.platform == "cuda" else "native",
    }
    steps = (bench.slots, bench.python, bench.asyncio, bench.together, bench.handlers, bench.idle)
    for number, step in enumerate(steps):
        progress("bench ring", number, len(steps) + 1)
        result |= step()
    progress("bench ring", len(steps), len(steps) + 1)
    result["compared"] = peers(where, max(messages // 1000, 200))
    result["verified"] = bench.wrong_words == 0
    result["wrong_words"] = bench.wrong_words
    result["verified_messages"] = bench.verified
    return result


def _quantiles(us: npt.NDArray[np.float64]) -> dict[str, float]:
    return {name: round(float(np.percentile(us, at)), 3) for name, at in _QUANTILES.items()}


class _Bench:
    def __init__(self, device: Device, messages: int, rings: int) -> None:
        self._device = device
        self._messages = messages
        self._trips = max(messages // 100, 1000)
        self._rings = rings
        self.wrong_words = 0
        self.verified = 0

    @contextmanager
    def _kernel(
        self, nbytes: int, python: bool = False, rings: int = 1, native: bool = False
    ) -> Iterator[RingKernel]:
        words = nbytes // 8
        handler: Any = _ECHOES[words]
        if self._device.platform == "cpu" and not python:
            handler = NativeHandler(_native.echo_handler(words))
        elif native:
            handler = CudaSource(_ECHO_SOURCE % words, name="echo")
        message = np.dtype([("words", "u8", (words,))])
        with RingKernel(
            handler, message=message, device=self._device, rings=rings, stall_s=60.0
        ) as kernel:
            yield kernel

    def _round_trips(self, kernel: RingKernel, count: int) -> npt.NDArray[np.float64]:
        pair = kernel._pairs[0]
        raw, wrong = _native.measure_round_trips(
            pair.producer._native, pair.consumer._native, count
        )
        self.wrong_words += wrong
        self.verified += count
        return np.frombuffer(raw, np.uint32) / 1000.0

    def _stream(
        self, kernel: RingKernel, batch: int, ring: int = 0, in_place: bool = False
    ) -> float:
        """Messages a second by send() and receive(), or in the slots; the better of two runs."""
        pair = kernel._pairs[ring]
        best = 0.0
        for _ in range(2):
            seconds, wrong = _native.measure_stream(
                pair.producer._native,
                pair.consumer._native,
                self._messages,
                batch,
                in_place=in_place,
            )
            self.wrong_words += wrong
            self.verified += self._messages
            best = max(best, self._messages / seconds)
        return best

    # --- what is measured ------------------------------------------------------------------------

    def slots(self) -> dict[str, Any]:
        """Round trip and throughput by the size of a message, natively."""
        trips: dict[str, Any] = {}
        rates: dict[str, Any] = {}
        for nbytes in PAYLOADS:
            with self._kernel(nbytes) as kernel:
                self._round_trips(kernel, _WARM)
                us = self._round_trips(kernel, self._trips)
                trips[str(nbytes)] = _quantiles(us)
                if nbytes == PAYLOADS[0]:
                    histogram = _histogram(us)
                    in_place = {
                        str(batch): round(self._stream(kernel, batch, in_place=True))
                        for batch in BATCHES
                    }
                rates[str(nbytes)] = {
                    str(batch): round(self._stream(kernel, batch)) for batch in BATCHES
                }
        return {
            "rtt_us": trips,
            "messages_per_second": rates,
            "in_place_messages_per_second": {str(PAYLOADS[0]): in_place},
            "histogram": histogram,
        }

    def python(self) -> dict[str, Any]:
        """One call, and batches, through Python."""
        with self._kernel(56) as kernel:
            self._round_trips(kernel, _WARM)
            native = _quantiles(self._round_trips(kernel, self._trips))
            return {
                "python_call_us": self._calls(kernel),
                "native_call_us": native,
                "python_batch": {
                    "size": _PYTHON_BATCH,
                    "messages_per_second": round(self._batches(kernel)),
                },
            }

    def _calls(self, kernel: RingKernel) -> dict[str, float]:
        batch = np.zeros(64, kernel.spec.message)
        batch["words"] = np.arange(64 * 7).reshape(64, 7)
        expected = (batch["words"] * 3 + np.arange(1, 8, dtype="u8")).tolist()
        records, call, clock = list(batch), kernel.call, time.perf_counter_ns
        times, replies = [], []
        for i in range(self._trips):
            record = records[i & 63]
            start = clock()
            reply = call(record)
            times.append(clock() - start)
            replies.append(reply)
            if len(replies) == 64 or i == self._trips - 1:
                self._verify(replies, expected)
                replies.clear()
        return _quantiles(np.asarray(times) / 1000.0)

    def _verify(self, replies: list[Any], expected: list[list[int]]) -> None:
        """Count the wrong words of replies of `kernel.call`; the first expected ones belong."""
        self.verified += len(replies)
        found = [reply["words"].tolist() for reply in replies]
        if found != expected[: len(found)]:
            wrong = np.array(found) != np.array(expected[: len(found)])
            self.wrong_words += int(np.count_nonzero(wrong))

    def _batches(self, kernel: RingKernel) -> float:
        """Batches of 512 sent and received by Python: three runs timed, then one checked."""
        size, capacity = _PYTHON_BATCH, kernel.spec.capacity
        batch = np.zeros(size, kernel.spec.message)
        batch["words"] = np.arange(size * 7).reshape(size, 7)
        expected = np.tile(batch["words"] * 3 + np.arange(1, 8, dtype="u8"), (2, 1))
        out = np.zeros(size, kernel.spec.reply)
        best = 0.0
        total = self._messages // size * size
        for checked in (False, False, False, True):
            sent = received = 0
            start = time.perf_counter()
            while received < total:
                if sent < total and sent - received <= capacity - size:
                    sent += kernel.send(batch)
                    continue
                got = kernel.recv_into(out)
                if checked:
                    first = received % size
                    wrong = out["words"][:got] != expected[first : first + got]
                    self.wrong_words += int(np.count_nonzero(wrong))
                    self.verified += got
                received += got
            if not checked:
                best = max(best, total / (time.perf_counter() - start))
        return best

    def asyncio(self) -> dict[str, Any]:
        """Round trips of one task and of a thousand, through an event loop."""

        async def main() -> dict[str, Any]:
            with self._kernel(56) as kernel:
                record = np.zeros(1, kernel.spec.message)[0]
                expected = list(range(1, 8))
                call = kernel.aio.call
                times: list[int] = []

                async def one(count: int) -> list[Any]:
                    replies = []
                    for _ in range(count):
                        start = time.perf_counter_ns()
                        replies.append(await call(record))
                        times.append(time.perf_counter_ns() - start)
                    return replies

                async def plain(count: int) -> None:
                    for _ in range(count):
                        await call(record)

                def verify(found: list[list[Any]]) -> None:
                    for replies in found:
                        self._verify(replies, [expected] * len(replies))

                await one(200)
                found = {}
                for tasks in (1, 1000):
                    per_task = max(min(self._messages, 400_000) // 4 // tasks, 20)
                    per_task = min(per_task, 5000)
                    times.clear()
                    verify(await asyncio.gather(*(one(per_task) for _ in range(tasks))))
                    us = _quantiles(np.asarray(times) / 1000.0)
                    best = 0.0
                    for _ in range(3):
                        start = time.perf_counter()
                        await asyncio.gather(*(plain(per_task) for _ in range(tasks)))
                        best = max(best, tasks * per_task / (time.perf_counter() - start))
                    found[str(tasks)] = {"rtt_us": us, "messages_per_second": round(best)}
                return found

        return {"asyncio": asyncio.run(main())}

    def together(self) -> dict[str, Any]:
        """All rings at once, each fed by a host thread of its own."""
        if self._rings == 1:
            return {}
        from concurrent.futures import ThreadPoolExecutor

        with self._kernel(56, rings=self._rings) as kernel, ThreadPoolExecutor(self._rings) as pool:

            def feed(ring: int) -> tuple[float, int]:
                pair = kernel._pairs[ring]
                seconds, wrong = _native.measure_stream(
                    pair.producer._native,
                    pair.consumer._native,
                    self._messages,
                    512,
                    in_place=False,
                )
                return float(seconds), int(wrong)

            start = time.perf_counter()
            done = list(pool.map(feed, range(self._rings)))
            seconds = time.perf_counter() - start
        self.wrong_words += sum(wrong for _, wrong in done)
        self.verified += self._rings * self._messages
        rate = round(self._rings * self._messages / seconds)
        return {"all_rings": {"rings": self._rings, "messages_per_second": rate}}

    def handlers(self) -> dict[str, Any]:
        """What a handler in Python costs beside the same in native code, and the first replies."""
        rates: dict[str, list[float]] = {"python": [], "native": []}
        for _ in range(_COMPARED):  # in turn: what else the machine does meets both
            for name, found in rates.items():
                with self._kernel(56, python=name == "python", native=name == "native") as kernel:
                    self._round_trips(kernel, _WARM)
                    found.append(self._stream(kernel, _PYTHON_BATCH))
        ratios = np.array(rates["python"]) / np.array(rates["native"])
        python, native = (float(np.median(found)) for found in rates.values())
        return {
            "python_handler": {
                "messages_per_second": round(python),
                "native_messages_per_second": round(native),
                "ratio": round(float(np.median(ratios)), 4),
                **first_replies(self._device),
            }
        }

    def idle(self) -> dict[str, Any]:
        """What a kernel that has nothing to do takes: of a core, and of a multiprocessor."""
        with self._kernel(56) as kernel:
            taken = getattr(kernel._backend, "multiprocessors", None)
            time.sleep(1.2)  # past every back-off
            before, start = time.process_time(), time.perf_counter()
            time.sleep(1.0)
            share = (time.process_time() - before) / (time.perf_counter() - start)
        found: dict[str, Any] = {"idle_core_share": round(share, 4)}
        if taken is not None:
            found["multiprocessors"] = round(float(taken), 4)
        return found


def _histogram(us: npt.NDArray[np.float64]) -> dict[str, list[float]]:
    """Counts between p0 and p99.9 in 40 steps of equal ratio."""
    low, high = max(float(us.min()), 0.01), max(float(np.percentile(us, 99.9)), 0.02)
    edges = np.geomspace(low, max(high, low * 1.05), 41)
    counts, _ = np.histogram(us, edges)
    return {"edges_us": np.round(edges, 4).tolist(), "counts": counts.tolist()}
