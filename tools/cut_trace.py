"""Cut a window out of an allocation trace, so that it can ship with the package.

    python tools/cut_trace.py SOURCE.npz FIRST LAST OUT.npz

What was alive at event FIRST is allocated again at the start of the cut, oldest first; then come
the events FIRST to LAST - 1 with their ids renumbered from 0. A free whose completion lies behind
LAST loses nothing: the cut ends with the free requested.
"""

from __future__ import annotations

import argparse

import numpy as np

from ringmem.observe.trace import ALLOCATE, FREE_COMPLETED, FREE_REQUESTED, Trace


def cut(source: Trace, first: int, last: int) -> Trace:
    before, window = slice(0, first), slice(first, last)
    freed = source.id[before][source.kind[before] == FREE_REQUESTED]
    alive = np.ones(source.allocations, bool)
    alive[freed] = False
    alive[source.id[source.kind == ALLOCATE].astype(np.int64) >= seen(source, first)] = False
    carried = np.flatnonzero(alive)

    kind, ids = source.kind[window], source.id[window].astype(np.int64)
    # The completion of a free that was requested before the window has no block in it.
    keep = ~((kind == FREE_COMPLETED) & np.isin(ids, freed))
    kind, ids = kind[keep], ids[keep]
    number = np.full(source.allocations, -1, np.int64)
    number[carried] = np.arange(len(carried))
    fresh = ids[kind == ALLOCATE]
    number[fresh] = len(carried) + np.arange(len(fresh))
    first_stream = source.stream[source.kind == ALLOCATE][carried]
    return Trace.from_arrays(
        kind=np.concatenate([np.full(len(carried), ALLOCATE, np.int64), kind]),
        id=np.concatenate([number[carried], number[ids]]),
        size=np.concatenate([source.nbytes[carried], source.size[window][keep].astype(np.int64)]),
        stream=np.concatenate([first_stream, source.stream[window][keep]]),
        name=f"{source.name}-cut",
    )


def seen(source: Trace, first: int) -> int:
    """Allocations before event `first`."""
    return int(np.count_nonzero(source.kind[:first] == ALLOCATE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("out")
    arguments = parser.parse_args()
    trace = cut(Trace.load(arguments.source), arguments.first, arguments.last)
    np.savez_compressed(
        arguments.out, kind=trace.kind, id=trace.id, size=trace.size, stream=trace.stream
    )
    print(trace)


if __name__ == "__main__":
    main()
