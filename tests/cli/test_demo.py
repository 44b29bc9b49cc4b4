"""The demo's verdict depends on the data, and whatever fails, it gives everything back."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ringmem
from ringmem.buffers import DeviceBuffer
from ringmem.cli import demo_report, demo_ring
from ringmem.cli.demo import Demo
from ringmem.cli.demo_growable import grow
from ringmem.native import _native
from ringmem.observe import Trace
from ringmem.ring import cache, handlers
from ringmem.ring.cuda_build import compile_handler_source
from ringmem.virtual import GrowableBuffer


@pytest.fixture
def trace() -> Trace:
    return Trace.from_arrays(
        kind=[1, 1, 2, 3, 1], id=[0, 1, 0, 0, 2], size=[4096, 7, 0, 0, 1 << 20],
        stream=[0, 1, 0, 0, 2],
    )  # fmt: skip


def silent(step: str, done: int, total: int) -> None:
    pass


def run(trace: Trace, device: ringmem.Device) -> object:
    return Demo(device, trace).run(silent)


def test_everything_is_verified_on_a_sound_device(trace: Trace) -> None:
    with ringmem.simulate() as simulation:
        result = Demo(simulation.devices[0], trace).run(silent)
    assert (result.marks, result.marks_right) == (2, 2)  # 7 bytes hold no two marks
    assert result.growable.verified
    assert result.ring.verified
    assert (result.ring.messages, result.ring.peak_live_bytes) == (5, (1 << 20) + 7)
    assert result.verified


@pytest.mark.parametrize("missing", ["copy_from", "copy_to"])
def test_copy_that_does_not_happen_is_found(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, missing: str
) -> None:
    monkeypatch.setattr(DeviceBuffer, missing, lambda *a, **k: None)
    result = Demo.prepare("cpu", None).run(silent)
    assert not result.copies.verified
    assert not result.verified


def test_growing_buffer_that_loses_its_content_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceBuffer, "copy_from", lambda *a, **k: None)
    growth = grow(ringmem.Device("cpu"), ringmem.Device("cpu").default_stream, silent)
    assert not growth.moved
    assert growth.verified is False


def test_growing_buffer_that_moves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(GrowableBuffer):
        @property
        def ptr(self) -> int:
            return super().ptr + len(self)

    monkeypatch.setattr("ringmem.virtual.GrowableBuffer", Moving)
    growth = grow(ringmem.Device("cpu"), ringmem.Device("cpu").default_stream, silent)
    assert growth.moved
    assert growth.intact
    assert growth.verified is False


def test_device_without_virtual_memory_is_told_and_the_rest_is_done(trace: Trace) -> None:
    with ringmem.simulate(virtual_memory=False) as simulation:
        result = Demo(simulation.devices[0], trace).run(silent)
    assert result.growable.verified is None
    assert "virtual memory" in result.to_dict()["growable"]["skipped"]
    assert result.verified
    demo_report.show(result)


def wrong_at_the_end(message, reply, state):
    state.live += message.nbytes
    state.peak = max(state.peak, state.live)
    reply.live = state.live
    reply.peak = state.peak
    return 0


def refusing(message, reply, state):
    return 3


@pytest.mark.parametrize("handler", [wrong_at_the_end, refusing])
def test_ring_kernel_that_answers_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, handler: Any
) -> None:
    monkeypatch.setattr(demo_ring, "handle_event", handler)
    if handler is refusing:
        monkeypatch.setattr(demo_ring, "_CALLS", 0)  # a call raises the status
    streamed = demo_ring.stream_events(ringmem.Device("cpu"), trace, silent)
    assert streamed.verified is False


def test_ring_kernel_works_without_numba_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cache.version_of
    monkeypatch.setattr(cache, "version_of", lambda *n: None if "numba" in n else real(*n))
    monkeypatch.setattr(handlers, "_said", set())
    streamed = demo_ring.stream_events(ringmem.Device("cpu"), Trace.shipped(), silent)
    assert streamed.verified
    assert "plain Python" in streamed.to_dict()["handler"]


def test_kernel_that_cannot_be_built_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*arguments: Any, **options: Any) -> Any:
        raise ringmem.NotSupportedError("needs cuda.core: pip install 'ringmem[cuda13]'")

    monkeypatch.setattr("ringmem.ring.RingKernel", build)
    with ringmem.simulate() as simulation:
        result = Demo(simulation.devices[0], trace).run(silent)
    ring = result.to_dict()["ring"]
    assert (ring["messages"], ring["verified"]) == (0, None)
    assert "pip install" in ring["skipped"]
    assert result.verified
    demo_report.show(result)
    assert "'ringmem[cuda13]'" in capsys.readouterr().out  # brackets are no markup


def test_cuda_source_stands_in_where_python_cannot_be_compiled_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def build(handler: Any, **options: Any) -> Any:
        if callable(handler):
            raise ringmem.NotSupportedError("needs Numba")
        made.append((handler, options))

    monkeypatch.setattr("ringmem.ring.RingKernel", build)
    _, described = demo_ring._make_kernel(SimpleNamespace(platform="cuda"))
    [(handler, options)] = made
    assert handler.text == demo_ring.CUDA_SOURCE
    assert "CUDA C++" in described
    assert options["deadline_s"] > 0


def test_cuda_source_compiles() -> None:
    pytest.importorskip("cuda.core")
    assert compile_handler_source(demo_ring.CUDA_SOURCE, "handler", None, (9, 0))


def test_mark_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    monkeypatch.setattr(DeviceBuffer, "fill", lambda *a, **k: None)
    with ringmem.simulate() as simulation:
        result = Demo(simulation.devices[0], trace).run(silent)
    assert (result.marks, result.marks_right) == (2, 0)
    assert result.copies.verified
    assert not result.verified


def test_single_byte_that_differs_is_found(monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    real = DeviceBuffer.copy_to

    def damage(self: DeviceBuffer, target: object, stream: object = None) -> None:
        if self.nbytes > 1 << 20:
            self.view(np.uint8)[12345:12346].fill(0xA5, stream=stream)
        real(self, target, stream=stream)

    monkeypatch.setattr(DeviceBuffer, "copy_to", damage)
    with ringmem.simulate() as simulation:
        assert not Demo(simulation.devices[0], trace).run(silent).verified


def test_demo_works_without_driver_pools(trace: Trace) -> None:
    with ringmem.simulate(pools=False) as simulation:
        result = Demo(simulation.devices[0], trace).run(silent)
    assert result.reserved_peak_bytes is None
    assert result.verified


@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        ("stream_create", 2),
        ("pool_alloc_async", 2),
        ("fill_async", 3),
        ("copy_async", 2),
        ("copy_async", 20),
        ("host_alloc", 1),
        ("host_alloc", 3),
        ("stream_synchronize", 1),
        ("mem_create", 2),
        ("mem_map", 2),
    ],
)
def test_failure_on_the_way_loses_nothing(trace: Trace, operation: str, nth: int) -> None:
    faulty = _native.FaultyDriver(_native.HostDriver(""))
    device = ringmem.devices_of(faulty)[0]
    run(trace, device)  # what the device keeps for itself is there from now on
    gc.collect()
    assert _native.flush_reaper(timeout_s=30)
    before = dict(faulty.live)
    faulty.fail(operation, nth=nth)
    with pytest.raises(ringmem.DriverError):
        run(trace, device)
    faulty.clear()
    gc.collect()
    assert _native.flush_reaper(timeout_s=30)
    assert dict(faulty.live) == before


@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        ("address_reserve", 1), ("mem_create", 3), ("mem_map", 1), ("mem_set_access", 2),
        ("copy_async", 4),
    ],
)  # fmt: skip
def test_failure_while_the_buffer_grows_loses_nothing(operation: str, nth: int) -> None:
    faulty = _native.FaultyDriver(_native.HostDriver(""))
    device = ringmem.devices_of(faulty)[0]
    grow(device, device.default_stream, silent)
    gc.collect()
    assert _native.flush_reaper(timeout_s=30)
    before = dict(faulty.live)
    faulty.fail(operation, nth=nth)
    with pytest.raises(ringmem.DriverError):
        grow(device, device.default_stream, silent)
    faulty.clear()
    gc.collect()
    assert _native.flush_reaper(timeout_s=30)
    assert dict(faulty.live) == before


def test_running_out_of_memory_gives_everything_back() -> None:
    with ringmem.simulate(capacity="1 GiB") as simulation:
        device = simulation.devices[0]
        free = device.memory_info().free
        with pytest.raises(ringmem.OutOfMemoryError):
            Demo(device, Trace.shipped()).run(silent)
        device.synchronize()
        pool = device.allocator.pool
        device.driver.pool_trim(device.ordinal, pool, 0)
        assert device.memory_info().free == free


def test_wrong_arguments_are_found_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ringmem.InvalidDeviceError, match="cpu:77"):
        Demo.prepare("cpu:77", None)
    with pytest.raises(ringmem.InvalidValueError, match="there is no file"):
        Demo.prepare("cpu", tmp_path / "none.npz")
