"""``ringmem bench bridge``: what a flush moves in a second, beside a raw pinned copy.

Both copy the slots of a ring on one stream and wait for the end, so their ratio is what the bridge
costs. Both rings are written by ``send`` and read by ``recv``: a copy out of memory that the
processor has in its caches, or into it, takes up to one and a half times as long. They take turns,
in memory that is new in every round, because where it lies changes a copy's time by some percent.
Every message moved is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ringmem.buffers import DeviceBuffer, PinnedBuffer
from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.errors import NotSupportedError
from ringmem.ring import Async, DmaPolling, Mapped, Ring, RingBufferBridge, Sync, Unified
from ringmem.ring.slots import Slots, host_bytes

__all__ = ["run", "show"]

SIZES_NBYTES = (64 << 10, 1 << 20, 16 << 20)
MESSAGE = np.dtype([("number", "u8"), ("payload", "u8", (6,))])  # one line of 64 bytes
LINE, HEADER, TAIL, HEAD = 64, 384, 128, 256

ROUNDS = 5

_Seconds: TypeAlias = list[tuple[float, float]]  # of each flush, and of the raw copy after it


def run(device: str | None, repeat: int) -> dict[str, Any]:
    """Measure every strategy that the device offers, `repeat` flushes each way and size.

    Returns
    -------
    dict
        ``device``, ``strategies`` (by name: ``refused``, or by bytes ``to_device`` and ``to_host``
        with ``gb_per_second``, ``raw_gb_per_second`` (pinned copies, taking turns),
        ``messages_per_second`` and ``of_raw``; None where nothing is moved), ``verified``.
    """
    where = Device(device)
    strategies: dict[str, Any] = {}
    verified = True
    rounds = min(ROUNDS, repeat)
    # The thread of DmaPolling sleeps through a measurement: what counts is the flush.
    for strategy in (Mapped(), Unified(), Sync(), Async(), DmaPolling(interval_us=200_000)):
        name = type(strategy).__name__
        try:
            figures = {}
            for nbytes in SIZES_NBYTES:
                up: _Seconds = []
                down: _Seconds = []
                for _ in range(rounds):
                    more_up, more_down, right = _measure(where, strategy, nbytes, repeat // rounds)
                    up += more_up
                    down += more_down
                    verified = verified and right
                figures[str(nbytes)] = {
                    "to_device": _figures(up, nbytes) if strategy.copies else None,
                    "to_host": _figures(down, nbytes) if strategy.copies else None,
                }
            strategies[name] = figures
        except NotSupportedError as error:
            strategies[name] = {"refused": str(error)}
    return {
        "device": where.name,
        "product_name": where.product_name,
        "repeat": repeat,
        "message_nbytes": MESSAGE.itemsize,
        "strategies": strategies,
        "verified": verified,
    }


def _seconds(timed: Callable[[], object]) -> float:
    start = time.perf_counter()
    timed()
    return time.perf_counter() - start


class _Raw:
    """One direction: a ring like the bridge's, its slots moved by nothing but a copy."""

    def __init__(self, device: Device, count: int) -> None:
        self._stream = device.create_stream()
        self._host = PinnedBuffer(Ring.nbytes_for(MESSAGE, count), device=device)
        self._memory = DeviceBuffer(count * LINE, device=device)
        self._copy, self._wait = device.driver.copy_async, self._stream.synchronize
        self._ordinal, self._nbytes = device.ordinal, self._memory.nbytes
        self._handle, self.device_ptr = self._stream.handle, self._memory.ptr
        self.ring = Ring(MESSAGE, count, memory=self._host)
        self.producer, self.consumer = self.ring.producer("refuse"), self.ring.consumer()
        device.default_stream.synchronize()

    def copy(self, dst: int, src: int) -> None:
        """Wait for a copy, with no more Python around the two calls than must be."""
        self._copy(self._ordinal, dst, src, self._nbytes, self._handle)
        self._wait()

    def close(self) -> None:
        self.ring.close()
        self._host.close()
        self._memory.close()
        self._stream.close()


def _measure(
    device: Device, strategy: Any, nbytes: int, turns: int
) -> tuple[_Seconds, _Seconds, bool]:
    """Both directions of one strategy at one size, in new memory; whether every message arrived."""
    count = nbytes // LINE
    messages = np.zeros(count, MESSAGE)
    messages["number"] = np.arange(count)
    messages["payload"] = np.arange(count)[:, None] * 7 + np.arange(6)
    with (
        RingBufferBridge(MESSAGE, count, device, strategy=strategy) as bridge,
        closing(_Raw(device, count)) as raw_up,
        closing(_Raw(device, count)) as raw_down,
    ):
        up, right_up = _to_device(bridge, messages, raw_up, turns)
        down, right_down = _to_host(bridge, messages, raw_down, turns)
    return up, down, right_up and right_down


def _figures(seconds: _Seconds, nbytes: int) -> dict[str, float]:
    ours, theirs = (statistics.median(times) for times in zip(*seconds, strict=True))
    return {
        "gb_per_second": nbytes / ours / 1e9,
        "raw_gb_per_second": nbytes / theirs / 1e9,
        "messages_per_second": nbytes // LINE / ours,
        "of_raw": theirs / ours,
    }


def _in_turn(turns: int, ours: Callable[[int], float], theirs: Callable[[int], float]) -> _Seconds:
    """Each goes first as often as the other: what comes second finds the other's in the caches."""
    seconds = []
    for turn in range(turns):
        if turn % 2:
            after = theirs(turn)
            seconds.append((ours(turn), after))
        else:
            seconds.append((ours(turn), theirs(turn)))
    return seconds


def _to_device(
    bridge: RingBufferBridge, messages: npt.NDArray[Any], raw: _Raw, turns: int
) -> tuple[_Seconds, bool]:
    ring = bridge.device_input
    count = len(messages)
    flush, wait = bridge.flush_to_device, bridge._stream.synchronize

    def flush_and_wait() -> None:
        flush()
        wait()

    timed = flush_and_wait if isinstance(bridge.strategy, Async) else flush

    def ours(turn: int) -> float:
        _store(ring.header_ptr + HEAD, turn * count)  # the device took everything
        bridge.send(messages)
        return _seconds(timed)

    host_ptr = raw.ring.ptr + HEADER

    def theirs(turn: int) -> float:
        _store(raw.ring.ptr + HEAD, turn * count)
        raw.producer.send(messages)
        return _seconds(lambda: raw.copy(raw.device_ptr, host_ptr))

    seconds = _in_turn(turns, ours, theirs)
    image = np.empty(HEADER + count * LINE, np.uint8)
    device, stream = bridge.device, bridge._stream
    address = image.ctypes.data + HEADER
    device.driver.copy_async(device.ordinal, address, ring.slots_ptr, count * LINE, stream.handle)
    stream.synchronize()
    found = Slots(image, MESSAGE, count).messages
    return seconds, found is not None and bool((found == messages).all())


def _to_host(
    bridge: RingBufferBridge, messages: npt.NDArray[Any], raw: _Raw, turns: int
) -> tuple[_Seconds, bool]:
    """The device's part is played by copies: slots with their sequences, then the index."""
    ring = bridge.device_output
    count = len(messages)
    device, stream = bridge.device, bridge._stream
    right = []
    with PinnedBuffer(HEADER + count * LINE, device=device) as image:
        bytes_of_image = host_bytes(image.ptr, image.nbytes, image)
        slots = Slots(bytes_of_image, MESSAGE, count)
        assert slots.messages is not None
        slots.messages[:] = messages
        words = np.frombuffer(bytes_of_image, np.uint32, offset=HEADER).reshape(count, LINE // 4)
        source_ptr, host_ptr = image.ptr + HEADER, raw.ring.ptr + HEADER

        def ours(turn: int) -> float:
            words[:, 0] = turn + 1
            device.driver.copy_async(
                device.ordinal, ring.slots_ptr, source_ptr, count * LINE, stream.handle
            )
            stream.synchronize()
            _store(ring.header_ptr + TAIL, (turn + 1) * count)
            seconds = _seconds(bridge.flush_to_host)
            right.append(_same(bridge.recv(timeout_s=5.0), messages))
            return seconds

        def theirs(turn: int) -> float:
            words[:, 0] = turn + 1
            raw.copy(raw.device_ptr, source_ptr)
            seconds = _seconds(lambda: raw.copy(host_ptr, raw.device_ptr))
            _store(raw.ring.ptr + TAIL, (turn + 1) * count)
            right.append(_same(raw.consumer.recv(count, timeout_s=5.0), messages))
            return seconds

        seconds = _in_turn(turns, ours, theirs)
    return seconds, all(right)


def _same(got: npt.NDArray[Any], sent: npt.NDArray[Any]) -> bool:
    return len(got) == len(sent) and bool((got == sent).all())


def _store(header_word: int, value: int) -> None:
    """Store an index of the device's; its header is in memory that the host sees too."""
    _native.store_u64(header_word, value)


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"{result['device']} ({result['product_name']}), one-line messages")
    table = Table("strategy", "KiB", "way", "GB/s", "raw", "of raw", "M messages/s")
    for name, figures in result["strategies"].items():
        if "refused" in figures:
            console.print(f"{name}: {figures['refused']}")
            continue
        for nbytes, ways in figures.items():
            for way, f in ways.items():
                if f is None:
                    table.add_row(
                        name, str(int(nbytes) // 1024), way, "-", "-", "-", "nothing to move"
                    )
                    continue
                table.add_row(
                    name,
                    str(int(nbytes) // 1024),
                    way,
                    f"{f['gb_per_second']:.2f}",
                    f"{f['raw_gb_per_second']:.2f}",
                    f"{f['of_raw']:.1%}",
                    f"{f['messages_per_second'] / 1e6:.1f}",
                )
    console.print(table)
    console.print("verified" if result["verified"] else "NOT verified")
