"""The C peer of the benchmarks: built with the machine's compiler, run, and its samples read."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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


def driver_peer(ordinal: int) -> Samples | None:
    """Run ``peer_driver.c`` on a device; None, and the reason on stderr, where that fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = cuda_include()
    if compiler is None or include is None:
        print("no C peer: no compiler or no cuda.h", file=sys.stderr)
        return None
    source = Path(__file__).with_name("peer_driver.c")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/peer_driver"
        build = [compiler, "-O2", "-I", include, str(source), "-ldl", "-o", program]
        subprocess.run(build, check=True)
        done = subprocess.run([program, str(ordinal)], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        print(f"no C peer: {done.stderr.strip()}", file=sys.stderr)
        return None
    samples: Samples = json.loads(done.stdout)
    return samples
