"""The C peer of the benchmarks: built with the machine's compiler, run, and its samples read."""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

Samples = dict[str, list[float]]


def cuda_include() -> str | None:
    """A folder with ``cuda.h``: from a wheel or a toolkit."""
    found = [
        *glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/include/cuda.h"),
        *(f"{os.environ.get(name)}/include/cuda.h" for name in ("CUDA_HOME", "CUDA_PATH")),
        "/usr/local/cuda/include/cuda.h",
    ]
    return next((str(Path(file).parent) for file in found if Path(file).is_file()), None)


def _build(folder: str, *options: str) -> str | None:
    """Compile ``peer_driver.c``; None, and the reason on stderr, where that is not possible."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = cuda_include()
    if compiler is None or include is None:
        print("no C peer: no compiler or no cuda.h", file=sys.stderr)
        return None
    source = Path(__file__).with_name("peer_driver.c")
    program = f"{folder}/peer_driver"
    build = [compiler, "-O2", *options, "-I", include, str(source), "-ldl", "-o", program]
    subprocess.run(build, check=True)
    return program


def driver_peer(ordinal: int) -> Samples | None:
    """Run ``peer_driver.c`` on a device; None, and the reason on stderr, where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        program = _build(folder)
        if program is None:
            return None
        done = subprocess.run([program, str(ordinal)], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        print(f"no C peer: {done.stderr.strip()}", file=sys.stderr)
        return None
    samples: Samples = json.loads(done.stdout)
    return samples


def driver_pair(ordinal: int) -> Callable[[int, int], float] | None:
    """Return ``(nbytes, count) -> ns``: the driver's own pair, timed in C in this process."""
    with tempfile.TemporaryDirectory() as folder:
        program = _build(folder, "-shared", "-fPIC")
        if program is None:
            return None
        library = ctypes.CDLL(program)
    library.peer_pair_ns.restype = ctypes.c_double
    library.peer_pair_ns.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.peer_open(ordinal)
    return library.peer_pair_ns
