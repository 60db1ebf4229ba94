"""Preparation of JAX: addresses; islands are tested by runs."""

import socket

from shardc.launch.prepare import free_port, host_of


def test_hosts():
    assert host_of("unix:/tmp/x") == "127.0.0.1"
    assert host_of("10.0.0.1:0") == "10.0.0.1"
    assert host_of("[::1]:5") == "[::1]"


def test_a_free_port_can_be_used():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        assert 0 < free_port("[::1]") < 1 << 16
