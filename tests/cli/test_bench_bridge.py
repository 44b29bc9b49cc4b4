"""``ringmem bench bridge``: its figures are of messages that arrived."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringmem.cli import bench_bridge
from ringmem.cli.app import app


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_bridge, "SIZES_NBYTES", (4096, 65536))


def test_every_strategy_is_measured_and_verified():
    result = CliRunner().invoke(
        app, ["bench", "bridge", "--device", "cpu", "--repeat", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verified"] is True
    assert set(found["strategies"]) == {"Mapped", "Unified", "Sync", "Async", "DmaPolling"}
    for name in ("Sync", "Async", "DmaPolling"):
        for way in ("to_device", "to_host"):
            figures = found["strategies"][name]["65536"][way]
            assert figures["gb_per_second"] > 0
            assert figures["messages_per_second"] == pytest.approx(
                figures["gb_per_second"] * 1e9 / 64
            )
    assert found["strategies"]["Mapped"]["4096"] == {"to_device": None, "to_host": None}


def test_a_message_that_did_not_arrive_is_noticed(monkeypatch):
    monkeypatch.setattr(bench_bridge, "_to_device", lambda *arguments: ([(1.0, 1.0)], False))
    result = CliRunner().invoke(app, ["bench", "bridge", "--device", "cpu", "--repeat", "1"])
    assert result.exit_code == 1
    assert "differs" in result.output or "did not arrive" in result.output
