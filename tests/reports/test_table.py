"""The printed table: its rows, its limits and its text."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.columns import COLUMNS, phase_times
from profiler_wrapper.reports.describe import coverage_percent, step_time_in_words, use_line, use_lines
from profiler_wrapper.reports.folding import Tree, layer_totals, outlying_layers
from profiler_wrapper.reports.full_table import full_table, layer_section, step_section
from profiler_wrapper.reports.memory import owner_groups
from profiler_wrapper.reports.table import TableRow, console_table, table_rows
from profiler_wrapper.reports.text import cells, clean, shorten, wrap
from profiler_wrapper.tables.memory.use import memory_summary
from profiler_wrapper.tables.model import Analysis, Overview, StepRow, StepSplit, Summary, UncountedRow
from profiler_wrapper.tables.statistics import number_ranges, outliers
from profiler_wrapper.tables.work.peaks import find_peaks
from profiler_wrapper.tables.work.roofline import _note
from recordings import Trace, analyse
from sample_memory import leaking_memory, llama_memory
from sample_results import Layer, analysis_of, llama
from sample_views import overview
from sample_work import worked

GOLDEN = Path(__file__).parents[1] / "golden"
US_PER_STEP = 1000.0  # in nanoseconds


def golden(name: str) -> str:
    return (GOLDEN / name).read_text(encoding="utf-8")


def row_of(rows: list[TableRow], label: str) -> TableRow:
    found = [row for row in rows if row.label == label]
    assert len(found) == 1, [row.label for row in rows]
    return found[0]


# ---- rows -------------------------------------------------------------------------------------


def test_like_blocks_are_one_row_and_their_children_too() -> None:
    rows = table_rows(llama(4), most=20).rows
    labels = [(row.depth, row.before or row.label) for row in rows]
    assert labels == [
        (0, "LlamaForCausalLM"),
        (1, "model"),
        (2, "layers.{0..3}"),
        (3, "median"),
        (3, ".mlp"),
        (3, ".self_attn"),
        (3, ".input_layernorm"),
        (2, "embed_tokens"),
        (2, "norm"),
        (1, "lm_head"),
        (0, "optimizer"),
        (0, "TOTAL"),
    ]


def test_times_are_per_step_and_a_fold_is_the_sum_of_its_members() -> None:
    rows = table_rows(llama(4, steps=3), most=20).rows
    blocks = row_of(rows, "layers.{0..3}")
    # A block: 10 + 100 + 200 + 3 us forward, twice that backward.
    assert phase_times(blocks.values) == {"forward": 4 * 313 * US_PER_STEP, "backward": 4 * 626 * US_PER_STEP}
    assert blocks.values["time"] == 4 * 939 * US_PER_STEP
    assert blocks.values["attention"] == 4 * 300 * US_PER_STEP
    assert blocks.values["calls"] == 4
    assert blocks.values["retained"] == 4 * 54 * 2**20


def test_median_row_has_the_median_of_each_column_and_the_range_of_the_total() -> None:
    rows = table_rows(llama(5, odd=2), most=25).rows
    median = next(row for row in rows if row.kind == "median")
    assert median.values["time"] == 939 * US_PER_STEP
    assert median.values["backward"] == 626 * US_PER_STEP
    assert median.range_ns == (939 * US_PER_STEP, (2 * 310 + 3) * 3 * US_PER_STEP)
    assert median.values["calls"] == 1
    assert median.values["retained"] == 54 * 2**20


def test_the_odd_one_is_named_with_how_far_off_it_is() -> None:
    rows = table_rows(llama(32, odd=17), most=20).rows
    odd = [row for row in rows if row.kind == "outlier"]
    assert [(row.label, row.after) for row in odd] == [("layers.17", " +99 %")]  # 1869 against 939 us
    assert odd[0].values["time"] == 1869 * US_PER_STEP


def test_one_step_that_was_held_up_makes_no_outlier() -> None:
    """Of three steps of 310 us the last takes block 3 a second longer; block 5 takes twice as long in each."""
    held_up = []
    for row in llama(8, odd=5).layers:
        first = row.time_ns // 3
        last = 10**9 if row.layer == "model.layers.3" else 0
        held_up.append(replace(row, time_ns=row.time_ns + last, step_times_ns=(first, first, first + last)))
    rows = table_rows(replace(llama(8), layers=tuple(held_up)), most=20).rows
    assert [(row.label, row.after) for row in rows if row.kind == "outlier"] == [("layers.5", " +99 %")]


def test_how_far_off_is_that_of_the_times_in_the_rows() -> None:
    """Its median step takes twice the others' time; the last of three takes as much again, so the row has more."""
    slowed = []
    for row in llama(8, odd=5).layers:
        first = row.time_ns // 3
        last = 3 * first if row.layer == "model.layers.5" else first
        slowed.append(replace(row, time_ns=2 * first + last, step_times_ns=(first, first, last)))
    rows = table_rows(replace(llama(8), layers=tuple(slowed)), most=20).rows
    (odd,), (median,) = ([row for row in rows if row.kind == kind] for kind in ("outlier", "median"))
    assert odd.after == f" {100 * odd.values['time'] / median.values['time'] - 100:+.0f} %" == " +232 %"


def test_rows_without_indentation_add_up_to_the_total() -> None:
    analysis = llama(12, outside_us={"optimizer": 90.0, "other": 33.0}, unattributed_us={"no forward link": 12.5})
    rows = table_rows(analysis, most=20).rows
    top = [row for row in rows if row.depth == 0 and row.kind != "total"]
    total = rows[-1]
    assert total.values["time"] == pytest.approx(sum(row.values["time"] for row in top))
    assert total.values["time"] == pytest.approx(analysis.time.total_ns / 3)
    for column in ("forward", "backward"):
        assert total.values[column] == pytest.approx(sum(row.values.get(column, 0) for row in top))


def outside_steps(analysis: Analysis, time_ns: int) -> Analysis:
    """`analysis` with so much time in no step, and that much less in its steps."""
    inside = [replace(row, time_ns=row.time_ns - time_ns // len(analysis.steps)) for row in analysis.steps]
    return replace(analysis, steps=(*inside, StepRow(step=None, time_ns=time_ns, span_ns=None)))


def test_with_much_time_in_no_step_times_are_in_all() -> None:
    analysis = llama(4, steps=3)  # 13.176 ms
    text = console_table(outside_steps(analysis, 3_000_000))
    assert "device time 13.176 ms in all" in text
    assert "3.000 ms of it in no step" in text
    assert "per step" not in text
    trifle = console_table(outside_steps(analysis, 120_000))
    assert "device time 4.392 ms per step" in trifle
    assert "in no step" not in trifle


def test_the_total_has_the_overall_peak_and_the_median_none() -> None:
    memory = {"peak": {"allocated_bytes": 5000 * 2**20}}
    rows = table_rows(llama(4, memory=True), most=20).rows
    assert rows[-1].values["peak"] == 1390 * 2**20
    rows = table_rows(replace(llama(4), memory=memory), most=20).rows
    assert rows[-1].values["peak"] == 5000 * 2**20
    assert next(row for row in rows if row.kind == "median").values["peak"] is None
    steps = tuple(replace(row, peak_bytes=(4000 + i) * 2**20) for i, row in enumerate(llama(4).steps))
    assert table_rows(replace(llama(4), steps=steps), most=20).rows[-1].values["peak"] == 4002 * 2**20


def test_what_is_followed_stands_below_the_total_and_is_no_part_of_it() -> None:
    series = {
        "vae": (200.0, 250.0, 300.0),
        "ratio[model.layers.0]": (0.25, None, 0.75),
        "aten::(mm|addmm)[x]": (1000.0, 2000.0),
        "fourth": (1.0, 1.0, 1.0),
        "nothing has it": (None, None, None),
        "model.norm": (1.0, 1.0, 1.0),
    }
    lines = console_table(llama(4, series=series)).split("\n")
    below = next(i for i, line in enumerate(lines) if line.startswith("TOTAL")) + 1
    assert lines[below:] == [
        "followed: vae 0.250 ms per step",
        "followed: ratio[model.layers.0] 0.5 per step",
        "followed: aten::(mm|addmm)[x] 1.500 ms per entry (1 more in the log)",
    ]
    assert lines[:below] == console_table(llama(4)).split("\n")
    low = console_table(llama(4, series=series), rows=12).split("\n")
    assert len(low) <= 12
    assert "followed: vae 0.250 ms per step (3 more in the log)" in low


def test_rows_in_one_are_counted() -> None:
    outside: dict[Phase, float] = {"optimizer": 50.0, "other": 40.0, "backward": 30.0, "forward": 20.0}
    labels = [row.label for row in table_rows(llama(4, outside_us=outside), most=12).rows]
    assert "optimizer" in labels
    assert "other work outside layers (2 rows)" in labels


def test_many_roots_still_add_up() -> None:
    layers = [Layer("a0", "A", self_us={"forward": 1.0})]
    layers += [Layer(f"r{'x' * i}", f"Root{i}", self_us={"forward": float(i)}) for i in range(1, 40)]
    table = table_rows(analysis_of(layers, parents={layer.name: None for layer in layers}), most=10)
    assert row_of(table.rows, "(32 more roots)").values["time"] == (1 + sum(range(1, 32))) * 1000
    assert sum(row.values["time"] for row in table.rows[:-1]) == table.rows[-1].values["time"]
    assert table.hidden_layers == 32


def test_a_cheap_root_has_its_row_where_there_is_no_room_below_the_others() -> None:
    layers = [Layer(name, "Root", self_us={"forward": 1.0}) for name in ("a", "b")]
    layers += [Layer(f"a.{name}", name.upper(), self_us={"forward": 50.0}) for name in "pqrst"]
    parents = {layer.name: "a" if "." in layer.name else None for layer in layers}
    labels = [row.label for row in table_rows(analysis_of(layers, parents=parents), most=5).rows]
    assert labels == ["a", "p", "q", "b", "TOTAL"]


def test_few_rows_show_the_dearest_and_count_the_others() -> None:
    table = table_rows(llama(4), most=6)
    assert [row.before or row.label for row in table.rows] == [
        "LlamaForCausalLM", "model", "layers.{0..3}", "median", "optimizer", "TOTAL",
    ]  # fmt: skip
    assert table.hidden_layers == 4 * 3 + 3


def test_model_order() -> None:
    rows = table_rows(llama(4), most=20, order="model").rows
    labels = [row.label for row in rows if row.depth == 2]
    assert labels == ["embed_tokens", "layers.{0..3}", "norm"]


def test_a_fold_that_holds_two_classes_is_two() -> None:
    layers = [Layer("M", "M")]
    layers += [Layer(f"layers.{i}", "Block", "block", {"forward": 1.0}) for i in range(6)]
    layers += [Layer(f"layers.{i}.mlp", "MLP" if i < 3 else "MoE", "mlp", {"forward": 10.0}) for i in range(6)]
    rows = table_rows(analysis_of(layers), most=20).rows
    assert {row.label for row in rows if row.depth == 2 and row.kind == "layer"} == {".mlp (MLP)", ".mlp (MoE)"}


def test_alternating_classes_fold_by_class() -> None:
    layers = [Layer("M", "M")]
    layers += [Layer(f"layers.{i}", ("Full", "Sliding")[i % 2], "block", {"forward": 1.0}) for i in range(12)]
    rows = table_rows(analysis_of(layers), most=20).rows
    assert {row.label for row in rows if row.depth == 1 and row.kind == "layer"} == {
        "layers.{0,2..10}",
        "layers.{1,3..11}",
    }


def test_what_a_number_alone_tells_apart_has_its_class() -> None:
    layers = [Layer("T5", "T5")]
    for i in range(3):
        layers.append(Layer(f"block.{i}", "T5Block", "block", {"forward": 1.0}))
        for k, class_name in enumerate(("T5LayerSelfAttention", "T5LayerCrossAttention", "T5LayerFF")):
            layers.append(Layer(f"block.{i}.layer.{k}", class_name, "other", {"forward": 5.0}))
    labels = {row.label for row in table_rows(analysis_of(layers), most=20).rows if row.depth == 2}
    assert labels >= {
        ".layer.0 (T5LayerSelfAttention)",
        ".layer.1 (T5LayerCrossAttention)",
        ".layer.2 (T5LayerFF)",
    }


def test_experts_of_all_blocks_are_one_row() -> None:
    layers = [Layer("M", "M")]
    for i in range(3):
        layers.append(Layer(f"layers.{i}", "Block", "block", {"forward": 1.0}))
        layers += [Layer(f"layers.{i}.experts.{k}", "Expert", "expert", {"forward": 5.0}) for k in range(8)]
    experts = row_of(table_rows(analysis_of(layers), most=20).rows, ".experts.{0..7}")
    assert experts.values["time"] == 3 * 8 * 5000


def test_compiled_is_said() -> None:
    analysis = analysis_of([Layer("M", "M", self_us={"forward": 5.0}, compiled=True)])
    assert "M [compiled]" in console_table(analysis)


def test_ring_of_parents_in_a_damaged_file_hides_nothing() -> None:
    analysis = llama(2)
    rows = tuple(
        replace(row, parent="model.layers.0" if row.layer == "LlamaForCausalLM" else row.parent)
        for row in analysis.layers
    )
    totals = layer_totals(replace(analysis, layers=rows))
    assert any(total.parent is None for total in totals)
    assert Tree(totals).roots()


# ---- folding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0], "0"), ([0, 1], "0,1"), ([0, 1, 2, 3, 7], "0..3,7"), ([0, 2, 4, 6], "0,2..6"), ([1, 3, 4, 5], "1,3..5")],
)
def test_number_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


def test_outliers_need_a_fifth_and_five_deviations() -> None:
    assert outliers([10, 10, 10, 11.9]) == {}  # under 20 %
    assert outliers([10, 10, 10, 15]) == {3: 0.5}
    assert outliers([5, 8, 10, 12, 15]) == {}  # all spread: nobody is odd
    assert outliers([10, 20]) == {}
    assert outliers([0, 0, 0, 5]) == {}
    assert outliers([]) == {}


def test_odd_memory_is_named_too() -> None:
    layers = [Layer("M", "M")]
    layers += [Layer(f"b.{i}", "B", "block", {"forward": 5.0}, retained_mib=30.0 if i == 2 else 10.0) for i in range(6)]
    fold = Tree(layer_totals(analysis_of(layers))).children(Tree(layer_totals(analysis_of(layers))).roots()[0])[0]
    assert [(one.layer.layer, one.what, one.excess) for one in outlying_layers(fold)] == [("b.2", "retained", 2.0)]


# ---- text -------------------------------------------------------------------------------------


def test_shortens_in_the_middle() -> None:
    assert shorten("model.layers.31.self_attn", 20) == "model.la...self_attn"
    assert shorten("short", 20) == "short"
    assert cells(shorten("層" * 40, 21)) <= 21


def test_clean_keeps_one_printable_line() -> None:
    assert clean('a\nb\x00"é\ud800') == 'a\\nb\\x00"\\xe9\\ud800'
    assert clean("é\u202e", unicode=True) == "é\\u202e"


def test_wrap_marks_what_is_left_out() -> None:
    lines = wrap("word " * 100, 40, 2)
    assert len(lines) == 2
    assert lines[-1].endswith("...")
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("text", ["層" * 90, "a 層層 b " * 20, "層" * 45 + "e\u0301" * 45])
def test_wrap_leaves_out_nothing_of_wide_characters(text: str) -> None:
    lines = wrap(text, 40)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert max(map(cells, lines)) <= 40


# ---- golden -----------------------------------------------------------------------------------


def test_a_step_takes_what_the_overview_says_and_not_what_the_cpu_spans() -> None:
    split = dict.fromkeys(("memcpy_ns", "memset_ns", "communication_ns", "runtime_ns", "dataloader_ns"), 0)
    analysis = worked(llama(2, steps=3))
    lengths = {1: 9_000_000, 2: 7_000_000, 3: 8_000_000, None: 1}
    overview = Overview(
        device="NVIDIA H200",
        device_memory_bytes=None,
        compute_capability=None,
        multiprocessors=None,
        steps=tuple(
            StepSplit(step=step, span_ns=ns, kernel_ns=ns, cpu_ns=0, other_ns=0, **split)
            for step, ns in lengths.items()
        ),
        utilization=None,
        sm_efficiency=None,
        occupancy=None,
        tensor_core_share=None,
        kernels=0,
        launches_per_s=None,
        gaps_ns=None,
    )
    assert step_time_in_words(replace(analysis, overview=overview)) == "step takes 8.000 ms (7.000-9.000)"
    assert analysis.utilization is not None  # as MFU has it, where there is no overview
    assert step_time_in_words(analysis) == f"step takes {(analysis.utilization.step_time_ns or 0) / 1e6:.3f} ms"
    assert step_time_in_words(replace(analysis, utilization=None)).startswith("step's CPU span ")
    assert not step_time_in_words(replace(analysis, utilization=None, steps=()))


@pytest.mark.parametrize(
    ("attributed_ns", "told"), [(31905473, "69.9"), (45647300, "100.0"), (45647299, "99.9"), (0, "0.0")]
)
def test_coverage_is_rounded_as_shares_are_but_all_means_all(attributed_ns: int, told: str) -> None:
    time = replace(llama(1).time, total_ns=45647300, attributed_ns=attributed_ns)
    assert coverage_percent(replace(llama(1), time=replace(time, unattributed_ns=45647300 - attributed_ns))) == told


def test_training_table() -> None:
    assert console_table(llama(4)) + "\n" == golden("table_training.txt")


def test_table_with_everything() -> None:
    analysis = llama(
        32,
        odd=17,
        recompute=True,
        outside_us={"optimizer": 270.0, "other": 33.0},
        unattributed_us={"no forward link": 30.5, "launched before the trace": 1000.0},
        warnings=("first: " + "word " * 40, "second", "third", "fourth"),
        complete=False,
    )
    assert console_table(analysis) + "\n" == golden("table_everything.txt")


def test_inference_table() -> None:
    analysis = llama(12, steps=1, phases=("prefill", "decode"), outside_us={}, memory=False)
    assert console_table(analysis, order="model") + "\n" == golden("table_inference.txt")


def test_table_of_work() -> None:
    assert console_table(worked(llama(4))) + "\n" == golden("table_work.txt")


def test_a_column_of_plain_numbers_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = tuple(replace(one, console="FLOP/B") if one.key == "intensity" else one for one in COLUMNS)
    monkeypatch.setattr("profiler_wrapper.reports.table.COLUMNS", columns)
    assert "FLOP/B" in console_table(worked(llama(4)), width=250)


def test_communication_is_no_time_that_could_be_at_the_roof() -> None:
    analysis = worked(llama(2, steps=1))
    head = next(row for row in analysis.layers if row.layer == "lm_head" and row.phase == "forward")
    busy = replace(analysis, layers=(replace(head, communication_ns=50_000),))  # of 150 us
    (row, _) = table_rows(busy, most=20).rows
    assert (row.values["roof"], row.values["communication"]) == (100_000, 50_000)
    assert " 100.0 " in next(line for line in console_table(busy).split("\n") if line.startswith("lm_head"))


def test_work_of_what_was_launched_before_the_trace_is_not_known() -> None:
    whole = worked(llama(2, steps=1))
    part = worked(llama(2, steps=1, unattributed_us={"launched before the trace": 100.0}))
    assert table_rows(whole, most=20).rows[-1].values["roof"]
    assert table_rows(part, most=20).rows[-1].values["roof"] is None
    assert table_rows(part, most=20).rows[-1].values["flops"] is None
    trifle = replace(part, unattributed=(replace(part.unattributed[0], time_ns=1000),))
    assert table_rows(trifle, most=20).rows[-1].values["flops"] == table_rows(whole, most=20).rows[-1].values["flops"]


def test_share_of_the_peak_is_one_line() -> None:
    line = "MFU 51.6 % (causal 49.2 %) of 1000 TFLOP/s bfloat16 over 5.000 ms, end to end; a documen...the maker"
    analysis = worked(llama(4))
    assert use_line(analysis, 100) == line
    assert use_line(analysis, 80) == line.partition(";")[0]
    assert analysis.utilization is not None
    again = replace(analysis.utilization, hfu=0.75, causal_hfu=0.7)
    assert use_line(replace(analysis, utilization=again), 200).startswith(
        "MFU 51.6 % (causal 49.2 %), HFU 75.0 % (causal 70.0 %) of 1000 TFLOP/s bfloat16"
    )
    assert use_line(worked(llama(4), peaks=None), 100) == ""


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_long_share_of_the_peak_is_wrapped_and_no_number_is_cut(width: int) -> None:
    analysis = worked(llama(4))
    assert analysis.utilization is not None
    use = replace(analysis.utilization, hfu=0.75, causal_hfu=0.7)
    longer = replace(analysis, utilization=use)
    lines = use_lines(longer, width)
    whole = "MFU 51.6 % (causal 49.2 %), HFU 75.0 % (causal 70.0 %) of 1000 TFLOP/s bfloat16 over 5.000 ms, end to end"
    assert len(lines) == 2
    assert " ".join(line.strip() for line in lines) == whole
    assert max(map(len, lines)) <= width
    assert not any(line.strip()[0] == "%" or line.strip().startswith("TFLOP/s") for line in lines)
    table = console_table(longer, width=max(width, 100)).split("\n")
    assert len(table) <= 25
    assert table[-2:] == use_lines(longer, max(width, 100))


def test_a_table_has_room_for_what_a_warning_says_to_do_and_why() -> None:
    _, no_peak = find_peaks("NVIDIA " + "X" * 60, environment={})
    untold = [
        UncountedRow(op=f"aten::_fused_adamw_of_many_{i}", class_name="other", phase="optimizer",
                     layers=(), count=1, time_per_step_ns=10)
        for i in range(3)
    ]  # fmt: skip
    (no_bytes,) = _note("bytes moved", untold, 100)
    analysis = replace(llama(40), warnings=(no_peak or "", no_bytes, "a third", "a fourth"))
    table = console_table(analysis)
    assert f"warning: {no_peak} warning: a third (2 of 4 warnings: see the log)" in " ".join(table.split())
    low = console_table(replace(analysis, warnings=(no_bytes, no_peak or "")), rows=12).split("\n")
    assert low[-1] == "(1 of 2 warnings: see the log)" and f"warning: {no_bytes}" in " ".join(" ".join(low).split())


def test_what_to_do_first_is_never_cut() -> None:
    fix = f"First fix: find why {'another rank ' * 9}comes later: `profiler-wrapper ranks RUN` tells."
    table = console_table(replace(llama(4), summary=Summary(verdict=f"It waits. {fix}")), width=60)
    assert " ".join(table.split()).endswith(fix)


def test_the_table_ends_with_what_stands_out_and_what_to_do_first() -> None:
    verdict = "The device is idle. Most to gain: it waits. First fix: do not wait."
    analysis = replace(llama(4), summary=Summary(verdict=verdict), warnings=("first",))
    assert console_table(analysis).split("\n")[-3:] == [
        "warning: first",
        "The device is idle. Most to gain: it waits.",
        "First fix: do not wait.",
    ]
    assert console_table(replace(analysis, summary=Summary(verdict=None))).endswith("\nwarning: first")


def test_of_a_cpu_it_is_no_warning_that_no_peak_is_known() -> None:
    _, no_peak = find_peaks(None, environment={})
    on_device = replace(llama(2), warnings=(no_peak or "",))
    assert "warning: no peak is known" in console_table(on_device)
    assert "warning" not in console_table(replace(on_device, time_basis="cpu"))


def test_what_is_idle_and_how_long_a_step_takes_stand_in_a_terminal_of_80_columns() -> None:
    """Of the steps' wall time, as the headline has it; all of it attributed needs no word."""
    analysis = replace(worked(llama(2, steps=1)), overview=overview(1))
    assert analysis.overview is not None and analysis.overview.gaps_ns is not None
    busy = 1 - analysis.overview.gaps_ns / sum(step.span_ns for step in analysis.overview.steps)
    head = console_table(analysis, width=80).split("\nlayer ")[0]
    assert f"device busy {100 * busy:.1f} %" in head and "step takes" in head and "attributed" not in head


def test_long_steps_are_told_in_seconds() -> None:
    analysis = analysis_of([Layer("M", "M", self_us={"forward": 43_350_000.0})])
    text = console_table(analysis)
    assert "device time 43.350 s per step" in text
    assert text.split("\n")[-2].split() == ["M", "43.350", "43.350", "100.0", "1", "1100.0"]


def test_each_model_that_generates_is_named_in_the_head() -> None:
    phases: dict[Phase, float] = {"prefill": 1000.0}
    roots = [Layer(name, name, self_us=phases, calls=1) for name in ("Net", "Sampler")]
    both = analysis_of(roots)
    both = replace(both, layers=tuple(replace(row, depth=0, parent=None, time_ns=10**6) for row in both.layers))
    assert "prefill 1.000 ms (Net), 1.000 ms (Sampler) a call" in console_table(both)
    assert "prefill 1.000 ms a call" in console_table(analysis_of(roots[:1]))


def test_of_work_of_which_nothing_is_known_nothing_is_said() -> None:
    analysis = worked(llama(2, steps=1))
    rows = tuple(replace(row, flops_per_step=None, known_flops_per_step=0) for row in analysis.layers)
    assert ">=" not in console_table(replace(analysis, layers=rows)) + full_table(replace(analysis, layers=rows))


def test_the_total_has_a_roof_where_what_is_not_told_is_a_trifle() -> None:
    analysis = worked(llama(2, steps=1))
    whole = table_rows(analysis, most=20).rows[-1].values["roof"]
    norm = next(row for row in analysis.layers if row.kind == "norm" and row.phase == "forward")
    rows = tuple(
        replace(row, roof_time_per_step_ns=None, self_roof_time_per_step_ns=None) if row is norm else row
        for row in analysis.layers
    )

    def total(untold_ns: int) -> float | None:
        untold = UncountedRow(op="aten::histc", class_name="other", phase="forward", layers=(norm.layer,), count=1,
                              time_per_step_ns=untold_ns)  # fmt: skip
        return table_rows(replace(analysis, layers=rows, untold_bytes=(untold,)), most=20).rows[-1].values["roof"]

    assert total(analysis.time.total_ns // 101) == whole
    assert total(analysis.time.total_ns // 99) is None


def test_full_table_has_all_of_the_work() -> None:
    text = full_table(worked(llama(1)))
    heading = next(line for line in text.split("\n") if line.startswith("layer "))
    mlp = next(line for line in text.split("\n") if line.startswith("model.layers.0.mlp") and " forward " in line)
    ends = {
        title: heading.index(title) + len(title) for title in ("GFLOP/s", "% of peak", "FLOP/B", "at roof", "bound")
    }
    values = {title: mlp[:end].rsplit(None, 1)[-1] for title, end in ends.items()}
    # 150 GFLOP and 40 MB in 200 us; at the roof 150 us
    assert values == {
        "GFLOP/s": "750000.0",
        "% of peak": "75.0",
        "FLOP/B": "3750",
        "at roof": "0.150",
        "bound": "compute",
    }


def test_full_table() -> None:
    analysis = llama(
        1,
        steps=2,
        unattributed_us={"no launch found": 4.0},
        series={"aten::mm": (1500.0, None), "ratio[model.layers.0]": (0.125, 12.0)},
        warnings=("something is not available, because of a reason",),
    )
    assert full_table(analysis) == golden("full_table.txt")


def test_full_table_of_a_cpu_has_no_second_column_of_cpu_time() -> None:
    known = [replace(row, cpu_time_ns=row.time_ns) for row in llama(2).layers]
    analysis = replace(llama(2), layers=tuple(known))
    assert " CPU " in layer_section(analysis)
    assert " CPU " not in layer_section(replace(analysis, time_basis="cpu", run={"cpu_name": "Xeon"}))


def test_steps_take_what_the_overview_says_and_have_their_span_on_the_cpu_beside_it() -> None:
    """Of the second step it is not told."""
    analysis = llama(1, steps=2)
    splits = tuple(replace(split, span_ns=2_000_000) for split in overview(1).steps)
    lines = step_section(replace(analysis, overview=replace(overview(1), steps=splits))).splitlines()
    assert lines[0].split()[:6] == ["step", "time", "step", "takes", "CPU", "span"]
    assert [line.split()[1:4] for line in lines[2:]] == [["1.575", "2.000", "1.890"], ["1.575", "1.906", "0.495"]]


def test_full_table_cuts_kernel_names() -> None:
    analysis = llama(1)
    attention = tuple(replace(row, kernels=("void flash::kernel<" + "int, " * 80 + ">",)) for row in analysis.attention)
    text = full_table(replace(analysis, attention=attention)).split("Attention: ")[1].split("Classes: ")[0]
    kernels = [line.split("  ")[-1] for line in text.splitlines() if "void flash" in line]
    assert [len(name) for name in kernels] == [60, 60]


def test_full_table_says_memory_in_words() -> None:
    memory = {
        "device": "cuda:0",
        "allocated_bytes": 2**20,
        "reserved_bytes": None,
        "peak": {"allocated_bytes": 3 * 2**20, "reserved_bytes": 4 * 2**20, "time_ns": 123},
        "categories": None,
    }
    text = full_table(replace(llama(1), memory=memory)).split("Memory: MiB\n\n")[1]
    assert text.splitlines() == [
        "allocated at the end: 1.0 MiB",
        "highest allocated: 3.0 MiB",
        "highest reserved: 4.0 MiB",
        "by category: not available, because the trace holds no allocation events (profile_memory=True records them)",
    ]


def test_the_whole_memory_of_a_training() -> None:
    text = full_table(replace(llama(12), memory_use=leaking_memory(12)))
    assert "Memory of cuda:0 at the peak, by category: MiB" in text
    assert "What would lower the peak" not in text  # nothing is known to
    # 16 of 512 x 512 numbers for each of two ends, 13 for each of 12 blocks, 4 bytes each, and 25 norms: 172.05
    assert re.search(r"params +172\.05 +23\.8", text)
    assert re.search(r"other +15\.00 +2\.1", text)  # 3 before profiling, 2 more in each of 6 steps
    assert "+2.000 +- 0.010 (95 %) MiB per step" in text
    assert "leak: aten::clone in model.layers.3.mlp (forward, other) keeps 2.000 MiB more each step" in text


def test_owners_of_like_layers_are_one_row_and_the_rows_add_up() -> None:
    use = llama_memory(12)
    groups = owner_groups(use.peak_owners)
    assert sum(group.size_bytes for group in groups) == use.peak.total_bytes
    assert sum(group.count for group in groups) == sum(owner.count for owner in use.peak_owners)
    silu = next(group for group in groups if group.op == "aten::silu")
    assert (silu.text, silu.size_bytes, silu.count) == ("aten::silu in model.layers.{0..11}.mlp", 12 * 3 * 2**20, 12)


def test_the_console_has_a_line_for_the_peak_and_one_for_a_leak() -> None:
    analysis = replace(llama(12), memory=memory_summary(leaking_memory(12)))
    lines = console_table(analysis).splitlines()
    assert lines[-2:] == [
        "memory: peak 723.1 MiB in backward of step 7: optimizer state 48 %, activation 25 %, params 24 %",
        "warning: leak of 2.000 MiB per step (6 steps seen): aten::clone in model.layers.3.mlp",
    ]
    assert_fits(analysis, 25, 100)
    assert_fits(analysis, 12, 60)


@pytest.mark.parametrize(
    "odd",
    [
        {"peak": {"allocated_bytes": None}},
        {"peak": {"step": 1}},
        {"peak": [1]},
        {"categories": {"params": None}},
        {"categories": {"params": "much"}},
        {"leaks": [{"op": "aten::clone"}]},
    ],
    ids=str,
)
def test_memory_that_somebody_else_wrote_ends_no_table(odd: dict[str, Any]) -> None:
    text = console_table(replace(llama(12), memory={**memory_summary(leaking_memory(12)), **odd}))
    assert "TOTAL" in text
    assert "memory:" not in text


def test_nothing_recorded() -> None:
    text = console_table(analysis_of([]))
    assert "TOTAL" in text
    assert full_table(analysis_of([]))


def test_no_colour_codes_and_ascii() -> None:
    analysis = llama(2, warnings=("größer",), run={"device": "Grün\x1b[31m", "rank": 0})
    text = console_table(analysis)
    assert text.isascii()
    assert "\x1b" not in text


def test_much_to_say_below_leaves_a_third_to_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    short = console_table(llama(12)).split("\n")
    monkeypatch.setattr("profiler_wrapper.reports.describe.use_lines", lambda *_: [f"use {i}" for i in range(20)])
    lines = console_table(llama(12)).split("\n")
    layers = [line for line in lines if "layers." in line]
    assert layers[:3] == [line for line in short if "layers." in line][:3]
    (more,) = (line for line in lines if line.endswith("more lines in a higher table)"))
    assert int(more[1:].split()[0]) + sum(line.startswith("use ") for line in lines) >= 20
    assert "use 19" in console_table(llama(12), rows=60)


# ---- limits -----------------------------------------------------------------------------------


def assert_fits(analysis: Analysis, rows: int, width: int, unicode: bool = False) -> None:
    for order in ("cost", "model"):
        text = console_table(analysis, rows=rows, width=width, unicode=unicode, order=order)
        lines = text.split("\n")
        styled = console_table(analysis, rows=rows, width=width, unicode=unicode, order=order, styled=True).split("\n")
        assert len(styled) == len(lines)
        assert max(cells(re.sub(r"\x1b\[\d+m", "", line)) for line in styled) <= width
        assert len(lines) <= rows
        assert max(map(cells, lines)) <= width, max(lines, key=cells)
        assert unicode or text.isascii()
        assert any(line.startswith("TOTAL") for line in lines)


@pytest.mark.parametrize("unicode", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(25, 100), (12, 60), (200, 250)])
def test_limits_hold_for_awkward_results(rows: int, width: int, unicode: bool) -> None:
    for analysis in awkward_results():
        assert_fits(analysis, rows, width, unicode)


@cache
def awkward_results() -> list[Analysis]:
    long = "very_long_name_" * 20
    huge: dict[Phase, float] = {"forward": 1e12, "backward": 3e12, "recompute": 1e12}
    blocks = [Layer(f"{long}.{i}", long, "block", {"forward": 1.0 + i % 7}) for i in range(300)]
    return [
        llama(100, odd=5, recompute=True),
        analysis_of([Layer("root", "Root"), *blocks]),
        analysis_of([Layer("模型" * 80, "模", "block", {"forward": 1.0}), Layer("a\n\x1b[31mb\ud800", "x", "block")]),
        analysis_of([Layer("M", "M", self_us=huge, attention="flash", calls=10**9, retained_mib=1e9)]),
        analysis_of(
            [Layer("M", "M", self_us={"forward": 1.0})],
            unattributed_us={f"reason {i} {long}": float(i) for i in range(20)},
            outside_us={"optimizer": 1.0, "other": 2.0, "backward": 3.0, "forward": 4.0, "accumulate_grad": 5.0},
            warnings=tuple(f"{i} {long} " * 5 for i in range(50)),
        ),
        analysis_of([Layer(".".join(["deep"] * n), "Deep", self_us={"forward": 1.0}) for n in range(1, 120)]),
    ]


names = st.text(min_size=1, max_size=40).filter(lambda name: name.strip("."))
times = st.dictionaries(
    st.sampled_from(["forward", "prefill", "decode", "backward", "recompute", "accumulate_grad", "optimizer", "other"]),
    st.floats(0, 1e15),
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(names, names, times, st.floats(0, 1e12), st.integers(0, 10**15)),
        max_size=25,
        unique_by=lambda x: x[0],
    ),
    st.lists(st.text(max_size=300), max_size=6),
    st.integers(12, 40),
    st.integers(60, 140),
    st.booleans(),
    st.booleans(),
)
def test_limits_hold_whatever_the_input(
    layers: list[tuple[str, str, dict[str, float], float, int]],
    warnings: list[str],
    rows: int,
    width: int,
    unicode: bool,
    memory: bool,
) -> None:
    made = [
        Layer(name, class_name, "block", times, "flash" if i % 3 == 0 else None, calls, size)  # type: ignore[arg-type]
        for i, (name, class_name, times, size, calls) in enumerate(layers)
    ]
    series = {f"{label}[{name}]": (float(size), None) for i, (name, label, _, _, size) in enumerate(layers) if i % 2}
    analysis = analysis_of(made, memory=memory, warnings=tuple(warnings), with_calls=False, series=series)
    assert_fits(analysis, rows, width, unicode)
    full_table(analysis)


def test_too_small_a_table_is_refused() -> None:
    with pytest.raises(WrongUse, match="at least 12 and 60"):
        console_table(llama(1), rows=3)
    with pytest.raises(WrongUse, match="'cost' or 'model'"):
        console_table(llama(1), order="size")  # type: ignore[arg-type]


def test_a_followed_time_of_years_fits() -> None:
    analysis = analysis_of([], with_calls=False, series={"a block of a long name": (1e15, None), "b": (1.0, 2.0)})
    assert_fits(analysis, 12, 60, unicode=False)
    assert "followed: a bl...name 1e+12 ms per entry (1 more in the log)" in console_table(analysis, rows=12, width=60)


def test_times_of_what_lost_kernels_are_lower_bounds() -> None:
    trace = Trace()
    for i in range(4):
        begin = 1_000_000 * i
        trace.mark(f"layers.{i}", begin, begin + 900_000).launch(begin, begin + 9, correlation=i + 1)
        if i != 1:
            trace.kernel("gemm", begin + 1000, begin + 601_000, correlation=i + 1)
    analysis = analyse(trace.recording())
    lines = console_table(analysis, unicode=True).split("\nwarning")[0].splitlines()
    assert "device time ≥1.800 ms" in " ".join(lines[:2])
    marked = [line.split()[:2] for line in lines if "≥" in line.split("  ", 2)[-1] and " ms" not in line]
    assert [names[0] for names in marked] == ["layers.{0..3}", "median", "outlier:", "TOTAL"]
    in_full = [line.split()[0] for line in full_table(analysis).splitlines() if ">=" in line and "launches" not in line]
    assert in_full[-3:] == ["layers.1", "TOTAL", "0"]  # the step
