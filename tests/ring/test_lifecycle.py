"""The table of transitions, by itself: what must hold whatever the kernel does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmem import ClosedError, InvalidValueError
from ringmem.ring.lifecycle import TRANSITIONS, KernelEvent, KernelState, next_state

ENDS = {KernelState.TERMINATED, KernelState.FAILED}


def test_every_running_state_can_end_and_fail() -> None:
    for state in KernelState:
        if state.running:
            assert next_state(state, KernelEvent.ENDED) is KernelState.TERMINATED
            assert next_state(state, KernelEvent.FAILED) is KernelState.FAILED


def test_only_a_kernel_that_does_not_run_starts_or_closes() -> None:
    for (state, event), _ in TRANSITIONS.items():
        if event in (KernelEvent.START, KernelEvent.CLOSE):
            assert not state.running


def test_nothing_leaves_closed() -> None:
    for event in KernelEvent:
        if event is KernelEvent.CLOSE:
            assert next_state(KernelState.CLOSED, event) is KernelState.CLOSED
        else:
            with pytest.raises(ClosedError):
                next_state(KernelState.CLOSED, event)


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) | {KernelState.NEW} == set(KernelState)
    left = {state for (state, _), target in TRANSITIONS.items() if target is not state}
    assert left == set(KernelState) - {KernelState.CLOSED}


def test_refusal_names_the_states_that_would_do() -> None:
    with pytest.raises(InvalidValueError, match="pause is not possible while the kernel is new"):
        next_state(KernelState.NEW, KernelEvent.PAUSE)


@given(st.lists(st.sampled_from(KernelEvent), max_size=30))
def test_random_requests_never_skip_launch_or_end(events: list[KernelEvent]) -> None:
    state, path = KernelState.NEW, [KernelState.NEW]
    for event in events:
        try:
            state = next_state(state, event)
        except (InvalidValueError, ClosedError):
            continue
        path.append(state)
    for before, after in itertools.pairwise(path):
        if after is KernelState.ACTIVE:
            assert before in (KernelState.LAUNCHED, KernelState.PAUSED, KernelState.ACTIVE)
        if after is KernelState.CLOSED:
            assert not before.running
