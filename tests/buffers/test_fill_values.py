"""What one element can hold: a fill takes it, or refuses before the driver is asked."""

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
    ],
)
def test_a_fill_refuses_what_an_element_cannot_hold(dtype, value):
    buffer = ringmem.DeviceBuffer(2, dtype, device="cpu")
    with pytest.raises(InvalidValueError, match="cannot hold"):
        buffer.fill(value)
    buffer.close()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f4", float("inf")),
        ("f2", 1e-9),
        ("S3", b"ab"),
        ([("a", "i4"), ("b", "f4", 2)], (1, (2.5, 3))),
        ([("a", "i4"), ("b", "f4")], 3),
        ([("a", "i4")], np.void((1,), [("a", "i4")])),
    ],
)
def test_a_fill_takes_what_numpy_would_assign(dtype, value):
    wanted = np.empty(2, dtype)
    wanted[:] = value
    with ringmem.DeviceBuffer(2, dtype, device="cpu") as buffer:
        buffer.fill(value)
        assert (buffer.to_numpy() == wanted).all()
