"""Preparation of JAX in a process of a run: one runtime for each island, a cache of compiled programs."""

from __future__ import annotations

import inspect
import os
import socket
from typing import Any, Final

import jax

from shardc.errors import ClusterError
from shardc.launch.job import Job
from shardc.machine.puts import PUT
from shardc.runtime.cluster import Cluster
from shardc.runtime.transport import tls
from shardc.runtime.transport.wire import is_unix

_LOOPBACK: Final = "127.0.0.1"
_DIRECT: Final = "no_grpc_proxy"
"""The environment variable of gRPC that lists hosts to reach without a proxy."""


def prepare_jax(cluster: Cluster, job: Job) -> None:
    """Set up JAX before its backend starts."""
    if job.cache and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", job.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if job.config.per_island > 1:
        if job.config.carrier == PUT:
            listen_for_transfers(host_of(job.config.links))
        _form_island(cluster, job)
    elif job.visible:
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", job.visible)


def _form_island(cluster: Cluster, job: Job) -> None:
    """Join the processes of an island to one JAX runtime. Its first process chooses a free port."""
    config = job.config  # of this start: the epoch of the cluster may have risen since
    island = config.island(config.me)
    if config.me == island.start:
        host = host_of(config.links)
        address = f"{host}:{free_port(host)}"
        cluster.store.set(f"{config.epoch}/coordinator/{island.start}", address)
    else:
        address = cluster.wait_for_text(f"{config.epoch}/coordinator/{island.start}", island.start, "to start JAX")
    go_around_proxies(address.rpartition(":")[0].strip("[]"))
    jax.distributed.initialize(
        address,
        num_processes=len(island),
        process_id=config.me - island.start,
        local_device_ids=[int(n) for n in job.visible.split(",")] if job.visible else None,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(config.patience)),
        coordinator_bind_address=address,
        **_credentials(config.secret),
    )


def _credentials(secret: bytes) -> dict[str, Any]:
    """The arguments with which JAX lets only processes of this run into the runtime of an island."""
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        return {}
    try:
        file = tls.identity(secret)
    except ClusterError:  # a run on one machine needs no TLS of its own
        return {}
    return {
        **{f"mtls_{name}_file": file for name in ("cert", "key", "ca")},
        "mtls_peer_uri_prefix": tls.URI,
        "verify_secure_credentials": True,
    }


def listen_for_transfers(host: str) -> None:
    """Make JAX send arrays between processes over sockets of its own where their devices cannot, as CPUs. It publishes
    the address as it is given, so the port is a free one and not 0."""
    jax.config.update("jax_cross_host_transfer_socket_address", f"{host}:{free_port(host)}")
    jax.config.update("jax_cross_host_transport_addresses", f"{host}:0")


def go_around_proxies(host: str) -> None:
    """Make gRPC connect to a host without a proxy: `jax.distributed` hangs with one."""
    jax.config.update("jax_check_proxy_envs", False)  # a warning of what is mended here
    known = os.environ.get(_DIRECT) or os.environ.get("no_proxy", "")
    os.environ[_DIRECT] = ",".join(filter(None, [known, host]))


def host_of(address: str) -> str:
    """The host that an address names; loopback for a UNIX socket."""
    return _LOOPBACK if is_unix(address) else address.rpartition(":")[0]


def free_port(host: str) -> int:
    """A free port of this host."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host.strip("[]"), 0))
        return sock.getsockname()[1]
