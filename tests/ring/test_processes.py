"""Rings between processes: sharing by descriptor, fork, and ends that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringmem.native import errors
from ringmem.ring import Ring


@pytest.mark.parametrize("victim", ["producer", "consumer"])
@pytest.mark.parametrize("nbytes", [56, 112])
def test_an_end_killed_at_any_moment_loses_and_repeats_nothing(victim, nbytes):
    """Fifty rounds of SIGKILL each, so two hundred in all."""
    script = Path(__file__).parent / "kill_rounds.py"
    done = subprocess.run(
        [sys.executable, str(script), victim, "50", str(nbytes), str(nbytes)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500


def test_another_process_attaches_by_descriptor():
    code = """
import sys
from ringmem.ring import Ring
ring = Ring.attach(int(sys.argv[1]), [("n", "u8"), ("square", "u8")])
consumer = ring.consumer()
while True:
    got = consumer.recv(timeout_s=20)
    if (got["square"] != got["n"] ** 2).any():
        sys.exit(3)
    if got["n"][-1] == 999:
        sys.exit(0)
"""
    with Ring([("n", "u8"), ("square", "u8")], 64) as ring, ring.producer() as producer:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(ring.fd)],
            pass_fds=[ring.fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        batch = np.zeros(1000, ring.message)
        batch["n"] = np.arange(1000)
        batch["square"] = batch["n"] ** 2
        assert producer.send(batch, timeout_s=20) == 1000
        assert child.wait(20) == 0


def test_a_fork_leaves_the_ends_with_the_parent():
    with Ring("u8", 8) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                producer.send(1)
            except errors.ClosedError:
                code = 0
            producer.close()  # forgets only
            del producer, consumer
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        producer.send(7)
        assert consumer.recv().tolist() == [7]


def test_a_wait_for_a_dead_process_ends():
    with Ring("u8", 8) as ring, ring.consumer() as consumer:
        pid = os.fork()
        if pid == 0:
            ring.producer().send(1)
            os.kill(os.getpid(), signal.SIGKILL)
        assert consumer.recv(timeout_s=20).tolist() == [1]
        with pytest.raises(errors.ClosedError, match=f"process {pid} ended without closing"):
            consumer.recv(timeout_s=20)
        os.waitpid(pid, 0)
        with ring.producer() as producer:  # which takes the dead one's place
            assert producer.tail == 1


def test_ctrl_c_ends_a_wait():
    code = """
import os, signal, sys, threading
from ringmem.ring import Ring
with Ring("u8", 8) as ring, ring.consumer() as consumer:
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        consumer.recv()
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.stdout == "interrupted\n", done.stderr
