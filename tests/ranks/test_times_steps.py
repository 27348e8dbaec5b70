"""The running maximum over ranks: parts add up, and whoever leads is named."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from profiler_wrapper.ranks.times import WAITING, account
from span_tables import times_of_ranks


def test_two_ranks_by_hand() -> None:
    # Up to each kind, rank 0: 1, 6, 16 and rank 10: 3, 5, 11; then rank 10 waits for 5.
    found = account(times_of_ranks(np.array([[[1, 5, 10], [3, 2, 6]]]), waiting=np.array([[0, 5]])))
    assert found.kinds == ("data", "forward", "backward", WAITING)
    assert found.held_ns.tolist() == [[[3, 3, 10, 0]]]
    assert found.holder.tolist() == [[[10, 0, 0, -1]]], "in the end both are equally long"


def test_waiting_is_the_last_part_and_held_by_nobody_else() -> None:
    found = account(times_of_ranks(np.array([[[4], [1]]]), waiting=np.array([[0, 9]])))
    assert found.held_ns.tolist() == [[[4, 6]]]
    assert found.holder.tolist() == [[[0, 10]]]


def test_stages_are_accounted_for_apart() -> None:
    found = account(times_of_ranks(np.array([[[5], [7], [100], [1]]]), stages=[0, 0, 1, 1]))
    assert found.stages.tolist() == [0, 1]
    assert found.held_ns[0, :, 0].tolist() == [7, 100]
    assert found.holder[0, :, 0].tolist() == [10, 20]


def test_a_rank_without_the_step_takes_no_part() -> None:
    own = np.array([[[5.0], [np.nan]], [[np.nan], [np.nan]]])
    found = account(times_of_ranks(own))
    assert found.held_ns[:, 0].tolist() == [[5, 0], [0, 0]]
    assert found.holder[:, 0].tolist() == [[0, 0], [-1, -1]]


LENGTHS = st.integers(0, 10**12)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_parts_add_up_to_the_longest_rank(data: st.DataObject) -> None:
    steps, ranks, kinds = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4)))
    own = data.draw(arrays(np.int64, (steps, ranks, kinds), elements=LENGTHS))
    waiting = data.draw(arrays(np.int64, (steps, ranks), elements=LENGTHS))
    stages = data.draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    found = account(times_of_ranks(own, stages=stages, waiting=waiting))
    for place, stage in enumerate(found.stages):
        of_stage = [rank for rank in range(ranks) if stages[rank] == stage]
        for step in range(steps):
            parts = found.held_ns[step, place].tolist()
            assert min(parts) >= 0
            assert sum(parts) == max(sum(own[step, rank].tolist()) + int(waiting[step, rank]) for rank in of_stage)
            for kind in range(kinds):
                up_to = {rank * 10: sum(own[step, rank, : kind + 1].tolist()) for rank in of_stage}
                assert sum(parts[: kind + 1]) == max(up_to.values())
                holder = int(found.holder[step, place, kind])
                if holder == -1:
                    assert len(of_stage) > 1
                    assert len({*up_to.values()}) == 1
                else:
                    assert up_to[holder] == max(up_to.values())


@settings(max_examples=40, deadline=None)
@given(arrays(np.int64, (3, 5, 4), elements=LENGTHS), st.permutations(range(5)))
def test_the_order_of_ranks_changes_no_part(own: np.ndarray, order: list[int]) -> None:
    assert (account(times_of_ranks(own)).held_ns == account(times_of_ranks(own[:, order])).held_ns).all()
