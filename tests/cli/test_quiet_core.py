"""Timing on one core: chosen, kept, and given back."""

from __future__ import annotations

import os

import pytest

from ringmem.cli import quiet_core


def test_the_thread_stays_on_the_quickest_core_and_may_use_all_afterwards(monkeypatch):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core leaves no choice")
    slow, *others = sorted(allowed)
    monkeypatch.setattr(quiet_core, "_seconds_on", lambda core: 2.0 if core == slow else 1.0)
    with quiet_core.on_quiet_core():
        assert os.sched_getaffinity(0) == {others[0]}
    assert os.sched_getaffinity(0) == allowed


def test_a_core_that_has_become_slow_is_left(monkeypatch):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one core leaves no choice")
    seconds = dict.fromkeys(allowed, 1.0)

    def here():
        return next(iter(os.sched_getaffinity(0)))

    def measured():
        return seconds[here()]

    monkeypatch.setattr(quiet_core, "_seconds", measured)
    with quiet_core.on_quiet_core() as settle:
        first = here()
        settle()
        assert here() == first
        seconds[first] = 2.0
        settle()
        assert here() != first


def test_an_error_inside_gives_the_cores_back():
    allowed = os.sched_getaffinity(0)
    with pytest.raises(KeyError), quiet_core.on_quiet_core():
        assert len(os.sched_getaffinity(0)) == 1
        raise KeyError
    assert os.sched_getaffinity(0) == allowed


def test_where_cores_cannot_be_chosen_nothing_happens(monkeypatch):
    allowed = os.sched_getaffinity(0)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with quiet_core.on_quiet_core():
        assert os.sched_getaffinity(0) == allowed
