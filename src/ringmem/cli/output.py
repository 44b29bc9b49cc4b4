"""Standard output that cannot be written: one line on stderr and exit code 1, in every command."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

__all__ = ["checked_output"]

_FAILED = 1
# What write() answers for an output that takes no more. An error of a named file is not meant.
_UNWRITABLE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN, errno.EINVAL}
)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Flush standard output in the end, and end the process in order where that is not to be had.

    Raises
    ------
    SystemExit
        With code 1: it is closed, full, or its reader has gone (about which nobody wants a line).
    """
    if sys.stdout is None:
        raise _refused("it is closed")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        raise SystemExit(_FAILED) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _write_no_more()
        raise _refused(error.strerror or str(error)) from None


def _refused(reason: str) -> SystemExit:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"error: cannot write to standard output: {reason}", file=sys.stderr, flush=True)
    return SystemExit(_FAILED)


def _write_no_more() -> None:
    """Give the interpreter a place to flush to when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
