"""What one element can hold: a fill takes it, or refuses before the driver is asked."""

import datetime
import decimal
import warnings

import numpy as np
import pytest

import ringmem
from ringmem import InvalidValueError


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f4", 1e300),
        ("f2", 70000),
        ("f4", None),
        ("S3", b"abcdef"),
        ("U2", "abc"),
        ([("a", "i4")], (1.7,)),
        ([("a", "f4"), ("b", "S2")], (1.0, b"abc")),
        ([("a", "f4")], (None,)),
        ([("a", "f4")], (1.0, 2.0)),
        ([("a", "f4")], np.array([(1.0,)], [("a", "f4")])),
        ([("a", "i4"), ("b", "?", 2)], (1, (True, 2))),
        ([("a", [("x", "u1")], 2)], ([(1,), (256,)],)),
        ([("a", "V2", 2)], ([b"ab", b"abc"],)),
        ([("a", "V2", 2)], ([b"ab"],)),
        ("f4", np.complex64(1)),
        ("i4", np.complex128(1)),
        ("f4", "1.5"),
        ("f8", np.longdouble("1e4000")),
        ("c16", np.longdouble("1e4000")),
        ("c8", complex(1e300, float("nan"))),
        ("f8", decimal.Decimal("1e999")),
        ("f8", np.timedelta64(3, "s")),
        ("?", "x"),
        ("?", []),
        ("?", 2),
        ("?", float("nan")),
        ("?", 1.0),
        ("V4", b"abcdef"),
        ("V4", "abcd"),
        ("m8[s]", np.timedelta64(1500, "ms")),
        ("m8[s]", datetime.timedelta(milliseconds=1500)),
        ("m8[s]", np.timedelta64(1 << 62, "D")),
        ("m8[s]", True),
        ("M8[D]", np.datetime64("2020-01-01T05:00")),
        ("M8[D]", "2020-01-01T05:00"),
        ("M8[D]", datetime.datetime(2020, 1, 1, 5)),
        ("M8[ns]", np.datetime64(10**15, "s")),
        ("f4", np.ma.masked),
    ],
)
def test_a_fill_refuses_what_an_element_cannot_hold(dtype, value):
    buffer = ringmem.DeviceBuffer(2, dtype, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error says all: NumPy does not warn beside it
        with pytest.raises(InvalidValueError, match="cannot hold"):
            buffer.fill(value)
    buffer.close()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int4", 8),
        ("int4", -9),
        ("int4", 1.5),
        ("uint4", 16),
        ("int2", 2),
        ("uint2", -1),
        ("bfloat16", 1e300),
        ("bfloat16", np.complex64(1j)),
        ("float8_e4m3fn", float("inf")),
        ("float8_e5m2", 1e9),
        ("float4_e2m1fn", 100),
        ("float4_e2m1fn", float("nan")),
        ("float6_e3m2fn", -31.0),
    ],
)
def test_a_fill_refuses_what_a_type_of_ml_dtypes_cannot_hold(dtype, value):
    pytest.importorskip("ml_dtypes")
    with (
        ringmem.DeviceBuffer(2, dtype, device="cpu") as buffer,
        pytest.raises(InvalidValueError, match=f"which {dtype} cannot hold"),
    ):
        buffer.fill(value)


@pytest.mark.parametrize(
    ("dtype", "value", "found"),
    [
        ("int4", -8, -8),
        ("uint2", 3, 3),
        ("bfloat16", 1.001, 1.0),
        ("float8_e5m2", float("-inf"), float("-inf")),
        ("float8_e4m3fn", 300, 288),
        ("float4_e2m1fn", 6.9, 6.0),
    ],
)
def test_a_fill_rounds_for_a_type_of_ml_dtypes(dtype, value, found):
    pytest.importorskip("ml_dtypes")
    with ringmem.full(2, value, dtype, device="cpu") as buffer:
        assert buffer.to_numpy().astype("f8").tolist() == [found] * 2


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f4", float("inf")),
        ("f2", 1e-9),
        ("S3", b"ab"),
        ([("a", "i4"), ("b", "f4", 2)], (1, (2.5, 3))),
        ([("a", "i4"), ("b", "f4")], 3),
        ([("a", "i4")], np.void((1,), [("a", "i4")])),
        ([("a", [("x", "i4"), ("y", "f4")], 2)], ([(1, 2.5), (3, 4.0)],)),
        ([("a", [("x", "i4")], 2)], ((7,),)),
        ([("a", "V2", 2), ("b", "i2")], ([b"ab", b"cd"], 3)),
        ("f4", 0.1),
        ("f8", np.longdouble("1e-4000")),
        ("g", np.longdouble("1e4000")),
        ("c8", complex(float("inf"), 0.1)),
        ("i8", decimal.Decimal(3)),
        (">u2", 300),
        ("?", np.True_),
        ("?", 0),
        ("?", np.int8(1)),
        ("V4", b"ab"),
        ("V4", np.void(b"abcd")),
        ("V4", np.int8(3)),
        ("m8[ms]", np.timedelta64(3, "s")),
        ("m8[s]", 5),
        ("m8[s]", datetime.timedelta(seconds=3)),
        (">M8[s]", np.datetime64("2020-01-01T05:00")),
        ("M8[D]", "2020"),
        ("M8[s]", datetime.date(2020, 1, 1)),
        ("f4", np.ma.array(2.5)),
    ],
)
def test_a_fill_takes_what_numpy_would_assign(dtype, value):
    wanted = np.empty(2, dtype)
    wanted[:] = value
    with ringmem.DeviceBuffer(2, dtype, device="cpu") as buffer:
        buffer.fill(value)
        assert (buffer.to_numpy() == wanted).all()


def test_no_value_but_nan_becomes_nan():
    for dtype, value in (("f4", float("nan")), ("c8", complex(1, float("nan")))):
        with ringmem.full(2, value, dtype, device="cpu") as buffer:
            assert np.isnan(buffer.to_numpy()).all()
    for dtype in ("M8[D]", "m8[s]"):
        with ringmem.full(2, np.array("NaT", dtype[:2]), dtype, device="cpu") as buffer:
            assert np.isnat(buffer.to_numpy()).all()


def test_bytes_that_no_field_covers_are_zero():
    dtype = np.dtype({"names": ["a"], "formats": ["u1"], "offsets": [40], "itemsize": 64})
    junk = [np.full(64, 0xFF, "u1") for _ in range(64)]  # what small memory held before
    del junk
    with ringmem.full(3, (7,), dtype, device="cpu") as buffer:
        raw = buffer.view("u1").to_numpy().reshape(3, 64)
    assert (raw[:, 40] == 7).all()
    assert np.count_nonzero(raw) == 3


class Three:
    def __index__(self):
        return 3


class Four:
    def __array__(self, dtype=None, copy=None):
        return np.asarray(4, dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "found"),
    [
        ("abc", "S5", b"abc"),
        (np.str_("a"), "S1", b"a"),
        (b"abc", "U5", "abc"),
        (Three(), "i4", 3),
        (Four(), "i4", 4),
        (Four(), "f8", 4.0),
        (("x", "ab"), [("a", "U1"), ("b", "S4")], ("x", b"ab")),
    ],
)
def test_what_numpy_reads_as_the_same_is_taken(value, dtype, found):
    assert ringmem.full(1, value, dtype, device="cpu").to_numpy()[0].item() == found
