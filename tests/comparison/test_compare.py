"""Comparisons of recordings whose answer is known: planted changes, noise alone, and what is nobody's is kept."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comparables import comparable
from noisy_recordings import Noise, noisy_run
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.match import differences
from profiler_wrapper.comparison.text import Comparison, compare_csv, compare_text
from profiler_wrapper.comparison.times import series_change
from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.run_file import Run
from sample_results import Layer, analysis_of, llama


def conserved(comparison: Comparison, a: Analysis, b: Analysis) -> bool:
    """Rows and what is not attributed make the total of each side, to the nanosecond."""
    sums = [
        sum(row.a.self_time_ns for row in comparison.rows if row.a is not None),
        sum(row.b.self_time_ns for row in comparison.rows if row.b is not None),
    ]
    rest = [
        sum(one.time_a_ns for one in comparison.unattributed),
        sum(one.time_b_ns for one in comparison.unattributed),
    ]
    return [sums[0] + rest[0], sums[1] + rest[1]] == [a.time.total_ns, b.time.total_ns]


def seventh(layer: str, phase: str, step: int) -> float:
    return 1.10 if layer.startswith("layers.7.") else 1.0


@pytest.mark.full
@pytest.mark.parametrize("noise", [Noise(), Noise(slow_step=True)], ids=["noise", "a slow step"])
def test_ten_percent_of_one_layer_among_24_are_found_in_20_of_20(noise: Noise) -> None:
    found = []
    for i in range(20):
        comparison = compare(noisy_run(i, noise=noise), noisy_run(1000 + i, noise=noise, slower=seventh))
        found.append({".".join(one.layer.split(".")[:2]) for one in comparison.culprits})
    assert found == [{"layers.7"}] * 20


@pytest.mark.full
@pytest.mark.parametrize("steps", [3, 5])
def test_the_same_thing_twice_is_no_difference_in_20_of_20(steps: int) -> None:
    for i in range(20):
        comparison = compare(noisy_run(i, steps=steps), noisy_run(2000 + i, steps=steps))
        assert comparison.decision in ("no difference", "not certain")
        assert comparison.culprits == ()
        assert {row.decision for row in comparison.rows} <= {"no difference", "not judged"}
        assert re.match("no (certain )?difference", comparison.verdict)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_decided_goes_the_way_of_the_numbers_beside_it(seed: int) -> None:
    """A held-up step makes the mean of `a` longer than that of `b`, which takes longer in every other step."""
    comparison = compare(
        noisy_run(seed, noise=Noise(slow_step=True)), noisy_run(500 + seed, slower=lambda layer, phase, step: 1.06)
    )
    total = comparison.totals[0]
    assert total.a is not None and total.b is not None and total.change == pytest.approx(total.b / total.a - 1)
    sure = abs(total.change) < 0.02 and (total.error or 0) <= 0.05
    assert total.decision == comparison.decision == ("no difference" if sure else "not certain")
    assert comparison.to_dict()["decision"] == comparison.to_dict()["totals"][0]["decision"] == total.decision
    assert comparison.verdict.startswith("no difference in all" if sure else "no certain difference")
    for row in comparison.rows:
        if row.decision in ("slower", "faster") and row.a is not None and row.b is not None:
            assert (row.decision == "slower") == (row.b.time_ns > row.a.time_ns), row


def with_peak(analysis: Analysis, mib: float) -> Analysis:
    return replace(analysis, memory={"peak": {"allocated_bytes": round(mib * 2**20)}})


def test_the_largest_certain_difference_comes_first_by_time_then_memory() -> None:
    a, same = with_peak(noisy_run(1), 40), with_peak(noisy_run(3), 30)
    one_layer = with_peak(noisy_run(2, slower=seventh), 30)
    faster = with_peak(noisy_run(4, slower=lambda layer, phase, step: 0.4 if "attn" in layer else 0.99), 30)
    memory = "b needs 25.0 % less memory at its peak (40.0 -> 30.0 MiB)"
    assert compare(a, same).verdict.startswith(f"{memory}, no ")
    assert compare(a, one_layer).verdict.startswith(f"{memory}, no ")
    assert "but layers.7" in compare(a, one_layer).verdict
    assert re.match(rf"b is \d\d\.\d % .* faster .* in layers.*attn, {re.escape(memory)}", compare(a, faster).verdict)
    assert "memory" not in compare(a, with_peak(noisy_run(3), 40.2)).verdict  # too little to be said


def test_everything_slower_is_said_of_all_layers() -> None:
    comparison = compare(noisy_run(1), noisy_run(2, slower=lambda layer, phase, step: 1.25))
    assert comparison.decision == "slower"
    assert comparison.culprits == ()
    assert "all layers alike" in comparison.verdict
    assert {row.decision for row in comparison.rows} <= {"slower", "not judged"}
    assert comparison.totals[0].change == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize(
    ("factors", "slower"),
    [
        ({".mlp ": 1.2}, 33),  # and their blocks' forward and backward, and the root's
        ({" backward": 1.5}, 41),
        ({" ": 1.3}, 82),
        ({" ": 0.7}, 0),
    ],
)
def test_where_all_moved_on_a_device_a_decision_is_about_the_whole_change(
    factors: dict[str, float], slower: int
) -> None:
    def factor(layer: str, phase: str, step: int) -> float:
        return next((one for part, one in factors.items() if part in f"{layer} {phase}"), 1.0)

    noise = Noise(common=0.01, own=0.01, outliers=0.0)
    a, b = (noisy_run(i, steps=6, blocks=10, noise=noise, slower=how) for i, how in ((1, None), (2, factor)))
    found = compare(a, b)
    decided = Counter(row.decision for row in found.rows)
    assert (decided["slower"], decided["faster"]) == ((slower, 0) if slower else (0, 82))
    assert found.common == 0.0
    for one in found.culprits:
        assert one.change is not None and one.change * one.change_ns > 0


def test_like_layers_that_are_slower_together_are_one_culprit_with_its_phase_and_share() -> None:
    def slower(layer: str, phase: str, step: int) -> float:
        return 1.3 if layer.endswith("mlp") and phase == "backward" else 1.0

    comparison = compare(noisy_run(1), noisy_run(2, slower=slower))
    (culprit,) = comparison.culprits
    assert (culprit.layer, culprit.phase) == ("layers.{0..23}.mlp", "backward")
    assert culprit.change == pytest.approx(0.3, abs=0.05)
    assert culprit.share == pytest.approx(1.0, abs=0.25)
    assert "in layers.{0..23}.mlp backward" in comparison.verdict


def test_the_deepest_layer_and_the_phase_are_named() -> None:
    def slower(layer: str, phase: str, step: int) -> float:
        return 1.4 if (layer, phase) == ("layers.3.attn", "backward") else 1.0

    comparison = compare(noisy_run(5), noisy_run(6, slower=slower))
    assert [(one.layer, one.phase) for one in comparison.culprits] == [("layers.3.attn", "backward")]


def test_renamed_blocks_are_compared_all_the_same() -> None:
    comparison = compare(noisy_run(1, prefix="module.layers."), noisy_run(2, prefix="net.layers.", slower=None))
    assert all(row.a is not None and row.b is not None for row in comparison.rows)


def test_faster_is_faster() -> None:
    comparison = compare(noisy_run(3, slower=seventh), noisy_run(4))
    assert [one.change_ns < 0 for one in comparison.culprits] == [True]
    assert "layers.7 is" in comparison.verdict and "faster" in comparison.verdict


def test_a_single_step_says_that_noise_is_not_known() -> None:
    comparison = compare(noisy_run(1), noisy_run(2, steps=1, slower=seventh, noise=Noise(outliers=0)))
    assert not comparison.noise_known
    assert comparison.culprits == ()
    assert any("noise not known, because b has fewer than 3 timed steps" in note for note in comparison.notes)
    assert all(row.error is None for row in comparison.rows)


def test_what_one_side_has_alone_is_listed_and_conserved() -> None:
    one, other = llama(4, unattributed_us={"no launch found": 30}), llama(6, recompute=True)
    comparison = compare(one, other)
    only_b = {row.layer for row in comparison.rows if row.decision == "only in b" and row.phase == "forward"}
    assert {"model.layers.4", "model.layers.5.mlp"} <= only_b
    assert all(row.decision == "only in b" for row in comparison.rows if row.phase == "recompute")
    assert [(row.reason, row.time_a_ns, row.time_b_ns) for row in comparison.unattributed] == [
        ("no launch found", 30_000, 0)
    ]
    assert conserved(comparison, one, other)
    backwards = compare(other, one)
    assert conserved(backwards, other, one)


def test_a_name_that_both_have_for_different_layers_stays_two_rows() -> None:
    one = analysis_of([Layer("Net", "Net", self_us={"forward": 5}), Layer("x.a", "A", self_us={"forward": 3})])
    other = analysis_of([Layer("Net", "Net", self_us={"forward": 5}), Layer("a", "A", self_us={"forward": 7})])
    comparison = compare(one, other)
    assert conserved(comparison, one, other)


def test_another_backend_is_named_by_layers() -> None:
    comparison = compare(llama(4), llama(4, backend="math"))
    assert ("model.layers.{0..3}.self_attn", "flash", "math") in comparison.backend_changes
    assert "attention of model.layers.{0..3}.self_attn: flash -> math" in comparison.verdict
    row = next(row for row in comparison.rows if row.layer == "model.layers.1.self_attn")
    assert (row.backends_a, row.backends_b) == (("flash",), ("math",))


def test_unlike_machines_are_said_first() -> None:
    other = comparable(llama(4), device="AMD Instinct MI300X", torch="2.11.0")
    base = comparable(llama(4), torch="2.13.0")
    comparison = compare(base, other)
    assert [(one.what, one.a, one.b) for one in comparison.differences] == [
        ("device", "NVIDIA H200", "AMD Instinct MI300X"),
        ("torch", "2.13.0", "2.11.0"),
    ]
    assert comparison.verdict.startswith(
        "not alike (device NVIDIA H200 -> AMD Instinct MI300X; torch 2.13.0 -> 2.11.0)"
    )
    assert compare(base, base).differences == ()


SETTINGS = {
    "versions": {"torch": "2.12.0", "transformers": "4.57.6", "cuda driver": 12040},
    "environment": {"OMP_NUM_THREADS": ""},
    "optimizers": [{"class_name": "AdamW", "fused": None}],
    "parameters": {"trainable_elements": 100},
    "wrappers": [],
    "attention_implementation": "eager",
    "tf32": {"matmul": False},
    "allocator_settings": "",
}
OTHERS = {
    "versions": {"torch": "2.13.0", "transformers": "5.23.0", "cuda driver": 12090},
    "environment": {"OMP_NUM_THREADS": "4"},
    "optimizers": [{"class_name": "AdamW", "fused": True}],
    "parameters": {"trainable_elements": 7},
    "wrappers": ["OptimizedModule"],
    "attention_implementation": "sdpa",
    "tf32": {"matmul": True},
    "allocator_settings": "expandable_segments:True",
}


def of_run(analysis: Analysis, run: Mapping[str, object]) -> Analysis:
    return replace(analysis, run=cast(Run, {**analysis.run, **run}))


def test_a_shape_is_said_whole() -> None:
    (found,) = differences({"attention_shape": [4, 6, 128, 32]}, {"attention_shape": [2, 6, 64, 32]})
    assert (found.what, found.a, found.b) == ("attention shape", "4 x 6 x 128 x 32", "2 x 6 x 64 x 32")


def test_versions_and_settings_that_differ_stand_before_all_numbers() -> None:
    before, after = of_run(llama(4), SETTINGS), of_run(llama(4, backend="math"), OTHERS)
    expected = [
        ("torch", "2.12.0", "2.13.0"),
        ("transformers", "4.57.6", "5.23.0"),
        ("cuda driver", "12040", "12090"),
        ("OMP_NUM_THREADS", "not set", "4"),
        ("optimizers", "AdamW", "AdamW fused"),
        ("wrappers", "none", "OptimizedModule"),
        ("attention implementation", "eager", "sdpa"),
        ("tf32 matmul", "no", "yes"),
        ("allocator settings", "not set", "expandable_segments:True"),
        ("trainable parameters", "100", "7"),
    ]
    found = compare(before, after)
    assert sorted((one.what, one.a, one.b) for one in found.differences) == sorted(expected)
    turned = compare(after, before)
    assert [(one.what, one.b, one.a) for one in turned.differences] == [
        (one.what, one.a, one.b) for one in found.differences
    ]
    assert found.verdict.startswith("not alike (torch 2.12.0 -> 2.13.0; ") and " and 7 more): " in found.verdict
    lines = compare_text(found).splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("per step"))
    for what, a, b in expected[:5]:
        assert f"differs: {what} {a} -> {b}" in lines[:table]
    assert {"what": "transformers", "a": "4.57.6", "b": "5.23.0", "of_time_only": False} in found.to_dict()[
        "differences"
    ]


def test_many_differences_are_cut_with_their_number() -> None:
    before, after = (of_run(llama(4), {"versions": {f"package{i}": one for i in range(30)}}) for one in "12")
    found = compare(before, after)
    assert len(found.differences) == 30
    assert "differs: package11 1 -> 2\ndiffers: 18 more, which the JSON has\n" in compare_text(found)


@pytest.mark.parametrize("run", [{}, {"versions": {}}, {"versions": {"torch": None}, "parameters": None}])
def test_what_a_side_does_not_tell_is_no_difference(run: Mapping[str, object]) -> None:
    assert compare(of_run(llama(4), run), of_run(llama(4), OTHERS)).differences == ()
    assert compare(of_run(llama(4), OTHERS), of_run(llama(4), run)).differences == ()


def test_a_version_as_a_number_is_not_compared_with_a_text() -> None:
    """A trace has CUDA's as 12040, a run as 12.4."""
    one, other = (of_run(llama(4), {"versions": {"cuda": version}}) for version in (12040, "12.4"))
    assert compare(one, other).differences == compare(other, one).differences == ()


@pytest.mark.parametrize("steps", [2, 4, 12])
@pytest.mark.parametrize("basis", ["device", "cpu"])
def test_every_percentage_of_the_verdict_stands_in_a_table(basis: Literal["device", "cpu"], steps: int) -> None:
    """Where one layer or all are slower, or faster, in much noise and in little."""
    said = 0
    for number, (one, rest) in enumerate(itertools.product((1.0, 1.07, 1.6, 2.8), repeat=2)):

        def slower(layer: str, phase: str, step: int, one: float = one, rest: float = rest) -> float:
            return one if layer.startswith("layers.7.") else rest

        noise = Noise(common=0.25 * (number % 2), own=0.02)
        before, after = noisy_run(number, steps=steps), noisy_run(99, steps=steps, noise=noise, slower=slower)
        found = [replace(side, time_basis=basis) for side in (before, after)]
        for a, b in (found, found[::-1]):
            verdict, *tables = compare_text(compare(a, b)).split("\n\n")
            numbers = re.findall(r"\d+(?:\.\d+)?(?= %)", " ".join(verdict.split()))
            assert set(numbers) <= set(re.findall(r"\d+(?:\.\d+)?(?= %)", " ".join(" ".join(tables).split()))), verdict
            said += len(numbers)
    assert said > 32


@pytest.mark.parametrize(
    ("a", "b", "rule"),
    [
        ((10, 10.1, 10.2, 20), (16, 16.1, 16.2, 9), "steps of both sides overlap"),
        ((10, 10.1, 10.2, 30), (11, 11.1, 11.2, 11.3), "the median step changed by +9.9 %, not the way of the mean"),
        ((10, 14, 11, 13), (15, 19, 16, 18), " % may be noise (4 standard errors, 2 % at least)"),
        ((10, 10.1), (11, 11.1), "and up to 25.0 % may be noise (fewer than 3 steps)"),
    ],
)
def test_what_is_not_certain_names_the_rule(a: Sequence[float], b: Sequence[float], rule: str) -> None:
    change = series_change(np.array(a), np.array(b))
    assert not change.beyond_noise and rule in change.why_noise


def test_the_rule_stands_in_verdict_table_and_json() -> None:
    found = compare(noisy_run(3, slower=seventh), noisy_run(4))
    assert found.decision == "not certain"
    assert "; steps of both sides overlap)" in found.verdict
    assert "device time not certain: steps of both sides overlap" in compare_text(found, width=300)
    assert found.to_dict()["totals"][0]["reason"] == "steps of both sides overlap"


def test_of_lists_that_differ_the_verdict_has_the_difference() -> None:
    phases = ["accumulate_grad", "backward", "forward", "optimizer"]
    base, other = (comparable(llama(4), phases=one) for one in (phases, [*phases[1:], "recompute"]))
    assert compare(base, other).verdict.startswith("not alike (phases -accumulate_grad, +recompute)")


def test_what_makes_times_alone_unlike() -> None:
    one = {"complete": True, "model": "A", "shapes": "1", "phases": ["forward"], "torch": "2.13.0", "world_size": 1}
    other = {"complete": False, "model": "B", "shapes": "2", "phases": [], "torch": "2.12.0", "world_size": 2}
    assert len(differences(one, other)) == 6 and not any(found.of_time_only for found in differences(one, other))
    one = {"time_basis": "cpu", "device": "A", "device_count": 1, "cpu_name": "A", "python": "3.11", "steps": 3}
    other = {"time_basis": "device", "device": "B", "device_count": 2, "cpu_name": "B", "python": "3.12", "steps": 4}
    assert len(differences(one, other)) == 6 and all(found.of_time_only for found in differences(one, other))


def test_totals_are_those_of_a_step() -> None:
    comparison = compare(llama(4, steps=2), llama(4, steps=4))
    time = comparison.total("device time")
    assert comparison.to_dict()["totals"][0]["a"] == pytest.approx((time.a or 0) / 1000)
    assert comparison.to_dict()["totals"][0]["unit"] == "us"
    assert time.a == pytest.approx(llama(4, steps=2).time.total_ns / 2)
    assert time.b == pytest.approx(llama(4, steps=4).time.total_ns / 4)
    unattributed, coverage = comparison.total("unattributed"), llama(4, steps=2).time.coverage
    assert unattributed.a == unattributed.b == pytest.approx(1 - coverage)
    with pytest.raises(KeyError):
        comparison.total("weight")


def test_the_dict_is_plain_and_says_what_the_docstring_says() -> None:
    told = compare(llama(4), llama(4, backend="math")).to_dict()
    assert list(told)[:3] == ["comparison_version", "verdict", "decision"]
    row = next(row for row in told["rows"] if row["layer"] == "model.layers.0.mlp" and row["phase"] == "backward")
    assert row["a"]["time_us"] == row["b"]["time_us"] == 1200.0
    assert row["a"]["time_per_step_us"] == 400.0
    assert {"class", "phase", "time_a_us", "count_b"} <= told["classes"][0].keys()
    documented = compare(llama(2), llama(2)).to_dict.__doc__ or ""
    assert all(name in documented for name in told if name not in ("a", "b"))


_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")


@st.composite
def analyses(draw: st.DrawFn) -> Analysis:
    """Trees with names that clash, wrap and repeat."""
    parts = st.sampled_from(["module", "layers", "0", "1", "mlp", "a", "_orig_mod"])
    names = draw(st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True))
    times = st.dictionaries(st.sampled_from(_PHASES), st.integers(0, 1000), max_size=3)
    layers = [Layer("Net", "Net", self_us=draw(times))]
    layers += [Layer(name, draw(st.sampled_from("AB")), self_us=draw(times)) for name in names]
    reasons = draw(st.dictionaries(st.sampled_from(["no launch found", "no forward link"]), st.integers(1, 99)))
    outside = draw(st.dictionaries(st.sampled_from(_PHASES), st.integers(1, 99)))
    return analysis_of(layers, unattributed_us=reasons, outside_us=outside, steps=draw(st.integers(1, 4)))


@settings(max_examples=30, deadline=None)
@given(analyses(), analyses())
def test_no_time_is_lost_whatever_the_names(a: Analysis, b: Analysis) -> None:
    comparison = compare(a, b)
    assert conserved(comparison, a, b)
    assert len([row for row in comparison.rows if row.a is not None]) == len(a.layers)
    assert len([row for row in comparison.rows if row.b is not None]) == len(b.layers)
    assert comparison.to_dict()["verdict"]


@settings(max_examples=20, deadline=None)
@given(analyses())
def test_a_thing_is_no_different_from_itself(a: Analysis) -> None:
    comparison = compare(a, a)
    assert comparison.decision in ({"no difference"} if a.time.total_ns else {"no difference", "not judged"})
    assert {row.decision for row in comparison.rows} <= {"no difference", "not judged"}
    assert (comparison.culprits, comparison.differences, comparison.backend_changes) == ((), (), ())


def test_no_name_is_a_formula_in_a_spreadsheet() -> None:
    a = llama(2)
    a = replace(a, layers=tuple(replace(row, layer="=cmd") if row.layer == "lm_head" else row for row in a.layers))
    lines = compare_csv(compare(a, a)).splitlines()
    assert sum(line.startswith("'=cmd,") for line in lines) == sum(row.layer == "=cmd" for row in a.layers) > 0
    assert not any(line.startswith("=") for line in lines)
