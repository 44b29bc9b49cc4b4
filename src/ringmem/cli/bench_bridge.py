"""``ringmem bench bridge``: what a flush moves in a second, beside a raw pinned copy.

Both copy the same number of bytes between the same kinds of memory on one stream, both find their
source freshly written (a copy out of the processor's cache is slower), and both wait for the end,
so their ratio is what the bridge costs. They take turns. Every message moved is checked.
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
from ringmem.ring import Async, DmaPolling, Mapped, RingBufferBridge, Sync, Unified
from ringmem.ring.slots import Slots, host_bytes

__all__ = ["run", "show"]

SIZES_NBYTES = (64 << 10, 1 << 20, 16 << 20)
MESSAGE = np.dtype([("number", "u8"), ("payload", "u8", (6,))])  # one line of 64 bytes
LINE, HEADER, TAIL, HEAD = 64, 384, 128, 256

_Seconds: TypeAlias = list[tuple[float, float]]  # of each flush, and of the raw copy after it


def run(device: str | None, repeat: int) -> dict[str, Any]:
    """Measure every strategy that the device offers.

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
    # The thread of DmaPolling sleeps through a measurement: what counts is the flush.
    for strategy in (Mapped(), Unified(), Sync(), Async(), DmaPolling(interval_us=200_000)):
        name = type(strategy).__name__
        try:
            figures = {}
            for nbytes in SIZES_NBYTES:
                figures[str(nbytes)], right = _measure(where, strategy, nbytes, repeat)
                verified = verified and right
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
    """Pinned copies of the same bytes, each way."""

    def __init__(self, device: Device, image: npt.NDArray[np.uint8]) -> None:
        self._device, self._image, self._stream = device, image, device.create_stream()
        self._host = PinnedBuffer(image.nbytes, device=device)
        self._memory = DeviceBuffer(image.nbytes, device=device)
        device.default_stream.synchronize()

    def _copy(self, dst: int, src: int) -> None:
        device = self._device
        device.driver.copy_async(device.ordinal, dst, src, self._image.nbytes, self._stream.handle)
        self._stream.synchronize()

    def to_device_s(self) -> float:
        np.asarray(self._host)[...] = self._image  # as send() does
        return _seconds(lambda: self._copy(self._memory.ptr, self._host.ptr))

    def to_host_s(self) -> float:
        self._copy(self._memory.ptr, self._host.ptr)
        return _seconds(lambda: self._copy(self._host.ptr, self._memory.ptr))

    def close(self) -> None:
        self._host.close()
        self._memory.close()
        self._stream.close()


def _measure(
    device: Device, strategy: Any, nbytes: int, repeat: int
) -> tuple[dict[str, Any], bool]:
    """Both directions of one strategy at one size; whether every message arrived."""
    count = nbytes // LINE
    messages = np.zeros(count, MESSAGE)
    messages["number"] = np.arange(count)
    messages["payload"] = np.arange(count)[:, None] * 7 + np.arange(6)
    with (
        RingBufferBridge(MESSAGE, count, device, strategy=strategy) as bridge,
        closing(_Raw(device, np.resize(messages.view(np.uint8), nbytes))) as raw,
    ):
        up, right_up = _to_device(bridge, messages, raw, repeat)
        down, right_down = _to_host(bridge, messages, raw, repeat)

    def figures(seconds: _Seconds) -> dict[str, float] | None:
        if not strategy.copies:
            return None
        ours, theirs = (statistics.median(times) for times in zip(*seconds, strict=True))
        return {
            "gb_per_second": nbytes / ours / 1e9,
            "raw_gb_per_second": nbytes / theirs / 1e9,
            "messages_per_second": count / ours,
            "of_raw": theirs / ours,
        }

    return {"to_device": figures(up), "to_host": figures(down)}, right_up and right_down


def _to_device(
    bridge: RingBufferBridge, messages: npt.NDArray[Any], raw: _Raw, repeat: int
) -> tuple[_Seconds, bool]:
    ring = bridge.device_input
    count = len(messages)

    flush, wait = bridge.flush_to_device, bridge._stream.synchronize

    def flush_and_wait() -> None:
        flush()
        wait()

    timed = flush_and_wait if isinstance(bridge.strategy, Async) else flush
    seconds = []
    for turn in range(repeat):
        _store(ring.header_ptr + HEAD, turn * count)  # the device took everything
        bridge.send(messages)
        seconds.append((_seconds(timed), raw.to_device_s()))
    image = np.empty(HEADER + count * LINE, np.uint8)
    device, stream = bridge.device, bridge._stream
    address = image.ctypes.data + HEADER
    device.driver.copy_async(device.ordinal, address, ring.slots_ptr, count * LINE, stream.handle)
    stream.synchronize()
    found = Slots(image, MESSAGE, count).messages
    return seconds, found is not None and bool((found == messages).all())


def _to_host(
    bridge: RingBufferBridge, messages: npt.NDArray[Any], raw: _Raw, repeat: int
) -> tuple[_Seconds, bool]:
    """The device's part is played by copies: slots with their sequences, then the index."""
    ring = bridge.device_output
    count = len(messages)
    right = True
    device, stream = bridge.device, bridge._stream
    with PinnedBuffer(HEADER + count * LINE, device=device) as image:
        bytes_of_image = host_bytes(image.ptr, image.nbytes, image)
        slots = Slots(bytes_of_image, MESSAGE, count)
        assert slots.messages is not None
        slots.messages[:] = messages
        words = np.frombuffer(bytes_of_image, np.uint32, offset=HEADER).reshape(count, LINE // 4)
        seconds = []
        for turn in range(repeat):
            words[:, 0] = turn + 1
            device.driver.copy_async(
                device.ordinal, ring.slots_ptr, image.ptr + HEADER, count * LINE, stream.handle
            )
            stream.synchronize()
            _store(ring.header_ptr + TAIL, (turn + 1) * count)
            seconds.append((_seconds(bridge.flush_to_host), raw.to_host_s()))
            got = bridge.recv(timeout_s=5.0)
            right = right and len(got) == count and bool((got == messages).all())
    return seconds, right


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
