"""Handlers and kernels that several tests use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringmem.native import _native
from ringmem.ring import NativeHandler, RingKernel

# Children that unpickle a handler need it under an importable name, so the tests do too.
sys.path.insert(0, str(Path(__file__).parent))
from handlers_for_tests import ECHO


@pytest.fixture
def kernel() -> Iterator[RingKernel]:
    """A running CPU kernel: reply word w is message word w times 3, plus w + 1."""
    with RingKernel(NativeHandler(_native.echo_handler(7)), message=ECHO, device="cpu") as kernel:
        yield kernel
