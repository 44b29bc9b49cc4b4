"""Kill the owner or the user of shared memory at random moments.

    python tests/virtual/sigkill_rounds.py 200            # on the CPU device
    python tests/virtual/sigkill_rounds.py 20 cuda:0      # on a GPU

This process has used no driver, so what it forks is as good as new. Every round it forks an owner,
which shares, grows and shrinks, and a user, which attaches over and over; one of them gets SIGKILL:
in three rounds of four while they exchange memory, else at any time from the start. The other must
have a valid view or a clear error, and nothing may be left: no socket, no descriptor, and no memory
of a GPU.
"""

import contextlib
import os
import pickle
import random
import select
import signal
import sys
import time

import numpy as np

import ringmem
from ringmem import ClosedError
from ringmem.virtual import GrowableBuffer, attach, set_recycle_limit

NBYTES = 6 << 20
LIMIT_S = 100.0  # of one step, on a machine that does much else


def pattern(nbytes):
    return (np.arange(nbytes) % 251).astype(np.uint8)


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def own(tickets, stop):
    """Share for ever, until `stop` is readable."""
    set_recycle_limit(0)  # so that descriptors can be counted
    buffer = GrowableBuffer(64 << 20, "uint8", DEVICE, shape=NBYTES, max_handle_nbytes=2 << 20)
    buffer.view().copy_from(pattern(NBYTES))
    buffer.device.synchronize()
    ticket = buffer.share(uses=1_000_000)
    with contextlib.suppress(BrokenPipeError), os.fdopen(tickets, "wb") as pipe:
        pickle.dump(ticket, pipe)
    os.set_blocking(stop, False)
    random.seed(os.getpid())
    few = open_descriptors()
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        buffer.resize(NBYTES + random.randrange(0, 32 << 20))
        try:
            if os.read(stop, 1) == b"":
                break
        except BlockingIOError:
            continue
    buffer.resize(NBYTES)
    buffer.settle()
    time.sleep(0.005)
    assert np.array_equal(buffer.view().to_numpy(), pattern(NBYTES))
    # A connection that died in the middle may be closed a moment later; handles come and go.
    assert open_descriptors() <= few + 8, (open_descriptors(), few)
    buffer.close()


def use(tickets, ready):
    """Attach until the owner is gone; what is attached then must still be right."""
    with os.fdopen(tickets, "rb") as pipe:
        try:
            ticket = pickle.load(pipe)
        except EOFError:
            return  # the owner was killed before it had a ticket
    expected = pattern(NBYTES)
    deadline = time.monotonic() + LIMIT_S
    kept = None
    few = None
    while time.monotonic() < deadline:
        try:
            shared = attach(ticket, DEVICE)
        except ClosedError:
            break
        assert np.array_equal(shared.view().to_numpy(), expected)
        if kept is not None:
            kept.close()
        kept = shared
        if few is None:
            few = open_descriptors()
            os.write(ready, b"!")
        assert open_descriptors() <= few + 8
    else:
        raise AssertionError("the owner never went")
    if kept is not None:
        assert np.array_equal(kept.view().to_numpy(), expected)
        kept.close()


def spawn(work, *arguments, close):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for descriptor in close:
            os.close(descriptor)
        work(*arguments)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def play(number):
    """One round; returns whether the two had exchanged memory when one was killed."""
    ticket_read, ticket_write = os.pipe()
    stop_read, stop_write = os.pipe()
    ready_read, ready_write = os.pipe()
    ours = (ticket_read, stop_write, ready_read)
    owner = spawn(own, ticket_write, stop_read, close=(*ours, ready_write))
    user = spawn(use, ticket_read, ready_write, close=(ticket_write, stop_read, *ours[1:]))
    for descriptor in (ticket_read, ticket_write, stop_read, ready_write):
        os.close(descriptor)
    exchanged = number % 4 != 3 and bool(select.select([ready_read], [], [], LIMIT_S)[0])
    time.sleep(random.uniform(0, 0.08))
    kill_owner = number // 4 % 2 == 0 if number % 4 == 3 else number % 2 == 0
    os.kill(owner if kill_owner else user, signal.SIGKILL)
    os.close(stop_write)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (owner, user)]
    os.close(ready_read)
    survivor = statuses[1] if kill_owner else statuses[0]
    victim = statuses[0] if kill_owner else statuses[1]
    assert survivor == 0, f"round {number}: the survivor ended with {survivor}"
    assert victim in (0, -signal.SIGKILL), f"round {number}: the victim ended with {victim}"
    with open("/proc/net/unix") as file:
        listeners = file.read()
    for pid in (owner, user):
        assert f"@ringmem-{pid}-" not in listeners, f"round {number}: a socket of {pid} is left"
    return exchanged


def free_memory():
    """Bytes free on the device, asked for in a process of its own."""
    read, write = os.pipe()

    def ask():
        os.write(write, str(ringmem.Device(DEVICE).memory_info().free).encode())

    pid = spawn(ask, close=())
    assert os.waitpid(pid, 0)[1] == 0
    free = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    return free


def all_given_back(free):
    """A killed process's memory is back within some hundred milliseconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if free_memory() >= free - NBYTES // 2:
            return True
        time.sleep(0.2)
    return False


def main(rounds):
    random.seed(1)
    few = open_descriptors()
    free = free_memory()
    exchanged = sum(play(number) for number in range(rounds))
    assert open_descriptors() == few
    assert exchanged >= rounds // 2, f"{exchanged} of {rounds} rounds exchanged memory"
    assert all_given_back(free), "memory of the device is lost"
    print(f"{rounds} rounds, {exchanged} in the middle of an exchange")


DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"

if __name__ == "__main__":
    main(int(sys.argv[1]))
