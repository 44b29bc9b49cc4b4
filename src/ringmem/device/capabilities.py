"""What a device can do, asked once and kept as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringmem.native import _native
from ringmem.native.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringmem.device.device import Device

__all__ = ["Capabilities", "read_capabilities"]

_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, a bit of `mempool_handle_types`


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capability table of a device: constants, so safe to keep.

    Attributes
    ----------
    compute_capability : tuple of int
        Major and minor; ``(0, 0)`` for a CPU device that simulates none.
    multiprocessor_count, max_threads_per_multiprocessor : int
        What can run at a time.
    async_engine_count : int
        Copy engines: copies that can go on beside each other and beside kernels.
    l2_cache_nbytes : int
        Size of the L2 cache.
    pci_address : str or None
        Domain, bus and device, such as ``"0000:19:00"``; None for a CPU device.
    integrated : bool
        The device shares the host's physical memory.
    unified_addressing : bool
        One address space for host and device.
    can_map_host_memory : bool
        Pinned memory can have a device address.
    host_native_atomics : bool
        Read-modify-write across the link is atomic.
    pageable_memory_access : bool
        The device can read memory that ``malloc`` gave.
    pageable_memory_access_uses_host_page_tables : bool
        It does so through the host's page tables, coherently.
    managed_memory : bool
        Managed memory can be allocated.
    concurrent_managed_access : bool
        Host and device may touch managed memory at the same time.
    direct_managed_access_from_host : bool
        The host reaches managed memory on the device without migration.
    host_register, read_only_host_register : bool
        Existing host memory can be page-locked; also when it is read-only.
    host_pointer_is_device_pointer : bool
        Registered host memory has the same address on the device.
    virtual_memory : bool
        Address ranges, physical memory and mappings.
    export_posix_fd : bool
        Physical memory can be exported as a file descriptor.
    rdma : bool
        Physical memory can be used for GPUDirect RDMA.
    dma_buf : bool
        Device memory can be exported as a dma-buf.
    host_numa_id : int
        The nearest NUMA node of the host; -1 if there is none.
    host_numa_virtual_memory : bool
        Physical memory can be created on the host.
    memory_pools : bool
        Stream-ordered allocation.
    memory_pool_export : bool
        A driver pool can be exported as a file descriptor.
    stream_memory_operations : bool
        Streams can wait for a 64-bit value in memory and write one.
    cooperative_launch : bool
        Cooperative kernels.
    granularity_nbytes, recommended_granularity_nbytes : int
        Multiples that physical memory is created in; 0 without virtual memory.
    """

    compute_capability: tuple[int, int]
    multiprocessor_count: int
    max_threads_per_multiprocessor: int
    async_engine_count: int
    l2_cache_nbytes: int
    pci_address: str | None
    integrated: bool
    unified_addressing: bool
    can_map_host_memory: bool
    host_native_atomics: bool
    pageable_memory_access: bool
    pageable_memory_access_uses_host_page_tables: bool
    managed_memory: bool
    concurrent_managed_access: bool
    direct_managed_access_from_host: bool
    host_register: bool
    read_only_host_register: bool
    host_pointer_is_device_pointer: bool
    virtual_memory: bool
    export_posix_fd: bool
    rdma: bool
    dma_buf: bool
    host_numa_id: int
    host_numa_virtual_memory: bool
    memory_pools: bool
    memory_pool_export: bool
    stream_memory_operations: bool
    cooperative_launch: bool
    granularity_nbytes: int
    recommended_granularity_nbytes: int


def read_capabilities(device: Device) -> Capabilities:
    """Ask the driver for every capability of a device.

    An attribute that an old driver does not know counts as absent.

    Raises
    ------
    DriverError
        The driver failed for another reason.
    """
    a = _native.Attribute

    def value(attribute: _native.Attribute) -> int:
        try:
            return device.driver.attribute(device.ordinal, attribute)
        except NotSupportedError:
            return 0

    def has(attribute: _native.Attribute) -> bool:
        return value(attribute) != 0

    virtual_memory = has(a.virtual_memory_management)
    return Capabilities(
        compute_capability=(value(a.compute_capability_major), value(a.compute_capability_minor)),
        multiprocessor_count=value(a.multiprocessor_count),
        max_threads_per_multiprocessor=value(a.max_threads_per_multiprocessor),
        async_engine_count=value(a.async_engine_count),
        l2_cache_nbytes=value(a.l2_cache_size),
        pci_address=_pci_address(device, value),
        integrated=has(a.integrated),
        unified_addressing=has(a.unified_addressing),
        can_map_host_memory=has(a.can_map_host_memory),
        host_native_atomics=has(a.host_native_atomic_supported),
        pageable_memory_access=has(a.pageable_memory_access),
        pageable_memory_access_uses_host_page_tables=has(
            a.pageable_memory_access_uses_host_page_tables
        ),
        managed_memory=has(a.managed_memory),
        concurrent_managed_access=has(a.concurrent_managed_access),
        direct_managed_access_from_host=has(a.direct_managed_access_from_host),
        host_register=has(a.host_register_supported),
        read_only_host_register=has(a.read_only_host_register),
        host_pointer_is_device_pointer=has(a.can_use_host_pointer_for_registered_memory),
        virtual_memory=virtual_memory,
        export_posix_fd=has(a.handle_type_posix_fd),
        rdma=has(a.gpu_direct_rdma_with_vmm),
        dma_buf=has(a.dma_buf),
        host_numa_id=value(a.host_numa_id),
        host_numa_virtual_memory=has(a.host_numa_virtual_memory_management),
        memory_pools=has(a.memory_pools),
        memory_pool_export=bool(value(a.mempool_handle_types) & _POSIX_FD),
        stream_memory_operations=has(a.stream_mem_ops_64),
        cooperative_launch=has(a.cooperative_launch),
        granularity_nbytes=_granularity(device, recommended=False) if virtual_memory else 0,
        recommended_granularity_nbytes=(
            _granularity(device, recommended=True) if virtual_memory else 0
        ),
    )


def _granularity(device: Device, *, recommended: bool) -> int:
    location = _native.Location(_native.LocationKind.device, device.ordinal)
    return device.driver.granularity(_native.PhysicalProps(location), recommended)


def _pci_address(device: Device, value: Callable[[_native.Attribute], int]) -> str | None:
    if device.platform != "cuda":
        return None
    a = _native.Attribute
    return f"{value(a.pci_domain_id):04x}:{value(a.pci_bus_id):02x}:{value(a.pci_device_id):02x}"
