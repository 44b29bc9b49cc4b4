"""Devices: one object for each device of each driver, found by name."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from ringmem.device import platforms
from ringmem.device.allocator_scope import AllocatorScope
from ringmem.device.capabilities import Capabilities, read_capabilities
from ringmem.device.event import Event
from ringmem.device.stream import Stream
from ringmem.native import _native
from ringmem.native.errors import (
    DriverError,
    InvalidDeviceError,
    InvalidValueError,
    NotSupportedError,
    RingmemError,
)
from ringmem.native.locks import Lock

if TYPE_CHECKING:
    from ringmem.device.visibility import VisibilityDecision

__all__ = ["Device", "MemoryInfo", "default_device", "devices"]

# Guards the making of default streams, so that a device has one. The collector may come in between
# and its finalizers may ask again: reentrant.
_stream_lock = Lock()


class MemoryInfo(NamedTuple):
    """Memory of a device, in bytes."""

    free: int
    total: int


class Device(_native.DeviceBase):
    """One device: a GPU, or a CPU that does the same work.

    There is one object a device, so ``Device("cpu") is Device("cpu:0")``; it can be compared,
    hashed, used from any thread, and pickled by its name (which a process without that device
    cannot load, and which is refused where the name means another device, as that of a simulation
    outside its ``with``). A copy is the device itself. Making one initializes the driver, but
    allocates nothing.

    Parameters
    ----------
    device : str or Device, optional
        ``"cuda:0"``, ``"cpu:1"``, or a platform alone, which means its device 0. A Device is
        returned as it is. By default :func:`default_device`.

    Raises
    ------
    InvalidDeviceError
        There is no such device; the message lists those there are.
    NotInitializedError
        The platform has no usable driver on this machine.

    Examples
    --------
    >>> from ringmem import Device
    >>> device = Device("cpu")
    >>> device.name, device.memory_info().total > 0
    ('cpu:0', True)
    """

    _default_stream: weakref.ref[Stream] | None = None

    def __new__(cls, device: str | Device | None = None) -> Device:
        """Find the device's one object."""
        return as_device(device)

    def __init__(self, device: str | Device | None = None) -> None:
        pass  # __new__ found it, ready

    @classmethod
    def _create(cls, driver: _native.Driver, ordinal: int) -> Device:
        """Make the object of a driver's device; `platforms` calls this once for each."""
        self = super().__new__(cls)
        _native.DeviceBase.__init__(self, driver, ordinal)
        return self

    # --- what it is ------------------------------------------------------------------------------

    @property
    def platform(self) -> str:
        """str: ``"cuda"`` or ``"cpu"``."""
        return self.name.partition(":")[0]

    @cached_property
    def product_name(self) -> str:
        """str: what the vendor calls it, such as ``"NVIDIA H200"``."""
        return self.driver.device_info(self.ordinal).name

    @cached_property
    def uuid(self) -> str:
        """str: the same in every process, such as ``"GPU-b26f3f2f-…"``."""
        return self.driver.device_info(self.ordinal).uuid

    @cached_property
    def capabilities(self) -> Capabilities:
        """Capabilities: the capability table, asked at the first use."""
        return read_capabilities(self)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Tuple of int: major and minor."""
        return self.capabilities.compute_capability

    @property
    def granularity(self) -> int:
        """int: physical memory is created in multiples of this many bytes.

        Raises
        ------
        NotSupportedError
            The device has no virtual memory management.
        """
        if not self.capabilities.virtual_memory:
            raise NotSupportedError(
                f"{self.name} has no virtual memory management, so no granularity"
            )
        return self.capabilities.granularity_nbytes

    def memory_info(self) -> MemoryInfo:
        """Return the free and total memory now, in bytes.

        Raises
        ------
        DriverError
            The driver could not tell.
        """
        return MemoryInfo(*super().memory_info())

    # --- streams and events ----------------------------------------------------------------------

    @property
    def default_stream(self) -> Stream:
        """Stream: the legacy default stream, handle 0."""
        known = self._default_stream
        stream = known() if known else None
        if stream is None:
            with _stream_lock:
                known = self._default_stream
                stream = known() if known else None  # another thread may have been first
                if stream is None:
                    stream = Stream._of_handle(self, 0)
                    # Weak: the stream holds the device, and native references are no business of
                    # the garbage collector's.
                    self._default_stream = weakref.ref(stream)
        return stream

    def create_stream(self, *, priority: int = 0, non_blocking: bool = True) -> Stream:
        """Create a stream; it is closed with ``close()``, or when nobody holds it any more.

        Parameters
        ----------
        priority : int, default 0
            Lower is more urgent; clamped to what the device has.
        non_blocking : bool, default True
            Not ordered with the legacy default stream.

        Raises
        ------
        DriverError
            The driver refused.
        """
        return Stream(self, priority=priority, non_blocking=non_blocking)

    def create_event(self, *, timing: bool = False, blocking_sync: bool = False) -> Event:
        """Create an event; it is closed with ``close()``, or when nobody holds it any more.

        Parameters
        ----------
        timing : bool, default False
            Keep the time, for :meth:`Event.elapsed_ms`; costs a little.
        blocking_sync : bool, default False
            ``synchronize()`` without a timeout sleeps instead of spinning.

        Raises
        ------
        DriverError
            The driver refused.
        """
        return Event(self, timing=timing, blocking_sync=blocking_sync)

    def synchronize(self) -> None:
        """Block until all work of the device is done, with the GIL released.

        This waits for **persistent kernels** too, so for ever beside a ring that is not stopped,
        and it cannot be interrupted. Synchronize a stream or an event instead wherever one will
        do.

        Raises
        ------
        DriverError
            The device failed.
        """
        super().synchronize()

    # --- memory ----------------------------------------------------------------------------------

    def use(self, allocator: object) -> AllocatorScope:
        """Let this thread's buffers on the device come from `allocator` inside a ``with``.

        Parameters
        ----------
        allocator : object
            A pool, or any object with ``allocate(nbytes, stream)`` and
            ``deallocate(ptr, nbytes, stream)``.

        Returns
        -------
        AllocatorScope
            A context manager; scopes nest, the innermost counts. Buffers made inside keep the
            allocator alive and go back to it.

        Raises
        ------
        InvalidValueError
            On entry: `allocator` is no allocator, or a pool of another device.

        Examples
        --------
        >>> from ringmem import Device
        >>> device = Device("cpu")
        >>> with device.use(device.allocator):
        ...     device.current_allocator is device.allocator
        True
        """
        return AllocatorScope(self, allocator)

    def memory_visibility(
        self, *, echo: bool = False, timeout_s: float = 1.0
    ) -> VisibilityDecision:
        """Decide how host and device see each other's stores to mapped memory.

        Parameters
        ----------
        echo : bool, default False
            Also try it: a stream waits for a word that the host writes, and answers. No kernel
            is needed. Without it the device's attributes and the platform decide alone.
        timeout_s : float, default 1.0
            Seconds to wait for the answer, at most.

        Returns
        -------
        VisibilityDecision
            The :class:`MemoryVisibility`, the platform found, the reasons, and the echo's result.

        Raises
        ------
        InvalidValueError
            `timeout_s` is not positive.
        DriverError
            The driver failed.

        Examples
        --------
        >>> from ringmem import Device
        >>> Device("cpu").memory_visibility().visibility
        <MemoryVisibility.SYSTEM_SCOPE: 'system scope'>
        """
        from ringmem.device.visibility import decide_for

        return decide_for(self, echo=echo, timeout_s=timeout_s)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        try:
            named: Device | None = platforms.device_named(self.name)
        except RingmemError:
            named = None
        if named is not self:
            raise NotSupportedError(
                f"{self!r} of a simulation or of an own driver cannot be pickled: its name means "
                f"{'no device' if named is None else 'another device'} now; pickle it inside "
                "`with simulation:`"
            )
        return (Device, (self.name,))

    def __repr__(self) -> str:
        return f"Device({self.name!r})"


def as_device(device: Device | str | None, argument: str = "device") -> Device:
    """Return what ``Device(device)`` does; an error names the argument that it was given as."""
    if isinstance(device, Device):
        return device
    if device is None:
        return default_device()
    if isinstance(device, str):
        return platforms.device_named(device)
    raise InvalidValueError(
        f"{argument} is {device!r}: give a Device or a name such as 'cuda:0' or 'cpu'"
    )


def devices(platform: str | None = None) -> list[Device]:
    """List the devices of this machine.

    Parameters
    ----------
    platform : {'cuda', 'cpu'}, optional
        Only these. By default all, CUDA first.

    Returns
    -------
    list of Device
        A platform without a usable driver has none.

    Raises
    ------
    InvalidDeviceError
        There is no such platform.

    Examples
    --------
    >>> from ringmem import devices
    >>> devices("cpu")
    [Device('cpu:0')]
    """
    if platform is not None and platform not in platforms.PLATFORMS:
        raise InvalidDeviceError(f"platform is {platform!r}: give 'cuda' or 'cpu', or None for all")
    names = platforms.PLATFORMS if platform is None else (platform,)
    found = []
    for name in names:
        driver = platforms.driver_of(name)  # asked once: a simulation may begin or end meanwhile
        count = platforms.count_of(driver)
        found += [platforms.device_of(driver, ordinal) for ordinal in range(count)]
    return found


def default_device() -> Device:
    """Return the device that is used where none is given.

    The one that the environment variable ``RINGMEM_DEVICE`` names, else the first CUDA device,
    else ``cpu:0``. Inside ``simulate()`` it is the simulation's first device.

    Raises
    ------
    InvalidDeviceError, NotInitializedError
        ``RINGMEM_DEVICE`` names a device that is not there.

    Examples
    --------
    >>> from ringmem import default_device
    >>> default_device().platform in ("cuda", "cpu")
    True
    """
    global _last_default
    wanted = _native.environment_value("RINGMEM_DEVICE")
    generation = platforms.generation  # read before the search: a change meanwhile is noticed
    if (last := _last_default) and last[0] == generation and last[1] == wanted:
        return last[2]
    platforms.watch_forks()
    device = _find_default(wanted)
    if not platforms.is_replaced(device.platform):  # a simulation's devices are not kept alive
        _last_default = generation, wanted, device
    return device


# The generation and the environment that it was found in, and the default device.
_last_default: tuple[int, str | None, Device] | None = None


def _find_default(wanted: str | None) -> Device:
    if platforms.is_replaced("cpu"):
        return platforms.device_named("cpu:0")
    if wanted:
        try:
            return platforms.device_named(wanted)
        except DriverError as error:
            raise type(error)(
                f"RINGMEM_DEVICE is {wanted!r}: {error}",
                operation=error.operation,
                code=error.code,
                name=error.name,
            ) from error
    return platforms.device_named("cuda:0" if platforms.device_count("cuda") else "cpu:0")
