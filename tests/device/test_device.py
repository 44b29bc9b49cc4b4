"""Devices: found by name, one object each, with what they can do."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref

import pytest

import ringmem
from ringmem import Device
from ringmem.native import _native


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- names -------------------------------------------------------------------------------------


def test_there_is_one_object_a_device(pair):
    assert Device("cpu") is Device("cpu:0") is pair[0]
    assert Device("cpu:1") is pair[1]
    assert Device(pair[1]) is pair[1]
    assert len({Device("cpu"), Device("cpu:0"), Device("cpu:1")}) == 2


def test_one_object_a_device_also_when_threads_race():
    driver = _native.HostDriver("devices=1")
    barrier = threading.Barrier(8)
    found = []

    def find():
        barrier.wait()
        found.append(ringmem.devices_of(driver)[0])

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(d) for d in found}) == 1


def test_devices_lists_what_device_finds(pair):
    assert ringmem.devices("cpu") == pair
    assert ringmem.devices()[-2:] == pair


def test_devices_of_a_driver_are_its_own(pair):
    driver = _native.HostDriver("devices=3")
    mine = ringmem.devices_of(driver)
    assert [d.name for d in mine] == ["cpu:0", "cpu:1", "cpu:2"]
    assert mine[0] is not pair[0]
    assert mine[0].driver is driver
    assert ringmem.devices_of(driver) == mine


@pytest.mark.parametrize("name", ["cpu:2", "cpu:99999999999999999999"])
def test_an_ordinal_that_is_not_there_names_those_that_are(pair, name):
    with pytest.raises(ringmem.InvalidDeviceError) as caught:
        Device(name)
    assert name in str(caught.value)
    assert "cpu:0, cpu:1" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "gpu", "cpu:", "cpu:-1", "cpu:x", "CPU", "cuda:0:1", "cpu: 0", "cpu:٣"]
)
def test_a_name_that_is_none_says_what_would_do(pair, name):
    with pytest.raises(ringmem.InvalidDeviceError, match="cpu:0, cpu:1") as caught:
        Device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("bad", [0, 1.5, b"cpu", object()])
def test_what_is_no_name_at_all_is_refused(bad):
    with pytest.raises(ringmem.InvalidValueError, match="device is "):
        Device(bad)


def test_an_unknown_platform_is_refused():
    with pytest.raises(ringmem.InvalidDeviceError, match="'tpu'"):
        ringmem.devices("tpu")


def test_a_native_device_with_a_bad_ordinal_is_refused():
    driver = _native.HostDriver("devices=1")
    with pytest.raises(ringmem.InvalidDeviceError, match="cpu:1"):
        _native.DeviceBase(driver, 1)


# --- the default -------------------------------------------------------------------------------


def test_the_default_device_is_the_environments():
    code = "import ringmem; print(ringmem.default_device().name, ringmem.Device().name)"
    result = run_python(code, RINGMEM_DEVICE="cpu:1", RINGMEM_SIMULATE="devices=2")
    assert result.stdout.split() == ["cpu:1", "cpu:1"], result.stderr


def test_the_default_device_is_a_cpu_without_cuda():
    code = "import ringmem; print(ringmem.default_device().name)"
    result = run_python(code, RINGMEM_CUDA_LIBRARY="/nowhere/libcuda.so.1", RINGMEM_DEVICE="")
    assert result.stdout.strip() == "cpu:0", result.stderr


def test_the_default_device_follows_the_environment_simulations_and_forks():
    code = """
import os, ringmem
names = [ringmem.default_device().name]
os.environ["RINGMEM_DEVICE"] = "cpu:1"
names.append(ringmem.default_device().name)
with ringmem.simulate() as simulation:
    assert ringmem.default_device() is simulation.devices[0]
    names.append(ringmem.default_device().name)
names.append(ringmem.default_device().name)
del os.environ["RINGMEM_DEVICE"]
names.append(ringmem.default_device().name)
generation = ringmem.device.platforms.generation
if os.fork() == 0:
    os._exit(ringmem.device.platforms.generation == generation)
names.append(str(os.wait()[1]))
print(*names)
"""
    result = run_python(
        code,
        RINGMEM_SIMULATE="devices=2",
        RINGMEM_DEVICE="",
        RINGMEM_CUDA_LIBRARY="/nowhere/libcuda.so.1",
    )
    expected = ["cpu:0", "cpu:1", "cpu:0", "cpu:1", "cpu:0", "0"]
    assert result.stdout.split() == expected, result.stderr


def test_a_simulation_that_was_the_default_is_not_kept_alive():
    with ringmem.simulate() as simulation:
        ringmem.default_device()
    device = weakref.ref(simulation.devices[0])
    del simulation
    gc.collect()
    assert device() is None


def test_an_environment_that_names_no_device_is_an_error():
    result = run_python("import ringmem; ringmem.default_device()", RINGMEM_DEVICE="cpu:7")
    assert "InvalidDeviceError" in result.stderr
    assert "RINGMEM_DEVICE is 'cpu:7'" in result.stderr


@pytest.mark.parametrize("name", ["nonsense", "cuda:0"])
def test_the_variable_that_names_a_wrong_default_is_named(name, monkeypatch):
    monkeypatch.setattr(_native, "environment_value", {"RINGMEM_DEVICE": name}.get)
    if name == "cuda:0" and ringmem.devices("cuda"):
        pytest.skip("there is one")
    with pytest.raises(ringmem.DriverError, match=f"RINGMEM_DEVICE is '{name}': '{name}' n"):
        ringmem.empty(3)


def test_in_a_simulation_its_first_device_is_the_default(pair):
    assert ringmem.default_device() is pair[0]


def test_no_cuda_driver_names_the_remedy_and_is_an_empty_list():
    code = (
        "import ringmem\n"
        "assert ringmem.devices('cuda') == []\n"
        "assert [d.platform for d in ringmem.devices()] == ['cpu']\n"
        "try: ringmem.Device('cuda:0')\n"
        "except ringmem.NotInitializedError as error: print(error)\n"
    )
    result = run_python(code, RINGMEM_CUDA_LIBRARY="/nowhere/libcuda.so.1", RINGMEM_SIMULATE="")
    assert result.returncode == 0, result.stderr
    for part in ("'cuda:0'", "Install the NVIDIA driver", "RINGMEM_CUDA_LIBRARY", "Device('cpu')"):
        assert part in result.stdout


# --- what it is --------------------------------------------------------------------------------


def test_a_device_says_what_it_is(device):
    assert device.name == "cpu:0"
    assert device.platform == "cpu"
    assert device.ordinal == 0
    assert device.product_name
    assert device.uuid.startswith("CPU-")
    assert device.uuid != Device("cpu:1").uuid
    assert repr(device) == "Device('cpu:0')"


def test_memory_info_follows_allocation(device):
    before = device.memory_info()
    assert before.total == 256 << 20
    ptr = device.driver.mem_alloc(0, 64 << 20)
    assert before.free - device.memory_info().free >= 64 << 20
    device.driver.mem_free(0, ptr)
    assert device.memory_info() == before


def test_capabilities_are_asked_once(faulty):
    device = ringmem.devices_of(faulty)[0]
    first = device.capabilities
    asked = faulty.calls["attribute"]
    assert asked > 20
    assert device.capabilities is first
    assert device.compute_capability == first.compute_capability
    assert faulty.calls["attribute"] == asked


def test_capabilities_follow_the_configuration():
    able = ringmem.simulate().devices[0].capabilities
    unable = ringmem.simulate(
        virtual_memory=False, pools=False, managed=False, cooperative_launch=False
    ).devices[0]
    for field in ("virtual_memory", "memory_pools", "managed_memory", "cooperative_launch"):
        assert getattr(able, field) is True, field
        assert getattr(unable.capabilities, field) is False, field
    assert able.granularity_nbytes == 2 << 20
    assert unable.capabilities.granularity_nbytes == 0
    with pytest.raises(ringmem.NotSupportedError, match="virtual memory"):
        _ = unable.granularity


def test_granularity_is_the_drivers():
    device = ringmem.simulate(granularity="64 KiB").devices[0]
    assert device.granularity == 64 << 10


def test_host_access_follows_the_strict_setting():
    assert ringmem.simulate().devices[0].host_accessible is True
    assert ringmem.simulate(strict=True).devices[0].host_accessible is False


def test_an_attribute_that_the_driver_does_not_know_counts_as_absent(faulty):
    device = ringmem.devices_of(faulty)[0]
    faulty.fail("attribute", nth=1, status=_native.Status.not_supported, times=100)
    assert device.capabilities.cooperative_launch is False


def test_devices_are_pickled_by_name(pair):
    assert pickle.loads(pickle.dumps(pair)) == pair
    pickled = pickle.dumps(pair[1])
    with ringmem.simulate(devices=1), pytest.raises(ringmem.InvalidDeviceError, match="cpu:1"):
        pickle.loads(pickled)


def test_a_copy_of_a_device_is_the_device_also_of_a_simulation(pair):
    outside = ringmem.simulate().devices[0]
    for device in (*pair, outside):
        assert copy.copy(device) is device
        assert copy.deepcopy([device])[0] is device


def test_a_device_whose_name_means_another_one_is_not_pickled(pair):
    first, third = (ringmem.simulate(devices=3).devices[i] for i in (0, 2))
    with pytest.raises(
        ringmem.NotSupportedError, match=r"'cpu:0'.*another device.*with simulation"
    ):
        pickle.dumps(first)
    with pytest.raises(ringmem.NotSupportedError, match=r"'cpu:2'.*no device"):
        pickle.dumps([third])


def test_synchronize_waits_for_everything():
    device = ringmem.simulate(latency_s=0.05).devices[0]
    stream = device.create_stream()
    ptr = device.driver.mem_alloc(0, 4096)
    device.driver.fill_async(0, ptr, 1, 4, 1024, stream.handle)
    assert not stream.query()
    device.synchronize()
    assert stream.query()


# --- the allocator of a thread -----------------------------------------------------------------


def test_use_overrides_the_allocator_of_this_thread_only(pair):
    device, other = pair
    foreign = ringmem.Pool(device).native_allocator
    seen = []
    with device.use(foreign):
        assert device.current_allocator is foreign
        assert other.current_allocator is other.allocator
        thread = threading.Thread(target=lambda: seen.append(device.current_allocator))
        thread.start()
        thread.join()
        with device.use(device.allocator):
            assert device.current_allocator is device.allocator
        assert device.current_allocator is foreign
    assert device.current_allocator is device.allocator
    assert seen == [device.allocator]


def test_use_ends_with_an_exception(device):
    with pytest.raises(KeyError), device.use(ringmem.Pool(device)):
        raise KeyError
    assert device.current_allocator is device.allocator


def test_a_scope_that_is_never_entered_says_so():
    with pytest.warns(RuntimeWarning, match=r"cpu:0.use\(…\) changes nothing outside a with"):
        Device("cpu").use(Device("cpu").allocator)


def test_use_takes_whatever_has_a_native_allocator(device):
    class Owner:
        native_allocator = ringmem.Pool(device).native_allocator

    with device.use(Owner()):
        assert device.current_allocator is Owner.native_allocator


@pytest.mark.parametrize("bad", [None, 3, "pool"])
def test_use_refuses_what_is_no_allocator(device, bad):
    with pytest.raises(ringmem.InvalidValueError, match="allocator is "), device.use(bad):
        pass
    assert device.current_allocator is device.allocator


def test_the_allocator_fits_the_device():
    assert isinstance(ringmem.simulate().devices[0].allocator, _native.StreamOrderedAllocator)
    plain = ringmem.simulate(pools=False).devices[0].allocator
    assert isinstance(plain, _native.PlainAllocator)
    assert plain.may_block


def test_the_devices_default_driver_pool_is_left_alone(device):
    driver, attribute = device.driver, _native.PoolAttribute.release_threshold
    default = driver.pool_default(0)
    before = driver.pool_get(0, default, attribute)
    own = device.allocator.pool
    assert own != default
    assert driver.pool_get(0, own, attribute) == 2**64 - 1
    assert driver.pool_get(0, default, attribute) == before
    assert driver.pool_current(0) == default


# --- lifetime ----------------------------------------------------------------------------------


def test_a_simulated_device_goes_with_its_last_holder():
    simulation = ringmem.simulate(devices=2)
    kept = [weakref.ref(d) for d in simulation.devices]
    stream = simulation.devices[0].create_stream()
    stream.device.default_stream.query()
    del simulation
    assert kept[1]() is None
    assert kept[0]() is stream.device
    del stream
    assert kept[0]() is None


def test_staging_that_a_device_keeps_does_not_keep_the_device():
    simulation = ringmem.simulate(devices=2, peers=False)
    a, b = simulation.devices
    src, dst = a.driver.mem_alloc(0, 64), b.driver.mem_alloc(1, 64)
    ringmem.copy_peer(dst, b, src, a, 64)
    b.default_stream.synchronize(timeout_s=10)
    kept = weakref.ref(a)
    del simulation, a, b
    gc.collect()
    assert kept() is None


def test_the_own_pool_goes_with_the_device(faulty):
    device = ringmem.devices_of(faulty)[0]
    assert device.allocator.pool
    assert faulty.live["pool"] == 1
    del device
    assert faulty.live["pool"] == 0


@pytest.mark.parametrize("operation", ["pool_create", "pool_set"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pool_that_cannot_be_made_leaves_nothing(faulty, operation, when):
    device = ringmem.devices_of(faulty)[0]
    faulty.fail(operation, when=when)
    with pytest.raises(ringmem.DriverError, match="cuMemPool"):
        _ = device.allocator.pool
    assert faulty.live["pool"] == 0
    assert device.allocator.pool
