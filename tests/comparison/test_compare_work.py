"""Comparisons of what is exact: other work of a layer is named, whatever its time; unlike times are not judged."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from noisy_recordings import Factor, Noise, noisy_run
from profiler_wrapper.advice.advise import input_shapes
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.text import compare_text, folded_rows
from profiler_wrapper.tables.model import Analysis, FlopRow, ProductRow, UncountedRow
from profiler_wrapper.units import TIME_NAMES
from sample_results import llama

BUSY = Noise(common=0.3, own=0.06)


def product(
    op: str, m: int, n: int, k: int, *, phase: str = "forward", batch: int = 1, dtype: str = "float32"
) -> ProductRow:
    return ProductRow(
        op=op, layer="x", phase=phase, dtype=dtype, m=m, n=n, k=k, batch=batch, calls_per_step=1.0, time_per_step_ns=1
    )  # type: ignore[arg-type]


def on_cpu(seed: int, **options: object) -> Analysis:
    return replace(noisy_run(seed, **options), time_basis="cpu")


def more_work(analysis: Analysis, layers: tuple[str, ...], flops: int, ops: int) -> Analysis:
    """With FLOPs known of all, and more of them, and of ops, in forward of `layers`."""
    rows = []
    for row in analysis.layers:
        more = row.layer in layers and row.phase == "forward"
        rows.append(
            replace(
                row,
                self_flops_per_step=800 + (flops if more else 0),
                self_events=(row.self_events or 0) + (ops * 5 if more else 0),
            )
        )
    flop_count = 800 * len(rows) + flops * len(layers)
    counted = FlopRow(
        layer="",
        phase="forward",
        class_name="gemm",
        dtype="float32",
        flops_per_step=flop_count,
        causal_flops_per_step=flop_count,
    )
    return replace(analysis, layers=tuple(rows), flops=(counted,))


def test_the_digest_is_of_the_input_and_not_of_how_attention_is_done() -> None:
    linear = (product("aten::addmm", 512, 384, 128), product("aten::mm", 512, 128, 384, phase="backward"))
    math = (*linear, product("aten::bmm", 128, 128, 32, batch=16), product("aten::mm", 9, 9, 9, phase="backward"))
    base = llama(2)

    def digest(*products: ProductRow) -> str | None:
        return input_shapes(replace(base, products=products))

    assert digest(*linear) == digest(*math) == digest(product("aten::mm", 512, 384, 128, dtype="bfloat16"))
    assert digest(*linear) != digest(product("aten::addmm", 512, 512, 128))
    assert digest() is None
    assert digest(product("aten::bmm", 4, 4, 4, batch=2)) not in (None, digest(product("aten::bmm", 4, 4, 8, batch=2)))


def test_more_work_of_a_layer_is_named_where_time_says_nothing() -> None:
    one = more_work(on_cpu(1, noise=BUSY), (), 0, 0)
    other = more_work(on_cpu(2, noise=BUSY), ("layers.2.mlp",), 100, 12)
    found = compare(one, other)
    assert [(row.layer, row.delta("flops"), row.delta("events")) for row in found.work] == [("layers.2.mlp", 100, 12.0)]
    assert re.search(
        r"; other work: layers.2.mlp [\d.]+ -> [\d.]+ ms, \+6.2 % FLOPs, \+12 ops", found.verdict
    )  # 100 of forward's and backward's 1600
    text = compare_text(found)
    assert re.search(r"^layers\.2\.mlp +[\d.]+ -> [\d.]+ ms, \+6\.2 % FLOPs, \+12 ops$", text, re.MULTILINE)
    assert "ms, -5.9 % FLOPs, -12 ops" in compare(other, one).verdict
    told = found.to_dict()["work"][0]
    assert (told["layer"], told["events_b"] - told["events_a"]) == ("layers.2.mlp", 12.0)


def test_flops_that_one_side_does_not_know_are_no_fewer() -> None:
    one = more_work(noisy_run(1), (), 0, 0)
    other = more_work(noisy_run(2), ("layers.2.mlp",), 0, 12)
    rows = tuple(replace(r, self_flops_per_step=None) if r.layer == "layers.2.mlp" else r for r in other.layers)
    op = UncountedRow(
        op="lib::mix", class_name="other", phase="forward", layers=("layers.2.mlp",), count=1, time_per_step_ns=1
    )
    found = compare(one, replace(other, layers=rows, uncounted=(op,)))
    assert " ms, FLOPs not known in b, +12 ops" in found.verdict.replace("device events", "ops")
    assert "% FLOPs" not in compare_text(found)
    assert (found.total("FLOPs").b, found.total("FLOPs").change) == (None, None)
    both = found.total("FLOPs known on both sides")
    assert all(total.name != both.name for total in compare(one, one).totals)
    assert both.a == both.b == 800 * sum(row.layer != "layers.2.mlp" for row in one.layers)


def test_like_layers_with_the_same_other_work_are_one() -> None:
    layers = tuple(f"layers.{i}.attn" for i in range(24))
    (row,) = compare(more_work(noisy_run(1), (), 0, 0), more_work(noisy_run(2), layers, 8, 0)).work
    assert (row.layer, row.delta("flops")) == ("layers.{0..23}.attn", 24 * 8)


@pytest.mark.parametrize(("layers", "more"), [(2, ""), (3, " and 1 more")])
def test_the_verdict_names_two_layers_of_other_work(layers: int, more: str) -> None:
    changed = ("layers.0.attn", "layers.1.mlp", "layers.2.norm")[:layers]
    found = compare(more_work(noisy_run(1), (), 0, 0), more_work(noisy_run(2), changed, 100, 0))
    assert len(found.work) == layers
    assert found.verdict.endswith(f" FLOPs{more}")


def test_the_same_work_is_no_other_work() -> None:
    assert compare(noisy_run(1), noisy_run(2)).work == ()
    assert "work" not in compare(noisy_run(1), noisy_run(2)).verdict


@pytest.mark.parametrize("seed", [1, 2, 4, 7, 11])
def test_a_layer_that_does_other_work_is_judged_by_its_own_steps(seed: int) -> None:
    """A third of its time, in steps that scatter by a fifth: too little to tell one of 50 layers from chance."""
    noise = Noise(common=0.3, own=0.18)
    before = more_work(on_cpu(seed, noise=noise), (), 0, 0)
    after = on_cpu(50 + seed, noise=noise, slower=lambda layer, phase, step: 0.3 if layer == "layers.2.attn" else 1.0)
    found = [compare(before, more_work(after, layers, 100, 12)) for layers in ((), ("layers.2.attn",))]
    assert [any(one.layers == ("layers.2.attn",) for one in each.culprits) for each in found] == [False, True]
    assert re.search(r"but layers\.2\.attn is \d\d\.\d % \(±\d+\.\d\) faster", found[1].verdict)
    assert re.search(r"other work: layers\.2\.attn \d\.\d -> \d\.\d ms, \+", found[1].verdict)
    work = found[1].work[0]
    assert 0.2 < work.time_b_ns / work.time_a_ns < 0.5


def test_a_phase_of_one_side_comes_first() -> None:
    """As recompute does, which is new by its name whatever the noise says of the step."""
    whole = on_cpu(1, noise=BUSY)
    rows = [row for row in whole.layers if row.phase == "forward"]
    ms = sum(row.self_time_ns for row in rows) / 1e6 / len(whole.steps)
    less = replace(whole, layers=tuple(row for row in whole.layers if row.phase != "forward"))
    assert f"forward: {ms:+.1f} ms a step, only in b, " in compare(less, whole).verdict
    assert f"forward: {-ms:+.1f} ms a step, only in a, " in compare(whole, less).verdict
    assert "only in" not in compare(whole, whole).verdict


def test_a_trifle_is_no_headline() -> None:
    """A layer of half a percent of the step, five times as long, stands in the table alone."""
    found = compare(noisy_run(1), noisy_run(2, slower=lambda layer, phase, step: 5 if layer == "layers.2.norm" else 1))
    assert [one.layer for one in found.culprits] == ["layers.2.norm"] and "layers.2.norm" in compare_text(found)
    assert "layers.2.norm" not in found.verdict, found.verdict


ATTENTION = tuple(f"layers.{i}.attn" for i in range(4))


def of_four(seed: int, slower: Factor | None = None) -> Analysis:
    """Four blocks on a CPU, six steps of little noise."""
    return on_cpu(seed, slower=slower, blocks=4, steps=6, noise=Noise(outliers=0.0))


def test_what_got_faster_with_all_but_less_than_all_is_called_no_slower() -> None:
    found = compare(of_four(1), of_four(3, lambda layer, phase, step: 0.95 if layer in ATTENTION else 0.82))
    (culprit,) = found.culprits
    assert culprit.layers == ATTENTION and culprit.change is not None and culprit.change < 0 < culprit.change_ns
    assert found.common == found.to_dict()["common"] == pytest.approx(-0.16, abs=0.03)
    said = r"but layers\.\{0\.\.3\}\.attn is 3\.\d % \(±\d\.\d\) faster, where all layers have -1\d\.\d % in common"
    assert re.search(said, found.verdict)
    assert re.search(r"^ms a step: beyond the -1\d\.\d % that all layers have in common$", compare_text(found), re.M)


def test_the_printed_change_is_that_of_the_printed_times() -> None:
    for i in range(5):
        found = compare(on_cpu(i, noise=BUSY), on_cpu(70 + i, noise=BUSY))
        total = found.totals[0]
        assert total.a and total.b and total.change == pytest.approx(total.b / total.a - 1)
        change, a, b = re.findall(r"([+-]\d+\.\d) % ±[\d.]+; ([\d.]+) -> ([\d.]+) ms", found.verdict)[0]
        assert float(change) == pytest.approx(100 * (float(b) / float(a) - 1), abs=0.06)
        assert "+-: the standard error of the change" in compare_text(found)
        assert "difference?" not in compare_text(found)


def test_what_a_cpu_has_in_common_within_its_noise_is_no_certain_difference() -> None:
    found = compare(on_cpu(3, noise=BUSY), on_cpu(4, noise=BUSY, slower=lambda layer, phase, step: 1.2))
    assert found.decision == "not certain"
    assert "not certain: steps of both sides overlap" in " ".join(compare_text(found).split())
    assert "all layers changed alike, as under other load or clock" in " ".join(compare_text(found).split())
    assert found.verdict.startswith("no certain difference of the whole step (")


def test_names_that_are_cut_stay_apart() -> None:
    text = compare_text(compare(llama(4), llama(4)), width=80)
    rows = text.split("mean self time a step", 1)[1].splitlines()[2:]
    begins = [row[:40] for row in rows if row.strip()]  # name and phase
    assert len(begins) > 10 and len(set(begins)) == len(begins)


def test_times_of_a_cpu_and_of_a_device_are_not_judged() -> None:
    for one, other in ((on_cpu(1), noisy_run(2)), (noisy_run(2), on_cpu(1))):
        found = compare(one, other)
        assert found.decision == found.totals[0].decision == "not judged"
        assert {row.decision for row in found.rows} == {"not judged"}
        assert all(row.change is None for row in found.rows)
        assert all(total.change is None for total in found.totals if total.unit in ("ns", "count"))
        assert (found.culprits, found.work) == ((), ())
        assert "times are not judged, because they are of a CPU and of a device" in found.verdict
        before, after = (TIME_NAMES[run.time_basis] for run in (one, other))
        assert re.search(rf"\(a [\d.]+ ms of {before} a step, b [\d.]+ ms of {after}\)", found.verdict)
        assert "%" not in compare_text(found).split("self time", 1)[1]


def test_the_optimizer_is_said_once() -> None:
    row = next(row for row in folded_rows(compare(llama(2), llama(2))) if row.label == "optimizer")
    text = compare_text(compare(llama(2), llama(2)))
    assert row.phase == "" and not re.search("optimizer +optimizer", text)
