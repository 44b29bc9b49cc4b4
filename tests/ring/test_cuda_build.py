"""Ring kernels are built for a GPU on machines that have none: the handler, the loop, the link."""

from __future__ import annotations

import numpy as np
import pytest

from ringmem.native.errors import InvalidValueError
from ringmem.ring import cuda_build, handlers
from ringmem.ring.backend import KernelSpec
from ringmem.ring.handlers import CudaSource, LtoIr

pytest.importorskip("cuda.core")
pytest.importorskip("numba.cuda", exc_type=Exception)

ARCH = (9, 0)
H200_SHARED_NBYTES = 227 * 1024
RECORD = np.dtype([("a", "i8"), ("x", "f4", (4,))])
STATE = np.dtype([("count", "u8")])
ECHO = """
struct Record { long long a; float x[4]; };
__device__ int handler(const Record* message, Record* reply, void*) {
  *reply = *message;
  return 0;
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spec_of(message=RECORD, reply=None, state=None, **changes):
    message = np.dtype(message)
    settings = {
        "capacity": 1024,
        "rings": 1,
        "workers": None,
        "blocks": 1,
        "deadline_s": 10.0,
        "parallel": None,
        **changes,
    }
    return KernelSpec(message, np.dtype(reply or message), state and np.dtype(state), **settings)


def build(handler, spec, limit=H200_SHARED_NBYTES):
    settings = cuda_build.plan(spec, limit)
    code = handlers.compile_for_cuda(handler, spec, ARCH)
    arguments = handlers.cuda_arguments(handler, spec.parallel)
    return cuda_build.build(settings, arguments, code, ARCH)


def scale(message, reply, state):
    reply.a = message.a + 1
    for i in range(4):
        reply.x[i] = message.x[i] * message.x[i] + message.x[0]
    return 0


def counted(message, reply, state):
    state.count += 1
    reply.a = state.count
    return 0


def shared(message, reply, state, lane, lanes):
    i = lane
    while i < 4:
        reply.x[i] = message.x[i] * 2
        i += lanes
    return 0


@pytest.mark.parametrize(
    ("handler", "spec"),
    [
        (scale, spec_of()),
        (lambda message, reply: 0, spec_of()),
        (counted, spec_of(state=STATE)),
        (shared, spec_of(parallel="warp")),
        (shared, spec_of(parallel="block")),
        (shared, spec_of()),
        (ECHO, spec_of()),
        (CudaSource(ECHO.replace("handler", "named"), name="named"), spec_of(blocks=4)),
    ],
)
def test_every_kind_of_handler_becomes_a_cubin(handler, spec):
    cubin = build(handler, spec)
    assert cubin.startswith(b"\x7fELF")
    assert cuda_build.KERNEL.encode() in cubin


@pytest.mark.parametrize("nbytes", [1, 8, 56, 57, 112, 240, 448, 1000, 4096])
@pytest.mark.parametrize("parallel", [None, "block"])
def test_messages_of_every_size_fit(nbytes, parallel):
    lanes = ", int lane, int lanes" if parallel else ""
    text = f"__device__ int handler(const char* m, char* r, void*{lanes}) {{ *r = *m; return 0; }}"
    spec = spec_of(f"V{nbytes}", parallel=parallel)
    # plan()'s shared memory is what the kernel asserts to be enough
    assert build(text, spec).startswith(b"\x7fELF")


def test_lto_ir_is_taken_as_it_is():
    code = cuda_build.compile_handler_source(ECHO, "handler", None, ARCH)
    assert build(LtoIr(code), spec_of()).startswith(b"\x7fELF")
    with pytest.raises(InvalidValueError, match="does not link"):
        build(LtoIr(b"no code"), spec_of())


def test_no_multiplication_and_addition_are_contracted():
    def fused(message, reply, state):
        reply.x[0] = message.x[0] * message.x[1] + message.x[2]
        return 0

    cubin = build(fused, spec_of())
    sass = disassemble(cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    assert "FMUL" in sass
    assert "FADD" in sass
    assert "FFMA" not in sass


def disassemble(cubin):
    import pathlib
    import shutil
    import subprocess
    import tempfile

    tool = shutil.which("nvdisasm")
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, file], capture_output=True, text=True, check=True).stdout


def test_wrong_cuda_source_is_refused_with_its_own_line():
    with pytest.raises(InvalidValueError, match=r"handler\.cu\(3\): error"):
        build("\n\n__device__ int handler(const int* m, int* r, void*) { return m; }", spec_of())
    with pytest.raises(InvalidValueError, match="no __device__ int other"):
        build(CudaSource(ECHO, name="other"), spec_of())
    with pytest.raises(InvalidValueError, match="int lane, int lanes"):
        build(ECHO, spec_of(parallel="warp"))


def test_a_built_kernel_comes_from_the_cache(own_cache, monkeypatch):
    first = build(scale, spec_of())
    assert {entry.name.split("-")[0] for entry in own_cache.iterdir()} == {"ltoir", "loop", "cubin"}

    def never(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cuda_build, "_compile", never)
    monkeypatch.setattr(cuda_build, "_link", never)
    assert build(scale, spec_of()) == first


def test_another_handler_of_the_same_sizes_only_links(own_cache, monkeypatch):
    build(scale, spec_of())

    def never(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cuda_build, "_compile", never)
    assert build(lambda message, reply, state: 3, spec_of()).startswith(b"\x7fELF")


# --- settings -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "mode", "workers", "chunk"),
    [
        (spec_of(), "lane", 16, 32),
        (spec_of("V112"), "lane", 16, 16),
        (spec_of("V240"), "lane", 16, 8),
        (spec_of("V1000"), "lane", 16, 1),
        (spec_of(state=STATE), "order", 1, 32),
        (spec_of(parallel="warp"), "warp", 16, 32),
        (spec_of(parallel="warp", state=STATE), "warp", 1, 32),
        (spec_of(parallel="block", state=STATE), "block", 8, 32),
        (spec_of(workers=3), "lane", 3, 32),
    ],
)
def test_the_measured_defaults_are_chosen(spec, mode, workers, chunk):
    settings = cuda_build.plan(spec, H200_SHARED_NBYTES)
    assert (settings.mode, settings.workers, settings.chunk) == (mode, workers, chunk)
    assert settings.shared_nbytes <= H200_SHARED_NBYTES


def test_large_messages_take_fewer_workers_then_shorter_chunks():
    settings = cuda_build.plan(spec_of("V4096"), H200_SHARED_NBYTES)
    assert settings.shared_nbytes <= H200_SHARED_NBYTES
    assert 1 <= settings.workers < 16


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_of(state=STATE, workers=4), "workers=4 must be 1"),
        (spec_of(state=STATE, blocks=2), "blocks=2 must be 1"),
        (spec_of(parallel="block", blocks=2), "blocks=2 must be 1"),
        (spec_of(blocks=0), "blocks=0"),
        (spec_of(workers=32), "workers=32"),
        (spec_of("V100000"), "shared memory"),
        (spec_of("V4096", workers=31), "fewer workers"),
    ],
)
def test_impossible_settings_are_refused(spec, said):
    with pytest.raises(InvalidValueError, match=said):
        cuda_build.plan(spec, H200_SHARED_NBYTES)
