"""Preparation of JAX: addresses; islands are tested by runs."""

import os
import socket

from shardc.launch.prepare import free_port, go_around_proxies, host_of


def test_hosts():
    assert host_of("unix:/tmp/x") == "127.0.0.1"
    assert host_of("10.0.0.1:0") == "10.0.0.1"
    assert host_of("[::1]:5") == "[::1]"


def test_proxies_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("no_grpc_proxy", "")
    go_around_proxies("10.0.0.1")
    assert os.environ.pop("no_grpc_proxy") == "example.org,10.0.0.1"


def test_a_free_port_can_be_used():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        assert 0 < free_port("[::1]") < 1 << 16
