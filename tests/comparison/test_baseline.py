"""Comparisons on a CPU, where other load makes all layers slower, and the long ones most; and sides without steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparables import comparable
from noisy_recordings import Factor, noisy_run
from profiler_wrapper.comparison.baseline import make_baseline, read_baseline, write_baseline
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.guard import guard
from profiler_wrapper.comparison.model import ChangedLayer, WorkChange
from profiler_wrapper.comparison.text import compare_text
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.tables.model import Analysis

LIKE_LOAD = "all layers alike (as under other load or clock; low confidence)"


def on_cpu(seed: int, slower: Factor | None = None, **options: Any) -> Analysis:
    made = noisy_run(seed, slower=slower, **options)
    return replace(made, time_basis="cpu")


def loaded(layer: str, phase: str, step: int) -> float:
    """What is short is mostly missed by what holds up the long."""
    return 1.1 if layer.endswith("norm") else 2.3


def loaded_unevenly(layer: str, phase: str, step: int) -> float:
    return loaded(layer, phase, step) * (1.15 if layer.endswith("mlp") else 1.0)


def twice(layer: str, phase: str, step: int) -> float:
    return 2.0 if layer == "layers.7.mlp" else 1.0


def test_a_cpu_under_load_is_not_called_a_slower_model() -> None:
    for i in range(5):
        found = compare(on_cpu(i), on_cpu(100 + i, lambda layer, phase, step: 1.4))
        assert LIKE_LOAD in found.verdict and "slower" not in found.verdict
        assert (found.confidence, found.culprits) == ("low", ())
        assert {row.decision for row in found.rows} <= {"no difference", "not judged"}


@pytest.mark.parametrize("load", [loaded, loaded_unevenly])
def test_what_load_does_to_long_layers_names_no_layer(load: Factor) -> None:
    for i in range(3):
        for one, other in ((on_cpu(i), on_cpu(200 + i, load)), (on_cpu(200 + i, load), on_cpu(i))):
            found = compare(one, other)
            assert found.culprits == ()
            assert LIKE_LOAD in found.verdict
            assert not guard(one, other).regressed


def test_a_layer_that_takes_twice_as_long_is_named_on_a_cpu_too() -> None:
    for i in range(3):
        found = compare(on_cpu(i), on_cpu(300 + i, twice))
        assert [one.layer for one in found.culprits] == ["layers.7.mlp"]
        report = guard(on_cpu(i), on_cpu(300 + i, twice))
        assert report.regressed and "layers.7" in report.verdict


def test_a_layer_that_is_unsteady_is_not_named() -> None:
    def unsteady(layer: str, phase: str, step: int) -> float:
        return (9.0, 2.0, 6.0, 3.0, 14.0)[step] if layer == "layers.7.norm" else 1.0

    assert compare(on_cpu(1), on_cpu(2, unsteady)).culprits == ()


def test_a_side_without_steps_is_not_judged() -> None:
    whole = comparable(replace(noisy_run(1), steps=()))
    for one, other in ((whole, noisy_run(2)), (noisy_run(2), whole)):
        found = compare(one, other)
        assert found.decision == found.totals[0].decision == "not judged"
        assert "marks no steps" in found.verdict
        report = guard(one, other)
        assert not report.judged and "marks no steps" in report.checks[0].reason


def test_like_layers_that_one_side_has_alone_are_one_culprit() -> None:
    (culprit,) = compare(noisy_run(1), noisy_run(2, blocks=12)).culprits
    assert (culprit.layer, len(culprit.layers), culprit.change) == ("layers.{12..23}", 12, None)
    assert culprit.share == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_text_fits_the_width(width: int) -> None:
    text = compare_text(compare(noisy_run(1), noisy_run(2, slower=twice)), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_the_text_fits_where_everything_in_it_is_long() -> None:
    """At every width: `+-` is a column longer than the sign that it stands for."""
    found = compare(on_cpu(1), on_cpu(2, loaded))
    name = "model.language_model.layers.{0..127}.self_attention.query_key_value"
    culprit = ChangedLayer(
        layer=name,
        layers=(name,),
        phase="accumulate_grad",
        change=9.871,
        error=0.1234,
        change_ns=-98765.4e6,
        share=-1.0,
    )
    more = WorkChange(
        layer=name, layers=(name,), phase=None, flops_a=800, flops_b=12800, events_a=1.0, events_b=12345.0,
        calls_a=1.0, calls_b=65.5, retained_a=0.0, retained_b=float(123 << 30),
    )  # fmt: skip
    found = replace(found, culprits=(culprit,), work=(more,), name_a=name, notes=(name,))
    assert (found.confidence, found.decision) == ("low", "slower")
    for unicode in (False, True):
        for width in range(60, 121):
            text = compare_text(found, width=width, unicode=unicode)
            assert max(map(len, text.splitlines())) <= width
            assert ("±" in text) == unicode and "with low confidence" in " ".join(text.split())
    head = compare_text(found, width=80).split("per step", 1)[1].splitlines()[0]
    assert head.split() == ["a", "b", "change"]  # words give way before numbers do


@pytest.mark.parametrize(("width", "columns"), [(80, 5), (66, 4), (60, 3)])
def test_no_more_columns_give_way_than_have_to(width: int, columns: int) -> None:
    text = compare_text(compare(noisy_run(1), noisy_run(2, slower=one_of_the_mlps)), width=width)
    (total,) = (line for line in text.splitlines() if line.startswith("TOTAL"))
    assert len(total.replace(" %", "").split()) == columns
    assert re.search(r"^layers\.\{0\.\.23\}\.mlp +backward ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("blocks", "row", "said"), [(24, "layers.{0..23}.mlp", "1 slower"), (1, "layers.0.mlp", "slower")]
)
def test_of_like_layers_in_one_row_it_says_how_many_are_slower(blocks: int, row: str, said: str) -> None:
    def slower(layer: str, phase: str, step: int) -> float:
        return 2.0 if layer == "layers.0.mlp" else 1.0

    text = compare_text(compare(noisy_run(1, blocks=blocks), noisy_run(2, blocks=blocks, slower=slower)), width=120)
    lines = [line for line in text.splitlines() if line.startswith(f"{row} ")]
    assert [re.split("  +", line)[-1] for line in lines if "  forward " in line or "  backward " in line] == [said] * 2


def one_of_the_mlps(layer: str, phase: str, step: int) -> float:
    return 2.0 if layer == "layers.7.mlp" else 1.0


def test_a_baseline_of_results_that_a_hand_broke_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(make_baseline([noisy_run(1)]), path)
    text = path.read_text(encoding="utf-8")
    for broken in (text.replace('"self_events":5', '"self_events":"five"', 1), text.replace('"results"', '"runs"')):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(WrongUse, match="not a baseline that guard wrote"):
            read_baseline(path)
