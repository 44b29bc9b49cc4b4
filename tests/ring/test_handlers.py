"""Handlers: what is refused, with whose line, and what the compiled code answers on the CPU."""

from __future__ import annotations

import ctypes
import enum
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.ring import cache, handler_code, handlers, object_code
from ringmem.ring.handlers import CudaSource, LtoIr

numba = pytest.importorskip("numba")

MESSAGE = np.dtype([("a", "i8"), ("x", "f8"), ("y", "f4"), ("k", "i4"), ("v", "f4", (3,))])
STATE = np.dtype([("count", "u8")])
SCALE = 3.5


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(handler, messages, reply=MESSAGE, state=None, parallel=None):
    """(statuses, replies, state) of a compiled handler over an array of messages."""
    messages = np.asarray(messages)
    compiled = handlers.compile_for_cpu(handler, messages.dtype, reply, state, parallel)
    function = handlers.c_function(compiled.address, compiled.arguments)
    replies = np.zeros(len(messages), reply)
    record = np.zeros(1, state or "u8")
    lanes = (0, 1) if compiled.arguments == 5 else ()
    statuses = [
        function(
            messages.ctypes.data + i * messages.itemsize,
            replies.ctypes.data + i * replies.itemsize,
            record.ctypes.data if state is not None else None,
            *lanes,
        )
        for i in range(len(messages))
    ]
    return statuses, replies, record[0]


def line_of(function, text):
    """The line of a function's source that holds `text`."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# --- answers --------------------------------------------------------------------------------------
def square_plus(x):
    return x * x + SCALE


@numba.njit(fastmath=True)
def halved(x):
    return x / 2


def count_and_scale(message, reply, state):
    state.count += 1
    reply.a = message.a + state.count
    reply.x = square_plus(message.x)
    reply.y = halved(message.y)
    for i in range(3):
        reply.v[i] = message.v[2 - i]
    return message.k


def test_a_compiled_handler_answers_as_the_function_and_keeps_its_state():
    messages = np.zeros(3, MESSAGE)
    messages["a"], messages["x"], messages["k"] = [10, 20, 30], [1, 2, 3], [0, -7, 5]
    messages["y"], messages["v"] = [1, 3, 5], [[1, 2, 3]] * 3
    statuses, replies, state = run(count_and_scale, messages, state=STATE)
    assert statuses == [0, -7, 5]
    assert replies["a"].tolist() == [11, 22, 33]
    assert replies["x"].tolist() == [4.5, 7.5, 12.5]
    assert replies["y"].tolist() == [0.5, 1.5, 2.5]
    assert replies["v"].tolist() == [[3, 2, 1]] * 3
    assert state["count"] == 3


def test_plain_dtypes_are_arrays_of_one_element():
    def twice(message, reply, state):
        reply[0] = message[0] * 2
        return 0

    statuses, replies, _ = run(twice, np.array([1.5, -4.0]), reply=np.dtype("f8"))
    assert statuses == [0, 0]
    assert replies.tolist() == [3.0, -8.0]


def test_two_and_five_arguments_are_accepted():
    def plain(message, reply):
        reply.a = message.a
        return 0

    def shared(message, reply, state, lane, lanes):
        reply.a = message.a * 100 + lane * 10 + lanes
        return 0

    messages = np.ones(1, MESSAGE)
    assert run(plain, messages)[1]["a"].tolist() == [1]
    assert run(shared, messages)[1]["a"].tolist() == [101]
    assert run(shared, messages, parallel="warp")[1]["a"].tolist() == [101]


def arithmetic(message, reply, state):
    reply.x = message.x * message.x + message.y
    reply.y = message.y * message.y + np.float32(1.1)
    reply.a = message.a // message.k
    reply.k = message.k % np.int32(7)
    reply.v[0] = message.y / message.v[0]
    reply.v[1] = math.sqrt(abs(message.v[1]))
    reply.v[2] = message.v[0] - message.v[2]
    return 0


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.floats(),
            floats,
            st.integers(-(2**31), 2**31 - 1),
            st.tuples(floats, floats, floats),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_the_compiled_handler_rounds_as_numpy_does(rows):
    messages = np.array(rows, MESSAGE)
    _, replies, _ = run(arithmetic, messages)
    with np.errstate(all="ignore"):
        x, y, v = messages["x"], messages["y"], messages["v"]
        assert_same(replies["x"], x * x + y.astype("f8"))
        assert_same(replies["y"], y * y + np.float32(1.1))
        assert_same(replies["v"][:, 0], y / v[:, 0])
        assert_same(replies["v"][:, 1], np.sqrt(np.abs(v[:, 1])))
        assert_same(replies["v"][:, 2], v[:, 0] - v[:, 2])
        assert replies["k"].tolist() == [k % 7 for k in messages["k"].tolist()]
    for row, a in zip(rows, replies["a"].tolist(), strict=True):
        quotient = 0 if row[3] == 0 else row[0] // row[3]
        assert a == (quotient + 2**63) % 2**64 - 2**63


def assert_same(found, wanted):
    """Equal bit for bit, but for the bits inside a NaN."""
    kind = f"u{found.dtype.itemsize}"
    same = (found.view(kind) if found.flags.c_contiguous else found.copy().view(kind)) == (
        wanted.astype(found.dtype).view(kind)
    )
    assert (same | (np.isnan(found) & np.isnan(wanted))).all()


def test_a_helper_divides_by_zero_as_the_handler_does():
    @numba.njit  # whose own error model would raise
    def ratio(a, b):
        return a / b

    def divide(message, reply, state):
        reply.x = ratio(message.x, message.y)
        return 0

    messages = np.zeros(2, MESSAGE)
    messages["x"] = [1.0, 0.0]
    replies = run(divide, messages)[1]
    assert math.isinf(replies["x"][0])
    assert math.isnan(replies["x"][1])


# --- refusals -------------------------------------------------------------------------------------
def raises(message, reply, state):
    if message.a > 3:
        raise ValueError("too large")
    return 0


def prints(message, reply, state):
    print(message.a)
    return 0


def catches(message, reply, state):
    try:
        reply.a = message.a
    except Exception:
        return 1
    return 0


def allocates(message, reply, state):
    scratch = np.zeros(4)
    reply.x = scratch[0]
    return 0


def lists(message, reply, state):
    values = [message.a, message.k]
    reply.a = values[0]
    return 0


def comprehends(message, reply, state):
    reply.a = sum([i * i for i in range(message.k)])
    return 0


def formats(message, reply, state):
    name = f"{message.a}"
    return len(name)


def imports(message, reply, state):
    import math as maths

    reply.x = maths.sqrt(message.x)
    return 0


@pytest.mark.parametrize(
    ("handler", "place", "word"),
    [
        (raises, "raise ValueError", "raises"),
        (prints, "print(", "print()"),
        (catches, "try:", "catches"),
        (allocates, "np.zeros", "np.zeros()"),
        (lists, "values = [", "list"),
        (comprehends, "sum(", "list"),
        (formats, 'f"', "string"),
        (imports, "import math", "imports"),
    ],
)
def test_what_no_gpu_can_do_is_refused_with_the_handlers_own_line(handler, place, word):
    with pytest.raises(InvalidValueError) as caught:
        handlers.compile_for_cpu(handler, MESSAGE, MESSAGE, STATE)
    line = line_of(handler, place)
    slack = 4 if handler is catches else 0  # the bytecode of `try` is at its handler or its end
    assert any(f"{__file__}:{line + i}:" in str(caught.value) for i in range(slack + 1))
    assert word in str(caught.value)


def test_an_assertion_is_refused():
    scope = {}
    text = "def asserts(message, reply, state):\n    assert message.a\n    return 0\n"
    exec(compile(text, "typed.py", "exec"), scope)  # pytest rewrites the asserts of this file
    with pytest.raises(InvalidValueError, match=r"typed\.py:2: handler 'asserts' asserts"):
        handlers.compile_for_cpu(scope["asserts"], MESSAGE, MESSAGE, STATE)


def test_a_helper_is_refused_with_its_own_line():
    def calls(message, reply, state):
        return raises(message, reply, state)

    with pytest.raises(InvalidValueError, match=f":{line_of(raises, 'raise ')}: handler 'raises'"):
        handlers.compile_for_cpu(calls, MESSAGE, MESSAGE, STATE)


def wrong_field(message, reply, state):
    reply.a = message.a
    reply.nothing = 1
    return 0


def ufunc(message, reply, state):
    reply.x = np.sqrt(message.x)
    return 0


def no_status(message, reply, state):
    reply.a = message.a


@pytest.mark.parametrize(
    ("handler", "place", "said"),
    [
        (wrong_field, "reply.nothing", "no such field: 'nothing'"),
        (ufunc, "np.sqrt", "np.sqrt"),
        (no_status, "", "must return an int status"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_handlers_own_line(handler, place, said):
    if handler is ufunc:
        pytest.importorskip("numba.cuda", exc_type=Exception)
    with pytest.raises(InvalidValueError) as caught:
        handlers.compile_for_cpu(handler, MESSAGE, MESSAGE, STATE)
    assert said in str(caught.value)
    assert __file__ in str(caught.value)
    if place:
        assert f":{line_of(handler, place)}:" in str(caught.value)


def test_a_field_that_a_gpu_cannot_read_is_refused():
    crooked = np.dtype([("k", "u1"), ("x", "f8")])
    with pytest.raises(InvalidValueError, match="'x' of message is at offset 1.*align=True"):
        handlers.compile_for_cpu(no_status, crooked, MESSAGE, None)


def test_a_recursive_handler_is_refused():
    def again(message, reply, state):
        return again(message, reply, state)

    with pytest.raises(InvalidValueError, match="calls itself"):
        handlers.compile_for_cpu(again, MESSAGE, MESSAGE, STATE)


@pytest.mark.parametrize(
    ("handler", "parallel", "said"),
    [
        (lambda message: 0, None, "takes 1 arguments"),
        (lambda message, reply, state, lane: 0, None, "takes 4 arguments"),
        (lambda message, reply, state: 0, "warp", "lane, lanes"),
        (lambda *messages: 0, None, "by position"),
        (7, None, "must be a Python function"),
        ("", None, "empty"),
        (CudaSource("x", name="no name"), None, "no function name"),
    ],
)
def test_the_wrong_kind_of_handler_is_refused(handler, parallel, said):
    with pytest.raises(InvalidValueError, match=said):
        handlers.check_handler(handler, parallel, STATE)


def test_two_arguments_need_a_kernel_without_state():
    def plain(message, reply):
        return 0

    handlers.check_handler(plain, None, None)
    with pytest.raises(InvalidValueError, match="takes 2 arguments"):
        handlers.check_handler(plain, None, STATE)


@pytest.mark.parametrize("handler", ["__device__ int handler() {}", CudaSource("x"), LtoIr(b"x")])
def test_cuda_source_is_not_supported_on_the_cpu(handler):
    with pytest.raises(NotSupportedError, match="a Python function runs on every device"):
        handlers.compile_for_cpu(handler, MESSAGE, MESSAGE, None)


# --- without Numba --------------------------------------------------------------------------------
def test_without_numba_the_handler_stays_python_and_that_is_said_once(monkeypatch):
    monkeypatch.setattr(cache, "version_of", lambda *names: None)
    monkeypatch.setattr(handlers, "_said", set())
    with pytest.warns(RuntimeWarning, match="pip install numba"):
        handler = handlers.compile_for_cpu(count_and_scale, MESSAGE, MESSAGE, STATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handlers.compile_for_cpu(count_and_scale, MESSAGE, MESSAGE, STATE)
    assert handler.address is None
    message, reply, state = (np.zeros(1, d).view(np.recarray) for d in (MESSAGE, MESSAGE, STATE))
    message["a"], message["k"], message["x"] = 5, 9, 2
    assert handler.python(message[0], reply[0], state[0]) == 9
    assert reply["a"][0] == 6
    assert reply["x"][0] == 7.5
    assert state["count"][0] == 1


# --- cache ----------------------------------------------------------------------------------------
def test_a_cached_handler_needs_no_numba(own_cache, monkeypatch):
    messages = np.ones(2, MESSAGE)
    first = run(count_and_scale, messages, state=STATE)
    assert len(list(own_cache.iterdir())) == 1

    from ringmem.ring import numba_handlers

    def never(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(numba_handlers, "compile_for_cpu", never)
    second = run(count_and_scale, messages, state=STATE)
    assert second[0] == first[0]
    assert second[1].tobytes() == first[1].tobytes()


def test_a_damaged_entry_is_dropped_and_made_again(own_cache):
    run(count_and_scale, np.ones(1, MESSAGE), state=STATE)
    (entry,) = own_cache.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:50], whole[:-1] + b"?", b"garbage" * 99):
        entry.write_bytes(damaged)
        assert run(count_and_scale, np.ones(1, MESSAGE), state=STATE)[1]["a"].tolist() == [2]
        assert entry.read_bytes() == whole or len(entry.read_bytes()) == len(whole)


def test_the_key_follows_everything_that_compiling_freezes():
    def make(scale, inner):
        def handler(message, reply, state):
            reply.x = inner(message.x) * scale
            return 0

        return handler

    def plus(x):
        return x + 1

    def minus(x):
        return x - 1

    keys = [
        handler_code.content_key(make(scale, inner))
        for scale in (1, 1.0, 2)
        for inner in (plus, minus)
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert handler_code.content_key(make(1, plus)) == keys[0]


def test_the_members_of_an_enum_are_part_of_the_key():
    def make(base, **members):
        Code = base("Code", members)

        def handler(message, reply, state):
            return Code.BAD if message.a < 0 else 0

        return handler

    keys = [
        handler_code.content_key(make(base, **members))
        for base in (enum.IntEnum, enum.Enum)
        for members in ({"BAD": 1}, {"BAD": 2}, {"BAD": 1, "OTHER": 3}, {"WORSE": 1, "BAD": 1})
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert handler_code.content_key(make(enum.IntEnum, BAD=1)) == keys[0]


def test_a_handler_that_is_cached_answers_with_the_members_of_today():
    for value in (3, 5):
        Code = enum.IntEnum("Code", {"BAD": value})

        def returns_bad(message, reply):
            return Code.BAD.value  # noqa: B023

        assert run(returns_bad, np.zeros(1, MESSAGE))[0] == [value]


def test_a_class_of_the_user_has_no_content():
    class Limits:
        LARGEST = 3

    def makes(message, reply):
        return 1 if Limits is None else 0

    def casts(message, reply):
        reply.x = np.float32(message.x) + float(message.a)
        return int(message.a)

    assert handler_code.content_key(makes) is None
    assert handler_code.content_key(casts) is not None


@pytest.mark.parametrize("offsets", [[4, 0], [0, 2], [0, 0]])
def test_fields_lie_in_any_order_and_over_each_other(offsets):
    spec = {"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": offsets}
    dtype = np.dtype(spec)

    def swap(message, reply):
        reply.b = message.b
        reply.a = message.a + 1
        return 0

    messages = np.zeros(1, dtype)
    messages[0] = (70000, 9)
    expected = np.zeros(1, dtype)
    expected["b"] = messages["b"]
    expected["a"] = messages["a"] + 1
    for _ in range(2):  # compiled, and from the cache
        assert run(swap, messages, reply=dtype)[1].tobytes() == expected.tobytes()


def test_two_orders_of_the_same_fields_are_two_handlers():
    def first(message, reply):
        reply.a = message.a
        return 0

    def key(offsets):
        spec = {"names": ["a", "b"], "formats": ["u4", "u4"], "offsets": offsets}
        return handlers._cpu_key(first, np.dtype(spec), np.dtype(spec), None)

    assert key([0, 4]) != key([4, 0])
    assert key([0, 4]) == key([0, 4])


def test_a_dtype_that_numba_cannot_see_is_named_without_colours(monkeypatch):
    from numba.np import numpy_support

    def refuse(dtype):
        raise NotImplementedError("\x1b[1m>i4\x1b[0m cannot be seen")

    monkeypatch.setattr(numpy_support, "from_dtype", refuse)
    with pytest.raises(InvalidValueError, match=r"Numba cannot see \(>i4 cannot be seen\)"):
        run(lambda message, reply: 0, np.zeros(1, MESSAGE))


def test_what_has_no_content_is_not_cached(own_cache):
    unknown = object()

    def handler(message, reply, state):
        return 1 if unknown is None else 0

    assert handler_code.content_key(handler) is None


def test_the_cache_is_bounded_and_drops_what_was_not_used_for_longest(own_cache, monkeypatch):
    import os

    monkeypatch.setattr(cache, "MAX_NBYTES", 3000)
    for number in range(4):
        cache.store(f"e{number}", bytes(900))
        os.utime(own_cache / f"e{number}", (number, number))
    assert cache.load("e0") is None
    assert cache.load("e3") == bytes(900)


def test_a_directory_that_others_write_to_is_not_used(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("RINGMEM_CACHE", str(shared))
    cache.store("entry", b"x")
    assert cache.load("entry") is None
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("value", ["off", "/proc/nowhere"])
def test_without_a_cache_everything_works(value, monkeypatch):
    monkeypatch.setenv("RINGMEM_CACHE", value)
    cache.store("entry", b"x")
    assert cache.load("entry") is None
    assert run(count_and_scale, np.ones(1, MESSAGE), state=STATE)[1]["a"].tolist() == [2]


def test_code_that_only_numba_can_load_is_not_stored():
    def helper(message, reply, state):
        reply.x = math.sin(message.x)
        return 0

    from ringmem.ring import numba_handlers

    compiled = numba_handlers.compile_for_cpu(helper, MESSAGE, MESSAGE, None)
    assert compiled.object_code is not None
    process = ctypes.CDLL(None)
    assert all(hasattr(process, n) for n in object_code._undefined_symbols(compiled.object_code))
