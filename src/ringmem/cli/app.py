"""The commands and their options. What they do lives in the module of each command.

Exit codes: 0 all is well, 1 something failed, 2 the command was given wrong input, 130 interrupted.
Errors that ringmem raises on purpose are one line on stderr; a traceback means a bug.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

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


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn what can go wrong on purpose into a line on stderr and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except (InvalidValueError, InvalidDeviceError, NotInitializedError) as error:
        # No such device, no driver for it, no such file: the command asked for what is not there.
        raise fail(error, WRONG_INPUT) from None
    except RingmemError as error:
        raise fail(error, FAILED) from None
    except KeyboardInterrupt:
        raise fail("interrupted", INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has gone; give the interpreter a place to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


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
            metavar="FILE", help="An allocation trace (.npz).  [default: the shipped one]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG",
            help="Where to draw the timeline.  [default: ringmem-demo.png, if matplotlib is there "
            "and --json is not given]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a program's allocations, move data both ways on two streams, and check it all.

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


bench_app = typer.Typer(
    help="Measure, and check every answer.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench_app, name="bench")


@bench_app.command("bridge")
def bench_bridge(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For instance cuda:0 or cpu.  [default: the first CUDA device, or cpu]",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Flushes timed at each size; the median counts.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """Time the flushes of each transfer strategy beside raw pinned copies of the same bytes.

    Exits with 1 if a message did not arrive as it was sent.
    """
    with errors_in_one_line():
        from ringmem.cli import bench_bridge as bench

        result = bench.run(device, repeat)
        if as_json:
            print_json(result)
        else:
            bench.show(result)
        if not result["verified"]:
            raise fail("a message did not arrive as it was sent", FAILED)


def print_json(value: object) -> None:
    """One object on stdout."""
    import json

    typer.echo(json.dumps(value, indent=2))
