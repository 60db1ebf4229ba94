"""Weights of Hugging Face, in files of safetensors, onto a mesh and back: a device reads its pieces, the host has one.

    python -m examples.weights                     # a Llama, a GPT-2 and a Gemma, made at random, read and written
    python -m examples.weights --megabytes 2000    # a Llama of this size onto 8 devices; prints what the host needed

A table says for each leaf of the model which tensor of the files it is, as einops writes it:

    "blocks_{i}/attn/q/kernel": "model.layers.{i}.self_attn.q_proj.weight: out in -> in out"

A name in braces stands for a part of a path (`{part=q,k,v}` for one of these), or is a dimension of the leaf along
which tensors are stacked. Names in parentheses are dimensions that the file has as one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import shardc
from examples import gpt2, llama
from examples.train import fake_cpu_devices, positive

LLAMA = {  # examples/llama.py
    "embed/embedding": "model.embed_tokens.weight: v d -> v d",
    "blocks_{i}/norm_1/scale": "model.layers.{i}.input_layernorm.weight: d -> d",
    "blocks_{i}/attn/out/kernel": "model.layers.{i}.self_attn.o_proj.weight: out in -> in out",
    "blocks_{i}/attn/{qkv}/kernel": "model.layers.{i}.self_attn.{qkv}_proj.weight: out in -> in out",
    "blocks_{i}/norm_2/scale": "model.layers.{i}.post_attention_layernorm.weight: d -> d",
    "blocks_{i}/mlp/{name}/kernel": "model.layers.{i}.mlp.{name}_proj.weight: out in -> in out",
    "norm/scale": "model.norm.weight: d -> d",
    "head/kernel": "lm_head.weight: v d -> d v",
}
SCANNED_LLAMA = {  # with scan_layers=True: dimension 0 of a leaf are the layers
    leaf.replace("blocks_{i}", "blocks"): tensor.replace("-> ", "-> i ") if "{i}" in tensor else tensor
    for leaf, tensor in LLAMA.items()
}
GPT2 = {  # examples/gpt2.py; the file has q, k and v side by side, and products as x @ w
    "wte/embedding": "wte.weight: v d -> v d",
    "wpe/embedding": "wpe.weight: t d -> t d",
    "blocks_{i}/ln_{n}/scale": "h.{i}.ln_{n}.weight: d -> d",
    "blocks_{i}/ln_{n}/bias": "h.{i}.ln_{n}.bias: d -> d",
    "blocks_{i}/attn/out/kernel": "h.{i}.attn.c_proj.weight: in out -> in out",
    "blocks_{i}/attn/out/bias": "h.{i}.attn.c_proj.bias: out -> out",
    "blocks_{i}/attn/{part=q,k,v}/kernel": "h.{i}.attn.c_attn.weight: in (part out) -> in out",
    "blocks_{i}/attn/{part=q,k,v}/bias": "h.{i}.attn.c_attn.bias: (part out) -> out",
    "blocks_{i}/mlp/up/kernel": "h.{i}.mlp.c_fc.weight: in out -> in out",
    "blocks_{i}/mlp/up/bias": "h.{i}.mlp.c_fc.bias: out -> out",
    "blocks_{i}/mlp/down/kernel": "h.{i}.mlp.c_proj.weight: in out -> in out",
    "blocks_{i}/mlp/down/bias": "h.{i}.mlp.c_proj.bias: out -> out",
    "ln_f/scale": "ln_f.weight: d -> d",
    "ln_f/bias": "ln_f.bias: d -> d",
}
GEMMA = {  # the layout of google-deepmind/gemma: a dimension for heads, k with v, the gate with what it gates
    "embedder/input_embedding": "model.embed_tokens.weight: v d -> v d",
    "layer_{i}/pre_attention_norm/scale": "model.layers.{i}.input_layernorm.weight: d -> d",
    "layer_{i}/attn/q_einsum/w": "model.layers.{i}.self_attn.q_proj.weight: (h k) d -> h d k",
    "layer_{i}/attn/kv_einsum/w": "model.layers.{i}.self_attn.{kv=k,v}_proj.weight: (g k) d -> kv g d k",
    "layer_{i}/attn/attn_vec_einsum/w": "model.layers.{i}.self_attn.o_proj.weight: d (h k) -> h k d",
    "layer_{i}/pre_ffw_norm/scale": "model.layers.{i}.post_attention_layernorm.weight: d -> d",
    "layer_{i}/mlp/gating_einsum": "model.layers.{i}.mlp.{name=gate,up}_proj.weight: f d -> name d f",
    "layer_{i}/mlp/linear": "model.layers.{i}.mlp.down_proj.weight: d f -> f d",
    "final_norm/scale": "model.norm.weight: d -> d",
}
Table = Mapping[str, str]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """The elements of a leaf that one tensor of the files has.

    Attributes:
      tensor: its name.
      at: where they are in the leaf: a number for each stacked dimension.
      axes: of each dimension of the tensor the names of its factors.
      sizes: of the factors.
      fixed: the factors that the leaf's path fixes.
      order: the factors that are dimensions of the leaf.
    """

    tensor: str
    at: tuple[Any, ...]
    axes: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]
    fixed: Mapping[str, range]
    order: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(math.prod(self.sizes[f] for f in factors) for factors in self.axes)

    def cut(self, tensor: Any, ranges: Mapping[str, range]) -> np.ndarray:
        """The elements in some ranges of the leaf's dimensions, in the leaf's order: of an array a view, of a slice of
        safetensors what is read."""
        ranges, slices, shape, rest = {**ranges, **self.fixed}, [], [], []
        for factors in self.axes:
            start, stop = 0, 1
            for f in factors:
                n, wanted, is_one = self.sizes[f], ranges[f], stop - start == 1
                start, stop = start * n, stop * n
                if is_one:  # no more of the file is read than this
                    start, stop = start + wanted.start, start + wanted.stop
                shape.append(len(wanted) if is_one else n)
                rest.append(slice(None) if is_one else slice(wanted.start, wanted.stop))
            slices.append(slice(start, stop))
        found = tensor[tuple(slices)].reshape(shape)[tuple(rest)]
        names = list(itertools.chain(*self.axes))
        found = found.transpose([names.index(f) for f in (*self.order, *self.fixed)])
        return found.reshape(found.shape[: len(self.order)])


def parts(table: Table, path: str, shape: Sequence[int]) -> Iterator[Part]:
    """The tensors that a leaf is made of."""
    for leaf, row in table.items():
        labels = {name: few.split(",") for name, few in re.findall(r"{(\w+)=(.*?)}", leaf + row)}
        pattern, tensor = (re.sub(r"{(\w+)=.*?}", r"{\1}", text) for text in (leaf, row.partition(":")[0]))
        if found := re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", pattern), path):
            break
    else:
        raise KeyError(f"no row of the table is for the leaf {path}")
    source, target = row.partition(": ")[2].split(" -> ")
    axes = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\(.*?\)|\w+", source))
    dims, factors = target.split(), set(itertools.chain(*axes))
    at = {name: labels[name].index(found[name]) for name in labels if name in found.groupdict()}
    sizes = dict(zip(dims, shape, strict=True)) | {name: len(labels[name]) for name in at}
    fixed, order = {name: range(n, n + 1) for name, n in at.items()}, tuple(d for d in dims if d in factors)
    stacked = [d for d in dims if d not in factors]
    for numbers in itertools.product(*(range(sizes[d]) for d in stacked)):
        at = dict(zip(stacked, numbers, strict=True))
        named = {d: labels[d][n] if d in labels else n for d, n in at.items()}
        where = tuple(at.get(d, slice(None)) for d in dims)
        yield Part(tensor.format(**found.groupdict(), **named), where, axes, sizes, fixed, order)


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, as rules see them."""
    pairs, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in pairs}


def reader(folder: Path, table: Table, like: Any, prefix: str = "") -> Callable[[str, Index], np.ndarray]:
    """What `shardc.put(like, mesh, placements, read=...)` asks for pieces of the leaves; `like` are their shapes."""
    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            files.update(dict.fromkeys(opened.keys(), file))
    leaves = by_path(like)

    def read(path: str, at: Index) -> np.ndarray:
        leaf = leaves[path]
        found = np.empty([s.stop - s.start for s in at], leaf.dtype)
        for part in parts(table, path, leaf.shape):
            inside = [n if isinstance(n, slice) else n - s.start for n, s in zip(part.at, at, strict=True)]
            if all(isinstance(n, slice) or 0 <= n < size for n, size in zip(inside, found.shape, strict=True)):
                kept = [range(s.start, s.stop) for n, s in zip(part.at, at, strict=True) if isinstance(n, slice)]
                with safe_open(files[prefix + part.tensor], "np") as opened:  # closed again: its pages are let go
                    tensor = opened.get_slice(prefix + part.tensor)
                    found[tuple(inside)] = part.cut(tensor, dict(zip(part.order, kept, strict=True)))
        return found

    return read


def write(folder: Path, params: Any, table: Table, prefix: str = "", limit: int = 5 * 2**30) -> None:
    """Files of at most `limit` bytes, and the index that Hugging Face reads; the host has one file's tensors at a time.
    In several processes all call it, and the first one writes."""
    leaves, tensors = by_path(params), {}
    for path, x in leaves.items():
        for part in parts(table, path, x.shape):
            tensors.setdefault(prefix + part.tensor, []).append((path, part))
    files: list[list[str]] = [[]]
    room = limit
    for name, ((path, part), *_) in tensors.items():
        size = math.prod(part.shape) * leaves[path].dtype.itemsize
        if size > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for file, members in zip(names, files, strict=True):
        made = {}
        for name in members:
            for path, part in tensors[name]:
                x = leaves[path]
                value = shardc.fetch(x[part.at] if len(part.order) < x.ndim else x)
                whole = made.setdefault(name, np.empty(part.shape, value.dtype))
                part.cut(whole, {d: range(part.sizes[d]) for d in part.order})[...] = value
        if jax.process_index() == 0:
            save_file(made, folder / file, {"format": "pt"})
    if jax.process_index() == 0:
        index = {"metadata": {}, "weight_map": {n: f for f, members in zip(names, files, strict=True) for n in members}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def gemma(layers: int, d: int, heads: int, k: int, hidden: int, vocab: int) -> Any:
    """The shapes of a Gemma, in bfloat16."""
    layer = {
        "pre_attention_norm": {"scale": (d,)},
        "attn": {
            "q_einsum": {"w": (heads, d, k)},
            "kv_einsum": {"w": (2, 1, d, k)},
            "attn_vec_einsum": {"w": (heads, k, d)},
        },
        "pre_ffw_norm": {"scale": (d,)},
        "mlp": {"gating_einsum": (2, d, hidden), "linear": (hidden, d)},
    }
    whole = {"embedder": {"input_embedding": (vocab, d)}, "final_norm": {"scale": (d,)}}
    whole |= {f"layer_{i}": layer for i in range(layers)}
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jax.numpy.bfloat16), whole, is_leaf=lambda x: type(x) is tuple
    )


def shapes(module: Any, cfg: Any) -> Any:
    """The shapes of the parameters of a model of the zoo."""
    return jax.eval_shape(module.make_step(cfg)[0], jax.random.key(0))[0]


def models() -> dict[str, tuple[Table, Any]]:
    """Of each layout the table and the shapes of a small model."""
    scanned = replace(llama.CONFIGS["test"], scan_layers=True)
    return {
        "llama": (LLAMA, shapes(llama, llama.CONFIGS["test"])),
        "llama, scanned": (SCANNED_LLAMA, shapes(llama, scanned)),
        "gpt2": (GPT2, shapes(gpt2, gpt2.CONFIGS["test"])),
        "gemma": (GEMMA, gemma(layers=2, d=32, heads=4, k=16, hidden=48, vocab=64)),
    }


def random(like: Any) -> Any:
    """Parameters at random, on the host; of large ones all rows are alike, and take no memory."""
    rng = np.random.default_rng(0)

    def one(x):
        shape = x.shape if x.size < 2**20 else x.shape[-1:]
        return np.broadcast_to(rng.normal(size=shape).astype(x.dtype), x.shape)

    return jax.tree.map(one, like)


def memory(name: str) -> int:
    """Bytes of this process, of /proc/self/status: VmRSS those that it has, with pages of files, VmHWM the most yet."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name)]
    return int(line.split()[1]) * 1024


def there_and_back(name: str, table: Table, like: Any, mesh: jax.sharding.Mesh) -> None:
    """A model at random in files, on the mesh, and in files again."""
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as back:
        write(Path(here), random(like), table, limit=50_000)
        params = shardc.put(like, mesh, shardc.fsdp("data"), read=reader(Path(here), table, like))
        write(Path(back), params, table)
        tensors, again = (
            {n: x for f in Path(d).glob("*.safetensors") for n, x in load_file(f).items()} for d in (here, back)
        )
        equal = tensors.keys() == again.keys() and all((tensors[n] == again[n]).all() for n in tensors)
        print(
            f"{name}: {len(tensors)} tensors in {len(list(Path(here).glob('*.safetensors')))} files, "
            f"{len(jax.tree.leaves(params))} leaves, back {'equal' if equal else 'NOT EQUAL'}"
        )


def write_llama(folder: str, megabytes: int) -> None:
    write(Path(folder), random(large(megabytes)), LLAMA, limit=2**29)


def large(megabytes: int) -> Any:
    """The shapes of a Llama of about so many megabytes."""
    layers = max(1, round((megabytes - 524) / 243))
    cfg = llama.Config(layers=layers, d_model=2048, heads=16, kv_heads=4, hidden=8192, seq=16, vocab=32_000)
    return shapes(llama, cfg)


def measure(megabytes: int, mesh: jax.sharding.Mesh) -> None:
    """Prints what the host had while a model went onto the mesh, beside what is on (fake CPU) devices in the end."""
    like = large(megabytes)
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("spawn").Process(target=write_llama, args=(folder, megabytes))
        child.start()
        child.join()
        begin, read, largest = memory("VmRSS"), reader(Path(folder), LLAMA, like), 0

        def seen(path: str, at: Index) -> np.ndarray:
            nonlocal largest
            piece = read(path, at)
            largest = max(largest, piece.nbytes)
            return piece

        params = shardc.put(like, mesh, shardc.fsdp("data"), read=seen)
        size = sum(x.nbytes for x in jax.tree.leaves(params))
        host = memory("VmHWM") - begin - size
    print(
        f"{size / 1e6:.0f} MB on {mesh.size} devices; the largest piece has {largest / 1e6:.1f} MB; "
        f"the host had at most {host / 1e6:.0f} MB more than these and what it began with"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=positive, help="only measure, with a Llama of this size")
    parser.add_argument("--devices", type=positive, default=8)
    options = parser.parse_args(argv)
    fake_cpu_devices(options.devices)
    mesh = shardc.make_mesh(data=options.devices)
    if options.megabytes:
        measure(options.megabytes, mesh)
        return 0
    for name, (table, like) in models().items():
        there_and_back(name, table, like, mesh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
