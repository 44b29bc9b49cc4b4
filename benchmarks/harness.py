"""What every benchmark script shares: arguments, the machine's description, timing, the report.

A script is ``benchmarks/bench_NAME.py``; it takes ``--device`` and ``--json FILE``, measures itself
and its peers in one run, and ends with :func:`report`. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default=None, help="for instance cuda:0 or cpu")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    return parser.parse_args()


def row(name: str, samples: list[float] | np.ndarray, unit: str, **more: Any) -> Row:
    """One line of the report: the median and the 99th percentile of the samples."""
    values = np.asarray(samples, np.float64)
    return {
        "name": name,
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "unit": unit,
        **more,
    }


def met(entry: Row, bar: float, *, least: bool = False) -> Row:
    """The row with the bar that its median is held against: at most it, or at least."""
    median = entry["median"]
    return entry | {"bar": bar, "met": bool(median >= bar if least else median <= bar)}


def time_ns(
    call: Callable[[], object], *, batch: int, samples: int, warm_up: bool = True
) -> np.ndarray:
    """Nanoseconds of one call, `samples` times, each the mean of `batch` calls in a row."""
    result = np.empty(samples)
    for _ in range(batch if warm_up else 0):
        call()
    gc.disable()
    try:
        for i in range(samples):
            start = time.perf_counter_ns()
            for _ in range(batch):
                call()
            result[i] = (time.perf_counter_ns() - start) / batch
    finally:
        gc.enable()
    return result


def machine(device: Any) -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    versions = {}
    for name in (
        "ringmem",
        "numpy",
        "torch",
        "cupy-cuda13x",
        "cuda-core",
        "numba-cuda",
        "rmm-cu13",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "device": device.name,
        "product": device.product_name,
        "driver": device.driver.driver_version(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def report(name: str, device: Any, rows: list[Row], file: str | None) -> None:
    """Print the rows, and write them with the machine's description if a file is asked for."""
    result = {"benchmark": name, "machine": machine(device), "rows": rows}
    if file:
        Path(file).write_text(json.dumps(result, indent=1) + "\n")
    for entry in rows:
        print(json.dumps(entry))
