"""The tags of the process, and sleep and wake of several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from ringmem.device import Device
from ringmem.native.errors import InvalidValueError
from ringmem.native.locks import Lock
from ringmem.residency.tagged import Backup, Progress, Tag

__all__ = ["drop_backup", "sleep", "tag", "tags", "wake"]

_MIB = 2**20

_lock = Lock()
_tags: dict[tuple[Device, str], Tag] = {}

Tags: TypeAlias = "str | Tag | Iterable[str | Tag] | None"


def tag(
    name: str,
    backup: Backup | None = None,
    device: Device | str | None = None,
    *,
    reserve_nbytes: int = 0,
    min_handle_nbytes: int = 32 * _MIB,
    slot_nbytes: int = 32 * _MIB,
    piece_nbytes: int = 128 * _MIB,
) -> Tag:
    """Return the tag of this name on a device; the first call makes it.

    Parameters
    ----------
    name : str
        The name.
    backup : str, optional
        What becomes of the bytes in sleep: ``"host"`` (the default), ``"discard"`` or ``"keep"``.
    device : Device or str, optional
        By default the default device.
    reserve_nbytes : int, optional
        Bytes of addresses, by default twice the device's memory; they cost nothing.
    min_handle_nbytes : int, optional
        The smallest physical handle, by default 32 MiB: cost is per handle.
    slot_nbytes, piece_nbytes : int, optional
        Bytes of a copy, by default 32 MiB, and of what is pinned at once, by default 128 MiB. The
        first tag of a device settles them.

    Raises
    ------
    InvalidValueError
        There is such a tag with another `backup`, or an argument is wrong.
    NotSupportedError
        The device has no virtual memory management.

    Examples
    --------
    >>> from ringmem import residency
    >>> with residency.tag("cache", "discard", "cpu") as cache:
    ...     cache.state
    'awake'
    >>> cache.close()
    """
    if not isinstance(name, str):
        raise InvalidValueError(f"name is {name!r}: give a text")
    of = Device(device)
    for value, argument in (
        (min_handle_nbytes, "min_handle_nbytes"),
        (slot_nbytes, "slot_nbytes"),
        (piece_nbytes, "piece_nbytes"),
    ):
        if value < 1:
            raise InvalidValueError(f"{argument} is {value}: give bytes, 1 or more")
    if reserve_nbytes < 0:
        raise InvalidValueError(f"reserve_nbytes is {reserve_nbytes}: give bytes, or 0")
    with _lock:
        found = _tags.get((of, name))
        if found is None:
            found = Tag(
                name,
                backup or "host",
                of,
                reserve_nbytes=reserve_nbytes,
                min_handle_nbytes=min_handle_nbytes,
                slot_nbytes=slot_nbytes,
                piece_nbytes=piece_nbytes,
                forget=_forget,
            )
            _tags[of, name] = found
    if backup is not None and backup != found.backup:
        raise InvalidValueError(f"backup is {backup!r}: tag {name!r} has {found.backup!r}")
    return found


def tags(device: Device | str | None = None) -> list[Tag]:
    """Return all tags, or those of one device, in the order they were made."""
    of = None if device is None else Device(device)
    with _lock:
        return [found for (place, _), found in _tags.items() if of is None or place is of]


def sleep(
    which: Tags = None,
    *,
    streams: object = None,
    timeout_s: float | None = None,
    progress: Callable[[Progress], object] | None = None,
    allow_exports: bool = False,
) -> None:
    """Give the physical memory of tags back. Addresses stay; touching them faults until wake().

    Blocks, with the GIL released: waits for work, copies what is live to the backup, unmaps. Tags
    go one after another; each is either asleep afterwards or as before.

    Parameters
    ----------
    which : str, Tag, or several, optional
        By default all tags that are awake.
    streams : stream-like or list of them, optional
        What uses the memory, beside the streams that buffers in it know of: they are waited for.
        By default the thread's current stream.
    timeout_s : float, optional
        How long to wait for them; by default without limit.
    progress : callable, optional
        Called with a :class:`Progress` as copies are done. What it raises calls the sleep off.
    allow_exports : bool, optional
        Sleep although NumPy arrays or DLPack tensors of the memory are alive. Touching those
        before wake() faults; on a CPU device it ends the process.

    Raises
    ------
    InvalidValueError
        A tag is unknown or not awake, or its memory is exported.
    TimeoutError
        A stream is still busy. Nothing has changed.
    OutOfMemoryError
        The host has no memory for the backup. Nothing has changed.
    DriverError
        The driver failed; `state` of the tag says on which side of the change.
    """
    for found in _select(which, "awake"):
        found.sleep(streams, timeout_s=timeout_s, progress=progress, allow_exports=allow_exports)


def wake(which: Tags = None, *, progress: Callable[[Progress], object] | None = None) -> None:
    """Map the memory of tags again, at the same addresses, with the bytes that were kept.

    Blocks, with the GIL released, until the bytes are there. Tags go one after another; each is
    either awake afterwards or as before.

    Parameters
    ----------
    which : str, Tag, or several, optional
        By default all tags that are asleep.
    progress : callable, optional
        Called with a :class:`Progress` as copies are done. What it raises calls the wake off.

    Raises
    ------
    InvalidValueError
        A tag is unknown or not asleep.
    OutOfMemoryError
        The device has not enough memory; the message says how much is missing. The tag stays
        asleep with its backup.
    DriverError
        The driver failed; the tag stays asleep with its backup.
    """
    for found in _select(which, "asleep"):
        found.wake(progress=progress)


def drop_backup(device: Device | str | None = None) -> int:
    """Return pinned host memory of the backups that holds nothing now; returns its bytes.

    It is kept from one sleep to the next because pinning is slow. Unpinning waits for every kernel
    on the device, so a thread of its own does that; nothing waits here.

    Parameters
    ----------
    device : Device or str, optional
        Only its tags; by default those of all devices.
    """
    return sum(found.drop_backup() for found in tags(device))


def _select(which: Tags, state: str) -> list[Tag]:
    if which is None:
        return [found for found in tags() if found.state == state]
    if not isinstance(which, str | Tag | Iterable):
        raise InvalidValueError(f"tags is {which!r}: give a name, a Tag, or several")
    wanted = [which] if isinstance(which, str | Tag) else list(which)
    chosen: list[Tag] = []
    known = tags()
    for item in wanted:
        matches = [item] if isinstance(item, Tag) else [t for t in known if t.name == item]
        if not matches:
            names = ", ".join(sorted({repr(t.name) for t in known})) or "none"
            raise InvalidValueError(f"tags names {item!r}; there are: {names}")
        chosen += matches
    return list(dict.fromkeys(chosen))


def _forget(closed: Tag) -> None:
    with _lock:
        for key, found in list(_tags.items()):
            if found is closed:
                del _tags[key]
