"""What is a message and what is not: the same rules for every way in."""

from __future__ import annotations

import array
import ctypes
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ringmem import InvalidValueError, Ring, RingKernel
from ringmem.native.records import as_bytes

NUMBER = np.dtype("u8")
ONE = np.dtype([("a", "i8")])
TWO = np.dtype([("a", "i8"), ("b", "i8")])
TEXT = np.dtype("S8")
NESTED = np.dtype([("at", TWO), ("words", "f4", (2,))])
LABELLED = np.dtype([("name", "S4"), ("when", "M8[s]")])


def _echo(message: int, reply: int, state: int) -> int:
    ctypes.memmove(reply, message, TWO.itemsize)
    return 0


ECHO = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)(_echo)


class Name(StrEnum):
    AB = "ab"


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)

FITS = [
    (NUMBER, 7, [7]),
    (NUMBER, [1, 2], [1, 2]),
    (NUMBER, range(3), [0, 1, 2]),
    (NUMBER, array.array("Q", [4, 5]), [4, 5]),
    (NUMBER, (ctypes.c_uint64 * 2)(6, 7), [6, 7]),
    (NUMBER, b"\1" + bytes(7), [1]),
    (NUMBER, bytearray(b"\2" + bytes(7)), [2]),
    (NUMBER, memoryview(b"\3" + bytes(15))[::2], [3]),
    (NUMBER, [], []),
    (ONE, 7, [(7,)]),
    (ONE, [(1,), (2,)], [(1,), (2,)]),
    (ONE, b"\1" + bytes(7), [(1,)]),
    (TWO, (1, 2), [(1, 2)]),
    (TWO, [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    (TWO, [np.zeros(1, TWO)[0]], [(0, 0)]),
    (TWO, memoryview(np.ones(2, TWO)), [(1, 1), (1, 1)]),
    (TWO, b"\1" + bytes(15), [(1, 0)]),
    (TEXT, b"abc", [b"abc"]),
    (TEXT, [b"abc", b"d"], [b"abc", b"d"]),
    (TEXT, "abc", [b"abc"]),
    (TWO, (np.int32(1), True), [(1, 1)]),
    (ONE, [2.0, 3], [(2,), (3,)]),
    (NESTED, ((1, 2), [3, 4.5]), [((1, 2), [3, 4.5])]),
    (NESTED, ((1, 2), [3, 4]), [((1, 2), [3, 4])]),
    (NESTED, ((1, 2), np.ones(2)), [((1, 2), [1, 1])]),
    (LABELLED, (b"ab", "1970-01-01"), [(b"ab", datetime(1970, 1, 1))]),
    (LABELLED, (Name.AB, 0), [(b"ab", datetime(1970, 1, 1))]),
    (ONE, [np.uint8(2), np.float32(3), Decimal(4), Fraction(10, 2)], [(2,), (3,), (4,), (5,)]),
    (NUMBER, [np.int64(1), np.uint64(2**64 - 1)], [1, 2**64 - 1]),
]


@pytest.mark.parametrize(("dtype", "batch", "expected"), FITS)
def test_what_fits_is_taken_as_it_is(dtype: np.dtype[Any], batch: Any, expected: list[Any]) -> None:
    taken = as_bytes(batch, dtype).view(dtype)
    assert taken.tobytes() == np.array(expected, dtype).tobytes()


MISREAD = [
    *[(NUMBER, text) for text in (b"123", bytearray(16), memoryview(bytes(9)), "12", [b"12"])],
    (NUMBER, array.array("i", [1, 2])),
    (NUMBER, np.float64(1)),
    *[(ONE, text) for text in (b"123", "12", ["12"], bytearray(7), None, [None])],
    *[(TWO, bare) for bare in (5, [5], [[1, 2]], range(2), "ab", bytes(15), bytearray(17))],
    (TWO, [np.int64(5)]),
    (TWO, memoryview(np.zeros(2))),
    *[(TWO, text) for text in (("12", 0), (1, b"2"), (1, None), (1, np.str_("2")), (1, ["2"]))],
    *[(TWO, [(1, 2), later]) for later in (("3", 4), 3, "ab", (3, None), [3, 4], np.zeros(2))],
    (ONE, [(1,), "2"]),
    *[
        (ONE, cut)
        for cut in (2.5, [1, 2.5], (2.5,), [(1,), (2.5,)], float("nan"), [np.float64(2.5)])
    ],
    (TWO, (1.9, 0)),
    *[
        (ONE, [1, cut])
        for cut in (np.float32(1.5), Decimal("1.5"), Fraction(3, 2), np.array(1.5), np.array([1.5]))
    ],
    (NUMBER, [np.int64(-1)]),
    (NUMBER, [2**64]),
    (NESTED, ((1, 2), np.ones(2, complex))),
    (LABELLED, (5, 0)),
    (LABELLED, (b"abcde", 0)),
    (LABELLED, ("abcde", 0)),
    (ONE, HOLDS_ITSELF),
    (ONE, [1, 2, None]),
    (NUMBER, [1, "2"]),
    (NUMBER, [[1, 2], [3, b"4"]]),
    (NESTED, (1, 2)),
    (NESTED, ((1, "2"), [3, 4])),
    (NESTED, ((1, 2), [3, "4"])),
    (NESTED, [((1, 2), [3, 4]), ((1, 2), None)]),
    (LABELLED, (b"ab", None)),
    (TEXT, b"123456789"),
]
TOO_LARGE = [(NUMBER, 2**70), (NUMBER, -1), (NUMBER, [1, -1]), (ONE, (2**63,)), (TWO, (2**70, 1))]


@pytest.mark.parametrize(("dtype", "batch"), [*MISREAD, *TOO_LARGE])
def test_what_numpy_would_misread_is_refused(dtype: np.dtype[Any], batch: Any) -> None:
    with pytest.raises(InvalidValueError):
        as_bytes(batch, dtype)


@pytest.mark.parametrize("batch", [b"123", bytearray(17), range(2), 5, "12", (2**70, 1)])
def test_every_way_in_has_the_same_rules(batch: Any) -> None:
    with (
        Ring(TWO, 4) as ring,
        RingKernel(ECHO, message=TWO, state=TWO, device="cpu") as kernel,
    ):
        producer = ring.producer()
        for take in (producer.send, kernel.send, kernel.call):
            with pytest.raises(InvalidValueError, match="batch="):
                take(batch)
        kernel.pause()
        with pytest.raises(InvalidValueError, match="state="):
            kernel.write_state(batch)
        kernel.resume()
        assert (kernel.unread(), producer.free) == (0, 4)


def test_the_bytes_of_one_message_are_it_on_every_way_in() -> None:
    raw = np.array((3, 4), TWO).tobytes()
    with (
        Ring(TWO, 4) as ring,
        RingKernel(ECHO, message=TWO, state=TWO, device="cpu") as kernel,
    ):
        producer, consumer = ring.producer(), ring.consumer()
        for batch in (raw, bytearray(raw), memoryview(raw)):
            assert producer.send(batch) == 1
            assert consumer.recv(1).tolist() == [(3, 4)]
            assert kernel.call(batch).item() == (3, 4)
            assert kernel.send(batch) == 1
            assert kernel.recv(1).tolist() == [(3, 4)]
        kernel.pause()
        kernel.write_state(raw)
        assert kernel.read_state().item() == (3, 4)
