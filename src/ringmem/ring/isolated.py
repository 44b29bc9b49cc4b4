"""A ring kernel in a child process: the rings are shared memory, so that only its end, by force if
need be, is all that a handler which never returns can cost.

The parent keeps rings and control blocks, beats the heart, and asks the child over a pipe for what
is not in them: compile, launch, state. No message passes through the pipe. On CUDA the context is
the child's, which registers the shared memory with its driver.

A child may stand still: stopped, or busy with a handler that lets go of nothing. Whether the kernel
runs is looked at often, by whoever waits for a message, so such a look waits for no answer: until
one comes, what the child said before holds.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import time
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
_STATE_S = 10.0  # a copy, of whatever size
_LATE_S = 1.0  # to be told how a join went, after its time
_LOOK_S = 0.05  # an answer takes some 0.1 ms where nothing is in the way
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
        self._look: int | None = None  # a request to say how it stands, not answered yet
        self._ended = True  # as the child last said
        self._failed: BaseException | None = None  # likewise
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
        self._forget_look()
        self._ended, self._failed = False, None
        self._ask("start", [_moved(pair, -base) for pair in pairs])

    def read_state(self, ring: int) -> npt.NDArray[Any]:
        """A copy of one ring's state, from the child."""
        state: npt.NDArray[Any] = self._ask("read_state", ring, within_s=_STATE_S)
        return state

    def write_state(self, ring: int, value: npt.ArrayLike) -> None:
        """Replace one ring's state, in the child."""
        self._ask("write_state", ring, value, within_s=_STATE_S)

    def ended(self) -> bool:
        """Whether the child has ended, or no thread runs in it, as far as it said by now."""
        if not self._lives():
            return True
        self._see()
        return self._ended

    def failure(self) -> BaseException | None:
        """That the child has ended, however, or what failed in it, as far as it said by now."""
        if self._process is None:
            return None
        if self._process.is_alive():
            self._see()
        return self._failed if self._process.is_alive() else self._death()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of the child, or for the child; no answer: they run."""
        if not self._lives():
            return True
        self._forget_look()
        try:
            told = self._ask("join", timeout_s, within_s=timeout_s + _LATE_S)
        except KernelFailedError:
            return not self._lives()
        self._ended, self._failed = told
        return self._ended

    def kill(self) -> None:
        """End the child, whatever it does."""
        if self._lives():
            self._killed = True
            self._process.kill()
            self._process.join(_END_S)

    def close(self) -> None:
        """End the child. Idempotent, and can be done again where it was interrupted."""
        if self._pipe is not None:
            self._pipe.close()  # the child sees the end of it and leaves
        process = self._process
        if process is not None:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(_END_S)
            self._process = None
            process.close()
        self._pipe = None

    # --- inside ----------------------------------------------------------------------------------

    def _lives(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def _await_death(self) -> None:
        """Wait for a child that has ended, or closed its pipe and can be asked nothing any more."""
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)

    def _death(self) -> KernelFailedError:
        self._await_death()
        code = self._process.exitcode
        how = f"status {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        who = ", ended by terminate(force=True)" if self._killed else ""
        return KernelFailedError(
            f"the process of the isolated kernel ended with {how}{who}; its state is lost", "killed"
        )

    def _ask(self, request: str, *arguments: Any, within_s: float = _ANSWER_S) -> Any:
        if self._pipe is None:
            raise InvalidValueError("the isolated kernel is not prepared")
        busy, self._busy = self._busy, True
        try:
            return self._answer(self._send(request, *arguments), request, within_s)
        finally:
            self._busy = busy

    def _see(self) -> None:
        """Ask how the kernel stands. A late answer is for one of the next looks."""
        if self._busy or self._pipe is None:
            return  # whoever is asking hears of it
        self._busy = True
        try:
            patience_s = 0.0
            if self._look is None:
                self._look, patience_s = self._send("look"), _LOOK_S
            if not self._comes(self._look, patience_s):
                return
            number, self._look = self._look, None
            good, answer = self._answers.pop(number)
        except (EOFError, OSError):
            self._await_death()
            return
        except BaseException:
            self._forget_look()  # a signal's: its answer may be lost
            raise
        finally:
            self._busy = False
        if not good:
            raise answer
        self._ended, self._failed = answer

    def _forget_look(self) -> None:
        """What was asked before a start or a join says nothing of what comes after."""
        number, self._look = self._look, None
        if number is not None and self._answers.pop(number, None) is None:
            self._given_up.add(number)

    def _send(self, request: str, *arguments: Any) -> int:
        assert self._pipe is not None
        number = next(self._numbers)
        with contextlib.suppress(OSError):  # the child has ended: the answer says so
            self._pipe.send((number, request, pickle.dumps(arguments)))
        return number

    def _answer(self, number: int, request: str, within_s: float = _ANSWER_S) -> Any:
        """Return the answer to one request; Ctrl-C may have left older ones in the pipe."""
        try:
            if not self._comes(number, within_s):
                raise KernelFailedError(
                    f"the isolated kernel gave no answer to {request} within {within_s:g} s",
                    "killed",
                )
        except (EOFError, OSError):
            raise self._death() from None
        except BaseException:
            self._given_up.add(number)
            raise
        good, answer = self._answers.pop(number)
        if not good:
            raise answer
        return answer

    def _comes(self, number: int, within_s: float) -> bool:
        """Take answers out of the pipe until that of `number` is there, or the time is up."""
        assert self._pipe is not None
        deadline = time.monotonic() + within_s
        while number not in self._answers:
            if not self._pipe.poll(max(deadline - time.monotonic(), 0.0)):
                return False
            which, good, answer = self._pipe.recv()
            if which in self._given_up:
                self._given_up.remove(which)
            else:
                self._answers[which] = good, answer
        return True


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

    def look(self) -> tuple[bool, BaseException | None]:
        """Return whether no thread runs, and what failed."""
        ended = self._backend.ended()
        error = self._backend.failure()
        return bool(ended), None if error is None else _portable(error)

    def join(self, timeout_s: float) -> tuple[bool, BaseException | None]:
        self._backend.join(timeout_s)
        return self.look()

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
