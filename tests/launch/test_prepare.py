"""Preparation of JAX: addresses; islands are tested by runs."""

import os
import re
import socket
from pathlib import Path

from shardc.errors import ClusterError
from shardc.launch import prepare
from shardc.launch.prepare import free_port, go_around_proxies, host_of
from shardc.runtime.transport import tls


def test_hosts():
    assert host_of("unix:/tmp/x") == "127.0.0.1"
    assert host_of("10.0.0.1:0") == "10.0.0.1"
    assert host_of("[::1]:5") == "[::1]"


def test_credentials_are_for_a_jax_that_takes_them(monkeypatch):
    """A run on one machine goes on without the library that makes them: nobody else has to reach it."""

    def takes(*, mtls_cert_file=None):
        raise AssertionError

    monkeypatch.setattr(prepare.jax.distributed, "initialize", takes)
    found = prepare._credentials(b"secret")
    (file,) = {value for name, value in found.items() if name.endswith("_file")}
    assert {"BEGIN PRIVATE KEY", "BEGIN CERTIFICATE"} <= set(re.findall("BEGIN [A-Z ]+", Path(file).read_text()))
    assert found["verify_secure_credentials"] and found["mtls_peer_uri_prefix"] == "shardc://run/"
    tls.identity.cache_clear()
    monkeypatch.setattr(tls, "_library", lambda name: (_ for _ in ()).throw(ClusterError("no cryptography")))
    assert prepare._credentials(b"secret") == {}
    monkeypatch.undo()
    monkeypatch.setattr(prepare.jax.distributed, "initialize", lambda address: None)
    assert prepare._credentials(b"secret") == {}


def test_proxies_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("no_grpc_proxy", "")
    go_around_proxies("10.0.0.1")
    assert os.environ.pop("no_grpc_proxy") == "example.org,10.0.0.1"


def test_a_free_port_can_be_used():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        assert 0 < free_port("[::1]") < 1 << 16
