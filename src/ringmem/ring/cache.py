"""Compiled handlers and loops on disk, found again by their content.

An entry is a file named by the digest of everything it was made from. It carries a digest of its
own, so that a damaged one is noticed and dropped, and it is replaced whole, so that processes can
share the directory. The cache is a convenience: where the disk refuses, things are compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from pathlib import Path

__all__ = ["MAX_NBYTES", "directory", "key_of", "load", "store", "version_of"]

MAX_NBYTES = 256 << 20  # some thousand kernels; the entries not used for longest go first
_MAGIC = b"ringmem1"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size


def directory() -> Path | None:
    """Return where entries are, or None where nothing is cached.

    ``RINGMEM_CACHE`` names it (``off`` for none); by default it is ``ringmem`` in the user's cache
    directory. A directory that somebody else could write to is not used: its entries are run.
    """
    wanted = os.environ.get("RINGMEM_CACHE", "")
    if wanted.lower() in ("off", "0", "none"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(wanted or os.path.join(base, "ringmem")).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if private else None


def key_of(kind: str, *parts: object) -> str:
    """Return the name of the entry for `parts`, whose ``repr`` must tell them apart."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(b"%d:" % len(data) + data)
    return f"{kind}-{digest.hexdigest()[:40]}"


@functools.cache
def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these that is installed, else None; imports none."""
    from importlib.metadata import PackageNotFoundError, version

    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def load(key: str) -> bytes | None:
    """Return an entry's content, or None. A damaged entry is removed."""
    where = directory()
    if where is None:
        return None
    path = where / key
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[_HEADER:]
    if data[:_HEADER] != _MAGIC + hashlib.sha256(content).digest():
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used just now
    return content


def store(key: str, content: bytes) -> None:
    """Keep an entry, and drop the oldest where the cache is too large."""
    where = directory()
    if where is None:
        return
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=where, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(content).digest() + content)
            os.replace(name, where / key)
        except BaseException:
            os.unlink(name)
            raise
        _trim(where)


def _trim(where: Path) -> None:
    entries = []
    for entry in os.scandir(where):
        with contextlib.suppress(OSError):  # another process removed it
            found = entry.stat(follow_symlinks=False)
            entries.append((found.st_mtime_ns, found.st_size, entry.path))
    total = sum(nbytes for _, nbytes, _ in entries)
    for _, nbytes, path in sorted(entries):
        if total <= MAX_NBYTES:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= nbytes
