"""A system that has no thread left: an error with a name, and everything works once it has some."""

from __future__ import annotations

import ctypes

import pytest
from handlers_for_tests import run_script

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "pthread_setattr_default_np"), reason="needs the GNU C library"
)

# A thread whose stack is as large as all addresses together cannot be made.
HEAD = """
import ctypes, gc, time
import handlers_for_tests as h
import ringmem
c = ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(256)
c.pthread_attr_init(attributes)

def stacks(nbytes):
    assert c.pthread_attr_setstacksize(attributes, ctypes.c_size_t(nbytes)) == 0
    assert c.pthread_setattr_default_np(attributes) == 0

def refused(request):
    stacks(1 << 47)
    try:
        request()
    except ringmem.DriverError as error:
        assert error.operation == "pthread_create", error.operation
    else:
        raise AssertionError("nothing was raised")
    finally:
        stacks(8 << 20)
"""


def works(body: str) -> None:
    done = run_script(HEAD + body, timeout=30)
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr


def test_a_kernel_that_got_no_thread_starts_later_and_leaves_nothing() -> None:
    works("""
kernel = h.native_echo()
refused(kernel.start)
kernel.close()
del kernel
gc.collect()
with h.native_echo() as kernel:
    time.sleep(0.1)  # the watchdog looks five times at all that it knows
    assert h.first(kernel.call(h.message(1))) == 4
kernel = h.native_echo()
refused(kernel.start)
with kernel:
    assert h.first(kernel.call(h.message(1))) == 4
print("works")
""")


def test_a_wait_that_got_no_thread_to_look_leaves_nothing() -> None:
    works("""
ring = ringmem.Ring("u8", 8)
producer, consumer = ring.producer(), ring.consumer()
refused(lambda: consumer.recv(timeout_s=0.2))

def deeper(n):
    try:
        return consumer.recv(timeout_s=0.02) if n == 0 else deeper(n - 1)
    except ringmem.TimeoutError:
        return None

for depth in range(0, 15, 3):
    assert deeper(depth) is None
producer.send([1])
assert consumer.recv(timeout_s=1).tolist() == [1]
print("works")
""")
