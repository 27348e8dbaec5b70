"""What a step is shorter by, at most, where some of its work vanishes.

The CPU issues work in order, and a device does it in order. So a step takes as long as the longest path through it:
CPU time up to some launch, then device time from there on. Without some of the work that path is still there, and
shorter by what of the work lay on it: CPU time before a launch and device time after it. The largest such sum over
all launches is one bound. The other: a device that still has all else to do cannot save more than the device time of
the work, and its idle time. Profiling makes ops slower on the CPU, which makes both larger, never smaller.
"""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.recording.nesting import self_time
from profiler_wrapper.recording.recording import Bool, Category, Int64


def saved_at_most_ns(facts: Facts, vanishing: Bool, *, stays_ns: float = 0.0, own_ns: Int64 | None = None) -> float:
    """Wall time of a step, at most, that the CPU events marked as `vanishing` take, with all that they launch.

    Of each the time that is its own, without what lies inside. `stays_ns`: device time a step that is left at least,
    whatever takes their place. `own_ns`: that time of every event, where it is less than that without what lies inside.
    """
    spans, charges = facts.found.recording.spans, facts.found.charges
    own_ns = own_cpu_ns(facts) if own_ns is None else own_ns
    members = np.flatnonzero(vanishing & (own_ns > 0))
    cpu_ns = float(own_ns[members].sum())
    if not facts.on_device:
        return facts.per_step_ns(int(cpu_ns))
    launched = np.flatnonzero((charges.cpu_span >= 0) & vanishing[np.maximum(charges.cpu_span, 0)])
    launched = launched[np.argsort(charges.launch_ns[launched], kind="stable")]
    device_ns = float(charges.time_ns[launched].sum())
    by_path = max(cpu_ns, device_ns)
    if len(launched) and len(members):
        members = members[np.argsort(spans.start_ns[members], kind="stable")]
        until = np.concatenate(([0], np.cumsum(own_ns[members])))
        before = until[np.searchsorted(spans.start_ns[members], charges.launch_ns[launched], side="right")]
        after = np.cumsum(charges.time_ns[launched][::-1])[::-1]
        by_path = max(by_path, float((before + after).max()))
    idle_ns = max(0.0, facts.step_ns * facts.steps - (facts.analysis.time.busy_ns or 0))
    idle_ns = max(idle_ns, (facts.idle_ns or 0.0) * facts.steps)  # the device may be busy outside of the steps too
    by_device = max(0.0, device_ns - stays_ns * facts.steps) + idle_ns
    return min(by_path, by_device) / facts.steps


def time_of_ns(facts: Facts, chosen: Bool) -> float:
    """Device time (on a CPU-only trace, CPU time) of a step that CPU events launched, or took."""
    charges = facts.found.charges
    counts = (charges.cpu_span >= 0) & chosen[np.maximum(charges.cpu_span, 0)]
    return facts.per_step_ns(int(charges.time_ns[counts].sum()))


def own_cpu_ns(facts: Facts) -> Int64:
    """Per CPU event the wall time in which it is the innermost of its thread: marks and annotations take time here."""
    spans = facts.found.recording.spans
    counts = spans.category <= Category.MODULE
    return self_time(facts.found.nesting, spans.lane, spans.start_ns, spans.end_ns, counts=counts)
