"""The commands and their options. What they do lives in the module of each command.

Exit codes: 0 all is well, 1 something failed, 2 the command was given wrong input, 130 interrupted.
Errors that ringmem raises on purpose are one line on stderr; a traceback means a bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from ringmem.cli.bench import bench
from ringmem.cli.options import file_path
from ringmem.native.errors import (
    InvalidDeviceError,
    InvalidValueError,
    NotInitializedError,
    RingmemError,
)

__all__ = ["app"]

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="GPU memory for Python: look at the devices, and try them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.add_typer(bench, name="bench")


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn what can go wrong on purpose into a line on stderr and an exit code."""
    try:
        yield
    except (InvalidValueError, InvalidDeviceError, NotInitializedError) as error:
        # No such device, no driver for it, no such file: the command asked for what is not there.
        raise fail(error, WRONG_INPUT) from None
    except RingmemError as error:
        raise fail(error, FAILED) from None
    except KeyboardInterrupt:
        raise fail("interrupted", INTERRUPTED) from None


def fail(error: object, code: int) -> typer.Exit:
    """Say on stderr what is wrong, and make the exit for it."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        try:
            typer.echo(f"ringmem {version('ringmem')}")
        except PackageNotFoundError:
            typer.echo("ringmem, run from its sources")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """GPU memory for Python: look at the devices, and try them."""


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")
]


@app.command()
def info(
    as_json: AsJson = False,
    echo: Annotated[
        bool,
        typer.Option("--echo", help="Also test on each device how host and device see stores."),
    ] = False,
) -> None:
    """Show devices, capabilities, memory visibility, peers, versions, and what is missing."""
    with errors_in_one_line():
        from ringmem.cli.inventory import inventory

        found = inventory(echo=echo)
        if as_json:
            print_json(found)
        else:
            from ringmem.cli.info import show

            show(found)


@app.command()
def demo(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For instance cuda:0 or cpu.  [default: the first CUDA device, or cpu]",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            parser=file_path,
            metavar="FILE",
            help="An allocation trace (.npz).  [default: the shipped one]",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=file_path,
            metavar="PNG",
            help="Where to draw the timeline.  [default: ringmem-demo.png, if matplotlib is there "
            "and --json is not given]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a program's allocations, copy, grow a buffer, feed a ring kernel, and check it all.

    Exits with 1 if anything read back differs from what was written.
    """
    with errors_in_one_line():
        from ringmem.cli import demo_report
        from ringmem.cli.demo import Demo

        result = demo_report.run(Demo.prepare(device, trace), output, quiet=as_json)
        if as_json:
            print_json(result.to_dict())
        else:
            demo_report.show(result)
        if not result.verified:
            raise fail("what was read back differs from what was written", FAILED)


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            parser=file_path,
            metavar="TRACE",
            help="An allocation trace (.npz).",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For instance cuda:0 or cpu, where the simulated device is as large as the trace "
            "needs.  [default: the first CUDA device, or cpu]",
        ),
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="ringmem, native, or where installed torch, torch-expandable, cupy, rmm-pool, "
            "rmm-arena, rmm-binning, rmm-async, cuda.core.",
        ),
    ] = "ringmem",
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the allocator may hold, such as '8 GiB'."),
    ] = None,
    find_capacity: Annotated[
        bool,
        typer.Option("--find-capacity", help="Also find the smallest capacity that survives."),
    ] = False,
    tight: Annotated[
        bool, typer.Option("--tight", help="ringmem: move free pages before creating new ones.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Each takes every n-th allocation.")] = 1,
    streams: Annotated[
        int | None,
        typer.Option(help="Spread the allocations over this many.  [default: the trace's own]"),
    ] = None,
    late: Annotated[
        int, typer.Option(metavar="N", help="ringmem: completions come N events late.")
    ] = 0,
    repetitions: Annotated[int, typer.Option(help="Play the trace this many times.")] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(parser=file_path, metavar="PNG", help="Draw live and reserved bytes there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a recorded program's allocations on an allocator, and time every one.

    Without TRACE the shipped one is played. Exits with 1 if memory ran out.
    """
    with errors_in_one_line():
        from ringmem.cli import replay as work
        from ringmem.cli import replay_report
        from ringmem.cli.progress import LateProgress
        from ringmem.device.sizes import parse_nbytes

        settings = work.ReplaySettings(
            trace=work.load(trace),
            device=device,
            allocator=allocator,
            capacity=None if capacity is None else parse_nbytes(capacity, "capacity"),
            tight=tight,
            threads=threads,
            streams=streams,
            late=late,
            repetitions=repetitions,
        )
        with LateProgress() as progress:
            result = work.run_replay(settings, progress.update, series=plot is not None)
            if find_capacity:
                result.update(work.find_capacity(settings, progress.update))
        if plot is not None:
            replay_report.plot(result, settings.trace, plot)
        del result["reserved_series"]
        if as_json:
            print_json(result)
        else:
            replay_report.show(result)
        if not result["completed"]:
            raise fail(result["error"], FAILED)


def print_json(value: object) -> None:
    """One object on stdout."""
    import json

    typer.echo(json.dumps(value, indent=2))
