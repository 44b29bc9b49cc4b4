"""A ring kernel in a child process: the rings are shared memory, so that only its end, by force if
need be, is all that a handler which never returns can cost.

The parent keeps rings and control blocks, beats the heart, and asks the child over a pipe for what
is not in them: compile, launch, state. No message passes through the pipe. On CUDA the context is
the child's, which registers the shared memory with its driver.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy.typing as npt

from ringmem.device import Device
from ringmem.native import _native
from ringmem.native.errors import InvalidValueError, KernelFailedError
from ringmem.ring.backend import KernelSpec, PairAddresses
from ringmem.ring.backends import backend_for
from ringmem.ring.cpu import SharedRingMemory

__all__ = ["IsolatedBackend"]

_ANSWER_S = 60.0  # compiling a handler takes seconds
_END_S = 30.0  # a driver takes some 0.3 s to clear away a kernel whose process was killed


class IsolatedBackend:
    """Runs a device's backend in a child (:class:`ringmem.ring.backend.Backend`).

    Parameters
    ----------
    device : Device
        Where the kernel is to run; the child opens it by its name.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._process: Any = None
        self._pipe: Connection | None = None
        self._numbers = itertools.count()  # of requests
        self._answers: dict[int, tuple[bool, Any]] = {}  # that came while another was waited for
        self._given_up: set[int] = set()  # requests whose answer nobody waits for any more
        self._busy = False  # a signal's handler may look while a request is under way
        self._memory: SharedRingMemory | None = None
        self._killed = False
        self.in_order = device.platform == "cpu"

    def allocate(self, nbytes: int) -> SharedRingMemory:
        """Memory that the child maps too."""
        if self._memory is not None:
            raise InvalidValueError("an isolated kernel has one memory")
        if self._pipe is None:
            raise InvalidValueError("the isolated kernel is not prepared")
        self._memory = SharedRingMemory.create(nbytes)
        number = self._send("map")
        send_handle(self._pipe, self._memory.fd, self._process.pid)
        self._memory.device_ptr = int(self._answer(number, "map"))
        return self._memory

    def prepare(self, handler: Any, spec: KernelSpec) -> None:
        """Start the child and let it compile."""
        if isinstance(getattr(handler, "address", None), int):
            raise InvalidValueError(
                f"handler={handler!r:.80} is an address of this process, where isolated=True does "
                "not run it; give a function of an importable module"
            )
        try:
            pickle.dumps(handler)
        except Exception as error:
            raise InvalidValueError(
                f"handler={handler!r:.80} cannot be sent to the child of isolated=True; give a "
                f"function of an importable module: {error}"
            ) from error
        context = multiprocessing.get_context("spawn")
        self._pipe, childs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(childs, self._device.name),
            name="ringmem-kernel",
            daemon=True,
        )
        process.start()
        self._process = process
        childs.close()
        try:
            self._ask("prepare", handler, spec)
        except KernelFailedError as error:
            raise KernelFailedError(
                f"{error}; a script that starts an isolated kernel does so below "
                "if __name__ == '__main__':, as the child imports it",
                error.reason,
            ) from None

    def start(self, pairs: Sequence[PairAddresses]) -> None:
        """Let the child launch."""
        assert self._memory is not None
        base = self._memory.ptr
        self._ask("start", [_moved(pair, -base) for pair in pairs])

    def read_state(self, ring: int) -> npt.NDArray[Any]:
        """A copy of one ring's state, from the child."""
        state: npt.NDArray[Any] = self._ask("read_state", ring)
        return state

    def write_state(self, ring: int, value: npt.ArrayLike) -> None:
        """Replace one ring's state, in the child."""
        self._ask("write_state", ring, value)

    def ended(self) -> bool:
        """Whether the child has ended, or no thread runs in it."""
        if self._process is None or not self._process.is_alive():
            return True
        return not self._busy and bool(self._ask("ended"))

    def failure(self) -> BaseException | None:
        """That the child has ended, however, or what failed in it."""
        if self._process is None:
            return None
        if not self._process.is_alive():
            return self._death()
        if self._busy:
            return None  # whoever is asking hears of it
        with contextlib.suppress(KernelFailedError):
            error: BaseException | None = self._ask("failure")
            return error
        return self._death()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of the child, or for the child."""
        if self._process is None or not self._process.is_alive():
            return True
        return bool(self._ask("join", timeout_s))

    def kill(self) -> None:
        """End the child, whatever it does."""
        if self._process is not None and self._process.is_alive():
            self._killed = True
            self._process.kill()
            self._process.join(_END_S)

    def close(self) -> None:
        """End the child. Idempotent."""
        pipe, self._pipe = self._pipe, None
        process, self._process = self._process, None
        if pipe is not None:
            pipe.close()  # the child sees the end of it and leaves
        if process is not None:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(_END_S)
            process.close()

    # --- inside ----------------------------------------------------------------------------------

    def _death(self) -> KernelFailedError:
        code = self._process.exitcode
        if code is None:
            self._process.join(1.0)
            code = self._process.exitcode
        how = f"status {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        who = ", ended by terminate(force=True)" if self._killed else ""
        return KernelFailedError(
            f"the process of the isolated kernel ended with {how}{who}; its state is lost", "killed"
        )

    def _ask(self, request: str, *arguments: Any) -> Any:
        if self._pipe is None:
            raise InvalidValueError("the isolated kernel is not prepared")
        busy, self._busy = self._busy, True
        try:
            return self._answer(self._send(request, *arguments), request)
        finally:
            self._busy = busy

    def _send(self, request: str, *arguments: Any) -> int:
        assert self._pipe is not None
        number = next(self._numbers)
        with contextlib.suppress(OSError):  # the child has ended: the answer says so
            self._pipe.send((number, request, pickle.dumps(arguments)))
        return number

    def _answer(self, number: int, request: str) -> Any:
        """Return the answer to one request; Ctrl-C may have left older ones in the pipe."""
        assert self._pipe is not None
        try:
            while number not in self._answers:
                if not self._pipe.poll(_ANSWER_S):
                    raise KernelFailedError(
                        f"the isolated kernel gave no answer to {request}", "killed"
                    )
                which, good, answer = self._pipe.recv()
                if which in self._given_up:
                    self._given_up.remove(which)
                else:
                    self._answers[which] = good, answer
        except (EOFError, OSError):
            raise self._death() from None
        except BaseException:
            self._given_up.add(number)
            raise
        good, answer = self._answers.pop(number)
        if not good:
            raise answer
        return answer


def _moved(pair: PairAddresses, by: int) -> PairAddresses:
    return PairAddresses(
        pair.control + by, pair.telemetry + by, pair.input + by, pair.output + by,
        pair.dead_letter + by,
    )  # fmt: skip


class _Child:
    """The other end of the pipe."""

    def __init__(self, pipe: Connection, device: str) -> None:
        self._pipe = pipe
        self._device = device
        self._made: Any = None
        self._memory: Any = None

    @property
    def _backend(self) -> Any:
        if self._made is None:  # on the first request, so that what it raises is an answer
            self._made = backend_for(Device(self._device), isolated=False)
        return self._made

    def map(self) -> int:
        """Map the parent's memory; returns where the kernel finds it."""
        descriptor = recv_handle(self._pipe)
        try:
            native = _native.SharedMemory.map(descriptor)
        finally:
            os.close(descriptor)
        self._memory = self._backend.adopt(native)
        return int(self._memory.device_ptr)

    def start(self, pairs: list[PairAddresses]) -> None:
        self._backend.start([_moved(pair, int(self._memory.ptr)) for pair in pairs])

    def failure(self) -> BaseException | None:
        error = self._backend.failure()
        return None if error is None else _portable(error)

    def answer(self, request: str, arguments: tuple[Any, ...]) -> Any:
        own: Callable[..., Any] | None = getattr(self, request, None)
        return (own or getattr(self._backend, request))(*arguments)


def _portable(error: BaseException) -> BaseException:
    """Return an error as it is if it survives the pipe, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return KernelFailedError(f"{type(error).__name__}: {error}")
    return error


def _serve(pipe: Connection, device: str) -> None:
    """Serve until the parent closes the pipe or ends. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = _Child(pipe, device)
    while True:
        try:
            number, request, packed = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # also with a handler that never returns
        try:
            arguments = pickle.loads(packed)
        except Exception as error:
            text = "the child of isolated=True cannot import the handler; give a function of an "
            pipe.send((number, False, InvalidValueError(f"{text}importable module: {error}")))
            continue
        try:
            answer = (number, True, child.answer(request, arguments))
        except Exception as error:
            answer = (number, False, _portable(error))
        with contextlib.suppress(OSError):
            pipe.send(answer)
