"""The protocol's models, searched exhaustively by SPIN; and that SPIN sees it when they are broken.

``apt install spin``; needs a C compiler too. Each model says at its top what it covers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]


def search(source: str, folder: Path, **constants: int | None) -> tuple[int, int, str]:
    """Run the whole state space; return (errors, states, report)."""
    (folder / "model.pml").write_text(source)
    flags = [f"-D{k}" if v is None else f"-D{k}={v}" for k, v in constants.items()]
    for command in (
        ["spin", *flags, "-a", "model.pml"],
        ["cc", "-O1", "-w", "-DSAFETY", "-DMEMLIM=3000", "-o", "pan", "pan.c"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    report = subprocess.run(
        ["./pan", "-m5000000"], cwd=folder, capture_output=True, text=True, timeout=600
    ).stdout
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    assert errors is not None, report
    assert states is not None, report
    assert "max search depth too small" not in report
    assert "reached the limit" not in report.lower()
    return int(errors[1]), int(states[1]), report


RINGS = [
    {"HOST": None, "CAPACITY": 1, "LINES": 1, "INDEX": 2},
    {"HOST": None, "CAPACITY": 2, "LINES": 1, "INDEX": 4},
    {"HOST": None, "CAPACITY": 2, "LINES": 2, "INDEX": 4},
    {"HOST": None, "CAPACITY": 2, "LINES": 2, "INDEX": 8},
    {"HOST": None, "CAPACITY": 4, "LINES": 1, "INDEX": 8},
    {"STREAM": None, "CAPACITY": 2, "LINES": 1, "INDEX": 4},
    {"STREAM": None, "CAPACITY": 2, "LINES": 2, "INDEX": 4},
    {"STREAM": None, "CAPACITY": 4, "LINES": 1, "INDEX": 8},
    {"DEVICE": None, "CAPACITY": 1, "LINES": 2, "INDEX": 2},
    {"DEVICE": None, "CAPACITY": 2, "LINES": 2, "INDEX": 4},
    {"DEVICE": None, "CAPACITY": 4, "LINES": 1, "INDEX": 8},
]


@pytest.mark.parametrize(
    "constants", RINGS, ids=lambda c: "-".join(f"{k}{v or ''}" for k, v in c.items())
)
def test_the_ring_loses_repeats_and_tears_nothing(constants, tmp_path):
    errors, states, report = search((MODELS / "ring.pml").read_text(), tmp_path, **constants)
    assert errors == 0, report
    assert states > 100


def test_the_kernels_life_loses_nothing_it_promised(tmp_path):
    source = (MODELS / "kernel.pml").read_text()
    for capacity in (1, 2):
        errors, states, report = search(source, tmp_path, CAPACITY=capacity, MESSAGES=4)
        assert errors == 0, report
        assert states > 1000


def test_the_biased_lock_lets_one_in(tmp_path):
    errors, states, report = search((MODELS / "lock.pml").read_text(), tmp_path)
    assert errors == 0, report
    assert states > 1000


BROKEN = {
    "sequence before payload": (
        "ring.pml",
        "           payload[LINE(my_tail, line)] = my_tail;\n           if\n"
        "           :: sequence[LINE(my_tail, line)] = SEQUENCE(my_tail)\n",
        "           sequence[LINE(my_tail, line)] = SEQUENCE(my_tail);\n           if\n"
        "           :: payload[LINE(my_tail, line)] = my_tail\n",
    ),
    "release before reading": (
        "ring.pml",
        "  :: ready != my_head ->  /* read one message and release it */\n",
        "  :: ready != my_head ->\n     head = (my_head + 1) % INDEX;\n",
    ),
    "one slot too many": (
        "ring.pml",
        "  :: DISTANCE(my_tail, my_head) < CAPACITY ->\n     select",
        "  :: DISTANCE(my_tail, my_head) <= CAPACITY ->\n     select",
    ),
    "one line speaks for its slot": (
        "ring.pml",
        "whole = whole && seen == SEQUENCE(ready);",
        "whole = whole || seen == SEQUENCE(ready);",
    ),
    "no recovery of a lead": (
        "ring.pml",
        "     my_tail = my_head  /* consumed before tail was published */",
        "     skip",
    ),
    "closed read after the slot": (
        "ring.pml",
        ":: !whole && ended && ready == my_head -> break",
        ":: !whole && closed && ready == my_head -> break",
    ),
    "first slot without a fence": (
        "ring.pml",
        ":: (written >> (2 * LINES)) == (1 << (2 * LINES * (count - 1))) - 1 -> break",
        ":: count == 1 || written != 0 -> break",
    ),
    "nothing taken back": (
        "ring.pml",
        "sequence[LINE(slot, line)] = BEFORE(slot)",
        "skip",
    ),
    "no barrier": ("lock.pml", "empty(buffer[0]); empty(buffer[1]); empty(buffer[2]);", "skip;"),
    "entered beside the owner": ("lock.pml", "     !inside[slot]\n", "     skip\n"),
    "owners that share a slot": (
        "lock.pml",
        "slot = 1; owner = OWNER(me, 1)",
        "slot = 0; owner = OWNER(me, 0)",
    ),
    "shared before the owner is out": (
        "lock.pml",
        "     owner = NOBODY;\n",
        "     owner = NOBODY; shared = true;\n",
    ),
    "unlocked by what is inside": ("lock.pml", "!shared -> buffer", "inside[slot] -> buffer"),
    "drain read after the ring": ("kernel.pml", ":: taken == sent && drain", ":: should_drain"),
}


STREAMED = ("first slot without a fence", "nothing taken back")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_seen(name, tmp_path):
    model, whole, broken = BROKEN[name]
    source = (MODELS / model).read_text()
    assert source.count(whole) == 1
    constants: dict[str, int | None] = {"HOST": None, "CAPACITY": 2, "LINES": 2, "INDEX": 4}
    if model == "lock.pml":
        constants = {}
    elif model == "kernel.pml":
        constants = {"CAPACITY": 2, "MESSAGES": 4}
    elif name in STREAMED:
        constants = {"STREAM": None, "CAPACITY": 2, "LINES": 1, "INDEX": 4}
    errors, _, report = search(source.replace(whole, broken), tmp_path, **constants)
    assert errors > 0, report


def test_a_lap_counter_without_a_second_value_is_seen(tmp_path):
    source = (MODELS / "ring.pml").read_text()
    errors, _, report = search(source, tmp_path, HOST=None, CAPACITY=2, LINES=1, INDEX=2)
    assert errors > 0, report
