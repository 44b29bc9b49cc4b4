"""Where the parts of each ring pair lie in the memory of a kernel: decided here, made in `Pair`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmem.native.layouts import ControlBlock, TelemetryBuffer
from ringmem.ring.backend import KernelSpec, PairAddresses, RingMemory
from ringmem.ring.endpoints import Consumer, Full, Producer
from ringmem.ring.ring import Ring
from ringmem.ring.slots import HEADER, host_bytes

__all__ = ["Pair", "PairPlan", "make_pairs", "plan_pair"]

_PRODUCER_OFFSET, _CONSUMER_OFFSET = 128, 256  # in RingHeader, asserted by the layout header
_ALIGNMENT = 4096  # the parts of a pair never share a page: a backend may place them apart


@dataclass(frozen=True)
class PairPlan:
    """Offsets in bytes from the start of a pair; `nbytes` is the size of the whole."""

    control: int
    telemetry: int
    input: int
    output: int
    dead_letter: int
    nbytes: int


def plan_pair(spec: KernelSpec, dead_letters: int) -> PairPlan:
    """Lay out one pair: one page of blocks, then three rings."""
    at = _ALIGNMENT
    offsets = []
    for dtype, capacity in (
        (spec.message, spec.capacity),
        (spec.reply, spec.capacity),
        (spec.message, dead_letters),
    ):
        offsets.append(at)
        nbytes = Ring.nbytes_for(dtype, capacity)
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return PairPlan(0, 1024, offsets[0], offsets[1], offsets[2], at)


@dataclass(frozen=True)
class _Window:
    """A part of a kernel's memory, as :class:`Ring` takes it."""

    ptr: int
    nbytes: int
    owner: object
    zeroed: bool = True  # as every backend allocates


def _ends_at(header: int, owner: object) -> npt.NDArray[Any]:
    """View both indices of a ring."""
    words = {"names": ["tail", "head"], "formats": ["u8", "u8"]}
    dtype = np.dtype({**words, "offsets": [_PRODUCER_OFFSET, _CONSUMER_OFFSET]})  # type: ignore[call-overload]
    return np.ndarray((), dtype, buffer=host_bytes(header, HEADER, owner))


class Pair:
    """One ring pair from the host's side: both blocks and the host's ends."""

    def __init__(
        self, spec: KernelSpec, plan: PairPlan, dead_letters: int, memory: RingMemory, ptr: int
    ) -> None:
        def ring(offset: int, end: int, dtype: np.dtype[Any], capacity: int) -> Ring:
            return Ring(dtype, capacity, memory=_Window(ptr + offset, end - offset, memory))

        self.addresses = PairAddresses(
            control=ptr + plan.control,
            telemetry=ptr + plan.telemetry,
            input=ptr + plan.input,
            output=ptr + plan.output,
            dead_letter=ptr + plan.dead_letter,
        )
        self.control = ControlBlock.from_address(self.addresses.control, memory)
        self.telemetry = TelemetryBuffer.from_address(self.addresses.telemetry, memory)
        self._rings = (
            ring(plan.input, plan.output, spec.message, spec.capacity),
            ring(plan.output, plan.dead_letter, spec.reply, spec.capacity),
            ring(plan.dead_letter, plan.nbytes, spec.message, dead_letters),
        )
        self._input_ends = _ends_at(self.addresses.input, memory)
        output_ends = _ends_at(self.addresses.output, memory)
        self._answered = (
            (self._input_ends, "head"),
            (output_ends, "tail"),
            (output_ends, "head"),
        )
        shift = memory.device_ptr - memory.ptr
        self._describe_queue("input", ptr + plan.input + shift, spec.message, spec.capacity)
        self._describe_queue("output", ptr + plan.output + shift, spec.reply, spec.capacity)
        self.producer: Producer
        self.consumer: Consumer
        self.letters: Consumer

    def _describe_queue(self, name: str, header: int, dtype: np.dtype[Any], capacity: int) -> None:
        """Fill in where a ring is, as the kernel addresses it."""
        setattr(self.control, f"{name}_tail_ptr", header + _PRODUCER_OFFSET)
        setattr(self.control, f"{name}_head_ptr", header + _CONSUMER_OFFSET)
        setattr(self.control, f"{name}_buffer_ptr", header + HEADER)
        setattr(self.control, f"{name}_capacity", capacity)
        setattr(self.control, f"{name}_message_nbytes", dtype.itemsize)

    def attach(self, full: Full, spin_us: float, on_wait: Any, in_order: bool) -> None:
        """Make the host's ends; `in_order`: the kernel takes one message after the other."""
        self.producer = self._rings[0].producer(full)
        self.producer._native.allow_streaming(in_order)
        self.consumer = self._rings[1].consumer()
        self.letters = self._rings[2].consumer()
        for end in (self.producer, self.consumer):
            end.spin_us = spin_us
            end._native.on_wait = on_wait

    def waiting(self) -> int:
        """Return how many messages were sent and are not answered.

        The kernel says what it took some microseconds after its answers, which may be read by then.
        """
        # Before the tail: what is sent meanwhile counts, and none is below zero.
        answered = [int(ends[end]) for ends, end in self._answered]
        tail = int(self._input_ends["tail"])
        waiting = min((tail - index) % 2**64 for index in answered)
        return min(waiting, self.producer.capacity)

    @property
    def raw(self) -> tuple[int, int, int, int, int]:
        """The addresses as native code takes them."""
        a = self.addresses
        return (a.control, a.telemetry, a.input, a.output, a.dead_letter)

    def take_dead_letters(self) -> list[tuple[npt.NDArray[Any], int]]:
        """Return the messages whose handler returned a status, with it, and forget them."""
        count = self.letters._native.poll(self.letters.capacity)[1]
        messages = np.empty(count, self.letters.message)
        statuses = np.empty(count, np.int32)
        if count:
            self.letters.recv_into(messages, 0, statuses)
        return [(messages[i], int(statuses[i])) for i in range(count)]

    def close(self) -> None:
        """Close the host's ends."""
        for ring in self._rings:
            ring.close()


def make_pairs(
    spec: KernelSpec, dead_letters: int, memory: RingMemory, plan: PairPlan
) -> tuple[Pair, ...]:
    """Format the memory and return its pairs."""
    return tuple(
        Pair(spec, plan, dead_letters, memory, memory.ptr + number * plan.nbytes)
        for number in range(spec.rings)
    )
