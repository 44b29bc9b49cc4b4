"""The figures of ``ringmem bench ring`` on a terminal, and its latency histogram as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ringmem.native.errors import InvalidValueError

__all__ = ["check_plot", "plot", "show"]

_BAR = 48


def show(result: dict[str, Any]) -> None:
    """Print tables, and the latencies of a message of 56 bytes as bars."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"{result['device']}: {result['product_name']}, handler: {result['handler']}")

    trips = Table("round trip, us", "min", "p50", "p99", "p99.9", box=None, padding=(0, 2))
    for nbytes, one in result["rtt_us"].items():
        trips.add_row(f"{nbytes} bytes, native", *map(str, one.values()))
    trips.add_row("56 bytes, kernel.call", *map(str, result["python_call_us"].values()))
    for tasks, one in result["asyncio"].items():
        trips.add_row(f"56 bytes, asyncio, {tasks} tasks", *map(str, one["rtt_us"].values()))
    console.print(trips)

    sizes = list(result["rtt_us"])
    rates = Table("million messages/s", *(f"{n} bytes" for n in sizes), box=None, padding=(0, 2))
    batches = result["messages_per_second"][sizes[0]]
    for batch in batches:
        row = (result["messages_per_second"][nbytes][batch] for nbytes in sizes)
        rates.add_row(f"batches of {batch}, native", *(f"{rate / 1e6:.2f}" for rate in row))
    for batch in batches:
        rate = result["in_place_messages_per_second"][sizes[0]][batch]
        rates.add_row(f"batches of {batch}, in the slots", f"{rate / 1e6:.2f}")
    python = result["python_batch"]
    rates.add_row(
        f"batches of {python['size']}, Python", f"{python['messages_per_second'] / 1e6:.2f}"
    )
    for tasks, one in result["asyncio"].items():
        rates.add_row(f"asyncio, {tasks} tasks", f"{one['messages_per_second'] / 1e6:.2f}")
    if "all_rings" in result:
        every = result["all_rings"]
        rates.add_row(f"{every['rings']} rings", f"{every['messages_per_second'] / 1e6:.2f}")
    console.print(rates)

    compared = Table("compared", "p50 us", "p99 us", "messages/s", box=None, padding=(0, 2))
    for name, one in result["compared"].items():
        if "error" in one:
            compared.add_row(name, one["error"])
            continue
        rate = one.get("messages_per_second")
        compared.add_row(
            name, str(one["rtt_us_p50"]), str(one["rtt_us_p99"]), "" if rate is None else str(rate)
        )
    console.print(compared)
    handler = result["python_handler"]
    console.print(
        f"Python handler: {handler['messages_per_second'] / 1e6:.2f} M/s beside "
        f"{handler['native_messages_per_second'] / 1e6:.2f} of the same in native code "
        f"({handler['ratio']:.1%}); first reply of a new process after {handler['first_reply_s']} "
        f"s, {handler['first_reply_cached_s']} s from the cache"
    )
    taken = result.get("multiprocessors")
    console.print(
        f"idle kernel: {result['idle_core_share']:.2%} of a core"
        + (f", {taken:.2f} multiprocessors" if taken is not None else "")
    )
    for line in bars(result["histogram"]):
        console.print(line)
    console.print(
        f"{result['verified_messages']} messages verified, {result['wrong_words']} words wrong"
    )


def bars(histogram: dict[str, list[float]]) -> list[str]:
    """Return the histogram as lines of text; steps without a count at either end are left out."""
    edges, counts = histogram["edges_us"], histogram["counts"]
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return []
    top = max(counts)
    return [
        f"{edges[i]:9.2f} us  {'█' * round(_BAR * counts[i] / top)} {int(counts[i])}"
        for i in range(filled[0], filled[-1] + 1)
    ]


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, what :func:`plot` cannot do.

    Raises
    ------
    InvalidValueError
        matplotlib is not installed, or the file's directory is not there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidValueError("--plot needs matplotlib: pip install 'ringmem[plot]'")
    if not path.parent.is_dir():
        raise InvalidValueError(f"--plot {path}: {path.parent} is no directory; make it first")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the histogram of a round trip of 56 bytes into a file, by matplotlib.

    Raises
    ------
    InvalidValueError
        matplotlib does not know the kind of file, or cannot write it.
    """
    from matplotlib.figure import Figure

    histogram = result["histogram"]
    edges, counts = histogram["edges_us"], histogram["counts"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(counts, edges, fill=True)
    axes.set_xscale("log")
    axes.set_xlabel("round trip of 56 bytes, native wait (µs)")
    axes.set_ylabel("messages")
    for name in ("p50", "p99"):
        value = result["rtt_us"]["56"][name]
        axes.axvline(value, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(f"{name} {value:g}", (value, max(counts)), rotation=90, va="top", ha="right")
    axes.set_title(f"{result['device']}: {result['product_name']}")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"--plot {path}: {error}") from None
