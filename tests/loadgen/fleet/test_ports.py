"""Tests of the search for free ports, which the processes of a new fleet are to listen on."""

import socket
from pathlib import Path

import pytest

from loadgen.fleet.ports import HOST, PORTS, free_port, is_free

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not GIVEN.exists(), reason="reads the range of Linux from /proc")
def test_no_port_is_one_that_the_system_gives_to_connections() -> None:
    lowest = int(GIVEN.read_text().split()[0])
    if lowest <= PORTS.start:
        pytest.skip(f"this machine gives connections ports from {lowest}")
    assert all(free_port() < lowest for _ in range(200))


def test_ports_drawn_before_they_are_used_are_different() -> None:
    drawn = [free_port() for _ in range(2000)]
    assert len(set(drawn)) == len(drawn)


def test_more_ports_may_be_drawn_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = range(PORTS.start, PORTS.start + 100)
    monkeypatch.setattr("loadgen.fleet.ports.PORTS", few)
    assert {free_port() for _ in range(1000)} <= set(few)


def test_a_port_that_is_taken_is_not_free() -> None:
    port = free_port()
    with socket.create_server((HOST, port)):
        assert not is_free(port)
    assert is_free(port)
