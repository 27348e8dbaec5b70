"""When forward and backward that move together are long input, and when not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from profiler_wrapper.ranks.lost_time import Movement, ideal_steps, movement
from simulated_jobs import QUIET, simulated

LONG_INPUT = Movement(steps=20, same_rank=20, inflation=1.0, other_inflation=0.0, ranks=8)


def test_long_input() -> None:
    assert LONG_INPUT.is_long_input


@pytest.mark.parametrize(
    "other",
    [
        {"same_rank": 3},
        {"same_rank": 12, "ranks": 2},  # as chance has it
        {"other_inflation": 0.9},  # all of the rank
        {"inflation": 0.05},
        {"steps": 3, "same_rank": 3},
    ],
    ids=str,
)
def test_no_long_input(other: dict[str, float]) -> None:
    assert not replace(LONG_INPUT, **other).is_long_input


def test_movement_of_a_job() -> None:
    times = ideal_steps(simulated("one long input", seed=0, noise=QUIET))
    found = movement(times, np.ones(20, dtype=np.bool_))
    assert found.same_rank == 20
    assert abs(found.inflation - 1.0) < 0.05
    assert found.other_inflation < 0.02
    alone = movement(ideal_steps(simulated("anyone's forward", seed=0, noise=QUIET)), np.ones(20, dtype=np.bool_))
    assert not alone.is_long_input
