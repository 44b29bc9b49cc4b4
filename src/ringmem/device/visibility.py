"""Memory visibility: when host and device see each other's stores to mapped memory.

The decision (:func:`decide`) is a pure function of recorded inputs; what it needs is collected by
:func:`decide_for`. It is conservative: where nothing vouches for the link, it says less, and an
echo test that succeeds can say more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ringmem.device.echo import EchoResult, run_echo
from ringmem.device.platform_facts import (
    PlatformFacts,
    PlatformKind,
    classify,
    collect_platform_facts,
)

if TYPE_CHECKING:
    from ringmem.device.capabilities import Capabilities
    from ringmem.device.device import Device

__all__ = ["MemoryVisibility", "VisibilityDecision", "VisibilityInputs", "decide", "decide_for"]


class MemoryVisibility(Enum):
    """How far a store to mapped memory is seen."""

    SYSTEM_SCOPE = "system scope"
    """Host and device see each other's plain stores while a kernel runs."""

    DEVICE_SCOPE = "device scope"
    """They see each other's stores only where they synchronize: kernel ends, events, streams."""

    EXPLICIT_DMA = "explicit DMA"
    """No shared memory: data crosses by copies only."""


@dataclass(frozen=True, kw_only=True)
class VisibilityInputs:
    """What a decision rests on; the attributes are those of :class:`Capabilities`."""

    platform: str  # the device's: "cuda" or "cpu"
    unified_addressing: bool
    can_map_host_memory: bool
    integrated: bool = False
    host_native_atomics: bool = False
    pageable_memory_access: bool = False
    pageable_memory_access_uses_host_page_tables: bool = False
    concurrent_managed_access: bool = False
    facts: PlatformFacts = field(default_factory=PlatformFacts)

    @classmethod
    def of(
        cls, platform: str, capabilities: Capabilities, facts: PlatformFacts
    ) -> VisibilityInputs:
        """Take what matters from a device's capability table."""
        c = capabilities
        return cls(
            platform=platform,
            unified_addressing=c.unified_addressing,
            can_map_host_memory=c.can_map_host_memory,
            integrated=c.integrated,
            host_native_atomics=c.host_native_atomics,
            pageable_memory_access=c.pageable_memory_access,
            pageable_memory_access_uses_host_page_tables=(
                c.pageable_memory_access_uses_host_page_tables
            ),
            concurrent_managed_access=c.concurrent_managed_access,
            facts=facts,
        )


@dataclass(frozen=True, kw_only=True)
class VisibilityDecision:
    """What was decided, and why.

    Attributes
    ----------
    visibility : MemoryVisibility
        For pinned mapped memory.
    managed_concurrent : bool
        Managed memory may be touched by both sides at the same time.
    system_atomics : bool
        Read-modify-write across the link is atomic.
    platform : PlatformKind
        Where the process runs.
    reasons : tuple of str
        What led here, one sentence each, in the order it was looked at.
    echo : EchoResult or None
        The echo test, where it was asked for.
    """

    visibility: MemoryVisibility
    managed_concurrent: bool
    system_atomics: bool
    platform: PlatformKind
    reasons: tuple[str, ...]
    echo: EchoResult | None = None


def decide(inputs: VisibilityInputs, echo: EchoResult | None = None) -> VisibilityDecision:
    """Decide from recorded inputs; looks at nothing else.

    Parameters
    ----------
    inputs : VisibilityInputs
        The device's attributes and the platform's facts.
    echo : EchoResult, optional
        An echo test's result: a success lifts ``device scope`` to ``system scope``, a silence
        lowers ``system scope`` to ``device scope``.
    """
    kind, reason = classify(inputs.facts)
    reasons = [f"{kind.value}: {reason}"]
    visibility = _from_attributes(inputs, kind, reasons)
    if echo is not None:
        visibility = _after_echo(visibility, echo, reasons)
    shared = visibility is MemoryVisibility.SYSTEM_SCOPE
    return VisibilityDecision(
        visibility=visibility,
        managed_concurrent=shared and inputs.concurrent_managed_access,
        system_atomics=shared and inputs.host_native_atomics,
        platform=kind,
        reasons=tuple(reasons),
        echo=echo,
    )


def _from_attributes(
    inputs: VisibilityInputs, kind: PlatformKind, reasons: list[str]
) -> MemoryVisibility:
    if not inputs.can_map_host_memory:
        reasons.append("the device cannot map host memory")
        return MemoryVisibility.EXPLICIT_DMA
    if inputs.platform == "cpu":
        reasons.append("a CPU device works in the host's own memory")
        return MemoryVisibility.SYSTEM_SCOPE
    if not inputs.unified_addressing:
        reasons.append("host and device have no unified address space")
        return MemoryVisibility.EXPLICIT_DMA
    if inputs.pageable_memory_access_uses_host_page_tables:
        reasons.append("the device reads the host's page tables: a coherent link")
        return MemoryVisibility.SYSTEM_SCOPE
    return _from_platform(inputs, kind, reasons)


def _from_platform(
    inputs: VisibilityInputs, kind: PlatformKind, reasons: list[str]
) -> MemoryVisibility:
    if kind is PlatformKind.NATIVE_LINUX:
        how = "in the same memory" if inputs.integrated else "over PCIe"
        reasons.append(f"mapped pinned memory is coherent {how} under the native driver")
        if inputs.pageable_memory_access:
            reasons.append("the device reads pageable memory too")
        return MemoryVisibility.SYSTEM_SCOPE
    if kind in (PlatformKind.WSL1, PlatformKind.MACOS):
        reasons.append(f"{kind.value} gives CUDA no device to share memory with")
        return MemoryVisibility.EXPLICIT_DMA
    why = {
        PlatformKind.WSL2: "the GPU is paravirtualized: stores cross at submission boundaries",
        PlatformKind.WINDOWS: "the display driver model batches and preempts work",
    }.get(kind, "nothing is known of this platform")
    reasons.append(why)
    return MemoryVisibility.DEVICE_SCOPE


def _after_echo(
    visibility: MemoryVisibility, echo: EchoResult, reasons: list[str]
) -> MemoryVisibility:
    reasons.append(echo.reason)
    if echo.answered and visibility is MemoryVisibility.DEVICE_SCOPE:
        return MemoryVisibility.SYSTEM_SCOPE
    if echo.answered is False and visibility is MemoryVisibility.SYSTEM_SCOPE:
        return MemoryVisibility.DEVICE_SCOPE
    return visibility


def decide_for(device: Device, *, echo: bool, timeout_s: float) -> VisibilityDecision:
    """Collect the inputs for a device, run the echo test if wanted, and decide."""
    inputs = VisibilityInputs.of(device.platform, device.capabilities, collect_platform_facts())
    result = None
    if echo and inputs.can_map_host_memory:
        result = run_echo(device, timeout_s=timeout_s)
    elif echo:
        result = EchoResult(None, None, "no echo test: the device cannot map host memory")
    return decide(inputs, result)
