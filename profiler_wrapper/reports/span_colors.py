"""The colours of kinds of spans: phases as in every picture, communication pale, as it is mostly waiting.

Told apart with any colour vision (Okabe and Ito, "Color Universal Design", 2008).
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
    "communication": "#C9D8E2",
    "optimizer": PHASE_COLORS["optimizer"],
    "gc": "#000000",
    "checkpoint": SPLIT_COLORS["memcpy"],
    "other": PHASE_COLORS["other"],
}
WAITING = "#E3E3E3"  # where it stands apart from communication
CULPRIT = "#C00000"  # marks whom the verdict names
