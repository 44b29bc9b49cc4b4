"""How deep a queue is, told while the kernel does not look."""

from __future__ import annotations

import time

import handlers_for_tests as h

from ringmem import RingKernel


def test_telemetry_counts_what_waits_on_a_paused_ring() -> None:
    with h.native_echo() as kernel:
        kernel.call(h.message(1))
        assert kernel.telemetry().queue_depth == 0
        kernel.pause()
        kernel.send([h.message(i) for i in range(3)])
        assert kernel.telemetry().queue_depth == 3
        kernel.resume()
        kernel.drain()
        assert kernel.telemetry().queue_depth == 0


def test_telemetry_counts_what_waits_behind_a_handler_that_does_not_return() -> None:
    with RingKernel(h.SLEEP_TENTHS, message=h.PAIR, device="cpu") as kernel:
        kernel.send([(0, 3), (0, 0), (0, 0)])
        time.sleep(0.05)
        assert kernel.telemetry().queue_depth == 3
        kernel.drain()
        assert kernel.telemetry().queue_depth == 0


def test_telemetry_counts_what_is_sent_before_the_start_and_kept_over_an_end() -> None:
    kernel = h.native_echo()
    kernel.send([h.message(1)] * 5)
    assert kernel.telemetry().queue_depth == 5
    with kernel:
        kernel.recv(5, timeout_s=5)
        h.until(lambda: kernel.telemetry().queue_depth == 0)
