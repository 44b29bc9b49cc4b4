"""The staged copy: two pinned chunks between devices that cannot reach each other.

A staging pair is kept for the next copy of its two devices: freeing pinned memory waits for
persistent kernels. Two copies at a time between the same devices use a pair each. Within one driver
nothing waits on the host: the source's stream waits for the event that says that a chunk was
emptied, the destination's for the one that says it was filled.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ringmem.device.pinned import PinnedBlock, give_back_pinned, release_pinned, take_pinned
from ringmem.native.errors import InvalidValueError, RingmemError
from ringmem.native.locks import Lock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringmem.device.device import Device
    from ringmem.device.event import Event
    from ringmem.device.stream import Stream

__all__ = ["CHUNK_NBYTES", "Endpoint", "release_staging", "staged_copy"]

# 4 MiB: 75 µs on a PCIe 5 link, ten times what submitting a chunk costs; pinned in 5 ms, once.
CHUNK_NBYTES = 4 << 20
_ABANDON_S = 5.0  # how long a failed copy waits for the chunks that were under way

_lock = Lock()  # guards the lists of idle pairs; never held around a driver call


class Endpoint(NamedTuple):
    """One end of a copy."""

    device: Device
    ptr: int


class StagingPair:
    """Two pinned chunks, the streams of both devices, and the events that order their use."""

    def __init__(self, dst: Device, src: Device) -> None:
        self.dst, self.src = dst, src
        # CUDA must know its pinned memory; a CPU device takes any.
        self.owner = src if src.platform == "cuda" else dst
        self.chunks: list[PinnedBlock] = []
        self.streams: dict[Device, Stream] = {}
        self.filled: list[Event] = []
        self.emptied: list[Event] = []
        try:
            for _ in range(2):
                self.chunks.append(take_pinned(self.owner, CHUNK_NBYTES))
                self.filled.append(src.create_event())
                self.emptied.append(dst.create_event())
            self.streams[src] = src.create_stream()
            self.streams[dst] = dst.create_stream()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy streams and events; the chunks go back to their device. Nothing may be pending.

        Everything is given up even if a part fails; the first failure is raised.
        """
        failure: BaseException | None = None
        owned: list[Stream | Event] = [*self.streams.values(), *self.filled, *self.emptied]
        for item in owned:
            try:
                item.close()
            except RingmemError as error:
                failure = failure or error
        while self.chunks:
            give_back_pinned(self.owner, self.chunks.pop())
        if failure is not None:
            raise failure


def staged_copy(
    dst: Endpoint, src: Endpoint, chunks: Sequence[tuple[int, int]], ordered_on: Stream
) -> None:
    """Copy through the host, in the order of a stream of either end.

    Returns when the copy is complete where the ends belong to different drivers, else at once.
    """
    if ordered_on.is_capturing:
        raise InvalidValueError(
            f"stream is {ordered_on!r}, which is being captured into a graph: a copy through the "
            "host cannot be; copy between devices that reach each other, or outside the capture"
        )
    pair = _take(dst.device, src.device)
    try:
        if dst.device.driver is src.device.driver:
            _copy_in_order(pair, dst, src, chunks, ordered_on)
        else:
            _copy_blocking(pair, dst, src, chunks, ordered_on)
    except BaseException:
        _abandon(pair)
        raise
    _give_back(pair)


def _copy_in_order(
    pair: StagingPair,
    dst: Endpoint,
    src: Endpoint,
    chunks: Sequence[tuple[int, int]],
    ordered_on: Stream,
) -> None:
    filling, emptying = pair.streams[src.device], pair.streams[dst.device]
    filling.wait(ordered_on)
    emptying.wait(ordered_on)
    for index, (offset, nbytes) in enumerate(chunks):
        turn = index % 2
        filling.wait(pair.emptied[turn])  # by the chunk's last user, also of an earlier copy
        _fill(pair, src, turn, offset, nbytes)
        emptying.wait(pair.filled[turn])
        _empty(pair, dst, turn, offset, nbytes)
    ordered_on.wait(emptying)


def _copy_blocking(
    pair: StagingPair,
    dst: Endpoint,
    src: Endpoint,
    chunks: Sequence[tuple[int, int]],
    ordered_on: Stream,
) -> None:
    ordered_on.synchronize()
    _fill(pair, src, 0, *chunks[0])
    for index, (offset, nbytes) in enumerate(chunks):
        turn = index % 2
        if index + 1 < len(chunks):  # one chunk ahead, beside the emptying of this one
            pair.emptied[1 - turn].synchronize()
            _fill(pair, src, 1 - turn, *chunks[index + 1])
        pair.filled[turn].synchronize()
        _empty(pair, dst, turn, offset, nbytes)
    pair.streams[dst.device].synchronize()


def _fill(pair: StagingPair, src: Endpoint, turn: int, offset: int, nbytes: int) -> None:
    stream = pair.streams[src.device]
    src.device.driver.copy_async(
        src.device.ordinal, pair.chunks[turn].ptr, src.ptr + offset, nbytes, stream.handle
    )
    pair.filled[turn].record(stream)


def _empty(pair: StagingPair, dst: Endpoint, turn: int, offset: int, nbytes: int) -> None:
    stream = pair.streams[dst.device]
    dst.device.driver.copy_async(
        dst.device.ordinal, dst.ptr + offset, pair.chunks[turn].ptr, nbytes, stream.handle
    )
    pair.emptied[turn].record(stream)


# --- the idle pairs of each destination, by driver and ordinal of the source ---------------------


def _idle(dst: Device) -> dict[tuple[int, int], list[StagingPair]]:
    """Return the destination's idle pairs. Call with the lock."""
    idle: dict[tuple[int, int], list[StagingPair]] = dst.__dict__.setdefault("_idle_staging", {})
    return idle


def _take(dst: Device, src: Device) -> StagingPair:
    with _lock:
        pairs = _idle(dst).get((id(src.driver), src.ordinal))
        if pairs:
            return pairs.pop()
    return StagingPair(dst, src)


def _give_back(pair: StagingPair) -> None:
    with _lock:
        pairs = _idle(pair.dst).setdefault((id(pair.src.driver), pair.src.ordinal), [])
        pairs.append(pair)


def _abandon(pair: StagingPair) -> None:
    """Give a pair up after a failure, once what was submitted is done.

    A stream that does not become idle may still write to the chunks, which are then lost rather
    than handed on.
    """
    try:
        for stream in pair.streams.values():
            stream.synchronize(_ABANDON_S)
    except RingmemError:
        for chunk in pair.chunks:
            chunk.give_up()
        pair.chunks.clear()
    with suppress(RingmemError):
        pair.close()


def release_staging(*devices: Device) -> None:
    """Free the pinned memory that floor 1 keeps for these devices: echo words, staging chunks.

    It waits for copies that are under way, and for **persistent kernels**: not for normal paths.

    Raises
    ------
    DriverError
        Something could not be freed.
    """
    for device in devices:
        while True:
            with _lock:
                pair = next((p.pop() for p in _idle(device).values() if p), None)
            if pair is None:
                break
            for stream in pair.streams.values():
                stream.synchronize()
            pair.close()
    for device in devices:
        release_pinned(device)
