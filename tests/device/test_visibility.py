"""The decision about memory visibility, from recorded inputs and by echo."""

import dataclasses
import gc
import time

import pytest

import ringmem
from ringmem.device.echo import EchoResult, run_echo
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


# --- the echo test -----------------------------------------------------------------------------


def test_without_an_echo_the_decision_makes_no_submission(faulty):
    device = ringmem.devices_of(faulty)[0]
    assert device.memory_visibility().visibility is SYSTEM
    for operation in ("host_alloc", "stream_create", "stream_wait_value"):
        assert faulty.calls[operation] == 0


def test_an_echo_is_answered_and_measured(device):
    decision = device.memory_visibility(echo=True, timeout_s=10)
    assert decision.visibility is SYSTEM
    assert decision.echo.answered is True
    assert 0 < decision.echo.round_trip_us < 10e6
    assert decision.echo.reason in decision.reasons


def test_echoes_reuse_their_pinned_words_and_free_nothing(faulty):
    device = ringmem.devices_of(faulty)[0]
    for _ in range(3):
        assert run_echo(device, timeout_s=10).answered
    assert faulty.calls["host_alloc"] == 1
    assert faulty.calls["host_free"] == 0
    assert faulty.live["stream"] == 0
    ringmem.release_staging(device)


def test_a_device_without_stream_memory_operations_cannot_echo():
    device = ringmem.simulate(stream_mem_ops=False).devices[0]
    decision = device.memory_visibility(echo=True)
    assert decision.echo.answered is None
    assert decision.visibility is SYSTEM
    assert "no echo test" in decision.echo.reason


def test_a_silent_device_is_given_up_in_time_and_lowers_the_scope(faulty):
    # The answer comes late: every write of the stream starts after the deadline.
    device = ringmem.simulate(latency_s=0.5).devices[0]
    start = time.monotonic()
    decision = device.memory_visibility(echo=True, timeout_s=0.05)
    assert time.monotonic() - start < 10
    assert decision.echo.answered is False
    assert decision.visibility is DEVICE


def test_a_stream_that_does_not_wait_is_no_echo(faulty):
    device = ringmem.devices_of(faulty)[0]
    driver = device.driver
    skipping = SkippingWait(device)
    result = run_echo(skipping, timeout_s=0.5)
    assert result.answered is False
    assert "did not wait" in result.reason
    assert driver.live["stream"] == 0
    ringmem.release_staging(skipping)


class SkippingWait:
    """A device whose streams ignore that they should wait."""

    def __init__(self, device):
        self._device = device
        self.__dict__ |= {"driver": self, "ordinal": device.ordinal}

    def stream_wait_value(self, *_):
        pass

    def stream_write_value(self, ordinal, stream, ptr, value):
        self._device.driver.stream_write_value(ordinal, stream, ptr, value)
        self._device.driver.stream_synchronize(ordinal, stream)

    def __getattr__(self, name):
        if hasattr(self._device.driver, name):
            return getattr(self._device.driver, name)
        return getattr(self._device, name)


@pytest.mark.parametrize(
    "bad", [0, -1, float("nan"), float("inf"), "x", None, pytest.param(1 << 2000, id="huge")]
)
def test_an_echo_without_a_limit_is_refused(device, bad):
    with pytest.raises(ringmem.InvalidValueError, match="timeout_s is "):
        device.memory_visibility(echo=True, timeout_s=bad)


ECHO_OPERATIONS = [
    "host_alloc",
    "stream_create",
    "host_device_pointer",
    "stream_wait_value",
    "stream_write_value",
    "stream_query",
]


@pytest.mark.parametrize(
    ("operation", "when"),
    [
        *((operation, when) for operation in ECHO_OPERATIONS for when in ("before", "after")),
        # Refused before, a stream is lost: nobody may try twice to destroy one.
        ("stream_destroy", "after"),
    ],
)
def test_an_echo_that_fails_leaves_no_stream_stuck_and_nothing_live(faulty, operation, when):
    device = ringmem.devices_of(faulty)[0]
    faulty.fail(operation, when=when)
    try:
        run_echo(device, timeout_s=0.5)
    except ringmem.DriverError as error:
        assert error.operation.startswith("cu")  # noqa: PT017
    assert faulty.pending == 0
    faulty.clear()
    gc.collect()
    assert run_echo(device, timeout_s=10).answered
    ringmem.release_staging(device)
