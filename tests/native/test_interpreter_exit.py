"""A thread that is in a callback of ours when the interpreter ends does not abort the process."""

import os
import subprocess
import sys

import pytest

# The callback comes back from its wait when the interpreter is ending, which then goes on for a while.
HEAD = """
import gc, sys, threading, time, types, warnings
import ringmem
from ringmem import simulate
from ringmem.native import _native

reached, ending = threading.Event(), threading.Event()

class Last:
    def __del__(self, end=ending.set, sleep=time.sleep):
        end()
        sleep(0.3)

def late(*_, wait=ending.wait, reached=reached.set):
    reached()
    wait()

def due(work):
    threading.Thread(target=work, daemon=True).start()
    assert reached.wait(10)
    sys.modules["last"] = types.ModuleType("last")  # no thread keeps that alive
    sys.modules["last"].last = Last()

device = simulate(capacity="256 MiB").devices[0]
"""

CALLBACKS = {
    "memory is out": """
pool = ringmem.Pool(device)
pool.add_out_of_memory_callback(late)
due(lambda: pool.allocate(1 << 30))
""",
    "progress of a sleep": """
tag = ringmem.residency.tag("a", device=device)
buffer = ringmem.empty(1000, "u1", device=device, allocator=tag)
due(lambda: tag.sleep(progress=late))
""",
    "a user's allocator": """
class Mine:
    def allocate(self, nbytes, stream):
        late()
    def deallocate(self, ptr, nbytes, stream):
        pass
due(lambda: ringmem.empty(1000, "u1", device=device, allocator=Mine()))
""",
    # Python's atexit waits for it, five seconds long.
    "a host function": """
stream = device.create_stream()
due(lambda: device.driver.launch_host_function(0, stream.handle, late))
""",
    "a warning of a finalizer": """
warnings.simplefilter("always")
warnings.showwarning = late
driver = _native.FaultyDriver(device.driver)
device = ringmem.devices_of(driver)[0]
def work():
    stream = device.create_stream()
    driver.fail("stream_destroy", times=100)
    del stream
due(work)
""",
}


@pytest.mark.parametrize("body", CALLBACKS.values(), ids=CALLBACKS)
def test_a_callback_may_be_under_way_when_the_interpreter_ends(body):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
