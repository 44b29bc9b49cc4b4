"""Ring kernels on the CPU: one native thread a ring, over shared memory.

The handler is a C function: compiled from Python by Numba, given as an address, or, where Numba is
missing, a Python function that the thread calls with the GIL.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native import _native
from ringmem.native.errors import InvalidValueError
from ringmem.ring.backend import KernelSpec, PairAddresses
from ringmem.ring.plain_record import PlainRecord
from ringmem.ring.slots import host_bytes

__all__ = ["CpuBackend", "NativeHandler", "SharedRingMemory"]

_PAGE = 4096
_C_FUNCTION: type = ctypes.CFUNCTYPE(None).mro()[1]  # of all ctypes functions


@dataclass(frozen=True)
class NativeHandler:
    """A handler that is already machine code, for the CPU.

    Attributes
    ----------
    address : int
        Of a C function ``int32_t (const void* message, void* reply, void* state)``. It is called
        from native threads without the GIL, for messages of one ring in order. `state` is not to be
        touched where the kernel has none.
    lanes : bool
        Whether it takes two more arguments, ``int32_t lane, int32_t lanes``: 0 and 1 on the CPU.
    keep_alive : object
        What owns the code.
    """

    address: int
    lanes: bool = False
    keep_alive: object = None

    def __post_init__(self) -> None:
        if isinstance(self.address, bool) or not isinstance(self.address, int) or self.address <= 0:
            raise InvalidValueError(
                f"address={self.address!r:.80} must be the address of a C function, an int; "
                "a function of ctypes is a handler by itself"
            )


class SharedRingMemory:
    """Anonymous shared memory as :class:`ringmem.ring.backend.RingMemory`."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.ptr = int(native.ptr)
        self.device_ptr = self.ptr
        self.nbytes = int(native.nbytes)

    @classmethod
    def create(cls, nbytes: int) -> SharedRingMemory:
        """Make new zeroed memory."""
        return cls(_native.SharedMemory.create(-(-nbytes // _PAGE) * _PAGE))

    @property
    def fd(self) -> int:
        """The descriptor that another process maps."""
        return int(self._native.fd)

    def close(self) -> None:
        """Nothing to do: the memory goes with the last view of it."""


class CpuBackend:
    """Runs the loop in native threads of this process (:class:`ringmem.ring.backend.Backend`)."""

    in_order = True

    def __init__(self) -> None:
        self._native: Any = None
        self._failure: BaseException | None = None
        self._keep: list[object] = []

    def allocate(self, nbytes: int) -> SharedRingMemory:
        """Memory for rings and control blocks."""
        return SharedRingMemory.create(nbytes)

    def adopt(self, native: Any) -> SharedRingMemory:
        """Return shared memory of another process as memory of this backend; keep what comes."""
        return SharedRingMemory(native)

    def prepare(self, handler: Any, spec: KernelSpec) -> None:
        """Make a C function of the handler."""
        self._spec = spec
        address, lanes = self._function(handler)
        nbytes = 0 if spec.state is None else spec.state.itemsize
        self._native = _native.CpuKernel(address, lanes, spec.rings, nbytes)
        self._rings = {self._native.state_ptr(ring): ring for ring in range(spec.rings)}

    def start(self, pairs: Sequence[PairAddresses]) -> None:
        """Start the threads."""
        self._failure = None
        raw = [(p.control, p.telemetry, p.input, p.output, p.dead_letter) for p in pairs]
        self._native.start(raw, self._spec.deadline_s or 0.0)

    def _state(self, ring: int) -> npt.NDArray[Any]:
        dtype = self._spec.state
        if dtype is None:
            raise InvalidValueError("this kernel has no state; pass state=dtype to RingKernel")
        raw = host_bytes(self._native.state_ptr(ring), dtype.itemsize, self._native)
        return np.ndarray((), dtype=dtype, buffer=raw)

    def read_state(self, ring: int) -> npt.NDArray[Any]:
        """A copy of one ring's state, shape ``()``."""
        return self._state(ring).copy()

    def write_state(self, ring: int, value: npt.ArrayLike) -> None:
        """Replace one ring's state."""
        self._state(ring)[()] = value

    def ended(self) -> bool:
        """Whether no thread runs."""
        return self._native is None or bool(self._native.ended())

    def failure(self) -> BaseException | None:
        """What a Python handler raised."""
        return self._failure

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads."""
        return self._native is None or bool(self._native.join(timeout_s))

    def close(self) -> None:
        """Forget the handler."""
        if self.ended():
            self._native = None
            self._keep.clear()

    # --- handlers --------------------------------------------------------------------------------

    def _function(self, handler: Any) -> tuple[int, bool]:
        """Return the address of `handler` as a C function, and whether it takes lanes."""
        if not isinstance(getattr(handler, "address", None), int) and not _is_c_function(handler):
            handler = _compile(handler, self._spec)
        self._keep.append(handler)
        if _is_c_function(handler):
            return _address(handler), len(handler.argtypes or ()) == 5
        address = getattr(handler, "address", None)
        if isinstance(address, int):
            lanes = getattr(handler, "lanes", None)
            if lanes is None:
                lanes = _argument_count(handler) == 5
            return address, bool(lanes)
        return self._python_function(handler.python), False

    def _python_function(self, function: Callable[..., Any]) -> int:
        """Return the address of a C function that calls a Python one."""
        spec = self._spec

        def view(ptr: int, dtype: np.dtype[Any] | None) -> Any:
            if dtype is None:
                return None
            shape = () if dtype.names else (1,)
            array = np.ndarray(shape, dtype=dtype, buffer=host_bytes(ptr, dtype.itemsize, None))
            return PlainRecord(array) if dtype.names else array

        def call(message: int, reply: int, state: int) -> int:
            try:
                status = function(
                    view(message, spec.message),
                    view(reply, spec.reply),
                    view(state, spec.state),
                )
                return int(status) if isinstance(status, np.bool_) else operator.index(status)
            except BaseException as error:
                self._failure = error
                self._native.fault(self._rings[state])
                return 0

        pointer = ctypes.c_void_p
        c_function = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, pointer)(call)
        self._keep.append(c_function)
        return _address(c_function)


def _address(c_function: Any) -> int:
    return ctypes.cast(c_function, ctypes.c_void_p).value or 0


def _is_c_function(handler: Any) -> bool:
    return isinstance(handler, _C_FUNCTION)


def _argument_count(handler: Any) -> int:
    arguments = getattr(handler, "arguments", 3)
    return arguments if isinstance(arguments, int) else len(arguments)


def _compile(handler: Any, spec: KernelSpec) -> Any:
    """Return what the compiler makes of a handler that is no address yet."""
    from ringmem.ring import handlers

    return handlers.compile_for_cpu(
        handler, spec.message, spec.reply, spec.state, parallel=spec.parallel
    )
