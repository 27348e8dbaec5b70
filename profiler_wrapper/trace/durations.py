"""Check durations of device events against the order of their stream: some profilers record impossible ones."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.trace.recording import DEVICE_CATEGORIES, Bool, Category, Int8, Int32, Int64

_OVERLAP_NS = 50_000  # programmatic launches of one stream overlap, by 3.7 us at most in recorded traces
_TAIL_NS = 1_000_000  # a kernel may go on after the last other event, where nobody waited for the device


def bound_durations(
    category: Int8, lane: Int32, device: Int64, correlation: Int64, start: Int64, duration: Int64, kept: Bool
) -> tuple[Int64, Bool, list[str]]:
    """Give the durations, the events that are kept, and warnings, once no device event lasts longer than it can.

    A stream runs what is launched into it in order. So what runs over the start of a later launch of its stream is cut
    there; kernels of one launch (a graph) may run side by side. Where nothing follows in the stream, all other events
    are what there is to compare with: what ends after them by more than they last together is left out.
    """
    chosen = np.flatnonzero(kept & np.isin(category, DEVICE_CATEGORIES))
    chosen = chosen[np.lexsort((start[chosen], device[chosen], lane[chosen]))]
    if not len(chosen):
        return duration, kept, []
    no_time = int((duration[chosen[category[chosen] == Category.KERNEL]] == 0).sum())
    same_stream = (np.diff(lane[chosen]) == 0) & (np.diff(device[chosen]) == 0)
    same_launch = same_stream & (np.diff(correlation[chosen]) == 0) & (correlation[chosen[1:]] >= 0)
    first = np.flatnonzero(np.append(True, ~same_launch))  # event of each launch
    launch = np.cumsum(np.append(True, ~same_launch)) - 1
    follows = np.append(same_stream[first[1:] - 1], False)[launch]
    next_start = start[chosen[np.append(first[1:], 0)]][launch]
    end = start[chosen] + duration[chosen]
    cut = follows & (end > next_start + _OVERLAP_NS)
    duration = duration.copy()
    duration[chosen[cut]] = next_start[cut] - start[chosen[cut]]
    ends = start + duration
    ends[chosen[~follows]] = start[chosen[~follows]]
    rest_end = int(ends[kept].max())
    limit = rest_end + max(rest_end - int(start[kept].min()), _TAIL_NS)
    beyond = chosen[~follows & (end > limit)]
    kept = kept.copy()
    kept[beyond] = False
    found = (
        (int(cut.sum()), "device events ran over later ones of their stream: their durations were cut there"),
        (len(beyond), "device events with an impossible duration, far beyond the end of all others, were left out"),
        (no_time, "kernels have a duration of 0, not measured or below the trace's clock: their time is in no figure"),
    )
    return duration, kept, [f"{count} {what}" for count, what in found if count]
