"""The allocators that ``ringmem replay`` and ``ringmem bench pool`` run side by side.

Each is the thinnest way from Python to somebody's allocator: what a user of that library would call
in a loop. A library is imported only when its allocator is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ringmem.native.errors import InvalidValueError, NotSupportedError

__all__ = ["FOREIGN_ALLOCATORS", "ForeignAllocator", "open_allocator"]


@dataclass
class ForeignAllocator:
    """Somebody else's allocator on CUDA device 0, reduced to what a loop needs.

    Attributes
    ----------
    allocate : callable
        ``(nbytes, stream_index) -> token``; raises the library's own error when memory is out.
    free : callable
        ``(token, stream_index) -> None``.
    reserved : callable or None
        Bytes that the allocator holds from the driver now; ``None`` where the library cannot say.
    out_of_memory : tuple of exception types
        What ``allocate`` raises when memory is out.
    """

    name: str
    allocate: Callable[[int, int], Any]
    free: Callable[[Any, int], None]
    reserved: Callable[[], int] | None
    out_of_memory: tuple[type[BaseException], ...]
    version: str
    close: Callable[[], None] = field(default=lambda: None)


Opener = Callable[[int, int | None], ForeignAllocator]


def _torch(expandable: bool) -> Opener:
    def open_(streams: int, capacity: int | None) -> ForeignAllocator:
        import torch

        settings = f"expandable_segments:{expandable}"
        torch.cuda.memory._set_allocator_settings(settings)
        torch.cuda.init()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, capacity / total) if capacity is not None else 1.0
        )
        handles = [torch.cuda.Stream().cuda_stream for _ in range(streams)] if streams > 1 else [0]
        raw_allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        raw_delete = torch._C._cuda_cudaCachingAllocator_raw_delete

        def close() -> None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)

        return ForeignAllocator(
            name="torch-expandable" if expandable else "torch",
            allocate=lambda nbytes, stream: raw_allocate(nbytes, handles[stream]),
            free=lambda pointer, stream: raw_delete(pointer),
            reserved=torch.cuda.memory_reserved,
            out_of_memory=(torch.cuda.OutOfMemoryError,),
            version=torch.__version__,
            close=close,
        )

    return open_


def _cupy(streams: int, capacity: int | None) -> ForeignAllocator:
    import cupy

    pool = cupy.cuda.MemoryPool()
    if capacity is not None:
        pool.set_limit(size=capacity)
    own = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)] if streams > 1 else []

    def allocate_on(nbytes: int, stream: int) -> Any:
        with own[stream]:
            return pool.malloc(nbytes)

    class Cell:
        """Holds the one reference, so that `free` decides when it goes."""

        __slots__ = ("memory",)

        def __init__(self, memory: Any) -> None:
            self.memory = memory

    def free(cell: Cell, stream: int) -> None:
        cell.memory = None

    return ForeignAllocator(
        name="cupy",
        allocate=(lambda nbytes, stream: Cell(allocate_on(nbytes, stream)))
        if own
        else (lambda nbytes, stream: Cell(pool.malloc(nbytes))),
        free=free,
        reserved=pool.total_bytes,
        out_of_memory=(cupy.cuda.memory.OutOfMemoryError,),
        version=cupy.__version__,
        close=pool.free_all_blocks,
    )


def _rmm(kind: str) -> Opener:
    def open_(streams: int, capacity: int | None) -> ForeignAllocator:
        import rmm
        import rmm.mr
        from rmm.pylibrmm.stream import Stream

        upstream: Any = rmm.mr.CudaMemoryResource()
        if capacity is not None:
            upstream = rmm.mr.LimitingResourceAdaptor(upstream, capacity)
        counted = rmm.mr.StatisticsResourceAdaptor(upstream)
        reserved: Callable[[], int] | None = lambda: counted.allocation_counts.current_bytes  # noqa: E731
        if kind == "pool":
            resource = rmm.mr.PoolMemoryResource(counted)
        elif kind == "arena":
            resource = rmm.mr.ArenaMemoryResource(counted)
        elif kind == "binning":
            resource = rmm.mr.BinningMemoryResource(rmm.mr.PoolMemoryResource(counted), 18, 22)
        else:
            resource = rmm.mr.CudaAsyncMemoryResource()
            reserved = None
        own = (
            [Stream() for _ in range(streams)]
            if streams > 1
            else [rmm.pylibrmm.stream.DEFAULT_STREAM]
        )

        def allocate(nbytes: int, stream: int) -> tuple[int, int]:
            return resource.allocate(nbytes, own[stream]), nbytes

        def free(token: tuple[int, int], stream: int) -> None:
            resource.deallocate(token[0], token[1], own[stream])

        return ForeignAllocator(
            name=f"rmm-{kind}",
            allocate=allocate,
            free=free,
            reserved=reserved,
            out_of_memory=(MemoryError,),
            version=rmm.__version__,
        )

    return open_


def _cuda_core(streams: int, capacity: int | None) -> ForeignAllocator:
    import cuda.core as core

    device = core.Device(0)
    device.set_current()
    options = core.DeviceMemoryResourceOptions(max_size=capacity) if capacity is not None else None
    resource = core.DeviceMemoryResource(device, options)
    own = (
        [device.create_stream() for _ in range(streams)] if streams > 1 else [device.default_stream]
    )
    return ForeignAllocator(
        name="cuda.core",
        allocate=lambda nbytes, stream: resource.allocate(nbytes, stream=own[stream]),
        free=lambda buffer, stream: buffer.close(own[stream]),
        reserved=lambda: int(resource.attributes.reserved_mem_current),
        out_of_memory=(Exception,),
        version=core.__version__,
    )


FOREIGN_ALLOCATORS: dict[str, Opener] = {
    "torch": _torch(expandable=False),
    "torch-expandable": _torch(expandable=True),
    "cupy": _cupy,
    "rmm-pool": _rmm("pool"),
    "rmm-arena": _rmm("arena"),
    "rmm-binning": _rmm("binning"),
    "rmm-async": _rmm("async"),
    "cuda.core": _cuda_core,
}


@contextlib.contextmanager
def open_allocator(
    name: str, *, streams: int = 1, capacity: int | None = None
) -> Iterator[ForeignAllocator]:
    """Open another library's allocator on CUDA device 0.

    Parameters
    ----------
    name : str
        A key of ``FOREIGN_ALLOCATORS``.
    streams : int
        How many streams the loop uses; one means the library's default stream.
    capacity : int, optional
        Bytes that the allocator may hold.

    Raises
    ------
    InvalidValueError
        For a name that is not known.
    NotSupportedError
        Where the library is not installed, or its version lacks what is needed.
    """
    try:
        opener = FOREIGN_ALLOCATORS[name]
    except KeyError:
        known = ", ".join(FOREIGN_ALLOCATORS)
        raise InvalidValueError(f"allocator={name!r} is not known; known are {known}") from None
    try:
        allocator = opener(streams, capacity)
    except (ImportError, AttributeError, TypeError) as error:
        raise NotSupportedError(f"allocator {name!r} cannot run here: {error}") from error
    try:
        yield allocator
    finally:
        allocator.close()
