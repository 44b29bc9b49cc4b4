"""Importing the package is free of drivers, threads and heavy modules, and quick."""

import ast
import importlib
import os
import subprocess
import sys
import time

import pytest

import ringmem


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_import_makes_no_thread_no_cuda_call_and_loads_nothing_heavy():
    code = """
import os, sys
before = len(os.listdir("/proc/self/task"))
import ringmem
import ringmem.device
threads = len(os.listdir("/proc/self/task")) - before
maps = open("/proc/self/maps").read()
heavy = [m for m in ("numpy", "numba", "torch", "cupy", "cuda", "rich", "typer", "matplotlib")
         if m in sys.modules]
print((threads, "libcuda" in maps, heavy))
"""
    assert ast.literal_eval(run_python(code)) == (0, False, [])


def test_import_loads_no_native_code():
    code = "import sys, ringmem; print([m for m in sys.modules if m.startswith('ringmem.')])"
    assert ast.literal_eval(run_python(code)) == []


@pytest.mark.parametrize("module", ["ringmem", "ringmem.device"])
def test_import_costs_at_most_1_3_times_numpy(module):
    def best_of_5(name):
        code = (
            "import time; start = time.perf_counter(); "
            f"import {name}; print(time.perf_counter() - start)"
        )
        return min(float(run_python(code)) for _ in range(5))

    assert best_of_5(module) <= 1.3 * best_of_5("numpy")


def test_every_exported_name_is_there_and_listed():
    for name, module in ringmem._EXPORTS.items():
        assert getattr(ringmem, name) is getattr(importlib.import_module(module), name)
        assert name in dir(ringmem)


def test_the_facade_and_the_rooms_agree():
    for module, names in ringmem._MODULES.items():
        assert sorted(names) == sorted(importlib.import_module(module).__all__), module


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ringmem.nonsense


def test_a_process_that_used_devices_ends_quietly_and_at_once():
    code = """
import ringmem
device = ringmem.Device("cpu")
stream = device.create_stream()
event = stream.record()
pool = device.allocator.pool
kept = ringmem.simulate(devices=2)
kept.devices[1].memory_visibility(echo=True)
device.memory_visibility(echo=True)  # leaves pinned blocks for the next one
with stream:
    pass
"""
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert time.monotonic() - start < 30


def test_rooms_that_are_used_as_modules_need_no_import_of_their_own():
    code = "import ringmem; print(ringmem.residency.__name__, 'virtual' in dir(ringmem))"
    assert run_python(code).split() == ["ringmem.residency", "True"]


def test_completion_shows_nothing_that_the_package_imports_for_itself():
    assert not {"Any", "TYPE_CHECKING", "annotations", "importlib"} & set(dir(ringmem))
