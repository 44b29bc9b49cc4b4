"""Why a ring kernel ended, from what it left in its control blocks and what its backend says."""

from __future__ import annotations

from collections.abc import Sequence

from ringmem.native.errors import CorruptedError, DriverError, KernelFailedError
from ringmem.native.layouts import ControlBlock
from ringmem.ring.backend import KernelSpec
from ringmem.ring.pairs import Pair
from ringmem.ring.settings import KernelSettings

__all__ = ["has_drained", "why_ended"]

_DRAINED, _ORPHANED, _CORRUPTED, _FAULTED = 2, 3, 4, 5  # EndReason of the layout header


def has_drained(control: ControlBlock) -> bool:
    """Whether a ring ended because all that was sent is answered."""
    return bool(control.has_terminated) and control.end_reason == _DRAINED


def why_ended(
    pairs: Sequence[Pair],
    failure: BaseException | None,
    spec: KernelSpec,
    settings: KernelSettings,
) -> BaseException | None:
    """Return the error that every further use of the kernel meets; None: the end was asked for."""
    if failure is not None:
        return _from_backend(failure)
    for ring, pair in enumerate(pairs):
        reason = pair.control.end_reason
        if reason == _CORRUPTED:
            return CorruptedError(
                f"ring {ring} holds what no correct peer writes; the kernel ended itself"
            )
        if reason == _ORPHANED:
            return KernelFailedError(
                f"ring {ring} ended itself: deadline_s={spec.deadline_s} was over, or no heartbeat "
                f"came for {settings.heartbeat_timeout_s} s",
                "orphaned",
            )
        if reason == _FAULTED:
            return KernelFailedError(
                f"the handler of ring {ring} wrote outside its state: what lies there is damaged, "
                "and so may be the state; check its indices",
                "faulted",
            )
    return None


def _from_backend(failure: BaseException) -> BaseException:
    if isinstance(failure, KernelFailedError):
        return failure
    reason = "driver" if isinstance(failure, DriverError) else "faulted"
    error = KernelFailedError(f"the kernel failed: {type(failure).__name__}: {failure}", reason)
    error.__cause__ = failure
    return error
