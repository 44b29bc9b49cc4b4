"""``ringmem info`` for people: the inventory as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.table import Table

from ringmem.observe import format_nbytes

__all__ = ["show"]

_PADDING = 2  # characters on each side of a column
_NARROWEST = 24  # characters of a column of values that can be read


def show(found: dict[str, Any]) -> None:
    """Print what :func:`ringmem.cli.inventory.inventory` found."""
    console = Console(highlight=False, markup=False)
    cuda = found["cuda"]
    console.print(
        f"ringmem {found['ringmem'] or '(run from its sources)'}, Python {found['python']}, "
        f"NumPy {found['numpy']}, CUDA driver {cuda['driver'] or 'none'}"
    )
    console.print(found["system"], style="dim")
    if cuda["reason"]:
        console.print(cuda["reason"], style="dim")
    for device in found["devices"]:
        console.print()
        _device(console, device)
    if len(found["devices"]) > 1:
        console.print()
        _peers(console, found["peers"])
    console.print("\nPackages", style="bold")
    rows = [_Row(name, version or "not installed") for name, version in found["packages"].items()]
    _rows(console, rows)
    if found["missing"]:
        console.print("\nNot here", style="bold")
        _rows(console, [_Row(e["what"], e["for"], e["how"]) for e in found["missing"]])


class _Row:
    """A name and its values; without a name it goes on with the row above, less brightly."""

    def __init__(self, name: str, *values: str) -> None:
        self.name = name
        self.values = values
        self.style = "" if name else "dim"


def _rows(console: Console, rows: list[_Row]) -> None:
    """Print a table, or where its columns would be too narrow each value under its name."""
    columns = 1 + len(rows[0].values)
    names = max(len(row.name) for row in rows)
    if (console.width - names) // (columns - 1) - 2 * _PADDING < _NARROWEST:
        for row in rows:
            if row.name:
                console.print(Padding(row.name, (0, 0, 0, _PADDING)))
            for value in row.values:
                console.print(Padding(value, (0, 0, 0, 2 * _PADDING), style="dim"))
        return
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, _PADDING))
    for number in range(columns):
        table.add_column(no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(row.name, *row.values, style=row.style)
    console.print(table)


def _device(console: Console, device: dict[str, Any]) -> None:
    if "error" in device:
        console.print(f"{device['name']}: does not answer: {device['error']}", style="bold red")
        return
    console.print(f"{device['name']}  {device['product_name']}", style="bold")
    memory, visibility = device["memory"], device["memory_visibility"]
    rows = [
        _Row("memory", f"{format_nbytes(memory['free'])} free of {format_nbytes(memory['total'])}"),
        _Row("memory visibility", visibility["visibility"]),
        *(_Row("", reason) for reason in visibility["reasons"]),
    ]
    yes: list[str] = []
    no: list[str] = []
    for name, value in device["capabilities"].items():
        if isinstance(value, bool):
            (yes if value else no).append(name)
        else:
            rows.append(_Row(name, _value(name, value)))
    rows.append(_Row("can", ", ".join(yes) or "nothing"))
    rows.append(_Row("cannot", ", ".join(no) or "nothing lacks"))
    rows.append(_Row("uuid", device["uuid"]))
    _rows(console, rows)


def _value(name: str, value: Any) -> str:
    if name.endswith("_nbytes"):
        return format_nbytes(value)
    if isinstance(value, list | tuple):
        return ".".join(str(part) for part in value)
    return "none" if value is None else str(value)


def _endless(console: Console) -> ConsoleOptions:
    return console.options.update(max_width=1 << 20)


def _reach(can: bool, enabled: bool) -> str:
    return "enabled" if enabled else "possible" if can else "-"


def _peers(console: Console, peers: dict[str, Any]) -> None:
    console.print("Peers (a row reaches a column)", style="bold")
    if "error" in peers:
        console.print(peers["error"], style="red")
        return
    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    for name in peers["devices"]:
        table.add_column(name)
    for name, can, on in zip(peers["devices"], peers["can_access"], peers["enabled"], strict=True):
        words = [_reach(c, e) for c, e in zip(can, on, strict=True)]
        table.add_row(name, *words)
    if console.measure(table, options=_endless(console)).maximum <= console.width:
        console.print(table)
        return
    for name, can, on in zip(peers["devices"], peers["can_access"], peers["enabled"], strict=True):
        console.print(f"{name} reaches")
        for peer, c, e in zip(peers["devices"], can, on, strict=True):
            console.print(f"  {peer}: {_reach(c, e)}")
