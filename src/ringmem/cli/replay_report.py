"""``ringmem replay`` for people: the figures, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ringmem.native.errors import InvalidValueError, NotSupportedError
from ringmem.observe import Trace, format_nbytes

__all__ = ["plot", "show"]

Result = dict[str, Any]


def show(result: Result) -> None:
    """Print what the replay saw."""
    console = Console(highlight=False, markup=False)
    console.print(
        f"{result['trace']} on {result['device']}, allocator {result['allocator']}: "
        f"{result['events']:,} events, {result['operations']:,} operations",
        style="bold",
    )
    if result["error"]:
        console.print(
            f"stopped at event {result['failed_event']:,}: {result['error']}", style="red"
        )
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_row("peak live", format_nbytes(result["peak_live_bytes"]))
    if result["peak_reserved_bytes"] is not None:
        table.add_row(
            "peak reserved",
            f"{format_nbytes(result['peak_reserved_bytes'])}  "
            f"({result['reserved_over_live']:.4f} of live)",
        )
    for number, one in enumerate(result["repetitions"], 1):
        calls = "" if one["driver_calls"] is None else f", {one['driver_calls']:,} driver calls"
        table.add_row(
            f"repetition {number}",
            f"p50 {one['p50']:.0f} ns, p99 {one['p99']:.0f} ns, mean {one['mean']:.0f} ns an "
            f"operation{calls}",
        )
    if result.get("remaps"):
        table.add_row("remaps", f"{result['remaps']:,} in {result['remap_seconds']:.3f} s")
    if "minimum_capacity_bytes" in result:
        found = result["minimum_capacity_bytes"]
        table.add_row(
            "smallest capacity",
            "more than four times the peak"
            if found is None
            else f"{format_nbytes(found)}  ({result['minimum_over_live']:.4f} of live)",
        )
    console.print(table)


def plot(result: Result, trace: Trace, file: Path) -> None:
    """Draw live and reserved bytes over the operations.

    Raises
    ------
    NotSupportedError
        matplotlib is not installed.
    InvalidValueError
        The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NotSupportedError("--plot needs matplotlib: pip install 'ringmem[plot]'") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    live = np.asarray(trace.live_bytes)[trace.kind != 3] / 2**30
    axes.fill_between(np.arange(len(live)), live, step="post", alpha=0.4, label="live")
    reserved = np.asarray(result["reserved_series"], np.float64)[: len(live)] / 2**30
    if len(reserved):
        axes.step(np.arange(len(reserved)), reserved, where="post", label="reserved")
    axes.set(xlabel="operation", ylabel="GiB", title=f"{trace.name}, {result['allocator']}")
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"plot is {str(file)!r}, which cannot be written: {error}"
        ) from None
