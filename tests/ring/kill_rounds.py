"""Kills one end of a ring with SIGKILL at random moments, again and again. Run by test_processes.

Usage: kill_rounds.py {producer|consumer} ROUNDS MESSAGE_NBYTES SEED. Prints the number of messages
that were checked. The message with number i holds i in every word; the ends count in the shared
memory only, so that a new end must find out where the killed one was.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import numpy as np

from ringmem.native.errors import ClosedError
from ringmem.ring import Consumer, Producer, Ring


def numbered(first: int, count: int, dtype: np.dtype) -> np.ndarray:
    words = dtype.itemsize // 8
    numbers = np.repeat(np.arange(first, first + count, dtype="u8"), words)
    return numbers.view(dtype)


def produce(producer: Producer, dtype: np.dtype, chooser: random.Random, until: float) -> None:
    while time.monotonic() < until:
        count = chooser.randint(1, producer.capacity)
        try:
            if chooser.random() < 0.5:
                producer.send(numbered(producer.tail, count, dtype), timeout_s=5)
                continue
            first = producer.tail
            for view in producer.reserve(count, timeout_s=5):
                view[:] = numbered(first, len(view), dtype)
                first += len(view)
            producer.commit()
        except (TimeoutError, ClosedError):
            continue  # the consumer was killed: whoever replaces it finds everything in place


def consume(consumer: Consumer, dtype: np.dtype, chooser: random.Random, until: float) -> int:
    checked = 0
    while time.monotonic() < until:
        first = consumer.head
        count = chooser.randint(1, consumer.capacity)
        try:
            if chooser.random() < 0.5:
                got = consumer.recv(count, timeout_s=0.001)
            else:
                consumer.wait(0.001)
                got = np.concatenate([v.copy() for v in consumer.poll(count)] or [[]])
                consumer.release()
        except (TimeoutError, ClosedError):
            continue  # the producer was killed: it will be replaced
        if len(got) and got.tobytes() != numbered(first, len(got), dtype).tobytes():
            print(f"messages from {first} on are not what was sent", file=sys.stderr)
            os._exit(3)
        checked += len(got)
    return checked


def kill_later(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)


def one_round(ring: Ring, victim: str, chooser: random.Random) -> int:
    """Fork the victim, kill it after 0 to 4 ms; the other end goes on in this process."""
    seed = chooser.random()
    pid = os.fork()
    if pid == 0:
        own = random.Random(seed)
        if victim == "producer":
            produce(ring.producer(), ring.message, own, time.monotonic() + 10)
        else:
            consume(ring.consumer(), ring.message, own, time.monotonic() + 10)
        os._exit(0)
    killer = os.fork()
    if killer == 0:
        kill_later(pid, chooser.random() * 0.004)
        os._exit(0)
    until = time.monotonic() + 0.006
    if victim == "producer":
        with ring.consumer() as consumer:
            consume(consumer, ring.message, chooser, until)
            total = consumer.head
    else:
        with ring.producer() as producer:
            producer.spin_us = 0
            produce(producer, ring.message, chooser, until)
            total = producer.tail - producer.capacity + producer.free  # what was released
    os.waitpid(killer, 0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit(f"the victim ended by itself with {status}")
    return total


def main() -> None:
    victim, rounds, nbytes, seed = sys.argv[1], *map(int, sys.argv[2:5])
    dtype = np.dtype([("words", "u8", (nbytes // 8,))])
    chooser = random.Random(seed)
    with Ring(dtype, 64) as ring:
        total = 0
        for _ in range(rounds):
            total = one_round(ring, victim, chooser)
        # What is still in the ring belongs to messages before, whole and in order.
        with ring.consumer() as consumer:
            total += consume(consumer, dtype, chooser, time.monotonic() + 0.01)
    print(total)


if __name__ == "__main__":
    main()
