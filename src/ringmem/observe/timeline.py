"""A drawing of bytes over events: block characters for a terminal, a PNG with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ringmem.native.errors import InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Timeline", "format_nbytes"]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_nbytes(nbytes: float) -> str:
    """Bytes for people: three significant digits and a binary unit.

    Examples
    --------
    >>> from ringmem.observe import format_nbytes
    >>> format_nbytes(4122604752), format_nbytes(512), format_nbytes(0)
    ('3.84 GiB', '512 B', '0 B')
    """
    value, unit = float(nbytes), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes after each event, to be drawn.

    Parameters
    ----------
    nbytes : ndarray of int64, shape (events,)
        The curve; no value below 0.
    title : str
        Stands above the drawing.
    lines : mapping of str to ndarray of int64, shape (events,), optional
        More curves in bytes by their names: lines in a picture; the terminal has no room for them.

    Examples
    --------
    >>> import numpy as np
    >>> from ringmem.observe import Timeline
    >>> print(Timeline(np.array([0, 512, 1024, 512]), "two blocks").text(width=19, height=2))
    two blocks
    1.00 KiB │     ██
             │   ██████
           0 └─────────
               0      4
    """

    nbytes: NDArray[np.int64]
    title: str = "live bytes"
    lines: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nbytes.ndim != 1 or len(self.nbytes) == 0 or int(self.nbytes.min()) < 0:
            raise InvalidValueError(
                f"nbytes has shape {self.nbytes.shape}; "
                "one dimension, at least one entry and no negative one would do"
            )
        for name, curve in self.lines.items():
            if curve.shape != self.nbytes.shape:
                raise InvalidValueError(
                    f"lines[{name!r}] has shape {curve.shape}; {self.nbytes.shape} would do"
                )

    def columns(self, count: int) -> NDArray[np.int64]:
        """The curve in `count` columns of equally many events: the largest value in each.

        A peak of one event is therefore never lost, however narrow the drawing.
        """
        edges = np.linspace(0, len(self.nbytes), count + 1).astype(np.int64)[:-1]
        edges = np.minimum(edges, len(self.nbytes) - 1)
        return np.asarray(np.maximum.reduceat(self.nbytes, edges))

    def text(self, width: int = 80, height: int = 10, *, ascii_only: bool = False) -> str:
        """Draw with block characters.

        Parameters
        ----------
        width : int
            Characters of a line, axis labels included; at least 16.
        height : int
            Lines of the curve; at least 1.
        ascii_only : bool
            For terminals that cannot show block characters.

        Raises
        ------
        InvalidValueError
            `width` or `height` is too small.
        """
        if width < 16 or height < 1:
            raise InvalidValueError(
                f"width is {width} and height is {height}; at least 16 and 1 would do"
            )
        peak = max(int(self.nbytes.max()), 1)
        label = format_nbytes(peak)
        room = width - len(label) - 3
        if room < 1:
            raise InvalidValueError(f"width is {width}; at least {len(label) + 4} would do")
        columns = self.columns(room)
        shades, bar, corner, line = ("  ..::###", "|", "+", "-") if ascii_only else (
            _EIGHTHS, "│", "└", "─"
        )  # fmt: skip
        eighths = np.ceil(columns.astype(np.float64) * (8 * height) / peak).astype(np.int64)
        rows = [self.title]
        for row in range(height):
            filled = np.clip(eighths - 8 * (height - 1 - row), 0, 8)
            head = label if row == 0 else ""
            rows.append(f"{head:>{len(label)}} {bar} " + "".join(shades[n] for n in filled))
        rows.append(f"{'0':>{len(label)}} {corner}{line * (room + 1)}")
        last = str(len(self.nbytes))
        rows.append(" " * (len(label) + 3) + "0" + f"{last:>{max(room - 1, 0)}}")
        return "\n".join(row.rstrip() for row in rows)

    def save(self, path: str | Path) -> Path:
        """Draw to a PNG file (or another format that matplotlib knows by its ending).

        Returns
        -------
        Path
            The file, written whole: nothing is left behind by a failure.

        Raises
        ------
        NotSupportedError
            matplotlib is not installed (``pip install 'ringmem[plot]'``).
        InvalidValueError
            The file cannot be written there, or its ending names no picture format.
        """
        if isinstance(path, str) and not path:
            raise InvalidValueError("path is '': give the name of a .png file")
        path = Path(path)
        try:
            # Figure alone, without pyplot: no window, no global state, usable from any thread.
            from matplotlib.figure import Figure
        except ImportError as error:
            raise NotSupportedError(
                "drawing to a file needs matplotlib: pip install 'ringmem[plot]'"
            ) from error
        from io import BytesIO

        figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        _, unit = format_nbytes(int(self.nbytes.max())).split()
        values = self.nbytes / 1024 ** _UNITS.index(unit)
        axes.fill_between(np.arange(len(values)), values, step="post", alpha=0.35, linewidth=0)
        axes.step(np.arange(len(values)), values, where="post", linewidth=0.8)
        for name, curve in self.lines.items():
            scaled = curve / 1024 ** _UNITS.index(unit)
            axes.step(np.arange(len(scaled)), scaled, where="post", linewidth=0.9, label=name)
        if self.lines:
            axes.legend(loc="upper left", frameon=False)
        axes.set(title=self.title, xlabel="event", ylabel=unit, xlim=(0, len(values)))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        picture = BytesIO()
        try:
            figure.savefig(picture, format=path.suffix.lstrip(".") or "png")
            path.write_bytes(picture.getvalue())
        except (OSError, ValueError) as error:
            raise InvalidValueError(
                f"path is {str(path)!r}, which cannot be written as a picture ({error}); "
                "a .png in a folder that exists would do"
            ) from error
        return path
