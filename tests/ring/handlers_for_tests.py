"""Handlers for kernels in this process and in children: ctypes callbacks, Python functions."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ringmem
from ringmem import NativeHandler
from ringmem.native import _native
from ringmem.ring import RingKernel

PAIR = np.dtype([("a", "i8"), ("b", "i8")])
TOTAL = np.dtype([("total", "i8")])
ECHO = np.dtype([("words", "u8", (7,))])
COUNTER = np.dtype([("count", "i8"), ("sum", "i8")])

PLAIN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def add(message, reply, state):
    reply.total = message.a + message.b
    return 0


def count(message, reply, state):
    """Replies with the running sum; refuses negative numbers with status 7."""
    state.count += 1
    if message.a < 0:
        return 7
    state.sum += message.a
    reply.total = state.sum
    return 0


def sleep_a_second(message: int, reply: int, state: int) -> int:
    time.sleep(1.0)
    return 0


SLEEP_A_SECOND = PLAIN(sleep_a_second)


def sleep_tenths(message: int, reply: int, state: int) -> int:
    """Sleeps tenths of a second, as many as `PAIR.b` says."""
    time.sleep(0.1 * ctypes.c_int64.from_address(message + 8).value)
    return 0


SLEEP_TENTHS = PLAIN(sleep_tenths)


def endless(message, reply, state):
    while state.count >= 0:
        state.count = (state.count * 5 + message.a) & 0xFFFF
    return 0


def raises(message, reply, state):
    raise ValueError("no handler may raise")


# --- the echo: every word times three, and one -----------------------------------------------------


def native_echo(**arguments: object) -> RingKernel:
    return RingKernel(
        NativeHandler(_native.echo_handler(7)), message=ECHO, device="cpu", **arguments
    )


def message(number: int) -> np.void:
    one = np.zeros(1, ECHO)
    one["words"] = number
    return one[0]


def first(reply: np.void) -> int:
    return int(reply["words"][0])


def _environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    source = str(Path(ringmem.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, here])}


def run_script(text: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env=_environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def open_script(text: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", text], env=_environment(), stdin=pipe, stdout=pipe, text=True
    )


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
