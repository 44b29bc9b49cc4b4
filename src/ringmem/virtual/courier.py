"""The Unix socket over which a process hands descriptors of its memory to other processes.

One daemon thread listens, from the first :meth:`Courier.offer` on. A connection brings a token of
32 random bytes and gets the descriptors that belong to it, in batches of 253 (the kernel's bound
for one message). Only processes of the same user are served, and only such a server is believed:
both ends ask the kernel who the other one is (``SO_PEERCRED``). The address is abstract, so nothing
is left behind when a process dies; with ``RINGMEM_SOCKET_DIR`` set it is a file in that folder, for
containers that share a folder but no network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from ringmem.native import errors
from ringmem.native.errors import ClosedError, InvalidValueError, RingmemError
from ringmem.native.locks import Lock

__all__ = ["Offer", "courier", "fetch"]

_GREETING = b"ringmem-attach-1"
_TOKEN_NBYTES = 32
_BATCH = 253  # SCM_MAX_FD of the Linux kernel
_REPLY_NBYTES = 4096
_SERVER_TIMEOUT_S = 10.0
_USED_UP = "it was used as often as it may be"
_RETIRED_KEPT = 1024


@dataclass
class Offer:
    """Something to fetch with a token: a way to open its descriptors, so and so often.

    `open` returns new descriptors that the courier closes after sending. It raises a
    :class:`RingmemError` when what was offered is no longer there.
    """

    open: Callable[[], list[int]]
    uses: int
    token: bytes = field(default_factory=lambda: secrets.token_bytes(_TOKEN_NBYTES), repr=False)
    finalizer: weakref.finalize[[bytes, str], object] | None = None  # of what is offered


class Courier:
    """The listening end in this process; see :func:`courier`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._offers: dict[bytes, Offer] = {}
        self._retired: dict[bytes, str] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = _bind(self._listener)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="ringmem-courier", daemon=True).start()

    def offer(self, offer: Offer) -> None:
        """Serve an offer from now on."""
        with self._lock:
            self._offers[offer.token] = offer

    def retire(self, token: bytes, why: str) -> bool:
        """Serve it no longer, and say why to those who ask. False if it was not on offer."""
        with self._lock:
            offer = self._offers.pop(token, None)
            if offer is not None:
                if offer.finalizer is not None:
                    offer.finalizer.detach()
                self._retired[token] = why
                while len(self._retired) > _RETIRED_KEPT:
                    del self._retired[next(iter(self._retired))]
        return offer is not None

    def close(self) -> None:
        """Close the listening socket (in a forked child: only this process's copy)."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="ringmem-courier", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        # A peer that dies or misbehaves is its own problem; the kernel takes back what was sent.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_SERVER_TIMEOUT_S)
            request = connection.recv(256)
            if _peer_uid(connection) != os.geteuid():
                _reply(connection, {"refused": "user"})
                return
            if len(request) != len(_GREETING) + _TOKEN_NBYTES or not request.startswith(_GREETING):
                _reply(connection, {"refused": "protocol"})
                return
            self._answer(connection, request[len(_GREETING) :])

    def _answer(self, connection: socket.socket, token: bytes) -> None:
        with self._lock:
            offer = self._offers.get(token)
            retired = self._retired.get(token)
            if offer is not None and offer.uses > 0:
                offer.uses -= 1
            elif offer is not None:  # the last use is being sent
                offer, retired = None, _USED_UP
        if offer is None:
            _reply(connection, {"refused": "stale" if retired else "unknown", "why": retired})
            return
        sent = False
        try:
            sent = _send(connection, offer)
        finally:
            if not sent:
                with self._lock:
                    offer.uses += 1
            elif offer.uses == 0:
                self.retire(token, _USED_UP)


def _send(connection: socket.socket, offer: Offer) -> bool:
    try:
        descriptors = offer.open()
    except RingmemError as error:
        _reply(connection, {"refused": "stale", "why": str(error)})
        return False
    try:
        _reply(connection, {"count": len(descriptors)})
        for start in range(0, len(descriptors), _BATCH):
            batch = descriptors[start : start + _BATCH]
            socket.send_fds(connection, [struct.pack("<I", len(batch))], batch)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True


def fetch(address: str, token: bytes, timeout_s: float) -> list[int]:
    """Return the descriptors that belong to `token`; they are the caller's to close.

    Raises
    ------
    ClosedError
        The offer is gone, or the process that made it.
    InvalidValueError
        There never was such a token, or the other process is another user's.
    TimeoutError
        The time was up.
    """
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(_raw(address))
            if _peer_uid(connection) != os.geteuid():
                raise InvalidValueError("ticket: the process that offers it is another user's")
            connection.sendall(_GREETING + token)
            count = _accepted(connection.recv(_REPLY_NBYTES))
            while len(descriptors) < count:
                message, batch, flags, _ = socket.recv_fds(
                    connection, 16, _BATCH, socket.MSG_CMSG_CLOEXEC
                )
                descriptors += batch
                if flags & socket.MSG_CTRUNC:
                    raise OSError(
                        "descriptors were lost: raise the limit on open files (ulimit -n)"
                    )
                if not message:
                    raise ConnectionResetError("the owner ended while it was sending")
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, TimeoutError):
            raise errors.TimeoutError(f"the owner did not answer within {timeout_s} s") from None
        if isinstance(error, ConnectionError | FileNotFoundError):
            raise ClosedError(f"ticket: the process that made it is gone ({error})") from None
        raise
    return descriptors


def _accepted(message: bytes) -> int:
    if not message:
        raise ConnectionResetError("the owner ended before it answered")
    reply = json.loads(message)
    refused = reply.get("refused")
    if refused is None:
        return int(reply["count"])
    if refused == "stale":
        raise ClosedError(f"ticket is stale: {reply.get('why')}")
    if refused == "user":
        raise InvalidValueError("ticket: its memory is another user's")
    raise InvalidValueError(f"ticket is not one of the owner's ({refused} token)")


def _reply(connection: socket.socket, reply: dict[str, object]) -> None:
    connection.sendall(json.dumps(reply).encode()[:_REPLY_NBYTES])


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])


def _raw(address: str) -> str:
    """An abstract address is written with a leading @, as the kernel's tools do."""
    return "\0" + address[1:] if address.startswith("@") else address


def _bind(listener: socket.socket) -> str:
    name = f"ringmem-{os.getpid()}-{secrets.token_hex(8)}"
    folder = os.environ.get("RINGMEM_SOCKET_DIR")
    address = os.path.join(folder, name + ".sock") if folder else "@" + name
    listener.bind(_raw(address))
    if folder:
        os.chmod(address, 0o600)
        weakref.finalize(listener, _remove, address, os.getpid())
    return address


def _remove(address: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(address)


_current: Courier | None = None
_current_lock = Lock()
_registered = False


def courier() -> Courier:
    """Return this process's courier; the first call starts it."""
    global _current, _registered
    with _current_lock:
        if _current is None:
            _current = Courier()
            if not _registered:
                os.register_at_fork(after_in_child=_forget)
                _registered = True
        return _current


def _forget() -> None:
    """In a forked child: the listening socket is the parent's, and there is no thread here."""
    global _current
    if _current is not None:
        _current.close()
    _current = None
