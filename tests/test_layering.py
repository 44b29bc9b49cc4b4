"""A floor may call down, never up; siblings do not know each other; no Python below ``bind/``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src" / "ringmem"

# docs/design.md, "The house". Rooms with one number are siblings and do not know each other.
FLOORS = {
    "native": 0,
    "device": 1,
    "buffers": 2,
    "virtual": 3,
    "pool": 4,
    "ring": 5,
    "residency": 5,
    "frameworks": 6,
    "observe": 6,
    "cli": 7,
}
ROOF = 8  # `ringmem` itself: it names everything, so no floor may import it

# The folders of src/ringmem/native, bottom up. `bind` alone may know Python.
NATIVE_FLOORS = {
    "layout": 0,
    "driver": 1,
    "memory": 2,
    "mapping": 3,
    "pool": 4,
    "ring": 5,
    "bind": 6,
}
PYTHON_HEADERS = ("nanobind/", "Python.h")


@dataclass(frozen=True)
class Violation:
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def python_violations(package: Path) -> list[Violation]:
    """Upward and sibling imports below `package` (…/src/ringmem), at any depth of the code."""
    found = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        name = str(file.relative_to(package.parent))
        if len(parts) == 1:
            if parts[0] not in ("__init__", "__main__"):
                found.append(Violation(name, 1, f"{parts[0]!r} belongs to no floor"))
            continue
        if parts[0] not in FLOORS:
            found.append(Violation(name, 1, f"{parts[0]!r} belongs to no floor"))
            continue
        tree = ast.parse(file.read_text(), filename=str(file))
        for line, target in imported(tree, ["ringmem", *parts]):
            found += judge(name, line, parts[0], target)
    return found


def judge(file: str, line: int, room: str, target: str) -> list[Violation]:
    """What is wrong with `room` importing the dotted name `target`."""
    names = target.split(".")
    if names[0] != "ringmem":
        return []
    other = names[1] if len(names) > 1 else ""
    floor = FLOORS.get(other, ROOF)
    if other == room or floor < FLOORS[room]:
        return []
    way = "sideways" if floor == FLOORS[room] else "up"
    return [Violation(file, line, f"{room} imports {target}, which is {way}")]


def imported(tree: ast.AST, module: list[str]) -> Iterator[tuple[int, str]]:
    """Every imported dotted name with its line: lazy, typed-only and by string as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in ringmem/a/b.py is relative to ringmem.a, as in a/__init__.py.
            base = ".".join(module[: -node.level]) if node.level else ""
            stem = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                # `from ringmem import pool` names the floor, `from ringmem.pool import Pool` too.
                yield node.lineno, f"{stem}.{alias.name}" if stem == "ringmem" else stem
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", ""))
            argument = node.args[0]
            if called in ("import_module", "__import__", "import_") and isinstance(
                argument, ast.Constant
            ):
                yield node.lineno, str(argument.value)


INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
IMPORT = re.compile(r'import_\(\s*"(ringmem[\w.]*)"')


def native_violations(native: Path) -> list[Violation]:
    """Upward and sibling includes below `native`, and Python where none may be."""
    found = []
    files = [f for f in sorted(native.rglob("*")) if f.suffix in (".cpp", ".hpp", ".h", ".inc")]
    for file in files:
        parts = file.relative_to(native).parts
        name = "native/" + "/".join(parts)
        room = parts[0]
        if room not in NATIVE_FLOORS:
            found.append(Violation(name, 1, f"{room!r} belongs to no native floor"))
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            found += judge_native(name, number, room, line)
    return found


def judge_native(file: str, number: int, room: str, line: str) -> list[Violation]:
    found = []
    for target in IMPORT.findall(line):
        found += judge(file, number, "native", target)
    match = INCLUDE.match(line)
    if match is None:
        return found
    target = match[2]
    if target.startswith(PYTHON_HEADERS):
        if room != "bind":
            found.append(Violation(file, number, f"{room} includes {target}: Python below bind"))
        return found
    if match[1] == "<" or "/" not in target:  # the system's, or a neighbour in the same folder
        return found
    other = target.split("/")[0]
    if other == room or NATIVE_FLOORS.get(other, ROOF) < NATIVE_FLOORS[room]:
        return found
    return [*found, Violation(file, number, f"{room} includes {target}, which is up or no floor")]


@pytest.mark.skipif(not SOURCES.is_dir(), reason="needs the source tree")
def test_no_python_module_imports_up_or_sideways() -> None:
    assert [str(found) for found in python_violations(SOURCES)] == []


@pytest.mark.skipif(not SOURCES.is_dir(), reason="needs the source tree")
def test_no_native_file_includes_up_or_sideways() -> None:
    assert [str(found) for found in native_violations(SOURCES / "native")] == []


def plant(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("native/errors.py", "from ringmem.device import Device\n"),
        ("device/stream.py", "import ringmem.buffers.view as view\n"),
        ("device/stream.py", "from ringmem import pool\n"),
        ("device/stream.py", "from ringmem import Device\n"),
        ("device/stream.py", "import ringmem\n"),
        ("ring/bridge.py", "from ringmem.residency import sleep\n"),
        ("observe/plot.py", "from ringmem.frameworks import torch\n"),
        ("buffers/a.py", "def f():\n    from ringmem.pool import Pool\n"),
        ("buffers/a.py", "import typing\nif typing.TYPE_CHECKING:\n    import ringmem.cli\n"),
        ("buffers/a.py", "from ..pool import Pool\n"),
        ("buffers/deep/a.py", "from ...pool.core import Pool\n"),
        ("buffers/a.py", "import importlib\nimportlib.import_module('ringmem.pool')\n"),
        ("buffers/a.py", "__import__('ringmem.pool')\n"),
        ("attic/a.py", ""),
        ("helpers.py", ""),
    ],
)  # fmt: skip
def test_planted_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    plant(tmp_path / "ringmem", file, text)
    assert len(python_violations(tmp_path / "ringmem")) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pool/__init__.py", "from ringmem.virtual import AddressRange\nfrom . import core\n"),
        ("pool/core.py", "from .. import native\nfrom ringmem import buffers\nimport numpy\n"),
        ("pool/core.py", "from ringmem.pool.classes import size_class\nfrom .x import y\n"),
        ("cli/app.py", "def f():\n    import ringmem.observe\n    import ringmem.ring\n"),
        ("__init__.py", "from ringmem.cli import main\n"),
    ],
)
def test_import_downward_is_no_violation(tmp_path: Path, file: str, text: str) -> None:
    plant(tmp_path / "ringmem", file, text)
    assert python_violations(tmp_path / "ringmem") == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("driver/a.cpp", '#include "pool/pool.hpp"\n'),
        ("driver/host/a.hpp", '  #  include "bind/objects.hpp"\n'),
        ("pool/a.cpp", '#include "ring/ring.hpp"\n'),
        ("mapping/a.hpp", '#include "unknown/thing.hpp"\n'),
        ("pool/a.cpp", "#include <nanobind/nanobind.h>\n"),
        ("driver/a.cpp", "#include <Python.h>\n"),
        ("bind/a.cpp", 'auto m = nb::module_::import_("ringmem.device.stream");\n'),
        ("cellar/a.hpp", "\n"),
    ],
)
def test_planted_include_is_found(tmp_path: Path, file: str, text: str) -> None:
    plant(tmp_path, file, text)
    assert len(native_violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("bind/a.cpp", '#include <nanobind/nanobind.h>\n#include "pool/pool.hpp"\n'),
        ("bind/a.cpp", 'nb::module_::import_("ringmem.native.errors");\n'),
        ("driver/host/a.cpp", '#include "table.hpp"\n#include "driver/host/x.hpp"\n'),
        ("pool/a.cpp", '#include "mapping/range.hpp"\n#include "driver/driver.hpp"\n'),
    ],
)  # fmt: skip
def test_include_downward_is_no_violation(tmp_path: Path, file: str, text: str) -> None:
    plant(tmp_path, file, text)
    assert native_violations(tmp_path) == []
