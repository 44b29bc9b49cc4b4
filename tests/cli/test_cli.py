"""The command as a user types it: one JSON object, errors in one line, documented exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ringmem import simulate
from ringmem.cli.info import show
from ringmem.cli.inventory import inventory


def ringmem(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringmem", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8", **environment},
    )


def failed_in_one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    file = tmp_path / "small.npz"
    np.savez(file, kind=[1, 1, 2, 3, 1], id=[0, 1, 0, 0, 2], size=[4096, 7, 0, 0, 1 << 20],
             stream=[0, 1, 0, 0, 2])  # fmt: skip
    return file


def test_version_is_printed() -> None:
    done = ringmem("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("ringmem")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("command", [(), ("info",), ("demo",)])
def test_help_names_every_option(command: tuple[str, ...]) -> None:
    done = ringmem(*command, "--help")
    assert done.returncode == 0
    options = {"info": ["--json", "--echo"], "demo": ["--device", "--trace", "--output", "--json"]}
    for word in options[command[0]] if command else ["info", "demo", "--version"]:
        assert word in done.stdout


def test_info_as_json_is_one_object_with_the_devices() -> None:
    done = ringmem(
        "info", "--json", "--echo", RINGMEM_SIMULATE="devices=2,capacity=8GiB,peers=none"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cpus = [d for d in found["devices"] if d["name"].startswith("cpu")]
    assert [d["name"] for d in cpus] == ["cpu:0", "cpu:1"]
    assert cpus[0]["memory"]["total"] == 8 << 30
    assert cpus[0]["memory_visibility"]["visibility"] == "system scope"
    assert cpus[0]["memory_visibility"]["echo"]["answered"] is True
    assert cpus[0]["capabilities"]["granularity_nbytes"] == 2 << 20
    index = [found["peers"]["devices"].index(d["name"]) for d in cpus]
    assert found["peers"]["can_access"][index[0]][index[1]] is False
    assert found["numpy"] == np.__version__
    assert set(found) >= {"ringmem", "python", "cuda", "packages", "missing"}
    for entry in found["missing"]:
        assert entry["how"]


def test_info_names_every_device_and_what_is_missing() -> None:
    done = ringmem("info", RINGMEM_SIMULATE="devices=2")
    assert done.returncode == 0, done.stderr
    for word in ("cpu:0", "cpu:1", "memory visibility", "Peers", "Packages"):
        assert word in done.stdout


def test_info_says_how_to_get_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    found = inventory()
    found["missing"] = [{"what": "paint", "for": "art", "how": "pip install 'ringmem[plot]'"}]
    show(found)
    assert "pip install 'ringmem[plot]'" in capsys.readouterr().out


def test_demo_as_json_is_one_object_and_verified(tmp_path: Path) -> None:
    done = ringmem("demo", "--device", "cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["device"] == "cpu:0"
    assert result["trace"]["events"] == 7042
    assert result["trace"]["peak_live_bytes"] == 4122604752
    assert result["verified"] is True
    assert result["marks"]["checked"] == result["marks"]["right"] > 2000
    assert result["replay"]["reserved_peak_bytes"] >= result["trace"]["peak_live_bytes"]
    assert result["copies"]["to_device_gb_per_s"] > 0
    assert result["growable"]["moved"] is False
    assert result["growable"]["verified"] is True
    assert result["growable"]["nbytes"] == 32 << 20
    assert result["ring"]["messages"] == 7042
    assert result["ring"]["peak_live_bytes"] == 4122604752
    assert result["ring"]["verified"] is True
    assert result["ring"]["messages_per_second"] > 0
    assert list(tmp_path.iterdir()) == []  # nothing is drawn unless asked for


def test_demo_draws_in_the_terminal_and_as_a_picture(tmp_path: Path, small_trace: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "t.png"
    done = ringmem(
        "demo", "--device", "cpu", "--trace", str(small_trace), "--output", str(file), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")
    for word in (
        "cpu:0",
        "5 events",
        "peak",
        "GB/s",
        "did not move",
        "NumPy",
        "█",
        "verified",
        "t.png",
    ):
        assert word in done.stdout


def test_demo_out_of_memory_is_one_line() -> None:
    done = ringmem("demo", "--device", "cpu", RINGMEM_SIMULATE="capacity=1GiB")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in failed_in_one_line(done, 1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("demo", "--device", "tpu:0"), "tpu:0"),
        (("demo", "--device", "cpu:99"), "cpu:99"),
        (("demo", "--trace", "/no/such/file.npz"), "/no/such/file.npz"),
        (("demo", "--device", "cpu", "--trace", "."), "."),
    ],
)
def test_wrong_input_is_one_line_that_names_it(arguments: tuple[str, ...], word: str) -> None:
    assert word in failed_in_one_line(ringmem(*arguments), 2)


def test_trace_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.npz"
    np.savez(file, kind=[1, 2, 2], id=[0, 0, 0], size=[8, 0, 0], stream=[0, 0, 0])
    message = failed_in_one_line(ringmem("demo", "--trace", str(file)), 2)
    assert "event 2" in message


def test_picture_that_cannot_be_written_is_refused(small_trace: Path) -> None:
    pytest.importorskip("matplotlib")
    done = ringmem(
        "demo", "--device", "cpu", "--trace", str(small_trace), "--output", "/no/such/t.png"
    )
    assert "/no/such/t.png" in failed_in_one_line(done, 2)


@pytest.mark.parametrize("arguments", [("nonsense",), ("demo", "--nonsense"), ("info", "extra")])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    done = ringmem(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_interrupt_is_130_without_a_traceback() -> None:
    # Slow enough to be met in the middle: every task of the device takes 0.2 s.
    process = subprocess.Popen(
        [sys.executable, "-m", "ringmem", "demo", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RINGMEM_SIMULATE": "latency_s=0.2"},
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


def test_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m ringmem info --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    assert done.stdout == "{"


COMMANDS = ["info", "info --json", "info --help", "demo --json", "replay", "--help", "--version"]


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize(
    ("output", "reason"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")]
)
def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, arguments: str, output: str, reason: str
) -> None:
    done = subprocess.run(
        f"{sys.executable} -m ringmem {arguments} {output}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        env={**os.environ, "RINGMEM_DEVICE": "cpu"},
    )
    assert done.stderr == f"error: cannot write to standard output: {reason}\n"
    assert done.returncode == 1


@pytest.mark.parametrize("outputs", [">&- 2>&-", ">/dev/full 2>/dev/full", ">/dev/full 2>&-"])
def test_an_error_that_cannot_be_written_either_is_an_exit_code(outputs: str) -> None:
    done = subprocess.run(f"{sys.executable} -m ringmem info {outputs}", shell=True, timeout=60)
    assert done.returncode == 1


@pytest.mark.parametrize(
    "arguments", ["demo --trace", "demo --output", "replay", "replay --plot", "bench ring --plot"]
)
def test_an_empty_path_is_refused_as_one(tmp_path: Path, arguments: str) -> None:
    done = ringmem(*arguments.split(), "", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    name = arguments.split()[-1].replace("replay", "TRACE")
    assert f"'{name}': '' is an empty path: give the name of a file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_kind_is_refused_without_advice_to_unpickle_it(tmp_path: Path) -> None:
    file = tmp_path / "text.npz"
    file.write_text("root:x:0:0:root")
    error = failed_in_one_line(ringmem("demo", "--trace", str(file)), 2)
    assert "cannot be read as an .npz file; one with the arrays kind, id, size" in error
    assert "pickle" not in error


def shown(found: dict[str, object], columns: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        show(found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    return lines


@pytest.mark.parametrize("columns", [20, 40, 80])
@pytest.mark.parametrize("devices", [1, 3])
def test_info_cuts_nothing_however_narrow_the_terminal(
    columns: int, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with simulate(devices=devices):
        found = inventory(echo=False)
    text = "".join("".join(shown(found, columns, capsys)).split())
    words = [w for e in found["missing"] for w in f"{e['what']} {e['for']} {e['how']}".split()]
    words += [word for package in found["packages"].items() for word in package if word]
    for device in found["devices"]:
        words += [device["name"], device["product_name"], device["uuid"]]
        words += [device["memory_visibility"]["visibility"]]
        words += device["capabilities"]
        words += device["memory_visibility"]["reasons"] if columns < 80 else []
    for word in words:
        assert "".join(word.split()) in text, word
    assert "…" not in text
    assert text.count("possible") == devices * (devices - 1)


def test_info_on_a_narrow_terminal_puts_a_value_under_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with simulate():
        found = inventory(echo=False)
    narrow = [line.rstrip() for line in shown(found, 40, capsys)]
    assert narrow[narrow.index("  multiprocessor_count") + 1].startswith("    ")
    wide = [line.split() for line in shown(found, 80, capsys)]
    assert any(line[:1] == ["multiprocessor_count"] and len(line) == 2 for line in wide)
