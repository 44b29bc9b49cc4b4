"""Every platform is recognized from recorded markers, and by nothing less."""

import pytest

from ringmem.device.platform_facts import (
    PlatformFacts,
    PlatformKind,
    classify,
    collect_platform_facts,
)

WSL1 = PlatformFacts(
    osrelease="4.4.0-19041-Microsoft",
    proc_version=(
        "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com) "
        "(gcc version 5.4.0 (GCC) ) #1237-Microsoft Sat Sep 11 14:32:00 PST 2021"
    ),
    has_wsl_interop=True,
    has_run_wsl=True,
    wsl_distro_name="Ubuntu",
    wsl_interop="/run/WSL/8_interop",
)
WSL2 = PlatformFacts(
    osrelease="5.15.90.1-microsoft-standard-WSL2",
    proc_version="Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host)",
    has_dxg=True,
    has_wsl_interop=True,
    has_run_wsl=True,
    wsl_distro_name="Ubuntu",
    wsl_interop="/run/WSL/8_interop",
)
NATIVE = PlatformFacts(
    osrelease="6.8.0-45-generic",
    proc_version="Linux version 6.8.0-45-generic (buildd@lcy02-amd64-115)",
)


@pytest.mark.parametrize(
    "release",
    [
        "4.19.104-microsoft-standard",
        "5.10.16.3-microsoft-standard-WSL2",
        "6.6.87.2-microsoft-standard-WSL2+",
    ],
)
def test_wsl2_kernels_are_known_by_their_release_alone(release):
    # A container under WSL2 sees the kernel but neither the environment nor /run/WSL.
    assert classify(PlatformFacts(osrelease=release))[0] is PlatformKind.WSL2


def test_wsl2_with_every_marker_is_wsl2():
    assert classify(WSL2)[0] is PlatformKind.WSL2


def test_wsl1_is_known_by_its_release_and_the_missing_gpu_node():
    kind, reason = classify(WSL1)
    assert kind is PlatformKind.WSL1
    assert "4.4.0-19041-Microsoft" in reason


def test_wsl1_release_with_a_gpu_node_is_not_wsl1():
    facts = PlatformFacts(osrelease=WSL1.osrelease, has_dxg=True, has_wsl_interop=True)
    assert classify(facts)[0] is PlatformKind.WSL2


@pytest.mark.parametrize(
    "traces",
    [
        {"has_dxg": True, "has_wsl_interop": True},
        {"has_dxg": True, "has_run_wsl": True},
        {"has_dxg": True, "wsl_distro_name": "Debian"},
        {"has_wsl_interop": True, "has_run_wsl": True},  # a kernel built without the GPU driver
    ],
)
def test_custom_wsl2_kernels_are_known_by_two_traces(traces):
    kind, reason = classify(PlatformFacts(osrelease="6.1.21-my-own", **traces))
    assert kind is PlatformKind.WSL2
    assert "kernel of its own" in reason


@pytest.mark.parametrize(
    "trace",
    [
        {"has_dxg": True},
        {"has_wsl_interop": True},
        {"has_run_wsl": True},
        {"wsl_distro_name": "Ubuntu"},
        {"wsl_distro_name": "Ubuntu", "wsl_interop": "/run/WSL/8_interop"},
    ],
)
def test_one_kind_of_trace_alone_is_not_wsl(trace):
    kind, reason = classify(PlatformFacts(osrelease="6.8.0-45-generic", **trace))
    assert kind is PlatformKind.NATIVE_LINUX
    assert "alone does not make it WSL" in reason


@pytest.mark.parametrize(
    "version",
    [
        "Linux version 6.8.0-1015-azure (root@microsoft-build-7) (gcc (Ubuntu 13.2.0))",
        "Linux version 6.6.35 (builder@host) (clang version 17 (Microsoft fork)) #1 SMP",
    ],
)
def test_microsoft_in_the_builders_name_is_not_wsl(version):
    for release in ("6.8.0-1015-azure", "6.6.35", "5.15.158.2-1.cm2"):
        facts = PlatformFacts(osrelease=release, proc_version=version)
        assert classify(facts)[0] is PlatformKind.NATIVE_LINUX


@pytest.mark.parametrize(
    "release", ["4.4.0-19041-Microsoft-custom", "4.4.0-19041-microsoft", "6.1.0-Microsoft"]
)
def test_releases_that_only_resemble_wsl1_are_not_wsl1(release):
    assert classify(PlatformFacts(osrelease=release))[0] is PlatformKind.NATIVE_LINUX


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("Windows", PlatformKind.WINDOWS),
        ("Darwin", PlatformKind.MACOS),
        ("FreeBSD", PlatformKind.UNKNOWN),
        ("", PlatformKind.UNKNOWN),
    ],
)
def test_other_systems_are_known_by_name_whatever_else_is_seen(system, kind):
    assert classify(PlatformFacts(system=system, osrelease=WSL2.osrelease))[0] is kind


def test_plain_linux_is_native():
    assert classify(NATIVE)[0] is PlatformKind.NATIVE_LINUX


def test_facts_of_this_machine_are_collected(monkeypatch):
    monkeypatch.setenv("WSL_DISTRO_NAME", "Recorded")
    monkeypatch.delenv("WSL_INTEROP", raising=False)
    facts = collect_platform_facts()
    with open("/proc/sys/kernel/osrelease") as file:
        assert facts.osrelease == file.read().strip()
    assert facts.proc_version
    assert facts.system == "Linux"
    assert (facts.wsl_distro_name, facts.wsl_interop) == ("Recorded", None)
