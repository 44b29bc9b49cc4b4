"""A record of a plain Python handler behaves as the compiled handler's does."""

import numpy as np
import pytest

from ringmem.ring.plain_record import PlainRecord

POINT = np.dtype([("x", "f8"), ("y", "f8")])
RECORD = np.dtype([("size", "i8"), ("nbytes", "i4"), ("data", "u1", (3,)), ("point", POINT)])


def test_fields_named_like_array_attributes_are_fields():
    array = np.zeros((), RECORD)
    record = PlainRecord(array)
    record.size = 5
    record.nbytes -= 2
    assert (record.size, record.nbytes) == (5, -2)
    assert (int(array["size"]), int(array["nbytes"])) == (5, -2)


def test_arrays_and_nested_records_are_written_in_place():
    array = np.zeros((), RECORD)
    record = PlainRecord(array)
    record.data[1] = 7
    record.point.y = 2.5
    record["point"]["x"] = 1.5
    assert array["data"].tolist() == [0, 7, 0]
    assert array["point"].item() == (1.5, 2.5)
    other = PlainRecord(np.zeros((), RECORD))
    other.point = record.point
    assert (other.point.x, other.point.y) == (1.5, 2.5)


def test_unknown_field_is_an_attribute_error():
    record = PlainRecord(np.zeros((), RECORD))
    with pytest.raises(AttributeError, match="shape"):
        _ = record.shape
    with pytest.raises(AttributeError, match="shape"):
        record.shape = 3


def test_value_that_does_not_fit_a_field_is_refused_as_it_is():
    record = PlainRecord(np.zeros((), RECORD))
    with pytest.raises(ValueError, match="text"):
        record.size = "text"
