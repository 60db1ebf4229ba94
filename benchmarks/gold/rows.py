"""All rows by name, in the order of the table."""

from __future__ import annotations

from benchmarks.gold import data, products, tensor, tokens
from benchmarks.gold.row import Row, Side

ROWS: dict[str, Row] = {
    row.name: row for row in (*tensor.ROWS, *data.ROWS, *tokens.ROWS, *products.ROWS)
}  # fmt: skip

MISSED: dict[tuple[str, Side], float] = {}
"""Sides that send more than the formula, and the ratio that a better search should give them."""
