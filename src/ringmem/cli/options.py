"""What several commands' options share."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["file_path"]


def file_path(text: str) -> Path:
    """Parse the path of a file; an empty text would mean the folder that one is in."""
    if not text:
        raise typer.BadParameter("'' is an empty path: give the name of a file")
    return Path(text)
