"""Memory from users' objects, and from whatever stands in for the device's own allocator."""

import gc

import pytest

import ringmem
from ringmem import AllocationFailedError, InvalidValueError


class Recorder:
    """Gives memory of the driver and writes down what happened."""

    def __init__(self, device, operation="mem"):
        self.device, self.log, self.live = device, [], {}
        self.managed = operation == "managed"
        self.host = operation == "host"

    def allocate(self, nbytes, stream):
        driver = self.device.driver
        alloc = driver.managed_alloc if self.managed else driver.mem_alloc
        ptr = driver.host_alloc(0, nbytes) if self.host else alloc(0, nbytes)
        self.live[ptr] = nbytes
        self.log.append(("allocate", nbytes, stream))
        return ptr

    def deallocate(self, ptr, nbytes, stream):
        assert self.live.pop(ptr) == nbytes
        (self.device.driver.host_free if self.host else self.device.driver.mem_free)(0, ptr)
        self.log.append(("deallocate", nbytes, stream))


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (ringmem.DeviceBuffer, "mem"),
        (ringmem.empty, "mem"),
        (ringmem.zeros, "mem"),
        (ringmem.PinnedBuffer, "host"),
        (ringmem.UnifiedBuffer, "managed"),
    ],
)
def test_a_users_object_gives_and_takes_back(device, make, operation):
    allocator = Recorder(device, operation)
    stream = device.create_stream()
    buffer = make((5, 2), "f4", stream=stream, allocator=allocator)
    buffer.fill(1)
    assert (buffer.to_numpy() == 1).all()
    assert buffer.ptr in allocator.live
    buffer.close()
    assert allocator.log == [("allocate", 40, stream.handle), ("deallocate", 40, stream.handle)]
    make(5, "f4", device=device, allocator=allocator)
    gc.collect()
    assert not allocator.live


def test_the_device_scope_stands_in_for_the_default(device):
    allocator = Recorder(device)
    with device.use(allocator):
        inside = ringmem.zeros(5, "f4", device=device)
    outside = ringmem.zeros(5, "f4", device=device)
    assert list(allocator.live) == [inside.ptr]
    outside.close()
    inside.close()
    assert not allocator.live


@pytest.mark.parametrize("null", [0, None])
@pytest.mark.parametrize(
    "make", [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer]
)
def test_a_null_address_is_out_of_memory(device, make, null):
    class Empty:
        def allocate(self, nbytes, stream):
            return null

        def deallocate(self, ptr, nbytes, stream):
            raise AssertionError("there is nothing to give back")

    with pytest.raises(AllocationFailedError, match="null address for 12 bytes on cpu:0") as caught:
        make(3, "f4", device=device, allocator=Empty())
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, ringmem.OutOfMemoryError)


@pytest.mark.parametrize("nonsense", [object(), 3, "pool", type("A", (), {"allocate": 1})()])
def test_what_is_no_allocator_is_refused(device, nonsense):
    with pytest.raises(InvalidValueError, match=r"allocator is .*allocate\(nbytes, stream\)"):
        ringmem.empty(3, device=device, allocator=nonsense)


def test_what_an_allocator_raises_reaches_the_caller(device):
    class Angry(Recorder):
        fail = True

        def allocate(self, nbytes, stream):
            if nbytes == 13:
                raise KeyError("unlucky")
            return super().allocate(nbytes, stream)

        def deallocate(self, ptr, nbytes, stream):
            if self.fail:
                raise LookupError("not now")
            super().deallocate(ptr, nbytes, stream)

    allocator = Angry(device)
    with pytest.raises(KeyError, match="unlucky"):
        ringmem.empty(13, device=device, allocator=allocator)
    buffer = ringmem.empty(3, device=device, allocator=allocator)
    with pytest.raises(LookupError, match="not now"):
        buffer.close()
    assert not buffer.closed
    with pytest.warns(RuntimeWarning, match="not now"):
        del buffer
        gc.collect()
    allocator.fail = False
    (ptr,) = allocator.live
    allocator.deallocate(ptr, 3, 0)


def test_an_address_that_is_no_number_is_refused(device):
    class Wrong(Recorder):
        def allocate(self, nbytes, stream):
            return "here"

    with pytest.raises(InvalidValueError, match="'here'"):
        ringmem.empty(3, device=device, allocator=Wrong(device))


def test_the_stream_of_freeing_waits_for_the_others_that_used_the_memory(faulty):
    device = ringmem.devices_of(faulty)[0]
    allocator = Recorder(device)
    a, b = device.create_stream(), device.create_stream()
    buffer = ringmem.empty(100, "f4", stream=a, allocator=allocator)
    buffer.fill(1, a)
    buffer.fill(2, b)
    waits = faulty.calls["stream_wait_event"]
    buffer.close()
    assert faulty.calls["stream_wait_event"] == waits + 1
    assert allocator.log[-1] == ("deallocate", 400, a.handle)
    assert not allocator.live


def test_buffers_keep_their_allocator(device):
    class Token:
        pass

    import weakref

    allocator = Recorder(device)
    allocator.token = Token()
    gone = weakref.ref(allocator.token)
    buffer = ringmem.empty(3, device=device, allocator=allocator)
    del allocator
    gc.collect()
    assert gone() is not None
    buffer.close()
    gc.collect()
    assert gone() is None


def test_plain_allocation_serves_where_there_are_no_pools():
    with ringmem.simulate(pools=False) as simulation:
        device = simulation.devices[0]
        buffer = ringmem.full(100, 3, "i4", device=device)
        assert (buffer.to_numpy() == 3).all()
        buffer.close()
        ringmem.full(100, 3, "i4", device=device)
        gc.collect()
        from ringmem.native import _native

        assert _native.flush_reaper(10)
