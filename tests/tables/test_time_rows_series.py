"""Named things followed over the steps."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from profiler_wrapper.tables.time_rows import LayerEvent
from recordings import Trace, analyse


def two_steps() -> Trace:
    trace = Trace()
    for step, start in enumerate((0, 1000)):
        trace.annotation(f"ProfilerStep#{step}", start, start + 1000)
        trace.mark("h.0", start + 10, start + 400, kind="block").mark("h.0.attn", start + 20, start + 200)
        trace.annotation("spatial block", start + 30, start + 150)
        trace.op("aten::bmm", start + 40, start + 60)
        trace.kernel("bmm_kernel", 5000 + start, 5100 + start + step, launched=start + 50)
        trace.op("aten::mm", start + 210, start + 240).kernel("gemm", 5200 + start, 5210 + start, launched=start + 220)
    return trace


def series(trace: Trace, *track: object) -> dict[str, tuple[float | None, ...]]:
    return dict(analyse(trace.recording(), track=track).series)  # type: ignore[arg-type]


def test_named_blocks_are_followed_unasked() -> None:
    assert series(two_steps()) == {"spatial block": (0.100, 0.101)}


@pytest.mark.parametrize(
    ("track", "expected"),
    [
        ("aten::bmm", (0.100, 0.101)),
        ("gemm", (0.010, 0.010)),
        ("aten::.*mm", (0.110, 0.111)),  # no event has this name: an expression
        (re.compile("_kernel$"), (0.100, 0.101)),
    ],
)
def test_tracked_names(track: object, expected: tuple[float, float]) -> None:
    found = series(two_steps(), track)
    assert found[track.pattern if isinstance(track, re.Pattern) else str(track)] == pytest.approx(expected)


def test_an_event_inside_two_matching_ones_counts_once() -> None:
    trace = Trace().op("aten::linear", 0, 50).op("aten::linear", 10, 20).kernel("gemm", 100, 150, launched=15)
    assert series(trace, "aten::linear") == {"aten::linear": (0.05,)}


def test_a_named_block_that_crosses_a_layer_is_followed() -> None:
    trace = Trace().module("Net_0", 0, 100).annotation("across", 50, 150)
    assert series(trace.op("aten::mm", 60, 70).kernel("gemm", 200, 230, launched=65)) == {"across": (0.03,)}


def test_a_named_block_that_crosses_steps_is_followed() -> None:
    """As where a step ends within it, or the recording: inside of an optimizer's step."""
    trace = Trace().annotation("ProfilerStep#0", 0, 100).annotation("ProfilerStep#1", 100, 300)
    trace.annotation("block", 50, 200).annotation("Optimizer.step#SGD.step", 180, 220)
    for start in (40, 60, 110, 185, 210):  # the first before the block, the last after it
        trace.op("aten::mm", start, start + 5).kernel("gemm", 400 + start, 401 + start, launched=start + 1)
    trace.op("aten::mm", 120, 130, thread=9).kernel("gemm", 600, 601, launched=125, thread=9)
    assert series(trace)["block"] == (0.001, 0.002)


def test_a_function_sees_the_events_of_each_block_and_step() -> None:
    seen: list[tuple[str, float, str, str]] = []

    def longest(events: Sequence[LayerEvent]) -> float:
        seen.extend(events)
        return max(event.time_us for event in events)

    found = series(two_steps(), longest)
    assert found["longest[h.0]"] == (0.1, 0.101)
    assert ("gemm", 0.01, "forward", "gemm") in seen


def test_a_block_that_rests_in_a_step_has_no_value_there() -> None:
    trace = two_steps().mark("h.1", 1500, 1600, kind="block").kernel("x", 9000, 9001, launched=1550)

    def count(events: Sequence[LayerEvent]) -> float:
        return len(events)

    assert series(trace, count)["count[h.1]"] == (None, 1.0)


def test_a_function_that_raises_has_no_value_and_is_named() -> None:
    def fails(events: Sequence[LayerEvent]) -> float:
        raise ValueError("mine")

    found = analyse(two_steps().recording(), track=[fails, "kernel("])
    assert set(found.series["fails[h.0]"]) == {None}
    assert sum("ValueError: mine" in warning for warning in found.warnings) == 1
