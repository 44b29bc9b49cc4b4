"""Ctrl-C in the middle of an end: what it leaves undone is done by whoever comes next."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import handlers_for_tests as h
import pytest

from ringmem import ClosedError, RingKernel
from ringmem.ring import KernelState


def interrupted(kernel: RingKernel) -> None:
    """Close a kernel whose handler is at work for half a second; Ctrl-C comes in between."""
    kernel.send([(0, 5)])
    time.sleep(0.05)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel.close()
    timer.join()


def sleeping() -> RingKernel:
    return RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu", stall_s=5).start()


def test_a_close_that_was_interrupted_is_finished_by_the_next() -> None:
    kernel = sleeping()
    interrupted(kernel)
    assert kernel.state is KernelState.ACTIVE
    with pytest.raises(ClosedError, match="told to end"):
        kernel.call((0, 0), timeout_s=1)
    with pytest.raises(ClosedError):
        kernel.start()
    memory = weakref.ref(kernel._memory)
    kernel.close()
    assert kernel.state is KernelState.CLOSED
    del kernel
    gc.collect()
    assert memory() is None


def test_a_kernel_whose_close_was_interrupted_is_closed_when_it_is_dropped() -> None:
    kernel = sleeping()
    interrupted(kernel)
    memory = weakref.ref(kernel._memory)
    with pytest.warns(ResourceWarning, match="was dropped while it ran"):
        del kernel
        gc.collect()
    assert memory() is None


def test_a_close_that_another_thread_was_in_too_is_finished_by_that() -> None:
    kernel = sleeping()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: (time.sleep(0.1), kernel.close()))
        interrupted(kernel)
        other.result(10)
    assert kernel.state is KernelState.CLOSED
    kernel.close()


def test_an_end_that_is_interrupted_while_it_gives_back_is_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = h.native_echo().start()
    close = kernel._backend.close

    def interrupt() -> None:
        monkeypatch.setattr(kernel._backend, "close", close)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel._backend, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kernel.close()
    assert kernel.state is KernelState.TERMINATED
    kernel.close()
    assert kernel.state is KernelState.CLOSED
    assert kernel._backend._native is None


def test_a_kernel_whose_close_was_interrupted_holds_up_no_exit() -> None:
    done = h.run_script(
        """
import os, signal, threading, time
import handlers_for_tests as h
from ringmem import RingKernel
kernel = RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu").start()
kernel.send([(0, 5)])
time.sleep(0.05)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    kernel.close()
except KeyboardInterrupt:
    print(kernel.state.value)
""",
        timeout=20,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "active\n", "")
