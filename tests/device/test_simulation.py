"""Simulated devices by API and by environment."""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ringmem
from ringmem import Device


def test_a_simulation_stands_in_for_the_cpu_inside_its_block_only():
    outside = Device("cpu")
    with ringmem.simulate(devices=2) as outer:
        assert Device("cpu:1") is outer.devices[1]
        with ringmem.simulate() as inner:
            assert Device("cpu") is inner.devices[0]
            with pytest.raises(ringmem.InvalidDeviceError):
                Device("cpu:1")
        assert Device("cpu") is outer.devices[0]
    assert Device("cpu") is outside


def test_a_simulation_is_seen_by_all_threads():
    with ringmem.simulate(devices=3):
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(ringmem.devices("cpu")))
        thread.start()
        thread.join()
    assert len(seen) == 3


def test_blocks_may_end_in_any_order():
    first, second = ringmem.simulate(), ringmem.simulate()
    outside = Device("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Device("cpu") is second.devices[0]
    second.__exit__(None, None, None)
    assert Device("cpu") is outside


def test_devices_work_without_and_after_the_block():
    with ringmem.simulate(capacity="64 MiB") as simulation:
        device = simulation.devices[0]
    stream = device.create_stream()
    ptr = device.driver.mem_alloc(0, 4096)
    device.driver.fill_async(0, ptr, 3, 4, 1024, stream.handle)
    stream.synchronize(timeout_s=10)
    assert device.memory_info().total == 64 << 20


def test_settings_reach_the_devices():
    device = ringmem.simulate(
        capacity="1 GiB", granularity=1 << 16, latency_s=0.02, name="tiny", pools=False
    ).devices[0]
    assert device.memory_info().total == 1 << 30
    assert device.granularity == 1 << 16
    assert device.product_name == "tiny"
    assert not device.capabilities.memory_pools
    stream = device.create_stream()
    ptr = device.driver.mem_alloc(0, 64)
    start = time.monotonic()
    device.driver.fill_async(0, ptr, 1, 1, 64, stream.handle)
    stream.synchronize(timeout_s=10)
    assert time.monotonic() - start >= 0.02


def test_peers_are_all_none_or_the_pairs_given():
    def links(peers):
        matrix = ringmem.peer_matrix(ringmem.simulate(devices=3, peers=peers).devices)
        return {
            (i, j)
            for i, row in enumerate(matrix.can_access)
            for j, able in enumerate(row)
            if able and i < j
        }

    assert links(True) == {(0, 1), (0, 2), (1, 2)}
    assert links(False) == links([]) == set()
    assert links([(0, 2)]) == links({(2, 0)}) == {(0, 2)}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"devices": 33}, "devices is 33"),
        ({"devices": 1.5}, "devices is 1.5"),
        ({"devices": True}, "devices is True"),
        ({"capacity": "much"}, "capacity is 'much'"),
        ({"capacity": -1}, "capacity is -1"),
        ({"capacity": 0}, "capacity is 0: give one granule"),
        ({"granularity": 3000}, "granularity is 3000: give a power of two"),
        ({"granularity": "x"}, "granularity is 'x'"),
        ({"latency_s": -1}, "latency_s is -1"),
        ({"latency_s": float("nan")}, "latency_s is nan"),
        ({"latency_s": "1"}, "latency_s is '1'"),
        ({"latency_s": True}, "latency_s is True"),
        ({"latency_s": np.bool_(True)}, "latency_s is np.True_"),
        ({"latency_s": 3601}, "latency_s is 3601: give seconds from 0 to 3600"),
        ({"devices": 2.0}, "devices is 2.0"),
        ({"devices": 2, "peers": [(True, False)]}, r"peers holds \(True, False\)"),
        ({"strict": 1}, "strict is 1"),
        ({"pools": None}, "pools is None"),
        ({"peers": [(0, 0)]}, r"peers holds \(0, 0\)"),
        ({"peers": [(0, 1)]}, r"peers holds \(0, 1\)"),
        ({"peers": ["01"]}, "peers holds '01'"),
        ({"flying": True}, "flying"),
        ({"name": "a,devices=3"}, "name is 'a,devices=3'"),
        ({"name": ""}, "name is ''"),
        ({"name": 1}, "name is 1: give a text"),
        ({"peers": 1}, "peers is 1: give True, False or pairs"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named_with_its_value(settings, named):
    with pytest.raises(ringmem.InvalidValueError, match=named):
        ringmem.simulate(**settings)


def test_numbers_of_numpy_are_numbers():
    simulation = ringmem.simulate(
        devices=np.int64(3),
        latency_s=np.float32(0.25),
        peers=[(np.uint8(0), np.int32(2))],
        strict=np.bool_(True),
    )
    a, b, c = simulation.devices
    assert ringmem.can_access_peer(a, c)
    assert not ringmem.can_access_peer(a, b)
    assert not a.host_accessible
    stream = a.create_stream()
    begin = time.monotonic()
    a.driver.fill_async(0, a.driver.mem_alloc(0, 64), 1, 1, 64, stream.handle)
    stream.synchronize(timeout_s=np.float32(10))
    assert time.monotonic() - begin >= 0.25


def test_a_simulation_takes_its_threads_with_it():
    def work():
        device = ringmem.simulate(capacity="64 MiB").devices[0]
        stream = device.create_stream()
        ptr = device.driver.mem_alloc(0, 4096)
        device.driver.fill_async(0, ptr, 3, 4, 1024, stream.handle)
        stream.synchronize(timeout_s=10)
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    assert work() > before
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) == before


def run_with(setting, code):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RINGMEM_SIMULATE": setting},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_environment_configures_the_cpu_devices():
    result = run_with(
        "devices=2, capacity=8GiB, peers=none, pools=0",
        "import ringmem\n"
        "a, b = ringmem.devices('cpu')\n"
        "print(a.memory_info().total, ringmem.can_access_peer(a, b), a.capabilities.memory_pools)",
    )
    assert result.stdout.split() == [str(8 << 30), "False", "False"], result.stderr


@pytest.mark.parametrize("setting", ["devices=none", "planes=2", "devices"])
def test_an_environment_that_makes_no_sense_is_an_error_that_quotes_it(setting):
    result = run_with(setting, "import ringmem; ringmem.devices('cpu')")
    assert result.returncode != 0
    assert f'InvalidValueError: RINGMEM_SIMULATE is "{setting}": ' in result.stderr
    assert ": give " in result.stderr or "; give " in result.stderr


def test_product_names_tell_simulated_devices_apart():
    with ringmem.simulate(devices=3, name="tiny") as simulation:
        assert [d.product_name for d in simulation.devices] == ["tiny 0", "tiny 1", "tiny 2"]


def test_a_misspelt_argument_is_named_with_what_can_be_switched_off():
    with pytest.raises(ringmem.InvalidValueError, match="capacitty is .*virtual_memory"):
        ringmem.simulate(capacitty="1 GiB")
