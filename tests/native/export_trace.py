"""Write a trace (.npz) as the flat records that the native replay reads.

One record of 16 bytes an event: kind (uint8), stream (uint8), two bytes of padding, id (uint32),
size (uint64).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

RECORD = np.dtype(
    {
        "names": ["kind", "stream", "id", "size"],
        "formats": ["u1", "u1", "<u4", "<u8"],
        "offsets": [0, 1, 4, 8],
        "itemsize": 16,
    }
)


def export(source: Path, target: Path) -> None:
    """Write the events of `source` to `target`."""
    with np.load(source) as trace:
        records = np.zeros(len(trace["kind"]), RECORD)
        for name in ("kind", "stream", "id", "size"):
            records[name] = trace[name]
    records.tofile(target)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for path in map(Path, sys.argv[2:]):
        export(path, folder / f"{path.stem}.bin")
