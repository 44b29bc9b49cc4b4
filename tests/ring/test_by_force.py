"""What only force can end, and who goes on: either side killed or stopped, handlers that never
return, and PyTorch beside a kernel that never stops. The same on the CPU and on a GPU.

Everything has a deadline. ``RINGMEM_KILL_ROUNDS`` sets how often each side is killed (default 2).
"""

from __future__ import annotations

import importlib.util
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
from ringmem import KernelFailedError, RingKernel, devices

HERE = Path(__file__).parent
ROUNDS = int(os.environ.get("RINGMEM_KILL_ROUNDS", "2"))
NAMES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu":
        if not devices("cuda"):
            pytest.skip("no CUDA device")
        pytest.importorskip("cuda.core")
    return str(request.param)


def environment(**more: str) -> dict[str, str]:
    source = str(Path(ringmem.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(HERE)]), **more}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    programs: list[subprocess.Popen[str]] = []
    yield programs
    for program in programs:
        program.kill()
        program.wait(30)
        assert program.stdout is not None
        program.stdout.close()


def start(programs: list[subprocess.Popen[str]], device: str, how: str) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, str(HERE / "a_kernel.py"), device, how],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    programs.append(program)
    return program


def first_line(program: subprocess.Popen[str]) -> int:
    assert program.stdout is not None
    return int(program.stdout.readline())


def has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for_end(pid: int, seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not has_ended(pid):
        assert time.monotonic() < limit, f"process {pid} did not end"
        time.sleep(0.01)


def answers(device: str) -> None:
    """Whoever comes after finds the device free."""
    with RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device=device, deadline_s=20.0) as kernel:
        assert kernel.call((40, 2), timeout_s=10)["total"] == 42


def test_isolated_kernel_answers_and_keeps_its_state_over_a_restart(name: str) -> None:
    with RingKernel(
        h.count,
        message=h.PAIR,
        reply=h.TOTAL,
        state=h.COUNTER,
        device=name,
        isolated=True,
        deadline_s=30.0,
    ) as kernel:
        assert kernel.call((5, 0), timeout_s=10)["total"] == 5
        kernel.pause()
        assert kernel.read_state().item() == (1, 5)
        kernel.write_state((1, 100))
        kernel.resume()
        assert kernel.call((1, 0), timeout_s=10)["total"] == 101
        kernel.drain(10)
        kernel.start()
        assert kernel.call((1, 0), timeout_s=10)["total"] == 102
        batch = np.zeros(5000, h.PAIR)
        batch["a"] = 1
        totals: list[int] = []
        sent = 0
        while len(totals) < len(batch):
            sent += kernel.send(batch[sent : sent + 1000], timeout_s=10)
            totals += kernel.recv(timeout_s=10)["total"].tolist()
        assert totals == list(range(103, 5103))


def test_force_ends_a_handler_that_never_returns(name: str) -> None:
    kernel = RingKernel(
        h.endless,
        message=h.PAIR,
        reply=h.TOTAL,
        state=h.COUNTER,
        device=name,
        isolated=True,
        stall_s=0.2,
        on_stall=lambda kernel, rings: None,
    )
    with kernel:
        pid = kernel._backend._process.pid
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((0, 1), timeout_s=0.5)
        assert kernel.stalled == (0,)
        start_s = time.monotonic()
        kernel.terminate(0.2, force=True)
        wait_for_end(pid)
        assert time.monotonic() - start_s < 10
        with pytest.raises(KernelFailedError, match="SIGKILL"):
            kernel.recv(timeout_s=1)
    answers(name)


@pytest.mark.timeout(300)
def test_a_killed_kernel_costs_an_error_and_no_wrong_reply(name: str) -> None:
    chooser = random.Random(7)
    for _ in range(ROUNDS):
        with RingKernel(
            h.add, message=h.PAIR, reply=h.TOTAL, device=name, isolated=True, deadline_s=30.0
        ) as kernel:
            kernel.call((1, 2), timeout_s=10)
            pid = kernel._backend._process.pid
            killer = subprocess.Popen(
                ["sh", "-c", f"sleep {chooser.random() * 0.1:.4f}; kill -9 {pid}"]
            )
            sent = received = 0
            batch = np.zeros(64, h.PAIR)
            with pytest.raises(KernelFailedError, match="SIGKILL"):
                while True:
                    batch["a"] = np.arange(sent, sent + 64)
                    batch["b"] = batch["a"] * 2
                    sent += kernel.send(batch, timeout_s=20)
                    got = kernel.recv(timeout_s=20)["total"]
                    assert got.tolist() == (np.arange(received, received + len(got)) * 3).tolist()
                    received += len(got)
            killer.wait(10)
    answers(name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["isolated", "own"])
def test_a_killed_host_leaves_no_kernel(
    name: str, how: str, started: list[subprocess.Popen[str]]
) -> None:
    chooser = random.Random(8)
    for _ in range(ROUNDS):
        program = start(started, name, how)
        child = first_line(program)
        time.sleep(chooser.random() * 0.1)
        program.send_signal(signal.SIGKILL)
        program.wait(20)
        if child:
            wait_for_end(child)
    answers(name)


def test_a_kernel_whose_host_stands_still_ends_by_its_heartbeat(
    name: str, started: list[subprocess.Popen[str]]
) -> None:
    program = start(started, name, "isolated")
    first_line(program)
    program.send_signal(signal.SIGSTOP)
    time.sleep(1.2)  # three times the timeout
    program.send_signal(signal.SIGCONT)
    assert program.stdout is not None
    said = program.stdout.readline()
    assert said.startswith("KernelFailedError"), said
    assert "heartbeat" in said


@pytest.mark.timeout(200)
def test_pytorch_allocates_compiles_and_trains_beside_a_kernel(name: str) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    done = subprocess.run(
        [sys.executable, str(HERE / "coexist.py"), name],
        env=environment(CUDA_MODULE_LOADING="EAGER"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("done"), done.stdout
