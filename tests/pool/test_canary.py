"""Patterns in every live block, written and read back in stream order, with the device behind.

Each block is filled with its own number on its own stream and read back just before it is freed,
on the device's time: if two blocks overlap, or memory is reused or remapped before the work that
uses it is done, some number comes back wrong. The host is 100 to 200 operations ahead.
"""

import random
import threading

import numpy as np
import pytest

import ringmem
from ringmem import Pool

AHEAD = 100


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


def play(device, pool, streams, operations, rng, most_live):
    driver, ordinal = device.driver, device.ordinal
    answers = ringmem.PinnedBuffer((operations, 3), "u4", device=device)
    seen = answers.numpy()
    seen[:] = 0
    expected = np.zeros((operations, 3), "u4")
    live, number = [], 0
    pacer = Pacer(device, streams)

    def free(index):
        live[index], live[-1] = live[-1], live[index]
        block, mark, stream = live.pop()
        words = block.nbytes // 4
        for column, word in enumerate((0, words // 2, words - 1)):
            driver.copy_async(
                ordinal, answers.ptr + (mark * 3 + column) * 4, block.ptr + 4 * word, 4,
                stream.handle,
            )  # fmt: skip
        expected[mark] = mark + 1
        block.close()

    try:
        for step in range(operations):
            if step % AHEAD == 0:
                pacer.next_chunk()
            if live and (len(live) >= most_live or rng.random() < 0.45):
                free(rng.randrange(len(live)))
                continue
            stream = rng.choice(streams)
            nbytes = 4 * int(2 ** rng.uniform(4, 18.9))
            try:
                block = pool.allocate(nbytes, stream)
            except ringmem.OutOfMemoryError:
                while len(live) > most_live // 4:
                    free(-1)
                continue
            driver.fill_async(ordinal, block.ptr, number + 1, 4, nbytes // 4, stream.handle)
            if rng.random() < 0.2:  # another stream writes it, too, and nobody waits for that
                other = rng.choice(streams)
                other.wait(stream.record())
                driver.fill_async(ordinal, block.ptr, number + 1, 4, nbytes // 4, other.handle)
                block.record_stream(other)
            live.append((block, number, stream))
            del block
            number += 1
        while live:
            free(-1)
    finally:
        pacer.close()
    wrong = np.flatnonzero((seen[:number] != expected[:number]).any(axis=1))
    del seen
    answers.close()
    return number, wrong


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
    number, wrong = play(any_device, pool, streams, 1500, random.Random(count), 60)
    assert number > 500
    assert wrong.size == 0
    if settings.get("tight"):
        assert pool.statistics().remaps > 0
    pool.close()
