"""Where steps begin and end, found in hand-written recordings."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.analyse import analyse
from profiler_wrapper.analysis.attributed import attributed
from profiler_wrapper.analysis.steps import Steps, find_iterations
from recordings import AUTOGRAD, Trace


def steps_of(trace: Trace) -> Steps:
    return attributed(trace.op("aten::mm", 0, 1).recording()).steps


def intervals(steps: Steps) -> list[tuple[int, int, int]]:
    return list(zip(steps.number, steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True))


FOREVER = np.iinfo(np.int64).max


def test_profiler_steps_by_their_number() -> None:
    trace = Trace().annotation("ProfilerStep#8", 200, 300).annotation("ProfilerStep#7", 50, 200)
    trace.annotation("Optimizer.step#SGD.step", 150, 160).mark(".", 60, 100)
    steps = steps_of(trace)
    assert intervals(steps) == [(7, 50, 200), (8, 200, 300)]
    assert steps.place_of(np.array([49, 50, 199, 200, 299, 300])).tolist() == [-1, 0, 0, 1, 1, -1]


def test_steps_that_overlap_end_where_the_next_begins() -> None:
    assert intervals(steps_of(Trace().annotation("ProfilerStep#1", 0, 120).annotation("ProfilerStep#2", 100, 200))) == [
        (1, 0, 100),
        (2, 100, 200),
    ]


def test_a_step_seen_on_two_threads_is_one() -> None:
    trace = Trace().annotation("ProfilerStep#1", 0, 100).annotation("ProfilerStep#1", 2, 98, thread=AUTOGRAD)
    trace.annotation("ProfilerStep#2", 100, 200)
    assert intervals(steps_of(trace)) == [(1, 0, 100), (2, 100, 200)]


def test_without_them_steps_of_the_first_optimizer() -> None:
    trace = Trace()
    for start in (0, 1000):
        for micro in range(8):
            trace.mark(".", start + 100 * micro, start + 100 * micro + 50)
        trace.annotation("Optimizer.step#SGD.step", start + 900, start + 950)
        trace.annotation("Optimizer.step#Adam.step", start + 960, start + 970)
    assert intervals(steps_of(trace)) == [(0, 0, 950), (1, 950, 1950)]


def test_without_an_optimizer_calls_of_the_first_root() -> None:
    trace = Trace().mark(".", 10, 90, flags=("prefill",))
    for i in range(1, 4):
        trace.mark(".", 100 * i, 100 * i + 90, flags=("decode",))
        trace.mark(".", 100 * i + 92, 100 * i + 95, root="Sampler#0")
    assert intervals(steps_of(trace)) == [(0, 10, 100), (1, 100, 200), (2, 200, 300), (3, 300, FOREVER)]


def test_a_root_recomputed_in_backward_starts_no_step() -> None:
    trace = Trace().mark(".", 0, 90).op("aten::mul", 10, 20, sequence=1, forward_thread=0)
    trace.node("MulBackward0", 100, 200, number=1).mark(".", 110, 150, thread=AUTOGRAD)
    assert intervals(steps_of(trace)) == [(0, 0, FOREVER)]


def test_a_loop_over_blocks_is_a_step_each_time_round() -> None:
    trace = Trace()
    for turn in range(3):
        for i in range(4):
            trace.mark(".", 1000 * turn + 100 * i, 1000 * turn + 100 * i + 90, root=f"Block#{i}")
    assert [start for _, start, _ in intervals(steps_of(trace))] == [0, 1000, 2000]


def test_no_steps_at_all() -> None:
    steps = steps_of(Trace())
    assert len(steps) == 0
    assert steps.place_of(np.array([5])).tolist() == [-1]


def test_entries_of_a_block_are_iterations() -> None:
    trace = Trace().op("aten::mm", 0, 5)
    for number, (start, end) in enumerate([(10, 20), (30, 40), (50, 60)]):
        trace.annotation(f"iteration#{number}", start, end)
    iterations = find_iterations(trace.recording())
    assert iterations.number == (0, 1, 2)
    assert iterations.place_of(np.array([5, 10, 25, 35, 59, 60])).tolist() == [-1, 0, -1, 1, 2, -1]


def test_series_of_entries_have_a_value_per_entry() -> None:
    trace = Trace()
    for number in range(3):
        base = 100 * number
        trace.annotation(f"iteration#{number}", base, base + 50).annotation("vae", base + 1, base + 40)
        trace.op("aten::mm", base + 10, base + 20 + number)
    trace.annotation("ProfilerStep#0", 0, 1000)
    assert analyse(trace.recording()).series == {"vae": (0.010, 0.011, 0.012)}
