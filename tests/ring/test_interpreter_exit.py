"""A thread that waits while the interpreter ends neither aborts the process nor holds it up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from handlers_for_tests import run_script

HEAD = """
import asyncio, contextlib, sys, threading, time, types
import numpy as np
import ringmem
from ringmem import Ring, RingKernel, simulate
from handlers_for_tests import message, native_echo

class Last:  # keeps the end going until every wait has come back
    def __del__(self, sleep=time.sleep):
        sleep(0.6)

def quiet(work):  # a kernel is ended before the interpreter, and says so
    with contextlib.suppress(ringmem.ClosedError):
        work()

def waiting(work, count=1):
    for _ in range(count):
        threading.Thread(target=quiet, args=(work,), daemon=True).start()
    time.sleep(0.2)
    sys.modules["last"] = types.ModuleType("last")  # no thread keeps that alive
    sys.modules["last"].last = Last()
"""

WAITS = {
    "recv": "consumer = Ring('u8', 8).consumer(); waiting(consumer.recv)",
    "recv_into": "c = Ring('u8', 8).consumer(); waiting(lambda: c.recv_into(np.zeros(1, 'u8')))",
    "recv that spins": "c = Ring('u8', 8).consumer(); c.spin_us = -1; waiting(c.recv)",
    "wait": "consumer = Ring('u8', 8).consumer(); waiting(consumer.wait)",
    "send": "producer = Ring('u8', 8).producer(); waiting(lambda: producer.send(range(10)))",
    "reserve": "p = Ring('u8', 8).producer(); p.send(range(8)); waiting(lambda: p.reserve(1))",
    "kernel.recv": "kernel = native_echo().start(); waiting(kernel.recv)",
    "kernel.call, all the time": """
kernel = native_echo().start()
def work():
    while True:
        kernel.call(message(1))
waiting(work, 3)
""",
    "kernel.call in vain": """
kernel = native_echo().start()
kernel.pause()
waiting(lambda: kernel.call(message(1)), 3)
""",
    "asyncio": """
kernel = native_echo().start()
async def one():
    while True:
        await kernel.aio.call(message(1))
async def main():
    await asyncio.gather(*(one() for _ in range(20)))
waiting(lambda: asyncio.run(main()))
""",
    "kernel.drain": """
kernel = native_echo(capacity=4).start()
kernel.send(np.zeros(6, kernel.spec.message))
waiting(kernel.drain)
kernel.recv()
""",
    "stream.synchronize": """
device = simulate(latency_s=0.5).devices[0]
stream = device.create_stream()
event = device.create_event()
event.record(stream)
waiting(stream.synchronize)
""",
    "stream.synchronize with a timeout": """
device = simulate(latency_s=5).devices[0]
stream = device.create_stream()
device.create_event().record(stream)
waiting(lambda: stream.synchronize(timeout_s=0.5))
""",
    "event.synchronize": """
device = simulate(latency_s=0.5).devices[0]
stream = device.create_stream()
event = device.create_event()
event.record(stream)
waiting(event.synchronize)
""",
}


@pytest.mark.parametrize("body", WAITS.values(), ids=WAITS)
def test_a_thread_may_wait_at_the_end(body: str) -> None:
    done = run_script(HEAD + body, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_gil_is_given_away_and_taken_by_one_header() -> None:
    folder = Path(__file__).parents[2] / "src" / "ringmem" / "native" / "bind"
    users = {
        file.name
        for file in folder.glob("*.?pp")
        if re.search(r"gil_scoped_|PyGILState_Ensure|PyEval_SaveThread", file.read_text())
    }
    assert users == {"gil.hpp"}
