"""Captures of CUDA graphs, and the same rules on a CPU, where a FaultyDriver keeps them."""

import contextlib

import pytest

import ringmem
from ringmem.native import _native


class Room:
    """A device, two streams on which nothing is captured, and what is closed at the end."""

    def __init__(self, device, stack):
        self.device = device
        self.stack = stack
        self.stream = self.keep(device.create_stream())
        self.later = self.keep(device.create_stream())
        self.captured = self.keep(device.create_stream())

    def keep(self, closable):
        self.stack.callback(closable.close)
        return closable

    def begin(self, stream):
        """Capture in the global mode, the strictest."""
        if self.device.platform == "cpu":
            self.device.driver.begin_capture(self.device.ordinal, stream.handle)
            return
        cuda = pytest.importorskip("cuda.bindings.runtime")
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
        assert int(cuda.cudaStreamBeginCapture(stream.handle, mode)[0]) == 0

    def end(self, stream):
        """Return the status, 0 unless the capture is spoiled or incomplete, and the graph."""
        if self.device.platform == "cpu":
            try:
                self.device.driver.end_capture(self.device.ordinal, stream.handle)
            except ringmem.DriverError as error:
                return error.code, None
            return 0, None
        cuda = pytest.importorskip("cuda.bindings.runtime")
        error, graph = cuda.cudaStreamEndCapture(stream.handle)
        return int(error), graph

    @contextlib.contextmanager
    def capture(self, stream=None):
        """Capture a stream; yields what launches the graph. The CPU's work runs at once."""
        stream = stream or self.captured
        made = []

        def launch():
            for executable in made:
                assert int(cuda.cudaGraphLaunch(executable, stream.handle)[0]) == 0
            stream.synchronize()

        self.begin(stream)
        try:
            yield launch
        finally:
            status, graph = self.end(stream)
            assert status == 0
        if graph is None:
            return
        cuda = pytest.importorskip("cuda.bindings.runtime")
        error, executable = cuda.cudaGraphInstantiate(graph, 0)
        assert int(error) == 0, error
        made.append(executable)
        cuda.cudaGraphDestroy(graph)
        self.stack.callback(cuda.cudaGraphExecDestroy, executable)


@pytest.fixture
def room(platform):
    with contextlib.ExitStack() as stack:
        if platform == "cuda":
            yield Room(ringmem.Device("cuda:0"), stack)
            return
        driver = _native.FaultyDriver(_native.HostDriver("devices=1,capacity=2GiB"))
        yield Room(ringmem.devices_of(driver)[0], stack)
