"""The laws between the tables of any result: each nanosecond and event is in one row of each, and in one alone."""

from __future__ import annotations

from collections import defaultdict

from profiler_wrapper.analysis.model import Analysis


def assert_conserved(result: Analysis) -> None:
    assert sum(row.self_time_ns for row in result.layers) + result.time.unattributed_ns == result.time.total_ns
    assert sum(row.time_ns for row in result.unattributed) == result.time.unattributed_ns
    assert sum(row.time_ns for row in result.steps) == result.time.total_ns
    assert sum(row.time_ns for row in result.classes) == result.time.total_ns
    assert all(sum(row.phases_ns.values()) == row.time_ns for row in result.steps)
    below: dict[tuple[str, str], int] = defaultdict(int)
    for row in result.layers:
        if not row.shared:  # a shared one is below whoever called it
            below[row.parent or "", row.phase] += row.time_ns if row.parent is not None else 0
    shared_ns = sum(row.time_ns for row in result.layers if row.shared)
    for row in result.layers:
        if row.layer:
            assert 0 <= row.time_ns - row.self_time_ns - below[row.layer, row.phase] <= shared_ns
        assert 0 <= row.attention_ns <= row.time_ns
        if row.exposed_communication_ns is not None:
            assert 0 <= row.exposed_communication_ns <= row.communication_ns <= row.time_ns
    keys = [(row.layer, row.phase) for row in result.layers]
    assert len(keys) == len(set(keys))
    assert_steps_and_events_add_up(result, sum(row.count for row in result.classes))


def assert_steps_and_events_add_up(result: Analysis, charged: int) -> None:
    """The laws of `step_times_ns` and `self_events`: per step against its row, over all against the events."""
    numbered = [row for row in result.steps if row.step is not None]
    own = [list(row.step_times_ns) for row in result.layers if row.parent is None]
    per_step = [sum(times) for times in zip(*own, strict=True)] or [0] * len(numbered)
    assert all(spent <= row.time_ns for spent, row in zip(per_step, numbered, strict=True))
    if not result.unattributed:
        assert per_step == [row.time_ns for row in numbered]
    assert all(len(row.step_times_ns) == len(numbered) for row in result.layers)
    assert all(sum(row.step_times_ns) <= row.time_ns for row in result.layers)
    if len(numbered) == len(result.steps):  # nothing is outside of the steps
        assert all(sum(row.step_times_ns) == row.time_ns for row in result.layers)
    events = sum(row.self_events or 0 for row in result.layers) + sum(row.count for row in result.unattributed)
    assert events == charged == sum(row.count for row in result.classes)


def communication(result: Analysis) -> int:
    return sum(row.time_ns for row in result.classes if row.class_name == "communication")


def assert_collectives_are_conserved(result: Analysis) -> None:
    rows = result.collectives
    assert sum(row.time_ns for row in rows) == communication(result)
    keys = [(row.collective, row.group, row.group_size, row.dtype, row.layer, row.phase) for row in rows]
    assert len(keys) == len(set(keys))
    assert [row.time_ns for row in rows] == sorted((row.time_ns for row in rows), reverse=True)
    if result.time_basis == "cpu":
        return
    assert all(row.exposed_ns is not None and row.overlapped_ns is not None for row in rows)
    assert all(row.exposed_ns + row.overlapped_ns == row.time_ns for row in rows)  # type: ignore[operator]
    exposed = sum(row.exposed_ns or 0 for row in rows)
    assert exposed >= (result.time.exposed_communication_ns or 0)  # which counts an instant once
    of_layers = sum(row.exposed_communication_ns or 0 for row in result.layers if row.parent is None)
    assert of_layers == sum(row.exposed_ns or 0 for row in rows if row.layer is not None)
