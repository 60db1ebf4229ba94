"""The pictures of README and docs, made anew: `python -m scripts.pictures`, which needs Chromium for the page.

- `docs/pictures/report.png`: the page of a plan of GPT-2 (124M), data and tensor parallel on 8 chips of TPU v5p.
- `docs/pictures/timeline.svg`: a call of GPT-2 as a pipeline of four ranks, as planned.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from PIL import Image

import shardc
from examples.plans.stages import between
from examples.zoo import MODELS

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE: Final = 1180, 1340
"""Pixels of the part of the page that is shown."""
COLOURS: Final = 128
"""The colours of the picture: it is a third as large then."""


def planned(plan: str, rows: int, mesh: Mapping[str, Any], *hooks: Any) -> Any:
    """A plan of GPT-2's step. `hooks`: accumulate and between, as for its `make_step`."""
    model = MODELS["gpt2"]
    cfg = model.configs["small124m"]
    init, step = model.make_step(cfg, *hooks)
    state, batch = jax.eval_shape(init, jax.random.key(0)), next(model.batches(cfg, rows, 0))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)), (*state, batch))
    return shardc.function(step, mesh=shardc.make_mesh(**mesh), **model.plans[plan]()).plan(*args)


def screenshot(page: Path, picture: Path) -> None:
    """A picture of the upper part of a page."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)))
    width, height = SIZE
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000",
         f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip
    Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Write both pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        planned("data_tensor", 16, {"topology": "v5p:2x2x2", "data": 4, "model": 2}).report(page)
        screenshot(page, FOLDER / "report.png")
    hooks = partial(shardc.accumulate, microbatches=8), between(12, 4)
    mesh = {"topology": "v5p:4x2x2", "pipe": 4, "data": 2, "model": 2}
    planned("pipeline", 32, mesh, *hooks).draw(FOLDER / "timeline.svg")


if __name__ == "__main__":
    main()
