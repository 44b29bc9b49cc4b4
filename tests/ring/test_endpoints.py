"""Both ends of a ring in one process: batches in place and by copy, policies, waits, bad input."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmem.native import aligned, errors
from ringmem.ring import Ring, poll_interval_us, set_poll_interval_us
from ringmem.ring.slots import slot_dtype

SMALL = np.dtype([("key", "u8"), ("value", "f8"), ("kind", "i2"), ("name", "S6")])
WIDE = np.dtype([("a", "V56"), ("b", "u8"), ("c", "f4", (4,))])  # two lines, no field across
STRADDLING = np.dtype([("values", "f4", (30,))])  # 120 bytes
DTYPES = [np.dtype("u8"), np.dtype("M8[ns]"), np.dtype("c16"), SMALL, WIDE, STRADDLING]


def filled(dtype, count, seed=0):
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype)


def same(left, right):
    """Bytes agree; for structured dtypes field by field, since padding does not travel in views."""
    if left.dtype.names is None:
        return left.tobytes() == right.tobytes()
    return all(same(left[n].copy(), right[n].copy()) for n in left.dtype.names)


def ends(message, capacity, full="wait"):
    ring = Ring(message, capacity)
    return ring.producer(full), ring.consumer()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_arrive_bit_for_bit(dtype):
    producer, consumer = ends(dtype, 16)
    batch = filled(dtype, 10)
    for _ in range(5):  # over the wrap
        assert producer.send(batch) == 10
        assert consumer.depth == 10
        assert consumer.recv(timeout_s=1).tobytes() == batch.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_in_place_are_the_messages(dtype):
    producer, consumer = ends(dtype, 16)
    for lap in range(5):
        batch = filled(dtype, 10, lap)
        done = 0
        for view in producer.reserve(10):
            view[:] = batch[done : done + len(view)]
            done += len(view)
        assert done == 10
        assert consumer.poll() == ()
        producer.commit()
        got = consumer.poll()
        in_place = slot_dtype(dtype) is not None
        assert len(got) == (2 if in_place and (lap * 10) % 16 > 6 else 1)
        assert same(np.concatenate([view.astype(dtype) for view in got]), batch)
        consumer.release()


def test_a_view_hides_sequences_and_shares_memory():
    producer, consumer = ends(SMALL, 8)
    (view,) = producer.reserve(3)
    assert view.dtype == SMALL
    assert view.strides == (64,)
    producer.commit(2)
    (ready,) = consumer.poll()
    assert len(ready) == 2
    view["key"][1] = 77
    assert ready["key"][1] == 77
    assert consumer.statuses().tolist() == [0, 0]


def test_part_of_a_batch_can_be_committed_and_released():
    producer, consumer = ends("u4", 8)
    (view,) = producer.reserve(5)
    view[:] = range(5)
    producer.commit(3)
    assert producer.tail == 3
    (ready,) = consumer.poll(2)
    assert ready.tolist() == [0, 1]
    consumer.release(1)
    assert consumer.head == 1
    assert consumer.recv().tolist() == [1, 2]


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.integers(1, 240),
    shift=st.integers(0, 5),
    steps=st.lists(
        st.tuples(st.booleans(), st.booleans(), st.integers(0, 40)), min_size=1, max_size=60
    ),
)
def test_any_mix_of_batches_is_a_queue(nbytes, shift, steps):
    """Random sends and receives, in place or by copy, against a list."""
    dtype = np.dtype(f"V{nbytes}")
    producer, consumer = ends(dtype, 1 << shift, "refuse")
    sent = received = 0
    for send, copy, count in steps:
        if send:
            batch = np.concatenate([filled(dtype, 1, sent + i) for i in range(count)] or [[]])
            batch = batch.astype(dtype)
            room = min(count, (1 << shift) - (sent - received))
            if copy:
                assert producer.send(batch) == room
            else:
                views = producer.reserve(count)
                assert sum(map(len, views)) == room
                done = 0
                for view in views:
                    view[:] = batch[done : done + len(view)]
                    done += len(view)
                producer.commit()
            sent += room
            continue
        ready = min(count, sent - received)
        if copy:
            got = consumer.recv(count, timeout_s=0)
        else:
            got = np.concatenate([v.copy() for v in consumer.poll(count)] or [np.empty(0, dtype)])
            consumer.release()
        assert len(got) == ready
        for i, one in enumerate(got):
            assert one.tobytes() == filled(dtype, 1, received + i).tobytes()
        received += ready


def test_a_full_ring_refuses_drops_or_waits():
    producer, consumer = ends("u4", 4, "refuse")
    assert producer.send(np.arange(6, dtype="u4")) == 4
    assert producer.send(np.arange(6, dtype="u4")) == 0
    assert producer.reserve(1) == ()
    assert producer.dropped == 0

    producer, consumer = ends("u4", 4, "drop")
    assert producer.send(np.arange(6, dtype="u4")) == 4
    assert producer.dropped == consumer.dropped == 2
    assert producer.reserve(3) == ()
    assert producer.dropped == 5

    producer, consumer = ends("u4", 4, "wait")
    with pytest.raises(errors.TimeoutError, match="4 of 6 messages") as caught:
        producer.send(np.arange(6, dtype="u4"), timeout_s=0.01)
    assert caught.value.sent == 4
    with pytest.raises(errors.TimeoutError, match="no 1 free slots"):
        producer.reserve(1, timeout_s=0.01)
    with pytest.raises(errors.InvalidValueError, match="more than the ring's 4 slots"):
        producer.reserve(5)
    reader = threading.Timer(0.02, lambda: consumer.recv(2))
    reader.start()
    assert producer.send(np.arange(2, dtype="u4"), timeout_s=5) == 2
    reader.join()


def test_a_batch_larger_than_the_ring_is_sent_while_a_reader_reads():
    producer, consumer = ends(SMALL, 16)
    batch = filled(SMALL, 5000)
    got = []

    def read():
        while sum(map(len, got)) < 5000:
            got.append(consumer.recv(timeout_s=10))

    reader = threading.Thread(target=read)
    reader.start()
    assert producer.send(batch, timeout_s=10) == 5000
    reader.join()
    assert np.concatenate(got).tobytes() == batch.tobytes()


@pytest.mark.parametrize("spin_us", [-1, 0, 50])
def test_a_waiting_reader_lets_python_run_and_is_woken(spin_us):
    producer, consumer = ends("u8", 8)
    consumer.spin_us = spin_us
    assert consumer.spin_us == spin_us
    out = []
    reader = threading.Thread(target=lambda: out.append(consumer.recv(timeout_s=10).tolist()))
    reader.start()
    time.sleep(0.05)  # the main thread runs: the wait holds no GIL
    producer.send(9)
    reader.join()
    assert out == [[9]]


def test_waits_end_in_time_and_zero_only_looks():
    _, consumer = ends("u8", 8)
    start = time.monotonic()
    with pytest.raises(errors.TimeoutError):
        consumer.recv(timeout_s=0.05)
    with pytest.raises(TimeoutError):  # the built-in family too
        consumer.recv_into(np.empty(1, "u8"), timeout_s=0.05)
    assert not consumer.wait(0.05)
    assert 0.15 <= time.monotonic() - start < 5
    assert len(consumer.recv(timeout_s=0)) == 0
    assert consumer.recv_into(np.empty(3, "u8"), timeout_s=0) == 0
    for bad in (-1.0, float("nan")):
        with pytest.raises(errors.InvalidValueError, match="timeout_s"):
            consumer.recv(timeout_s=bad)


def test_recv_into_gives_messages_and_statuses():
    producer, consumer = ends("u8", 8)
    producer.send(np.arange(5, dtype="u8"))
    out, statuses = np.zeros(8, "u8"), np.full(3, -1, "i4")
    assert consumer.recv_into(out, statuses=statuses) == 3
    assert out[:3].tolist() == [0, 1, 2]
    assert statuses.tolist() == [0, 0, 0]
    assert consumer.recv_into(out[:0], timeout_s=1) == 0


def test_an_end_that_closes_tells_the_other():
    producer, consumer = ends("u8", 4)
    producer.send([1, 2])
    producer.close()
    producer.close()
    assert consumer.peer_closed
    assert consumer.recv().tolist() == [1, 2]
    with pytest.raises(errors.ClosedError, match="producer closed the ring"):
        consumer.recv()
    for use in (lambda: producer.send(1), lambda: producer.reserve(1), lambda: producer.free):
        with pytest.raises(errors.ClosedError):
            use()

    producer, consumer = ends("u8", 4)
    consumer.close()
    assert producer.peer_closed
    assert producer.send([1, 2, 3, 4]) == 4
    with pytest.raises(errors.ClosedError, match="consumer closed the ring"):
        producer.send(5)
    assert "closed" in repr(consumer)


def test_ends_may_come_and_go():
    with Ring("u8", 4) as ring:
        for lap in range(3):
            producer = ring.producer()
            producer.send(lap)
            producer.close()
            consumer = ring.consumer()
            assert consumer.recv().tolist() == [lap]
            with pytest.raises(errors.ClosedError, match="producer closed"):
                consumer.recv()
            consumer.close()
        consumer = ring.consumer()
        assert not consumer.wait(0.01)  # for the next producer, not the last


def test_closing_ends_a_wait_in_another_thread():
    producer, consumer = ends("u8", 4)
    caught = []

    def read():
        try:
            consumer.recv()
        except errors.ClosedError as error:
            caught.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    consumer.close()
    reader.join(5)
    assert caught == ["the consumer was closed while it waited"]
    assert producer.peer_closed


def test_a_second_thread_is_told():
    _, consumer = ends("u8", 4)
    reader = threading.Thread(target=lambda: consumer.wait(0.5))
    reader.start()
    time.sleep(0.1)
    with pytest.raises(errors.RingmemError, match="one thread at a time"):
        consumer.poll()
    reader.join()
    assert consumer.poll() == ()


def test_the_same_end_cannot_be_held_twice():
    ring = Ring("u8", 4)
    producer = ring.producer()
    with pytest.raises(
        errors.InvalidValueError, match=f"producer already, in process {os.getpid()}"
    ):
        ring.producer()
    producer.send(1)
    producer.close()
    assert ring.producer().tail == 1
    consumer = ring.consumer()
    assert ring.consumer(force=True).recv().tolist() == [1]
    del consumer


def test_an_end_that_is_forgotten_is_closed():
    ring = Ring("u8", 4)
    consumer = ring.consumer()
    producer = ring.producer()
    ring._ends.remove(producer)
    del producer
    gc.collect()
    assert consumer.peer_closed


def test_batches_of_the_wrong_kind_are_refused():
    producer, consumer = ends(SMALL, 4)
    wrong = [
        np.zeros(2, "u8"),
        np.zeros(2, [("key", "u8"), ("value", "f8"), ("kind", "i2"), ("title", "S6")]),
        np.float64(3),
        ["text"],
        b"bytes",
        None,
    ]
    for batch in wrong:
        with pytest.raises(errors.InvalidValueError, match="dtype"):
            producer.send(batch)
    with pytest.raises(errors.InvalidValueError, match="out is of dtype"):
        consumer.recv_into(np.zeros(2, "u8"))
    with pytest.raises(errors.InvalidValueError, match="out is of list"):
        consumer._native.receive([], 1, 0, None)
    with pytest.raises(errors.InvalidValueError, match="C-contiguous"):
        consumer.recv_into(np.zeros(4, SMALL)[::2])
    with pytest.raises(errors.InvalidValueError, match="dtype int32"):
        consumer.recv_into(np.zeros(4, SMALL), statuses=np.zeros(4, "u4"))
    frozen = np.zeros(4, SMALL)
    frozen.flags.writeable = False
    with pytest.raises(errors.InvalidValueError, match="writable"):
        consumer.recv_into(frozen)
    assert producer.tail == 0


def test_what_converts_is_sent():
    producer, consumer = ends(SMALL, 8)
    one = np.array([(1, 2.5, 3, b"four")], SMALL)
    assert producer.send((1, 2.5, 3, b"four")) == 1
    assert producer.send([(1, 2.5, 3, b"four")]) == 1
    assert producer.send(one[0]) == 1
    assert producer.send(one.reshape(())) == 1
    assert producer.send(np.repeat(one, 4)[::2]) == 2
    assert producer.send(np.zeros(0, SMALL)) == 0
    assert (consumer.recv() == np.repeat(one, 6)).all()


def test_counts_are_checked():
    producer, consumer = ends("u8", 4)
    with pytest.raises(errors.InvalidValueError, match="n=-1"):
        producer.reserve(-1)
    producer.reserve(2)
    with pytest.raises(errors.InvalidValueError, match="n=3 is more than the 2 reserved"):
        producer.commit(3)
    producer.commit(1)
    with pytest.raises(errors.InvalidValueError, match="n=1 is more than the 0 reserved"):
        producer.commit(1)
    consumer.poll()
    with pytest.raises(errors.InvalidValueError, match="n=2 is more than the 1 polled"):
        consumer.release(2)
    with pytest.raises(errors.InvalidValueError, match="max=-1"):
        consumer.poll(-1)
    with pytest.raises(errors.InvalidValueError, match="full='maybe'"):
        Ring("u8", 4).producer("maybe")
    for bad in (float("nan"), 1e10):
        with pytest.raises(errors.InvalidValueError, match="spin_us"):
            producer.spin_us = bad


def test_bad_rings_are_refused():
    for capacity in (0, -4, 3, 1 << 31):
        with pytest.raises(errors.InvalidValueError, match=f"capacity={capacity}"):
            Ring("u8", capacity)
    for message in (object, "V0", ("f4", (3,)), "V1048577"):
        with pytest.raises(errors.InvalidValueError, match="message"):
            Ring(message, 4)
    ring = Ring("u8", 4)
    ring.close()
    ring.close()
    assert "closed" in repr(ring)
    with pytest.raises(errors.ClosedError):
        ring.producer()


def test_a_ring_lives_in_memory_that_is_passed_in():
    nbytes = Ring.nbytes_for("u8", 4)
    memory = aligned.aligned_zeros(nbytes, "u1")
    ring = Ring("u8", 4, memory=memory)
    same_ring = Ring.attach(memory, "u8")
    ring.producer().send([1, 2])
    assert same_ring.consumer().recv().tolist() == [1, 2]
    with pytest.raises(errors.InvalidValueError, match="no descriptor"):
        _ = ring.fd
    with pytest.raises(errors.InvalidValueError, match=f"{nbytes} are needed"):
        Ring("u8", 4, memory=memory[128:])
    with pytest.raises(errors.InvalidValueError, match="multiple of 128"):
        Ring("u8", 1, memory=memory[64:])
    with pytest.raises(errors.InvalidValueError, match="read-only"):
        Ring("u8", 4, memory=bytes(nbytes))
    with pytest.raises(errors.InvalidValueError, match="must be a buffer"):
        Ring("u8", 4, memory=object())
    with pytest.raises(errors.InvalidValueError, match="have 8"):
        Ring.attach(memory, "u4")
    memory[:] = 0
    with pytest.raises(errors.CorruptedError, match="no ring"):
        Ring.attach(memory, "u8")
    with pytest.raises(errors.InvalidValueError, match="no open file"):
        Ring.attach(10**6, "u8")


def test_views_outlive_the_ring_that_gave_them():
    ring = Ring("u8", 4)
    (view,) = ring.producer().reserve(4)
    view[:] = 5
    ring.close()
    del ring
    gc.collect()
    assert view.tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("head", [7, 1 << 40, (1 << 64) - 1])
def test_a_consumer_that_writes_nonsense_is_reported(head):
    memory = aligned.aligned_zeros(Ring.nbytes_for("u8", 4), "u1")
    ring = Ring("u8", 4, memory=memory)
    producer, consumer = ring.producer(), ring.consumer()
    producer.send([1, 2, 3, 4])
    consumer.recv(2)
    producer.send([5, 6])
    memory[256:264].view("u8")[0] = head  # the consumer's index line
    with pytest.raises(errors.CorruptedError, match="consumer's index"):
        producer.send(5, timeout_s=1)
    with pytest.raises(errors.CorruptedError):
        producer.reserve(1, timeout_s=1)


@pytest.mark.parametrize("sequence", [2, 0xFFFFFFFF])
def test_a_producer_that_writes_nonsense_is_reported(sequence):
    memory = aligned.aligned_zeros(Ring.nbytes_for("u8", 4), "u1")
    ring = Ring("u8", 4, memory=memory)
    consumer = ring.consumer()
    memory[384:388].view("u4")[0] = sequence  # the first slot's sequence
    for use in (
        lambda: consumer.recv(timeout_s=1),
        lambda: consumer.poll(),
        lambda: consumer.recv_into(np.empty(1, "u8"), timeout_s=1),
    ):
        with pytest.raises(errors.CorruptedError, match="sequence"):
            use()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_damage_raises_or_passes_but_never_crashes(seed):
    random = np.random.default_rng(seed)
    memory = aligned.aligned_zeros(Ring.nbytes_for("V100", 4), "u1")
    ring = Ring("V100", 4, memory=memory)
    producer, consumer = ring.producer("refuse"), ring.consumer()
    for _ in range(10):
        at = int(random.integers(0, len(memory)))
        memory[at] = random.integers(0, 256)
        try:
            producer.send(filled(np.dtype("V100"), 2))
            consumer.recv(timeout_s=0)
            consumer.poll()
            consumer.release()
        except (errors.CorruptedError, errors.ClosedError):
            pass
        assert consumer.depth <= 4


def test_the_poll_interval_is_a_setting():
    before = poll_interval_us()
    set_poll_interval_us(100)
    assert poll_interval_us() == 100
    for bad in (0, 1_000_001):
        with pytest.raises(errors.InvalidValueError, match="interval_us"):
            set_poll_interval_us(bad)
    set_poll_interval_us(before)


@pytest.mark.parametrize("batch", [5, 1.5, [1, 2], [[1, 2]], "ab", True])
def test_a_bare_value_is_not_put_into_every_field(batch):
    with Ring(np.dtype([("key", "u8"), ("value", "f8")]), capacity=8) as ring:
        producer = ring.producer()
        with pytest.raises(errors.InvalidValueError, match="give a tuple, a value a field"):
            producer.send(batch)
        assert producer.send((1, 2.0)) == 1


def test_a_bare_value_is_a_message_of_one_field():
    with Ring(np.dtype([("key", "u8")]), capacity=8) as ring:
        assert ring.producer().send([1, 2]) == 2
        assert ring.consumer().recv(2)["key"].tolist() == [1, 2]


@pytest.mark.parametrize("message", [None, "nonsense"])
def test_what_is_no_dtype_is_refused_by_name(message):
    with pytest.raises(errors.InvalidValueError, match="message=.* is no dtype"):
        Ring(message, capacity=8)


@pytest.mark.parametrize("capacity", [4, 8])
@pytest.mark.parametrize("message", ["u8", STRADDLING], ids=str)
def test_nothing_is_sent_into_slots_that_are_reserved(capacity, message):
    producer, consumer = ends(message, capacity, "refuse")
    (view,) = producer.reserve(4)
    batch = filled(np.dtype(message), 4)
    view[:] = batch
    with pytest.raises(errors.InvalidValueError, match="4 slots are reserved and not committed"):
        producer.send(batch[:1])
    producer.commit(4)
    assert same(consumer.recv(timeout_s=1), batch)
    producer.reserve(2)
    producer.commit(0)
    assert producer.send(batch[:1]) == 1
    assert same(consumer.recv(timeout_s=1), batch[:1])


def test_what_was_accepted_before_a_send_was_given_up_is_told():
    producer, consumer = ends("u8", 8)
    failed = []

    def send():
        try:
            producer.send(np.arange(100, dtype="u8"))
        except errors.ClosedError as error:
            failed.append(error.sent)

    sender = threading.Thread(target=send)
    sender.start()
    while consumer.depth < 8:
        time.sleep(0.001)
    assert consumer.recv(5).tolist() == [0, 1, 2, 3, 4]
    while consumer.depth < 8:
        time.sleep(0.001)
    consumer.close()
    sender.join()
    assert failed == [13]


def test_what_was_only_waited_for_is_not_released():
    producer, consumer = ends("u8", 8)
    producer.send([7, 8])
    assert consumer.wait(1)
    consumer.release()
    with pytest.raises(errors.InvalidValueError, match="n=1 is more than the 0 polled"):
        consumer.release(1)
    assert consumer.statuses().tolist() == []
    assert consumer.recv(timeout_s=0).tolist() == [7, 8]


def test_release_gives_back_what_the_last_poll_returned():
    producer, consumer = ends("u8", 8)
    producer.send([1, 2, 3, 4, 5, 6])
    assert consumer.poll(5)[0].tolist() == [1, 2, 3, 4, 5]
    assert consumer.poll(2)[0].tolist() == [1, 2]
    assert len(consumer.statuses()) == 2
    with pytest.raises(errors.InvalidValueError, match="the last poll"):
        consumer.release(3)
    consumer.release()
    consumer.release()  # nothing more
    assert consumer.poll(3)[0].tolist() == [3, 4, 5]
    consumer.release(1)
    consumer.release()  # the rest
    assert consumer.recv(timeout_s=0).tolist() == [6]
    producer.send([7, 8, 9])
    assert sum(map(len, consumer.poll())) == 3
    assert consumer.recv_into(np.zeros(2, "u8")) == 2  # of those
    consumer.release()
    assert consumer.recv(timeout_s=0).tolist() == []


def test_a_producer_that_is_refused_was_never_there():
    ring = Ring("u8", 8)
    consumer = ring.consumer()
    for bad in ("bogus", None, ["wait"]):
        with pytest.raises(errors.InvalidValueError, match="must be 'wait', 'refuse' or 'drop'"):
            ring.producer(bad)
    with pytest.raises(errors.TimeoutError):
        consumer.recv(timeout_s=0.05)
    assert not consumer.peer_closed


@pytest.mark.parametrize("bad", [2.5, "3", None, -1, 2**63, 2**70])
def test_numbers_of_messages_that_are_none_are_refused(bad):
    for full in ("wait", "refuse", "drop"):
        producer, consumer = ends("u8", 8, full)
        calls = [producer.reserve]
        if bad is not None:
            calls += [producer.commit, consumer.poll, consumer.release, consumer.recv]
        for call in calls:
            with pytest.raises(errors.InvalidValueError, match="must be a whole number from 0 to"):
                call(bad)
        assert producer.dropped == 0
    for call in (consumer.poll, consumer.recv):
        assert len(call(np.int64(0))) == 0


@pytest.mark.parametrize("bad", ["x", None, -1, float("nan"), [1]])
def test_times_that_are_none_are_refused(bad):
    producer, consumer = ends("u8", 1)
    if bad is not None:  # for good
        with pytest.raises(errors.InvalidValueError, match="timeout_s"):
            consumer.recv(timeout_s=bad)
        producer.send(1)
        with pytest.raises(errors.InvalidValueError, match="timeout_s"):
            producer.reserve(1, timeout_s=bad)
        with pytest.raises(errors.InvalidValueError, match="timeout_s"):
            producer.send(1, timeout_s=bad)
    if bad != -1:
        with pytest.raises(errors.InvalidValueError, match="spin_us"):
            consumer.spin_us = bad


@pytest.mark.parametrize("bad", [2**63, 2**64, 2**70, 0, -8, 8.0, "8"])
def test_capacities_that_are_none_are_refused(bad):
    with pytest.raises(errors.InvalidValueError, match="capacity"):
        Ring("u8", bad)


def test_a_wait_for_a_peer_that_ended_says_why_once_it_is_known():
    """A kernel's ends are closed some moments before its state says so."""
    asked = []

    def on_wait():
        asked.append(1)
        if len(asked) > 5:
            raise errors.ClosedError("the kernel is terminated")

    for first_closed in ("producer", "consumer"):
        producer, consumer = ends("u8", 1)
        producer.send(1)
        waiting, peer = (consumer, producer) if first_closed == "producer" else (producer, consumer)
        waiting._native.on_wait = on_wait
        asked.clear()
        peer.close()
        with pytest.raises(errors.ClosedError, match="the kernel is terminated"):
            _ = [consumer.recv() for _ in range(2)] if waiting is consumer else producer.send(2)
        assert len(asked) == 6
