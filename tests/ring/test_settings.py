"""What a ring kernel is made with: how many rings a CPU serves, and numbers that are none."""

from __future__ import annotations

import threading
import time

import handlers_for_tests as h
import pytest

import ringmem
from ringmem import InvalidValueError, NativeHandler, NotSupportedError
from ringmem.ring import KernelState, settings

DEADLINE_S = 10.0


def test_more_rings_than_threads_can_serve_are_refused_by_their_number() -> None:
    with pytest.raises(NotSupportedError, match=r"rings=257 cannot be resident .* 256 rings fit"):
        h.native_echo(rings=257, capacity=4)


def test_as_many_rings_as_are_allowed_start_within_their_time() -> None:
    kernel = h.native_echo(rings=256, capacity=4, dead_letters=1).start(timeout_s=DEADLINE_S)
    try:
        assert h.first(kernel.call(h.message(1), DEADLINE_S, ring=255)) == 4
    finally:
        kernel.close()


def test_other_threads_run_while_many_rings_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_CPU_RINGS", 600)
    kernel = h.native_echo(rings=600, capacity=1, dead_letters=1)
    looks, stop, seen = 0, threading.Event(), []
    launch = kernel._backend.start

    def look() -> None:
        nonlocal looks
        while not stop.is_set():
            time.sleep(50e-6)
            looks += 1

    def counted(pairs: object) -> None:
        before = looks
        launch(pairs)
        seen.append(looks - before)

    monkeypatch.setattr(kernel._backend, "start", counted)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        kernel.start()
    finally:
        stop.set()
        looking.join()
        kernel.close()
    assert seen[0] >= 3


def test_a_start_whose_time_is_up_leaves_no_thread_behind() -> None:
    kernel = h.native_echo(rings=256, capacity=4, dead_letters=1)
    try:
        kernel.start(timeout_s=0.0)
    except ringmem.TimeoutError:
        assert kernel.state is KernelState.FAILED
    h.until(lambda: kernel._backend.ended() or kernel.state is KernelState.ACTIVE)
    kernel.terminate()
    kernel.start()
    assert h.first(kernel.call(h.message(1), DEADLINE_S)) == 4
    kernel.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("deadline_s", "x"), ("stall_s", None), ("stall_s", "x"), ("heartbeat_timeout_s", [1])],
)
def test_a_time_that_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidValueError, match=f"{name}=.* must be a number of seconds"):
        h.native_echo(**{name: value})


def test_a_ring_that_is_no_number_is_refused_by_its_value() -> None:
    with h.native_echo(state="u8") as kernel:
        kernel.pause()
        requests = (kernel.control, kernel.telemetry, kernel.dead_letters, kernel.read_state)
        for request in requests:
            with pytest.raises(InvalidValueError, match="ring='a' must be a whole number"):
                request("a")
        with pytest.raises(InvalidValueError, match=r"ring=0\.5 must be a whole number"):
            kernel.write_state(1, 0.5)


@pytest.mark.parametrize("address", [None, 0, -1, True, 1.5, h.SLEEP_TENTHS])
def test_an_address_of_a_handler_that_is_none_is_refused_by_name(address: object) -> None:
    with pytest.raises(InvalidValueError, match="address=.* must be the address of a C function"):
        NativeHandler(address)
