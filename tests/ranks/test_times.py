"""What DuckDB answers about hand-made spans, against sums worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.database import open_database, to_arrays
from profiler_wrapper.ranks.model import SELF_KINDS, SelfTimes
from profiler_wrapper.ranks.times import common_name, communication, layer_times, match_collectives, prepare
from profiler_wrapper.trace.spans import SPAN_COLUMNS
from rank_accounts import own_times
from span_tables import span, span_database


def own_of(rows: list[dict[str, Any]], **how: Any) -> SelfTimes:
    with span_database(rows) as database:
        prepare(database)
        return own_times(database, **how)


def told(own: SelfTimes, step: int = 0, rank: int = 0) -> dict[str, float]:
    """The kinds that took time, and waiting."""
    values = {kind: float(own.self_ns[step, rank, place]) for place, kind in enumerate(SELF_KINDS)}
    return {kind: value for kind, value in values.items() if value} | {"waiting": float(own.waiting_ns[step, rank])}


def exact(own: SelfTimes) -> None:
    total = own.self_ns.sum(axis=2) + own.waiting_ns
    assert np.array_equal(total[np.isfinite(total)], own.wall_ns[np.isfinite(own.wall_ns)])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_database_has_few_threads_beside_those_that_compute() -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    with open_database(threads=1):
        assert len(list(Path("/proc/self/task").iterdir())) <= before + 2  # each reserves 70 MB of addresses


def test_a_database_has_no_more_threads_than_its_memory_is_enough_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler_wrapper.ranks.database.available_cores", lambda: 64)
    with open_database() as database:
        assert database.execute("SELECT current_setting('threads')").fetchone() == (3,)  # of 400 MiB


def test_a_database_fetches_nothing_from_a_network() -> None:
    with open_database() as database:
        assert database.execute("SELECT current_setting('autoinstall_known_extensions')").fetchone() == (False,)


PLAIN = [
    span(0, 5, "step", 0, 100),
    span(0, 5, "data", 0, 10),
    span(0, 5, "forward", 10, 30),
    span(0, 5, "backward", 42, 40),
    span(0, 5, "optimizer", 85, 15),
]


def test_phases_one_after_another_and_what_no_span_covers() -> None:
    own = own_of(PLAIN)
    assert told(own) == {"data": 10, "forward": 30, "backward": 40, "optimizer": 15, "other": 5, "waiting": 0}
    assert own.wall_ns.tolist() == [[100.0]]
    assert own.steps.tolist() == [5]


def test_rows_of_layers_do_not_count_twice() -> None:
    layers = [span(0, 5, "forward", 10 + i, 1, depth=1, layer=f"layers.{i}", parent="forward") for i in range(20)]
    assert told(own_of(PLAIN + layers)) == told(own_of(PLAIN))


def test_what_is_its_own_kind_wherever_it_lies_is_taken_out_of_what_is_around_it() -> None:
    inside = [
        span(0, 5, "gc", 15, 4, depth=1, parent="forward"),
        span(0, 5, "recompute", 50, 20, depth=1, parent="backward"),
        span(0, 5, "communication", 60, 6, depth=2, parent="recompute"),
        span(0, 5, "gc", 61, 1, depth=3),
        span(0, 5, "checkpoint", 90, 5, depth=1, parent="optimizer"),
    ]
    own = own_of(PLAIN + inside)
    assert told(own) == {
        "data": 10,
        "forward": 26,
        "recompute": 14,
        "backward": 20,
        "optimizer": 10,
        "gc": 5,
        "checkpoint": 5,
        "other": 5,
        "communication": 5,  # nobody else tells of it, so nothing tells how much of it is waiting
        "waiting": 0,
    }
    exact(own)


def test_communication_beside_the_main_thread_counts_where_nothing_hides_it() -> None:
    rows = [
        span(0, 0, "step", 0, 100),
        span(0, 0, "backward", 0, 60),
        span(0, 0, "communication", 30, 60, thread=2),
        span(0, 0, "forward", 95, 5, thread=3),  # work beside the main thread is not the step's
    ]
    own = own_of(rows)
    assert told(own) == {"backward": 60, "other": 10, "communication": 30, "waiting": 0}
    exact(own)


def test_what_lasts_beyond_the_step_counts_within_it() -> None:
    own = own_of([span(0, 0, "step", 0, 50), span(0, 0, "forward", 40, 30)])
    assert told(own) == {"forward": 10, "other": 40, "waiting": 0}


def test_without_spans_of_steps_a_step_is_from_the_first_to_the_last() -> None:
    own = own_of([span(0, 0, "forward", 10, 20), span(0, 0, "backward", 40, 10)])
    assert told(own) == {"forward": 20, "backward": 10, "other": 10, "waiting": 0}
    assert own.wall_ns.tolist() == [[40.0]]


def late_rank() -> list[dict[str, Any]]:
    """Three ranks; rank 2 computes for 50 longer, all leave the collective at 100, its transfer takes 10."""
    rows = []
    for rank, compute in enumerate((40, 42, 90)):
        rows += [
            span(rank, 0, "step", 0, 100),
            span(rank, 0, "forward", 0, compute),
            span(
                rank, 0, "communication", compute, 100 - compute, name="all_reduce", group="dp", sequence=0, bytes=500
            ),
        ]
    return rows


def test_waiting_is_what_is_beyond_the_shortest_duration() -> None:
    own = own_of(late_rank())
    assert [told(own, rank=rank) for rank in range(3)] == [
        {"forward": 40, "communication": 10, "waiting": 50},
        {"forward": 42, "communication": 10, "waiting": 48},
        {"forward": 90, "communication": 10, "waiting": 0},
    ]
    exact(own)


def test_who_came_last() -> None:
    with span_database(late_rank()) as database:
        prepare(database)
        found = match_collectives(database)
        rows = communication(database)
    assert found is not None
    assert found.shortest_rank.tolist() == [2]
    assert found.shorter_by_ns.tolist() == [48.0]
    assert found.times_last.tolist() == [0, 0, 1]
    assert found.late_ns.tolist() == [0.0, 0.0, 48.0]
    (row,) = rows
    assert (row.name, row.group, row.size, row.instances) == ("all_reduce", "dp", 3, 1)
    assert (row.time_ns, row.transfer_ns, row.waiting_ns, row.bytes) == (128, 30, 98, 500)
    assert row.bandwidth_bytes_per_s == 500 / 10e-9


def test_groups_and_numbers_keep_collectives_apart() -> None:
    rows = [
        span(rank, 0, "communication", start, length, name="all_reduce", group=group, sequence=number)
        for rank, group, number, start, length in [
            (0, "0-1", 0, 0, 9),
            (1, "0-1", 0, 5, 4),
            (2, "2-3", 0, 0, 20),
            (3, "2-3", 0, 0, 30),
            (0, "0-1", 1, 50, 3),
            (1, "0-1", 1, 50, 2),
        ]
    ]
    with span_database(rows) as database:
        prepare(database)
        match_collectives(database)
        found = database.execute("SELECT size, shortest_ns, shortest_rank FROM matched ORDER BY shortest_ns").fetchall()
    assert found == [(2, 2, 1), (2, 4, 1), (2, 20, 2)]


def test_a_send_and_its_receive_are_one() -> None:
    assert common_name("forward-send") == common_name("forward-recv") == "forward-send/recv"
    assert common_name("backward-recv") != common_name("forward-recv")
    assert common_name("sender_pool") == "sender_pool"
    rows = [
        span(0, 0, "communication", 90, 10, name="forward-send", group="stage 0-1", sequence=0),
        span(1, 0, "communication", 0, 100, name="forward-recv", group="stage 0-1", sequence=0),
    ]
    own = own_of(rows)
    assert told(own, rank=1) == {"communication": 10, "waiting": 90}


def test_a_rank_without_a_step_is_not_known() -> None:
    own = own_of([*PLAIN, span(1, 6, "step", 0, 10)])
    assert np.isnan(own.wall_ns).tolist() == [[False, True], [True, False]]
    assert np.isnan(own.self_ns[0, 1]).all()
    assert np.isnan(own.waiting_ns[0, 1])


def test_the_device_instead_of_the_cpu_where_it_is_asked_for() -> None:
    rows = [
        span(0, 0, "step", 0, 100),
        span(0, 0, "forward", 0, 5, device_ns=70),
        span(0, 0, "backward", 5, 6, device_ns=None),
        span(0, 0, "gc", 2, 1, depth=1),
    ]
    own = own_of(rows, basis="device")
    assert own.basis == "device"
    assert told(own)["forward"] == 70
    assert own_of(rows).of("forward").tolist() == [[4.0]]


def test_many_overlapping_spans_of_one_kind() -> None:
    rows = [span(0, 0, "step", 0, 2000)]
    rows += [span(0, 0, "communication", i, 1000, thread=2, name=f"c{i}") for i in range(400)]
    own = own_of(rows)
    assert told(own) == {"other": 601, "communication": 1399, "waiting": 0}


def test_layers_over_steps() -> None:
    rows = []
    for step, (first, second) in enumerate([(10, 20), (12, 20), (50, 26)]):
        for half in (0, 1):  # two micro-batches
            rows += [
                span(0, step, "forward", step * 1000 + half * 100, first // 2, depth=1, layer="b", parent="forward"),
                span(0, step, "forward", step * 1000 + half * 100 + 50, second // 2, depth=1, layer="a", waiting_ns=3),
            ]
        rows.append(span(1, step, "backward", step * 1000, 7, depth=1, layer="b"))
    with span_database(rows) as database:
        found = layer_times(database)
    assert found is not None
    assert found.layers == ("b", "a")  # in the order in which they run
    assert found.self_ns[0, :, 0].tolist() == [12.0, 14.0]  # medians over steps, sums over micro-batches
    assert found.self_ns[1, :, 2].tolist()[0] == 7.0
    assert np.isnan(found.self_ns[1, 1]).all()


def test_no_layers_and_no_collectives() -> None:
    with span_database(PLAIN) as database:
        prepare(database)
        assert layer_times(database) is None
        assert match_collectives(database) is None
        assert communication(database) == ()


def test_a_send_is_matched_where_it_says_to_whom() -> None:
    """In a group of two; not within three, nor where a rank sends and receives under one name."""
    rows = []
    for group, ends in {"0-1": ("send", "recv"), "0-2": ("send", "recv", "recv"), "1-2": ("both", "both")}.items():
        for rank, end in zip(range(int(group[0]), int(group[2]) + 1), ends, strict=True):
            for name in ("send", "recv") if end == "both" else (end,):
                rows.append(span(rank, 0, "communication", 0, 10, name=name, group=group, sequence=0))
    with span_database(rows) as database:
        prepare(database)
        found = database.execute('SELECT "group", size FROM matched JOIN labels USING (label)').fetchall()
    assert found == [("0-1", 2)]


def test_collectives_that_do_not_fit_into_memory_are_matched() -> None:
    sequences, rows = 200, 1_000_000
    with open_database(memory_bytes=50 << 20, threads=1) as database:
        columns = ", ".join(f'"{name}" {kind}' for name, (kind, _) in SPAN_COLUMNS.items())
        database.execute(f"CREATE TABLE spans ({columns})")
        database.execute(
            f"""INSERT INTO spans BY NAME SELECT row // {sequences} AS rank, row % {sequences} AS sequence, 0 AS step,
            'all_reduce' AS name, 'communication' AS kind, 'all' AS "group", 0 AS depth,
            (hash(row) % 1000000007)::BIGINT AS duration_ns, (hash(-row) % 1000000007)::BIGINT AS start_ns
            FROM range({rows}) AS rows(row)"""
        )
        prepare(database)
        found = to_arrays(database, "SELECT * FROM matched ORDER BY sequence")
        durations = to_arrays(database, "SELECT duration_ns FROM communications ORDER BY sequence, rank")["duration_ns"]
    durations = durations.reshape(sequences, -1)
    assert found["size"].tolist() == [rows // sequences] * sequences
    assert found["shortest_ns"].tolist() == durations.min(axis=1).tolist()
    assert found["shortest_rank"].tolist() == durations.argmin(axis=1).tolist()
    assert found["shorter_by_ns"].tolist() == (np.median(durations, axis=1) - durations.min(axis=1)).tolist()
