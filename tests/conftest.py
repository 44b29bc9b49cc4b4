"""What tests of several floors share: platforms, and kernels that write and check memory."""

import functools
import importlib.util
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import ringmem

# A suite that was started in the background ignores SIGINT, and so would every process it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def cuda_devices(count):
    """The first CUDA devices; skips where there are not so many."""
    found = ringmem.devices("cuda")
    if len(found) < count:
        pytest.skip(f"needs {count} CUDA devices, there are {len(found)}")
    return found[:count]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def platform(request):
    """Each platform in turn; needs one device of it."""
    if request.param == "cuda":
        cuda_devices(1)
    return request.param


@pytest.fixture
def two(platform):
    """Two devices of each platform, which reach each other."""
    if platform == "cpu":
        with ringmem.simulate(devices=2, capacity="2 GiB") as simulation:
            yield simulation.devices
        return
    pair = cuda_devices(2)
    if not ringmem.can_access_peer(*pair) or not ringmem.can_access_peer(*reversed(pair)):
        pytest.skip("the devices cannot reach each other")
    yield pair


@pytest.fixture
def own_device(platform):
    """The first device of each platform; on the CPU a simulated one."""
    if platform == "cpu":
        with ringmem.simulate(capacity="2 GiB") as simulation:
            yield simulation.devices[0]
    else:
        yield cuda_devices(1)[0]


class Graph:
    """Work captured from a stream of a GPU, to be launched again and again."""

    def __init__(self, stream, submit):
        self.cuda = pytest.importorskip("cuda.bindings.runtime")
        self.stream = stream
        mode = self.cuda.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
        assert int(self.cuda.cudaStreamBeginCapture(stream.handle, mode)[0]) == 0
        try:
            submit()
        finally:
            error, graph = self.cuda.cudaStreamEndCapture(stream.handle)
        assert int(error) == 0, error
        error, self.executable = self.cuda.cudaGraphInstantiate(graph, 0)
        assert int(error) == 0, error
        self.cuda.cudaGraphDestroy(graph)

    def launch(self):
        assert int(self.cuda.cudaGraphLaunch(self.executable, self.stream.handle)[0]) == 0
        self.stream.synchronize()

    def close(self):
        self.cuda.cudaGraphExecDestroy(self.executable)


@pytest.fixture
def capture():
    """Captures what a function submits to a stream; in the global mode, the strictest."""
    made = []

    def capture(stream, submit):
        made.append(Graph(stream, submit))
        return made[-1]

    yield capture
    for graph in made:
        graph.close()


@pytest.fixture
def kernels(platform):
    """Makes a :class:`Kernels` of a device, which writes and checks memory by the device itself."""
    if platform == "cuda":
        pytest.importorskip("cuda.core")
    return _kernels_module().Kernels


@functools.cache
def _kernels_module():
    file = Path(__file__).parent.parent / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("ringmem_benchmark_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hammer:
    """Threads that start together and do their work again and again; made by the fixture."""

    seconds = 0.7  # how long work is repeated
    patience_s = 60  # a thread that has not come back by then hangs

    def together(self, *works):
        """Do each work once, in a thread of its own, from one barrier on. Returns the failures."""
        return self._run([lambda barrier, work=work: (barrier.wait(), work()) for work in works])

    def repeat(self, *works, seconds=None):
        """Do each ``work(round)`` again and again, in a thread of its own. Returns the failures.

        The first failure ends all of them.
        """
        over = threading.Event()
        length = self.seconds if seconds is None else seconds

        def body(barrier, work):
            barrier.wait()
            end, number = time.monotonic() + length, 0
            try:
                while time.monotonic() < end and not over.is_set():
                    work(number)
                    number += 1
            except BaseException:
                over.set()
                raise

        return self._run([lambda barrier, work=work: body(barrier, work) for work in works])

    def _run(self, bodies):
        barrier, failures = threading.Barrier(len(bodies)), []

        def guarded(body):
            try:
                body(barrier)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(b,), daemon=True) for b in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.patience_s)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        return failures


@pytest.fixture
def hammer():
    """A :class:`Hammer`; with a GIL it changes hands 500 times as often as usual meanwhile."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield Hammer()
    sys.setswitchinterval(before)
