"""What a simulated 64 GiB device costs in memory with 40 GiB live that nobody touches."""

from __future__ import annotations

from pathlib import Path

import harness

import ringmem as rm


def resident_mib() -> float:
    """Memory of this process, shared pages included, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def main() -> None:
    options = harness.arguments(__doc__)
    with rm.simulate(capacity="64 GiB") as simulation:
        device = simulation.devices[0]
        before = resident_mib()
        blocks = [rm.DeviceBuffer(1 << 30, device=device) for _ in range(30)]
        blocks += [rm.DeviceBuffer(1 << 20, device=device) for _ in range(10 << 10)]
        live = sum(block.nbytes for block in blocks) / 2**30
        after = resident_mib()
        for block in blocks:
            block.close()
        rows = [
            harness.row("resident, 40 GiB live", [after], "MiB", live_gib=live),
            harness.row("resident before", [before], "MiB"),
        ]
        harness.report("simulation", device, rows, options.json)


if __name__ == "__main__":
    main()
