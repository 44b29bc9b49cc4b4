import pytest

import ringmem
from ringmem.device.sizes import format_nbytes, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("64 GiB", 64 << 30),
        ("64GiB", 64 << 30),
        ("1.5 MiB", 3 << 19),
        ("8g", 8 << 30),
        ("2 KB", 2000),
        ("3B", 3),
        (" 1 TiB ", 1 << 40),
    ],
)
def test_sizes_are_read_with_their_units(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "bad",
    [
        -1,
        "-1",
        "",
        "GiB",
        "1 XB",
        "1.5",
        "0.3 KiB",
        "iB",
        "1 iB",
        1.5,
        None,
        True,
        1 << 63,
        "9000 PiB",
    ],
)
def test_what_is_no_size_is_refused_with_name_and_value(bad):
    with pytest.raises(ringmem.InvalidValueError, match="capacity is ") as caught:
        parse_nbytes(bad, "capacity")
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (3 << 29, "1.5 GiB"), (5 << 50, "5 PiB")]
)
def test_sizes_are_written_with_the_largest_unit(nbytes, text):
    assert format_nbytes(nbytes) == text
