"""Whose time a step was, stage by stage: the running maximum over ranks of the time up to each kind.

Only ranks of one stage are compared. What a rank did itself is summed kind by kind; the maximum over ranks of these
sums grows from kind to kind, and what it grows by is the time that this kind, on the rank that leads, held the rest.
"""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.ranks.model import Accounting, OwnTimes

WAITING = "waiting"  # the last part: what the longest rank waited


def account(own: OwnTimes) -> Accounting:
    """The parts of every step of every stage. They add up to the longest time of a rank in it, waiting included."""
    stages = np.unique(own.stages)
    shape = (len(own.steps), len(stages), len(own.kinds) + 1)
    held = np.zeros(shape, dtype=np.int64)
    holder = np.full(shape, -1, dtype=np.int64)
    parts = np.concatenate([own.own_ns, own.waiting_ns[:, :, None]], axis=2)
    known = np.isfinite(parts).all(axis=2)
    up_to = np.cumsum(np.rint(np.where(known[:, :, None], parts, 0.0)).astype(np.int64), axis=2)
    up_to[~known] = -1
    for place, stage in enumerate(stages):
        members = np.flatnonzero(own.stages == stage)
        times = up_to[:, members]
        leader = times.argmax(axis=1)  # (S, K)
        most = np.take_along_axis(times, leader[:, None], axis=1)[:, 0]
        present = known[:, members].any(axis=1)
        held[:, place] = np.where(present[:, None], np.diff(most, axis=1, prepend=0), 0)
        # Ranks that have all taken equally long have no slowest.
        there = known[:, members]
        equal = ((times == most[:, None]) | ~there[:, :, None]).all(axis=1) & (there.sum(axis=1) > 1)[:, None]
        holder[:, place] = np.where(present[:, None] & ~equal, own.ranks[members][leader], -1)
    return Accounting(
        stages=stages.astype(np.int64), steps=own.steps, kinds=(*own.kinds, WAITING), held_ns=held, holder=holder
    )
