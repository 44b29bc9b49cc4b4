"""What operating system this really is: native Linux, WSL1, WSL2, Windows, macOS.

Collecting the facts (:func:`collect_platform_facts`) and judging them (:func:`classify`) are
apart, so that every branch is tested from recorded facts.

The markers, in order of weight:

- The kernel's *release* (``/proc/sys/kernel/osrelease``). WSL1 is no Linux kernel and says
  ``4.4.0-19041-Microsoft``; WSL2's own kernel says ``5.15.90.1-microsoft-standard-WSL2``.
- ``/dev/dxg``, the paravirtualized GPU of WSL2; WSL1 has none. A custom kernel has it too.
- ``WSLInterop`` in binfmt_misc and ``/run/WSL``: WSL's init made them, whatever the kernel.
- ``WSL_DISTRO_NAME``, ``WSL_INTEROP``: weak, since an environment can be copied anywhere.

``/proc/version`` decides nothing: it also holds the names of the builder's host and compiler, which
may contain "microsoft" on any kernel (Azure's build machines).
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

__all__ = ["PlatformFacts", "PlatformKind", "classify", "collect_platform_facts"]

_WSL1_RELEASE = re.compile(r"^\d+\.\d+\.\d+-\d+-Microsoft$")
_WSL2_RELEASE = re.compile(r"-microsoft-standard(-WSL2)?\b", re.ASCII)


class PlatformKind(Enum):
    """Where the process runs, as far as it matters to memory."""

    NATIVE_LINUX = "native Linux"
    WSL1 = "WSL1"
    WSL2 = "WSL2"
    WINDOWS = "Windows"
    MACOS = "macOS"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class PlatformFacts:
    """What was seen of the platform; the defaults are a Linux with no marker.

    Attributes
    ----------
    system : str
        ``platform.system()``.
    osrelease : str
        ``/proc/sys/kernel/osrelease``.
    proc_version : str
        ``/proc/version``; for reports only.
    has_dxg : bool
        ``/dev/dxg`` exists.
    has_wsl_interop : bool
        ``WSLInterop`` (or ``WSLInterop-late``) is registered in binfmt_misc.
    has_run_wsl : bool
        ``/run/WSL`` exists.
    wsl_distro_name, wsl_interop : str or None
        The environment variables.
    """

    system: str = "Linux"
    osrelease: str = ""
    proc_version: str = ""
    has_dxg: bool = False
    has_wsl_interop: bool = False
    has_run_wsl: bool = False
    wsl_distro_name: str | None = None
    wsl_interop: str | None = None


def collect_platform_facts() -> PlatformFacts:
    """Look at this machine. A file that cannot be read counts as absent."""
    binfmt = Path("/proc/sys/fs/binfmt_misc")
    return PlatformFacts(
        system=platform.system(),
        osrelease=_read("/proc/sys/kernel/osrelease"),
        proc_version=_read("/proc/version"),
        has_dxg=os.path.exists("/dev/dxg"),
        has_wsl_interop=any((binfmt / n).exists() for n in ("WSLInterop", "WSLInterop-late")),
        has_run_wsl=os.path.exists("/run/WSL"),
        wsl_distro_name=os.environ.get("WSL_DISTRO_NAME"),
        wsl_interop=os.environ.get("WSL_INTEROP"),
    )


def classify(facts: PlatformFacts) -> tuple[PlatformKind, str]:
    """Return the platform and the reason, in one sentence."""
    other = {"Windows": PlatformKind.WINDOWS, "Darwin": PlatformKind.MACOS}.get(facts.system)
    if other is not None:
        return other, f"the system is {facts.system}"
    if facts.system != "Linux":
        return PlatformKind.UNKNOWN, f"the system is {facts.system or 'unnamed'}"
    if _WSL2_RELEASE.search(facts.osrelease):
        return PlatformKind.WSL2, f"the kernel's release is {facts.osrelease}, WSL2's own"
    if _WSL1_RELEASE.match(facts.osrelease) and not facts.has_dxg:
        return PlatformKind.WSL1, f"the kernel's release is {facts.osrelease}, and no /dev/dxg"
    return _classify_by_traces(facts)


def _classify_by_traces(facts: PlatformFacts) -> tuple[PlatformKind, str]:
    """Judge a Linux whose release says nothing: a custom WSL2 kernel, or native."""
    made_by_init = [
        name
        for name, seen in (
            ("WSLInterop in binfmt_misc", facts.has_wsl_interop),
            ("/run/WSL", facts.has_run_wsl),
        )
        if seen
    ]
    environment = [
        name
        for name, value in (
            ("WSL_DISTRO_NAME", facts.wsl_distro_name),
            ("WSL_INTEROP", facts.wsl_interop),
        )
        if value
    ]
    if facts.has_dxg and (made_by_init or environment):
        traces = ", ".join(["/dev/dxg", *made_by_init, *environment])
        return PlatformKind.WSL2, f"a kernel of its own under WSL2: {traces}"
    if len(made_by_init) == 2:
        return PlatformKind.WSL2, f"a kernel of its own under WSL2: {', '.join(made_by_init)}"
    alone = ["/dev/dxg"] if facts.has_dxg else [*made_by_init, *environment]
    doubt = f", and {', '.join(alone)} alone does not make it WSL" if alone else ""
    return PlatformKind.NATIVE_LINUX, f"the kernel's release is {facts.osrelease or '?'}{doubt}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
