"""The decision about memory visibility, from recorded inputs and by echo."""

import dataclasses

import pytest

from ringmem.device.echo import EchoResult
from ringmem.device.platform_facts import PlatformFacts, PlatformKind
from ringmem.device.visibility import MemoryVisibility, VisibilityInputs, decide

SYSTEM = MemoryVisibility.SYSTEM_SCOPE
DEVICE = MemoryVisibility.DEVICE_SCOPE
DMA = MemoryVisibility.EXPLICIT_DMA

NATIVE = PlatformFacts(osrelease="6.8.0-45-generic")
WSL1 = PlatformFacts(osrelease="4.4.0-19041-Microsoft")
WSL2 = PlatformFacts(osrelease="5.15.90.1-microsoft-standard-WSL2", has_dxg=True)
WINDOWS = PlatformFacts(system="Windows")
MACOS = PlatformFacts(system="Darwin")
OTHER = PlatformFacts(system="FreeBSD")

# An NVIDIA H200 (PCIe) on native Linux, recorded.
H200 = VisibilityInputs(
    platform="cuda",
    unified_addressing=True,
    can_map_host_memory=True,
    pageable_memory_access=True,
    concurrent_managed_access=True,
    facts=NATIVE,
)
ANSWERED = EchoResult(True, 12.5, "echo test: answered in 12.5 µs")
SILENT = EchoResult(False, None, "echo test: no answer within 1 s")
IMPOSSIBLE = EchoResult(None, None, "no echo test: not supported")


def on(facts, **changes):
    return dataclasses.replace(H200, facts=facts, **changes)


@pytest.mark.parametrize(
    ("inputs", "visibility", "kind"),
    [
        (on(NATIVE), SYSTEM, PlatformKind.NATIVE_LINUX),
        (on(NATIVE, integrated=True), SYSTEM, PlatformKind.NATIVE_LINUX),
        (on(NATIVE, unified_addressing=False), DMA, PlatformKind.NATIVE_LINUX),
        (on(NATIVE, can_map_host_memory=False), DMA, PlatformKind.NATIVE_LINUX),
        (on(WSL1), DMA, PlatformKind.WSL1),
        (on(WSL2), DEVICE, PlatformKind.WSL2),
        (on(WSL2, can_map_host_memory=False), DMA, PlatformKind.WSL2),
        (on(WINDOWS), DEVICE, PlatformKind.WINDOWS),
        (on(MACOS), DMA, PlatformKind.MACOS),
        (on(OTHER), DEVICE, PlatformKind.UNKNOWN),
        (
            on(OTHER, pageable_memory_access_uses_host_page_tables=True),
            SYSTEM,
            PlatformKind.UNKNOWN,
        ),
        (on(WSL2, platform="cpu", unified_addressing=False), SYSTEM, PlatformKind.WSL2),
        (on(NATIVE, platform="cpu", can_map_host_memory=False), DMA, PlatformKind.NATIVE_LINUX),
    ],
)
def test_each_platform_has_its_decision_and_reasons(inputs, visibility, kind):
    decision = decide(inputs)
    assert decision.visibility is visibility
    assert decision.platform is kind
    assert len(decision.reasons) >= 2
    assert decision.reasons[0].startswith(kind.value)
    assert decision.echo is None


def test_managed_memory_and_atomics_need_system_scope_and_their_attribute():
    able = {"concurrent_managed_access": True, "host_native_atomics": True}
    unable = {"concurrent_managed_access": False, "host_native_atomics": False}
    for facts, attributes, wanted in [
        (NATIVE, able, True),
        (NATIVE, unable, False),
        (WSL2, able, False),
    ]:
        decision = decide(on(facts, **attributes))
        assert decision.managed_concurrent is wanted
        assert decision.system_atomics is wanted


@pytest.mark.parametrize(
    ("inputs", "echo", "visibility"),
    [
        (on(NATIVE), ANSWERED, SYSTEM),
        (on(NATIVE), SILENT, DEVICE),
        (on(NATIVE), IMPOSSIBLE, SYSTEM),
        (on(WSL2), ANSWERED, SYSTEM),
        (on(WSL2), SILENT, DEVICE),
        (on(WSL2), IMPOSSIBLE, DEVICE),
        (on(WSL1), ANSWERED, DMA),
        (on(NATIVE, unified_addressing=False), SILENT, DMA),
    ],
)
def test_an_echo_lifts_or_lowers_by_one_step_and_says_so(inputs, echo, visibility):
    decision = decide(inputs, echo)
    assert decision.visibility is visibility
    assert decision.echo is echo
    assert echo.reason in decision.reasons
