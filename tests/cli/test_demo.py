"""The demo's verdict depends on the data, and whatever fails, it gives everything back."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import ringmem
from ringmem.buffers import DeviceBuffer
from ringmem.cli.demo import Demo
from ringmem.native import _native
from ringmem.observe import Trace


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
    assert result.verified


@pytest.mark.parametrize("missing", ["copy_from", "copy_to"])
def test_copy_that_does_not_happen_is_found(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, missing: str
) -> None:
    monkeypatch.setattr(DeviceBuffer, missing, lambda *a, **k: None)
    result = Demo.prepare("cpu", None).run(silent)
    assert not result.copies.verified
    assert not result.verified


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
