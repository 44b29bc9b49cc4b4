"""Kernels in a child process: what they share with others, what only the end of one does."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import handlers_for_tests as h
import numpy as np
import pytest

import ringmem
from ringmem import InvalidValueError, KernelFailedError, NativeHandler, RingKernel
from ringmem.native import _native
from ringmem.ring import KernelState


def isolated(handler: object = h.count, **arguments: object) -> RingKernel:
    return RingKernel(
        handler, message=h.PAIR, reply=h.TOTAL, state=h.COUNTER, device="cpu", isolated=True,
        **arguments,
    )  # fmt: skip


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")


def test_isolated_kernel_answers_and_keeps_its_state_over_a_restart() -> None:
    with isolated(rings=2, initial_state=(0, 10)) as kernel:
        assert kernel._backend._process.pid != os.getpid()
        assert kernel.call((5, 0), timeout_s=5)["total"] == 15
        assert kernel.call((5, 0), timeout_s=5, ring=1)["total"] == 15
        kernel.pause()
        assert kernel.read_state().item() == (1, 15)
        kernel.write_state((1, 100))
        kernel.resume()
        assert kernel.call((1, 0), timeout_s=5)["total"] == 101
        kernel.drain(5)
        assert kernel.read_state().item() == (2, 101)
        kernel.start()
        assert kernel.call((1, 0), timeout_s=5)["total"] == 102
        pid = kernel._backend._process.pid
    wait_for_end(pid)


def test_only_force_ends_a_handler_that_never_returns() -> None:
    kernel = isolated(h.endless, stall_s=0.2, on_stall=lambda kernel, rings: None)
    with kernel:
        pid = kernel._backend._process.pid
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 1), timeout_s=0.5)
        assert kernel.stalled == (0,)
        with pytest.raises(ringmem.TimeoutError, match="force=True"):
            kernel.terminate(0.1)
        kernel.terminate(0.1, force=True)
        assert not os.path.exists(f"/proc/{pid}")
        assert kernel.state is KernelState.FAILED
        with pytest.raises(KernelFailedError, match="SIGKILL, ended by terminate"):
            kernel.recv(timeout_s=1)


def test_handler_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="importable module"):
        isolated(lambda message, reply, state: 0)


def test_handler_that_cannot_be_compiled_is_refused_from_the_child() -> None:
    before = set(children())
    with pytest.raises(InvalidValueError):
        isolated(h.raises)
    assert set(children()) - before == set()


def children() -> list[str]:
    """Kernel processes of this one."""
    pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_kernel_killed_at_random_moments_costs_an_error_and_no_wrong_reply() -> None:
    chooser = random.Random(5)
    for _ in range(int(os.environ.get("RINGMEM_KILL_ROUNDS", "3"))):
        with isolated(h.add, capacity=64) as kernel:
            kernel.call((1, 2), timeout_s=5)
            pid = kernel._backend._process.pid
            killer = subprocess.Popen(
                ["sh", "-c", f"sleep {chooser.random() * 0.05:.4f}; kill -9 {pid}"]
            )
            sent = received = 0
            batch = np.zeros(16, h.PAIR)
            with pytest.raises(KernelFailedError, match="SIGKILL"):
                while True:
                    batch["a"] = np.arange(sent, sent + 16)
                    batch["b"] = batch["a"] * 2
                    sent += kernel.send(batch, timeout_s=10)
                    got = kernel.recv(timeout_s=10)["total"]
                    expected = np.arange(received, received + len(got)) * 3
                    assert got.tolist() == expected.tolist()
                    received += len(got)
            killer.wait()
            assert received <= sent
            assert kernel.state is KernelState.FAILED


def test_kernel_whose_parent_is_killed_ends() -> None:
    script = """
import sys, time
import handlers_for_tests as h
from ringmem import RingKernel
if __name__ == "__main__":
    kernel = RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device="cpu", isolated=True)
    kernel.start()
    kernel.call((1, 2), timeout_s=10)
    print(kernel._backend._process.pid, flush=True)
    time.sleep(60)
"""
    here = str(Path(__file__).parent)
    source = str(Path(ringmem.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, here])}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for_end(pid)


def test_an_address_of_this_process_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="is an address of this process"):
        isolated(NativeHandler(_native.echo_handler(7)))


def test_a_handler_typed_into_the_interpreter_is_refused() -> None:
    done = h.run_script("""
import ringmem
def handler(message, reply, state):
    return 0
try:
    ringmem.RingKernel(handler, message="u8", device="cpu", isolated=True)
except ringmem.InvalidValueError as error:
    print(error)
""")
    assert "give a function of an importable module" in done.stdout, done.stderr


def test_a_script_that_is_no_module_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import ringmem
from handlers_for_tests import add, PAIR, TOTAL
ringmem.RingKernel(add, message=PAIR, reply=TOTAL, device="cpu", isolated=True)
""")
    done = h.run_script(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 1
    assert "below if __name__ == '__main__':" in done.stderr
    assert "AssertionError" not in done.stderr


def test_a_forked_child_may_look_at_an_isolated_kernel() -> None:
    with isolated() as kernel:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                kernel.state, kernel.stalled, repr(kernel)
                code = 7
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert kernel.call((5, 0), timeout_s=5)["total"] == 5


def test_a_kernel_that_was_ended_by_force_says_at_a_start_that_its_process_is_gone() -> None:
    kernel = isolated(h.endless)
    with kernel:
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 1), timeout_s=0.2)
        kernel.terminate(0.1, force=True)
        with pytest.raises(KernelFailedError, match=r"ended by terminate\(force=True\)"):
            kernel.start()


def test_answers_that_nobody_waits_for_any_more_are_passed_by():
    kernel = isolated()
    try:
        backend = kernel._backend
        number = backend._send("ended")  # as Ctrl-C leaves it, between request and answer
        backend._given_up.add(number)
        first, second = backend._send("ended"), backend._send("failure")
        assert backend._answer(second, "failure") is None
        assert backend._answer(first, "ended") is True
        with kernel:
            assert kernel.call((5, 0), timeout_s=5)["total"] == 5
    finally:
        kernel.close()


# --- a child that stands still -----------------------------------------------------------------
@pytest.fixture
def stopped() -> Iterator[tuple[RingKernel, int]]:
    """A kernel that was answering when its process was stopped, and the process."""
    kernel = isolated(h.add, on_stall=lambda kernel, rings: None).start()
    pid = kernel._backend._process.pid
    try:
        kernel.call((1, 2), timeout_s=5)
        os.kill(pid, signal.SIGSTOP)
        yield kernel, pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        h.until(lambda: not kernel.state.running)
        kernel.close()


def test_no_request_waits_longer_for_a_stopped_child_than_it_was_to(stopped) -> None:
    kernel, _ = stopped
    started = time.monotonic()
    with pytest.raises(ringmem.TimeoutError):
        kernel.call((1, 2), timeout_s=0.2)
    with pytest.raises(ringmem.TimeoutError):
        kernel.pause(timeout_s=0.2)
    with pytest.raises(ringmem.TimeoutError, match="force=True"):
        kernel.terminate(timeout_s=0.2)
    assert kernel.state is KernelState.ACTIVE
    assert time.monotonic() - started < 2


def test_a_child_that_was_stopped_for_a_while_goes_on(stopped) -> None:
    kernel, pid = stopped
    with pytest.raises(ringmem.TimeoutError):
        kernel.call((1, 2), timeout_s=0.2)
    os.kill(pid, signal.SIGCONT)
    assert kernel.call((3, 4), timeout_s=5)["total"] == 7
    kernel.terminate(timeout_s=5)
    assert kernel.state is KernelState.TERMINATED
    kernel.start()
    assert kernel.call((5, 6), timeout_s=5)["total"] == 11


def test_force_ends_a_stopped_child(stopped) -> None:
    kernel, pid = stopped
    started = time.monotonic()
    kernel.terminate(timeout_s=0.2, force=True)
    assert time.monotonic() - started < 3
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(KernelFailedError, match=r"ended by terminate\(force=True\)"):
        kernel.call((1, 2), timeout_s=1)


def test_close_ends_a_stopped_child_that_never_ran() -> None:
    kernel = isolated()
    pid = kernel._backend._process.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    kernel.close()
    assert time.monotonic() - started < 5
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "running"])
def test_the_interpreter_ends_with_its_child(stop: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, signal, sys
import handlers_for_tests as h
from ringmem import RingKernel
if __name__ == "__main__":
    kernel = RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device="cpu", isolated=True).start()
    pid = kernel._backend._process.pid
    kernel.call((1, 2), timeout_s=10)
    if {stop}:
        os.kill(pid, signal.SIGSTOP)
    print(pid, flush=True)
""")
    done = h.run_script(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_for_end(int(done.stdout))


def test_what_was_asked_before_a_start_says_nothing_of_the_run() -> None:
    with isolated() as kernel:
        kernel.terminate()
        backend = kernel._backend
        backend._look = backend._send("look")  # whose answer was late: nothing runs
        kernel.start()
        assert kernel.state is KernelState.ACTIVE
        assert kernel.call((5, 0), timeout_s=5)["total"] == 5
