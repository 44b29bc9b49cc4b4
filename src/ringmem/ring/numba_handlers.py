"""The one place that knows Numba: Python handlers to native code for the CPU and LTO-IR for a GPU.

Both compile the same function by the same rules: NumPy's error model (a division by zero is inf,
nan or 0), no contraction to fused multiply-add, no reordering of floating point. Helpers are
recompiled by these rules too, whatever they were decorated with.
"""

from __future__ import annotations

import re
import types as python_types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.ring.handler_code import (
    line_of_attribute,
    location_of,
    python_function,
    references,
)

__all__ = [
    "ENTRY",
    "CpuCode",
    "compile_for_cpu",
    "compile_for_cuda",
    "require_int_status",
    "why_not_cpu",
    "why_not_cuda",
]

ENTRY = "ringmem_handler"  # the C name under which a loop calls its handler

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PLACE = re.compile(r'(?:File "|at )([^"\n]+?)(?:", line | \()(\d+)')


class CpuCode(NamedTuple):
    """A handler compiled for this process."""

    address: int
    keep_alive: Any
    object_code: bytes | None  # to be loaded again elsewhere; None: it needs Numba beside it


def why_not_cpu() -> str | None:
    """Return why Numba cannot be used, or None."""
    try:
        import numba  # noqa: F401
    except Exception as error:  # an installed but broken Numba raises all sorts of things
        return f"{type(error).__name__}: {error}"
    return None


def why_not_cuda() -> str | None:
    """Return why Numba cannot compile for CUDA, or None."""
    try:
        from numba import cuda

        if not hasattr(cuda, "compile"):
            return "this numba has no cuda.compile; install numba-cuda"
    except Exception as error:  # numba-cuda 0.30 with NumPy 2.5 is an AttributeError
        return f"{type(error).__name__}: {error}"
    return None


def compile_for_cpu(
    function: python_types.FunctionType,
    message: np.dtype[Any],
    reply: np.dtype[Any],
    state: np.dtype[Any] | None,
) -> CpuCode:
    """Compile to ``int32 (const void*, void*, void*[, int32, int32])``.

    Raises
    ------
    InvalidValueError
        Numba refuses the function; the message has its file and line.
    """
    import numba

    from ringmem.ring import object_code

    def helper(inner: python_types.FunctionType) -> Any:
        return numba.njit(inner, error_model="numpy")

    signature = _signature(function, message, reply, state)
    bound = _rebind(function, helper, {})
    try:
        compiled = numba.cfunc(signature, error_model="numpy")(bound)
    except Exception as error:
        raise _refused(function, error, "the CPU") from error
    code = object_code.extract(compiled)
    if code is None:
        return CpuCode(int(compiled.address), compiled, None)
    return CpuCode(*object_code.load(code), code)


def compile_for_cuda(
    function: python_types.FunctionType,
    message: np.dtype[Any],
    reply: np.dtype[Any],
    state: np.dtype[Any] | None,
    compute_capability: tuple[int, int],
) -> bytes:
    """Compile to LTO-IR of a C function named `ENTRY` with as many arguments as the handler.

    Raises
    ------
    InvalidValueError
        Numba refuses the function; the message has its file and line.
    NotSupportedError
        Numba's CUDA side does not work here.
    """
    from numba import cuda

    def helper(inner: python_types.FunctionType) -> Any:
        # Inlined before typing: a call would be compiled for the current device, if there is one.
        return cuda.jit(device=True, inline="always")(inner)

    signature = _signature(function, message, reply, state)
    bound = _rebind(function, helper, {})
    try:
        code, returned = cuda.compile(
            bound,
            signature,
            device=True,
            abi="c",
            abi_info={"abi_name": ENTRY},
            output="ltoir",
            cc=compute_capability,
            fastmath=False,
        )
    except Exception as error:
        if not _is_refusal(error):
            raise NotSupportedError(
                f"Numba cannot compile for CUDA here ({type(error).__name__}: {error}); a CUDA C++ "
                "handler (CudaSource) needs no Numba"
            ) from error
        raise _refused(function, error, "a GPU") from error
    del returned
    return bytes(code)


def require_int_status(
    function: python_types.FunctionType,
    message: np.dtype[Any],
    reply: np.dtype[Any],
    state: np.dtype[Any] | None,
) -> None:
    """Refuse a handler that compiles and returns what is no integer: the cast would make 0 of 0.5.

    Told by the types that Numba finds for the CPU. Where it finds none (intrinsics of CUDA),
    nothing is refused.

    Raises
    ------
    InvalidValueError
        With file and line of the handler.
    """
    import numba
    from numba import types

    def helper(inner: python_types.FunctionType) -> Any:
        return numba.njit(inner, error_model="numpy")

    arguments = _signature(function, message, reply, state).args
    bound = _rebind(function, helper, {})
    try:
        compiled = numba.njit(arguments, error_model="numpy")(bound)
    except Exception:
        return
    returned = compiled.nopython_signatures[0].return_type
    if not isinstance(returned, types.Integer | types.Boolean):
        raise InvalidValueError(
            f"{location_of(function)}: handler {function.__qualname__!r} returns {returned}; "
            "it must return an int status, 0 for success"
        )


def _is_refusal(error: Exception) -> bool:
    """Whether the compiler found fault with the function, rather than with its own installation."""
    kinds = {base.__name__ for base in type(error).__mro__}
    broken = {"ImportError", "OSError", "CudaSupportError", "NvvmSupportError", "NvvmError"}
    return not kinds & broken and not any("NotFound" in kind for kind in kinds)


def _refused(
    function: python_types.FunctionType, error: Exception, target: str
) -> InvalidValueError:
    text = _ANSI.sub("", str(error))
    own = [
        int(line) for file, line in _PLACE.findall(text) if file == function.__code__.co_filename
    ]
    line = own[-1] if own else None
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(missing, str):  # what Numba raises for a field that a record lacks
        line = line_of_attribute(function, missing)
        said = f"no such field: {missing!r}"
    elif isinstance(missing, np.ufunc):  # and numba-cuda for a ufunc that it lacks
        name = missing.__name__
        line = line_of_attribute(function, name)
        said = f"Numba has no np.{name} there; use a function of math or plain operators"
    elif "from none to int32" in text:
        said = "it must return an int status on every path, 0 for success"
    else:
        said = _first_lines(text) or type(error).__name__
    return InvalidValueError(
        f"{location_of(function, line)}: handler {function.__qualname__!r} does not compile for "
        f"{target}: {said}"
    )


def _first_lines(text: str) -> str:
    noise = ("File ", "<source", "^", "-", "During:", "Failed in", "There are", "- Resolution")
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join([line for line in lines if line and not line.startswith(noise)][:4])[:600]


# --- types ----------------------------------------------------------------------------------------
def _signature(
    function: python_types.FunctionType,
    message: np.dtype[Any],
    reply: np.dtype[Any],
    state: np.dtype[Any] | None,
) -> Any:
    from numba import types

    arguments = [
        _pointer(function, "message", message),
        _pointer(function, "reply", reply),
        types.voidptr if state is None else _pointer(function, "state", state),
        types.int32,
        types.int32,
    ]
    return types.int32(*arguments[: function.__code__.co_argcount])


def _pointer(function: python_types.FunctionType, name: str, dtype: np.dtype[Any]) -> Any:
    """How Numba sees memory of a dtype: a record, or a pointer to a scalar (``message[0]``)."""
    from numba import types
    from numba.np import numpy_support

    try:
        numba_type = numpy_support.from_dtype(dtype)
    except Exception as error:
        said = _ANSI.sub("", str(error))
        raise InvalidValueError(
            f"{location_of(function)}: {name}={dtype} is a dtype that Numba cannot see ({said}); "
            "use numbers and arrays of numbers, or write the handler in CUDA C++ (CudaSource)"
        ) from error
    if isinstance(numba_type, types.Record):
        return _aligned(function, name, numba_type)
    return types.CPointer(numba_type)


def _aligned(function: python_types.FunctionType, name: str, record: Any) -> Any:
    """Return the record with its alignment stated, where every field lies at a multiple of its own.

    NumPy marks only ``align=True`` dtypes, and without the mark a GPU reads byte by byte. The
    record's size is rounded up, which nobody sees: handlers get pointers to single records.
    """
    from numba import types

    widest = 1
    for field, info in record.fields.items():
        unit = info.type
        while isinstance(unit, types.NestedArray):
            unit = unit.dtype
        if isinstance(unit, types.Record):
            return record
        width = min(getattr(unit, "bitwidth", 8) // 8, 8)  # a complex128 is two of 8
        widest = max(widest, width)
        if info.offset % width:
            raise InvalidValueError(
                f"{location_of(function)}: field {field!r} of {name} is at offset {info.offset}, "
                f"no multiple of its {width} bytes, which a GPU cannot read; use "
                "np.dtype(..., align=True) or reorder the fields"
            )
    if record.aligned:
        return record
    fields = [
        (field, {"type": info.type, "offset": info.offset, "alignment": None, "title": info.title})
        for field, info in record.fields.items()
    ]
    return types.Record(fields, -(-record.size // widest) * widest, aligned=True)


# --- helpers --------------------------------------------------------------------------------------
Wrap = Callable[[python_types.FunctionType], Any]


def _rebind(
    function: python_types.FunctionType, wrap: Wrap, done: dict[int, Any]
) -> python_types.FunctionType:
    """Return the function with every helper it calls replaced by `wrap` of that helper."""
    replaced: dict[str, Any] = {}
    for reference in references(function):
        helper = python_function(reference.value)
        if helper is None or len(reference.names) > 1:
            continue
        if (getattr(helper, "__module__", "") or "").split(".")[0] in ("numba", "numpy"):
            continue
        if id(helper) not in done:
            done[id(helper)] = wrap(_rebind(helper, wrap, done))
        replaced[reference.names[0]] = done[id(helper)]
    if not replaced:
        return function
    names = function.__code__.co_freevars
    closure = tuple(
        python_types.CellType(replaced[name]) if name in replaced else cell
        for name, cell in zip(names, function.__closure__ or (), strict=True)
    )
    bound = python_types.FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        closure or None,
    )
    bound.__module__ = function.__module__
    bound.__qualname__ = function.__qualname__
    return bound
