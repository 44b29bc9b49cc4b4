"""``ringmem demo`` for people: progress while it runs, then the figures and the timeline."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ringmem.cli.demo import Demo, DemoResult
from ringmem.cli.demo_growable import Growth
from ringmem.cli.demo_ring import Streamed
from ringmem.cli.progress import LateProgress
from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.observe import Timeline, format_nbytes

__all__ = ["run", "show"]

_DEFAULT_PICTURE = Path("ringmem-demo.png")


def run(demo: Demo, output: Path | None, *, quiet: bool) -> DemoResult:
    """Run the demo with a progress bar on stderr, and draw the picture.

    Raises
    ------
    NotSupportedError
        `output` is given and matplotlib is not installed: found before any work.
    InvalidValueError
        `output` cannot be written.
    """
    plot = importlib.util.find_spec("matplotlib") is not None
    if output is not None and not plot:
        raise NotSupportedError(
            "--output needs matplotlib: pip install 'ringmem[plot]'; "
            "without it the timeline is drawn in the terminal"
        )
    with LateProgress() as progress:
        result = demo.run(progress.update)
    timeline = _timeline(result)
    if output is not None:
        return dataclasses.replace(result, picture=timeline.save(output))
    if plot and not quiet:
        try:
            return dataclasses.replace(result, picture=timeline.save(_DEFAULT_PICTURE))
        except InvalidValueError as error:  # nobody asked for this file
            print(f"no picture: {error}", file=sys.stderr)
    return result


def _timeline(result: DemoResult) -> Timeline:
    peak = result.ring.peak_curve
    return Timeline(
        result.trace.live_bytes,
        f"live bytes of {result.trace.name} on {result.device.name}",
        {} if peak is None else {"peak so far, as the ring kernel answered": peak},
    )


def show(result: DemoResult) -> None:
    """Print what the demo saw."""
    console = Console(highlight=False, markup=False)
    data = result.to_dict()
    trace, replay, copies = data["trace"], data["replay"], data["copies"]
    console.print(f"{data['device']}  {data['product_name']}", style="bold")
    console.print(
        f"trace {trace['name']}: {trace['events']:,} events, {trace['allocations']:,} allocations, "
        f"peak {format_nbytes(trace['peak_live_bytes'])} live"
    )
    if replay["reserved_peak_bytes"] is not None:
        console.print(
            f"the driver's pool held {format_nbytes(replay['reserved_peak_bytes'])} at its peak"
        )
    console.print()
    console.print(_times(result, replay))
    console.print()
    console.print(_pools(data["pools"]))
    console.print()
    console.print(_copies(copies))
    console.print()
    console.print(_grown(result.growable))
    console.print(_streamed(result.ring))
    console.print()
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    width = max(16, min(console.width, 100))
    console.print(
        _timeline(result).text(width, 10, ascii_only=ascii_only), style="cyan", markup=False
    )
    if result.picture:
        console.print(f"\npicture: {result.picture}", soft_wrap=True)
    console.print()
    verdict = "verified" if result.verified else "NOT VERIFIED"
    console.print(
        f"{verdict}: {result.marks_right:,} of {result.marks:,} marked blocks and "
        f"{'all' if result.copies.verified else 'not all'} copied bytes came back as written",
        style="green" if result.verified else "bold red",
    )


def _grown(growth: Growth) -> str:
    if growth.skipped:
        return f"growing buffer: skipped, {growth.skipped}"
    first, last = format_nbytes(growth.first_nbytes), format_nbytes(growth.nbytes)
    return (
        f"growing buffer: {first} to {last} in {growth.steps} steps of "
        f"{growth.seconds / growth.steps * 1e6:.0f} µs\n"
        f"  it {'MOVED' if growth.moved else 'did not move'}, "
        f"its content is {'intact' if growth.intact else 'DAMAGED'}"
    )


def _streamed(ring: Streamed) -> str:
    if ring.skipped:
        return f"ring kernel: skipped, {ring.skipped}"
    return (
        f"ring kernel: {ring.messages:,} events, {ring.messages / ring.seconds / 1e6:.3g} "
        f"million/s; one call and its answer {ring.call_us_p50:.1f} µs\n"
        f"  its live curve and its peak of {format_nbytes(ring.peak_live_bytes)} are "
        f"{'what NumPy finds' if ring.right else 'NOT WHAT NUMPY FINDS'}\n"
        f"  handler: {ring.handler}"
    )


def _times(result: DemoResult, replay: dict[str, dict[str, float]]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for column in ("replay", "total ms", "allocate µs p50", "p99", "free µs p50", "p99"):
        table.add_column(column, justify="left" if column == "replay" else "right")
    for name in ("cold", "warm"):
        t = replay[name]
        table.add_row(
            name,
            f"{t['seconds'] * 1000:.1f}",
            f"{t['allocate_us_p50']:.2f}",
            f"{t['allocate_us_p99']:.2f}",
            f"{t['free_us_p50']:.2f}",
            f"{t['free_us_p99']:.2f}",
        )
    table.add_row("marked", f"{result.marked_s * 1000:.1f}", "", "", "", "")
    return table


def _pools(pools: dict[str, dict[str, float]]) -> Table:
    table = Table(box=None, padding=(0, 2))
    columns = ("pool, in native code", "reserved", "of live", "ns cold", "warm", "warm p50")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for name, p in pools.items():
        table.add_row(
            name,
            format_nbytes(p["peak_reserved_bytes"]),
            f"{p['reserved_over_live']:.3f}",
            f"{p['cold_ns_mean']:.0f}",
            f"{p['warm_ns_mean']:.0f}",
            f"{p['warm_ns_p50']:.0f}",
        )
    return table


def _copies(copies: dict[str, float]) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column(f"copies of {format_nbytes(copies['nbytes'])}, pinned")
    table.add_column("GB/s", justify="right")
    table.add_row("host to device", f"{copies['to_device_gb_per_s']:.1f}")
    table.add_row("device to host", f"{copies['to_host_gb_per_s']:.1f}")
    table.add_row("each, both at once", f"{copies['both_ways_gb_per_s']:.1f}")
    return table
