"""What a rank waited for others in what it did with them: in transfers, and where nothing tells waiting apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiler_wrapper.analysis.ranks.groups import comparable
from profiler_wrapper.analysis.ranks.medians import Float, largest
from profiler_wrapper.analysis.ranks.model import Bool, OwnTimes

_LEVEL = 0.25  # of the variance before it: less is left where ranks met
_MEETING = ("forward", "backward", "communication", "optimizer", "other")  # where ranks may wait


def with_shared_transfers(own: OwnTimes) -> OwnTimes:
    """The same, where a step's transfers take each rank no longer than that which they took least.

    Ranks that do the same have the same transfers. Whoever computes longer hides more of them behind that, and what
    others see of that part they see because they have nothing left to do: they wait.
    """
    at = own.kinds.index("communication")
    times, waiting = own.own_ns.copy(), own.waiting_ns.copy()
    for members in comparable(own):
        seen = times[:, members, at]
        shared = np.minimum(seen, -largest(-seen, axis=1)[:, None])
        times[:, members, at] = shared
        waiting[:, members] += seen - shared
    return replace(own, own_ns=times, waiting_ns=waiting)


def without_waiting(own: OwnTimes) -> OwnTimes:
    """The same where waiting is known. Else phases that level the ranks are taken as long as on the last to come.

    Whoever comes last to a meeting waits for none, and its time is the shortest. So where the ranks' times differ
    before a phase and no longer after it, the shortest time of a rank in the step is its own, the rest is waiting.
    """
    if own.waiting_known:
        return own
    times, waiting = own.own_ns.copy(), own.waiting_ns.copy()
    for members in comparable(own):
        if len(members) < 2:
            continue
        # What no span covers may lie before the meeting or be where they meet: the first order that has one counts.
        for order in (_order(own.kinds, "other", 0), own.kinds):
            found = _meetings(times[:, members], [own.kinds.index(kind) for kind in order], own.kinds)
            if found:
                break
        for place in found:
            phase = times[:, members, place]
            shortest = -largest(-phase, axis=1)
            alone = np.where(np.isfinite(phase), shortest[:, None], np.nan)
            times[:, members, place] = alone
            waiting[:, members] += phase - alone
    return replace(own, own_ns=times, waiting_ns=waiting)


def _order(kinds: tuple[str, ...], kind: str, place: int) -> tuple[str, ...]:
    """With one kind at another place."""
    rest = [one for one in kinds if one != kind]
    return (*rest[:place], kind, *rest[place:])


def _meetings(times: Float, order: list[int], kinds: tuple[str, ...]) -> list[int]:
    """The kinds, as places, after which the ranks are level though they were not before."""
    found = []
    since_meeting = np.zeros(times.shape[:2])
    for place in order:
        phase = times[:, :, place]
        if kinds[place] in _MEETING and _levels(since_meeting, phase):
            found.append(place)
            since_meeting = np.zeros_like(since_meeting)
        else:
            since_meeting = since_meeting + phase
    return found


def _levels(before: Float, phase: Float) -> bool:
    """Whether the ranks' differences before a phase are gone after it."""
    known = np.isfinite(before) & np.isfinite(phase)
    spread_before, spread_after = _spread(before, known), _spread(before + phase, known)
    return spread_before > 0 and spread_after < _LEVEL * spread_before


def _spread(times: Float, known: Bool) -> float:
    """Variance over ranks within a step, the median over steps."""
    values = np.where(known, times, np.nan)
    enough = known.sum(axis=1) > 1
    return float(np.median(np.nanvar(values[enough], axis=1))) if enough.any() else 0.0
