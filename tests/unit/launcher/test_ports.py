"""Ports are free when given, given once, and a busy one is named with its owner."""

import os
import socket

import pytest

from sglang_hetero.launcher import ports as ports_module
from sglang_hetero.launcher.ports import LOWEST, PortError, Ports, ephemeral_start, is_free

HOST = "127.0.0.1"


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused_with_owner_and_remedy(listener):
    assert not is_free(listener, HOST)
    with pytest.raises(PortError, match=rf"--port {listener}: the port is in use on {HOST} \(pid {os.getpid()}.*free"):
        Ports(HOST).take(listener, "--port")


@pytest.mark.parametrize("port", [-1, 65536])
def test_numbers_that_are_no_ports_are_refused(port):
    with pytest.raises(PortError, match="a TCP port is 1 to 65535"):
        Ports(HOST).take(port, "--port")


def test_no_port_is_given_twice_and_blocks_are_free():
    ports = Ports(HOST)
    given = [ports.free() for _ in range(50)]
    block = ports.free(8)
    everything = [*given, *range(block, block + 8)]
    assert len(set(everything)) == len(everything)
    assert all(is_free(port, HOST) for port in everything)
    assert all(LOWEST <= port < ephemeral_start() for port in everything)


def test_a_taken_port_is_not_given_again():
    ports = Ports(HOST)
    port = ports.free()
    with pytest.raises(PortError, match="in use"):
        ports.take(port, "--port")


def test_a_host_whose_ephemeral_range_leaves_no_room(monkeypatch):
    """net.ipv4.ip_local_port_range = 1024 65535, as tuned servers have it."""
    monkeypatch.setattr(ports_module, "ephemeral_start", lambda: 1024)
    assert Ports(HOST).free(8) >= LOWEST


def test_none_free_is_said(monkeypatch):
    monkeypatch.setattr(ports_module, "is_free", lambda _port, _host: False)
    with pytest.raises(PortError, match="no 8 free TCP ports in a row"):
        Ports(HOST).free(8)
