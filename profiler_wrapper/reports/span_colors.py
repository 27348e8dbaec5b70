"""The colours of kinds of spans: phases as in every picture; waiting is pale, so that who does not wait stands out.

Told apart with any colour vision: those of Okabe and Ito, "Color Universal Design" (2008), where they have one.
"""

from __future__ import annotations

from collections.abc import Mapping

from profiler_wrapper.reports.class_colors import SPLIT_COLORS
from profiler_wrapper.reports.figures import PHASE_COLORS

SPAN_COLORS: Mapping[str, str] = {
    "data": SPLIT_COLORS["dataloader"],
    "forward": PHASE_COLORS["forward"],
    "recompute": PHASE_COLORS["recompute"],
    "backward": PHASE_COLORS["backward"],
    "communication": "#56B4E9",  # the transfer, where that is known
    "waiting": "#E3E3E3",  # for others, within communication
    "optimizer": PHASE_COLORS["optimizer"],
    "gc": "#000000",
    "checkpoint": SPLIT_COLORS["memcpy"],
    "other": PHASE_COLORS["other"],
}
CULPRIT = "#C00000"  # marks whom the verdict names
