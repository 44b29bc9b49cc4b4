"""Streams: order, asynchrony, waits for values and host functions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ringmem.native import _native as native

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
LEGACY, PER_THREAD = 1, 2
Status = native.Status
pytestmark = pytest.mark.timeout(60, method="thread")


# --- streams -------------------------------------------------------------------------------------


def test_work_is_pending_until_its_turn_and_then_done(kit: Kit) -> None:
    stream, ptr = kit.stream(), kit.pinned(4096)
    gate = kit.gate(stream)
    kit.fill(ptr.device_ptr, 1, 4096, stream)
    assert kit.driver.stream_query(0, stream) is False
    time.sleep(0.02)
    assert kit.driver.stream_query(0, stream) is False
    assert (ptr.data == 0).all()
    gate.open()
    kit.driver.stream_synchronize(0, stream)
    assert kit.driver.stream_query(0, stream) is True
    assert (ptr.data == 1).all()


def test_a_fresh_stream_has_nothing_pending(kit: Kit) -> None:
    assert kit.driver.stream_query(0, kit.stream()) is True
    assert kit.driver.stream_query(0, 0) is True


def test_work_on_a_stream_is_done_in_order(kit: Kit) -> None:
    stream, memory = kit.stream(), kit.pinned(4096)
    gate = kit.gate(stream)
    for value in range(50):
        kit.fill(memory.device_ptr, value, 4096, stream)
    device_memory = kit.alloc(4096)
    kit.driver.copy_async(0, device_memory, memory.ptr, 4096, stream)
    kit.fill(memory.device_ptr, 99, 4096, stream)
    gate.open()
    assert (kit.download(device_memory, 4096, stream) == 49).all()
    assert (memory.data == 99).all()


def test_streams_do_not_wait_for_each_other(kit: Kit) -> None:
    held, free = kit.stream(), kit.stream()
    gate = kit.gate(held)
    ptr = kit.alloc(4096)
    kit.fill(ptr, 1, 4096, free)
    kit.driver.stream_synchronize(0, free)
    assert not kit.driver.stream_query(0, held)
    gate.open()


def test_blocking_streams_and_the_legacy_stream_wait_for_each_other(kit: Kit) -> None:
    blocking = kit.stream(non_blocking=False)
    aside = kit.stream(non_blocking=True)
    memory = kit.pinned(4096)
    gate = kit.gate(blocking)
    kit.fill(memory.device_ptr, 1, 2048, 0)  # behind the gate, on the legacy stream
    kit.fill(memory.device_ptr + 2048, 1, 2048, aside)
    kit.driver.stream_synchronize(0, aside)
    assert (memory.data[2048:] == 1).all()
    assert not kit.driver.stream_query(0, 0)
    assert (memory.data[:2048] == 0).all()
    gate.open()
    kit.driver.stream_synchronize(0, 0)
    assert (memory.data == 1).all()

    gate = kit.gate(0)
    kit.fill(memory.device_ptr, 2, 4096, blocking)
    assert not kit.driver.stream_query(0, blocking)
    assert (memory.data == 1).all()
    gate.open()
    kit.driver.stream_synchronize(0, blocking)
    assert (memory.data == 2).all()


def test_the_handle_of_the_legacy_stream_is_an_alias_of_0(kit: Kit) -> None:
    gate = kit.gate(0)
    assert not kit.driver.stream_query(0, LEGACY)
    gate.open()
    kit.driver.stream_synchronize(0, LEGACY)
    assert kit.driver.stream_query(0, 0)


def test_each_thread_has_a_stream_of_its_own(kit: Kit) -> None:
    gate = kit.gate(PER_THREAD)
    pending = []
    thread = threading.Thread(
        target=lambda: pending.append(not kit.driver.stream_query(0, PER_THREAD))
    )
    thread.start()
    thread.join()
    assert pending == [False]
    assert not kit.driver.stream_query(0, PER_THREAD)
    gate.open()
    kit.driver.stream_synchronize(0, PER_THREAD)


def test_destroying_a_stream_returns_at_once_and_its_work_completes(kit: Kit) -> None:
    stream = kit.driver.stream_create(0)
    memory = kit.pinned(4096)
    gate = kit.gate(stream)
    kit.fill(memory.device_ptr, 1, 4096, stream)
    kit.driver.stream_destroy(0, stream)
    assert (memory.data == 0).all()
    gate.open()
    assert kit.eventually(lambda: bool((memory.data == 1).all()))


def test_a_destroyed_stream_is_an_invalid_handle(host: Kit) -> None:
    stream = host.driver.stream_create(0)
    host.driver.stream_destroy(0, stream)
    for call in (
        lambda: host.driver.stream_destroy(0, stream),
        lambda: host.driver.stream_query(0, stream),
        lambda: host.driver.stream_synchronize(0, stream),
        lambda: host.driver.stream_device(stream),
        lambda: host.fill(4096, 0, 0, stream),
    ):
        with host.refused(Status.invalid_handle):
            call()


@pytest.mark.parametrize("priority", [-1000, -1, 0, 1000])
def test_any_priority_is_taken_and_clamped(kit: Kit, priority: int) -> None:
    stream = kit.stream(priority=priority)
    kit.driver.stream_synchronize(0, stream)


def test_a_stream_knows_its_device(kit: Kit) -> None:
    for device in range(kit.driver.device_count()):
        assert kit.driver.stream_device(kit.stream(device)) == device


def test_no_stream_is_capturing_by_itself(kit: Kit) -> None:
    assert not kit.driver.stream_capturing(0, kit.stream())
    assert not kit.driver.stream_capturing(0, 0)


def test_synchronizing_gives_up_the_gil(kit: Kit) -> None:
    stream = kit.stream()
    gate = kit.gate(stream)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    kit.driver.stream_synchronize(0, stream)  # would hang with the GIL held
    opener.join()
    assert kit.driver.stream_query(0, stream)


def test_relaxing_the_capture_mode_is_undone(kit: Kit) -> None:
    # The mode belongs to the thread, so a fresh one: earlier tests may have left theirs relaxed.
    with ThreadPoolExecutor(1) as fresh:
        modes = [True, True, True, False, False]
        before = [fresh.submit(kit.driver.relax_capture, mode).result() for mode in modes]
    assert before == [False, True, True, True, False]


# --- waiting for and writing values --------------------------------------------------------------


def test_a_value_is_waited_for(kit: Kit) -> None:
    kit.require(native.Attribute.stream_mem_ops_64)
    stream, memory = kit.stream(), kit.pinned(64)
    flag = memory.data.view(np.uint32)
    kit.driver.stream_wait_value(0, stream, memory.device_ptr, 5)
    flag[0] = 4
    time.sleep(0.01)
    assert not kit.driver.stream_query(0, stream)
    flag[0] = 7  # at least 5
    kit.driver.stream_synchronize(0, stream)


def test_a_value_is_compared_cyclically(kit: Kit) -> None:
    kit.require(native.Attribute.stream_mem_ops_64)
    stream, memory = kit.stream(), kit.pinned(64)
    flag = memory.data.view(np.uint32)
    flag[0] = 0xFFFFFFF0
    kit.driver.stream_wait_value(0, stream, memory.device_ptr, 3)
    time.sleep(0.01)
    assert not kit.driver.stream_query(0, stream)
    flag[0] = 3
    kit.driver.stream_wait_value(0, stream, memory.device_ptr, 0xFFFFFFFE)
    kit.driver.stream_synchronize(0, stream)  # 3 comes after 0xfffffffe


def test_values_are_written_in_order(kit: Kit) -> None:
    kit.require(native.Attribute.stream_mem_ops_64)
    stream, memory = kit.stream(), kit.pinned(64)
    gate = kit.gate(stream)
    flags = memory.data.view(np.uint32)
    kit.driver.stream_write_value(0, stream, memory.device_ptr, 0xDEADBEEF)
    kit.driver.stream_write_value(0, stream, memory.device_ptr + 4, 1)
    assert flags[0] == flags[1] == 0
    gate.open()
    kit.driver.stream_synchronize(0, stream)
    assert (flags[0], flags[1], flags[2]) == (0xDEADBEEF, 1, 0)


def test_two_streams_play_ping_pong_through_values(kit: Kit) -> None:
    kit.require(native.Attribute.stream_mem_ops_64)
    ping, pong, memory = kit.stream(), kit.stream(), kit.pinned(64)
    here, there = memory.device_ptr, memory.device_ptr + 4
    for turn in range(1, 21):
        kit.driver.stream_write_value(0, ping, here, turn)
        kit.driver.stream_wait_value(0, ping, there, turn)
        kit.driver.stream_wait_value(0, pong, here, turn)
        kit.driver.stream_write_value(0, pong, there, turn)
    kit.driver.stream_synchronize(0, ping)
    kit.driver.stream_synchronize(0, pong)
    assert list(memory.data.view(np.uint32)[:2]) == [20, 20]


def test_a_value_that_is_not_aligned_is_an_invalid_value(kit: Kit) -> None:
    kit.require(native.Attribute.stream_mem_ops_64)
    stream, memory = kit.stream(), kit.pinned(64)
    for operation in (kit.driver.stream_wait_value, kit.driver.stream_write_value):
        with kit.refused(Status.invalid_value, Status.misaligned_address):
            operation(0, stream, memory.device_ptr + 2, 0)


# --- host functions ------------------------------------------------------------------------------


def test_a_host_function_runs_in_order_on_another_thread(kit: Kit) -> None:
    stream, memory = kit.stream(), kit.pinned(64)
    seen: list[tuple[int, bool]] = []
    gate = kit.gate(stream)
    here = threading.get_ident()
    for value in (1, 2, 3):
        kit.fill(memory.device_ptr, value, 64, stream)
        kit.driver.launch_host_function(
            0,
            stream,
            lambda: seen.append((int(memory.data[0]), threading.get_ident() == here)),
        )
    assert seen == []
    gate.open()
    kit.driver.stream_synchronize(0, stream)
    assert seen == [(1, False), (2, False), (3, False)]


def test_the_exception_of_a_host_function_is_unraisable(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: caught.append(args.exc_value))
    stream = kit.stream()

    def fail() -> None:
        raise RuntimeError("from a driver thread")

    kit.driver.launch_host_function(0, stream, fail)
    kit.driver.stream_synchronize(0, stream)
    assert [str(error) for error in caught] == ["from a driver thread"]


def test_a_host_function_is_let_go_after_its_call(kit: Kit) -> None:
    class Callable:
        gone = 0

        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            type(self).gone += 1

    stream = kit.stream()
    kit.driver.launch_host_function(0, stream, Callable())
    kit.driver.stream_synchronize(0, stream)
    assert kit.eventually(lambda: Callable.gone == 1)


@pytest.mark.parametrize("state", ["pending", "running"])
def test_an_interpreter_can_end_beside_a_host_function(state: str) -> None:
    code = """
import sys, time, threading
import numpy as np
from ringmem.native import _native as native
driver = native.host_driver()
stream = driver.stream_create(0)
started = threading.Event()
if sys.argv[1] == "pending":
    flag = driver.host_alloc(0, 64)
    driver.stream_wait_value(0, stream, driver.host_device_pointer(0, flag), 1)
    driver.launch_host_function(0, stream, lambda: print("never"))
else:
    def work():
        started.set()
        time.sleep(0.2)
        print("ran to its end", flush=True)
    driver.launch_host_function(0, stream, work)
    started.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, state], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if state == "pending" else "ran to its end\n")
