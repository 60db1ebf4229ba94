"""Rows of one matrix product C[M,N] = A[M,K] B[K,N] on a grid of devices (van de Geijn and Watts 1997, SUMMA; Solomonik
and Demmel 2011, 2.5-D; Wang et al. 2022, Tesseract; Agarwal et al. 1995, 3-D), and of a linear layer."""

from __future__ import annotations

import jax

from benchmarks.gold.model import array
from benchmarks.gold.row import Row
from shardc import S


def product(a, b):
    return a @ b


def with_gradients(a, b, dc):
    c, pull = jax.vjp(product, a, b)
    return c, *pull(dc)


def grid(name, mesh, size, formula, sent, a, b, c):
    """Annotated: where the algorithm has everything. Automatic: the factors, and their gradients like them."""
    square, factors = array(size, size), {"a": a, "b": b}
    forward, backward = sent
    unit = round(forward) // 8
    yield Row(
        name, mesh, product, (square, square), formula[0], forward, unit,
        annotated={"in_placements": factors, "out_placements": c}, auto={"in_placements": factors},
    )  # fmt: skip
    yield Row(
        f"{name}_gradients", mesh, with_gradients, (square,) * 3, " + ".join(formula), forward + backward, unit,
        annotated={"in_placements": {**factors, "dc": c}, "out_placements": (c, a, b)},
        auto={"in_placements": factors, "out_placements": (None, a, b)},
    )  # fmt: skip


def summa(q, size=256):
    """Rows of A and columns of B are gathered; kept, they serve the gradients, which are scattered the same ways."""
    tiles = {"x": S(0), "y": S(1)}
    once = (q - 1) / q * 2 * size**2 * 4 / q
    return grid(
        f"summa_{q}x{q}", {"x": q, "y": q}, size, ("(q-1)/q·(MK+KN)e/q", "the same"), (once, once), tiles, tiles, tiles
    )


def two_and_a_half(q=2, c=2, size=256):
    """The rows of A and C are also split over z, where B and its gradient are whole."""
    rows, square = {"z": S(0), "x": S(0), "y": S(1)}, size**2 * 4
    once = (q - 1) / q * (square / (q * c) + square / q)
    return grid(
        "matmul_2.5d", {"z": c, "x": q, "y": q}, size,
        ("(q-1)/q·(MK/qc+KN/q)e", "the same", "2(c-1)/c·KNe/q²"), (once, once + 2 * (c - 1) / c * square / q**2),
        rows, {"x": S(0), "y": S(1)}, rows,
    )  # fmt: skip


def three(l=2, size=256):
    """Axes m, k, n hold those dimensions; the third splits what would be whole along it."""
    once = (l - 1) / l * 3 * size**2 * 4 / l**2
    return grid(
        "matmul_3d", {"k": l, "m": l, "n": l}, size, ("(l-1)/l·(MK+KN+MN)e/l²", "the same"), (once, once),
        {"m": S(0), "n": S(0), "k": S(1)}, {"k": S(0), "m": S(0), "n": S(1)}, {"m": S(0), "k": S(0), "n": S(1)},
    )  # fmt: skip


def linear(name, moved, M, N, y, K=256, n=8):
    """Rows of x split, columns of w: one of them is gathered."""
    factors = {"x": {"model": S(0)}, "w": {"model": S(1)}}
    sent = (n - 1) / n * (K * N if moved == "weights" else M * K) * 4
    return Row(
        name, {"model": n}, lambda x, w: x @ w, (array(M, K), array(K, N)),
        "(n-1)/n·KNe" if moved == "weights" else "(n-1)/n·MKe", sent, round(sent),
        annotated={"in_placements": factors, "out_placements": y}, auto={"in_placements": factors},
        note=f"M={M}, N={N}",
    )  # fmt: skip


ROWS = (
    *summa(2),
    *summa(4),
    *two_and_a_half(),
    *three(),
    linear("weight_gathered", "weights", 512, 64, {"model": S(0)}),
    linear("activation_gathered", "activations", 64, 512, {"model": S(1)}),
)
