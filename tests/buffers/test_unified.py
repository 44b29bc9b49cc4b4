"""Managed memory: the host's turn, and hints."""

import numpy as np
import pytest

import ringmem
from ringmem import InvalidValueError, NotSupportedError
from ringmem.native import _native as native


@pytest.fixture(params=[True, False], ids=["concurrent", "exclusive"])
def place(request):
    with ringmem.simulate(
        capacity="256 MiB", latency_s=0.02, concurrent_managed_access=request.param
    ) as simulation:
        yield simulation.devices[0]


def test_the_host_sees_what_the_device_did_and_the_other_way_round(place):
    stream = place.create_stream()
    buffer = ringmem.UnifiedBuffer((2, 3), "i4", device=place)
    buffer.fill(4, stream)
    with buffer.host() as window:
        assert (window == 4).all()
        window[1] = 9
    copy = ringmem.empty((2, 3), "i4", device=place)
    buffer.copy_to(copy)
    assert copy.to_numpy().tolist() == [[4, 4, 4], [9, 9, 9]]
    with buffer[0].host(readonly=True) as window:
        assert not window.flags.writeable
        assert window.tolist() == [4, 4, 4]


def test_outside_host_there_is_no_host_view(place):
    buffer = ringmem.UnifiedBuffer(3, "i4", device=place)
    with pytest.raises(NotSupportedError, match=r"host\(\)"):
        np.asarray(buffer)
    with pytest.raises((NotSupportedError, BufferError), match=r"host\(\)"):
        memoryview(buffer)
    assert not hasattr(buffer, "numpy")


def test_dlpack_is_there_only_where_access_is_concurrent(place):
    buffer = ringmem.UnifiedBuffer(3, "i4", device=place)
    buffer.fill(5, place.create_stream())
    if place.capabilities.concurrent_managed_access:
        assert np.from_dlpack(buffer).tolist() == [5, 5, 5]
    else:
        with pytest.raises(NotSupportedError, match="concurrent managed access"):
            np.from_dlpack(buffer)


def test_the_device_may_not_touch_what_an_exclusive_platform_gave_to_the_host():
    with ringmem.simulate(concurrent_managed_access=False) as simulation:
        place = simulation.devices[0]
        buffer = ringmem.UnifiedBuffer(8, "i4", device=place)
        copy = ringmem.zeros(8, "i4", device=place)
        with buffer.host() as window:
            for use in (
                lambda: buffer.fill(1),
                lambda: buffer[:4].fill(1),
                lambda: buffer.copy_from(copy),
                lambda: copy.copy_from(buffer),
                lambda: buffer.copy_from(np.zeros(8, "i4")),
                lambda: buffer.to_numpy(),
                lambda: buffer.discard(),
            ):
                with pytest.raises(InvalidValueError, match=r"inside host\(\)"):
                    use()
            with pytest.raises(InvalidValueError, match="already"), buffer.host():
                pass
            window[:] = 3
        buffer.copy_to(copy)
        assert copy.to_numpy().tolist() == [3] * 8


def test_the_device_may_touch_it_meanwhile_where_access_is_concurrent():
    with ringmem.simulate() as simulation:
        buffer = ringmem.UnifiedBuffer(8, "i4", device=simulation.devices[0])
        with buffer.host() as window:
            buffer.fill(1)
            buffer.stream.synchronize()
            assert window.tolist() == [1] * 8


def test_a_platform_that_cannot_hand_over_is_refused_and_nothing_changes(faulty):
    driver = native.FaultyDriver(native.HostDriver("devices=1,concurrent_managed_access=0"))
    device = ringmem.devices_of(driver)[0]
    buffer = ringmem.UnifiedBuffer(8, "i4", device=device)
    driver.fail("stream_attach", status=native.Status.not_supported)
    with pytest.raises(NotSupportedError, match="would fault"), buffer.host():
        pass
    buffer.fill(2)
    with buffer.host() as window:
        assert window.tolist() == [2] * 8


def test_a_device_without_managed_memory_says_what_to_use():
    (device,) = ringmem.simulate(managed=False).devices
    with pytest.raises(NotSupportedError, match="DeviceBuffer and a PinnedBuffer"):
        ringmem.UnifiedBuffer(3, device=device)


def test_attach_modes(place):
    stream = place.create_stream()
    with ringmem.UnifiedBuffer(10, "i4", stream=stream, attach="single") as buffer:
        buffer.fill(1)
        assert buffer.to_numpy().tolist() == [1] * 10
    with ringmem.UnifiedBuffer(10, "i4", device=place, attach="host") as buffer:
        with buffer.host() as window:
            window[:] = 2
            assert window.tolist() == [2] * 10
        del window
    with pytest.raises(InvalidValueError, match="attach is 'both'"):
        ringmem.UnifiedBuffer(10, device=place, attach="both")
    with pytest.raises(InvalidValueError, match="default stream"):
        ringmem.UnifiedBuffer(10, device=place, attach="single")


def test_prefetch_is_told_bytes(faulty):
    device = ringmem.devices_of(faulty)[0]
    buffer = ringmem.UnifiedBuffer(1000, "f8", device=device)
    buffer.fill(1.0)
    before = faulty.calls["prefetch"]
    buffer.prefetch("host")
    buffer.prefetch(device, nbytes=8)
    buffer.prefetch(ringmem.devices_of(faulty)[1], nbytes=8000)
    assert faulty.calls["prefetch"] == before + 3
    buffer.prefetch(nbytes=0)
    assert faulty.calls["prefetch"] == before + 3
    buffer.prefetch(nbytes=np.int64(8))
    assert faulty.calls["prefetch"] == before + 4
    for nbytes in (-1, 8001, 1.5, True, np.bool_(True), np.int64(8001), "8"):
        with pytest.raises(InvalidValueError, match="give 0 to 8000"):
            buffer.prefetch(nbytes=nbytes)
    assert (buffer.to_numpy() == 1).all()


def test_advice_and_discard(device, other):
    buffer = ringmem.UnifiedBuffer(1000, "f8", device=device)
    for what in ("read_mostly", "preferred_location", "accessed_by"):
        for location in (None, device, "cpu:1", "host"):
            buffer.advise(f"set_{what}", location)
            buffer.advise(f"unset_{what}", location)
    with pytest.raises(InvalidValueError, match="set_read_mostly"):
        buffer.advise("be quick")
    buffer.discard()
    buffer.fill(3)
    assert (buffer.to_numpy() == 3).all()
    (elsewhere,) = ringmem.simulate().devices
    other_driver = (
        r"is cpu:0 of another driver \(such as a simulation's\), but the buffer is on cpu:0"
    )
    with pytest.raises(InvalidValueError, match=f"to {other_driver}: give 'host' or a device"):
        buffer.prefetch(elsewhere)
    with pytest.raises(InvalidValueError, match=f"location {other_driver}"):
        buffer.advise("set_read_mostly", elsewhere)


@pytest.mark.parametrize("bad", [3, True, ["host"], ringmem.Device])
def test_a_place_that_is_none_is_refused_by_the_arguments_name(device, bad):
    buffer = ringmem.UnifiedBuffer(1000, "f8", device=device)
    for name, hint in (
        ("to", lambda: buffer.prefetch(to=bad)),
        ("location", lambda: buffer.advise("set_read_mostly", location=bad)),
    ):
        with pytest.raises(InvalidValueError, match=f"^{name} is .*: give 'host', a Device") as e:
            hint()
        assert repr(bad) in str(e.value)


def test_a_platform_that_takes_no_hints_says_so():
    with ringmem.simulate(concurrent_managed_access=False) as simulation:
        buffer = ringmem.UnifiedBuffer(1000, device=simulation.devices[0])
        for hint in (buffer.prefetch, lambda: buffer.advise("set_read_mostly")):
            with pytest.raises(NotSupportedError, match="takes no hints"):
                hint()


def test_memory_of_the_host_is_refused_to_the_device_until_it_is_attached_otherwise():
    with ringmem.simulate(concurrent_managed_access=False) as simulation:
        place = simulation.devices[0]
        with ringmem.UnifiedBuffer(4, "f4", device=place, attach="host") as buffer:
            assert buffer.attached == buffer[:2].attached == "host"
            with buffer.host() as window:
                window[:] = 3
            del window
            assert buffer.to_numpy().tolist() == [3] * 4
            for use in (lambda: buffer.fill(1), lambda: buffer.copy_from(np.zeros(4, "f4"))):
                with pytest.raises(InvalidValueError, match=r'attach\("global"\)'):
                    use()
            buffer.attach("global")
            buffer.fill(5)
            assert buffer.to_numpy().tolist() == [5] * 4
            buffer.attach("host")
            assert buffer.to_numpy().tolist() == [5] * 4
        assert ringmem.zeros(3, device=place).to_numpy().tolist() == [0] * 3


def test_leaving_host_gives_the_memory_back_to_whom_it_was_attached():
    driver = native.FaultyDriver(native.HostDriver("devices=1,concurrent_managed_access=0"))
    place = ringmem.devices_of(driver)[0]
    stream = place.create_stream()
    with ringmem.UnifiedBuffer(4, "f4", device=place, stream=stream, attach="single") as buffer:
        with buffer.host() as window:
            window[:] = 3
            with pytest.raises(InvalidValueError, match=r"inside host\(\)"):
                buffer.attach("global")
        del window
        assert buffer.attached == "single"
        driver.fail("stream_attach")
        with pytest.raises(ringmem.DriverError):
            buffer.attach("global")
        assert buffer.attached == "single"
        buffer.fill(7)
        assert buffer.to_numpy().tolist() == [7] * 4
    with pytest.raises(InvalidValueError, match="own"):
        ringmem.UnifiedBuffer(4, "f4", device=place, attach="single")
    native.flush_reaper(10.0)
    assert driver.live.get("managed", 0) == 0
