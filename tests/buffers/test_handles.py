"""A buffer is a handle of memory: neither a number nor a list of them."""

import operator

import numpy as np
import pytest

import ringmem
from ringmem import InvalidValueError

ALL = [ringmem.DeviceBuffer, ringmem.PinnedBuffer, ringmem.UnifiedBuffer, ringmem.empty]


@pytest.mark.parametrize("make", ALL)
def test_a_buffer_is_true_whatever_it_holds(device, make):
    assert all(make(shape, "f4", device=device) for shape in ((), 0, (3, 0), 1, 2))


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("shape", [(), 1, 2])
def test_a_buffer_is_no_number(device, make, shape):
    buffer = make(shape, "u1", device=device)
    buffer.fill(ord("1"))  # which Python would read as the digits of a number
    for number in (int, float, complex):
        with pytest.raises(InvalidValueError, match=r"no number: .*to_numpy\(\).item\(\)"):
            number(buffer)
    for use in (operator.index, [1, 2].__getitem__, range):
        with pytest.raises(TypeError):
            use(buffer)


@pytest.mark.parametrize("make", ALL)
def test_elements_are_not_set_or_looked_for_one_by_one(device, make):
    buffer = make(3, "f4", device=device)
    buffer.fill(3)
    with pytest.raises(InvalidValueError, match=r"buffer\[i\].fill\(value\)"):
        buffer[0] = 1
    with pytest.raises(InvalidValueError, match=r"buffer\[i:j\].copy_from\(array\)"):
        buffer[:2] = np.zeros(2, "f4")
    with pytest.raises(InvalidValueError, match="keeps its size"):
        del buffer[0]
    with pytest.raises(InvalidValueError, match=r"3.0 is looked for .* look in buffer.to_numpy"):
        3.0 in buffer  # noqa: B015 - the refusal is what counts
    assert buffer.to_numpy().tolist() == [3.0] * 3
    assert buffer in [buffer]


def test_a_growable_buffer_is_true_before_it_grows(device):
    with ringmem.GrowableBuffer(1 << 20, device=device) as buffer:
        assert buffer
        assert not len(buffer)
