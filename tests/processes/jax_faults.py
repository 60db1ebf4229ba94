"""Values that go between processes by JAX alone, in ways in which it has faults.

    python -m tests.processes.jax_faults put PROCESS COORDINATOR SOCKET
    python -m tests.processes.jax_faults pull 0
    python -m tests.processes.jax_faults pull 1 ADDRESS

Process 1 prints what it has received, as JSON.
"""

import json
import sys

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8


def put(process, coordinator, socket):
    """Put arrays of the devices of process 0 onto those of process 1: in one call with lists, and one by one."""
    jax.config.update("jax_cross_host_transfer_socket_address", socket)  # no free port: the taker would hang
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0")
    jax.distributed.initialize(coordinator, 2, process)
    here, there = ([d for d in jax.devices() if d.process_index == p] for p in (0, 1))
    if process == 0:
        arrays = [jax.device_put(np.full(8, i, np.int32), d) for i, d in enumerate(here)]
    else:
        arrays = [
            jax.make_array_from_single_device_arrays((8,), SingleDeviceSharding(d), [], dtype=np.int32) for d in here
        ]
    targets = [SingleDeviceSharding(d) for d in there]
    in_one = jax.device_put(arrays, targets)
    one_by_one = [jax.device_put(x, target) for x, target in zip(arrays, targets, strict=True)]
    if process == 1:
        print(json.dumps([[int(np.asarray(x)[0]) for x in got] for got in (in_one, one_by_one)]), flush=True)


def pull(process, address=None):
    """Pull an array that is offered at one sharding: at this one, and at another one whose pieces are as large."""
    mesh = jax.make_mesh((DEVICES,), ("x",))
    x = np.arange(DEVICES**2, dtype=np.float32).reshape(DEVICES, DEVICES)
    server = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * DEVICES)
    if process == 0:
        offered = jax.device_put(x, NamedSharding(mesh, P("x")))
        for number in (0, 1):
            server.await_pull(number, [offered])
        print(json.dumps(server.address()), flush=True)
        sys.stdin.read()
        return
    connection = server.connect(address)
    right = []
    for number, spec in enumerate((P("x"), P(None, "x"))):
        wanted = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        (got,) = connection.pull(number, [wanted])
        right.append(bool((np.asarray(got) == x).all()))
    print(json.dumps(right), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    what, process, *rest = sys.argv[1:]
    {"put": put, "pull": pull}[what](int(process), *rest)
