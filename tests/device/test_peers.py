"""Peer access: the matrix, switching it on and off, for all or not at all."""

import pytest

import ringmem
from ringmem.native import _native


def pool_access(device, peer):
    location = _native.Location(_native.LocationKind.device, device.ordinal)
    return peer.driver.pool_get_access(peer.ordinal, peer.allocator.pool, location)


def test_the_matrix_says_who_reaches_whom():
    a, b, c = devices = ringmem.simulate(devices=3, peers=[(0, 1)]).devices
    ringmem.enable_peer_access(a, b)
    matrix = ringmem.peer_matrix(devices)
    assert matrix.devices == (a, b, c)
    assert matrix.can_access == ((True, True, False), (True, True, False), (False, False, True))
    assert matrix.enabled == ((True, True, False), (False, True, False), (False, False, True))


def test_the_matrix_is_of_all_devices_by_default(pair):
    assert ringmem.peer_matrix().devices[-2:] == tuple(pair)


def test_enable_and_disable_are_idempotent_and_one_way(pair):
    a, b = pair
    for _ in range(2):
        ringmem.enable_peer_access(a, b)
        assert ringmem.peer_access_enabled(a, b)
        assert not ringmem.peer_access_enabled(b, a)
    for _ in range(2):
        ringmem.disable_peer_access(a, b)
        assert not ringmem.peer_access_enabled(a, b)
    ringmem.enable_peer_access(a, b)
    assert ringmem.peer_access_enabled(a, b)


def test_access_covers_the_peers_own_pool(pair):
    a, b = pair
    assert pool_access(a, b) is _native.Access.none
    ringmem.enable_peer_access(a, b)
    assert pool_access(a, b) is _native.Access.readwrite
    assert pool_access(b, a) is _native.Access.none
    ringmem.disable_peer_access(a, b)
    assert pool_access(a, b) is _native.Access.none


def test_access_that_somebody_else_switched_on_is_taken_as_it_is(pair):
    a, b = pair
    a.driver.peer_enable(0, 1)
    ringmem.enable_peer_access(a, b)
    assert ringmem.peer_access_enabled(a, b)
    ringmem.disable_peer_access(a, b)


def test_access_that_somebody_else_switched_off_is_off(pair):
    a, b = pair
    ringmem.enable_peer_access(a, b)
    a.driver.peer_disable(0, 1)
    ringmem.disable_peer_access(a, b)
    assert not ringmem.peer_access_enabled(a, b)


def test_devices_without_pools_can_be_peers():
    a, b = ringmem.simulate(devices=2, pools=False).devices
    ringmem.enable_peer_access(a, b)
    assert ringmem.peer_access_enabled(a, b)
    ringmem.disable_peer_access(a, b)


def test_no_link_is_not_supported_and_says_what_works():
    a, b = ringmem.simulate(devices=2, peers=False).devices
    with pytest.raises(ringmem.NotSupportedError, match="copy_peer") as caught:
        ringmem.enable_peer_access(a, b)
    assert "cpu:0" in str(caught.value)
    assert "cpu:1" in str(caught.value)


def test_devices_of_two_drivers_have_no_link(device):
    stranger = ringmem.simulate().devices[0]
    assert not ringmem.can_access_peer(device, stranger)
    with pytest.raises(ringmem.NotSupportedError, match="no direct link"):
        ringmem.enable_peer_access(device, stranger)


def test_what_a_pair_enabled_is_no_business_of_another_drivers_devices(pair):
    a, b = pair
    _, d = ringmem.simulate(devices=2).devices
    ringmem.enable_peer_access(a, b)
    assert not ringmem.peer_access_enabled(a, d)
    assert ringmem.peer_matrix([a, b, d]).enabled[0] == (True, True, False)
    for switch in (ringmem.enable_peer_access, ringmem.disable_peer_access):
        with pytest.raises(ringmem.NotSupportedError, match="different drivers.*copy_peer"):
            switch(a, d)
    assert ringmem.peer_access_enabled(a, b)


def test_names_will_do_for_devices(pair):
    ringmem.enable_peer_access("cpu:0", "cpu:1")
    assert ringmem.peer_access_enabled("cpu", pair[1])
    assert ringmem.can_access_peer(pair[0], "cpu:1")
    assert ringmem.peer_matrix(["cpu:0", pair[1]]) == ringmem.peer_matrix(pair)
    ringmem.disable_peer_access("cpu:0", "cpu:1")
    assert not ringmem.peer_access_enabled(*pair)


@pytest.mark.parametrize(
    "ask",
    [
        ringmem.can_access_peer,
        ringmem.peer_access_enabled,
        ringmem.enable_peer_access,
        ringmem.disable_peer_access,
    ],
)
def test_what_names_no_device_is_refused(pair, ask):
    with pytest.raises(ringmem.InvalidDeviceError, match="'nope:1' names no device"):
        ask("cpu:0", "nope:1")
    with pytest.raises(ringmem.InvalidValueError, match="device is 3: give a Device or a name"):
        ask(3, pair[1])
    with pytest.raises(ringmem.InvalidValueError, match="peer is 3: give a Device or a name"):
        ask(pair[0], 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "devices is 3: give a list"),
        ("cpu:0", "devices is 'cpu:0': give a list"),
        (["cpu:0", 3], r"devices\[1\] is 3: give a Device or a name"),
    ],
)
def test_a_matrix_is_of_devices(pair, bad, message):
    with pytest.raises(ringmem.InvalidValueError, match=message):
        ringmem.peer_matrix(bad)


def test_a_device_is_no_peer_of_itself(device):
    assert ringmem.can_access_peer(device, device)
    assert ringmem.peer_access_enabled(device, device)
    for switch in (ringmem.enable_peer_access, ringmem.disable_peer_access):
        with pytest.raises(ringmem.InvalidValueError, match="peer is cpu:0"):
            switch(device, device)


@pytest.mark.parametrize("operation", ["peer_enable", "pool_set_access", "pool_create", "pool_set"])
def test_enabling_happens_or_is_undone(faulty, operation):
    a, b = ringmem.devices_of(faulty)
    faulty.fail(operation)
    with pytest.raises(ringmem.DriverError):
        ringmem.enable_peer_access(a, b)
    assert not ringmem.peer_access_enabled(a, b)
    assert pool_access(a, b) is _native.Access.none
    a.driver.peer_enable(0, 1)  # it would be enabled already, had it not been undone
    a.driver.peer_disable(0, 1)
    ringmem.enable_peer_access(a, b)
    ringmem.disable_peer_access(a, b)


@pytest.mark.parametrize("operation", ["peer_disable", "pool_set_access"])
def test_disabling_happens_or_is_undone(faulty, operation):
    a, b = ringmem.devices_of(faulty)
    ringmem.enable_peer_access(a, b)
    faulty.fail(operation)
    with pytest.raises(ringmem.DriverError):
        ringmem.disable_peer_access(a, b)
    assert ringmem.peer_access_enabled(a, b)
    assert pool_access(a, b) is _native.Access.readwrite
    ringmem.disable_peer_access(a, b)
