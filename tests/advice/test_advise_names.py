"""Folded names stand for exactly the names they are made of; numbers in words."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_wrapper.advice.facts import count, duration, fold_names, share, where
from profiler_wrapper.reports.text import clean


def unfolded(name: str) -> set[str]:
    """All names that a folded one stands for, by its definition."""
    parts = re.split(r"(\{[0-9.,]*\})", name)
    choices = [_numbers(part[1:-1]) if part.startswith("{") else [part] for part in parts]
    return {"".join(chosen) for chosen in itertools.product(*choices)}


def _numbers(text: str) -> list[str]:
    if step := re.fullmatch(r"(\d+),(\d+)\.\.(\d+)", text):
        first, second, last = map(int, step.groups())
        return [str(n) for n in range(first, last + 1, second - first)]
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        numbers += [str(n) for n in range(int(first), int(last or first) + 1)]
    return numbers


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"], ["layers.{0..2}.mlp"]),
        (["layers.0.mlp", "head", "layers.2.mlp"], ["layers.{0,2}.mlp", "head"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0", "a.1.e.1"], ["a.{0,1}.e.{0,1}"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0"], ["a.0.e.{0,1}", "a.1.e.0"]),
        (["Layer_0.x", "Layer_2.x", "Layer_4.x", "Layer_6.x"], ["Layer_{0,2..6}.x"]),
        (["gpt2.h"], ["gpt2.h"]),
        (["a.007", "a.7"], ["a.007", "a.7"]),
        ([""], [""]),
        ([], []),
    ],
)
def test_names_are_folded(names: list[str], folded: list[str]) -> None:
    assert list(fold_names(names)) == folded


_NAME = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", "4", "10"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(_NAME, max_size=12))
def test_a_folded_name_stands_for_its_names_and_no_other(names: list[str]) -> None:
    stands_for = [name for folded in fold_names(names) for name in unfolded(folded)]
    assert set(stands_for) == set(names)
    assert len(stands_for) == len(set(names))


def test_numbers_in_words() -> None:
    assert [duration(n) for n in (41_300_000, 812_000, 999_600, 1_230_000_000, 12)] == [
        "41.3 ms", "812 µs", "1.00 ms", "1.23 s", "12 ns",
    ]  # fmt: skip
    assert [share(p) for p in (0.62, 0.058, 0.0, 1.0, 0.0001, 0.9999)] == [
        "62 %", "5.8 %", "0 %", "100 %", "under 0.1 %", "over 99 %",
    ]  # fmt: skip
    assert clean(duration(812_000)) == "812 us" and clean(duration(812_000), unicode=True) == "812 µs"  # on a terminal
    assert [count(n, "call") for n in (1, 32, 2.5)] == ["1 call", "32 calls", "2.5 calls"]
    assert where(["a.0", "a.1", "b", "c", "d"]) == "a.{0,1}, b and 2 more"
    assert where([""]) == "code outside of all layers"
