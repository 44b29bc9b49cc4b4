"""A tag sleeps and wakes while other threads allocate: what they kept is there again."""

import contextlib

import numpy as np
import pytest

import ringmem
from ringmem import residency
from ringmem.native.errors import InvalidValueError

from .conftest import SIZES


def test_sleep_and_wake_while_others_allocate(device, hammer):
    tag = residency.tag("weights", "host", device, **SIZES)
    with tag:
        kept = [ringmem.full(20_000, i, "i4", device=device) for i in range(5)]
    device.synchronize()

    def nap(number):
        with contextlib.suppress(InvalidValueError):  # the other one sleeps, or wakes it
            tag.sleep()
        with contextlib.suppress(InvalidValueError):
            tag.wake()

    def allocate(number):
        with contextlib.suppress(InvalidValueError), tag:  # asleep
            buffer = ringmem.empty(5_000, "i4", device=device)
            made.append(1)
            with contextlib.suppress(InvalidValueError):  # asleep by now
                buffer.close()

    made = []
    assert hammer.repeat(nap, nap, allocate, allocate) == []
    if tag.state == "asleep":
        tag.wake()
    assert made
    for i, buffer in enumerate(kept):
        assert (buffer.to_numpy() == i).all()
    del kept, buffer
    assert (tag.state, tag.nbytes) == ("awake", 0)
    tag.close()


def test_the_first_of_many_threads_makes_the_tag(device, hammer):
    for number in range(30):
        found = []
        ask = [lambda: found.append(residency.tag(f"t{number}", device=device, **SIZES))] * 4  # noqa: B023
        assert hammer.together(*ask) == []
        assert len({id(tag) for tag in found}) == 1
        found[0].close()
        assert residency.tags() == []


def test_content_is_read_while_the_tag_naps_or_refused(device, hammer):
    tag = residency.tag("weights", "host", device, **SIZES)
    with tag:
        buffer = ringmem.full(50_000, 9, "i4", device=device)
    seen = []

    def read(number):
        with contextlib.suppress(InvalidValueError):
            seen.append(int(np.unique(buffer.to_numpy())[0]))

    for _ in range(10):
        read(0)
        tag.sleep()
        with pytest.raises(InvalidValueError):
            buffer.fill(1)
        tag.wake()
    assert hammer.repeat(read, read, read, seconds=0.2) == []
    assert set(seen) == {9}
    buffer.close()
    tag.close()
