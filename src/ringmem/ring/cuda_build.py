"""From a handler's LTO-IR to a loadable ring kernel. Compiles without a GPU; needs cuda.core.

The loop (``device/``) is compiled for the sizes and the mode of a kernel, then
linked with the handler, which is inlined. Cubins, not PTX: a driver may be older than the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.ring import cache
from ringmem.ring.backend import KernelSpec, Parallel

__all__ = ["KERNEL", "LoopSettings", "build", "compile_handler_source", "needs_toolchain", "plan"]

KERNEL = "ringmem_ring_kernel"
MAX_WORKERS = 31  # a block has at most 32 warps, one of which is the service warp
LINE_NBYTES, LINE_PAYLOAD_NBYTES = 64, 56
_LOOP = ("memory.cuh", "messages.cuh", "worker.cuh", "service.cuh", "ring_kernel.cuh")  # in order

Mode = Literal["lane", "order", "warp", "block"]
_MODES: dict[Mode, int] = {"lane": 0, "order": 1, "warp": 2, "block": 3}


# --- settings -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LoopSettings:
    """The compile-time settings of a loop.

    Attributes
    ----------
    mode : "lane", "order", "warp" or "block"
        Each lane a message; messages in order; a warp a message; a block a message.
    workers, blocks : int
        Worker warps of a block; blocks of a ring.
    chunk : int
        Messages in a row that belong to one worker.
    shared_nbytes : int
        Dynamic shared memory of a block.
    """

    message_nbytes: int
    reply_nbytes: int
    mode: Mode
    workers: int
    blocks: int
    chunk: int
    shared_nbytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.workers + 1) * 32

    def macros(self) -> dict[str, int]:
        """Return the macros that the loop is compiled with."""
        return {
            "RINGMEM_MESSAGE_NBYTES": self.message_nbytes,
            "RINGMEM_REPLY_NBYTES": self.reply_nbytes,
            "RINGMEM_WORKERS": self.workers,
            "RINGMEM_BLOCKS": self.blocks,
            "RINGMEM_CHUNK": self.chunk,
            "RINGMEM_MODE": _MODES[self.mode],
            "RINGMEM_SHARED_NBYTES": self.shared_nbytes,
        }


def plan(spec: KernelSpec, shared_limit_nbytes: int) -> LoopSettings:
    """Choose a loop's settings; calls nothing.

    Defaults were measured on an NVIDIA H200 with echoes: 14 million messages a second with one
    worker, 54 with 4, 87 with 8, 125 with 16, and the same round trip with each.

    Parameters
    ----------
    spec : KernelSpec
        What is wanted.
    shared_limit_nbytes : int
        Dynamic shared memory that a block may have.

    Raises
    ------
    InvalidValueError
        The combination is impossible; the message says what would do.
    """
    mode = _mode(spec)
    ordered = mode == "order" or (mode == "warp" and spec.state is not None)
    if spec.blocks < 1:
        raise InvalidValueError(f"blocks={spec.blocks} must be at least 1")
    if spec.blocks > 1 and (spec.state is not None or mode == "block"):
        reason = "a state is served in order" if spec.state is not None else "parallel='block'"
        raise InvalidValueError(f"blocks={spec.blocks} must be 1: {reason}, by one block a ring")
    if spec.workers is not None:
        if not 1 <= spec.workers <= MAX_WORKERS:
            raise InvalidValueError(f"workers={spec.workers} must be 1 to {MAX_WORKERS}")
        if ordered and spec.workers != 1:
            raise InvalidValueError(
                f"workers={spec.workers} must be 1: messages of a ring with a state are handled "
                "one at a time, in order; use more rings"
            )
    lines = max(_lines(spec.message.itemsize), _lines(spec.reply.itemsize))
    chunk = 32 if lines == 1 else 16 if lines == 2 else 8 if lines <= 5 else max(32 // lines, 1)
    workers = spec.workers or (1 if ordered else 8 if mode == "block" else 16)
    floor = workers if spec.workers else 1
    while True:
        needed = _shared_nbytes(spec, mode, workers, chunk)
        if needed <= shared_limit_nbytes:
            break
        if workers > max(floor, 4) and mode != "block":
            workers -= 1
        elif chunk > 1:
            chunk //= 2
        elif workers > floor and mode != "block":
            workers -= 1
        else:
            raise InvalidValueError(
                f"message of {spec.message.itemsize} and reply of {spec.reply.itemsize} bytes need "
                f"{needed} bytes of shared memory with workers={workers}; the device has "
                f"{shared_limit_nbytes}: use smaller messages"
                + (", or fewer workers" if workers > 1 else ", and pass large data by reference")
            )
    return LoopSettings(
        spec.message.itemsize,
        spec.reply.itemsize,
        mode,
        workers,
        spec.blocks,
        chunk,
        needed,
    )


def _mode(spec: KernelSpec) -> Mode:
    if spec.parallel is not None:
        return spec.parallel
    return "lane" if spec.state is None else "order"


def _lines(nbytes: int) -> int:
    return max(-(-nbytes // LINE_PAYLOAD_NBYTES), 1)


def _shared_nbytes(spec: KernelSpec, mode: Mode, workers: int, chunk: int) -> int:
    """What the kernel's BlockMemory and WorkerMemory take; the kernel asserts that it is enough."""

    def up(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple

    message, reply = _lines(spec.message.itemsize), _lines(spec.reply.itemsize)
    message_area = 0 if message == 1 else message * LINE_PAYLOAD_NBYTES
    reply_area = 0 if reply == 1 else reply * LINE_PAYLOAD_NBYTES
    worker = chunk * (message + reply) * LINE_NBYTES + chunk * (message_area + reply_area) + 32
    worker = up(worker + 4 * chunk, 16)
    block = up(80 + 80 * workers, 128)
    return block + worker * (1 if mode == "block" else workers)


# --- compiling ------------------------------------------------------------------------------------
def build(
    settings: LoopSettings, arguments: int, handler: bytes, compute_capability: tuple[int, int]
) -> bytes:
    """Return the cubin of a ring kernel, from the cache where it is there.

    Parameters
    ----------
    settings : LoopSettings
        Of the loop.
    arguments : int
        That the handler takes: 2, 3 or 5.
    handler : bytes
        LTO-IR with ``ringmem_handler``.
    compute_capability : tuple of int
        Of the device.

    Raises
    ------
    NotSupportedError
        The compilers are not installed.
    InvalidValueError
        The handler does not link.
    """
    source = _loop_source(arguments)
    versions = _toolchain()
    macros = settings.macros()
    key = cache.key_of("cubin", source, macros, handler, versions, compute_capability)
    cubin = cache.load(key)
    if cubin is not None:
        return cubin
    loop_key = cache.key_of("loop", source, macros, versions, compute_capability)
    loop = cache.load(loop_key)
    if loop is None:
        loop = _compile(source, macros, compute_capability, "the ring kernel's loop")
        cache.store(loop_key, loop)
    cubin = _link(loop, handler, compute_capability)
    cache.store(key, cubin)
    return cubin


def compile_handler_source(
    text: str, name: str, parallel: Parallel, compute_capability: tuple[int, int]
) -> bytes:
    """Compile CUDA C++ to LTO-IR with ``ringmem_handler``; pointers convert to the user's types.

    Raises
    ------
    InvalidValueError
        The source does not compile; the message has the compiler's, with the source's own lines.
    NotSupportedError
        The compilers are not installed.
    """
    lanes = ", int lane, int lanes" if parallel is not None else ""
    call = _PARALLEL_CALL if parallel is not None else _SINGLE_CALL
    source = (
        f'#line 1 "handler.cu"\n{text}\n#line 1 "ringmem"\n'
        + _ADAPTER.replace("NAME", name).replace("CALL", call.replace("NAME", name))
        + f"""
extern "C" __device__ int ringmem_handler(const void* message, void* reply, void* state{lanes}) {{
  using ringmem_adapter::Pointer;
  return ringmem_adapter::call(Pointer{{const_cast<void*>(message)}}, Pointer{{reply}},
                               Pointer{{state}}{", lane, lanes" if lanes else ", 0, 1"});
}}
"""
    )
    key = cache.key_of("source", source, _toolchain(), compute_capability)
    code = cache.load(key)
    if code is None:
        code = _compile(source, {}, compute_capability, f"handler {name!r}")
        cache.store(key, code)
    return code


_ADAPTER = """
namespace ringmem_adapter {
struct Pointer {
  void* value;
  template <class T>
  __device__ operator T*() const { return static_cast<T*>(value); }
};
template <class P>
__device__ int call(P message, P reply, P state, int lane, int lanes) {
CALL
}
}
"""
_SINGLE_CALL = """
  if constexpr (requires { NAME(message, reply, state); }) return NAME(message, reply, state);
  else if constexpr (requires { NAME(message, reply, state, lane, lanes); })
    return NAME(message, reply, state, lane, lanes);
  else if constexpr (requires { NAME(message, reply); }) return NAME(message, reply);
  else static_assert(sizeof(P) == 0, "no __device__ int NAME(message, reply, state)");
"""
_PARALLEL_CALL = """
  if constexpr (requires { NAME(message, reply, state, lane, lanes); })
    return NAME(message, reply, state, lane, lanes);
  else static_assert(sizeof(P) == 0,
                     "no __device__ int NAME(message, reply, state, int lane, int lanes)");
"""


@lru_cache(maxsize=3)
def _loop_source(arguments: int) -> str:
    layout = files("ringmem.native") / "layout"
    device = files("ringmem.ring") / "device"
    types = {2: "", 3: ", void*", 5: ", void*, int, int"}[arguments]
    passed = {2: "", 3: ", s", 5: ", s, lane, lanes"}[arguments]
    parts = [
        (layout / "layout.hpp").read_text(encoding="utf-8"),
        (layout / "kernel.hpp").read_text(encoding="utf-8"),
        f'extern "C" __device__ int ringmem_handler(const void*, void*{types});\n'
        f"#define RINGMEM_CALL_HANDLER(m, r, s, lane, lanes) ringmem_handler(m, r{passed})\n",
        *((device / name).read_text(encoding="utf-8") for name in _LOOP),
    ]
    return "\n".join(parts).replace("#pragma once", "")


@lru_cache(maxsize=1)
def _toolchain() -> tuple[str, ...]:
    """Versions of what compiles, without loading it where it came as a package."""
    found = []
    for names in (
        ("cuda-core",),
        ("cuda-bindings",),
        ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
        ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
    ):
        found.append(cache.version_of(*names) or "")
    if not found[2] or not found[3]:  # a toolkit of the system's
        found.append(_library_versions())
    return tuple(found)


def _library_versions() -> str:
    with needs_toolchain():
        from cuda.bindings import nvjitlink, nvrtc

        return f"{nvrtc.nvrtcVersion()} {nvjitlink.version()}"


class needs_toolchain:  # noqa: N801 - reads as words in a with statement
    """Turns a missing compiler into the error that says what to install."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        missing = isinstance(error, ImportError | OSError) or "NotFound" in type(error).__name__
        if missing:
            raise NotSupportedError(
                "a ring kernel on a CUDA device needs cuda.core, NVRTC and nvJitLink "
                f"({type(error).__name__}: {error}): pip install 'ringmem[cuda13]' (or [cuda12])"
            ) from error


def _arch(compute_capability: tuple[int, int]) -> str:
    return f"sm_{compute_capability[0]}{compute_capability[1]}"


def _compile(
    source: str, macros: dict[str, int], compute_capability: tuple[int, int], what: str
) -> bytes:
    """CUDA C++ to LTO-IR."""
    with needs_toolchain():
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            std="c++20",
            arch=_arch(compute_capability),
            link_time_optimization=True,
            relocatable_device_code=True,
            fma=False,
            define_macro=[(name, str(value)) for name, value in macros.items()] or None,
        )
        try:
            return bytes(Program(source, "c++", options).compile("ltoir").code)
        except (ImportError, OSError):
            raise
        except Exception as error:
            if "NotFound" in type(error).__name__:
                raise
            raise InvalidValueError(f"{what} does not compile: {_log(error)}") from error


def _log(error: Exception) -> str:
    """What the compiler said, without what was said around it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return "\n".join((errors or lines)[:8])[:2000]


def _link(loop: bytes, handler: bytes, compute_capability: tuple[int, int]) -> bytes:
    """Two pieces of LTO-IR to a cubin, without contraction.

    nvJitLink directly: the Linker of cuda.core 1.2 cannot pass ``-fma=0``.
    """
    with needs_toolchain():
        from cuda.bindings import nvjitlink

        options = [
            f"-arch={_arch(compute_capability)}", "-lto", "-O3",
            "-fma=0", "-ftz=0", "-prec-div=1", "-prec-sqrt=1",
        ]  # fmt: skip
        handle = nvjitlink.create(len(options), options)
        try:
            try:
                for code, name in ((loop, "loop"), (handler, "handler")):
                    kind = nvjitlink.InputType.LTOIR
                    nvjitlink.add_data(handle, kind, code, len(code), name)
                nvjitlink.complete(handle)
            except nvjitlink.nvJitLinkError as error:
                log = bytearray(max(nvjitlink.get_error_log_size(handle), 1))
                nvjitlink.get_error_log(handle, log)
                said = log.decode(errors="replace").strip("\0\n ")
                raise InvalidValueError(
                    f"the handler does not link with the ring kernel: {said or error}"
                ) from error
            cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
            nvjitlink.get_linked_cubin(handle, cubin)
            return bytes(cubin)
        finally:
            nvjitlink.destroy(handle)
