"""Time between steps is said where there is much of it."""

from __future__ import annotations

import pytest

from profiler_wrapper.errors import Notices, ProfilerWrapperWarning
from profiler_wrapper.monitor.steps import Gaps


def add(gaps: Gaps, *between_s: float) -> None:
    for gap in between_s:
        gaps.add(round(gap * 1e9), 90_000_000)


def test_a_loop_that_fetches_between_its_steps_is_told_once() -> None:
    gaps = Gaps(Notices())
    with pytest.warns(ProfilerWrapperWarning, match=r"^25 % of the time lies between steps") as told:
        add(gaps, *[0.03] * 200)
    assert len(told) == 1


@pytest.mark.filterwarnings("error")
def test_short_gaps_and_an_evaluation_now_and_then_are_not_told() -> None:
    add(Gaps(Notices()), *[0.009] * 200)
    add(Gaps(Notices()), *[0.0, 0.0, 60.0] * 60)
    add(Gaps(Notices()), -1.0, 0.0)
