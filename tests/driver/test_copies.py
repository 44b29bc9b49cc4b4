"""Copies and fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ringmem.native import _native as native

if TYPE_CHECKING:
    from tests.driver.conftest import Kit

MiB = 1 << 20
Status = native.Status
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.mark.parametrize("nbytes", [1, 4097, 5 * MiB + 3])
def test_copies_between_every_two_kinds_of_memory(kit: Kit, nbytes: int) -> None:
    pageable = {"from": np.zeros(nbytes, np.uint8), "to": np.zeros(nbytes, np.uint8)}
    places: dict[str, tuple[int, int]] = {
        "device": (kit.alloc(nbytes), kit.alloc(nbytes)),
        "pinned": (kit.pinned(nbytes).ptr, kit.pinned(nbytes).ptr),
        "pageable": (pageable["from"].ctypes.data, pageable["to"].ctypes.data),
    }
    if kit.attribute(native.Attribute.managed_memory):
        places["managed"] = (kit.managed(nbytes), kit.managed(nbytes))
    stream = kit.stream()
    for seed, (source, _) in enumerate(places.values()):
        for _, target in places.values():
            data = kit.pattern(nbytes, seed)
            kit.upload(source, data, stream)
            kit.driver.copy_async(0, target, source, nbytes, stream)
            assert (kit.download(target, nbytes, stream) == data).all()


def test_a_copy_of_nothing_does_nothing(kit: Kit) -> None:
    ptr = kit.alloc(64)
    kit.fill(ptr, 1, 64)
    kit.driver.copy_async(0, ptr, ptr + 32, 0)
    assert (kit.download(ptr, 64) == 1).all()


def test_a_copy_from_pageable_memory_has_read_its_source_when_it_returns(kit: Kit) -> None:
    source = kit.pattern(3 * MiB)
    expected = source.copy()
    target = kit.alloc(3 * MiB)
    stream = kit.stream()
    kit.driver.copy_async(0, target, source.ctypes.data, 3 * MiB, stream)
    source[:] = 0
    assert (kit.download(target, 3 * MiB, stream) == expected).all()


def test_a_copy_from_pinned_memory_reads_when_its_turn_comes(kit: Kit) -> None:
    source, target = kit.pinned(4096), kit.alloc(4096)
    stream = kit.stream()
    gate = kit.gate(stream)
    source.data[:] = 1
    kit.driver.copy_async(0, target, source.ptr, 4096, stream)
    source.data[:] = 2
    gate.open()
    assert (kit.download(target, 4096, stream) == 2).all()


# --- two dimensions ------------------------------------------------------------------------------


def test_a_2d_copy_moves_rows_between_pitches_and_nothing_between(kit: Kit) -> None:
    rows, width, source_pitch, target_pitch = 7, 100, 256, 512
    source, target = kit.alloc(rows * source_pitch), kit.alloc(rows * target_pitch)
    data = kit.pattern(rows * source_pitch).reshape(rows, source_pitch)
    kit.upload(source, data.reshape(-1))
    kit.fill(target, 0xEE, rows * target_pitch)
    kit.driver.copy_2d_async(
        0, target, target_pitch, source + 10, source_pitch, width, rows, stream=0
    )
    found = kit.download(target, rows * target_pitch).reshape(rows, target_pitch)
    assert (found[:, :width] == data[:, 10 : 10 + width]).all()
    assert (found[:, width:] == 0xEE).all()


def test_a_2d_copy_gathers_from_the_device_into_pinned_memory(kit: Kit) -> None:
    rows, width, pitch = 33, 48, 64
    source, target = kit.alloc(rows * pitch), kit.pinned(rows * width)
    data = kit.pattern(rows * pitch)
    kit.upload(source, data)
    stream = kit.stream()
    kit.driver.copy_2d_async(0, target.ptr, width, source, pitch, width, rows, stream)
    kit.driver.stream_synchronize(0, stream)
    assert (target.data.reshape(rows, width) == data.reshape(rows, pitch)[:, :width]).all()


@pytest.mark.parametrize("pitches", [(50, 256), (256, 50)])
def test_rows_longer_than_the_pitch_are_an_invalid_value(
    kit: Kit, pitches: tuple[int, int]
) -> None:
    source, target = kit.alloc(4096), kit.alloc(4096)
    with kit.refused(Status.invalid_value):
        kit.driver.copy_2d_async(0, target, pitches[0], source, pitches[1], 100, 4)


@pytest.mark.parametrize(("width", "height"), [(0, 4), (4, 0)])
def test_a_2d_copy_of_nothing_does_nothing(kit: Kit, width: int, height: int) -> None:
    source, target = kit.alloc(4096), kit.alloc(4096)
    kit.fill(target, 3, 4096)
    kit.driver.copy_2d_async(0, target, 64, source, 64, width, height)
    assert (kit.download(target, 4096) == 3).all()


# --- fills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value_bytes", "dtype"), [(1, "u1"), (2, "u2"), (4, "u4")])
@pytest.mark.parametrize("count", [1, 1000, 1_000_003])
def test_a_fill_writes_its_elements_and_nothing_else(
    kit: Kit, value_bytes: int, dtype: str, count: int
) -> None:
    value = 0xA1B2C3D4 & (256**value_bytes - 1)
    nbytes = (count + 2) * value_bytes
    ptr = kit.alloc(nbytes)
    kit.fill(ptr, 0xFF, nbytes)
    kit.driver.fill_async(0, ptr + value_bytes, value, value_bytes, count)
    found = kit.download(ptr, nbytes).view(dtype)
    assert (found[1:-1] == value).all()
    assert found[0] == found[-1] == 256**value_bytes - 1


def test_a_fill_uses_the_low_bytes_of_its_value(kit: Kit) -> None:
    ptr = kit.alloc(64)
    kit.driver.fill_async(0, ptr, 0x12345678, 1, 64)
    assert (kit.download(ptr, 64) == 0x78).all()
    kit.driver.fill_async(0, ptr, 0x12345678, 2, 32)
    assert (kit.download(ptr, 64).view("u2") == 0x5678).all()


@pytest.mark.parametrize("value_bytes", [0, 3, 8, -1])
def test_a_fill_has_elements_of_1_2_or_4_bytes(kit: Kit, value_bytes: int) -> None:
    ptr = kit.alloc(64)
    with kit.refused(Status.invalid_value):
        kit.driver.fill_async(0, ptr, 0, value_bytes, 4)


@pytest.mark.parametrize("value_bytes", [2, 4])
def test_a_fill_at_an_address_that_is_not_aligned_is_an_invalid_value(
    kit: Kit, value_bytes: int
) -> None:
    ptr = kit.alloc(64)
    with kit.refused(Status.invalid_value):
        kit.driver.fill_async(0, ptr + 1, 0, value_bytes, 4)


def test_a_fill_of_nothing_does_nothing(kit: Kit) -> None:
    ptr = kit.alloc(64)
    kit.fill(ptr, 5, 64)
    kit.driver.fill_async(0, ptr, 6, 4, 0)
    assert (kit.download(ptr, 64) == 5).all()
