"""The methods by name."""

from __future__ import annotations

from typing import Final

from shardc.pipeline.schedules.breadth_first import BREADTH_FIRST
from shardc.pipeline.schedules.dualpipe_v import DUALPIPE_V
from shardc.pipeline.schedules.eager_1f1b import EAGER_1F1B
from shardc.pipeline.schedules.gpipe import GPIPE
from shardc.pipeline.schedules.interleaved import INTERLEAVED
from shardc.pipeline.schedules.method import Method
from shardc.pipeline.schedules.one_f1b import ONE_F1B
from shardc.pipeline.schedules.pipedream_2bw import PIPEDREAM_2BW
from shardc.pipeline.schedules.v_half import V_HALF
from shardc.pipeline.schedules.v_min import V_MIN
from shardc.pipeline.schedules.zb_h1 import ZB_H1
from shardc.pipeline.schedules.zb_h2 import ZB_H2
from shardc.pipeline.schedules.zb_v import ZB_V

METHODS: Final[dict[str, Method]] = {
    m.name: m
    for m in (
        GPIPE, ONE_F1B, EAGER_1F1B, INTERLEAVED, BREADTH_FIRST, ZB_H1, ZB_H2, ZB_V, V_HALF, V_MIN, DUALPIPE_V,
        PIPEDREAM_2BW,
    )
}  # fmt: skip
