"""The layout header on every side: C++ tables, NumPy dtypes, and device code by NVRTC."""

from __future__ import annotations

import copy
import pickle
import re
import weakref

import numpy as np
import pytest

from ringmem.native import _native, aligned, layouts
from ringmem.native.errors import InvalidValueError, NotSupportedError

CONTROL = [  # the order, sizes and offsets that issue and design fix
    ("active", 0, "u4"),
    ("should_terminate", 4, "u4"),
    ("has_terminated", 8, "u4"),
    ("error_count", 12, "u4"),
    ("messages_processed", 16, "u8"),
    ("last_activity", 24, "u8"),
    ("input_head_ptr", 32, "u8"),
    ("input_tail_ptr", 40, "u8"),
    ("input_buffer_ptr", 48, "u8"),
    ("input_capacity", 56, "u4"),
    ("input_message_nbytes", 60, "u4"),
    ("output_head_ptr", 64, "u8"),
    ("output_tail_ptr", 72, "u8"),
    ("output_buffer_ptr", 80, "u8"),
    ("output_capacity", 88, "u4"),
    ("output_message_nbytes", 92, "u4"),
    ("heartbeat", 96, "u8"),
    ("should_pause", 104, "u4"),
    ("is_paused", 108, "u4"),
    ("last_error", 112, "i4"),
    ("should_drain", 116, "u4"),
    ("heartbeat_timeout_ms", 120, "u4"),
    ("end_reason", 124, "u4"),
]
TELEMETRY = [
    ("processed", 0, "u8"),
    ("dropped", 8, "u8"),
    ("latency_total_ns", 16, "u8"),
    ("latency_max_ns", 24, "u8"),
    ("latency_min_ns", 32, "u8"),
    ("queue_depth", 40, "u4"),
    ("last_error", 44, "i4"),
    ("last_processed_ns", 48, "u8"),
    ("sequence", 56, "u8"),
]


@pytest.mark.parametrize(
    ("cls", "fields", "nbytes", "alignment"),
    [
        (layouts.ControlBlock, CONTROL, 128, 128),
        (layouts.TelemetryBuffer, TELEMETRY, 64, 64),
    ],
)
def test_numpy_sees_the_fields_of_the_issue(cls, fields, nbytes, alignment):
    dtype = cls.dtype
    assert dtype.itemsize == nbytes
    assert cls.alignment == alignment
    assert [(n, dtype.fields[n][1], dtype.fields[n][0].str[1:]) for n in dtype.names] == fields


@pytest.mark.parametrize("structure", sorted(_native.layout_tables()))
def test_dtypes_are_the_tables_of_the_header(structure):
    table = _native.layout_tables()[structure]
    dtype = layouts.dtype_of(structure)
    assert dtype.itemsize == table["nbytes"]
    for name, (offset, nbytes, _) in table["fields"].items():
        field, at = dtype.fields[name][:2]
        assert (at, field.itemsize) == (offset, nbytes)


def test_an_unknown_structure_is_named():
    with pytest.raises(InvalidValueError, match="structure='Control'"):
        layouts.dtype_of("Control")


@pytest.mark.parametrize("cls", [layouts.ControlBlock, layouts.TelemetryBuffer])
def test_every_attribute_is_the_field_of_its_name(cls):
    view = cls()
    assert view.ptr % cls.alignment == 0
    for number, name in enumerate(cls.dtype.names, start=3):
        setattr(view, name, number)
        assert getattr(view, name) == number == view.record[name]
    assert [view.record[name] for name in cls.dtype.names] == list(range(3, 3 + len(cls.dtype)))
    for name in cls.dtype.names:
        assert f"{name}=" in repr(view)


@pytest.mark.parametrize(
    ("cls", "mistyped", "remedy"),
    [
        (layouts.ControlBlock, "should_terminat", "did you mean should_terminate"),
        (layouts.ControlBlock, "nonsense", "it has active, should_terminate,"),
        (layouts.TelemetryBuffer, "latency_max", "did you mean latency_max_ns"),
    ],
)
def test_a_mistyped_field_is_not_lost(cls, mistyped, remedy):
    view = cls()
    with pytest.raises(AttributeError, match=f"{cls.__name__} has no field {mistyped}: {remedy}"):
        setattr(view, mistyped, 1)
    assert not hasattr(view, mistyped)
    assert not view._bytes.any()


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (layouts.ControlBlock, ["ptr", "nbytes", "record"]),
        (layouts.TelemetryBuffer, ["ptr", "nbytes", "latency_mean_ns"]),
        (lambda: aligned.CacheLineAligned("u8", 4), ["ptr", "nbytes", "array", "stride", "value"]),
    ],
)
def test_what_is_no_memory_is_not_assigned(make, names):
    view = make()
    for name in names:
        with pytest.raises(AttributeError, match=name):
            setattr(view, name, 1)
    assert weakref.ref(view)() is view


def test_a_view_from_an_address_is_the_same_memory():
    owner = aligned.aligned_zeros(2, layouts.ControlBlock.dtype)
    view = layouts.ControlBlock.from_address(owner.ctypes.data + 128, owner)
    owner[1]["heartbeat"] = 5
    view.last_error = -7
    assert view.heartbeat == 5
    assert owner[1]["last_error"] == -7
    assert owner[0]["last_error"] == 0


def test_a_view_keeps_the_owner_of_its_address_alive():
    class Owner:
        def __init__(self):
            self.memory = aligned.aligned_zeros(128, "u1")

    owner = Owner()
    view = layouts.ControlBlock.from_address(owner.memory.ctypes.data, owner)
    gone = weakref.ref(owner)
    del owner
    assert gone() is not None
    del view
    assert gone() is None


def test_values_that_do_not_fit_their_field_are_refused():
    block = layouts.ControlBlock()
    with pytest.raises(InvalidValueError, match="active=-1"):
        block.active = -1
    with pytest.raises(InvalidValueError, match="heartbeat=18446744073709551616"):
        block.heartbeat = 1 << 64
    with pytest.raises(InvalidValueError, match="last_error=2147483648"):
        block.last_error = 1 << 31
    for nonsense in ("x", 1.5, None):
        with pytest.raises(InvalidValueError, match=f"active={nonsense!r} must be an integer"):
            block.active = nonsense
    assert block.active == 0


def test_memory_that_does_not_fit_is_refused():
    memory = aligned.aligned_zeros(256, "u1")
    with pytest.raises(InvalidValueError, match="no multiple of 128"):
        layouts.ControlBlock(memory[64:])
    with pytest.raises(InvalidValueError, match="128 are needed"):
        layouts.ControlBlock(memory[:64])
    memory.flags.writeable = False
    with pytest.raises(InvalidValueError, match="read-only"):
        layouts.ControlBlock(memory)
    with pytest.raises(InvalidValueError, match="ptr=0x40"):
        layouts.ControlBlock.from_address(64)
    with pytest.raises(InvalidValueError, match="ptr='x' must be an integer"):
        layouts.ControlBlock.from_address("x")
    with pytest.raises(InvalidValueError, match="ptr=0x1000000"):
        layouts.ControlBlock.from_address(1 << 72)
    with pytest.raises(InvalidValueError, match="must be a C-contiguous buffer"):
        layouts.ControlBlock(object())


def test_telemetry_is_read_at_one_moment():
    telemetry = layouts.TelemetryBuffer()
    telemetry.processed, telemetry.latency_total_ns = 4, 10
    assert telemetry.latency_mean_ns == 2.5
    telemetry.sequence = 1  # a writer that never ends: the copy still comes
    assert telemetry.to_numpy()["processed"] == 4


@pytest.mark.parametrize("dtype", ["u1", "f8", "c16", "M8[ns]", "S300", [("a", "i2"), ("b", "f8")]])
@pytest.mark.parametrize("shape", [(), 3, (2, 3), (0, 4)])
def test_cache_line_aligned_gives_every_element_its_own_lines(dtype, shape):
    values = aligned.CacheLineAligned(dtype, shape)
    assert values.ptr % 128 == 0
    assert values.stride % 128 == 0
    assert values.stride >= np.dtype(dtype).itemsize
    assert values.nbytes == values.array.size * values.stride
    addresses = [
        values.array[index if index else ...].ctypes.data
        for index in (tuple([slice(i, i + 1) for i in ix]) for ix in np.ndindex(values.array.shape))
    ]
    assert len(set(addresses)) == values.array.size
    assert all(address % 128 == 0 for address in addresses)


def test_cache_line_aligned_over_given_memory():
    memory = aligned.aligned_zeros(512, "u1")
    values = aligned.CacheLineAligned("u8", 4, memory=memory)
    values.array[3] = 0xFF
    assert memory[384] == 0xFF
    with pytest.raises(InvalidValueError, match="640 are needed"):
        aligned.CacheLineAligned("u8", 5, memory=memory)


def test_aligned_empty_checks_its_arguments():
    assert aligned.aligned_empty((0, 3), "f4").shape == (0, 3)
    assert aligned.aligned_empty(5, "f4", 4096).ctypes.data % 4096 == 0
    with pytest.raises(InvalidValueError, match="alignment=48"):
        aligned.aligned_empty(1, "u1", 48)
    with pytest.raises(InvalidValueError, match=r"shape\[1\] is -1"):
        aligned.aligned_empty((2, -1), "u1")
    with pytest.raises(InvalidValueError, match="Python objects"):
        aligned.aligned_empty(1, object)
    with pytest.raises(InvalidValueError, match="overflows"):
        aligned.aligned_empty((1 << 40, 1 << 40), "u8")
    with pytest.raises(InvalidValueError, match="too many"):
        aligned.aligned_empty((1 << 63) - 1, "u1")
    with pytest.raises(InvalidValueError, match="Python objects"):
        aligned.CacheLineAligned(object)
    with pytest.raises(InvalidValueError, match=r"shape\[0\] is -1"):
        aligned.CacheLineAligned("u1", (-1,))


@pytest.mark.parametrize("make", [aligned.aligned_empty, aligned.aligned_zeros])
def test_aligned_arrays_of_nonsense_are_refused(make):
    with pytest.raises(InvalidValueError, match="dtype is 'nope'"):
        make(3, "nope")
    with pytest.raises(InvalidValueError, match="shape is 'x'"):
        make("x", "u1")
    with pytest.raises(InvalidValueError, match=r"alignment=64\.0 must be an integer"):
        make(3, "u1", 64.0)


def test_cache_line_aligned_of_nonsense_is_refused():
    with pytest.raises(InvalidValueError, match="dtype is 'nope'"):
        aligned.CacheLineAligned("nope")
    with pytest.raises(InvalidValueError, match=r"shape is 1\.5"):
        aligned.CacheLineAligned("u8", 1.5)


def test_numpy_integers_are_shapes():
    assert aligned.CacheLineAligned("u8", np.int64(3)).array.shape == (3,)
    assert aligned.aligned_zeros(np.int64(3), "u8").shape == (3,)
    assert aligned.aligned_empty((np.int64(3), 2), "u8", np.int64(64)).shape == (3, 2)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (layouts.ControlBlock, r"to_numpy\(\)"),
        (layouts.TelemetryBuffer, r"to_numpy\(\)"),
        (lambda: aligned.CacheLineAligned("u8", 4), r"array\.copy\(\)"),
    ],
)
def test_memory_that_others_watch_is_not_copied(copied, make, remedy):
    with pytest.raises(NotSupportedError, match=f"cannot be pickled or copied.*{remedy}"):
        copied(make())


KERNEL = """
#include "layout.hpp"
extern "C" __global__ void touch(ringmem::layout::ControlBlock* c,
                                 ringmem::layout::TelemetryBuffer* t) {
  c->active = 1;
  t->processed = ringmem::layout::sequence_of(c->heartbeat, 4);
}
"""


def _nvrtc_cubin(header: str) -> bytes:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    error, program = nvrtc.nvrtcCreateProgram(
        KERNEL.encode(), b"touch.cu", 1, [header.encode()], [b"layout.hpp"]
    )
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        pytest.skip(f"NVRTC is not usable here: {error}")
    options = [b"--std=c++17", b"--gpu-architecture=sm_90"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, log_size = nvrtc.nvrtcGetProgramLogSize(program)
    # Never b" " * size: NVRTC writes in place, and Python shares the one b" " of a process.
    log = bytes(log_size)
    nvrtc.nvrtcGetProgramLog(program, log)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(log.decode())
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytes(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin


def test_the_header_compiles_for_the_device_with_its_asserts():
    assert _nvrtc_cubin(layouts.header_source())[:4] == b"\x7fELF"


@pytest.mark.parametrize("field", ["heartbeat", "latency_min_ns"])
def test_the_device_compiler_refuses_a_wrong_offset(field):
    """The asserts are live in device code: a table entry moved by one byte does not compile."""
    wrong, count = re.subn(
        rf"(X\((?:ControlBlock|TelemetryBuffer), {field}, )(\d+)\)",
        lambda m: f"{m[1]}{int(m[2]) + 1})",
        layouts.header_source(),
    )
    assert count == 1
    with pytest.raises(RuntimeError, match=f"{field} is not at offset"):
        _nvrtc_cubin(wrong)


def test_the_elements_of_an_aligned_array_are_changed_in_place():
    counters = aligned.CacheLineAligned("i8", 3)
    counters.array += 1
    assert counters.array.tolist() == [1, 1, 1]
    with pytest.raises(AttributeError, match="cannot be replaced"):
        counters.array = np.zeros(3)
