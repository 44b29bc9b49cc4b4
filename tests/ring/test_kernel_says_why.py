"""What a kernel says when it cannot do what is asked: each time the cause, and what would do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import handlers_for_tests as h
import numpy as np
import pytest

import ringmem
from ringmem import (
    ClosedError,
    InvalidValueError,
    KernelFailedError,
    NativeHandler,
    RingBufferBridge,
    RingKernel,
)
from ringmem.native import _native
from ringmem.ring import KernelState, Ring


def wait_for(state: KernelState, kernel: RingKernel) -> None:
    deadline = time.monotonic() + 5
    while kernel.state is not state:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- calls -------------------------------------------------------------------------------------
def test_call_says_why_the_kernel_failed_however_often_it_is_asked() -> None:
    with h.native_echo(deadline_s=0.05) as kernel:
        wait_for(KernelState.FAILED, kernel)
        for _ in range(2):
            with pytest.raises(KernelFailedError, match="deadline_s=0.05 was over"):
                kernel.call(h.message(1), timeout_s=1)


def test_call_after_a_termination_by_force_says_that_the_process_was_ended() -> None:
    kernel = RingKernel(
        h.endless, message=h.PAIR, reply=h.TOTAL, state=h.COUNTER, device="cpu", isolated=True
    )
    with kernel:
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 1), timeout_s=0.2)
        kernel.terminate(0.1, force=True)
        for _ in range(2):
            with pytest.raises(KernelFailedError, match=r"ended by terminate\(force=True\)"):
                kernel.call((0, 1))


def test_call_after_a_termination_that_timed_out_says_that_the_kernel_was_told_to_end() -> None:
    with RingKernel(h.SLEEP_A_SECOND, message=h.PAIR, device="cpu") as kernel:
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 1), timeout_s=0.2)
        with pytest.raises(ringmem.TimeoutError):
            kernel.terminate(0.05)
        with pytest.raises(ClosedError, match="active and told to end"):
            kernel.call((0, 1))
        kernel.terminate()
        with pytest.raises(ClosedError, match=r"terminated; start\(\) it first"):
            kernel.call((0, 1))


def test_call_after_the_end_of_async_with_says_that_the_kernel_is_closed() -> None:
    async def use() -> None:
        async with h.native_echo() as kernel:
            await kernel.call(h.message(1))
        with pytest.raises(ClosedError, match="the ring kernel is closed"):
            await kernel.call(h.message(1))

    asyncio.run(use())


# --- times -------------------------------------------------------------------------------------
@pytest.mark.parametrize("timeout_s", [float("nan"), -1, "x", True])
@pytest.mark.parametrize("method", ["start", "pause", "drain", "terminate"])
def test_a_timeout_that_is_no_time_is_refused_and_changes_nothing(
    method: str, timeout_s: object
) -> None:
    with h.native_echo() as kernel:
        with pytest.raises(InvalidValueError, match=f"timeout_s={timeout_s!r} must be seconds"):
            getattr(kernel, method)(timeout_s)
        assert h.first(kernel.call(h.message(1), timeout_s=5)) == 4


# --- counts ------------------------------------------------------------------------------------
def test_messages_that_are_dropped_are_counted_over_all_rings() -> None:
    kernel = h.native_echo(full="drop", capacity=4, rings=2)
    batch = np.zeros(7, h.ECHO)
    assert kernel.dropped == 0
    assert kernel.send(batch) == 4
    assert kernel.send(batch[:6], ring=1) == 4
    assert kernel.dropped == 3 + 2
    kernel.close()
    assert kernel.dropped == 5


# --- stalled rings -----------------------------------------------------------------------------
def stuck_kernel(rings: int = 1, **arguments: object) -> RingKernel:
    """A call of it with b > 0 takes so many tenths of a second."""
    return RingKernel(
        h.SLEEP_TENTHS, message=h.PAIR, device="cpu", stall_s=0.1, rings=rings, **arguments
    )


def test_a_stalled_ring_is_named_by_its_own_number_however_many_there_are() -> None:
    seen: list[tuple[int, ...]] = []
    with stuck_kernel(70, capacity=2, on_stall=lambda kernel, rings: seen.append(rings)) as kernel:
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 10), timeout_s=0.6, ring=66)
        assert kernel.stalled == (66,)
        assert seen == [(66,)]


def test_the_watchdog_tells_on_after_a_callback_that_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, ...]] = []
    raised: list[type[BaseException]] = []

    def on_stall(kernel: RingKernel, rings: tuple[int, ...]) -> None:
        seen.append(rings)
        raise KeyError(rings)

    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(told.exc_type))
    with stuck_kernel(on_stall=on_stall) as kernel:
        for _ in range(2):
            kernel.call((0, 3))
            kernel.call((0, 0))
        # More than these on a machine that lets the kernel's thread wait for so long.
        assert len(seen) >= 2
        assert set(seen) == {(0,)}
        assert raised == [KeyError] * len(seen)


def test_a_callback_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="on_stall=5 must be a callable"):
        stuck_kernel(on_stall=5)


# --- memory ------------------------------------------------------------------------------------
def test_a_kernel_with_large_rings_takes_memory_as_they_fill() -> None:
    def resident_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_nbytes()
    with h.native_echo(capacity=1 << 22) as kernel:  # 256 MiB each way
        assert h.first(kernel.call(h.message(1), timeout_s=5)) == 4
        assert resident_nbytes() - before < 1 << 26


# --- the end of the interpreter ----------------------------------------------------------------
def test_a_python_handler_that_never_returns_does_not_abort_the_interpreter() -> None:
    script = """
import contextlib, ctypes, ringmem
@ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)
def endless(message, reply, state):
    while True:
        pass
kernel = ringmem.RingKernel(endless, message="u8", device="cpu", stall_s=60)
kernel.start()
with contextlib.suppress(ringmem.TimeoutError):
    kernel.call(1, timeout_s=0.1)
"""
    done = h.run_script(script)
    assert (done.returncode, done.stderr) == (0, "")


# --- state -------------------------------------------------------------------------------------
def counting(**arguments: object) -> RingKernel:
    return RingKernel(
        NativeHandler(_native.echo_handler(7)),
        message=h.ECHO, state=h.COUNTER, device="cpu", **arguments,
    )  # fmt: skip


def damaged_files(folder: Path) -> Iterator[Path]:
    np.savez(folder / "good.npz", state=np.zeros(1, h.COUNTER))
    good = (folder / "good.npz").read_bytes()
    for name, content in {"cut": good[:-30], "empty": b"", "garbage": b"\x93 no file"}.items():
        (folder / name).write_bytes(content)
        yield folder / name
    np.savez(folder / "other.npz", states=np.zeros(1, h.COUNTER))
    yield folder / "other.npz"
    np.save(folder / "array.npy", np.zeros(1, h.COUNTER))
    yield folder / "array.npy"


def test_a_damaged_state_file_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    with counting(initial_state=(1, 2)) as kernel:
        kernel.pause()
        for path in damaged_files(tmp_path):
            with pytest.raises(InvalidValueError, match=f"path='{path}' is no file that save"):
                kernel.load(path)
        with pytest.raises(FileNotFoundError):
            kernel.load(tmp_path / "none.npz")
        assert kernel.read_state().item() == (1, 2)


def test_more_than_one_record_is_no_state() -> None:
    with counting(rings=2) as kernel:
        kernel.pause()
        with pytest.raises(InvalidValueError, match="has 2 records; a ring has one"):
            kernel.write_state([(1, 2), (3, 4)])
        kernel.write_state([(1, 2)], ring=1)
        assert kernel.read_state(1).item() == (1, 2)
    with pytest.raises(InvalidValueError, match="has 2 records"):
        counting(rings=2, initial_state=[(1, 2), (3, 4)])


# --- arguments ---------------------------------------------------------------------------------
def test_call_takes_its_timeout_by_position_as_well() -> None:
    with h.native_echo() as kernel:
        assert h.first(kernel.call(h.message(1), 5.0)) == 4
        assert h.first(kernel.call(h.message(1), None)) == 4
        assert h.first(kernel.call(h.message(1), Fraction(5))) == 4
        for bad in (-1, "x", True, float("nan")):
            with pytest.raises(InvalidValueError, match=f"timeout_s is {bad!r}: give seconds"):
                kernel.call(h.message(1), bad)
        with pytest.raises(TypeError, match="timeout_s twice"):
            kernel.call(h.message(1), 5.0, timeout_s=5.0)
        with pytest.raises(TypeError, match="one message and a timeout_s"):
            kernel.call(h.message(1), 5.0, 0)
        kernel.pause()
        with pytest.raises(ringmem.TimeoutError):
            kernel.call(h.message(1), 0.05)


def test_a_ring_number_of_any_size_is_refused_alike() -> None:
    with h.native_echo() as kernel, pytest.raises(InvalidValueError, match="must be 0 to 0"):
        kernel.call(h.message(1), ring=2**70)


@pytest.mark.parametrize("capacity", [8.0, "8", None])
def test_a_capacity_that_is_no_whole_number_is_refused(capacity: object) -> None:
    for make in (Ring, RingBufferBridge):
        with pytest.raises(InvalidValueError, match=f"capacity={capacity!r} must be a power"):
            make("u8", capacity)


def test_a_list_is_no_place_for_replies() -> None:
    with h.native_echo() as kernel, pytest.raises(InvalidValueError, match=r"out=\[\] must be"):
        kernel.recv_into([], timeout_s=0)


@pytest.mark.parametrize("name", ["message", "reply", "state"])
def test_a_dtype_of_objects_is_refused_by_the_name_of_its_argument(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{name}=object holds Python objects"):
        RingKernel(h.add, **{"message": h.PAIR, name: object}, device="cpu")
