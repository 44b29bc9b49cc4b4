"""The CUDA backend of a ring kernel: pinned mapped memory, the built kernel, its launch and state.

Nothing here waits for the running kernel but `join`. Memory that the kernel used is given back in
the order of its stream, pinned memory by the reaper; the kernel itself stays loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.buffers import DeviceBuffer
from ringmem.device import Device, MemoryVisibility
from ringmem.native import _native
from ringmem.native.errors import (
    ClosedError,
    DriverError,
    InvalidValueError,
    KernelFailedError,
    NotSupportedError,
    TimeoutError,  # noqa: A004 - the field's word
)
from ringmem.native.layouts import ControlBlock, dtype_of
from ringmem.ring import cuda_build, handlers
from ringmem.ring.backend import KernelSpec, PairAddresses
from ringmem.ring.cuda_launch import LoadedKernel, load_kernel, residency, shared_limit_nbytes
from ringmem.ring.cuda_memory import CudaRingMemory, RegisteredRingMemory

__all__ = ["CudaBackend"]

_KERNEL_RING = dtype_of("KernelRing")
_BLOCK_SCRATCH = dtype_of("BlockScratch")
_STATE_ALIGNMENT = 256  # states of two rings share no line of any cache
_PAGE = 4096
_GUARD_NBYTES, _GUARD = 64, 0xA5  # at least so much behind each state, and what is in it


class CudaBackend:
    """Where a ring kernel runs on a CUDA device; see :class:`ringmem.ring.backend.Backend`.

    Parameters
    ----------
    device : Device
        A CUDA device.

    Raises
    ------
    NotSupportedError
        The device has no cooperative launch, or host and device do not see each other's stores
        while a kernel runs.
    """

    in_order = False  # the workers take chunks of messages side by side

    def __init__(self, device: Device) -> None:
        _check_device(device)
        self.device = device
        self._stream = device.create_stream()
        self._copies = device.create_stream()
        self._memories: list[weakref.ref[CudaRingMemory | RegisteredRingMemory]] = []
        self._spec: KernelSpec | None = None
        self._kernel: LoadedKernel | None = None
        self._arena: DeviceBuffer | None = None
        self._failure: DriverError | KernelFailedError | None = None
        self._started = False
        self._closed = False

    # --- memory ----------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> CudaRingMemory:
        """Return zeroed pinned memory for rings and control blocks."""
        self._check_open()
        if nbytes < 1:
            raise InvalidValueError(f"nbytes={nbytes} must be at least 1")
        memory = CudaRingMemory(self.device, -(-nbytes // _PAGE) * _PAGE)
        self._keep(memory)
        return memory

    def adopt(self, native: Any) -> RegisteredRingMemory:
        """Return shared memory of another process as memory of this backend; keep what comes."""
        self._check_open()
        memory = RegisteredRingMemory(self.device, native)
        self._keep(memory)
        return memory

    def _keep(self, memory: CudaRingMemory | RegisteredRingMemory) -> None:
        self._memories = [ref for ref in self._memories if ref() is not None]
        self._memories.append(weakref.ref(memory))

    def _device_address(self, name: str, ptr: int) -> int:
        for ref in self._memories:
            memory = ref()
            if memory is not None and memory.ptr <= ptr < memory.ptr + memory.nbytes:
                return memory.device_ptr + ptr - memory.ptr
        raise InvalidValueError(f"{name}={ptr:#x} is in no memory that this backend allocated")

    # --- preparing -------------------------------------------------------------------------------
    def prepare(self, handler: Any, spec: KernelSpec) -> None:
        """Compile, load and check; allocate one zeroed state record for each ring.

        Raises
        ------
        InvalidValueError
            The handler is refused, or the settings do not fit the device.
        NotSupportedError
            A compiler is missing, or not all rings can be resident at once.
        """
        self._check_open()
        if spec.rings < 1:
            raise InvalidValueError(f"rings={spec.rings} must be at least 1")
        handlers.check_handler(handler, spec.parallel, spec.state)
        settings = cuda_build.plan(spec, self._shared_limit())
        capability = self.device.compute_capability
        code = handlers.compile_for_cuda(handler, spec, capability)
        arguments = handlers.cuda_arguments(handler, spec.parallel)
        cubin = cuda_build.build(settings, arguments, code, capability)
        kernel = load_kernel(self.device, cubin, settings)
        if spec.rings * settings.blocks > kernel.resident_blocks:
            fitting = kernel.resident_blocks // settings.blocks
            raise NotSupportedError(
                f"rings={spec.rings} with blocks={settings.blocks} and {settings.threads} threads "
                f"each cannot be resident at once on {self.device.name}: {fitting} rings fit"
            )
        self._spec, self._kernel = spec, kernel
        arena = DeviceBuffer(self._layout()[-1], device=self.device, stream=self._stream)
        try:
            self._copy(arena.ptr, np.zeros(arena.nbytes, np.uint8), to_device=True)
            self._arena = arena
        except BaseException:
            arena.close()
            raise

    def _shared_limit(self) -> int:
        with cuda_build.needs_toolchain():
            return shared_limit_nbytes(self.device)

    def _layout(self) -> tuple[int, int, int]:
        """Offsets in the arena: of the scratch, of the states, and its size; KernelRings first."""
        spec, kernel = self._prepared()
        scratch = spec.rings * _KERNEL_RING.itemsize
        scratch = -(-scratch // _STATE_ALIGNMENT) * _STATE_ALIGNMENT
        blocks = spec.rings * kernel.settings.blocks
        states = scratch + blocks * _BLOCK_SCRATCH.itemsize
        states = -(-states // _STATE_ALIGNMENT) * _STATE_ALIGNMENT
        return scratch, states, states + spec.rings * self._state_stride()

    def _state_stride(self) -> int:
        state = self._prepared()[0].state
        nbytes = 0 if state is None else state.itemsize + _GUARD_NBYTES
        return -(-nbytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT

    def _write_guards(self) -> None:
        """Fill what lies behind each state, which no handler may write."""
        spec, _ = self._prepared()
        for ring in range(spec.rings if spec.state is not None else 0):
            state, ptr = self._state(ring)
            guard = np.full(self._state_stride() - state.itemsize, _GUARD, np.uint8)
            self._copy(ptr + state.itemsize, guard, to_device=True)

    def _check_guards(self) -> None:
        """After the end: a handler that wrote behind its state is a failure."""
        spec, _ = self._prepared()
        for ring in range(spec.rings if spec.state is not None else 0):
            state, ptr = self._state(ring)
            guard = np.empty(self._state_stride() - state.itemsize, np.uint8)
            self._copy(ptr + state.itemsize, guard, to_device=False)
            if (guard != _GUARD).any():
                self._failure = KernelFailedError(
                    f"the handler of ring {ring} wrote outside its state: what lies there is "
                    "damaged, and so may be the state; check its indices",
                    "faulted",
                )
                return

    def _prepared(self) -> tuple[KernelSpec, LoadedKernel]:
        if self._spec is None or self._kernel is None:
            raise InvalidValueError("the backend is not prepared: call prepare() first")
        return self._spec, self._kernel

    @property
    def multiprocessors(self) -> float:
        """How many multiprocessors the kernel takes while it runs, as parts of whole ones."""
        spec, kernel = self._prepared()
        count = self.device.capabilities.multiprocessor_count
        return spec.rings * kernel.settings.blocks / kernel.resident_blocks * count

    # --- running ---------------------------------------------------------------------------------
    def start(self, pairs: Sequence[PairAddresses]) -> None:
        """Launch on the backend's own non-blocking stream; returns when submitted.

        Raises
        ------
        NotSupportedError
            Not all rings fit beside the ring kernels that run already.
        InvalidValueError
            It runs, or the addresses are not of this backend's memory.
        DriverError
            The launch failed.
        """
        self._check_open()
        spec, kernel = self._prepared()
        if isinstance(self._failure, DriverError):
            raise self._failure
        if self._started and not self.ended():
            raise InvalidValueError("the kernel is running: end and join it before it starts again")
        if len(pairs) != spec.rings:
            raise InvalidValueError(f"pairs has {len(pairs)} entries; rings={spec.rings}")
        arena = self._arena
        assert arena is not None
        launches, scratch = self._descriptors(pairs)
        for pair in pairs:
            _clear_kernel_fields(pair.control)
        residency.enter(self, kernel, spec.rings)
        self._failure = None
        try:
            self._write_guards()
            self._copy(arena.ptr, launches, to_device=True)
            self._copy(arena.ptr + self._layout()[0], scratch, to_device=True)
            kernel.launch(self._stream, spec.rings * kernel.settings.blocks, arena.ptr)
        except BaseException:
            residency.leave(self)
            raise
        self._started = True

    def _descriptors(
        self, pairs: Sequence[PairAddresses]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the KernelRings and the BlockScratches as a launch must find them."""
        spec, kernel = self._prepared()
        assert self._arena is not None
        blocks = kernel.settings.blocks
        scratch_at, states_at, _ = (self._arena.ptr + offset for offset in self._layout())
        launches = np.zeros(spec.rings, _KERNEL_RING)
        scratch = np.zeros((spec.rings, blocks), _BLOCK_SCRATCH)
        scratch["latency_min_ns"] = ~np.uint64(0)
        for ring, pair in enumerate(pairs):
            for name in ("control", "telemetry", "input", "output", "dead_letter"):
                ptr = getattr(pair, name)
                if ptr or name != "dead_letter":
                    launches[ring][f"{name}_ptr"] = self._device_address(name, ptr)
            if spec.state is not None:
                launches[ring]["state_ptr"] = states_at + ring * self._state_stride()
            launches[ring]["deadline_ns"] = int((spec.deadline_s or 0) * 1e9)
            launches[ring]["scratch_ptr"] = scratch_at + ring * blocks * _BLOCK_SCRATCH.itemsize
            scratch[ring]["progress"] = _load(pair.input + _HEAD)
            if pair.dead_letter:
                scratch[ring, 0]["dead_tail"] = _load(pair.dead_letter + _TAIL)
                scratch[ring, 0]["dead_head"] = _load(pair.dead_letter + _HEAD)
        return launches, scratch

    def ended(self) -> bool:
        """Whether nothing runs any more, also after a failure. Never blocks."""
        if not self._started:
            return True
        if self._failure is None:
            try:
                if not self._stream.query():
                    return False
            except DriverError as error:
                self._failure = error
        residency.leave(self)
        return True

    def failure(self) -> BaseException | None:
        """Return what broke the kernel, such as an illegal address, else None. Never blocks."""
        if self._started and not self._closed:
            self.ended()
        return self._failure

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it still runs."""
        if self._started and self._failure is None:
            try:
                self._stream.synchronize(timeout_s)
                self._check_guards()
            except TimeoutError:
                return False
            except DriverError as error:
                self._failure = error
        residency.leave(self)
        return True

    # --- state -----------------------------------------------------------------------------------
    def read_state(self, ring: int) -> npt.NDArray[Any]:
        """Return a copy of one ring's state, shape ``()``."""
        state, ptr = self._state(ring)
        out = np.empty(1, state)
        self._copy(ptr, out.view(np.uint8), to_device=False)
        return out.reshape(())

    def write_state(self, ring: int, value: npt.ArrayLike) -> None:
        """Replace one ring's state."""
        state, ptr = self._state(ring)
        try:
            record = np.asarray(value, dtype=state).reshape(1)
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"value={value!r:.80} is no {state}: {error}") from error
        self._copy(ptr, np.ascontiguousarray(record).view(np.uint8), to_device=True)

    def _state(self, ring: int) -> tuple[np.dtype[Any], int]:
        self._check_open()
        spec, _ = self._prepared()
        if spec.state is None:
            raise InvalidValueError("the handler has no state: pass state=dtype to the kernel")
        if not 0 <= ring < spec.rings:
            raise InvalidValueError(f"ring={ring} must be 0 to {spec.rings - 1}")
        assert self._arena is not None
        return spec.state, self._arena.ptr + self._layout()[1] + ring * self._state_stride()

    def _copy(self, ptr: int, array: npt.NDArray[Any], *, to_device: bool) -> None:
        """Copy between device and host memory; complete on return, also beside the kernel."""
        stream = self._copies
        if not self._started:
            stream = self._stream  # the arena is allocated in this one's order
        address = array.ctypes.data
        dst, src = (ptr, address) if to_device else (address, ptr)
        self.device.driver.copy_async(self.device.ordinal, dst, src, array.nbytes, stream.handle)
        stream.synchronize()

    # --- end -------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the ring kernel's backend is closed")

    def close(self) -> None:
        """Give back device memory and streams. The kernel has ended. Idempotent."""
        if self._closed:
            return
        if not self.ended():
            raise InvalidValueError("the kernel is running: end and join it before closing")
        self._closed = True
        residency.leave(self)
        first: BaseException | None = None
        for item in (self._arena, self._copies, self._stream):
            try:
                if item is not None:
                    item.close()
            except DriverError as error:  # after a failure every call of the context fails
                first = first or error
        self._arena = None
        if first is not None and self._failure is None:
            raise first


_HEADER = 128  # of RingHeader: descriptor, producer and consumer on lines of their own
_TAIL = _HEADER  # RingHeader.producer.tail
_HEAD = 2 * _HEADER  # RingHeader.consumer.head


def _load(ptr: int) -> int:
    return int(_native.load_u64(ptr))


def _clear_kernel_fields(control: int) -> None:
    """Before a launch: what an earlier run left in the fields that the kernel writes."""
    block = ControlBlock.from_address(control)
    block.active = 0
    block.has_terminated = 0
    block.is_paused = 0
    block.end_reason = 0


def _check_device(device: Device) -> None:
    if device.platform != "cuda":
        raise NotSupportedError(f"{device.name} is no CUDA device: a CPU device has its own loop")
    if not device.capabilities.cooperative_launch:
        raise NotSupportedError(
            f"{device.name} has no cooperative launch, which a ring kernel needs so that all its "
            "blocks run at once; use a CPU device"
        )
    decision = device.memory_visibility()
    if decision.visibility is not MemoryVisibility.SYSTEM_SCOPE:
        raise NotSupportedError(
            f"{device.name} and the host do not see each other's stores while a kernel runs "
            f"({decision.visibility.value}: {'; '.join(decision.reasons)}); use RingBufferBridge "
            "with Sync() or Async(), or a CPU device"
        )
