"""The methods by name."""

from __future__ import annotations

from typing import Final

from shardc.pipeline.schedule.methods.breadth_first import BREADTH_FIRST
from shardc.pipeline.schedule.methods.dualpipe_v import DUALPIPE_V
from shardc.pipeline.schedule.methods.eager_1f1b import EAGER_1F1B
from shardc.pipeline.schedule.methods.gpipe import GPIPE
from shardc.pipeline.schedule.methods.interleaved import INTERLEAVED
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.one_f1b import ONE_F1B
from shardc.pipeline.schedule.methods.pipedream_2bw import PIPEDREAM_2BW
from shardc.pipeline.schedule.methods.v_half import V_HALF
from shardc.pipeline.schedule.methods.v_min import V_MIN
from shardc.pipeline.schedule.methods.zb_h1 import ZB_H1
from shardc.pipeline.schedule.methods.zb_h2 import ZB_H2
from shardc.pipeline.schedule.methods.zb_v import ZB_V

METHODS: Final[dict[str, Method]] = {
    m.name: m
    for m in (
        GPIPE, ONE_F1B, EAGER_1F1B, INTERLEAVED, BREADTH_FIRST, ZB_H1, ZB_H2, ZB_V, V_HALF, V_MIN, DUALPIPE_V,
        PIPEDREAM_2BW,
    )
}  # fmt: skip
