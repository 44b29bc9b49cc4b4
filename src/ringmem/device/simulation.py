"""Simulated devices by API: as many, as large and as slow as a test wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ringmem.device import platforms
from ringmem.device.scalars import is_bool, to_integer, to_seconds
from ringmem.device.sizes import parse_nbytes
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError

if TYPE_CHECKING:
    from types import TracebackType

    from ringmem.device.device import Device

__all__ = ["Simulation", "simulate"]

_MAX_DEVICES = 32
_MAX_LATENCY_S = 3600
_CAPABILITIES = frozenset(
    {
        "virtual_memory",
        "export",
        "pools",
        "managed",
        "concurrent_managed_access",
        "stream_mem_ops",
        "host_register",
        "cooperative_launch",
        "host_numa",
    }
)


class Simulation:
    """Simulated devices; made by :func:`simulate`.

    Attributes
    ----------
    devices : list of Device
        ``cpu:0``, ``cpu:1``, …, in order.
    driver : ringmem.native._native.HostDriver
        The raw driver behind them.
    """

    def __init__(self, driver: _native.HostDriver) -> None:
        self.driver = driver
        self.devices: list[Device] = platforms.devices_of(driver)

    def __enter__(self) -> Simulation:
        platforms.replace_driver("cpu", self.driver, active=True)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        platforms.replace_driver("cpu", self.driver, active=False)

    def __repr__(self) -> str:
        return f"<Simulation of {', '.join(d.name for d in self.devices)}>"


def simulate(
    devices: int = 1,
    *,
    capacity: int | str = "64 GiB",
    peers: bool | Iterable[tuple[int, int]] = True,
    latency_s: float = 0.0,
    strict: bool = False,
    granularity: int | str = "2 MiB",
    name: str | None = None,
    **capabilities: bool,
) -> Simulation:
    """Simulate devices in host memory, apart from the real ones.

    Inside a ``with`` the whole process finds them as ``Device("cpu:0")`` and so on, and the first
    is the default device; simulations nest. Without ``with``, take them from ``.devices``. They
    and their memory live until the last object on them is gone, also after the ``with``.

    The environment variable ``RINGMEM_SIMULATE`` says the same of the CPU devices that are there
    without asking: ``"devices=2,capacity=8GiB,latency_s=0.05,peers=none,pools=0"``.

    Parameters
    ----------
    devices : int, default 1
        How many, 1 to 32.
    capacity : int or str, default "64 GiB"
        Memory of each, in bytes. Memory that is never touched costs none.
    peers : bool or iterable of (int, int), default True
        Which pairs can reach each other's memory: all, none, or these pairs of ordinals, both ways.
    latency_s : float, default 0
        Every asynchronous task completes that many seconds late.
    strict : bool, default False
        Hide device memory from the host, as a GPU does.
    granularity : int or str, default "2 MiB"
        Of physical memory, in bytes; a power of two, at least 4 KiB.
    name : str, optional
        Product name.
    **capabilities : bool
        Switched off with False: ``virtual_memory``, ``export``, ``pools``, ``managed``,
        ``concurrent_managed_access``, ``stream_mem_ops``, ``host_register``,
        ``cooperative_launch``, ``host_numa``.

    Returns
    -------
    Simulation
        A context manager with ``.devices``.

    Raises
    ------
    InvalidValueError
        A setting makes no sense; the message names it, its value and what would do.

    Examples
    --------
    >>> import ringmem
    >>> with ringmem.simulate(devices=2, capacity="8 GiB") as simulation:
    ...     ringmem.Device("cpu:1") is simulation.devices[1], ringmem.devices("cpu")
    (True, [Device('cpu:0'), Device('cpu:1')])
    """
    if unknown := sorted(capabilities.keys() - _CAPABILITIES):
        raise InvalidValueError(
            f"{unknown[0]} is {capabilities[unknown[0]]!r}: no such argument; capabilities "
            f"to switch off are {', '.join(sorted(_CAPABILITIES))}"
        )
    count = to_integer(devices)
    if count is None or not 1 <= count <= _MAX_DEVICES:
        raise InvalidValueError(f"devices is {devices!r}: give 1 to {_MAX_DEVICES}")
    late_s = to_seconds(latency_s)
    if late_s is None or not 0 <= late_s <= _MAX_LATENCY_S:
        raise InvalidValueError(
            f"latency_s is {latency_s!r}: give seconds from 0 to {_MAX_LATENCY_S}"
        )
    settings = {
        "devices": str(count),
        "capacity": str(parse_nbytes(capacity, "capacity")),
        "peers": _peers_text(peers, count),
        "latency_s": repr(late_s),
        "strict": _switch("strict", strict),
        "granularity": str(parse_nbytes(granularity, "granularity")),
        **{key: _switch(key, value) for key, value in capabilities.items()},
    }
    if name is not None:
        if not isinstance(name, str) or not name or "," in name:
            raise InvalidValueError(f"name is {name!r}: give a text without commas")
        settings["name"] = name
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    return Simulation(_native.HostDriver(text))


def _switch(name: str, value: object) -> str:
    if not is_bool(value):
        raise InvalidValueError(f"{name} is {value!r}: give True or False")
    return str(int(bool(value)))


def _peers_text(peers: bool | Iterable[tuple[int, int]], devices: int) -> str:
    if is_bool(peers):
        return "all" if peers else "none"
    if not isinstance(peers, Iterable):
        raise InvalidValueError(f"peers is {peers!r}: give True, False or pairs of ordinals")
    pairs = []
    for pair in peers:
        ordinals = [to_integer(end) for end in pair] if isinstance(pair, Sequence) else []
        match ordinals:
            case [int(a), int(b)] if 0 <= a < devices and 0 <= b < devices and a != b:
                pairs.append(f"{a}-{b}")
            case _:
                raise InvalidValueError(
                    f"peers holds {pair!r}: give pairs of two different ordinals below {devices}"
                )
    return "+".join(pairs) or "none"
