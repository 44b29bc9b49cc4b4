"""Handlers that do what they must not, and devices that cannot run them: what users are told."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ringmem import KernelFailedError, NotSupportedError, RingKernel, devices
from ringmem.ring.cuda import CudaBackend
from ringmem.ring.cuda_memory import RegisteredRingMemory

INDEX = np.dtype([("at", "i8"), ("value", "u8")])
TABLE = np.dtype([("values", "u8", (4,))])


def put(message, reply, state):
    state.values[message.at] = message.value
    reply.value = state.values[0]
    return 0


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def name(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu":
        if not devices("cuda"):
            pytest.skip("no CUDA device")
        pytest.importorskip("cuda.core")
    return str(request.param)


def test_a_write_outside_the_state_fails_the_kernel_and_says_so(name: str) -> None:
    pytest.importorskip("numba")
    kernel = RingKernel(put, message=INDEX, state=TABLE, device=name, deadline_s=20.0)
    with kernel:
        assert kernel.call((0, 7), timeout_s=10)["value"] == 7
        assert kernel.call((3, 8), timeout_s=10)["value"] == 7
        kernel.call((4, 9), timeout_s=10)  # the first word behind the table
        with pytest.raises(KernelFailedError, match=r"ring 0 wrote outside its state"):
            if name == "cpu":  # which ends by itself; a GPU's guards are looked at after its end
                kernel.recv(timeout_s=10)
            kernel.drain(10)
        kernel.start()
        assert kernel.call((0, 1), timeout_s=10)["value"] == 1
        kernel.drain(10)


def test_without_numba_fields_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = np.dtype([("size", "i8")])
    record = np.dtype([("sum", "i8"), ("item", "f8", (2,)), ("inner", inner)])

    def handler(message, reply, state):
        state.sum += message.sum
        reply.sum = state.sum
        reply.item[:] = message.item * 2
        reply.inner.size = message["inner"].size + 1
        if message.sum < 0:
            reply.nothing = 1
        return 0

    plain = SimpleNamespace(address=None, python=handler)
    monkeypatch.setattr("ringmem.ring.cpu._compile", lambda handler, spec: plain)
    with RingKernel(handler, message=record, state=record, device="cpu") as kernel:
        message = np.zeros(1, record)
        message["sum"], message["item"], message["inner"]["size"] = 5, 1.5, 8
        kernel.call(message)
        reply = kernel.call(message)
        assert (reply["sum"], reply["item"].tolist(), reply["inner"]["size"]) == (10, [3, 3], 9)
        message["sum"] = -1
        with pytest.raises(KernelFailedError, match="no field.*nothing"):
            kernel.call(message)


def test_a_device_without_cooperative_launch_is_refused() -> None:
    device = SimpleNamespace(
        platform="cuda", name="cuda:7", capabilities=SimpleNamespace(cooperative_launch=False)
    )
    with pytest.raises(NotSupportedError, match=r"cuda:7 has no cooperative launch.*CPU device"):
        CudaBackend(device)


def test_shared_memory_is_registered_with_the_device_or_refused() -> None:
    calls = []
    driver = SimpleNamespace(
        host_register=lambda *what, **flags: calls.append((what, flags)),
        host_device_pointer=lambda ordinal, ptr: ptr + 0x1000,
    )
    memory = SimpleNamespace(ptr=0x7000, nbytes=0x2000)
    device = SimpleNamespace(
        name="cuda:1", ordinal=1, driver=driver, capabilities=SimpleNamespace(host_register=True)
    )
    registered = RegisteredRingMemory(device, memory)
    assert calls == [((1, 0x7000, 0x2000), {"portable": True, "mapped": True})]
    assert (registered.ptr, registered.device_ptr) == (0x7000, 0x8000)
    registered.close()
    device.capabilities = SimpleNamespace(host_register=False)
    with pytest.raises(NotSupportedError, match=r"cuda:1 cannot register shared memory"):
        RegisteredRingMemory(device, memory)
