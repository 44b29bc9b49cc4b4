"""Handlers: what a ring kernel runs for each message, and how they become native code.

A handler is a Python function, CUDA C++ source (:class:`CudaSource`) or ready LTO-IR
(:class:`LtoIr`). It is checked first, without any compiler, then looked up in the cache
(:mod:`ringmem.ring.cache`), and compiled only where it is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.ring import cache, handler_code
from ringmem.ring.backend import KernelSpec, Parallel

__all__ = [
    "CpuHandler",
    "CudaSource",
    "Handler",
    "LtoIr",
    "check_handler",
    "compile_for_cpu",
    "compile_for_cuda",
]

_CACHED_ALONE = b"code"  # first bytes of a cached CPU handler
_RULES = 2  # of what is refused, in the cache's keys: entries of other rules are not taken
CHECKED_FOR = (9, 0)  # the architecture that a CPU handler is also compiled for, to see that it can


@dataclass(frozen=True)
class CudaSource:
    """A handler in CUDA C++.

    Parameters
    ----------
    text : str
        Source with a ``__device__`` function
        ``int name(const Message* message, Reply* reply, State* state)`` of any pointer types; with
        ``, int lane, int lanes`` behind for parallel kernels. It returns a status, 0 for success.
        The headers of CUDA are not included.
    name : str
        Of that function.

    Notes
    -----
    ``message`` is at a multiple of 8 bytes, so is ``reply``, which is zeroed. Multiplications and
    additions are not contracted; call ``fmaf`` where that is wanted.

    Examples
    --------
    >>> text = "__device__ int twice(const int* a, int* b, void*) { *b = 2 * *a; return 0; }"
    >>> CudaSource(text, name="twice").name
    'twice'
    """

    text: str
    name: str = "handler"


@dataclass(frozen=True)
class LtoIr:
    """A handler as LTO-IR, made by NVRTC (``-dlto``) or Numba.

    Parameters
    ----------
    code : bytes
        With a C function
        ``int ringmem_handler(const void* message, void* reply, void* state)``, and
        ``, int lane, int lanes`` for parallel kernels.
    """

    code: bytes


Handler: TypeAlias = Callable[..., int] | CudaSource | LtoIr | str


@dataclass(frozen=True)
class CpuHandler:
    """A handler that this process can call.

    Attributes
    ----------
    address : int or None
        Of a C function ``int32 (const void* message, void* reply, void* state)``, with
        ``, int32 lane, int32 lanes`` behind where `arguments` is 5. None: only `python` is there.
    keep_alive : object
        Holds the code.
    arguments : int
        3 or 5.
    python : callable
        ``(message, reply, state) -> int`` for what a compiled handler sees: records with fields as
        attributes (`PlainRecord`), arrays of one element for plain dtypes, None without a state.
    """

    address: int | None
    keep_alive: Any
    arguments: int
    python: Callable[[Any, Any, Any], Any]


# --- checks ---------------------------------------------------------------------------------------
def check_handler(handler: Handler, parallel: Parallel, state: np.dtype[Any] | None) -> None:
    """Refuse what is no handler, or not one of this kind of kernel; compiles nothing.

    Raises
    ------
    InvalidValueError
        It is no handler, takes other arguments, or does what no GPU can do (with file and line).
    """
    if isinstance(handler, CudaSource | LtoIr | str):
        source = _as_source(handler)
        if isinstance(source, CudaSource) and not source.name.isidentifier():
            raise InvalidValueError(f"name={source.name!r} of CudaSource is no function name")
        if not (source.text if isinstance(source, CudaSource) else source.code):
            raise InvalidValueError("handler is empty")
        return
    function = handler_code.python_function(handler)
    if function is None:
        raise InvalidValueError(
            f"handler={handler!r:.80} must be a Python function, CudaSource, LtoIr, or a str of "
            "CUDA C++"
        )
    code = function.__code__
    where = handler_code.location_of(function)
    if code.co_kwonlyargcount or code.co_flags & 0x0C:  # CO_VARARGS, CO_VARKEYWORDS
        raise InvalidValueError(
            f"{where}: handler {function.__qualname__!r} must take (message, reply, state), by "
            "position"
        )
    wanted = _argument_counts(parallel, state)
    if code.co_argcount not in wanted:
        shapes = {2: "(message, reply)", 3: "(message, reply, state)"}
        shapes[5] = "(message, reply, state, lane, lanes)"
        raise InvalidValueError(
            f"{where}: handler {function.__qualname__!r} takes {code.co_argcount} arguments; "
            f"here it must take {' or '.join(shapes[n] for n in wanted)}"
        )
    handler_code.check_for_both_targets(function)


def _argument_counts(parallel: Parallel, state: np.dtype[Any] | None) -> tuple[int, ...]:
    if parallel is not None:
        return (5,)
    return (3, 5) if state is not None else (2, 3, 5)


def _as_source(handler: CudaSource | LtoIr | str) -> CudaSource | LtoIr:
    return CudaSource(handler) if isinstance(handler, str) else handler


def _function_of(handler: Any) -> types.FunctionType:
    function = handler_code.python_function(handler)
    assert function is not None  # check_handler came before
    return function


def _described(dtype: np.dtype[Any] | None) -> object:
    """Return all that compiling sees of a dtype, whose fields may lie in any order."""
    if dtype is None:
        return None
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _described(base), shape
    if dtype.fields is None:
        return dtype.str
    fields = [
        (name, _described(dtype.fields[name][0]), dtype.fields[name][1])
        for name in dtype.names or ()
    ]
    return fields, dtype.itemsize, dtype.isalignedstruct


# --- CPU ------------------------------------------------------------------------------------------
def compile_for_cpu(
    handler: Handler,
    message: np.dtype[Any],
    reply: np.dtype[Any],
    state: np.dtype[Any] | None,
    parallel: Parallel = None,
) -> CpuHandler:
    """Compile a handler for this process, or take it from the cache.

    Where Numba is missing the handler stays Python, some thousand times slower; a warning says so
    once. Where numba-cuda is installed the handler is compiled for a GPU too, and thrown away, so
    that it does not fail there first.

    Raises
    ------
    InvalidValueError
        The handler is refused; the message has its file and line.
    NotSupportedError
        It is CUDA source or LTO-IR.
    """
    check_handler(handler, parallel, state)
    if isinstance(handler, CudaSource | LtoIr | str):
        raise NotSupportedError(
            f"a handler in {'LTO-IR' if isinstance(handler, LtoIr) else 'CUDA C++'} runs on CUDA "
            "devices only; a Python function runs on every device"
        )
    function = _function_of(handler)
    arguments = 5 if function.__code__.co_argcount == 5 else 3
    python = _plain_python(function)
    if cache.version_of("numba") is None:
        _say_once(
            "Numba is not installed: the handler runs as plain Python, some thousand times "
            "slower; pip install numba"
        )
        return CpuHandler(None, function, arguments, python)
    key = _cpu_key(function, message, reply, state)
    address, keep_alive = _cached_cpu_code(key)
    if address is None:
        address, keep_alive = _compile_cpu(function, message, reply, state, key)
    return CpuHandler(address, keep_alive, arguments, python)


def _cpu_key(function: types.FunctionType, *dtypes: np.dtype[Any] | None) -> str | None:
    from ringmem.ring import object_code

    content = handler_code.content_key(function)
    if content is None:
        return None
    versions = [cache.version_of(name) for name in ("numba", "llvmlite", "numpy", "numba-cuda")]
    described = [_described(dtype) for dtype in dtypes]
    return cache.key_of(
        "cpu", _RULES, content, described, versions, sys.version_info[:3], object_code.cpu_name()
    )


def _cached_cpu_code(key: str | None) -> tuple[int | None, Any]:
    from ringmem.ring import object_code

    entry = cache.load(key) if key is not None else None
    if entry is None or not entry.startswith(_CACHED_ALONE):
        return None, None
    try:
        return object_code.load(entry[len(_CACHED_ALONE) :])
    except RuntimeError:  # llvmlite refuses it: compile again
        return None, None


def _compile_cpu(
    function: types.FunctionType,
    message: np.dtype[Any],
    reply: np.dtype[Any],
    state: np.dtype[Any] | None,
    key: str | None,
) -> tuple[int | None, Any]:
    from ringmem.ring import numba_handlers

    broken = numba_handlers.why_not_cpu()
    if broken is not None:
        _say_once(
            f"Numba does not work here ({broken}): the handler runs as plain Python, some "
            "thousand times slower"
        )
        return None, function
    compiled = numba_handlers.compile_for_cpu(function, message, reply, state)
    numba_handlers.require_int_status(function, message, reply, state)
    if numba_handlers.why_not_cuda() is None:
        # Where Numba's CUDA side is broken nothing is known, so nothing is refused.
        with contextlib.suppress(NotSupportedError):
            numba_handlers.compile_for_cuda(function, message, reply, state, CHECKED_FOR)
    if key is not None and compiled.object_code is not None:
        cache.store(key, _CACHED_ALONE + compiled.object_code)
    return compiled.address, compiled.keep_alive


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _plain_python(function: types.FunctionType) -> Callable[[Any, Any, Any], Any]:
    count = function.__code__.co_argcount

    def call(message: Any, reply: Any, state: Any) -> Any:
        with np.errstate(all="ignore"):  # NumPy's error model, without its warnings
            return function(*(message, reply, state, 0, 1)[:count])

    return call


# --- CUDA -----------------------------------------------------------------------------------------
def compile_for_cuda(
    handler: Handler, spec: KernelSpec, compute_capability: tuple[int, int]
) -> bytes:
    """Compile a handler to LTO-IR that defines ``ringmem_handler``, or take it from the cache.

    The function takes as many arguments as :func:`cuda_arguments` says.

    Raises
    ------
    InvalidValueError
        The handler is refused; the message has its file and line.
    NotSupportedError
        It needs a compiler that is not installed.
    """
    check_handler(handler, spec.parallel, spec.state)
    if isinstance(handler, LtoIr):
        return handler.code
    if isinstance(handler, CudaSource | str):
        from ringmem.ring import cuda_build

        source = _as_source(handler)
        assert isinstance(source, CudaSource)
        return cuda_build.compile_handler_source(
            source.text, source.name, spec.parallel, compute_capability
        )
    return _compile_cuda_python(_function_of(handler), spec, compute_capability)


def cuda_arguments(handler: Handler, parallel: Parallel) -> int:
    """Return how many arguments the compiled handler takes: 2, 3 or 5."""
    function = handler_code.python_function(handler)
    if function is not None:
        return function.__code__.co_argcount
    return 3 if parallel is None else 5


def _compile_cuda_python(
    function: types.FunctionType, spec: KernelSpec, compute_capability: tuple[int, int]
) -> bytes:
    dtypes = (spec.message, spec.reply, spec.state)
    content = handler_code.content_key(function)
    key = None
    if content is not None:
        versions = [cache.version_of(name) for name in ("numba", "numba-cuda", "numpy")]
        described = [_described(dtype) for dtype in dtypes]
        key = cache.key_of(
            "ltoir", _RULES, content, described, versions, _nvvm_version(), compute_capability
        )
        entry = cache.load(key)
        if entry is not None:
            return entry
    from ringmem.ring import numba_handlers

    missing = numba_handlers.why_not_cuda()
    if missing is not None:
        raise NotSupportedError(
            "a Python handler on a CUDA device needs Numba with CUDA support "
            f"({missing}): pip install 'ringmem[kernels]', or write the handler in CUDA C++ "
            "(CudaSource)"
        )
    code = numba_handlers.compile_for_cuda(function, *dtypes, compute_capability)
    numba_handlers.require_int_status(function, *dtypes)
    if key is not None:
        cache.store(key, code)
    return code


def _nvvm_version() -> str | None:
    return cache.version_of("nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")


def c_function(address: int, arguments: int) -> Any:
    """Return a compiled CPU handler as a ctypes function, for tests and for plain calls."""
    lanes = [ctypes.c_int32, ctypes.c_int32] if arguments == 5 else []
    return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3, *lanes)(address)
