"""A trace file is either right or refused with the place where it is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ringmem.native.errors import InvalidValueError
from ringmem.observe import Trace

GOOD = {
    "kind": [1, 1, 2, 3, 1, 2],
    "id": [0, 1, 0, 0, 2, 2],
    "size": [512, 64, 0, 0, 100, 0],
    "stream": [0, 0, 0, 0, 1, 1],
}


def with_change(name: str, event: int, value: int) -> dict[str, list[int]]:
    changed = {key: list(values) for key, values in GOOD.items()}
    changed[name][event] = value
    return changed


def test_counts_and_curve_of_a_small_trace() -> None:
    trace = Trace.from_arrays(**GOOD)
    assert (trace.events, trace.allocations, trace.streams) == (6, 3, 2)
    assert trace.live_bytes.tolist() == [512, 576, 64, 64, 164, 64]
    assert trace.peak_live_bytes == 576
    assert trace.nbytes.tolist() == [512, 64, 100]
    assert not trace.kind.flags.writeable


def test_shipped_trace_is_small_and_matches_its_readme() -> None:
    import ringmem.observe

    folder = Path(ringmem.observe.__file__).parent / "data"
    trace = Trace.shipped()
    assert (folder / f"{trace.name}.npz").stat().st_size < 100_000
    text = (folder / "README.md").read_text()
    assert f"{trace.events:,} events" in text
    assert f"{trace.allocations:,} allocations" in text
    assert f"{trace.peak_live_bytes:,} bytes" in text
    assert (trace.live_bytes >= 0).all()


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "small.npz"
    np.savez(file, **GOOD)
    trace = Trace.load(file)
    assert trace.name == "small"
    assert trace.id.tolist() == GOOD["id"]
    assert trace.size.dtype == np.uint64


@pytest.mark.parametrize(
    ("name", "event", "value", "message"),
    [
        ("kind", 2, 4, "event 2: kind is 4"),
        ("kind", 0, 0, "event 0: kind is 0"),
        ("id", 1, 5, "event 1: an allocation with id 5"),
        ("id", 2, 2, "event 2: a free of unknown id 2"),
        ("id", 5, 0, "event 5: a second free of id 0"),
        ("id", 3, 1, "event 3: a completed free that nobody requested, id 1"),
        ("size", 4, 0, "event 4: an allocation of size 0"),
        ("size", 2, 7, "event 2: a free with size 7"),
        ("stream", 0, 256, "stream holds 256"),
        ("stream", 0, -1, "stream holds -1"),
        ("id", 0, 1 << 40, "id holds 1099511627776"),
        ("size", 0, 1 << 61, "size holds"),
    ],
)
def test_wrong_event_is_named(name: str, event: int, value: int, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Trace.from_arrays(**with_change(name, event, value))


def test_second_completion_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="event 3: a second completed free of id 0"):
        Trace.from_arrays(kind=[1, 2, 3, 3], id=[0, 0, 0, 0], size=[8, 0, 0, 0])


def test_sum_of_sizes_that_overflows_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="add up"):
        Trace.from_arrays(kind=[1, 1], id=[0, 1], size=[1 << 60, 1 << 60])


@pytest.mark.parametrize("missing", ["kind", "id", "size", "stream"])
def test_missing_array_is_named(tmp_path: Path, missing: str) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, **{key: values for key, values in GOOD.items() if key != missing})
    with pytest.raises(InvalidValueError, match=rf"lacks the arrays \['{missing}'\]"):
        Trace.load(file)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="differ in length"):
        Trace.from_arrays(kind=[1, 1], id=[0], size=[8, 8])


def test_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="no event"):
        Trace.from_arrays(kind=[], id=[], size=[])


def test_two_dimensions_and_floats_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="kind has 2 dimensions"):
        Trace.from_arrays(kind=[[1]], id=[0], size=[8])
    with pytest.raises(InvalidValueError, match="size has dtype float64"):
        Trace.from_arrays(kind=[1], id=[0], size=[8.5])


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="there is no file"):
        Trace.load(tmp_path / "none.npz")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        Trace.load(tmp_path)
    text = tmp_path / "text.npz"
    text.write_text("kind,id,size\n")
    with pytest.raises(
        InvalidValueError, match="cannot be read .* kind, id, size, stream"
    ) as caught:
        Trace.load(text)
    assert "pickle" not in str(caught.value)
    with pytest.raises(InvalidValueError, match="path is '': give the name of an .npz file"):
        Trace.load("")
    single = tmp_path / "single.npy"
    np.save(single, np.arange(4))
    with pytest.raises(InvalidValueError, match="single array"):
        Trace.load(single)
    good = tmp_path / "good.npz"
    np.savez(good, **GOOD)
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good.read_bytes()[:-40])
    with pytest.raises(InvalidValueError, match="cannot be read"):
        Trace.load(cut)
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, **{**GOOD, "kind": np.array([{}, {}], dtype=object)})
    with pytest.raises(InvalidValueError, match="cannot be read"):
        Trace.load(pickled)
