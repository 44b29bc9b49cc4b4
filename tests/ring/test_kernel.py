"""Ring kernels on the CPU: messages, life, state, failure."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
import warnings
from pathlib import Path

import handlers_for_tests as h
import numpy as np
import pytest
from handlers_for_tests import ECHO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringmem
from ringmem import (
    ClosedError,
    CorruptedError,
    HandlerError,
    InvalidValueError,
    KernelFailedError,
    NativeHandler,
    RingKernel,
)
from ringmem.native import _native
from ringmem.ring import KernelState


def echo(words: np.ndarray) -> np.ndarray:
    return words * np.uint64(3) + np.arange(1, words.shape[-1] + 1, dtype="u8")


def numbered(first: int, count: int) -> np.ndarray:
    batch = np.zeros(count, ECHO)
    batch["words"] = np.arange(first, first + count, dtype="u8")[:, None] * 1000 + np.arange(7)
    return batch


def native_echo(nbytes: int = 56, **arguments: object) -> RingKernel:
    words = nbytes // 8
    message = np.dtype([("words", "u8", (words,))])
    handler = NativeHandler(_native.echo_handler(words))
    return RingKernel(handler, message=message, device="cpu", **arguments)


def counting(**arguments: object) -> RingKernel:
    arguments = {"device": "cpu", **arguments}
    return RingKernel(h.count, message=h.PAIR, reply=h.TOTAL, state=h.COUNTER, **arguments)


# --- messages ----------------------------------------------------------------------------------
def test_call_returns_the_reply_whatever_form_the_message_has(kernel: RingKernel) -> None:
    batch = numbered(5, 1)
    expected = echo(batch["words"])[0].tolist()
    for message in (
        batch[0],
        batch,
        batch.reshape(()),
        batch.tobytes(),
        bytearray(batch.tobytes()),
    ):
        if isinstance(message, bytearray):
            message = bytes(message)
        reply = kernel.call(message, timeout_s=5)
        assert reply["words"].tolist() == expected
        assert reply.dtype == ECHO
    assert kernel.call(tuple(batch[0])).item()[0].tolist() == expected


def test_call_fills_out_and_returns_it(kernel: RingKernel) -> None:
    out = np.zeros(1, ECHO)
    assert kernel.call(numbered(1, 1), out=out) is out
    assert out["words"].tolist() == echo(numbered(1, 1)["words"]).tolist()


def test_reply_of_a_call_outlives_the_next_call(kernel: RingKernel) -> None:
    first = kernel.call(numbered(1, 1)[0])
    kernel.call(numbered(2, 1)[0])
    assert first["words"].tolist() == echo(numbered(1, 1)["words"])[0].tolist()


def test_equal_dtype_that_is_another_object_is_accepted(kernel: RingKernel) -> None:
    other = np.dtype([("words", "u8", (7,))])
    assert other is not ECHO
    reply = kernel.call(np.zeros(1, other)[0])
    assert reply["words"].tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "message",
    [
        np.zeros(2, ECHO),
        np.zeros(1, "u8"),
        np.zeros(1, [("words", "f8", (7,))])[0],
        b"short",
        None,
        "text",
    ],
)
def test_call_refuses_what_is_no_message(kernel: RingKernel, message: object) -> None:
    with pytest.raises(InvalidValueError):
        kernel.call(message, timeout_s=1)
    assert kernel.unread() == 0


@pytest.mark.parametrize(
    "keywords",
    [{"ring": 1}, {"ring": -1}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}],
)
def test_call_refuses_bad_settings(kernel: RingKernel, keywords: dict) -> None:
    with pytest.raises(InvalidValueError):
        kernel.call(numbered(0, 1), **keywords)


def test_call_refuses_unknown_arguments(kernel: RingKernel) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'timeout'"):
        kernel.call(numbered(0, 1), timeout=3)
    with pytest.raises(TypeError, match="one message"):
        kernel.call()


def test_call_is_refused_while_replies_are_unread(kernel: RingKernel) -> None:
    kernel.send(numbered(0, 3))
    with pytest.raises(InvalidValueError, match="unread"):
        kernel.call(numbered(0, 1))
    got = []
    while len(got) < 3:
        got += kernel.recv(timeout_s=5).tolist()
    kernel.call(numbered(0, 1))


@pytest.mark.parametrize("nbytes", [56, 112, 240])
def test_batches_come_back_whole_and_in_order(nbytes: int) -> None:
    with native_echo(nbytes, capacity=64) as kernel:
        producer = kernel._pairs[0].producer._native
        consumer = kernel._pairs[0].consumer._native
        for batch in (1, 7, 64):
            _, wrong = _native.measure_stream(producer, consumer, 5000, batch)
            assert wrong == 0
        times, wrong = _native.measure_round_trips(producer, consumer, 500)
        assert (len(times), wrong) == (2000, 0)


def test_views_of_slots_carry_messages_and_replies(kernel: RingKernel) -> None:
    for view in kernel.reserve(3):
        view["words"] = 7
    kernel.commit(3)
    deadline = time.monotonic() + 5
    while kernel.unread() == 3 and sum(map(len, kernel.poll())) < 3:
        assert time.monotonic() < deadline
    views = kernel.poll()
    assert np.concatenate(views)["words"].tolist() == [echo(np.full(7, 7, "u8")).tolist()] * 3
    assert kernel.statuses().tolist() == [0, 0, 0]
    kernel.release()
    assert kernel.unread() == 0


def test_calls_on_a_ring_of_one_slot_never_find_it_full() -> None:
    with native_echo(capacity=1) as kernel:
        for i in range(2000):
            assert int(kernel.call(numbered(i, 1)[0], timeout_s=5)["words"][0]) == i * 3000 + 1


def test_every_ring_has_its_own_state_and_order() -> None:
    with counting(rings=3) as kernel:
        for ring in range(3):
            for value in range(1, 4):
                reply = kernel.call((value * 10**ring, 0), ring=ring)
            assert reply["total"] == 6 * 10**ring
        kernel.pause()
        assert [int(kernel.read_state(ring)["count"]) for ring in range(3)] == [3, 3, 3]


def test_threads_that_call_on_one_ring_take_turns(kernel: RingKernel) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for i in range(300):
            message = numbered(number * 1000 + i, 1)
            reply = kernel.call(message[0], timeout_s=30)
            if reply["words"].tolist() != echo(message["words"])[0].tolist():
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert kernel.telemetry().processed <= 1200


def test_late_reply_is_dropped_and_never_given_to_the_next_call() -> None:
    with counting(initial_state=(0, 0)) as kernel:
        kernel.pause()
        for _ in range(2):
            with pytest.raises(ringmem.TimeoutError, match="dropped when it comes"):
                kernel.call((1, 0), timeout_s=0.01)
        kernel.resume()
        assert kernel.call((10, 0), timeout_s=5)["total"] == 12
        assert kernel.unread() == 0


def test_full_ring_with_each_policy() -> None:
    for full, accepted, dropped in (("refuse", 8, 0), ("drop", 8, 12)):
        with native_echo(capacity=8, full=full) as kernel:
            kernel.pause()
            assert kernel.send(numbered(0, 20)) == accepted
            assert kernel._pairs[0].producer.dropped == dropped
    with native_echo(capacity=8) as kernel:
        kernel.pause()
        with pytest.raises(ringmem.TimeoutError):
            kernel.send(numbered(0, 20), timeout_s=0.05)
        kernel.resume()
        got = kernel.recv(timeout_s=5)
        assert got["words"].tolist()[0] == echo(numbered(0, 1)["words"])[0].tolist()


# --- statuses and dead letters -----------------------------------------------------------------
def test_status_raises_from_call_and_keeps_the_message() -> None:
    with counting() as kernel:
        with pytest.raises(HandlerError) as caught:
            kernel.call((-5, 2))
        assert caught.value.status == 7
        assert kernel.call((3, 0))["total"] == 3
        [(message, status)] = kernel.dead_letters()
        assert (message.item(), status) == ((-5, 2), 7)
        assert kernel.dead_letters() == []
        kernel.drain(5)
        assert (kernel.control().error_count, kernel.control().last_error) == (1, 7)
        assert kernel.telemetry().last_error == 7


def test_statuses_come_with_batches_and_letters_beyond_the_list_are_counted() -> None:
    with counting(dead_letters=4) as kernel:
        batch = np.zeros(10, h.PAIR)
        batch["a"] = [1, -1] * 5
        kernel.send(batch)
        kernel.drain(5)
        replies, statuses = np.zeros(10, h.TOTAL), np.zeros(10, "i4")
        assert kernel.recv_into(replies, 5, statuses) == 10
        assert statuses.tolist() == [0, 7] * 5
        assert kernel.telemetry().dropped == 1
        assert [status for _, status in kernel.dead_letters()] == [7] * 4


# --- life --------------------------------------------------------------------------------------
def test_life_of_a_kernel() -> None:
    kernel = native_echo()
    assert kernel.state is KernelState.NEW
    with pytest.raises(ClosedError, match="new"):
        kernel.call(numbered(0, 1))
    kernel.start()
    assert kernel.state is KernelState.ACTIVE
    with pytest.raises(InvalidValueError, match="start is not possible"):
        kernel.start()
    kernel.pause()
    kernel.pause()
    assert (kernel.state, kernel.control().is_paused) == (KernelState.PAUSED, 1)
    kernel.resume()
    kernel.drain(5)
    kernel.drain(5)
    assert kernel.state is KernelState.TERMINATED
    with pytest.raises(ClosedError, match="terminated"):
        kernel.call(numbered(0, 1))
    kernel.start()
    kernel.call(numbered(0, 1), timeout_s=5)
    kernel.terminate()
    kernel.terminate()
    kernel.close()
    kernel.close()
    assert kernel.state is KernelState.CLOSED
    for request in (
        kernel.start,
        kernel.drain,
        kernel.terminate,
        kernel.telemetry,
        kernel.read_state,
    ):
        with pytest.raises(ClosedError):
            request()
    with pytest.raises(ClosedError):
        kernel.call(numbered(0, 1))
    with pytest.raises(ClosedError):
        kernel.send(numbered(0, 1))


def test_drain_with_unread_replies_times_out_and_goes_on_when_they_are_read() -> None:
    with native_echo(capacity=8) as kernel:
        kernel.send(numbered(0, 8))
        kernel.send(numbered(8, 8))
        with pytest.raises(ringmem.TimeoutError, match="16 replies are unread"):
            kernel.drain(0.1)
        assert kernel.state is KernelState.DRAINING
        with pytest.raises(ClosedError, match="draining"):
            kernel.send(numbered(0, 1))
        got = kernel.recv(8, timeout_s=5)
        kernel.drain(5)
        got = np.concatenate([got, kernel.recv(timeout_s=5)])
        assert got["words"].tolist() == echo(numbered(0, 16)["words"]).tolist()


def test_reader_in_another_thread_lets_drain_finish() -> None:
    with native_echo(capacity=8) as kernel:
        kernel.send(numbered(0, 16))
        got: list[np.ndarray] = []

        def read() -> None:
            while sum(map(len, got)) < 16:
                got.append(kernel.recv(timeout_s=5))

        reader = threading.Thread(target=read)
        reader.start()
        kernel.drain(10)
        reader.join()
        assert np.concatenate(got)["words"].tolist() == echo(numbered(0, 16)["words"]).tolist()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 40)),
            st.tuples(st.just("recv"), st.integers(1, 40)),
            st.tuples(st.sampled_from(["pause", "resume", "drain", "terminate"]), st.just(0)),
        ),
        max_size=25,
    )
)
def test_no_message_is_lost_or_repeated_by_any_order_of_requests(requests: list) -> None:
    sent = 0
    received: list[np.ndarray] = []
    with native_echo(capacity=16, full="refuse") as kernel:
        for request, count in requests:
            if request == "send":
                sent += kernel.send(numbered(sent, count))
            elif request == "recv":
                if kernel.unread():
                    with contextlib.suppress(ringmem.TimeoutError, ClosedError):
                        received.append(kernel.recv(count, timeout_s=0.001))
            elif request == "drain":
                try:
                    kernel.drain(0.02)
                except ringmem.TimeoutError:  # more replies than slots: read some
                    received.append(kernel.recv(timeout_s=5))
                    kernel.drain(5)
                kernel.start()
            elif request == "terminate":
                kernel.terminate()
                kernel.start()
            elif request == "pause":
                kernel.pause()
            else:
                kernel.resume()
        kernel.resume()
        while sum(map(len, received)) < sent:
            received.append(kernel.recv(timeout_s=5))
        kernel.drain(5)
        assert kernel.unread() == 0
    got = np.concatenate([np.zeros(0, ECHO), *received])
    assert (
        got.tobytes()
        == np.ascontiguousarray(
            np.rec.fromarrays([echo(numbered(0, sent)["words"])], dtype=ECHO)
        ).tobytes()
    )


# --- state -------------------------------------------------------------------------------------
def test_state_is_read_and_written_while_paused_and_survives_a_restart(tmp_path: Path) -> None:
    with counting(initial_state=(0, 100), rings=2) as kernel:
        assert kernel.call((5, 0))["total"] == 105
        with pytest.raises(InvalidValueError, match="pause"):
            kernel.read_state()
        with pytest.raises(InvalidValueError, match="pause"):
            kernel.write_state((0, 0))
        kernel.pause()
        assert kernel.read_state().item() == (1, 105)
        kernel.write_state((1, 200))
        kernel.save(tmp_path / "state.npz")
        kernel.resume()
        assert kernel.call((1, 0))["total"] == 201
        kernel.terminate()
        assert kernel.read_state().item() == (2, 201)
        kernel.start()
        assert kernel.call((1, 0))["total"] == 202
        kernel.pause()
        kernel.load(tmp_path / "state.npz")
        assert [kernel.read_state(ring).item() for ring in range(2)] == [(1, 200), (0, 100)]
    with counting() as other, pytest.raises(InvalidValueError, match="2"):
        other.terminate()
        other.load(tmp_path / "state.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


def test_kernel_without_state_has_none_to_read() -> None:
    with native_echo() as kernel:
        kernel.pause()
        with pytest.raises(InvalidValueError, match="no state"):
            kernel.read_state()


def test_a_state_with_fields_in_any_order_is_saved_and_loaded(tmp_path: Path) -> None:
    spec = {"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": [4, 0], "itemsize": 12}
    kernel = native_echo(state=np.dtype(spec), initial_state=(70000, 3), rings=2)
    kernel.save(tmp_path / "state")
    kernel.write_state((1, 2), ring=1)
    kernel.load(tmp_path / "state")
    assert kernel.read_state(1).item() == (70000, 3)
    kernel.close()


def test_a_state_whose_fields_overlap_is_not_saved(tmp_path: Path) -> None:
    spec = {"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": [0, 2]}
    with (
        native_echo(state=np.dtype(spec)) as kernel,
        pytest.raises(InvalidValueError, match="has no form in a file"),
    ):
        kernel.pause()
        kernel.save(tmp_path / "state")


# --- telemetry ---------------------------------------------------------------------------------
def test_telemetry_counts_what_was_answered() -> None:
    with native_echo() as kernel:
        assert kernel.telemetry().processed == 0
        assert kernel.telemetry().latency_min_ns == 0
        for i in range(100):
            kernel.call(numbered(i, 1))
        kernel.drain(5)
        telemetry = kernel.telemetry()
        assert telemetry.processed == kernel.control().messages_processed == 100
        assert 0 < telemetry.latency_min_ns <= telemetry.latency_mean_ns <= telemetry.latency_max_ns
        assert telemetry.record["processed"] == 100
        assert telemetry.asdict()["queue_depth"] == 0


def test_queue_descriptors_say_where_the_rings_are(kernel: RingKernel) -> None:
    control, pair = kernel.control(), kernel._pairs[0].addresses
    assert control.input_capacity == control.output_capacity == 4096
    assert control.input_message_nbytes == control.output_message_nbytes == 56
    assert control.input_buffer_ptr == pair.input + 384
    kernel.call(numbered(0, 1))
    assert _native.load_u64(control.input_tail_ptr) == 1
    assert _native.load_u64(control.output_head_ptr) == 1


# --- failure -----------------------------------------------------------------------------------
def test_garbage_in_the_input_ring_ends_the_kernel_with_an_error() -> None:
    with native_echo(capacity=8) as kernel:
        _native.store_u32(kernel._pairs[0].addresses.input + 384, 77)
        with pytest.raises(CorruptedError, match="ring 0"):
            kernel.recv(timeout_s=5)
        assert kernel.state is KernelState.FAILED
        with pytest.raises(CorruptedError):
            kernel.drain(1)


def test_garbage_in_the_output_ring_is_refused() -> None:
    with native_echo(capacity=8) as kernel:
        _native.store_u32(kernel._pairs[0].addresses.output + 384, 77)
        with pytest.raises(CorruptedError):
            kernel.recv(timeout_s=5)


def test_impossible_head_of_the_reader_ends_the_kernel() -> None:
    with native_echo(capacity=8) as kernel:
        kernel.send(numbered(0, 8))
        _native.store_u64(kernel._pairs[0].addresses.output + 256, 1 << 40)
        kernel.send(numbered(0, 1))
        deadline = time.monotonic() + 5
        while kernel.state is not KernelState.FAILED:
            assert time.monotonic() < deadline


def test_deadline_ends_the_kernel_and_waiters_get_to_know() -> None:
    with native_echo(deadline_s=0.1) as kernel:
        with pytest.raises(KernelFailedError, match="deadline") as caught:
            kernel.recv(timeout_s=10)
        assert caught.value.reason == "orphaned"
        assert kernel.state is KernelState.FAILED
        kernel.start()
        kernel.call(numbered(0, 1), timeout_s=5)


def test_kernel_without_heartbeats_ends_itself() -> None:
    kernel = native_echo(heartbeat_timeout_s=0.2)
    kernel.start()
    time.sleep(0.5)
    assert kernel.state is KernelState.ACTIVE
    kernel._run.watch.forget()
    time.sleep(0.5)
    assert kernel.state is KernelState.FAILED
    kernel.close()


def test_python_handler_that_raises_fails_the_kernel_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ringmem.ring import cpu

    class Plain:
        @staticmethod
        def python(message, reply, state):
            reply.total = message.a // message.b
            return 0

    monkeypatch.setattr(cpu, "_compile", lambda handler, spec: Plain)
    with RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device="cpu") as kernel:
        assert kernel.call((7, 2))["total"] == 3
        # NumPy's scalars warn and give 0; Python's own raise.
        Plain.python = staticmethod(lambda message, reply, state: 1 // 0)
    with RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device="cpu") as kernel:
        with pytest.raises(KernelFailedError, match="ZeroDivisionError") as caught:
            kernel.call((7, 0), timeout_s=5)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert kernel.state is KernelState.FAILED


def test_watchdog_reports_a_handler_that_does_not_return() -> None:
    seen: list[tuple[int, ...]] = []
    kernel = RingKernel(
        h.SLEEP_A_SECOND,
        message=h.PAIR,
        device="cpu",
        stall_s=0.1,
        on_stall=lambda kernel, rings: seen.append(rings),
    )
    with kernel:
        assert kernel.stalled == ()
        with pytest.raises(ringmem.TimeoutError):
            kernel.call((1, 2), timeout_s=0.5)
        assert kernel.stalled == (0,)
        assert seen == [(0,)]
        with pytest.raises(ringmem.TimeoutError, match="isolated=True"):
            kernel.terminate(0.05)
        kernel.terminate(5)
    assert kernel.state is KernelState.CLOSED


def test_watchdog_warns_where_no_callback_is_given() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with RingKernel(h.SLEEP_A_SECOND, message=h.PAIR, device="cpu", stall_s=0.1) as kernel:
            kernel.send(np.zeros(1, h.PAIR))
            time.sleep(0.4)
            kernel.terminate(5)
    assert any("handled nothing" in str(one.message) for one in caught)


def test_dropped_kernel_is_ended_with_a_warning() -> None:
    kernel = native_echo()
    kernel.start()
    with pytest.warns(ResourceWarning, match="dropped while it ran"):
        del kernel
        gc.collect()


# --- arguments ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"capacity": 100}, "power of two; 128"),
        ({"capacity": 0}, "capacity=0"),
        ({"rings": 0}, "rings=0"),
        ({"rings": 1.5}, "rings=1.5"),
        ({"blocks": 0}, "blocks=0"),
        ({"workers": 32}, "workers=32"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"heartbeat_timeout_s": 0.001}, "heartbeat_timeout_s"),
        ({"stall_s": -1}, "stall_s"),
        ({"dead_letters": 3}, "dead_letters=3"),
        ({"parallel": "grid"}, "parallel='grid'"),
        ({"full": "panic"}, "full='panic'"),
        ({"message": "O"}, "objects"),
        ({"reply": "S0"}, "no bytes"),
        ({"handler": 3}, "handler=3"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments: dict, match: str) -> None:
    known = {"handler": NativeHandler(_native.echo_handler(7)), "message": ECHO, "device": "cpu"}
    threads = threading.active_count()
    with pytest.raises(InvalidValueError, match=match):
        RingKernel(**{**known, **arguments})
    assert threading.active_count() == threads


# --- processes ---------------------------------------------------------------------------------
SETUP = """
import os, sys, signal, time
import numpy as np
from ringmem import RingKernel, NativeHandler, ClosedError
from ringmem.native import _native
message = np.dtype([("words", "u8", (7,))])
kernel = RingKernel(NativeHandler(_native.echo_handler(7)), message=message, device="cpu")
kernel.start()
kernel.call(np.zeros(1, message), timeout_s=5)
"""


def test_interpreter_exit_ends_a_running_kernel() -> None:
    done = h.run_script(SETUP + "print('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_ctrl_c_interrupts_a_waiting_call_and_leaves_a_usable_kernel() -> None:
    done = h.run_script(
        SETUP
        + """
import threading
kernel.pause()
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    kernel.call(np.zeros(1, message))
except KeyboardInterrupt:
    kernel.resume()
    print(kernel.call(np.zeros(1, message), timeout_s=5)["words"].tolist())
"""
    )
    assert (done.returncode, done.stdout) == (0, "[1, 2, 3, 4, 5, 6, 7]\n"), done.stderr


def test_forked_child_is_refused_and_does_not_disturb_the_parent() -> None:
    done = h.run_script(
        SETUP
        + """
pid = os.fork()
if pid == 0:
    refused = 0
    for use in (lambda: kernel.call(np.zeros(1, message), timeout_s=1), kernel.pause,
                lambda: kernel.send(np.zeros(1, message)), kernel.terminate):
        try:
            use()
        except ClosedError:
            refused += 1
    kernel.close()
    sys.exit(refused)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), kernel.state.value)
print(kernel.call(np.zeros(1, message), timeout_s=5)["words"].tolist())
"""
    )
    assert (done.returncode, done.stdout) == (0, "4 active\n[1, 2, 3, 4, 5, 6, 7]\n"), done.stderr


def test_c_function_of_ctypes_is_a_handler() -> None:
    def add_one(message: int, reply: int, state: int) -> int:
        value = ctypes.c_uint64.from_address(message).value
        ctypes.c_uint64.from_address(reply).value = value + 1
        return 0

    with RingKernel(h.PLAIN(add_one), message="u8", device="cpu") as kernel:
        assert kernel.call(41, timeout_s=5) == 42


@pytest.mark.parametrize("value", [(1,), "a"])
def test_an_initial_state_that_does_not_fit_is_refused_by_name(value):
    state = np.dtype([("total", "f8"), ("count", "i8")])
    handler = NativeHandler(_native.echo_handler(7))
    with pytest.raises(InvalidValueError, match="state=.* is not of the state dtype"):
        RingKernel(handler, message=ECHO, state=state, device="cpu", initial_state=value)
