"""What a rank waited for others in what it did with them: in transfers, and where nothing tells waiting apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiler_wrapper.analysis.ranks.groups import comparable
from profiler_wrapper.analysis.ranks.medians import Float, largest
from profiler_wrapper.analysis.ranks.model import Bool, Int, OwnTimes

_LEVEL = 0.5  # of a head start: less is left of it where two ranks have met
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
    """The same without the waiting for others that was not measured, and is in the phases where ranks meet.

    A rank that is ahead of the last one waits for it where they meet, and then has lost its head start: what a phase
    took it longer than the quickest rank is waiting, up to that head start, if the phase has levelled the two. Ranks
    need not all meet in the same phase: of DDP's broadcast of buffers, in the forward, some hear sooner than others.
    A phase that levels all ranks, where no waiting was measured, takes each as long as the quickest.
    """
    times, waiting = own.own_ns.copy(), own.waiting_ns.copy()
    for members in comparable(own):
        if len(members) < 2:
            continue
        # What no span covers may lie before the phases or after them: the order counts that explains more.
        orders = (own.kinds, _order(own.kinds, "other", 0))
        waited = max((_waited(own, members, order) for order in orders), key=lambda found: float(np.nansum(found)))
        times[:, members] -= waited
        waiting[:, members] += waited.sum(axis=2)
    return replace(own, own_ns=times, waiting_ns=waiting)


def _order(kinds: tuple[str, ...], kind: str, place: int) -> tuple[str, ...]:
    """With one kind at another place."""
    rest = [one for one in kinds if one != kind]
    return (*rest[:place], kind, *rest[place:])


def _waited(own: OwnTimes, members: Int, order: tuple[str, ...]) -> Float:
    """Of each step, member and kind, what was waited in it without being measured, if they come in this order."""
    measured = np.nan_to_num(own.waiting_ns[:, members])
    waited = np.zeros((len(own.steps), len(members), len(own.kinds)))
    begin = np.zeros(measured.shape)  # of the phase, since that of the step
    for kind in order:
        place = own.kinds.index(kind)
        phase = own.own_ns[:, members, place]
        end = begin + phase
        if kind in _MEETING:
            last = np.where(np.isfinite(end), begin, -np.inf).argmax(axis=1)[:, None]
            ahead = np.take_along_axis(begin, last, 1) - begin
            apart = np.abs(np.take_along_axis(end, last, 1) - end)
            beyond = phase + largest(-phase, axis=1)[:, None]  # the quickest rank's
            if own.waiting_known or not _levels(begin, end):
                beyond = np.where(apart <= _LEVEL * ahead, np.minimum(beyond, ahead - measured), 0.0)
            waited[:, :, place] = np.clip(np.nan_to_num(beyond), 0.0, None)
        begin = end
    return waited


def _levels(begin: Float, end: Float) -> bool:
    """Whether the ranks' differences at the begin of a phase are gone at its end."""
    known = np.isfinite(begin) & np.isfinite(end)
    before, after = _spread(begin, known), _spread(end, known)
    return before > 0 and after < _LEVEL * before


def _spread(times: Float, known: Bool) -> float:
    """Standard deviation over ranks within a step, the median over steps."""
    values = np.where(known, times, np.nan)
    enough = known.sum(axis=1) > 1
    return float(np.median(np.nanstd(values[enough], axis=1))) if enough.any() else 0.0
