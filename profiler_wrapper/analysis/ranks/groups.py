"""Which ranks may be compared: those of one pipeline stage that do the same."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.ranks.model import Int, OwnTimes


def comparable(own: OwnTimes) -> list[Int]:
    """Places of the ranks of each stage and role, stage by stage."""
    roles = own.roles or ("",) * len(own.ranks)
    members: dict[tuple[int, str], list[int]] = {}
    for place, key in enumerate(zip(own.stages.tolist(), roles, strict=True)):
        members.setdefault(key, []).append(place)
    return [np.array(members[key], dtype=np.int64) for key in sorted(members)]
