"""Two small kernels that write and check a pattern, for content that only the GPU has seen.

Compiled and launched with cuda.core, in the primary context of the device. On a CPU device the same
is done by copies and NumPy, so that a script's path can be tried without a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ringmem import Device, Stream, zeros
from ringmem.ring.cuda_launch import current_context

SOURCE = r"""
typedef unsigned long long u64;
#define EACH(i, words) \
  u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words; i += gridDim.x * (u64)blockDim.x
__device__ u64 word(u64 i, u64 seed) {
  u64 x = (i + seed) * 0x9e3779b97f4a7c15ull;
  return (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
}
extern "C" __global__ void write_pattern(u64* at, u64 words, u64 seed) {
  for (EACH(i, words)) at[i] = word(i, seed);
}
extern "C" __global__ void count_wrong(const u64* at, u64 words, u64 seed, u64* wrong) {
  u64 mine = 0;
  for (EACH(i, words)) mine += at[i] != word(i, seed);
  if (mine) atomicAdd(wrong, mine);
}
"""


def pattern(words: int, seed: int) -> np.ndarray:
    """The words that the kernels write and expect."""
    x = (np.arange(words, dtype=np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


@functools.cache
def compiled(major: int, minor: int) -> bytes:
    """The kernels' cubin; a driver may be older than the compiler, which rules PTX out."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}")
    return bytes(Program(SOURCE, "c++", options).compile("cubin").code)


class Kernels:
    """Writes and checks memory that a device reaches, by that device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Stream = device.create_stream()
        if device.platform != "cuda":
            return
        from cuda.core import ObjectCode

        cubin = compiled(*device.compute_capability)
        with current_context(device, "loading the pattern kernels"):
            self._code = ObjectCode.from_cubin(cubin)
            self._kernels = {n: self._code.get_kernel(n) for n in ("write_pattern", "count_wrong")}
            self._wrong = zeros(1, "uint64", device=device, stream=self.stream)

    def submit_write(self, ptr: int, nbytes: int, seed: int) -> None:
        """Write the pattern, in the order of :attr:`stream`. CUDA devices only."""
        self._launch("write_pattern", ptr, nbytes // 8, seed)

    def write(self, ptr: int, nbytes: int, seed: int) -> None:
        """Write the pattern and wait for it. `nbytes` is a multiple of 8."""
        if self.device.platform == "cuda":
            self.submit_write(ptr, nbytes, seed)
            self.stream.synchronize()
        else:
            words = pattern(nbytes // 8, seed)
            self._copy(ptr, words.ctypes.data, nbytes)
            self.stream.synchronize()

    def wrong(self, ptr: int, nbytes: int, seed: int) -> int:
        """Count the words that are not as :meth:`write` left them."""
        if self.device.platform != "cuda":
            seen = np.empty(nbytes // 8, np.uint64)
            self._copy(seen.ctypes.data, ptr, nbytes)
            self.stream.synchronize()
            return int(np.count_nonzero(seen != pattern(nbytes // 8, seed)))
        self._wrong.fill(0, stream=self.stream)
        self._launch("count_wrong", ptr, nbytes // 8, seed, self._wrong.ptr)
        self.stream.synchronize()
        return int(self._wrong.to_numpy()[0])

    def _launch(self, name: str, *arguments: Any) -> None:
        from cuda.core import LaunchConfig, launch

        with current_context(self.device, name):
            launch(self.stream, LaunchConfig(grid=528, block=256), self._kernels[name], *arguments)

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self.device.driver.copy_async(self.device.ordinal, dst, src, nbytes, self.stream.handle)
