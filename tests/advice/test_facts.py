"""What a step is shorter by at most, on recordings made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from advice_facts import facts_of
from profiler_wrapper.advice.facts import Facts
from profiler_wrapper.trace.nesting import nearest
from recordings import Trace

STEP_NS = 1000


def saved_ns(facts: Facts, name: str, *, with_inner: bool = False) -> float:
    recording = facts.found.recording
    vanishing = np.array([text == name for text in recording.names], dtype=np.bool_)[recording.spans.name]
    if with_inner:
        vanishing = nearest(facts.found.nesting.parent, vanishing) >= 0
    return facts.saved_at_most_ns(vanishing)


def on_a_cpu(taken_ns: list[int]) -> Facts:
    """Steps in which an op takes so long (0: it is not called), and another the rest."""
    made = Trace()
    for step, taken in enumerate(taken_ns):
        at = step * STEP_NS
        made.annotation(f"ProfilerStep#{step + 2}", at, at + STEP_NS)
        if taken:
            made.op("slow", at + 10, at + 10 + taken)
        made.op("rest", at + 10 + taken, at + STEP_NS - 10)
    return facts_of(made.recording())


@pytest.mark.parametrize(
    ("taken_ns", "saved"),
    [
        ([40, 50, 60], 50.0),
        ([50, 800, 50], 300.0),
        ([40, 60], 50.0),
        ([0, 0, 0, 80], 20.0),  # in every fourth step
        ([0, 60, 0, 60, 0, 240], 60.0),
    ],
)
def test_what_vanishes_counts_as_in_the_mean_step(taken_ns: list[int], saved: float) -> None:
    assert saved_ns(on_a_cpu(taken_ns), "slow") == pytest.approx(saved)


def test_time_of_what_lies_inside_is_not_its_own() -> None:
    made = Trace().annotation("ProfilerStep#2", 0, STEP_NS)
    made.op("slow", 10, 500).op("rest", 100, 300)
    assert saved_ns(facts_of(made.recording()), "slow") == pytest.approx(290)


def test_without_steps_it_is_of_the_whole_trace() -> None:
    made = Trace().op("slow", 0, 100).op("slow", 200, 250).op("rest", 300, 900)
    assert saved_ns(facts_of(made.recording()), "slow") == pytest.approx(150)


def test_on_a_device_no_more_than_its_time_and_what_idles() -> None:
    """The device is busy for 400 of 1000 ns with what vanishes, for 300 with the rest, and idle for 300."""
    made = Trace().annotation("ProfilerStep#2", 0, STEP_NS)
    made.op("slow", 0, 900).kernel("gemm", 100, 500, launched=50)
    made.op("rest", 900, 910).kernel("gemm", 500, 800, launched=905)
    assert saved_ns(facts_of(made.recording()), "slow", with_inner=True) == pytest.approx(700)
    made.kernel("gemm", -900, -100, correlation=0)  # launched before the trace: the device idles no less in the step
    assert saved_ns(facts_of(made.recording()), "slow", with_inner=True) == pytest.approx(700)
