"""A guard against recordings whose answer is known: silent on the same thing, and what is worse is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import pytest

from comparables import comparable
from noisy_recordings import Noise, noisy_run
from profiler_wrapper.comparison.baseline import make_baseline, read_baseline, write_baseline
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.guard import GuardCheck, GuardReport, guard
from profiler_wrapper.comparison.match import like_name, traits
from profiler_wrapper.comparison.times import step_spread
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.result_json import to_dict
from profiler_wrapper.tables.model import Analysis, ClassRow, FlopRow, OperatorRow, SynchronisationRow
from profiler_wrapper.trace.run_file import Run
from sample_results import llama


def check(report: GuardReport, name: str) -> GuardCheck:
    return next(check for check in report.checks if check.name == name)


def judged(base: Analysis | Sequence[Analysis], run: Analysis | Sequence[Analysis]) -> GuardReport:
    one, other = ([side] if isinstance(side, Analysis) else side for side in (base, run))
    return guard(make_baseline(one), make_baseline(other))


def exact(blocks: int = 4, **changes: Any) -> Analysis:
    """A Llama with FLOPs, events and graph breaks, but times that nothing can be said of."""
    analysis = llama(blocks, steps=2)
    rows = tuple(
        replace(row, self_flops_per_step=1000 if row.kind == "mlp" else 0, self_events=10 if row.layer else 4)
        for row in analysis.layers
    )
    made = replace(
        analysis,
        layers=rows,
        flops=(
            FlopRow(
                layer="",
                phase="forward",
                class_name="gemm",
                dtype="bfloat16",
                flops_per_step=blocks * 2000,
                causal_flops_per_step=blocks * 2000,
            ),
        ),
        run={**analysis.run, "graph_breaks": []},
        **changes,
    )
    return comparable(made)


def with_row(analysis: Analysis, layer: str, phase: str, **changes: Any) -> Analysis:
    rows = [replace(r, **changes) if (r.layer, r.phase) == (layer, phase) else r for r in analysis.layers]
    assert rows != list(analysis.layers)
    return replace(analysis, layers=tuple(rows))


def test_the_same_thing_is_no_regression() -> None:
    report = judged(exact(), exact())
    assert (report.regressed, report.verdict) == (False, "no regression")
    assert {one.status for one in report.checks} == {"ok", "not judged"}
    assert check(report, "time").status == "not judged"


def test_more_flops_in_one_layer() -> None:
    worse = with_row(exact(), "model.layers.2.mlp", "backward", self_flops_per_step=1100)
    worse = replace(worse, flops=(replace(worse.flops[0], flops_per_step=8100),))
    (finding,) = check(judged(exact(), worse), "FLOPs").regressions
    assert (finding.layer, finding.phase, finding.before, finding.after) == (
        "model.layers.2.mlp",
        "backward",
        1000,
        1100,
    )
    assert check(judged(worse, exact()), "FLOPs").status == "improved"
    assert not judged(worse, exact()).regressed


@pytest.mark.parametrize("other", [None, 1100])
def test_flops_that_a_side_does_not_know_are_not_judged(other: int | None) -> None:
    unknown = with_row(exact(), "model.layers.2.mlp", "forward", self_flops_per_step=None)
    run = unknown if other is None else with_row(unknown, "model.layers.1.mlp", "forward", self_flops_per_step=other)
    found = check(judged(exact(), run), "FLOPs")
    assert [row.layer for row in found.regressions] == ([] if other is None else ["model.layers.1.mlp"])
    assert check(judged(unknown, exact()), "FLOPs").status == "ok"
    assert ("where both sides know them" in found.reason) == (other is None)


def flops_of(layer: str, phase: Phase, flops: int, repeated: int = 0) -> FlopRow:
    return FlopRow(
        layer=layer,
        phase=phase,
        class_name="attention",
        dtype="bfloat16",
        flops_per_step=flops,
        causal_flops_per_step=flops,
        repeated_flops_per_step=repeated,
        causal_repeated_flops_per_step=repeated,
    )


ATTENTION = "model.layers.2.self_attn"


def attention_backward(flops: int, repeated: int) -> Analysis:
    """Of one layer of four."""
    run = with_row(exact(), ATTENTION, "backward", self_flops_per_step=flops)
    return replace(run, flops=(*run.flops, flops_of(ATTENTION, "backward", flops, repeated)))


def test_scores_that_a_fused_backward_makes_again_are_no_work_of_the_model() -> None:
    products, fused = attention_backward(400, 0), attention_backward(500, 100)  # four products; a fifth again
    for base, run in ((products, fused), (fused, products)):
        assert check(judged(base, run), "FLOPs").status == "ok"
    more = attention_backward(501, 100)
    (finding,) = check(judged(products, more), "FLOPs").regressions
    assert (finding.layer, finding.before, finding.after) == (ATTENTION, 400, 401)


def test_what_checkpointing_computes_again_is_a_fact_of_its_own() -> None:
    base = exact()
    (mlp,) = (row for row in base.layers if (row.layer, row.phase) == ("model.layers.2.mlp", "forward"))
    again = replace(mlp, phase="recompute")
    run = replace(base, layers=(*base.layers, again), flops=(*base.flops, flops_of(mlp.layer, "recompute", 1000, 1000)))
    found = check(judged(base, run), "FLOPs")
    assert [finding.text for finding in found.regressions] == [
        "model.layers.2.mlp (recompute): FLOPs 0 GFLOP -> 1e-06 GFLOP (new)"
    ]
    assert check(judged(run, base), "FLOPs").status == "improved"


def with_backend(analysis: Analysis, backend: str, *layers: str) -> Analysis:
    rows = [replace(row, backend=backend) if not layers or row.layer in layers else row for row in analysis.attention]
    return replace(analysis, attention=tuple(rows))


def test_what_follows_from_a_better_backend_of_attention_is_no_regression() -> None:
    base = with_backend(exact(), "math")
    run = with_row(with_backend(base, "flash", ATTENTION), ATTENTION, "backward", self_events=14)
    report = judged(base, run)
    found = check(report, "kernels")
    assert (report.regressed, found.status) == (False, "ok")
    assert [finding.text for finding in found.consequences] == [
        f"{ATTENTION} (backward): kernels 5 -> 7 (+40 %), with attention math -> flash"
    ]
    assert "    follows: model.layers.2.self_attn (backward)" in report.table()
    elsewhere = with_row(run, "model.layers.1.self_attn", "backward", self_events=14)
    (worse,) = check(judged(base, elsewhere), "kernels").regressions
    assert worse.layer == "model.layers.1.self_attn"
    slower = with_row(with_backend(exact(), "math", ATTENTION), ATTENTION, "backward", self_events=14)
    assert check(judged(with_backend(exact(), "flash"), slower), "kernels").status == "regression"


def op_row(op: str, phase: Phase, calls: int) -> OperatorRow:
    return OperatorRow(
        op=op,
        class_name="other",
        phase=phase,
        calls=calls,
        self_time_ns=1,
        time_ns=1,
        self_cpu_time_ns=1,
        cpu_time_ns=1,
        device_events=0,
        tensor_core_eligible=False,
        tensor_core_time_ns=None,
        layers=(),
    )


def test_ops_that_are_called_more_often_are_named_waits_first() -> None:
    mlp = "model.layers.2.mlp"
    base = exact(operators=(op_row("aten::item", "optimizer", 4), op_row("aten::linear", "forward", 10)))
    run = with_row(base, mlp, "forward", self_events=12)
    run = replace(run, operators=(op_row("aten::item", "optimizer", 6), op_row("aten::linear", "forward", 14)))
    found = check(judged(base, run), "kernels")
    assert [finding.text for finding in found.regressions] == [f"{mlp} (forward): kernels 5 -> 6 (+20 %)"]
    assert found.reason == "more calls a step: +1 aten::item (optimizer), +2 aten::linear (forward)"
    many = replace(run, operators=tuple(op_row(f"aten::op{i}", "forward", 20 - 2 * i) for i in range(6)))
    reason = check(judged(base, many), "kernels").reason
    assert reason.endswith(", +7 aten::op3 (forward) and 2 more")


def test_one_more_kernel_in_every_step_of_one_layer() -> None:
    worse = with_row(exact(), "model.layers.2.self_attn", "forward", self_events=12)
    (finding,) = check(judged(exact(), worse), "kernels").regressions
    assert (finding.layer, finding.before, finding.after) == ("model.layers.2.self_attn", 5, 6)


def test_like_layers_are_one_finding() -> None:
    worse = exact()
    for i in range(4):
        worse = with_row(worse, f"model.layers.{i}.mlp", "forward", self_events=14)
    (finding,) = check(judged(exact(), worse), "kernels").regressions
    assert finding.layer == "model.layers.{0..3}.mlp"


def test_a_layer_whose_kernels_differ_from_step_to_step_may_vary() -> None:
    uneven = with_row(exact(), "model.layers.1.mlp", "forward", self_events=41)  # 20.5 of a step
    more = with_row(exact(), "model.layers.1.mlp", "forward", self_events=44)
    far = with_row(exact(), "model.layers.1.mlp", "forward", self_events=60)
    assert not judged(uneven, more).regressed
    assert judged(uneven, far).regressed


def test_several_runs_let_pass_what_varies_among_them() -> None:
    runs = [with_row(exact(), "model.layers.1.mlp", "forward", self_events=n) for n in (12, 14, 16)]
    within, beyond = (with_row(exact(), "model.layers.1.mlp", "forward", self_events=n) for n in (14, 18))
    assert judged(runs[0], within).regressed
    assert not judged(runs, within).regressed
    assert judged(runs, beyond).regressed
    assert check(judged(runs[0], [beyond, runs[0]]), "kernels").status == "ok"  # of several runs, all have to be worse
    fewer = [with_row(exact(), "model.layers.1.mlp", "forward", self_events=n) for n in (6, 8)]
    (less,) = (one for one in check(judged(runs, fewer), "kernels").improvements if one.layer)
    assert (less.before, less.after, less.limit) == (6.0, 4.0, 8.0)  # the nearer ends; each has two steps


def test_other_kernels_of_the_same_products_pass() -> None:
    base = exact(classes=(ClassRow(class_name="gemm", phase="forward", time_ns=1, count=20),))
    tuned = exact(classes=(ClassRow(class_name="gemm", phase="forward", time_ns=1, count=24),))
    tuned = with_row(tuned, "model.layers.1.mlp", "forward", self_events=14)
    found = check(judged(base, tuned), "kernels")
    assert (found.status, "same products" in found.reason) == ("ok", True)
    other = exact(classes=(ClassRow(class_name="elementwise", phase="forward", time_ns=1, count=24),))
    assert judged(base, with_row(other, "model.layers.1.mlp", "forward", self_events=14)).regressed


def test_a_higher_peak_names_what_grew() -> None:
    base = exact()
    steps = tuple(replace(step, peak_bytes=(step.peak_bytes or 0) * 2) for step in base.steps)
    worse = with_row(replace(base, steps=steps), "model.layers.2.mlp", "forward", self_retained_bytes=1e9)
    found = check(judged(base, worse), "memory")
    assert found.regressions[0].what == "peak memory"
    assert "model.layers.2.mlp (forward): retained 32 MiB -> 953.7 MiB" in found.regressions[0].text


def test_a_little_more_memory_passes() -> None:
    base = exact()
    steps = tuple(replace(step, peak_bytes=(step.peak_bytes or 0) + 20_000) for step in base.steps)
    assert not judged(base, replace(base, steps=steps)).regressed


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [("flash", "math", "regression"), ("math", "flash", "improved"), ("mem_efficient", "of tomorrow", "improved")],
)
def test_another_backend_of_attention(before: str, after: str, status: str) -> None:
    found = check(judged(llama(4, backend=before), llama(4, backend=after)), "attention")
    assert found.status == status
    (first, *_) = (*found.regressions, *found.improvements)
    assert first.text == f"attention of model.layers.{{0..3}}.self_attn (forward): {before} -> {after}"


@pytest.mark.parametrize(("phase", "gone"), [("recompute", True), ("recompute", False), ("backward", True)])
def test_the_attention_of_a_phase_that_is_gone_is_not_worse(phase: Phase, gone: bool) -> None:
    """Checkpointing taken away, or that saves what attention gave; a model that is only called."""
    whole = llama(4, recompute=True)
    rows = tuple(row for row in whole.layers if not gone or row.phase != phase)
    less = replace(whole, layers=rows, attention=tuple(row for row in whole.attention if row.phase != phase))
    for before, after in ((whole, less), (less, whole)):
        found = check(judged(before, after), "attention")
        assert (found.status, list(found.lines())) == ("ok", [])
    assert "attention" not in compare(whole, less).verdict
    without = tuple(row for row in whole.attention if row.phase != "forward")
    assert check(judged(whole, replace(whole, attention=without)), "attention").status == "regression"


def test_many_differences_are_cut_with_their_number() -> None:
    one, other = (cast(Run, {"versions": {f"package{i}": version for i in range(30)}}) for version in "12")
    report = judged(replace(exact(), run=one), replace(exact(), run=other))
    assert len(report.to_dict()["differences"]) == 30 and not report.regressed
    assert "differs: package11 1 -> 2\ndiffers: 18 more, which the JSON has\n" in report.table()
    assert report.markdown().count("differs: package") == 12


def test_a_baseline_keeps_versions_and_settings(tmp_path: Path) -> None:
    told = {"versions": {"torch": "2.12.0", "transformers": "4.57.6"}, "environment": {"OMP_NUM_THREADS": ""}}
    base, run = (replace(exact(), run=cast(Run, {**exact().run, **one})) for one in (told, {}))
    write_baseline(make_baseline([base]), tmp_path / "base.json")
    again = read_baseline(tmp_path / "base.json")
    assert again.traits == traits(base) and again.traits["settings"]["transformers"] == "4.57.6"
    new = {"torch": "2.13.0", "transformers": "5.23.0"}
    report = guard(again, replace(run, run=cast(Run, {**run.run, "versions": new})))
    assert report.differences == (("torch", "2.12.0", "2.13.0"), ("transformers", "4.57.6", "5.23.0"))


def test_a_graph_break_is_named_with_its_line() -> None:
    base = exact()
    broken = replace(base, run={**base.run, "graph_breaks": [{"reason": "a branch", "count": 3, "source": "m.py:7"}]})
    (finding,) = check(judged(base, broken), "graph breaks").regressions
    assert finding.text == "graph breaks: 0 -> 1, m.py:7: a branch"


def renamed(analysis: Analysis, new_name: Callable[[str], str]) -> Analysis:
    """The same thing, its layers by other names."""

    def renamed_rows(rows: Iterable[Any], *fields: str) -> Any:
        return tuple(
            replace(row, **{one: new_name(old) for one in fields if (old := getattr(row, one))}) for row in rows
        )

    return replace(
        analysis,
        layers=renamed_rows(analysis.layers, "layer", "parent", "block"),
        attention=renamed_rows(analysis.attention, "layer"),
        flops=renamed_rows(analysis.flops, "layer"),
        synchronisations=renamed_rows(analysis.synchronisations, "layer"),
    )


def within_block(name: str) -> str:
    return re.sub(r"(layers\.\d+)", r"\1._checkpoint_wrapped_module", name)


@pytest.mark.parametrize("new_name", ["net.model.".__add__, within_block], ids=["prefix", "part of a wrapper"])
def test_names_may_differ(new_name: Callable[[str], str], tmp_path: Path) -> None:
    wait = SynchronisationRow(
        kind="item", op="aten::item", layer="model.layers.1.mlp", phase="forward", count=2, wait_ns=9
    )
    one = exact(synchronisations=(wait,))
    other = renamed(one, new_name)
    base, both = make_baseline([one]), make_baseline([one, other])
    assert base.ranges == both.ranges
    write_baseline(base, path := tmp_path / "baseline.json")
    for runs in ([other], [other, other]):
        report = guard(path, runs)
        assert [finding for one in report.checks for finding in (*one.regressions, *one.improvements)] == []
        assert check(report, "synchronisations").status == "ok"
    more = with_row(other, new_name("model.layers.2.mlp"), "forward", self_flops_per_step=1500)
    (finding,) = check(guard(base, more), "FLOPs").regressions
    assert finding.text == "model.layers.2.mlp (forward): FLOPs 1e-06 GFLOP -> 1.5e-06 GFLOP (+50 %)"
    timed = renamed(noisy_run(9, slower=seventh), new_name)
    assert check(judged(noisy_run(1), timed), "time").regressions[0].layer == "layers.7"


def test_another_model_can_not_be_judged() -> None:
    other = noisy_run(1)
    report = judged(exact(), other)
    assert (report.judged, report.regressed) == (False, False)
    with pytest.raises(WrongUse, match="runs of one thing"):
        make_baseline([exact(), other])
    with pytest.raises(WrongUse, match="needs a run"):
        make_baseline([])


def test_on_another_machine_only_flops_are_judged() -> None:
    elsewhere = comparable(exact(), device="Tesla V100")
    report = judged(exact(), with_row(elsewhere, "model.layers.2.mlp", "forward", self_events=99))
    assert check(report, "FLOPs").status == "ok"
    assert {one.status for one in report.checks[1:]} == {"not judged"}
    assert "device was NVIDIA H200, is Tesla V100" in check(report, "time").reason


# -- time -----------------------------------------------------------------------------------------


def seventh(layer: str, phase: str, step: int) -> float:
    return 1.15 if layer.startswith("layers.7.") else 1.0


@pytest.mark.full
def test_fifteen_percent_of_one_layer_are_found_every_time_and_noise_is_not() -> None:
    for i in range(10):
        base, again, worse = (make_baseline([noisy_run(at + i, slower=how)]) for at, how in _SIDES)
        assert not guard(base, again).regressed
        found = check(guard(base, worse), "time").regressions
        assert found[0].layer == "layers.7"
        assert all(one.layer.startswith("layers.7") for one in found)


_SIDES = ((0, None), (2000, None), (5000, seventh))


def test_everything_slower_counts_on_a_device_and_is_no_verdict_on_a_cpu() -> None:
    base, slower = (make_baseline([noisy_run(1)]), make_baseline([noisy_run(2, slower=lambda *_: 1.6)]))
    (finding,) = check(guard(base, slower), "time").regressions
    assert "the whole step" in finding.text
    on_cpu = [replace(side, traits={**side.traits, "time_basis": "cpu"}) for side in (base, slower)]
    found = check(guard(*on_cpu), "time")
    assert (found.status, "all layers alike changed by +" in found.reason) == ("not judged", True)


def test_a_layer_that_varies_wildly_is_left_alone_and_that_is_said() -> None:
    def wild(layer: str, phase: str, step: int) -> float:
        return (1.0, 9.0, 3.0, 20.0, 6.0)[step] if layer == "layers.3.mlp" else 1.0

    found = check(judged(noisy_run(0), noisy_run(7, slower=wild)), "time")
    assert "layers.3.mlp" not in {one.layer for one in found.regressions}
    assert "vary too much from step to step" in found.reason


def recorded(seed: int, **told: bool) -> Analysis:
    return comparable(noisy_run(seed), **told)


def test_times_are_judged_only_where_both_recorded_the_same_and_no_shapes() -> None:
    shaped, memory = recorded(3, shapes_in_timed_steps=True), recorded(3, memory_in_timed_steps=True)
    reason = check(judged(noisy_run(1), shaped), "time").reason
    assert reason.startswith("the run: shapes were recorded in the timed steps")
    assert "record_shapes=True" in reason
    plain = recorded(1, memory_in_timed_steps=False)
    assert check(judged(plain, memory), "time").reason == "allocations in the timed steps was no, is yes"
    assert check(judged([memory, plain], memory), "time").status == "not judged"  # times are those of `plain`
    assert check(judged([memory, plain], recorded(4, memory_in_timed_steps=False)), "time").status == "ok"
    assert check(judged(recorded(1, memory_in_timed_steps=True), memory), "time").status == "ok"
    few = check(judged(noisy_run(1, steps=2), noisy_run(1)), "time").reason
    assert few.startswith("the baseline: it takes at least 3 timed steps")


def part_of(name: str, factor: float, seed: int, steps: int) -> Analysis:
    """What begins with `name` takes so much longer."""

    def slower(layer: str, phase: str, step: int) -> float:
        return factor if layer.startswith(name) else 1.0

    return noisy_run(seed, steps=steps, blocks=10, slower=slower, noise=Noise(common=0.02, own=0.01, outliers=0.0))


@pytest.mark.parametrize("steps", [5, 10])
@pytest.mark.parametrize(
    ("name", "before", "after", "regressed"),
    [
        ("layers.7.", [1.0], [1.2], True),
        ("layers.7.", [1.0, 1.0, 1.2], [1.2], False),
        ("layers.7.", [1.0, 1.2, 1.0, 1.2], [1.2], False),
        ("layers.7.", [1.0, 1.25, 0.8], [1.15], False),
        ("layers.7.", [1.0], [1.0, 1.2, 1.2], False),
        ("layers.7.", [1.0, 1.0, 1.02], [1.3], True),
        ("", [1.0], [1.15], True),  # the whole step
        ("", [1.0, 1.0, 1.15], [1.15], False),
    ],
)
def test_the_spread_between_runs_is_let_pass(
    name: str, before: list[float], after: list[float], regressed: bool, steps: int
) -> None:
    runs = [
        [part_of(name, factor, seed + i, steps) for i, factor in enumerate(side)]
        for seed, side in ((100, before), (200, after))
    ]
    assert (check(judged(*runs), "time").status == "regression") == regressed


def test_runs_that_differ_as_a_whole_hide_no_layer() -> None:
    base = [part_of("", factor, 100 + i, 5) for i, factor in enumerate([1.0, 1.3, 0.8])]
    found = check(judged(base, part_of("layers.7.", 1.2, 200, 5)), "time")
    assert "layers.7" in {one.layer for one in found.regressions}


# -- the file -------------------------------------------------------------------------------------


def test_the_file_gives_back_what_was_written_and_is_small(tmp_path: Path) -> None:
    for number, runs in enumerate(([exact(100)], [noisy_run(1), noisy_run(2)], [llama(4)])):
        path = tmp_path / f"{number}.json"
        made = make_baseline(runs)
        write_baseline(made, path)
        assert path.stat().st_size < sum(len(json.dumps(to_dict(run))) for run in runs) / 3
        assert read_baseline(path) == made
        assert not guard(read_baseline(path), made).regressed


def test_a_file_of_another_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"guard_baseline_version": 99}')
    with pytest.raises(WrongUse, match="make the baseline anew"):
        read_baseline(path)
    for broken in (
        '2, "rows": 3',
        '3, "rows": 3',
        '3, "sources": [], "results": []',
        '3, "sources": [], "results": [3]',
    ):
        path.write_text(f'{{"guard_baseline_version": {broken}}}')
        with pytest.raises(WrongUse, match="not a baseline that guard wrote"):
            read_baseline(path)


VERSION_2 = Path(__file__).parents[1] / "data" / "guard_baseline_version_2.json"


def test_a_file_of_version_2_is_still_a_baseline(tmp_path: Path) -> None:
    """It was written of two runs of a model of eight blocks, with a range of events in one layer."""
    base, runs = read_baseline(VERSION_2), [two_runs_of_version_2(i) for i in (1, 2)]
    now = make_baseline(runs)
    assert (base.runs, base.ranges, base.backends) == (2, now.ranges, now.backends)
    assert (base.breaks, set(base.blocks)) == (now.breaks, set(now.blocks))
    for layer, block in base.blocks.items():
        assert like_name(layer, block) == like_name(layer, now.blocks[layer])
    assert set(base.times) == set(now.times)
    for key, time in base.times.items():
        assert median(time.steps_ns) == pytest.approx(median(now.times[key].steps_ns), rel=0.03)
    told = json.loads(VERSION_2.read_text())
    assert median(base.steps_ns) == pytest.approx(1000 * told["step_us"])
    assert step_spread(np.log([base.steps_ns]))[0] == pytest.approx(told["step_spread"], rel=0.05)
    assert not guard(base, now).regressed
    with pytest.raises(WrongUse, match="version 2"):
        write_baseline(base, tmp_path / "again.json")
    assert not (tmp_path / "again.json").exists()
    slower = replace(noisy_run(9, blocks=8, slower=seventh), run=runs[0].run)
    assert check(guard(base, make_baseline([slower])), "time").regressions[0].layer == "layers.7"
    more = with_row(runs[0], "layers.3.mlp", "forward", self_events=15)
    for run in (more, renamed(more, "module.".__add__)):
        (finding,) = check(guard(base, make_baseline([run])), "kernels").regressions
        assert (finding.layer, finding.before, finding.after) == ("layers.3.mlp", 1, 3)


def two_runs_of_version_2(seed: int) -> Analysis:
    run = noisy_run(seed, blocks=8)
    run = replace(run, run={**run.run, "graph_breaks": [{"reason": "a branch", "source": "m.py:7"}]})
    return run if seed == 1 else with_row(run, "layers.5.mlp", "backward", self_events=10)


def test_the_report_says_everything_in_words_and_in_json() -> None:
    worse = with_row(exact(), "model.layers.2.self_attn", "forward", self_events=12)
    report = judged(exact(), worse)
    text = report.table(width=80)
    assert text.startswith("regression: model.layers.2.self_attn (forward): kernels 5 -> 6 (+20 %)")
    assert max(map(len, text.splitlines())) <= 80
    assert "REGRESSION  kernels" in text
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["regressed"], told["judged"]) == (True, True)


def test_a_thousand_rows_of_a_thing_with_itself() -> None:
    made = make_baseline([exact(200)])
    assert not guard(made, made).regressed


# --- Markdown, for the summary of a job ---


def test_markdown_has_each_check_in_a_row_and_the_regression_first() -> None:
    base = exact()
    worse = replace(base, layers=tuple(replace(row, self_flops_per_step=1500) for row in base.layers))
    lines = judged(base, worse).markdown().splitlines()
    assert lines[0].startswith("### regression: ")
    table = [line for line in lines if line.startswith("|")]
    rows = {cells[0].strip(): cells[1:] for cells in (line.strip("|").split("|") for line in table[2:])}
    assert set(rows) == {one.name for one in judged(base, worse).checks}
    assert rows["FLOPs"][0].strip() == "**regression**"
    assert "worse: " in rows["FLOPs"][1]
    assert rows["graph breaks"][0].strip() == "ok"


def test_names_are_no_markup_in_markdown() -> None:
    base = exact()
    name = "a|b<img src=x>`*_[x](y)\n&amp;"
    renamed = tuple(
        replace(row, layer=name, raw_name=name, self_flops_per_step=9) if row.kind == "norm" else row
        for row in base.layers
    )
    text = judged(base, replace(base, layers=renamed)).markdown()
    assert r"a\|b\<img src=x\>\`\*\_\[x\](y)" in text
    assert "<img" not in text.replace(r"\<img", "")
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert columns == {4}
