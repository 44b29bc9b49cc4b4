"""Importing costs next to nothing and does nothing; what ships is what should."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ringmem

PACKAGE = Path(ringmem.__file__).parent
INSTALLED = "site-packages" in PACKAGE.parts
HEAVY = ["numba", "matplotlib", "torch", "cupy", "cuda", "typer", "rich", "jax", "ml_dtypes"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_import_loads_nothing_heavy_and_starts_nothing() -> None:
    seen = json.loads(
        run(
            "import json, os, sys, ringmem\n"
            "maps = open('/proc/self/maps').read()\n"
            "print(json.dumps({'modules': sorted(sys.modules), 'cuda': 'libcuda' in maps,"
            " 'threads': len(os.listdir('/proc/self/task'))}))"
        )
    )
    loaded = {name.split(".")[0] for name in seen["modules"]}
    assert not loaded & set(HEAVY)
    assert not seen["cuda"]
    assert seen["threads"] == 1


def test_using_every_public_name_starts_no_thread_and_loads_no_driver() -> None:
    seen = json.loads(
        run(
            "import json, os, ringmem, numpy\n"
            "before = len(os.listdir('/proc/self/task'))\n"
            "for name in ringmem.__all__: getattr(ringmem, name)\n"
            "maps = open('/proc/self/maps').read()\n"
            "print(json.dumps({'cuda': 'libcuda' in maps,"
            " 'threads': len(os.listdir('/proc/self/task')) - before}))"
        )
    )
    assert seen == {"cuda": False, "threads": 0}


def test_import_costs_at_most_1_3_times_numpy() -> None:
    code = "import time\nstart = time.perf_counter()\nimport {}\nprint(time.perf_counter() - start)"
    best = {"numpy": float("inf"), "ringmem": float("inf")}
    for _ in range(5):  # interleaved: a busy moment hits both
        for name in best:
            best[name] = min(best[name], float(run(code.format(name))))
    assert best["ringmem"] <= 1.3 * best["numpy"]


@pytest.mark.skipif(not INSTALLED, reason="looks at the installed package")
def test_versions_agree() -> None:
    assert ringmem.__version__ == importlib.metadata.version("ringmem")


@pytest.mark.skipif(not INSTALLED, reason="looks at the installed package")
def test_only_the_layout_headers_of_the_native_sources_ship() -> None:
    native = PACKAGE / "native"
    sources = [f for f in native.rglob("*") if f.suffix in (".cpp", ".hpp", ".h", ".inc", ".cu")]
    assert {f.parent for f in sources} == {native / "layout"}
    assert {f.suffix for f in sources} == {".hpp"}


@pytest.mark.skipif(not INSTALLED, reason="looks at the installed package")
def test_types_ship() -> None:
    assert (PACKAGE / "py.typed").is_file()
    stub = (PACKAGE / "native" / "_native.pyi").read_text()
    assert "class DeviceBase" in stub
    assert "def cuda_driver" in stub
