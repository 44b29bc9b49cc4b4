"""``ringmem bench bridge``: what a flush moves in a second, beside a raw pinned copy.

Both copy the same number of bytes between the same kinds of memory on one stream, and both wait for
the end, so their ratio is what the bridge costs. Every message moved is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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


def run(device: str | None, repeat: int) -> dict[str, Any]:
    """Measure every strategy that the device offers.

    Returns
    -------
    dict
        ``device``, ``raw`` (GB/s of pinned copies by bytes and direction), ``strategies`` (by
        name: ``refused``, or by bytes ``to_device`` and ``to_host`` with ``gb_per_second``,
        ``messages_per_second`` and ``of_raw``; None where nothing is moved), ``verified``.
    """
    where = Device(device)
    raw = {nbytes: _raw(where, nbytes, repeat) for nbytes in SIZES_NBYTES}
    strategies: dict[str, Any] = {}
    verified = True
    for strategy in (Mapped(), Unified(), Sync(), Async(), DmaPolling(interval_us=20)):
        name = type(strategy).__name__
        try:
            figures = {}
            for nbytes in SIZES_NBYTES:
                figures[str(nbytes)], right = _measure(where, strategy, nbytes, repeat, raw)
                verified = verified and right
            strategies[name] = figures
        except NotSupportedError as error:
            strategies[name] = {"refused": str(error)}
    return {
        "device": where.name,
        "product_name": where.product_name,
        "repeat": repeat,
        "message_nbytes": MESSAGE.itemsize,
        "raw": {str(nbytes): figures for nbytes, figures in raw.items()},
        "strategies": strategies,
        "verified": verified,
    }


def _median_s(repeat: int, prepare: Callable[[], object], timed: Callable[[], object]) -> float:
    times = []
    for _ in range(repeat):
        prepare()
        start = time.perf_counter()
        timed()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _raw(device: Device, nbytes: int, repeat: int) -> dict[str, float]:
    """GB/s of pinned copies, each way."""
    stream = device.create_stream()
    with PinnedBuffer(nbytes, device=device) as host, DeviceBuffer(nbytes, device=device) as memory:
        device.default_stream.synchronize()
        figures = {}
        for name, dst, src in (
            ("to_device", memory.ptr, host.ptr),
            ("to_host", host.ptr, memory.ptr),
        ):

            def copy(dst: int = dst, src: int = src) -> None:
                device.driver.copy_async(device.ordinal, dst, src, nbytes, stream.handle)
                stream.synchronize()

            copy()
            figures[name] = nbytes / _median_s(repeat, lambda: None, copy) / 1e9
    stream.close()
    return figures


def _measure(
    device: Device, strategy: Any, nbytes: int, repeat: int, raw: dict[int, dict[str, float]]
) -> tuple[dict[str, Any], bool]:
    """Both directions of one strategy at one size; whether every message arrived."""
    count = nbytes // LINE
    with RingBufferBridge(MESSAGE, count, device, strategy=strategy) as bridge:
        messages = np.zeros(count, MESSAGE)
        messages["number"] = np.arange(count)
        messages["payload"] = np.arange(count)[:, None] * 7 + np.arange(6)
        up, right_up = _to_device(bridge, messages, repeat)
        down, right_down = _to_host(bridge, messages, repeat)

    def figures(name: str, seconds: float | None) -> dict[str, float] | None:
        if seconds is None:
            return None
        speed = nbytes / seconds / 1e9
        return {
            "gb_per_second": speed,
            "messages_per_second": count / seconds,
            "of_raw": speed / raw[nbytes][name],
        }

    return {"to_device": figures("to_device", up), "to_host": figures("to_host", down)}, (
        right_up and right_down
    )


def _to_device(
    bridge: RingBufferBridge, messages: np.ndarray[Any, Any], repeat: int
) -> tuple[float | None, bool]:
    ring = bridge.device_input
    count = len(messages)
    sent = 0

    def prepare() -> None:
        nonlocal sent
        _store(ring.header_ptr + HEAD, sent)  # the device took everything
        bridge.send(messages)
        sent += count

    def flush() -> None:
        bridge.flush_to_device()
        bridge._stream.synchronize()  # Async does not wait by itself

    seconds = _median_s(repeat, prepare, flush)
    image = np.empty(HEADER + count * LINE, np.uint8)
    device, stream = bridge.device, bridge._stream
    address = image.ctypes.data + HEADER
    device.driver.copy_async(device.ordinal, address, ring.slots_ptr, count * LINE, stream.handle)
    stream.synchronize()
    found = Slots(image, MESSAGE, count).messages
    right = found is not None and bool((found == messages).all())
    return (seconds if bridge.strategy.copies else None), right


def _to_host(
    bridge: RingBufferBridge, messages: np.ndarray[Any, Any], repeat: int
) -> tuple[float | None, bool]:
    """The device's part is played by copies: slots with their sequences, then the index."""
    ring = bridge.device_output
    count = len(messages)
    written, right = 0, True
    device, stream = bridge.device, bridge._stream
    with PinnedBuffer(HEADER + count * LINE, device=device) as image:
        raw = host_bytes(image.ptr, image.nbytes, image)
        slots = Slots(raw, MESSAGE, count)
        assert slots.messages is not None
        slots.messages[:] = messages
        words = np.frombuffer(raw, np.uint32, offset=HEADER).reshape(count, LINE // 4)

        def prepare() -> None:
            nonlocal written
            words[:, 0] = written // count + 1
            device.driver.copy_async(
                device.ordinal, ring.slots_ptr, image.ptr + HEADER, count * LINE, stream.handle
            )
            stream.synchronize()
            written += count

        def flush() -> None:
            _store(ring.header_ptr + TAIL, written)
            bridge.flush_to_host()

        times = []
        for _ in range(repeat):
            times.append(_median_s(1, prepare, flush))
            got = bridge.recv(timeout_s=5.0)
            right = right and len(got) == count and bool((got == messages).all())
    return (statistics.median(times) if bridge.strategy.copies else None), right


def _store(header_word: int, value: int) -> None:
    """Store an index of the device's; its header is in memory that the host sees too."""
    _native.store_u64(header_word, value)


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{result['device']} ({result['product_name']}), one-line messages")
    table = Table("strategy", "KiB", "way", "GB/s", "of raw", "M messages/s")
    for nbytes, ways in result["raw"].items():
        for way, speed in ways.items():
            table.add_row("raw copy", str(int(nbytes) // 1024), way, f"{speed:.2f}", "", "")
    for name, figures in result["strategies"].items():
        if "refused" in figures:
            console.print(f"{name}: {figures['refused']}")
            continue
        for nbytes, ways in figures.items():
            for way, f in ways.items():
                if f is None:
                    table.add_row(name, str(int(nbytes) // 1024), way, "-", "-", "nothing to move")
                    continue
                table.add_row(
                    name,
                    str(int(nbytes) // 1024),
                    way,
                    f"{f['gb_per_second']:.2f}",
                    f"{f['of_raw']:.1%}",
                    f"{f['messages_per_second'] / 1e6:.1f}",
                )
    console.print(table)
    console.print("verified" if result["verified"] else "NOT verified")
