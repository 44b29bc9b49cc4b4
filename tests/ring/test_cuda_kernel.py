"""Ring kernels on a GPU, through the backend and the native endpoints.

Every kernel has a deadline, so that a failing test leaves nothing spinning.
"""

from __future__ import annotations

import contextlib
import math
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringmem.device import Device, devices
from ringmem.native import _native
from ringmem.native.errors import CorruptedError, InvalidValueError, NotSupportedError
from ringmem.ring import handlers
from ringmem.ring.backend import KernelSpec
from ringmem.ring.cuda import CudaBackend
from ringmem.ring.handlers import CudaSource, LtoIr
from ringmem.ring.pairs import make_pairs, plan_pair

pytestmark = pytest.mark.cuda

DEADLINE_S = 20.0
ORPHANED, TERMINATED, DRAINED, CORRUPTED = 3, 1, 2, 4


@pytest.fixture(scope="module")
def device():
    if not devices("cuda"):
        pytest.skip("no CUDA device")
    pytest.importorskip("cuda.core")
    return Device("cuda:0")


def until(condition, timeout_s=10.0):
    """Wait for a condition; what it returns."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "not in time"
        time.sleep(0.0005)
    return condition()


class Kernel:
    """A backend with its rings, and the host's ends of them."""

    def __init__(
        self, device, handler, message, reply=None, state=None, dead_letters=64, **changes
    ):
        options = {
            "capacity": 1024,
            "rings": 1,
            "workers": None,
            "blocks": 1,
            "deadline_s": DEADLINE_S,
            "parallel": None,
            **changes,
        }
        message = np.dtype(message)
        reply = message if reply is None else np.dtype(reply)
        self.spec = KernelSpec(message, reply, state and np.dtype(state), **options)
        self.backend = CudaBackend(device)
        self.backend.prepare(handler, self.spec)
        plan = plan_pair(self.spec, dead_letters)
        self.memory = self.backend.allocate(plan.nbytes * self.spec.rings)
        self.pairs = make_pairs(self.spec, dead_letters, self.memory, plan)
        for pair in self.pairs:
            pair.attach("wait", 50.0, lambda: None, self.backend.in_order)

    def start(self, heartbeat_ms=0):
        for pair in self.pairs:
            _native.kernel_reset(pair.raw, heartbeat_ms)
        self.backend.start([pair.addresses for pair in self.pairs])
        until(lambda: self.failed() or all(p.control.active for p in self.pairs))

    def failed(self):
        failure = self.backend.failure()
        if failure is not None:
            raise failure
        return False

    def exchange(self, messages, ring=0, timeout_s=10.0):
        """Send everything and return (replies, statuses), taking replies as they come."""
        pair = self.pairs[ring]
        replies = np.empty(len(messages), self.spec.reply)
        statuses = np.empty(len(messages), np.int32)
        sent = got = 0
        limit = time.monotonic() + timeout_s
        while got < len(messages):
            assert time.monotonic() < limit, (
                f"{got} of {len(messages)} replies; ended: {pair.control.end_reason}"
            )
            room = min(len(messages) - sent, self.spec.capacity - (sent - got), 512)
            if room:
                sent += pair.producer.send(messages[sent : sent + room], 5.0)
            with contextlib.suppress(TimeoutError):
                got += pair.consumer.recv_into(replies[got:sent], 1.0, statuses[got:sent])
        return replies, statuses

    def ask(self, flag, value=1):
        for pair in self.pairs:
            setattr(pair.control, flag, value)

    def end(self, flag="should_terminate"):
        self.ask(flag)
        assert self.backend.join(10.0)
        self.failed()
        assert all(pair.control.has_terminated for pair in self.pairs)
        return [pair.control.end_reason for pair in self.pairs]

    def close(self):
        self.ask("should_terminate")
        self.backend.join(DEADLINE_S + 5)
        for pair in self.pairs:
            pair.close()
        self.backend.close()
        self.memory.close()


@contextlib.contextmanager
def running(*arguments, heartbeat_ms=0, **options):
    kernel = Kernel(*arguments, **options)
    try:
        kernel.start(heartbeat_ms)
        yield kernel
    finally:
        kernel.close()


def words(count, nbytes, seed=1):
    """Messages of random bytes, as rows of bytes and as the message dtype."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)
    return rows, rows.view(f"V{nbytes}").reshape(count)


def times_three(nbytes):
    """CUDA C++ that changes every byte."""
    return (
        "__device__ int handler(const unsigned char* m, unsigned char* r, void*) {\n"
        f"  for (int i = 0; i < {nbytes}; ++i) r[i] = m[i] * 3 + 1;\n  return 0;\n}}"
    )


# --- echo -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [1, 8, 56, 57, 112, 240, 448, 1000])
@pytest.mark.parametrize("capacity", [4, 256])
def test_every_byte_of_every_message_is_answered(device, nbytes, capacity):
    rows, messages = words(3000, nbytes)
    with running(device, times_three(nbytes), f"V{nbytes}", capacity=capacity) as kernel:
        replies, statuses = kernel.exchange(messages)
        assert not statuses.any()
        found = replies.view(np.uint8).reshape(rows.shape)
        assert (found == rows * np.uint8(3) + np.uint8(1)).all()
        assert kernel.end() == [TERMINATED]


def test_message_and_reply_may_differ_in_size(device):
    text = """
    __device__ int handler(const unsigned* m, unsigned* r, void*) {
      for (int i = 0; i < 50; ++i) r[i] = *m + i;
      return 0;
    }"""
    with running(device, text, "u4", [("v", "u4", 50)]) as kernel:
        messages = np.arange(2000, dtype="u4") * 7
        replies, _ = kernel.exchange(messages)
        assert (replies["v"] == messages[:, None] + np.arange(50, dtype="u4")).all()


@pytest.mark.parametrize("workers", [1, 2, 16, 31])
@pytest.mark.parametrize("blocks", [1, 2])
def test_workers_and_blocks_share_a_ring(device, workers, blocks):
    rows, messages = words(20_000, 56)
    with running(
        device, times_three(56), "V56", workers=workers, blocks=blocks, capacity=4096
    ) as kernel:
        replies, _ = kernel.exchange(messages)
        found = replies.view(np.uint8).reshape(rows.shape)
        assert (found == rows * np.uint8(3) + np.uint8(1)).all()
        assert kernel.end("should_drain") == [DRAINED]
        assert kernel.pairs[0].telemetry.processed == 20_000


def test_several_rings_do_not_mix(device):
    def add(message, reply, state):
        state[0] += message[0]
        reply[0] = state[0]
        return 0

    with running(device, add, "i8", state="i8", rings=5) as kernel:
        for ring in range(5):
            replies, _ = kernel.exchange(np.full(100, ring + 1, "i8"), ring)
            assert replies.tolist() == [(ring + 1) * (i + 1) for i in range(100)]
        assert kernel.end() == [TERMINATED] * 5
        assert [int(kernel.backend.read_state(r)) for r in range(5)] == [
            100 * (r + 1) for r in range(5)
        ]


# --- state, pause, restart, drain -----------------------------------------------------------------
def running_hash(message, reply, state):
    state.hash = state.hash * 31 + message.a
    state.count += 1
    reply.hash = state.hash
    reply.count = state.count
    return 0


HASH = np.dtype([("hash", "i8"), ("count", "i8")])
INPUT = np.dtype([("a", "i8")])


def hashes(values, start=0):
    out = []
    for value in values:
        start = (start * 31 + int(value) + 2**63) % 2**64 - 2**63
        out.append(start)
    return out


def test_messages_of_a_ring_with_a_state_are_handled_in_order(device):
    messages = np.zeros(5000, INPUT)
    messages["a"] = np.random.default_rng(3).integers(0, 2**40, 5000)
    with running(device, running_hash, INPUT, HASH, HASH) as kernel:
        replies, _ = kernel.exchange(messages)
    assert replies["hash"].tolist() == hashes(messages["a"])
    assert replies["count"].tolist() == list(range(1, 5001))


def test_a_paused_kernel_handles_nothing_and_its_state_can_be_changed(device):
    one = np.ones(1, INPUT)
    with running(device, running_hash, INPUT, HASH, HASH) as kernel:
        kernel.exchange(one)
        kernel.ask("should_pause")
        until(lambda: kernel.pairs[0].control.is_paused)
        assert kernel.backend.read_state(0).tolist() == (1, 1)
        kernel.backend.write_state(0, (100, 41))
        kernel.pairs[0].producer.send(one)
        time.sleep(0.05)
        assert kernel.pairs[0].consumer.recv(timeout_s=0).size == 0
        kernel.ask("should_pause", 0)
        reply = kernel.pairs[0].consumer.recv(timeout_s=5)
        assert reply.tolist() == [(3101, 42)]
        until(lambda: not kernel.pairs[0].control.is_paused)


def test_a_kernel_pauses_although_nobody_takes_its_replies(device):
    def echo(message, reply):
        reply.a = message.a
        return 0

    with running(device, echo, INPUT, capacity=8) as kernel:
        kernel.pairs[0].producer.send(np.ones(8, INPUT))
        until(lambda: kernel.pairs[0].telemetry.processed == 8)
        kernel.pairs[0].producer.send(np.ones(4, INPUT))  # no room for their replies
        kernel.ask("should_pause")
        until(lambda: kernel.pairs[0].control.is_paused)
        kernel.ask("should_pause", 0)
        got = 0
        while got < 12:
            got += kernel.pairs[0].consumer.recv(timeout_s=5).size


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_restarted_kernel_goes_on_where_it_stopped(device, blocks):
    def echo(message, reply, state):
        reply.a = message.a + 1
        return 0 if message.a % 10 else 7

    with running(device, echo, INPUT, blocks=blocks, dead_letters=512) as kernel:
        start = 0
        for round_ in range(4):
            if round_:
                kernel.start()
            messages = np.zeros(333, INPUT)
            messages["a"] = np.arange(start, start + 333)
            start += 333
            replies, _ = kernel.exchange(messages)
            assert (replies["a"] == messages["a"] + 1).all()
            wanted = [a for a in messages["a"].tolist() if a % 10 == 0]
            count = len(wanted)
            until(lambda count=count: kernel.pairs[0].control.error_count == count)
            letters = kernel.pairs[0].take_dead_letters()
            assert sorted(message["a"] for message, _ in letters) == wanted
            assert kernel.end(("should_terminate", "should_drain")[round_ % 2])
            assert kernel.pairs[0].producer.free == kernel.spec.capacity


def test_the_state_survives_a_restart(device):
    with running(device, running_hash, INPUT, HASH, HASH) as kernel:
        kernel.exchange(np.ones(10, INPUT))
        kernel.end()
        kernel.start()
        replies, _ = kernel.exchange(np.ones(1, INPUT))
        assert replies["count"].tolist() == [11]


def test_a_drain_loses_nothing(device):
    for number in range(20):
        with running(device, times_three(8), "V8", capacity=2048) as kernel:
            rows, messages = words(100 * number + 1, 8, number)
            kernel.pairs[0].producer.send(messages)
            kernel.ask("should_drain")
            assert kernel.backend.join(10)
            replies = kernel.pairs[0].consumer.recv(timeout_s=0)
            assert len(replies) == len(messages)
            assert (replies.view(np.uint8) == rows.reshape(-1) * np.uint8(3) + np.uint8(1)).all()
            assert kernel.pairs[0].control.end_reason == DRAINED


# --- dead letters, telemetry ----------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [56, 240])
def test_a_failed_message_goes_to_the_dead_letters_as_it_was_sent(device, nbytes):
    text = f"""
    __device__ int handler(unsigned char* m, unsigned char* r, void*) {{
      const int status = m[0] % 4 == 0 ? -int(m[0]) - 1 : 0;
      for (int i = 0; i < {nbytes}; ++i) {{ r[i] = m[i]; m[i] = 0; }}
      return status;
    }}"""
    rows, messages = words(200, nbytes)
    with running(device, text, f"V{nbytes}", dead_letters=256) as kernel:
        replies, statuses = kernel.exchange(messages)
        wanted = [-int(row[0]) - 1 if row[0] % 4 == 0 else 0 for row in rows]
        assert statuses.tolist() == wanted
        assert replies.tobytes() == messages.tobytes()
        failed = [i for i, status in enumerate(wanted) if status]
        until(lambda: kernel.pairs[0].control.error_count == len(failed))
        letters = kernel.pairs[0].take_dead_letters()
        assert sorted((m.tobytes(), s) for m, s in letters) == sorted(
            (messages[i].tobytes(), wanted[i]) for i in failed
        )
        assert kernel.pairs[0].control.last_error in wanted


def test_dead_letters_without_room_are_counted(device):
    def fails(message, reply):
        return 3

    with running(device, fails, INPUT, dead_letters=4) as kernel:
        _, statuses = kernel.exchange(np.ones(50, INPUT))
        assert (statuses == 3).all()
        until(lambda: kernel.pairs[0].telemetry.dropped == 46)
        assert len(kernel.pairs[0].take_dead_letters()) == 4
        time.sleep(0.05)  # the kernel sees that there is room again
        kernel.exchange(np.ones(2, INPUT))
        until(lambda: len(kernel.pairs[0].take_dead_letters()) > 0)


def test_telemetry_counts_and_times(device):
    with running(device, times_three(8), "V8") as kernel:
        kernel.exchange(words(5000, 8)[1])
        telemetry = kernel.pairs[0].telemetry
        until(lambda: telemetry.processed == 5000)
        assert 0 < telemetry.latency_min_ns <= telemetry.latency_mean_ns <= telemetry.latency_max_ns
        assert telemetry.queue_depth == 0
        assert kernel.pairs[0].control.messages_processed == 5000


# --- ends nobody asked for ------------------------------------------------------------------------
def test_a_kernel_whose_heart_stops_ends_itself(device):
    with running(device, times_three(8), "V8", heartbeat_ms=200) as kernel:
        for _ in range(30):
            kernel.pairs[0].control.heartbeat += 1
            time.sleep(0.02)
            assert not kernel.backend.ended()
        start = time.monotonic()
        assert kernel.backend.join(5)
        assert 0.1 < time.monotonic() - start < 1.0
        assert kernel.pairs[0].control.end_reason == ORPHANED


def test_a_kernel_ends_at_its_deadline(device):
    with running(device, times_three(8), "V8", deadline_s=0.5) as kernel:
        assert not kernel.backend.ended()
        assert kernel.backend.join(3)
        assert kernel.pairs[0].control.end_reason == ORPHANED


@pytest.mark.parametrize("nbytes", [8, 1000])
@pytest.mark.parametrize("blocks", [1, 2])
def test_garbage_in_the_ring_ends_the_kernel(device, nbytes, blocks):
    with running(device, times_three(nbytes), f"V{nbytes}", blocks=blocks) as kernel:
        kernel.exchange(words(10, nbytes)[1])
        slot_nbytes = -(-nbytes // 56) * 64
        _native.store_u32(kernel.pairs[0].addresses.input + 384 + 10 * slot_nbytes, 0xDEADBEEF)
        assert kernel.backend.join(5)
        assert kernel.pairs[0].control.end_reason == CORRUPTED
        assert kernel.backend.failure() is None


# --- parallel handlers ----------------------------------------------------------------------------
def scale(message, reply, state, lane, lanes):
    i = lane
    while i < 100:
        reply.v[i] = message.v[i] * 2 + i
        i += lanes
    if lane == lanes - 1 and message.v[0] < 0:
        return 5
    return 0


@pytest.mark.parametrize("parallel", [None, "warp", "block"])
def test_lanes_share_a_message(device, parallel):
    vector = np.dtype([("v", "f4", (100,))])
    messages = np.zeros(700, vector)
    messages["v"] = np.random.default_rng(5).normal(size=(700, 100))
    with running(device, scale, vector, parallel=parallel, dead_letters=1024) as kernel:
        replies, statuses = kernel.exchange(messages)
        assert (replies["v"] == messages["v"] * 2 + np.arange(100, dtype="f4")).all()
        assert ((statuses == 5) == (messages["v"][:, 0] < 0)).all()
        assert kernel.end("should_drain") == [DRAINED]
        assert len(kernel.pairs[0].take_dead_letters()) == (statuses == 5).sum()


@pytest.mark.parametrize("parallel", ["warp", "block"])
def test_lanes_share_a_state_in_order(device, parallel):
    def total(message, reply, state, lane, lanes):
        if lane == 0:
            state[0] += message[0]
            reply[0] = state[0]
        return 0

    with running(device, total, "i8", state="i8", parallel=parallel) as kernel:
        replies, _ = kernel.exchange(np.ones(2000, "i8"))
        assert replies.tolist() == list(range(1, 2001))


# --- the same answers -----------------------------------------------------------------------------
NUMBERS = np.dtype(
    [("i", "i8"), ("j", "i8"), ("k", "i4"), ("y", "f4"), ("z", "f4"), ("x", "f8"), ("w", "f8")],
    align=True,
)
RESULTS = np.dtype([("i", "i8", (5,)), ("f", "f4", (6,)), ("d", "f8", (6,))])


def arithmetic(message, reply, state):
    m, s = message.x, message.w
    reply.d[0] = m * m + s
    reply.d[1] = m / s
    reply.d[2] = math.sqrt(m)
    reply.d[3] = m - s * np.float64(message.y)
    reply.d[4] = message.i / message.j
    reply.d[5] = abs(m) + message.i
    y, z = message.y, message.z
    reply.f[0] = y * y + z
    reply.f[1] = y / z
    reply.f[2] = math.sqrt(z)
    reply.f[3] = y - z * np.float32(1.5)
    reply.f[4] = np.float32(m)
    reply.f[5] = np.float32(message.k)
    reply.i[0] = message.i * message.j + message.k
    reply.i[1] = message.i // message.j
    reply.i[2] = message.i % message.j
    reply.i[3] = (message.i ^ message.j) & 0xFFFF
    reply.i[4] = message.i >> 3
    if m < s:
        return 1
    return 0


singles = st.floats(width=32)
numbers = st.tuples(
    st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5),
    st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
    st.integers(-(2**31), 2**31 - 1),
    singles,
    singles,
    st.floats(),
    st.floats(),
)


@pytest.fixture(scope="module")
def arithmetic_kernel(device):
    pytest.importorskip("numba")
    with running(
        device, arithmetic, NUMBERS, RESULTS, deadline_s=19.0, dead_letters=1024
    ) as kernel:
        yield kernel


def on_cpu(handler, messages, reply):
    compiled = handlers.compile_for_cpu(handler, messages.dtype, np.dtype(reply), None)
    function = handlers.c_function(compiled.address, compiled.arguments)
    replies = np.zeros(len(messages), reply)
    statuses = np.array(
        [
            function(
                messages.ctypes.data + i * messages.itemsize,
                replies.ctypes.data + i * replies.itemsize,
                None,
            )
            for i in range(len(messages))
        ]
    )
    return replies, statuses


def assert_same_bits(found, wanted):
    """Equal bit for bit, but for the bits inside a NaN, which each processor makes its own way."""
    for name in found.dtype.names:
        a, b = np.ascontiguousarray(found[name]), np.ascontiguousarray(wanted[name])
        bits = f"u{a.dtype.itemsize}"
        same = a.view(bits) == b.view(bits)
        if a.dtype.kind == "f":
            same |= np.isnan(a) & np.isnan(b)
        assert same.all(), (name, a[~same], b[~same])


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(numbers, min_size=1, max_size=64))
def test_a_python_handler_answers_the_same_on_cpu_and_gpu(arithmetic_kernel, rows):
    messages = np.array(rows, NUMBERS)
    replies, statuses = arithmetic_kernel.exchange(messages)
    wanted, wanted_statuses = on_cpu(arithmetic, messages, RESULTS)
    assert_same_bits(replies, wanted)
    assert statuses.tolist() == wanted_statuses.tolist()


def test_python_and_cuda_source_answer_the_same(device):
    text = """
    struct In { long long i, j; int k; float y, z; double x, w; };
    struct Out { long long i[5]; float f[6]; double d[6]; };
    __device__ int handler(const In* m, Out* r, void*) {
      r->d[0] = m->x * m->x + m->w;
      r->f[0] = m->y * m->y + m->z;
      r->i[0] = m->i * m->j + m->k;
      return 0;
    }"""

    def short(message, reply):
        reply.d[0] = message.x * message.x + message.w
        reply.f[0] = message.y * message.y + message.z
        reply.i[0] = message.i * message.j + message.k
        return 0

    rng = np.random.default_rng(9)
    messages = np.zeros(3000, NUMBERS)
    for name in ("i", "j", "k"):
        messages[name] = rng.integers(-(2**30), 2**30, 3000)
    for name in ("x", "w", "y", "z"):
        messages[name] = rng.normal(size=3000)
    found = []
    for handler in (CudaSource(text), short):
        with running(device, handler, NUMBERS, RESULTS) as kernel:
            found.append(kernel.exchange(messages)[0])
    assert found[0].tobytes() == found[1].tobytes()
    assert_same_bits(found[0], on_cpu(short, messages, RESULTS)[0])


def test_ready_lto_ir_runs(device):
    from ringmem.ring import cuda_build

    code = cuda_build.compile_handler_source(
        times_three(8), "handler", None, device.compute_capability
    )
    rows, messages = words(100, 8)
    with running(device, LtoIr(code), "V8") as kernel:
        replies, _ = kernel.exchange(messages)
        found = replies.view(np.uint8).reshape(rows.shape)
        assert (found == rows * np.uint8(3) + np.uint8(1)).all()


# --- limits, coexistence --------------------------------------------------------------------------
def test_more_rings_than_fit_are_refused_before_anything_runs(device):
    with pytest.raises(NotSupportedError, match="rings fit"):
        Kernel(device, times_three(8), "V8", rings=5000, capacity=4)


def test_a_second_kernel_starts_beside_the_first_and_too_many_are_refused(device):
    rings = device.capabilities.multiprocessor_count
    _, messages = words(10, 8)
    with running(device, times_three(8), "V8", workers=31) as first:
        with running(device, times_three(56), "V56") as second:
            second.exchange(words(10, 56)[1])
            first.exchange(messages)
        full = Kernel(device, times_three(8), "V8", workers=31, rings=rings, capacity=4)
        try:
            fits = full.backend._kernel.resident_blocks
            if fits < rings + 1:
                with pytest.raises(NotSupportedError, match="beside"):
                    full.start()
            first.exchange(messages)
        finally:
            full.close()


def test_memory_comes_and_goes_beside_a_running_kernel(device):
    import ringmem

    with running(device, times_three(8), "V8") as kernel:
        start = time.monotonic()
        for _ in range(5):
            buffer = ringmem.from_array(np.arange(1000), device=device)
            assert buffer.to_numpy().sum() == 499_500
            buffer.close()
            ringmem.PinnedBuffer(4096, device=device).close()
        assert time.monotonic() - start < 5
        assert not kernel.backend.ended()
        kernel.exchange(words(10, 8)[1])


def test_misuse_is_refused(device):
    with running(device, times_three(8), "V8") as kernel:
        with pytest.raises(InvalidValueError, match="running"):
            kernel.backend.start([pair.addresses for pair in kernel.pairs])
        with pytest.raises(InvalidValueError, match="running"):
            kernel.backend.close()
        with pytest.raises(InvalidValueError, match="no state"):
            kernel.backend.read_state(0)


def test_the_context_of_the_thread_stays_as_it_was(device):
    from cuda.bindings import driver

    driver.cuInit(0)
    before = int(driver.cuCtxGetCurrent()[1])
    with running(device, times_three(8), "V8"):
        assert int(driver.cuCtxGetCurrent()[1]) == before
    assert int(driver.cuCtxGetCurrent()[1]) == before


# --- through the public class ---------------------------------------------------------------------
def test_a_ring_kernel_calls_a_python_handler(device):
    from ringmem import RingKernel

    with RingKernel(
        running_hash, message=INPUT, reply=HASH, state=HASH, device=device, deadline_s=DEADLINE_S
    ) as kernel:
        got = [kernel.call((value,), timeout_s=5).tolist() for value in (3, 4, 5)]
    assert got == [(3, 1), (97, 2), (3012, 3)]


def test_garbage_surfaces_as_an_error(device):
    from ringmem import RingKernel

    with RingKernel(times_three(8), message="V8", device=device, deadline_s=DEADLINE_S) as kernel:
        kernel.call(b"12345678", timeout_s=5)
        address = kernel._pairs[0].addresses.input
        _native.store_u32(address + 384 + 64, 0xDEADBEEF)
        with pytest.raises(CorruptedError):
            until(lambda: kernel.call(b"12345678", timeout_s=1) is None)
