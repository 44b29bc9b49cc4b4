"""Floor 7: the ``ringmem`` command. Importing this loads neither typer nor rich."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process; ends with :class:`SystemExit`."""
    from ringmem.cli.output import checked_output

    with checked_output():
        from ringmem.cli.app import app

        app(prog_name="ringmem")
