"""What `benchmarks/planted_problems.py` does, of the problems that are quick to plant: found by the commands alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import planted_problems as planted

pytestmark = pytest.mark.full

QUICK = ("one slow layer", "attention in single ops", "a memory leak", "an optimizer with a loop")


@pytest.mark.parametrize("name", QUICK)
def test_a_problem_is_found_by_following_the_commands(name: str, tmp_path: Path) -> None:
    (problem,) = (one for one in planted.PROBLEMS if one.name == name)
    searched = planted.look_for(problem, tmp_path / "it")
    assert searched is not None
    assert searched.found_after is not None, searched.printed
    assert searched.found_after <= planted.MOST_COMMANDS
    assert searched.summary_bytes < 2048


def test_where_nothing_is_planted_nothing_is_found_and_all_commands_run(tmp_path: Path) -> None:
    searched = planted.look_for(planted.CONTROL, tmp_path / "it")
    assert searched is not None
    assert [one.name for one in planted.PROBLEMS if planted.is_told(one, searched.printed)] == []
    assert len(searched.commands) >= 3  # the summary, memory, rest


def test_there_are_twelve_and_more() -> None:
    assert len({problem.name for problem in planted.PROBLEMS}) >= 12
