"""Time that lies between steps: a loop that fetches its batches there is slower than its steps say."""

from __future__ import annotations

from statistics import median

from profiler_wrapper.notices import Notices

_STEPS = 20  # after so many it is known how the loop goes
_LARGE = 0.1  # share of the time


class Gaps:
    """Looks at the first steps, on the host's clock, and says once if usually much time lies between them."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._shares: list[float] = []

    def add(self, *, between_s: float, inside_s: float) -> None:
        """A step, and the time from the end of the one before to its begin."""
        if len(self._shares) == _STEPS:
            return
        self._shares.append(max(0.0, between_s) / ((max(0.0, between_s) + max(0.0, inside_s)) or 1.0))
        share = median(self._shares)  # an evaluation now and then is no part of the loop
        if len(self._shares) == _STEPS and share > _LARGE:
            self._notices.once(
                "gaps",
                f"{100 * share:.0f} % of the time lies between steps (fetching batches?), and is in no step time or "
                "rate: let a step hold it, by log_step() at its end, or with batch = next(batches) inside it",
            )
