"""What a flush of each transfer strategy that copies moves, beside raw pinned copies in turn."""

from __future__ import annotations

import harness

import ringmem as rm
from ringmem.cli import bench_bridge

BAR_OF_RAW, FROM_NBYTES = 0.95, 1 << 20


def main() -> None:
    options = harness.arguments(__doc__)
    device = rm.Device(options.device)
    result = bench_bridge.run(device.name, 10 if options.quick else 150)
    if not result["verified"]:
        raise SystemExit("a message did not arrive as it was sent")
    rows = []
    for name, sizes in result["strategies"].items():
        if "refused" in sizes:
            continue
        for nbytes, ways in sizes.items():
            for way, figures in ways.items():
                if figures is None:  # nothing is moved
                    continue
                what = f"{name}, {int(nbytes) >> 10} KiB {way.replace('_', ' ')}"
                more = {"raw": figures["raw_gb_per_second"], "of_raw": figures["of_raw"]}
                row = harness.row(what, [figures["gb_per_second"]], "GB/s", **more)
                if int(nbytes) >= FROM_NBYTES and device.platform == "cuda":
                    row |= {"bar of raw": BAR_OF_RAW, "met": figures["of_raw"] >= BAR_OF_RAW}
                rows.append(row)
    harness.report("bridge", device, rows, options.json)


if __name__ == "__main__":
    main()
