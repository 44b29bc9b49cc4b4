import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ringmem
from ringmem import (
    ClosedError,
    InvalidDeviceError,
    InvalidValueError,
    NotSupportedError,
    OutOfMemoryError,
    devices_of,
)
from ringmem.native import _native
from ringmem.virtual import GrowableBuffer, PhysicalMemory, attach
from ringmem.virtual.courier import courier


@pytest.fixture
def buffer(device, page):
    made = GrowableBuffer(
        (1024, page // 16), "float32", device, shape=20, max_handle_nbytes=2 * page
    )
    made.fill(1.5)
    device.synchronize()
    yield made
    made.close()


def test_an_attachment_is_the_same_memory(buffer, device):
    ticket = pickle.loads(pickle.dumps(buffer.share()))
    assert ticket.shape == buffer.shape
    assert ticket.nbytes == buffer.nbytes
    with attach(ticket, device) as shared:
        assert shared.shape == buffer.shape
        assert shared.dtype == buffer.dtype
        assert shared.size == buffer.size
        assert shared.ptr != buffer.ptr
        assert np.all(shared.view().to_numpy() == 1.5)
        shared.view().fill(2)
        device.synchronize()
        assert np.all(buffer.view().to_numpy() == 2)
    assert shared.closed


def test_an_attachment_outlives_its_owner(device, page):
    buffer = GrowableBuffer(4 * page, device=device, shape=4 * page)
    buffer.fill(9)
    shared = attach(buffer.share(), device)
    buffer.close()
    assert np.all(shared.view().to_numpy() == 9)
    shared.close()


def test_read_only_is_read_only(buffer, device):
    ticket = buffer.share(access="read")
    with pytest.raises(InvalidValueError, match="allows 'read'"):
        attach(ticket, device, access="readwrite")
    with attach(ticket, device) as shared:
        view = shared.view()
        assert np.all(view.to_numpy() == 1.5)
        with pytest.raises((InvalidValueError, NotSupportedError)):
            view.fill(1)
        location = _native.Location(_native.LocationKind.device, 0)
        assert device.driver.mem_get_access(shared.ptr, location) == _native.Access.read
        del view


def test_a_ticket_is_good_for_so_many_attachments(buffer, device):
    ticket = buffer.share(uses=2)
    first, second = attach(ticket, device), attach(ticket, device)
    with pytest.raises(ClosedError, match="stale"):
        attach(ticket, device)
    first.close()
    second.close()


def test_a_revoked_ticket_is_stale_and_says_so(buffer, device):
    ticket = buffer.share()
    assert ticket.revoke()
    assert not ticket.revoke()
    with pytest.raises(ClosedError, match="revoked"):
        attach(ticket, device)
    with pytest.raises(InvalidValueError, match="process"):
        dataclasses.replace(ticket, owner_pid=1).revoke()


def test_a_ticket_of_a_buffer_that_is_gone_is_stale(device, page):
    closed = GrowableBuffer(page, device=device, shape=page)
    ticket = closed.share()
    closed.close()
    with pytest.raises(ClosedError):
        attach(ticket, device)
    forgotten = GrowableBuffer(page, device=device, shape=page)
    ticket = forgotten.share()
    del forgotten
    with pytest.raises(ClosedError, match="gone"):
        attach(ticket, device)


def test_growth_after_sharing_is_not_seen_and_a_shrink_makes_stale(buffer, device):
    ticket = buffer.share(uses=9)
    buffer.resize(500)
    with attach(ticket, device) as shared:
        assert shared.shape[0] == 20
    buffer.resize(2)
    with pytest.raises(ClosedError, match="shrank"):
        attach(ticket, device)


def test_a_forged_ticket_is_refused(buffer, device):
    ticket = buffer.share()
    with pytest.raises(InvalidValueError, match="not one of"):
        attach(dataclasses.replace(ticket, token=os.urandom(32)), device)
    with pytest.raises(InvalidValueError, match="protocol"):
        attach(dataclasses.replace(ticket, token=b"short"), device)
    with pytest.raises(InvalidValueError, match="handles"):
        attach(dataclasses.replace(ticket, handle_nbytes=(1,)), device)


def test_a_ticket_with_other_sizes_maps_nothing(buffer, device):
    ticket = buffer.share(uses=9)
    wrong = tuple(2 * nbytes for nbytes in ticket.handle_nbytes)
    with pytest.raises(ringmem.RingmemError):
        attach(dataclasses.replace(ticket, handle_nbytes=wrong), device)
    attach(ticket, device).close()


def test_a_token_is_long_and_not_shown(buffer):
    ticket = buffer.share()
    other = buffer.share()
    assert len(ticket.token) == 32
    assert ticket.token != other.token
    assert repr(ticket.token) not in repr(ticket)


def test_a_peer_attaches_where_it_can_reach(buffer, pair):
    with attach(buffer.share(), pair[1]) as shared:
        assert shared.device is pair[1]
        assert np.all(shared.view().to_numpy() == 1.5)


def test_a_device_that_is_not_visible_is_named(buffer, page):
    other = devices_of(_native.HostDriver(f"granularity={page}"))[0]
    ticket = dataclasses.replace(buffer.share(), device_uuid="GPU-none")
    with pytest.raises(InvalidDeviceError, match="GPU-none"):
        attach(ticket, other)


@pytest.mark.parametrize(
    "arguments", [{"access": "write"}, {"uses": 0}, {"uses": -1}, {"access": "none"}]
)
def test_wrong_arguments_are_refused(buffer, arguments):
    with pytest.raises(InvalidValueError):
        buffer.share(**arguments)


def test_an_empty_buffer_cannot_be_shared(device):
    with (
        GrowableBuffer(10, device=device) as empty,
        pytest.raises(InvalidValueError, match="empty"),
    ):
        empty.share()


def test_physical_memory_is_shared_too(device, page):
    memory = PhysicalMemory.create(device, page)
    with attach(memory.share(), device) as shared:
        assert shared.shape == (page,)
        shared.view().fill(1)
        device.synchronize()


def test_shared_handles_are_not_recycled(device, page):
    from ringmem.virtual import set_recycle_limit

    set_recycle_limit(1 << 20)
    buffer = GrowableBuffer(8 * page, device=device, shape=8 * page, max_handle_nbytes=page)
    buffer.fill(1)
    shared = attach(buffer.share(), device)
    buffer.resize(0)
    buffer.settle()
    with GrowableBuffer(8 * page, device=device, shape=8 * page, max_handle_nbytes=page) as other:
        other.fill(2)
        device.synchronize()
        assert np.all(shared.view().to_numpy() == 1)
    shared.close()
    buffer.close()


def test_a_server_that_does_not_answer_is_a_timeout(buffer, device):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind("\0ringmem-test-mute-" + str(os.getpid()))
        mute.listen(1)
        ticket = dataclasses.replace(
            buffer.share(), address="@ringmem-test-mute-" + str(os.getpid())
        )
        with pytest.raises(ringmem.TimeoutError):
            attach(ticket, device, timeout_s=0.1)
    with pytest.raises(ClosedError, match="gone"):
        attach(ticket, device)


def test_the_time_for_an_answer_is_any_real_number_above_0(buffer, device):
    ticket = buffer.share()
    for bad in (0, -1, True, "x", float("nan")):
        with pytest.raises(InvalidValueError, match=f"timeout_s is {bad!r}: give seconds"):
            attach(ticket, device, timeout_s=bad)
    for endless in (np.float32(10), float("inf")):
        attach(buffer.share(), device, timeout_s=endless).close()


def test_garbage_on_the_socket_harms_nobody(buffer, device):
    address = "\0" + courier().address[1:]
    for message in (b"x", b"", os.urandom(200), b"ringmem-attach-1"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(address)
            if message:
                peer.sendall(message)
    attach(buffer.share(), device).close()


def test_many_handles_arrive_in_batches(page):
    device = devices_of(_native.HostDriver("granularity=4096,capacity=64MiB"))[0]
    nbytes = 600 * 4096
    with GrowableBuffer(nbytes, device=device, shape=nbytes, max_handle_nbytes=4096) as buffer:
        assert buffer.handles == 600
        buffer.fill(3)
        before = len(os.listdir("/proc/self/fd"))
        with attach(buffer.share(), device) as shared:
            assert np.all(shared.view().to_numpy() == 3)
        deadline = time.monotonic() + 5  # the courier closes its end in a thread of its own
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_descriptors_do_not_leak_when_attaching_fails(buffer, device, faulty):
    ticket = buffer.share(uses=50)
    attach(ticket, device).close()
    before = len(os.listdir("/proc/self/fd"))
    for operation in ("mem_import", "mem_map", "mem_set_access", "mem_export", "address_reserve"):
        faulty.fail(operation)
        with pytest.raises(ringmem.RingmemError):
            attach(ticket, device)
        faulty.clear()
    deadline = time.monotonic() + 5  # the courier closes its ends in threads of its own
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(os.listdir("/proc/self/fd")) <= before  # the first attachment's end may go late
    attach(ticket, device).close()


def test_attaching_when_memory_is_out_says_so(buffer, page):
    # An import is charged to the importing process's device.
    other = devices_of(_native.HostDriver(f"granularity={page},capacity={2 * page}"))[0]
    ticket = dataclasses.replace(buffer.share(), device_uuid=other.uuid)
    with pytest.raises(OutOfMemoryError):
        attach(ticket, other)


def test_threads_attach_at_once(buffer, device):
    ticket = buffer.share(uses=16)
    results = []

    def work():
        with attach(ticket, device) as shared:
            results.append(float(shared.view().to_numpy()[0, 0]))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.5] * 16


CHILD = """
import pickle, sys
import numpy as np
from ringmem.virtual import attach
ticket = pickle.load(sys.stdin.buffer)
with attach(ticket) as shared:
    assert np.all(shared.view().to_numpy() == 7)
    shared.view()[:10].fill(8)
    shared.device.synchronize()
print("done", shared.closed)
"""


@pytest.mark.parametrize("folder", [False, True])
def test_another_process_attaches(folder, tmp_path_factory):
    # A process of its own also as owner: the socket's kind is settled once a process.
    owner = """
import os, pickle, subprocess, sys
import numpy as np
from ringmem.virtual import GrowableBuffer
buffer = GrowableBuffer(1 << 24, "uint8", "cpu", shape=5 << 20)
buffer.fill(7)
buffer.device.synchronize()
child = subprocess.run([sys.executable, "-c", sys.argv[1]], input=pickle.dumps(buffer.share()),
                       capture_output=True, timeout=60)
assert child.returncode == 0, child.stderr.decode()
array = buffer.view().to_numpy()
assert np.all(array[:10] == 8) and np.all(array[10:] == 7)
print(child.stdout.decode())
"""
    environment = dict(os.environ)
    sockets = tmp_path_factory.mktemp("s")  # short: the path of a socket has room for 107 bytes
    if folder:
        environment["RINGMEM_SOCKET_DIR"] = str(sockets)
    result = subprocess.run(
        [sys.executable, "-c", owner, CHILD],
        capture_output=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert b"done True" in result.stdout
    assert list(sockets.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_another_user_is_refused_by_both_ends():
    program = """
import contextlib, os, pickle, socket
from ringmem import InvalidValueError
from ringmem.virtual import GrowableBuffer, attach
read, write = os.pipe()
pid = os.fork()  # before a driver is in use
if pid == 0:
    os.setuid(65534)
    ticket = pickle.loads(os.read(read, 65536))
    try:
        attach(ticket)
    except InvalidValueError as error:
        assert "another user" in str(error)
    else:
        os._exit(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(chr(0) + ticket.address[1:])
        with contextlib.suppress(BrokenPipeError):  # it may be refused before it asks
            raw.sendall(b"ringmem-attach-1" + ticket.token)
        try:
            answer, descriptors, _, _ = socket.recv_fds(raw, 4096, 16)
        except ConnectionResetError:  # the refusal went with the connection
            answer, descriptors = b"user", []
    os._exit(0 if b"user" in answer and not descriptors else 2)
buffer = GrowableBuffer(1 << 20, "uint8", "cpu", shape=100)
ticket = buffer.share()
os.write(write, pickle.dumps(ticket))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
attach(ticket).close()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False
    )
    assert result.stdout.strip() == b"0", result.stderr.decode()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_either_side_may_be_killed_at_any_moment():
    script = os.path.join(os.path.dirname(__file__), "sigkill_rounds.py")
    rounds = int(os.environ.get("RINGMEM_SIGKILL_ROUNDS", "200"))
    result = subprocess.run(
        [sys.executable, script, str(rounds)], capture_output=True, timeout=380, check=False
    )
    assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()
    assert f"{rounds} rounds".encode() in result.stdout


@pytest.mark.parametrize("ticket", [5, None, "ticket"])
def test_what_is_no_ticket_is_refused_by_name(ticket):
    with pytest.raises(InvalidValueError, match="ticket is .*share"):
        attach(ticket)


def test_a_forked_child_is_told_to_be_spawned():
    code = """
import os, sys
from ringmem.virtual import GrowableBuffer, attach
with GrowableBuffer(4096, device="cpu", shape=10) as buffer:
    ticket = buffer.share()
    if (pid := os.fork()) == 0:
        try:
            attach(ticket)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    environment = {k: v for k, v in os.environ.items() if k != "RINGMEM_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert "InvalidDeviceError" in done.stdout, done.stderr
    assert "spawn" in done.stdout
