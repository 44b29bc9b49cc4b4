"""What a handler's bytecode says: what it refers to, what no GPU can do, and its content as a key.

Reading bytecode needs no Numba and no source file, so a refusal carries the handler's own line even
where the handler was typed into a prompt, and a cached handler is recognised before anything heavy
is imported.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import hashlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmem.native.errors import InvalidValueError

__all__ = [
    "Reference",
    "check_for_both_targets",
    "content_key",
    "line_of_attribute",
    "location_of",
    "python_function",
    "references",
]

_REFUSED_OPERATIONS = {
    "RAISE_VARARGS": "raises",
    "PUSH_EXC_INFO": "catches exceptions (try or with)",
    "BEFORE_WITH": "uses a with statement",
    "BUILD_LIST": "builds a list, which needs memory",
    "BUILD_MAP": "builds a dict, which needs memory",
    "BUILD_CONST_KEY_MAP": "builds a dict, which needs memory",
    "BUILD_SET": "builds a set, which needs memory",
    "BUILD_STRING": "formats a string",
    "FORMAT_VALUE": "formats a string",
    "FORMAT_SIMPLE": "formats a string",
    "FORMAT_WITH_SPEC": "formats a string",
    "RETURN_GENERATOR": "is a generator or coroutine",
    "IMPORT_NAME": "imports a module",
    "STORE_GLOBAL": "assigns a global",
    "DELETE_GLOBAL": "deletes a global",
}
_REFUSED_BUILTINS = frozenset(
    {"print", "input", "open", "eval", "exec", "list", "dict", "set", "str", "sorted", "repr"}
)
_ALLOCATING = frozenset(  # of NumPy
    {"arange", "array", "asarray", "concatenate", "copy", "empty", "empty_like", "full"}
    | {"full_like", "linspace", "ones", "ones_like", "stack", "zeros", "zeros_like"}
)
_REMEDY = (
    "a handler runs on CPU and GPU alike: report failures by the status it returns, and keep data "
    "in reply and state"
)


@dataclass(frozen=True)
class Reference:
    """A name from outside that a function uses: ``np.sqrt`` is ``("np", "sqrt")``."""

    names: tuple[str, ...]
    value: Any
    line: int


def python_function(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a function or a Numba dispatcher, else None."""
    if isinstance(value, types.FunctionType):
        return value
    inner = getattr(value, "py_func", None)
    return inner if isinstance(inner, types.FunctionType) else None


def location_of(function: types.FunctionType, line: int | None = None) -> str:
    """Return ``file:line`` of a function, or of a line in it."""
    code = function.__code__
    return f"{code.co_filename}:{line or code.co_firstlineno}"


def line_of_attribute(function: types.FunctionType, name: str) -> int | None:
    """Return the first line where an attribute of this name is read or written."""
    for instruction, line in _instructions(function.__code__):
        attribute = instruction.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD")
        if attribute and instruction.argval == name:
            return line
    return None


def _instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno:
            line = instruction.positions.lineno
        yield instruction, line


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of everything defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def references(function: types.FunctionType) -> list[Reference]:
    """Return the globals and closure variables that a function uses; of modules, the attributes.

    A name that is not defined is left out: compiling says what is wrong with it.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found: list[Reference] = []
    for code in _codes(function.__code__):
        following: Reference | None = None  # a module whose attribute may come next
        for instruction, line in _instructions(code):
            operation, name = instruction.opname, instruction.argval
            reference = None
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                missing = object()
                value = function.__globals__.get(name, getattr(builtins, name, missing))
                if value is not missing:
                    reference = Reference((name,), value, line)
            elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
                with contextlib.suppress(ValueError):  # an empty cell
                    reference = Reference((name,), cells[name].cell_contents, line)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD") and following is not None:
                if hasattr(following.value, name):
                    value = getattr(following.value, name)
                    reference = Reference((*following.names, name), value, line)
            elif operation in ("CACHE", "PUSH_NULL", "COPY_FREE_VARS", "EXTENDED_ARG"):
                continue
            if reference is not None:
                found.append(reference)
            is_module = reference is not None and isinstance(reference.value, types.ModuleType)
            following = reference if is_module else None
    return found


def check_for_both_targets(function: types.FunctionType) -> None:
    """Refuse what no GPU can do, in the handler and in every helper it calls.

    Raises
    ------
    InvalidValueError
        With file and line of the place.
    """
    _check(function, (), set())


def _check(
    function: types.FunctionType, callers: tuple[types.FunctionType, ...], done: set[int]
) -> None:
    if function in callers:
        raise _refusal(function, None, "calls itself")
    if id(function) in done:
        return
    done.add(id(function))
    for code in _codes(function.__code__):
        asserting = False
        for instruction, line in _instructions(code):
            asserting = (
                asserting
                or "AssertionError" in (instruction.argrepr.split() if instruction.argrepr else ())
                or instruction.opname == "LOAD_ASSERTION_ERROR"
            )
            what = _REFUSED_OPERATIONS.get(instruction.opname)
            if what == "raises" and asserting:
                what = "asserts"
            if what is not None:
                raise _refusal(function, line, what)
    for reference in references(function):
        _check_reference(function, reference)
        helper = python_function(reference.value)
        if helper is not None:
            _check(helper, (*callers, function), done)


def _check_reference(function: types.FunctionType, reference: Reference) -> None:
    name = ".".join(reference.names)
    value = reference.value
    if value is getattr(builtins, reference.names[-1], None) and (
        reference.names[-1] in _REFUSED_BUILTINS
    ):
        raise _refusal(function, reference.line, f"calls {name}()")
    if len(reference.names) > 1 and python_function(value) is not None:
        module = ".".join(reference.names[:-1])
        if getattr(value, "__module__", "").split(".")[0] not in ("numpy", "math", "numba"):
            raise _refusal(
                function,
                reference.line,
                f"calls {name}() through its module",
                f"bind the helper to a name of its own: from {module} import {reference.names[-1]}",
            )
    if reference.names[-1] in _ALLOCATING and getattr(np, reference.names[-1], None) is value:
        raise _refusal(function, reference.line, f"calls {name}(), which needs memory")


def _refusal(
    function: types.FunctionType, line: int | None, what: str, remedy: str = _REMEDY
) -> InvalidValueError:
    return InvalidValueError(
        f"{location_of(function, line)}: handler {function.__qualname__!r} {what}; {remedy}"
    )


# --- content as a key ----------------------------------------------------------------------------
class _UncacheableError(Exception):
    """Something whose content cannot be told."""


def content_key(function: types.FunctionType) -> str | None:
    """Return a key of everything a compiled handler depends on in Python, or None.

    Equal keys: equal bytecode and constants, of the function and of every helper, and equal values
    of the globals and closure variables they use, which compiling freezes, of an Enum all members.
    Names of files and line numbers do not count. None where a value is of a kind whose content
    cannot be told.
    """
    digest = hashlib.sha256()
    try:
        _feed_function(function, digest.update, set())
    except _UncacheableError:
        return None
    return digest.hexdigest()


Feed = Callable[[bytes], None]
_PLAIN = (bool, int, float, complex, str, bytes)


def _feed_function(function: types.FunctionType, feed: Feed, done: set[int]) -> None:
    if id(function) in done:
        feed(b"again")
        return
    done.add(id(function))
    _feed_code(function.__code__, feed, done)
    _feed(function.__defaults__, feed, done)
    for reference in references(function):
        feed(".".join(reference.names).encode() + b"=")
        _feed(reference.value, feed, done)


def _feed_code(code: types.CodeType, feed: Feed, done: set[int]) -> None:
    for part in (code.co_argcount, code.co_kwonlyargcount, code.co_flags):
        feed(b"%d;" % part)
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        feed(repr(names).encode())
    feed(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(constant, feed, done)
        else:
            _feed(constant, feed, done)


def _feed(value: Any, feed: Feed, done: set[int]) -> None:
    feed(type(value).__qualname__.encode() + b":")
    function = python_function(value)
    if function is not None:
        _feed_function(function, feed, done)
    elif isinstance(value, enum.Enum):
        feed(value.name.encode() if value.name else b"")
        _feed(value.value, feed, done)
    elif value is None or value is Ellipsis or type(value) in _PLAIN:
        feed(repr(value).encode() + b";")
    elif isinstance(value, tuple | frozenset):
        for item in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            _feed(item, feed, done)
        feed(b")")
    elif isinstance(value, np.dtype):
        feed(repr(value).encode())
    elif isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
        feed(repr((value.dtype, value.shape)).encode() + value.tobytes())
    elif isinstance(value, types.ModuleType):
        feed(f"{value.__name__} {getattr(value, '__version__', '')}".encode())
    elif isinstance(value, np.ufunc):
        feed(value.__name__.encode())
    elif isinstance(value, type) and issubclass(value, enum.Enum):
        feed(" ".join(f"{one.__module__}.{one.__qualname__}" for one in value.__mro__).encode())
        for name, member in value.__members__.items():  # aliases among them
            feed(name.encode() + b"=")
            _feed(member.value, feed, done)
        feed(b")")
    elif isinstance(value, types.BuiltinFunctionType) or _is_known_class(value):
        feed(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        raise _UncacheableError(type(value))


def _is_known_class(value: Any) -> bool:
    """Whether this is a class that changes with Python or NumPy alone: not one of the user's."""
    if not isinstance(value, type):
        return False
    return value.__module__ == "builtins" or value.__module__.split(".")[0] == "numpy"
