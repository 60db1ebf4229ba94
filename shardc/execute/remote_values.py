"""Values of other JAX runtimes, brought to every process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from shardc.arrays.fetch import of_words, words
from shardc.arrays.pieces import pack_array, unpack_array
from shardc.arrays.placed import PlacedArray, StackedArray
from shardc.arrays.remote_array import RemoteArray, home_of, is_remote
from shardc.errors import ClusterError, number_text
from shardc.execute.process_group import group_of_run
from shardc.machine.devices import processes_of
from shardc.machine.launch_order import in_launch_order, ordered_devices
from shardc.runtime.cluster import Cluster, current


def bring(
    leaves: Sequence[Any], what: str = "shardc.fetch", takers: Sequence[Collection[int]] | None = None
) -> list[Any]:
    """The leaves, with the values of those that other processes have. All processes of the run call this together.

    Args:
      leaves: arrays.
      what: the call that they all make.
      takers: for each leaf the processes that want it; None: all, if another JAX runtime has it.

    Raises:
      ClusterError: no process has the value of a leaf.
    """
    cluster = current()
    if cluster is None or cluster.processes == 1:
        return list(leaves)
    parts = [list(x.pieces) if isinstance(x, StackedArray) else [x] for x in leaves]
    if takers is None:
        if cluster.config.islands == 1 and not any(_is_of_some(p, cluster.processes) for ps in parts for p in ps):
            return list(leaves)  # one program gathers them
        takers = [range(cluster.processes)] * len(leaves)
    to = [who for who, ps in zip(takers, parts, strict=True) for _ in ps]
    brought = iter(_bring([p for ps in parts for p in ps], to, cluster, what))
    return [_joined(x, ps, [next(brought) for _ in ps]) for x, ps in zip(leaves, parts, strict=True)]


def _is_of_some(x: Any, processes: int) -> bool:
    """Whether an array lives on the devices of some processes only: on a rank of a pipeline."""
    if isinstance(x, RemoteArray):
        return True
    if not isinstance(x, jax.Array) or not x.committed:
        return False
    return len(processes_of(x.sharding.device_set)) < processes


def _joined(x: Any, parts: Sequence[Any], brought: Sequence[Any]) -> Any:
    """A leaf whose parts were brought; the leaf itself if they were here."""
    if all(a is b for a, b in zip(parts, brought, strict=True)):
        return x
    return np.concatenate(list(map(np.asarray, brought))) if isinstance(x, StackedArray) else brought[0]


def _bring(parts: Sequence[Any], to: Sequence[Collection[int]], cluster: Cluster, what: str) -> list[Any]:
    group = group_of_run()
    assert group is not None
    has = [not is_remote(x) if isinstance(x, RemoteArray) else not home_of(x) for x in parts]
    marks = "".join("+" if it else "-" for it in has)
    said = [facts["has"] for facts in group.gather(f"{what} of {number_text(len(parts), 'array')}", {"has": marks})]
    found = list(parts)
    for i, (x, takers) in enumerate(zip(parts, to, strict=True)):
        givers = [p for p, has in enumerate(said) if has[i] == "+"]
        without = [p for p in takers if p not in givers]
        if without:
            found[i] = _bring_one(x, givers, without, cluster)
    return found


def _bring_one(x: Any, givers: Sequence[int], without: Sequence[int], cluster: Cluster) -> Any:
    """Bring one value: the first process that has it sends it to those that do not."""
    if not givers:
        raise ClusterError(f"shardc.fetch: no process of the run has {x!r} any more.")
    tag = f"fetch {cluster.count('value')}"
    if cluster.me in without:
        return of_words(unpack_array(cluster.receive_tagged(givers[0], tag, "at shardc.fetch")), x.dtype)
    if cluster.me in givers and cluster.me in cluster.config.island(givers[0]) and isinstance(x, jax.Array):
        value = whole(x)
        if cluster.me == givers[0]:
            packed = pack_array(np.asarray(words(value)))
            for peer in without:
                cluster.link(peer).send_tagged(tag, packed)
    return x


def whole(x: Any) -> jax.Array:
    """The logical value as an array that this process has whole. The processes of a mesh call it together."""
    if isinstance(x, PlacedArray):
        return x.to_jax() if not isinstance(x, RemoteArray) else x.read()
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    mesh = x.sharding.mesh
    run = jax.jit(_same, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return in_launch_order(ordered_devices(mesh), lambda: run(x))


def _same(x: jax.Array) -> jax.Array:
    return x
