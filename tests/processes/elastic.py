"""A small training on as many devices as there are: `python -m shardc run ... elastic.py DIRECTORY STEPS SECONDS`.

Prints for each step its number, the number of devices and the loss.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import S


def main(directory, steps, seconds):
    mesh = shardc.make_mesh(data=-1)
    split = {"data": S(0)}

    @shardc.function(mesh=mesh, in_placements={"batch": split})
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(w)
        return w - 0.1 * grad, loss

    def one(i, w):
        time.sleep(seconds)
        batch = np.random.default_rng(i).standard_normal((24, 6)).astype(np.float32)
        mine = shardc.rows_here(batch.shape, mesh, split)
        w, loss = step(w, shardc.put(batch[mine], mesh, split, here=True))
        print(i, mesh.size, float(loss).hex(), flush=True)
        return w, loss

    with shardc.checkpoints(directory, every=4, keep=1000) as saved:
        saved.run(one, lambda: jnp.ones(6), steps=steps, mesh=mesh, placements={})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
