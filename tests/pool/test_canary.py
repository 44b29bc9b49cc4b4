"""Patterns in every live block, written and read back in stream order, with the device behind.

Each block is filled with its own number on its own stream and checked just before it is freed,
on the device's time: if two blocks overlap, or memory is reused or remapped before the work that
uses it is done, some number comes back wrong. The host is 100 to 200 operations ahead. On a GPU
kernels write and check every word; elsewhere fills write every word, and copies bring three back.
"""

import contextlib
import os
import random
import threading

import numpy as np
import pytest

import ringmem
from ringmem import Pool

AHEAD = 100
OPERATIONS = int(os.environ.get("RINGMEM_CANARY_OPERATIONS", "1500"))


class CopiedMarks:
    """Numbers written by fills, three words of each block copied back."""

    def __init__(self, device, most):
        self._device, self._most, self._checked = device, most, 0
        self._buffer = ringmem.PinnedBuffer((most, 3), "u4", device=device)
        self._buffer.numpy()[:] = 0
        self._expected = np.zeros((most, 3), "u4")

    def write(self, block, mark, stream):
        self._device.driver.fill_async(
            self._device.ordinal, block.ptr, mark, 4, block.nbytes // 4, stream.handle
        )

    def check(self, block, mark, stream):
        words = block.nbytes // 4
        for column, word in enumerate((0, words // 2, words - 1)):
            self._device.driver.copy_async(
                self._device.ordinal, self._buffer.ptr + (self._checked * 3 + column) * 4,
                block.ptr + 4 * word, 4, stream.handle,
            )  # fmt: skip
        self._expected[self._checked] = mark
        self._checked += 1

    def wrong(self):
        """How many checks there were, and how many words were wrong."""
        return self._checked, int((self._buffer.numpy() != self._expected).sum())

    def close(self):
        self._buffer.close()


class KernelMarks:
    """Numbers written and checked by kernels, every word."""

    SOURCE = """
    extern "C" __global__ void write_mark(unsigned* words, unsigned long long count,
                                          unsigned long long mark) {
      for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
           i += gridDim.x * blockDim.x) words[i] = mark + i * 2654435761u;
    }
    extern "C" __global__ void check_mark(const unsigned* words, unsigned long long count,
                                          unsigned long long mark, unsigned long long* found) {
      unsigned long long wrong = 0;
      for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
           i += gridDim.x * blockDim.x) wrong += words[i] != (unsigned)(mark + i * 2654435761u);
      if (wrong) atomicAdd(found, wrong);
      if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(found + 1, 1ull);
    }
    """

    def __init__(self, device, most):
        del most
        from cuda.core import Program, ProgramOptions

        self._device = device
        major, minor = device.capabilities.compute_capability
        with self._current():
            options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}")
            code = Program(self.SOURCE, "c++", options).compile("cubin")
            self._write, self._check = code.get_kernel("write_mark"), code.get_kernel("check_mark")
        self._found = ringmem.zeros(2, "u8", device=device)
        # The first launch of a kernel loads it, which waits for what else runs: so now.
        stream = device.create_stream()
        with (
            contextlib.closing(stream),
            contextlib.closing(ringmem.zeros(2, "u4", device=device)) as b,
        ):
            self.write(b, 1, stream)
            self.check(b, 1, stream)
            stream.synchronize()
        self._found.fill(0)
        device.synchronize()

    def _current(self):
        from ringmem.ring.cuda_launch import current_context

        return current_context(self._device, "the canary")

    def _launch(self, kernel, block, stream, *arguments):
        from cuda.core import LaunchConfig, launch

        words = block.nbytes // 4
        config = LaunchConfig(grid=min(256, words // 256 + 1), block=256)
        with self._current():
            launch(stream, config, kernel, block.ptr, words, *arguments)

    def write(self, block, mark, stream):
        self._launch(self._write, block, stream, mark)

    def check(self, block, mark, stream):
        self._launch(self._check, block, stream, mark, self._found.ptr)

    def wrong(self):
        wrong, checks = self._found.to_numpy()
        return int(checks), int(wrong)

    def close(self):
        self._found.close()


class Pacer:
    """Keeps the device one or two chunks behind the host: streams wait for a word that lags.

    A host that waits for the device itself would wait for ever; then the word moves on.
    """

    def __init__(self, device, streams):
        self._device, self._streams = device, streams
        self._buffer = ringmem.PinnedBuffer(1, "u4", device=device)
        self._word = self._buffer.numpy()
        self._word[0] = 0
        self.chunk = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def next_chunk(self):
        """Work from here on waits until the chunk after the next one begins."""
        self.chunk += 1
        for stream in self._streams:
            self._device.driver.stream_wait_value(
                self._device.ordinal, stream.handle, self._buffer.ptr, self.chunk
            )
        self._word[0] = max(0, self.chunk - 2)

    def _watch(self):
        seen = -1
        while not self._stop.wait(0.1):
            if seen == self.chunk:
                self._word[0] = self.chunk
            seen = self.chunk

    def close(self):
        self._stop.set()
        self._thread.join()
        self._word[0] = 1 << 30
        for stream in self._streams:
            stream.synchronize()
        del self._word
        self._buffer.close()


def play(device, pool, streams, operations, rng, *, most_live, words):
    """Allocate, write, share, check and free; how many checks, and words that were wrong."""
    kind = KernelMarks if device.platform == "cuda" else CopiedMarks
    marks = kind(device, operations)
    live, number = [], 0
    pacer = Pacer(device, streams)

    def free(index):
        live[index], live[-1] = live[-1], live[index]
        block, mark, stream = live.pop()
        marks.check(block, mark, stream)
        block.close()

    try:
        for step in range(operations):
            if step % AHEAD == 0:
                pacer.next_chunk()
            if live and (len(live) >= most_live or rng.random() < 0.45):
                free(rng.randrange(len(live)))
                continue
            stream = rng.choice(streams)
            nbytes = 4 * int(2 ** rng.uniform(*words))
            try:
                block = pool.allocate(nbytes, stream)
            except ringmem.OutOfMemoryError:
                for _ in range(len(live) // 4 + 1):
                    free(rng.randrange(len(live)))
                continue
            number += 1
            marks.write(block, number, stream)
            if rng.random() < 0.2:  # another stream writes it, too, and nobody waits for that
                other = rng.choice(streams)
                other.wait(stream.record())
                marks.write(block, number, other)
                block.record_stream(other)
            live.append((block, number, stream))
            del block
        while live:
            free(-1)
    finally:
        pacer.close()
    checks, wrong = marks.wrong()
    marks.close()
    assert checks == number
    return checks, wrong


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"limit": "24 MiB"},
        {"limit": "24 MiB", "tight": True},
        {"policy": "power_of_two"},
        {"policy": "exact"},
        {"release_threshold": "2 MiB"},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 4])
def test_no_block_is_ever_written_by_another(any_device, settings, count):
    streams = [any_device.create_stream() for _ in range(count)]
    pool = Pool(any_device, **settings)
    checks, wrong = play(
        any_device, pool, streams, OPERATIONS, random.Random(count), most_live=60, words=(4, 18.9)
    )
    assert checks > OPERATIONS // 3
    assert wrong == 0
    if settings.get("tight"):
        assert pool.statistics().remaps > 0
    pool.close()


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_pages_that_move_at_the_limit_carry_nothing_over(any_device, seed, count):
    """Blocks of many pages in a pool that is always full."""
    streams = [any_device.create_stream() for _ in range(count)]
    pool = Pool(any_device, limit="64 MiB")
    checks, wrong = play(
        any_device, pool, streams, OPERATIONS // 2, random.Random(seed), most_live=14,
        words=(18, 21.5),
    )  # fmt: skip
    assert checks > OPERATIONS // 8
    assert wrong == 0
    assert pool.statistics().remaps > OPERATIONS // 300
    pool.close()
