"""Virtual memory against a model: whatever the order of reserving, creating, mapping, unmapping and
releasing, each address shows the memory mapped there, and everything is given back at the end."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ringmem.native import _native as native
from ringmem.native.errors import DriverError

Access = native.Access
DEVICE = native.Location(id=0)
RANGE_GRAINS = 6
pytestmark = pytest.mark.timeout(120, method="thread")

pick = st.integers(0, 1 << 16)  # an index, taken modulo the number of candidates
grains = st.integers(1, 3)


@dataclass
class Memory:
    """Physical memory: what each granule holds, `None` where nothing was written yet."""

    content: list[int | None]
    handle: int | None  # None once released


@dataclass
class Model:
    ranges: list[int] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    mapped: dict[int, tuple[Memory, Access]] = field(default_factory=dict)


class VirtualMemory(RuleBasedStateMachine):
    driver: native.FaultyDriver

    def __init__(self) -> None:
        super().__init__()
        self.grain = self.driver.granularity(native.PhysicalProps())
        self.staging = self.driver.host_alloc(0, self.grain)
        self.model = Model()

    # --- where things are ------------------------------------------------------------------------

    def free_starts(self, count: int) -> list[int]:
        """Addresses of ranges at which `count` granules in a row are not mapped."""
        taken = {
            start + index * self.grain
            for start, (memory, _) in self.model.mapped.items()
            for index in range(len(memory.content))
        }
        return [
            base + first * self.grain
            for base in self.model.ranges
            for first in range(RANGE_GRAINS - count + 1)
            if not taken & {base + (first + index) * self.grain for index in range(count)}
        ]

    def reachable(self, access: tuple[Access, ...]) -> list[tuple[int, Memory, int]]:
        """(address, memory, granule) of all that the device may access in one of these ways."""
        return [
            (start + index * self.grain, memory, index)
            for start, (memory, given) in sorted(self.model.mapped.items())
            if given in access
            for index in range(len(memory.content))
        ]

    def held(self) -> list[Memory]:
        return [memory for memory in self.model.memories if memory.handle is not None]

    def orphans(self) -> list[int]:
        return sorted(start for start, (m, _) in self.model.mapped.items() if m.handle is None)

    def large(self) -> list[int]:
        return sorted(start for start, (m, _) in self.model.mapped.items() if len(m.content) > 1)

    def unused_ranges(self) -> list[int]:
        nbytes = RANGE_GRAINS * self.grain
        return [
            base
            for base in self.model.ranges
            if not any(base <= start < base + nbytes for start in self.model.mapped)
        ]

    # --- rules -----------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        for _ in range(2):
            self.reserve()
        for count in (1, 2, 3):
            self.create(count)

    @precondition(lambda self: len(self.model.ranges) < 4)
    @rule()
    def reserve(self) -> None:
        self.model.ranges.append(self.driver.address_reserve(RANGE_GRAINS * self.grain))

    @precondition(lambda self: self.unused_ranges())
    @rule(which=pick)
    def free_range(self, which: int) -> None:
        unused = self.unused_ranges()
        base = unused[which % len(unused)]
        self.driver.address_free(base, RANGE_GRAINS * self.grain)
        self.model.ranges.remove(base)

    @precondition(lambda self: len(self.held()) < 6)
    @rule(count=grains)
    def create(self, count: int) -> None:
        handle = self.driver.mem_create(count * self.grain, native.PhysicalProps())
        self.model.memories.append(Memory([None] * count, handle))

    @precondition(lambda self: self.held())
    @rule(which=pick)
    def release(self, which: int) -> None:
        memory = self.held()[which % len(self.held())]
        self.driver.mem_release(memory.handle)
        memory.handle = None

    @precondition(lambda self: self.orphans())
    @rule(which=pick)
    def retain(self, which: int) -> None:
        """Gets back the handle of memory that lives only through its mappings."""
        start = self.orphans()[which % len(self.orphans())]
        self.model.mapped[start][0].handle = self.driver.mem_retain(start)

    @precondition(lambda self: self.held() and self.free_starts(1))
    @rule(which=pick, where=pick, access=st.sampled_from(list(Access)))
    def map(self, which: int, where: int, access: Access) -> None:
        memory = self.held()[which % len(self.held())]
        starts = self.free_starts(len(memory.content))
        if not starts:
            return
        start = starts[where % len(starts)]
        self.driver.mem_map(start, len(memory.content) * self.grain, memory.handle)
        self.model.mapped[start] = (memory, Access.none)
        if access != Access.none:
            self.set_access(start, access)

    @precondition(lambda self: self.held() and self.model.mapped)
    @rule(which=pick)
    def map_over_a_mapping(self, which: int) -> None:
        memory = self.held()[which % len(self.held())]
        start = sorted(self.model.mapped)[which % len(self.model.mapped)]
        with pytest.raises(DriverError):
            self.driver.mem_map(start, len(memory.content) * self.grain, memory.handle)

    @precondition(lambda self: self.model.mapped)
    @rule(which=pick, access=st.sampled_from(list(Access)))
    def change_access(self, which: int, access: Access) -> None:
        self.set_access(sorted(self.model.mapped)[which % len(self.model.mapped)], access)

    def set_access(self, start: int, access: Access) -> None:
        memory, _ = self.model.mapped[start]
        self.driver.synchronize(0)
        self.driver.mem_set_access(start, len(memory.content) * self.grain, [(DEVICE, access)])
        self.model.mapped[start] = (memory, access)

    @precondition(lambda self: self.model.mapped)
    @rule(which=pick, count=st.integers(1, 4))
    def unmap_a_run(self, which: int, count: int) -> None:
        """One call for up to `count` mappings that lie side by side."""
        start = end = sorted(self.model.mapped)[which % len(self.model.mapped)]
        run = []
        while end in self.model.mapped and len(run) < count:
            run.append(end)
            end += len(self.model.mapped[end][0].content) * self.grain
        self.driver.synchronize(0)
        self.driver.mem_unmap(start, end - start)
        for key in run:
            del self.model.mapped[key]

    @precondition(lambda self: self.large())
    @rule(which=pick)
    def unmap_a_part(self, which: int) -> None:
        start = self.large()[which % len(self.large())]
        with pytest.raises(DriverError):
            self.driver.mem_unmap(start + (which % 2) * self.grain, self.grain)

    @precondition(lambda self: self.reachable((Access.readwrite,)))
    @rule(which=pick, value=st.integers(0, 255))
    def write(self, which: int, value: int) -> None:
        places = self.reachable((Access.readwrite,))
        address, memory, index = places[which % len(places)]
        self.driver.fill_async(0, address, value, 1, self.grain)
        memory.content[index] = value

    @precondition(lambda self: self.reachable((Access.read, Access.readwrite)))
    @rule(which=pick)
    def read(self, which: int) -> None:
        places = self.reachable((Access.read, Access.readwrite))
        address, memory, index = places[which % len(places)]
        self.driver.copy_async(0, self.staging, address, self.grain)
        self.driver.stream_synchronize(0, 0)
        value = memory.content[index]
        found = ctypes.string_at(self.staging, self.grain)
        assert value is None or found == bytes([value]) * self.grain

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def access_is_as_set(self) -> None:
        for start, (_, access) in self.model.mapped.items():
            assert self.driver.mem_get_access(start, DEVICE) == access

    @invariant()
    def the_driver_has_what_the_model_has(self) -> None:
        live = self.driver.live
        assert live["address_range"] == len(self.model.ranges)
        assert live["mapping"] == len(self.model.mapped)
        assert live["physical"] == sum(m.handle is not None for m in self.model.memories)

    def teardown(self) -> None:
        self.driver.synchronize(0)
        for start, (memory, _) in self.model.mapped.items():
            self.driver.mem_unmap(start, len(memory.content) * self.grain)
        for memory in self.model.memories:
            if memory.handle is not None:
                self.driver.mem_release(memory.handle)
        for base in self.model.ranges:
            self.driver.address_free(base, RANGE_GRAINS * self.grain)
        self.driver.host_free(0, self.staging)
        assert not any(self.driver.live.values())
        if self.driver.platform == "cpu":
            info = self.driver.memory_info(0)
            assert info.free == info.total


def test_virtual_memory_does_as_its_model(driver: native.Driver) -> None:
    if not driver.attribute(0, native.Attribute.virtual_memory_management):
        pytest.skip("the device lacks the capability virtual_memory_management")

    class Machine(VirtualMemory):
        pass

    Machine.driver = native.FaultyDriver(driver)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
