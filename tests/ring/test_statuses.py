"""What a handler may return: a status that is no integer is refused, never made one."""

from __future__ import annotations

import numpy as np
import pytest

from ringmem import InvalidValueError, KernelFailedError, RingKernel
from ringmem.ring import cache, handlers, numba_handlers
from ringmem.ring.settings import check_spec

VALUE = np.dtype([("value", "i8")])


def half(message, reply, state):
    return 0.5


def sometimes_half(message, reply, state):
    if message.value > 3:
        return 0
    return message.value / 2


def is_large(message, reply, state):
    return message.value > 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMEM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("handler", [half, sometimes_half])
def test_a_handler_that_returns_a_float_is_refused_before_it_runs(handler):
    pytest.importorskip("numba")
    with pytest.raises(InvalidValueError, match=f"'{handler.__name__}' returns float64"):
        RingKernel(handler, message=VALUE, device="cpu")


def test_so_it_is_for_a_gpu(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(numba_handlers, "why_not_cuda", lambda: None)
    monkeypatch.setattr(numba_handlers, "compile_for_cuda", lambda *arguments: b"code")
    spec = check_spec(VALUE, None, None, 8, 1, None, 1, None, None)
    with pytest.raises(InvalidValueError, match="'half' returns float64"):
        handlers.compile_for_cuda(half, spec, (9, 0))
    assert handlers.compile_for_cuda(is_large, spec, (9, 0)) == b"code"


@pytest.fixture(params=["compiled", "plain"])
def how(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(cache, "version_of", lambda *names: None)
        monkeypatch.setattr(handlers, "_say_once", lambda text: None)
    return request.param


def test_a_truth_value_is_a_status(how):
    with RingKernel(is_large, message=VALUE, device="cpu") as kernel:
        kernel.send(np.array([(1,), (5,)], VALUE))
        kernel.drain(5)
        assert [status for _, status in kernel.dead_letters()] == [1]


def test_without_numba_a_float_fails_the_kernel(monkeypatch):
    monkeypatch.setattr(cache, "version_of", lambda *names: None)
    monkeypatch.setattr(handlers, "_say_once", lambda text: None)
    with (
        RingKernel(half, message=VALUE, device="cpu") as kernel,
        pytest.raises(KernelFailedError, match="'float' object cannot be interpreted"),
    ):
        kernel.call((1,), timeout_s=5)
