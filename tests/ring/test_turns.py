"""Calls of several threads on one ring: turns have an end, and a call that is refused is not sent."""

from __future__ import annotations

import threading
import time

import handlers_for_tests as h
import numpy as np
import pytest
from handlers_for_tests import ECHO, message, native_echo, run_script

import ringmem
from ringmem.ring import KernelState, RingKernel


def tenths(**arguments: object) -> RingKernel:
    return RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu", **arguments)


def test_the_turn_of_another_thread_counts_as_time() -> None:
    with tenths() as kernel:
        thread = threading.Thread(target=kernel.call, args=((0, 10),))
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(ringmem.TimeoutError, match="other threads' calls .* nothing was sent"):
            kernel.call((0, 0), 0.1)
        assert time.monotonic() - began < 0.6
        thread.join()
        assert kernel.telemetry().processed == 1


CTRL_C = """
import os, signal, threading, time
import handlers_for_tests as h
from ringmem.ring import RingKernel

with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu") as kernel:
    thread = threading.Thread(target=kernel.call, args=((0, 20),))
    thread.start()
    time.sleep(0.1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        kernel.call((0, 0))
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - began < 1)
    thread.join()
"""

FORK = """
import os, threading, time
import handlers_for_tests as h
from ringmem import ClosedError
from ringmem.ring import RingKernel

with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu") as kernel:
    thread = threading.Thread(target=kernel.call, args=((0, 10),))
    thread.start()
    time.sleep(0.2)
    pid = os.fork()
    if pid == 0:
        try:
            kernel.call((0, 0))
        except ClosedError:
            os._exit(7)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    thread.join()
"""


def test_ctrl_c_ends_the_wait_for_a_turn() -> None:
    assert run_script(CTRL_C).stdout == "interrupted True\n"


def test_a_fork_does_not_wait_for_the_turn_of_a_thread_it_lacks() -> None:
    assert run_script(FORK).stdout == "7\n"


def test_calls_that_are_refused_are_not_carried_out_by_the_next_run() -> None:
    kernel = tenths().start()
    refused: list[Exception] = []

    def call() -> None:
        try:
            kernel.call((0, 3), 10)
        except ringmem.ClosedError as error:
            refused.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    kernel.terminate()
    for thread in threads:
        thread.join()
    assert len(refused) == 3  # the first was in work
    with kernel:
        time.sleep(0.2)
        assert kernel.telemetry().processed == 0


def test_a_call_that_was_kept_from_an_earlier_run_sends_nothing() -> None:
    kernel = native_echo().start()
    call = kernel.call
    kernel.terminate()
    with pytest.raises(ringmem.ClosedError, match=r"terminated; start\(\) it first"):
        call(message(1), 1)
    assert kernel.unread() == 0
    with kernel:
        assert call(message(1), 5)["words"][0] == 4


def test_a_call_that_waited_for_room_is_not_sent_to_a_kernel_that_ends() -> None:
    kernel = tenths(capacity=1).start()
    for _ in range(3):
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 3), 0.01)  # one in work, one in the ring, one that finds no room
    refused: list[Exception] = []

    def call() -> None:
        try:
            kernel.call((99, 0), 10)
        except ringmem.ClosedError as error:
            refused.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    kernel.terminate()
    thread.join()
    assert len(refused) == 1
    with kernel:
        time.sleep(0.5)
        assert kernel.telemetry().processed <= 1
    kernel.close()


def test_a_method_that_was_kept_from_before_the_start_calls() -> None:
    kernel = native_echo()
    call = kernel.call
    with pytest.raises(ringmem.ClosedError, match="new"):
        call(message(1))
    with kernel:
        assert call(message(1), 5)["words"][0] == 4


IN_A_SIGNAL = """
import os, signal, threading, time
import handlers_for_tests as h
from ringmem import RingmemError
from ringmem.ring import RingKernel

with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu") as kernel:
    def again(*_):
        try:
            kernel.call((0, 0))
        except RingmemError as error:
            print("already" in str(error))

    signal.signal(signal.SIGUSR1, again)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    print(kernel.call((5, 6))["a"])
"""


def test_a_signals_handler_that_calls_on_the_ring_of_its_own_thread_is_refused() -> None:
    assert run_script(IN_A_SIGNAL).stdout == "True\n0\n"


def test_an_empty_poll_tells_that_the_kernel_failed() -> None:
    with native_echo(deadline_s=0.1) as kernel:
        until = time.monotonic() + 10
        with pytest.raises(ringmem.KernelFailedError, match="deadline"):
            while time.monotonic() < until:
                kernel.poll()
        assert kernel.state is KernelState.FAILED


@pytest.mark.parametrize("ring", [2, -1, None, "0", 0.5])
def test_a_ring_that_is_none_is_refused_by_name(ring: object) -> None:
    with native_echo(rings=2) as kernel:
        out = np.zeros(1, ECHO)
        for use in (
            lambda: kernel.call(message(0), ring=ring),
            lambda: kernel.send(message(0), ring=ring),
            lambda: kernel.recv_into(out, 0, ring=ring),
            lambda: kernel.poll(ring=ring),
            lambda: kernel.unread(ring),
        ):
            with pytest.raises(ringmem.InvalidValueError, match="ring=.* must be 0 to 1"):
                use()


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1", True])
def test_a_timeout_that_is_none_is_refused_also_where_nothing_is_waited_for(
    timeout_s: object,
) -> None:
    with native_echo() as kernel:
        kernel.send(message(1))
        out = np.zeros(1, ECHO)
        for use in (
            lambda: kernel.send(message(1), timeout_s),
            lambda: kernel.recv(timeout_s=timeout_s),
            lambda: kernel.recv_into(out, timeout_s),
            lambda: kernel.call(message(1), timeout_s),
        ):
            with pytest.raises(ringmem.InvalidValueError, match="timeout_s"):
                use()
        assert kernel.unread() == 1


def test_recv_leaves_what_poll_showed_to_release() -> None:
    with native_echo() as kernel:
        kernel.send([message(i) for i in range(4)])
        while sum(map(len, kernel.poll(3))) < 3:
            pass
        assert len(kernel.recv(1, 5)) == 1
        kernel.release()
        assert kernel.unread() == 1


def test_statuses_of_another_dtype_are_named() -> None:
    with native_echo() as kernel:
        kernel.send(message(1))
        with pytest.raises(ringmem.InvalidValueError, match="statuses is of dtype int64"):
            kernel.recv_into(np.zeros(1, ECHO), 5, np.zeros(1, np.int64))
