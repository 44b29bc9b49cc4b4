"""What `ringmem bench ring` is compared with: the same message by ways at hand without a ring."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ringmem.device import Device

__all__ = ["peers"]

_MESSAGE = bytes(56)


def peers(device: Device, count: int) -> dict[str, dict[str, float]]:
    """Measure each way that is installed here: name -> p50 and p99 in us, or messages a second."""
    found: dict[str, dict[str, float]] = {}
    ways: dict[str, Callable[[int], dict[str, float]]] = {
        "multiprocessing.Queue": lambda n: _queues(multiprocessing.get_context("spawn").Queue, n),
    }
    if importlib.util.find_spec("faster_fifo") is not None:
        ways["faster-fifo"] = _faster_fifo
    if device.platform == "cuda":
        ways |= {
            "launch + sync": lambda n: _launches(device, n),
            "graph launch + sync": lambda n: _graphs(device, n),
            "64-byte copy + sync": lambda n: _copies(device, n),
        }
    for name, way in ways.items():
        with contextlib.suppress(ImportError, NotImplementedError):
            found[name] = way(count)
    return found


def _quantiles(times_ns: list[int]) -> dict[str, float]:
    us = np.asarray(times_ns) / 1000.0
    return {
        "rtt_us_p50": round(float(np.percentile(us, 50)), 3),
        "rtt_us_p99": round(float(np.percentile(us, 99)), 3),
    }


def _timed(action: Callable[[], object], count: int) -> dict[str, float]:
    for _ in range(20):
        action()
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    return _quantiles(times)


# --- queues between processes --------------------------------------------------------------------
def _answer(requests: Any, replies: Any) -> None:
    """The child: an echo, until it is told to stop."""
    while (message := requests.get()) is not None:
        replies.put(message)


def _queues(make: Callable[[], Any], count: int) -> dict[str, float]:
    requests, replies = make(), make()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_answer, args=(requests, replies), daemon=True)
    child.start()
    try:
        requests.put(_MESSAGE)
        replies.get(timeout=60)

        def trip() -> None:
            requests.put(_MESSAGE)
            replies.get(timeout=60)

        found = _timed(trip, count)
        many = count * 10
        start = time.perf_counter()
        for _ in range(many):
            requests.put(_MESSAGE)
        for _ in range(many):
            replies.get(timeout=60)
        found["messages_per_second"] = round(many / (time.perf_counter() - start))
        return found
    finally:
        requests.put(None)
        child.join(5)
        child.kill()


def _faster_fifo(count: int) -> dict[str, float]:
    queue = importlib.import_module("faster_fifo").Queue
    return _queues(queue, count)


# --- the ways of CUDA without a ring ------------------------------------------------------------
_EMPTY = 'extern "C" __global__ void empty() {}'


def _compiled(device: Device) -> tuple[Any, Any, Any, Any]:
    """(cuda.core device, stream, launch configuration, empty kernel)."""
    from cuda.core import Device as CoreDevice
    from cuda.core import LaunchConfig, Program, ProgramOptions

    core = CoreDevice(device.ordinal)
    core.set_current()
    arch = "sm_" + "".join(str(part) for part in device.compute_capability)
    program = Program(_EMPTY, code_type="c++", options=ProgramOptions(arch=arch))
    kernel = program.compile("cubin").get_kernel("empty")
    return core, core.create_stream(), LaunchConfig(grid=1, block=1), kernel


def _launches(device: Device, count: int) -> dict[str, float]:
    from cuda.core import launch

    _, stream, config, kernel = _compiled(device)

    def trip() -> None:
        launch(stream, config, kernel)
        stream.sync()

    return _timed(trip, count)


def _graphs(device: Device, count: int) -> dict[str, float]:
    from cuda.core import launch

    _, stream, config, kernel = _compiled(device)
    builder = stream.create_graph_builder()
    builder.begin_building()
    launch(builder, config, kernel)
    graph = builder.end_building().complete()

    def trip() -> None:
        graph.launch(stream)
        stream.sync()

    return _timed(trip, count)


def _copies(device: Device, count: int) -> dict[str, float]:
    from ringmem.buffers import DeviceBuffer, PinnedBuffer

    stream = device.create_stream()
    there = DeviceBuffer(64, "u1", device=device, stream=stream)
    here = PinnedBuffer(64, "u1", device=device)
    driver = device.driver

    def trip() -> None:
        driver.copy_async(device.ordinal, there.ptr, here.ptr, 64, stream.handle)
        stream.synchronize()

    return _timed(trip, count)
