"""Overlap of communication with compute, as traces tell it, and why it or a bandwidth is not known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.model import CommunicationRow
from profiler_wrapper.ranks.times import communication, match_collectives, prepare
from rank_accounts import own_times
from span_tables import span, span_database


def rows_of(spans: list[dict[str, Any]]) -> dict[str, CommunicationRow]:
    with span_database(spans) as database:
        prepare(database)
        match_collectives(database)
        return {row.name: row for row in communication(database)}


def sent(rank: int, name: str, overlapped: int | None, **more: Any) -> dict[str, Any]:
    about = {"group": "0-1", "sequence": 0, "thread": 7, "overlapped_ns": overlapped, **more}
    return span(rank, 0, "communication", 10 * rank, 40, name=name, **about)


def test_overlap_is_summed_over_ranks_where_all_tell_it() -> None:
    found = rows_of([sent(0, "all_reduce", 30, bytes=400), sent(1, "all_reduce", 5, bytes=400)])
    row = found["all_reduce"]
    assert (row.overlapped_ns, row.unknown) == (35, "")
    assert row.bandwidth_bytes_per_s == 800 * 1e9 / 80


def test_what_one_rank_does_not_tell_is_not_known_and_said_so() -> None:
    found = rows_of(
        [sent(0, "all_reduce", 30), sent(1, "all_reduce", None), sent(0, "barrier", 1), sent(1, "barrier", 2)]
    )
    assert found["all_reduce"].overlapped_ns is None
    assert found["all_reduce"].unknown.startswith("overlap: ") and "bytes" in found["all_reduce"].unknown
    assert found["barrier"].overlapped_ns == 3 and found["barrier"].unknown.startswith("bandwidth: ")


def test_a_send_and_its_receive_are_one() -> None:
    found = rows_of([sent(0, "send_forward", 4), sent(1, "recv_forward", 2)])
    assert [row.overlapped_ns for row in found.values()] == [6]


def test_bytes_of_a_lone_rank_have_no_bandwidth_for_another_reason() -> None:
    row = rows_of([sent(0, "all_reduce", 0, bytes=400)])["all_reduce"]
    assert (row.overlapped_ns, row.bandwidth_bytes_per_s) == (0, None)
    assert "no two ranks" in row.unknown


def test_spans_of_timers_tell_no_overlap() -> None:
    row = rows_of([sent(rank, "all_reduce", None, thread=1, bytes=8) for rank in range(2)])["all_reduce"]
    assert row.overlapped_ns is None and row.unknown.startswith("overlap: ")


def test_a_call_that_lasts_as_long_as_its_transfer_is_no_waiting() -> None:
    """A backend's thread reduces while the main one is still in the call: 20 ms from where rank 1, the last, comes."""
    rows = []
    for rank, start in enumerate((10, 50)):
        for kind, begin, length, more in (
            ("step", 0, 80, {}),
            ("forward", 0, start, {}),
            ("communication", start, 70 - start, {"name": "all_reduce", "depth": 0}),
            ("communication", start, 70 - start, {"name": "all_reduce", "group": "0-1", "sequence": 0, "thread": 7}),
        ):
            rows.append(span(rank, 0, kind, begin * 10**6, length * 10**6, **more))
    with span_database(rows) as database:
        prepare(database)
        own = own_times(database)
    assert (own.of("communication") / 1e6).tolist() == [[20, 20]]
    assert (own.waiting_ns / 1e6).tolist() == [[40, 0]]
    assert np.array_equal(own.self_ns.sum(axis=2) + own.waiting_ns, own.wall_ns)
