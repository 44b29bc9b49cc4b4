"""What is drawn is what was measured, and no peak gets lost in a narrow drawing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.observe import Timeline, Trace, format_nbytes


def test_peak_of_one_event_survives_a_narrow_drawing() -> None:
    curve = np.ones(100_000, np.int64)
    curve[77_777] = 1000
    columns = Timeline(curve).columns(10)
    assert columns.tolist() == [1, 1, 1, 1, 1, 1, 1, 1000, 1, 1]


def test_every_line_fits_the_width() -> None:
    for width in (20, 40, 80, 132):
        lines = Timeline(Trace.shipped().live_bytes, "curve").text(width, 6).splitlines()
        assert len(lines) == 1 + 6 + 2
        assert max(len(line) for line in lines) <= width


def test_top_row_is_reached_by_the_peak_alone() -> None:
    lines = Timeline(np.array([1, 2, 3, 4])).text(width=15 + 4 - 3, height=4).splitlines()
    assert lines[1].startswith("4 B │ ")
    assert lines[1].count("█") < lines[2].count("█") < lines[4].count("█")


def test_ascii_drawing_is_ascii() -> None:
    assert Timeline(Trace.shipped().live_bytes).text(ascii_only=True).isascii()


def test_curve_of_zeros_is_drawn_empty() -> None:
    assert "█" not in Timeline(np.zeros(5, np.int64)).text()


@pytest.mark.parametrize(("width", "height"), [(15, 5), (80, 0), (-1, 5)])
def test_too_small_a_drawing_is_refused(width: int, height: int) -> None:
    with pytest.raises(InvalidValueError, match=f"width is {width} and height is {height}"):
        Timeline(np.ones(3, np.int64)).text(width, height)


@pytest.mark.parametrize("curve", [[], [[1, 2]], [-1, 2]])
def test_bad_curve_is_refused(curve: list[int]) -> None:
    with pytest.raises(InvalidValueError, match="nbytes has shape"):
        Timeline(np.array(curve, np.int64))


def test_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = Timeline(Trace.shipped().live_bytes).save(tmp_path / "t.png")
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_png_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = Timeline(np.ones(3, np.int64))
    with pytest.raises(InvalidValueError, match="cannot be written"):
        curve.save(tmp_path / "no" / "such.png")
    with pytest.raises(InvalidValueError, match="cannot be written"):
        curve.save(tmp_path / "t.nonsense")
    with pytest.raises(InvalidValueError, match="path is '': give the name of a .png file"):
        curve.save("")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(NotSupportedError, match=r"ringmem\[plot\]"):
        Timeline(np.ones(3, np.int64)).save(tmp_path / "t.png")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (10 * 2**20, "10.0 MiB"),
     (1023 * 2**20, "1.00 GiB"), (512 * 2**30, "512 GiB"), (2**70, "1024 EiB")],
)  # fmt: skip
def test_bytes_are_written_with_three_digits(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
