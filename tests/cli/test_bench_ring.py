"""``ringmem bench ring``: what its JSON holds, and that a wrong word is found."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringmem.cli import bench_ring, bench_ring_report
from ringmem.cli.app import app

runner = CliRunner()


@pytest.fixture(scope="module")
def result() -> dict:
    ran = runner.invoke(
        app, ["bench", "ring", "--device", "cpu", "--messages", "2000", "--rings", "2", "--json"]
    )
    assert ran.exit_code == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_json_has_every_figure(result: dict) -> None:
    assert set(result["rtt_us"]) == {"56", "112", "240"}
    for trips in (*result["rtt_us"].values(), result["python_call_us"]):
        assert 0 < trips["p50"] <= trips["p99"] <= trips["p99.9"]
    for rates in result["messages_per_second"].values():
        assert list(rates) == ["1", "8", "64", "512"]
        assert min(rates.values()) > 0
    assert result["verified"] is True
    assert result["wrong_words"] == 0
    assert result["verified_messages"] > 2000 * 4 * 3
    assert result["all_rings"]["rings"] == 2
    assert min(result["in_place_messages_per_second"]["56"].values()) > 0
    handler = result["python_handler"]
    assert handler["ratio"] > 0.1
    assert 0 < handler["first_reply_cached_s"] < 10
    assert 0 < handler["first_reply_s"] < 30
    assert 0 <= result["idle_core_share"] < 1
    assert set(result["asyncio"]) == {"1", "1000"}
    assert result["compared"]["multiprocessing.Queue"]["rtt_us_p50"] > 0


@pytest.mark.slow
def test_histogram_becomes_bars_and_a_picture(result: dict, tmp_path: Path) -> None:
    assert sum(result["histogram"]["counts"]) > 900
    assert any("█" in line for line in bench_ring_report.bars(result["histogram"]))
    bench_ring_report.plot(result, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def off_by_one(message, reply, state):
    for i in range(7):
        reply.words[i] = message.words[i] * 3 + i + (2 if i == 3 else 1)
    return 0


def test_wrong_word_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_ring._ECHOES, 7, off_by_one)
    bench = bench_ring._Bench(bench_ring.Device("cpu"), 1000, 1)
    with bench._kernel(56, python=True) as kernel:
        bench._round_trips(kernel, 10)
        bench._stream(kernel, 8)
        assert bench.wrong_words == 10 + 2 * 1000
        bench._calls(kernel)
        assert bench.wrong_words == 10 + 3 * 1000
        bench._batches(kernel)
        assert bench.wrong_words == 10 + 3 * 1000 + 1000 // 512 * 512


@pytest.mark.slow
def test_a_wrong_word_of_an_awaited_reply_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_ring._ECHOES, 7, off_by_one)
    bench = bench_ring._Bench(bench_ring.Device("cpu"), 1000, 1)
    monkeypatch.setattr(bench, "_kernel", functools.partial(bench._kernel, python=True))
    bench.asyncio()
    assert bench.wrong_words == bench.verified == 250 + 20 * 1000


def test_wrong_input_exits_with_2() -> None:
    ran = runner.invoke(app, ["bench", "ring", "--device", "abacus"])
    assert ran.exit_code == 2
    assert "abacus" in ran.stderr


def test_a_picture_that_has_no_place_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_ring, "run", lambda *arguments: pytest.fail("it was measured"))
    plot = tmp_path / "nowhere" / "x.png"
    ran = runner.invoke(app, ["bench", "ring", "--device", "cpu", "--plot", str(plot)])
    assert ran.exit_code == 2
    assert "nowhere is no directory" in ran.stderr.replace("\n", "")
