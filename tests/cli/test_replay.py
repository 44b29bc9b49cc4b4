"""``ringmem replay``: the keys that are promised, and what they say on a small trace."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from ringmem.cli.app import app

MIB = 1 << 20


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    """Sixteen blocks of 2 MiB, every second freed, then one of 16 MiB."""
    kind = [1] * 16 + [2] * 8 + [1]
    ids = [*range(16), *range(0, 16, 2), 16]
    size = [2 * MIB] * 16 + [0] * 8 + [16 * MIB]
    path = tmp_path / "holes.npz"
    np.savez(
        path,
        kind=np.array(kind, "u1"),
        id=np.array(ids, "u4"),
        size=np.array(size, "u8"),
        stream=np.zeros(len(kind), "u1"),
    )
    return path


def test_the_promised_keys_are_there(trace):
    done = run(trace, "--device", "cpu", "--json", "--find-capacity", "--repetitions", 2)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["events"] == 25
    assert result["peak_live_bytes"] == 32 * MIB
    assert result["peak_reserved_bytes"] >= 32 * MIB
    assert result["reserved_over_live"] == result["peak_reserved_bytes"] / (32 * MIB)
    assert result["ns_per_operation"]["p50"] > 0
    assert result["ns_per_operation"]["p99"] >= result["ns_per_operation"]["p50"]
    assert result["driver_calls"] > 0
    assert result["repetitions"][1]["driver_calls"] == 0
    assert result["minimum_capacity_bytes"] == 32 * MIB
    assert result["minimum_over_live"] == 1.0


def test_tight_moves_the_holes(trace):
    result = json.loads(run(trace, "--device", "cpu", "--tight", "--json").stdout)
    assert result["peak_reserved_bytes"] == 32 * MIB
    assert result["remaps"] > 0


def test_too_little_capacity_is_told_and_fails(trace):
    done = run(trace, "--device", "cpu", "--capacity", "20 MiB", "--json")
    assert done.exit_code == 1
    result = json.loads(done.stdout[: done.stdout.rindex("}") + 1])
    assert not result["completed"]
    assert result["failed_event"] == 10


@pytest.mark.parametrize(
    "more", [(), ("--streams", "4", "--late", "100"), ("--threads", "2", "--streams", "2")]
)
def test_the_shipped_trace_survives(more):
    done = run("--device", "cpu", "--json", *more)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["completed"]


def test_the_drivers_pool_is_an_allocator(trace):
    result = json.loads(run(trace, "--device", "cpu", "--allocator", "native", "--json").stdout)
    assert result["peak_reserved_bytes"] >= 48 * MIB  # it cannot move pages
    assert result["driver_calls"] == 25


def test_a_picture_is_drawn(trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "replay.png"
    assert run(trace, "--device", "cpu", "--plot", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-file.npz",),
        ("--device", "tpu"),
        ("--device", "cpu", "--allocator", "malloc"),
        ("--device", "cpu", "--allocator", "torch"),
        ("--device", "cpu", "--capacity", "much"),
        ("--device", "cpu", "--threads", "0"),
        ("--device", "cpu", "--allocator", "native", "--late", "5"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments):
    done = run(*arguments)
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_several_threads_report_what_lived_while_they_ran(trace):
    found = json.loads(run(trace, "--device", "cpu", "--threads", 4, "--json").stdout)
    assert found["peak_reserved_bytes"] >= found["peak_live_bytes"] > 0
    assert found["reserved_over_live"] >= 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--threads", 1025, "give 1 to 1024"),
        ("--late", 1 << 70, "late is"),
        ("--streams", 0, "streams is 0: give 1"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(trace, option, value, message):
    done = run(trace, "--device", "cpu", option, value)
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")


def test_the_smallest_capacity_is_that_of_one_thread(trace):
    done = run(trace, "--device", "cpu", "--threads", 2, "--find-capacity")
    assert done.exit_code == 2
    assert "give 1" in done.output.replace("\n", " ")
