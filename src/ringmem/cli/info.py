"""``ringmem info`` for people: the inventory as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ringmem.observe import format_nbytes

__all__ = ["show"]


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
    table = _plain_table(2)
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    console.print(table)
    if found["missing"]:
        console.print("\nNot here", style="bold")
        table = _plain_table(3)
        for entry in found["missing"]:
            table.add_row(entry["what"], entry["for"], entry["how"])
        console.print(table)


def _plain_table(columns: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 2))
    for number in range(columns):
        table.add_column(no_wrap=number == 0, overflow="fold")
    return table


def _device(console: Console, device: dict[str, Any]) -> None:
    if "error" in device:
        console.print(f"{device['name']}: does not answer: {device['error']}", style="bold red")
        return
    console.print(f"{device['name']}  {device['product_name']}", style="bold")
    memory, visibility = device["memory"], device["memory_visibility"]
    table = _plain_table(2)
    table.add_row(
        "memory",
        f"{format_nbytes(memory['free'])} free of {format_nbytes(memory['total'])}",
    )
    table.add_row("memory visibility", visibility["visibility"])
    for reason in visibility["reasons"]:
        table.add_row("", reason, style="dim")
    yes: list[str] = []
    no: list[str] = []
    for name, value in device["capabilities"].items():
        if isinstance(value, bool):
            (yes if value else no).append(name)
        else:
            table.add_row(name, _value(name, value))
    table.add_row("can", ", ".join(yes) or "nothing")
    table.add_row("cannot", ", ".join(no) or "nothing lacks")
    table.add_row("uuid", device["uuid"])
    console.print(table)


def _value(name: str, value: Any) -> str:
    if name.endswith("_nbytes"):
        return format_nbytes(value)
    if isinstance(value, list | tuple):
        return ".".join(str(part) for part in value)
    return "none" if value is None else str(value)


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
        words = ["enabled" if e else "possible" if c else "-" for c, e in zip(can, on, strict=True)]
        table.add_row(name, *words)
    console.print(table)
