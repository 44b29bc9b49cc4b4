"""``ringmem bench pool``: what an allocation costs, beside the allocators of other libraries.

Pairs are timed in loops of ``timeit``. Ours are given as they are; of the peers' the cost of the
wrapper that calls them is subtracted, so that the comparison never flatters us. What one thread
does is timed on the core that is quickest at that moment, ours and theirs alike.
"""

from __future__ import annotations

import gc
import random
import timeit
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmem.cli.allocators import FOREIGN_ALLOCATORS, open_allocator
from ringmem.cli.quiet_core import on_quiet_core
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from ringmem.device import Device

__all__ = ["PEERS", "run_bench"]

PEERS = tuple(name for name in FOREIGN_ALLOCATORS if name != "torch-expandable")
Row = dict[str, Any]
Progress = Callable[[str, int, int], object]

_SIZES = {"256 B": 256, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
_PINNED_SIZES = {"4 KiB": 4096, **{name: _SIZES[name] for name in ("1 MiB", "64 MiB")}}
_LIVE = (10**3, 10**4, 10**5, 10**6)
_THREADS = (1, 2, 4, 8, 16)
_MIX_NBYTES = 16 << 30  # live


def run_bench(
    device: Device,
    against: Iterable[str] = (),
    *,
    quick: bool = False,
    progress: Progress = lambda *_: None,
) -> list[Row]:
    """Measure everything; a row has name, median, p99, unit, and bar and passed where one is set.

    Peers that are not installed are left out.

    Raises
    ------
    InvalidValueError
        A name in `against` is not known.
    """
    names = list(against)
    if names == ["all"]:
        names = list(PEERS)
    for name in names:
        if name not in FOREIGN_ALLOCATORS:
            raise InvalidValueError(
                f"against holds {name!r}: give all, or some of {', '.join(FOREIGN_ALLOCATORS)}"
            )
    if names and device.platform != "cuda":
        raise InvalidValueError(f"against names peers, which need a CUDA device, not {device.name}")
    bench = _Bench(device, names, 5 if quick else 21)
    rows: list[Row] = []
    steps = [bench.pairs, bench.typed, bench.native, bench.mix, bench.live, bench.threads]
    steps += [bench.pinned]
    for number, step in enumerate(steps):
        progress("bench", number, len(steps))
        gc.collect()
        rows += step()
    return rows


def _row(name: str, samples: Any, unit: str = "ns", bar: float | None = None, **more: Any) -> Row:
    values = np.asarray(samples, np.float64)
    median = float(np.median(values))
    row: Row = {
        "name": name,
        "median": median,
        "p99": float(np.percentile(values, 99)),
        "unit": unit,
        **more,
    }
    if bar is not None:
        row |= {"bar": bar, "passed": median <= bar}
    return row


class _Bench:
    def __init__(self, device: Device, against: list[str], rounds: int) -> None:
        self._device = device
        self._against = against
        self._rounds = rounds

    # --- tools -----------------------------------------------------------------------------------

    def _time(self, statement: str, number: int = 10_000, **names: Any) -> list[float]:
        """Nanoseconds of the statement in each round."""
        timer = timeit.Timer(statement, globals=names)
        with on_quiet_core() as settle:
            timer.timeit(number)
            seconds = []
            for _ in range(self._rounds):
                settle()
                seconds.append(timer.timeit(number))
        return [value / number * 1e9 for value in seconds]

    @contextmanager
    def _pool(self) -> Iterator[Any]:
        from ringmem.pool import Pool

        pool = Pool(self._device, debug=False)
        try:
            yield pool
        finally:
            pool.close()

    def _peers(self) -> Iterator[tuple[str, Any]]:
        for name in self._against:
            with suppress(NotSupportedError), open_allocator(name) as allocator:
                yield name, allocator

    # --- what is measured ------------------------------------------------------------------------

    def pairs(self) -> list[Row]:
        """Allocate and drop on the current stream; allocate and close on a stream given."""
        rows = []
        with self._pool() as pool, closing(self._device.create_stream()) as stream:
            for label, nbytes in _SIZES.items():
                ours = self._time("allocate(nbytes)", allocate=pool.allocate, nbytes=nbytes)
                rows.append(_row(f"pair {label}, ringmem", ours, bar=100))
                ours = self._time(
                    "allocate(nbytes, stream=stream).close(stream)",
                    allocate=pool.allocate,
                    nbytes=nbytes,
                    stream=stream,
                )
                rows.append(_row(f"pair {label}, stream given, ringmem", ours, bar=160))
        nothing = self._time(
            "free(allocate(256, 0), 0)",
            allocate=lambda nbytes, stream: None,
            free=lambda token, stream: None,
        )
        for name, peer in self._peers():
            for label, nbytes in _SIZES.items():
                theirs = self._time(
                    "free(allocate(nbytes, 0), 0)",
                    allocate=peer.allocate,
                    free=peer.free,
                    nbytes=nbytes,
                )
                net = np.maximum(np.array(theirs) - np.median(nothing), 0)
                rows.append(_row(f"pair {label}, {name}", net, version=peer.version))
        return rows

    def typed(self) -> list[Row]:
        """`pool.empty` and close, and what others call that."""
        rows = []
        with self._pool() as pool:
            for label, nbytes in _SIZES.items():
                ours = self._time("empty(n, t).close()", empty=pool.empty, n=nbytes // 4, t="f4")
                rows.append(_row(f"typed {label}, ringmem", ours, bar=500))
        for name, empty in self._typed_peers():
            for label, nbytes in _SIZES.items():
                rows.append(
                    _row(f"typed {label}, {name}", self._time("e(n)", e=empty, n=nbytes // 4))
                )
        return rows

    def _typed_peers(self) -> Iterator[tuple[str, Callable[[int], object]]]:
        with suppress(ImportError):
            if "cupy" in self._against:
                import cupy

                yield "cupy.empty", lambda n: cupy.empty(n, np.float32)
        with suppress(ImportError):
            if "torch" in self._against:
                import torch

                yield "torch.empty", lambda n: torch.empty(n, device="cuda")

    def native(self) -> list[Row]:
        """The pair without Python."""
        rows = []
        with self._pool() as pool, on_quiet_core() as settle:
            for label, nbytes in _SIZES.items():
                ns = []
                for _ in range(self._rounds):
                    settle()
                    ns.append(_native.bench_pairs(pool.native_allocator, nbytes, 0, 200_000))
                rows.append(_row(f"pair {label}, ringmem in C++", ns, bar=25))
        return rows

    def mix(self) -> list[Row]:
        """A free and an allocation of random sizes with 16 GiB live, net of the harness."""
        rng = random.Random(7)
        sizes = [int(2 ** rng.uniform(8, 26)) for _ in range(20_000)]
        capacity = self._device.memory_info().free
        live = min(_MIX_NBYTES, capacity // 2)
        slots = max(8, int(live / np.mean(sizes)))
        plan = [(rng.randrange(slots), nbytes) for nbytes in sizes]
        with self._pool() as pool:
            ours = self._mix(plan, slots, lambda nbytes: pool.allocate(nbytes), pool.allocate)
        rows = [_row("mix 256 B - 64 MiB, ringmem", ours, live_bytes=live)]
        best = None
        for name, peer in self._peers():
            theirs = self._mix_peer(plan, slots, peer)
            rows.append(_row(f"mix 256 B - 64 MiB, {name}", theirs))
            best = min(best or np.inf, rows[-1]["median"])
        if best is not None:
            rows[0]["best_peer_over_ours"] = best / rows[0]["median"]
            rows[0] |= {"bar": best / 5, "passed": rows[0]["median"] <= best / 5}
        return rows

    def _mix(self, plan: Any, slots: int, first: Any, allocate: Any) -> Any:
        def loop(blocks: list[Any], allocate: Any) -> None:
            for slot, nbytes in plan:
                blocks[slot] = None
                blocks[slot] = allocate(nbytes)

        blocks = [first(plan[i % len(plan)][1]) for i in range(slots)]
        gross = self._rounds_of(lambda: loop(blocks, allocate), len(plan))
        net = self._rounds_of(lambda: loop([None] * slots, int), len(plan))
        return np.maximum(gross - np.median(net), 0)

    def _mix_peer(self, plan: Any, slots: int, peer: Any) -> Any:
        def loop(blocks: list[Any], allocate: Any, free: Any) -> None:
            for slot, nbytes in plan:
                free(blocks[slot], 0)
                blocks[slot] = None
                blocks[slot] = allocate(nbytes, 0)

        blocks: list[Any] = []
        try:
            blocks += [peer.allocate(plan[i % len(plan)][1], 0) for i in range(slots)]
            gross = self._rounds_of(lambda: loop(blocks, peer.allocate, peer.free), len(plan))
        finally:
            for token in blocks:
                if token is not None:
                    peer.free(token, 0)
        nothing: list[Any] = [None] * slots
        net = self._rounds_of(
            lambda: loop(nothing, lambda nbytes, stream: None, lambda token, stream: None),
            len(plan),
        )
        return np.maximum(gross - np.median(net), 0)

    def _rounds_of(self, run: Callable[[], None], count: int) -> Any:
        with on_quiet_core() as settle:
            run()
            seconds = []
            for _ in range(self._rounds):
                settle()
                seconds.append(timeit.timeit(run, number=1))
        return np.array(seconds) / count * 1e9

    def live(self) -> list[Row]:
        """A pair, and a replacement of any block, while 10^3 to 10^6 blocks live.

        The bar is for what the pool costs. Handles drawn at random from a list of 24 MB cost a
        miss of their own, whoever the allocator is: given beside it.
        """
        rows: list[Row] = []
        for label, nbytes in (("256 B", 256), ("64 KiB", 65_536)):
            fits = [n for n in _LIVE if n * nbytes <= self._device.memory_info().free // 2]
            kinds: dict[str, list[Row]] = {
                f"pair of {label} among {{:,}} live, C++": [],
                f"any of {{:,}} live of {label}, C++": [],
                f"any of {{:,}} live of {label}, handles drawn at random, C++": [],
                f"drawing one of {{:,}} handles, {label}, C++": [],
            }
            for count in fits:
                times = []
                with self._pool() as pool, on_quiet_core() as settle:
                    for _ in range(max(3, self._rounds // 4)):
                        settle()
                        times.append(
                            _native.bench_live(pool.native_allocator, nbytes, 0, count, 100_000)
                        )
                for (name, made), ns in zip(kinds.items(), zip(*times, strict=True), strict=True):
                    made.append(_row(name.format(count), ns))
            pairs, replaced, *_ = kinds.values()
            for made in (pairs, replaced):
                least = made[0]["median"]
                made[-1] |= {"bar": 2 * least, "passed": made[-1]["median"] <= 2 * least}
            rows += chain.from_iterable(kinds.values())
        return rows

    def threads(self) -> list[Row]:
        """Pairs a second of 1 to 16 native threads, each on a stream of its own."""
        rows: list[Row] = []
        with ExitStack() as stack, self._pool() as pool:
            streams = [
                stack.enter_context(closing(self._device.create_stream())) for _ in range(16)
            ]
            for count in _THREADS:
                handles = [stream.handle for stream in streams[:count]]
                rates = [
                    _native.bench_threads(pool.native_allocator, 1 << 20, handles, 200_000) / 1e6
                    for _ in range(max(3, self._rounds // 4))
                ]
                rows.append(_row(f"{count} threads, pairs of 1 MiB, C++", rates, "M/s"))
            least = 6 * rows[0]["median"]
            rows[-1] |= {"bar": least, "passed": rows[-1]["median"] >= least}
        return rows

    def pinned(self) -> list[Row]:
        """Page-locked memory, after warm-up."""
        from ringmem.pool import PinnedPool

        rows = []
        with PinnedPool(self._device) as pool:
            for label, nbytes in _PINNED_SIZES.items():
                ours = self._time("allocate(nbytes)", allocate=pool.allocate, nbytes=nbytes)
                rows.append(_row(f"pinned pair {label}, ringmem", ours, bar=150))
        for name, allocate in self._pinned_peers():
            for label, nbytes in _PINNED_SIZES.items():
                theirs = self._time("allocate(nbytes)", allocate=allocate, nbytes=nbytes)
                rows.append(_row(f"pinned pair {label}, {name}", theirs))
        return rows

    def _pinned_peers(self) -> Iterator[tuple[str, Callable[[int], object]]]:
        with suppress(ImportError):
            if "cupy" in self._against:
                import cupy

                yield "cupy", cupy.cuda.PinnedMemoryPool().malloc
        with suppress(ImportError):
            if "torch" in self._against:
                import torch

                yield (
                    "torch",
                    lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True),
                )
