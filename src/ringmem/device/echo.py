"""The echo test: whether a running stream and the host see each other's stores.

No kernel is needed. The stream waits for a value in a pinned word and then writes another word;
the host stores the first and polls for the second. It relies on `stream_wait_value` waiting until
``*ptr >= value``, with nothing else to make the stream go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from typing import TYPE_CHECKING, NamedTuple

from ringmem.device.pinned import give_back_pinned, take_pinned
from ringmem.device.scalars import to_seconds
from ringmem.native.errors import InvalidValueError, NotSupportedError, RingmemError

if TYPE_CHECKING:
    from ringmem.device.device import Device
    from ringmem.device.stream import Stream

__all__ = ["EchoResult", "run_echo"]

_BLOCK_NBYTES = 4096
_ANSWER_OFFSET = 128  # a cache line and its prefetched neighbour away from the question
_SUBMIT_S = 0.001  # for the submission to reach the device, so that the round trip is the link's


class EchoResult(NamedTuple):
    """What came of an echo test.

    Attributes
    ----------
    answered : bool or None
        Whether the answer came in time; None: the device cannot run the test.
    round_trip_us : float or None
        Microseconds from the host's store to the answer, Python's polling included.
    reason : str
        One sentence for people.
    """

    answered: bool | None
    round_trip_us: float | None
    reason: str


def run_echo(device: Device, *, timeout_s: float = 1.0) -> EchoResult:
    """Run the echo test on a stream of its own; bounded, and no stream stays stuck.

    Parameters
    ----------
    device : Device
        It must be able to map host memory.
    timeout_s : float, default 1.0
        Seconds to wait for the answer; twice as long again, at most, to clear up after
        a silence.

    Raises
    ------
    InvalidValueError
        `timeout_s` is not a positive number.
    DriverError
        The driver failed.
    """
    limit_s = to_seconds(timeout_s)
    if limit_s is None or not 0 < limit_s < math.inf:
        raise InvalidValueError(f"timeout_s is {timeout_s!r}: give a positive number of seconds")
    block = take_pinned(device, _BLOCK_NBYTES)
    settled = True
    try:
        stream = device.create_stream()
        try:
            settled = False
            return _ask(device, stream, block.ptr, limit_s)
        finally:
            settled = _release(device, stream, block.ptr, limit_s)
            stream.close()
    except NotSupportedError as error:
        return EchoResult(None, None, f"no echo test: {error}")
    finally:
        if settled:
            give_back_pinned(device, block)
        else:  # the device may still write to it: lost rather than handed on
            block.give_up()


def _ask(device: Device, stream: Stream, block: int, timeout_s: float) -> EchoResult:
    question = ctypes.c_uint32.from_address(block)
    answer = ctypes.c_uint32.from_address(block + _ANSWER_OFFSET)
    question.value = answer.value = 0
    driver, ordinal = device.driver, device.ordinal
    base = driver.host_device_pointer(ordinal, block)
    driver.stream_wait_value(ordinal, stream.handle, base, 1)
    driver.stream_write_value(ordinal, stream.handle, base + _ANSWER_OFFSET, 1)
    time.sleep(_SUBMIT_S)
    if answer.value != 0:
        return EchoResult(False, None, "echo test: the stream did not wait for the host's store")
    deadline = time.perf_counter() + timeout_s
    start = time.perf_counter_ns()
    question.value = 1
    while answer.value != 1:
        if time.perf_counter() > deadline:
            return EchoResult(False, None, f"echo test: no answer within {timeout_s:g} s")
    round_trip_us = (time.perf_counter_ns() - start) / 1000
    return EchoResult(True, round_trip_us, f"echo test: answered in {round_trip_us:.1f} µs")


def _release(device: Device, stream: Stream, block: int, timeout_s: float) -> bool:
    """Let the stream go on, whatever happened; return whether it is idle. Never raises."""
    ctypes.c_uint32.from_address(block).value = 1
    try:
        if _is_idle_within(stream, timeout_s):
            return True
        # The host's store is not seen: let another stream store it on the device.
        with contextlib.closing(device.create_stream()) as helper:
            word = device.driver.host_device_pointer(device.ordinal, block)
            device.driver.stream_write_value(device.ordinal, helper.handle, word, 1)
            return _is_idle_within(stream, timeout_s) and _is_idle_within(helper, timeout_s)
    except RingmemError:
        return False


def _is_idle_within(stream: Stream, timeout_s: float) -> bool:
    try:
        stream.synchronize(timeout_s)
    except RingmemError:  # the time was up, or the driver failed
        return False
    return True
