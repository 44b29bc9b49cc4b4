"""``ringmem bench``: a group of measurements, each a command of its own module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringmem.cli.options import file_path

__all__ = ["bench"]

bench = typer.Typer(help="Measure, beside other libraries where these are installed.")


@bench.command()
def pool(
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="[default: the first CUDA device, or cpu]"),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="all, or peers by commas: torch, cupy, rmm-arena, rmm-binning, rmm-async, "
            "rmm-pool, cuda.core; on a CUDA device.",
        ),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the rounds.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")
    ] = False,
) -> None:
    """Time allocations: the pair, typed, in C++, a random mix, many live, threads, pinned."""
    from ringmem.cli.app import errors_in_one_line, print_json

    with errors_in_one_line():
        from ringmem.cli.bench_pool import run_bench
        from ringmem.cli.progress import LateProgress
        from ringmem.device import Device

        where = Device(device)
        names = [name.strip() for name in against.split(",") if name.strip()]
        with LateProgress() as progress:
            rows = run_bench(where, names, quick=quick, progress=progress.update)
        if as_json:
            print_json({"device": where.name, "product_name": where.product_name, "rows": rows})
        else:
            _show(rows)


@bench.command()
def bridge(
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="[default: the first CUDA device, or cpu]"),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Flushes timed at each size; the median counts.")
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")
    ] = False,
) -> None:
    """Time the flushes of each transfer strategy beside raw pinned copies of the same bytes.

    Exits with 1 if a message did not arrive as it was sent.
    """
    from ringmem.cli.app import FAILED, errors_in_one_line, fail, print_json

    with errors_in_one_line():
        from ringmem.cli import bench_bridge

        result = bench_bridge.run(device, repeat)
        if as_json:
            print_json(result)
        else:
            bench_bridge.show(result)
        if not result["verified"]:
            raise fail("a message did not arrive as it was sent", FAILED)


@bench.command()
def ring(
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="[default: the first CUDA device, or cpu]"),
    ] = None,
    messages: Annotated[int, typer.Option(min=1000, help="Of each throughput figure.")] = 2_000_000,
    rings: Annotated[
        int, typer.Option(min=1, help="Ring pairs of the figure for all rings together.")
    ] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=file_path, metavar="FILE", help="Draw the latency histogram into a file."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")
    ] = False,
) -> None:
    """Time a ring kernel: round trips and messages a second, every word of every reply verified.

    Python's batches are too fast to keep: their replies are verified in a further run of as many.

    Exits with 1 if a word was wrong.
    """
    from ringmem.cli.app import FAILED, errors_in_one_line, fail, print_json

    with errors_in_one_line():
        from ringmem.cli import bench_ring, bench_ring_report
        from ringmem.cli.progress import LateProgress

        if plot is not None:
            bench_ring_report.check_plot(plot)
        with LateProgress() as progress:
            result = bench_ring.run(device, messages, rings, progress.update)
        if plot is not None:
            bench_ring_report.plot(result, plot)
        if as_json:
            print_json(result)
        else:
            bench_ring_report.show(result)
        if not result["verified"]:
            raise fail(f"{result['wrong_words']} words of replies were wrong", FAILED)


def _show(rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for column in ("what", "median", "p99", "unit", "bar", ""):
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    for row in rows:
        bar = row.get("bar")
        table.add_row(
            str(row["name"]),
            f"{row['median']:.1f}",
            f"{row['p99']:.1f}",
            str(row["unit"]),
            f"{bar:.1f}" if isinstance(bar, float | int) else "",
            "" if bar is None else "ok" if row["passed"] else "MISSED",
        )
    Console(highlight=False, markup=False).print(table)
