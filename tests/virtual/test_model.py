"""Random operations against plain NumPy models; the content is compared after every step.

On the CPU device with small pages, and on a GPU.
"""

import time
import unittest

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ringmem
from ringmem import InvalidValueError
from ringmem.native import _native
from ringmem.virtual import GrowableBuffer, SparseBuffer


def assert_all_free(device):
    """The mapping thread may still be giving back what a close left to it."""
    deadline = time.monotonic() + 10
    while (memory := device.memory_info()).free != memory.total:
        assert time.monotonic() < deadline, memory
        time.sleep(0.001)


MOST = 48  # pages


class Place:
    """A simulated device of its own, where everything must be free in the end."""

    page = 4096

    def make_device(self):
        return ringmem.devices_of(_native.HostDriver("granularity=4096,capacity=1MiB"))[0]

    def assert_all_free(self):
        assert_all_free(self.device)


class Gpu:
    """The first GPU, which others may use too."""

    page = 2 << 20

    def make_device(self):
        return ringmem.Device("cuda:0")

    def assert_all_free(self):
        assert self.buffer.closed


class GrowableModel(Place, RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.device = self.make_device()
        self.step = self.page // 4  # bytes; sizes need not be whole pages
        self.buffer = GrowableBuffer(
            MOST * self.page,
            device=self.device,
            max_handle_nbytes=4 * self.page,
            shareable=False,
        )
        self.ptr = self.buffer.ptr
        self.model = np.empty(0, np.uint8)
        self.value = 0
        self.views = []

    @rule(size=st.integers(0, MOST * 4))
    def resize(self, size):
        nbytes = size * self.step
        pinned = max((len(model) for _, model in self.views), default=0)
        if nbytes < pinned:
            with pytest.raises(InvalidValueError):
                self.buffer.resize(nbytes)
            return
        old = len(self.model)
        self.buffer.resize(nbytes)
        self.model = self.model[:nbytes].copy()
        if nbytes > old:  # new bytes are undefined: define them
            self.value = (self.value + 1) % 256
            self.buffer.view()[old:].fill(self.value)
            new = np.full(nbytes - old, self.value, np.uint8)
            self.model = np.concatenate([self.model, new])

    @rule(pages=st.integers(0, MOST))
    def reserve_ahead(self, pages):
        self.buffer.reserve_ahead(pages * self.page)

    @rule()
    def settle(self):
        self.buffer.settle()

    @precondition(lambda self: len(self.model) > 0)
    @rule(data=st.data())
    def write(self, data):
        start = data.draw(st.integers(0, len(self.model) - 1))
        stop = data.draw(st.integers(start + 1, len(self.model)))
        self.value = (self.value + 1) % 256
        self.buffer.view()[start:stop].fill(self.value)
        self.model[start:stop] = self.value

    @rule()
    def take_view(self):
        if len(self.views) < 3:
            self.views.append((self.buffer.view(), self.model))

    @precondition(lambda self: self.views)
    @rule()
    def drop_view(self):
        self.views.pop()

    @invariant()
    def holds_what_the_model_holds(self):
        assert self.buffer.ptr == self.ptr
        assert self.buffer.nbytes == len(self.model)
        assert self.buffer.nbytes <= self.buffer.committed <= self.buffer.reserved
        assert np.array_equal(self.buffer.view().to_numpy(), self.model)
        for view, model in self.views:
            assert view.to_numpy().shape == model.shape

    def teardown(self):
        self.views.clear()
        self.buffer.close()
        self.device.default_stream.synchronize()
        self.assert_all_free()


class SparseModel(Place, RuleBasedStateMachine):
    read_zero = False

    def __init__(self):
        super().__init__()
        self.device = self.make_device()
        self.buffer = SparseBuffer(
            MOST * self.page,
            device=self.device,
            read_zero=self.read_zero,
            cache_nbytes=4 * self.page,
        )
        self.model = {}
        self.value = 0

    @rule(pages=st.sets(st.integers(0, MOST - 1), min_size=1, max_size=10))
    def map(self, pages):
        if pages & self.model.keys():
            with pytest.raises(InvalidValueError):
                self.buffer.map(pages)
            return
        self.buffer.map(pages)
        for page in pages:
            self.value = self.value % 255 + 1
            self.rows(page).fill(self.value)
            self.model[page] = self.value

    @rule(pages=st.sets(st.integers(0, MOST - 1), min_size=1, max_size=10))
    def unmap(self, pages):
        if pages - self.model.keys():
            with pytest.raises(InvalidValueError):
                self.buffer.unmap(pages)
            return
        self.buffer.unmap(pages)
        for page in pages:
            del self.model[page]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def unmap_mapped(self, data):
        self.unmap(data.draw(st.sets(st.sampled_from(sorted(self.model)), min_size=1)))

    @rule()
    def settle(self):
        self.buffer.settle()

    def rows(self, page):
        return self.buffer.view(page * self.page, (page + 1) * self.page)

    @invariant()
    def holds_what_the_model_holds(self):
        assert {page for run in self.buffer.mapped for page in run} == self.model.keys()
        for page, value in self.model.items():
            assert np.all(self.rows(page).to_numpy() == value)

    @invariant()
    def reads_zero_elsewhere(self):
        if not self.read_zero:
            return
        self.buffer.settle()
        target = np.empty(MOST * self.page, np.uint8)
        self.device.driver.copy_async(0, target.ctypes.data, self.buffer.ptr, target.nbytes, 0)
        self.device.default_stream.synchronize()
        expected = [self.model.get(page, 0) for page in range(MOST)]
        assert target[:: self.page].tolist() == expected

    def teardown(self):
        self.buffer.close()
        self.device.default_stream.synchronize()
        self.assert_all_free()


class GuardedSparseModel(SparseModel):
    read_zero = True


class GpuGrowableModel(Gpu, GrowableModel):
    pass


class GpuSparseModel(Gpu, SparseModel):
    pass


class GpuGuardedSparseModel(Gpu, GuardedSparseModel):
    pass


_few = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGrowableModel = GrowableModel.TestCase
TestGrowableModel.settings = _few
TestSparseModel = SparseModel.TestCase
TestSparseModel.settings = _few
TestGuardedSparseModel = GuardedSparseModel.TestCase
TestGuardedSparseModel.settings = _few


def on_a_gpu(model):
    """The test of a model, skipped where there is no GPU; fewer examples, since pages are large."""

    class Case(model.TestCase):
        settings = settings(_few, max_examples=8)

        @classmethod
        def setUpClass(cls):
            if not ringmem.devices("cuda"):
                raise unittest.SkipTest("there is no CUDA device")

    return pytest.mark.cuda(Case)


TestGpuGrowableModel = on_a_gpu(GpuGrowableModel)
TestGpuSparseModel = on_a_gpu(GpuSparseModel)
TestGpuGuardedSparseModel = on_a_gpu(GpuGuardedSparseModel)
