"""What the places of the page show of a result made by hand, read in a browser that has no network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

from browser import Page
from page_tables import (
    GROUPS,
    LAYER_ROWS,
    LOOKS,
    Opener,
    assert_reads,
    figures_of,
    read_number,
    show,
    table_of,
)
from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.model import Analysis, ClassRow, UnattributedRow
from sample_results import llama
from sample_views import US, full_analysis, overview, products

pytestmark = pytest.mark.full


def test_figures_say_what_they_are_over(opened: Opener) -> None:
    """Steps of 10 ms by the overview; without it the spans on the CPU, under that name."""
    figures = figures_of(opened(full_analysis()), "step")
    assert figures["Step time"] == "10.00 ms"
    assert {"Device time, per step", "Attention, per step"} <= set(figures)
    assert figures["Attributed to layers"] == "99.8 %"  # 13.3 us of 5.335 ms have no layer: 99.75
    analysis = full_analysis(utilization=None, overview=None)
    page = opened(analysis)
    spans = [row.span_ns or 0 for row in analysis.steps]
    assert figures_of(page, "step")["CPU span"] == f"{fmean(spans) / 1e6:.3f} ms"
    steps = table_of(page, "Steps")
    assert "wall_us" not in steps.units
    steps.assert_shows("span_us", [span / 1000 for span in spans])
    show(page, "kernels", "communication")
    assert "of a step's CPU span" in page.text("#view-kernels .figures")


def test_steps_take_what_the_overview_says(full: Page) -> None:
    show(full, "step")
    steps = table_of(full, "Steps")
    steps.assert_shows("wall_us", [10_000] * 3)
    steps.assert_shows("span_us", [(row.span_ns or 0) / 1000 for row in full_analysis().steps])


def test_generation_is_told_over_the_whole_trace(opened: Opener) -> None:
    """Three steps of 10 ms; in each 808 us of prefill, and as much of decode."""
    shaped = {"comparable": {"shapes_in_timed_steps": True}}
    generated = llama(2, steps=3, phases=("prefill", "decode"))  # a prompt, and two tokens
    phases: tuple[Phase, ...] = ("prefill", "decode", "decode")
    steps = tuple(
        replace(step, phases_ns={phase: step.time_ns}) for step, phase in zip(generated.steps, phases, strict=True)
    )
    generated = replace(generated, steps=steps)
    page = opened(replace(generated, overview=overview(3), products=products(), summary=shaped))
    figures = figures_of(page, "step")
    assert figures["Step time"] == "10.00 ms"
    assert (figures["Prefill, a call"], figures["Decode, a call"]) == ("808.0 µs", "808.0 µs")
    assert "over the whole trace" in page.text("#view-step .figures")
    show(page, "layers")
    assert any("over the whole trace" in text for text in page.texts("#view-layers .note"))
    show(page, "kernels", "shape")
    assert "in all 3 steps" in page.text("#view-kernels .note")
    table_of(page, "Products").assert_shows("calls_per_step", [3, 6])


def test_operators_by_hand(full: Page) -> None:
    full.resize(1900, 768)
    show(full, "kernels", "op")
    table = table_of(full, "Operators")
    assert full.count("#view-kernels td [title^='it could use tensor cores, but whether']") == 1
    full.resize(1366, 768)
    assert table.texts("op") == [
        "aten::mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::mul",
        "aten::view",
    ]
    table.assert_shows("self_time_us", [2300, 800, 300, 0])
    table.assert_shows("calls", [84, 4, 90, 200])
    table.assert_shows("self_cpu_time_us", [1300, 60, 700, 150])
    table.assert_shows("tensor_cores", [2000 / 2300, None, None, None])
    assert table.texts("tensor_cores") == ["87.0", "–", "", ""]  # not known of attention; the others cannot
    assert table.texts("phase")[0] == "2 phases"
    full.click("#view-kernels tbody .fold")
    assert table_of(full, "Operators").texts("op")[1:3] == ["backward", "forward"]
    full.click("#view-kernels tbody .fold")


def test_kernels_by_hand(full: Page) -> None:
    show(full, "kernels", "kernel")
    merged = table_of(full, "Kernels by Kernel")
    merged.assert_shows("time_us", [2000, 800, 500, 300, 100])
    assert "grid" not in merged.units
    assert list(figures_of(full, "kernels").values()) == [
        "3.200 ms",
        "177",
        "87.5 %",
        "51.4 %",
    ]  # 90 of 175, copies apart
    full.click("#view-kernels .table .segments [data-id=all]")
    full.resize(2600, 768)
    full.click("#view-kernels tbody .fold")
    full.wait("document.querySelectorAll('#view-kernels tbody tr').length === 7")
    table = table_of(full, "Kernels by Kernel")
    full.click("#view-kernels tbody .fold")
    full.resize(1366, 768)
    full.click("#view-kernels .table .segments [data-id=main]")
    whole, first, second, *_, last = table.rows
    assert (whole["name"], whole["grid"], whole["block"]) == (
        "sm90_xmma_gemm_bf16",
        "",
        "384×1×1",
    )  # what differs is left out
    assert (whole["tensor_cores"], first["grid"], first["name"]) == ("yes", "16×8×1", "grid 16×8×1, block 384×1×1")
    assert float(first["count"]) + float(second["count"]) == float(whole["count"])
    assert last["name"] == "mystery"
    assert [last[key] for key in ("tensor_cores", "occupancy")] == ["–", "–"]


def test_communication_by_hand(full: Page) -> None:
    show(full, "kernels", "communication")
    full.resize(1900, 768)
    table = table_of(full, "Collectives")
    full.resize(1366, 768)
    assert table.texts("collective") == ["all reduce", "all gather"]
    table.assert_shows("exposed_us", [200, 400])
    table.assert_shows("time_us", [1000, 400])
    table.assert_shows("payload_bytes", [400 << 20, None])
    table.assert_shows("bus_bandwidth_bytes_per_s", [734e9, None])
    assert list(figures_of(full, "kernels").values())[:2] == ["1.400 ms", "600.0 µs"]


def test_shapes_and_attention_by_hand(full: Page) -> None:
    show(full, "kernels", "shape")
    shapes = table_of(full, "Products")
    assert shapes.texts("n") == ["50,257", "8,192"]
    works = [2.0 * 512 * 50257 * 2048, 2 * 2.0 * 512 * 8192 * 2048]
    shapes.assert_shows("rate", [works[0] / 600e-6, works[1] / 180e-6])
    full.click("#view-kernels .segments [data-id=odd]")
    assert table_of(full, "Products").texts("layer") == ["lm_head"]
    show(full, "kernels", "attention")
    calls = table_of(full, "Calls of attention")
    assert len(calls.rows) == 1
    keys = ("query_shape", "key_shape", "mask", "causal", "grouped")
    assert [calls.rows[0][key] for key in keys] == ["1×32×512×64", "1×8×512×64", "no", "yes", "yes"]
    assert "dropout" not in calls.units and "not known: Dropout" in full.texts("#view-kernels .shown")
    calls.assert_shows("calls_per_step", [4])


def with_own_times(analysis: Analysis, own_us: dict[str, int]) -> Analysis:
    """With so much self time in forward, in each step."""
    steps = len(analysis.steps)
    layers = (
        replace(row, self_time_ns=own_us[row.layer] * US * steps)
        if row.phase == "forward" and row.layer in own_us
        else row
        for row in analysis.layers
    )
    return replace(analysis, layers=tuple(layers))


def test_calls_with_shapes_show_the_time_of_the_timed_steps_too(opened: Opener) -> None:
    """Two sizes in one op, two calls of attention in one layer; each has its part of what the timed steps took."""
    analysis = full_analysis()
    first, second = analysis.products
    products = (first, replace(second, calls_per_step=26.0))  # with the first: the 28 calls of its op
    own_us = {first.layer: 700, second.layer: 150}  # of each step
    call = replace(analysis.attention_calls[0], time_per_step_ns=300 * US)
    other = replace(call, causal=False, time_per_step_ns=100 * US)
    backward = replace(call, phase="backward", backend="math")  # the timed steps have none
    timed = sum(row.time_ns for row in analysis.attention if (row.layer, row.phase) == (call.layer, call.phase))
    steps = len(analysis.steps)
    assert timed
    analysis = replace(analysis, products=products, attention_calls=(call, other, backward))
    analysis = with_own_times(analysis, own_us)
    page = opened(analysis)
    show(page, "kernels", "shape")
    shapes = table_of(page, "Products")
    shapes.assert_shows("time_per_step_us", [180, 600])
    shapes.assert_shows("timed_us", [650, 150])  # 800 in the proportions of 180 and 600, but not more than the layer
    assert shapes.texts("layer") == [first.layer, second.layer]
    show(page, "kernels", "attention")
    calls = table_of(page, "Calls of attention")
    assert calls.texts("causal") == ["yes", "no", "yes"]
    calls.assert_shows("time_per_step_us", [300, 100, 300])
    calls.assert_shows("timed_us", [timed / steps / 1000 * 0.75, timed / steps / 1000 * 0.25, None])
    assert "Time with shapes" in " ".join(page.texts("#view-kernels th"))
    page = opened(with_own_times(analysis, {**own_us, first.layer: 7000}))  # most of it is other work
    show(page, "kernels", "shape")
    assert "timed_us" not in table_of(page, "Products").rows[0]
    assert "is not known" in page.text("#view-kernels .note")
    comparable = {**analysis.summary.get("comparable", {}), "shapes_in_timed_steps": True}
    page = opened(replace(analysis, summary={**analysis.summary, "comparable": comparable}))
    show(page, "kernels", "shape")
    assert "timed_us" not in table_of(page, "Products").rows[0]


def test_memory_by_hand(full: Page) -> None:
    show(full, "memory")
    words = full.text("#view-memory")
    assert "optimizer state" in words and "os state" not in words, "keys are for files"
    assert "Called as" not in words, "no layer has several callers"
    allocations = table_of(full, "Largest allocations")
    allocations.assert_shows("size_bytes", [64 << 20, 16 << 20])
    allocations.assert_shows("allocated_us", [2000, 2500])
    allocations.assert_shows("released_us", [None, 3750])
    ops = table_of(full, "Operators by what")
    assert ops.texts("op") == ["aten::mm", "aten::_foreach_sqrt", "(outside of all ops)"]
    ops.assert_shows("kept_bytes", [800 << 20, 0, None])
    changes = table_of(full, "What would lower")
    changes.assert_shows("saves_bytes", [150 << 20, 16 << 20])
    changes.assert_shows("costs_us", [12300, None])


def test_names_of_kernels_can_be_told_apart(opened: Opener) -> None:
    native = "void at::native::vectorized_elementwise_kernel<4, at::native::"
    tail = ", std::array<char*, 2ul> >(int, at::native::CUDAFunctorOnSelf_add<float>, std::array<char*, 2ul>)"
    names = [
        f"{native}CUDAFunctor_add<float>{tail}",
        f"{native}AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >{tail}",
        "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_version_1",
        "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_version_2",
        "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_mask_tile148t_nt_version_2",
    ]
    analysis = full_analysis()
    rows = tuple(replace(analysis.kernels[0], name=name) for name in names)
    page = opened(replace(analysis, kernels=rows))
    show(page, "kernels")
    shown = table_of(page, "Kernels by Kernel").texts("name")
    assert len(set(shown)) == len(names)
    assert ["CUDAFunctor_add" in shown[0], "MulFunctor" in shown[1]] == [True, True]
    assert not any("void" in text or "native::" in text for text in shown)
    assert page.evaluate("document.querySelector('#view-kernels tbody .name').title != ''")


@pytest.mark.parametrize("by", [*GROUPS, *LOOKS])
def test_tables_fit_a_usual_window(full: Page, by: str) -> None:
    show(full, "kernels", by)
    over = "[...document.querySelectorAll('#view-kernels .scroller')].map(one => one.scrollWidth - one.clientWidth)"
    assert set(full.evaluate(over)) <= {0}


def test_the_share_of_a_saving_follows_from_the_two_numbers_beside_it(opened: Opener) -> None:
    """313 us of steps of 10 ms, whatever share of the device time the finding is about."""
    analysis = full_analysis()
    (finding,) = analysis.summary["findings"]
    peak = dict(analysis.memory["peak"], reserved_bytes=4 << 30, allocated_bytes=2 << 30)
    sizes = {"saves_at_most_us": None, "saves_at_most_bytes": 1 << 30, "share": 0.9}
    findings = [
        finding,
        {**finding, "id": "fragmentation", **sizes},
        {**finding, "id": "recompute-would-help", **sizes},
        {**finding, **sizes, "saves_at_most_bytes": None},
    ]
    page = opened(
        replace(analysis, summary={**analysis.summary, "findings": findings}, memory={**analysis.memory, "peak": peak})
    )
    time, fragments, recompute, unknown = page.texts("#view-summary .card .gain")
    assert "313.0 µs a step" in time and "3.1 % of a step" in time
    assert "25.0 % of the 4.000 GiB reserved" in fragments
    assert "50.0 % of the 2.000 GiB allocated" in recompute
    assert "%" not in unknown
    page = opened(replace(analysis, overview=None, utilization=None, steps=()))
    assert "of the trace" in page.text("#view-summary .card .gain")


def test_attention_without_a_layer_is_a_line_of_its_own(opened: Opener) -> None:
    """The total is that of the class."""
    analysis = full_analysis()
    known = sum(row.time_ns for row in analysis.attention)
    of_class = sum(row.time_ns for row in analysis.classes if row.class_name == "attention")
    more = ClassRow(class_name="attention", phase="other", time_ns=known - of_class + 300 * US, count=3)
    before = (UnattributedRow(reason="launched before the trace", time_ns=300 * US, count=3),)
    page = opened(replace(analysis, classes=(*analysis.classes, more), unattributed=before))
    assert "launched before the trace: 100.0 µs" in page.text("#view-step .figures")
    show(page, "kernels", "attention")
    assert_reads(page.text("#view-kernels figcaption").split(": ")[1].split(", ")[0], (known + 300 * US) / 3000)
    table = table_of(page, "Attention by")
    assert "launched before the trace" in table.texts("backend")
    assert sum(value or 0 for value in table.numbers("time_us")) == pytest.approx((known + 300 * US) / 3000, abs=0.01)


def test_classes_are_those_of_the_result(full: Page) -> None:
    """The bar counts each event under its own class."""
    show(full, "kernels", "class")
    told = Counter[str]()
    for row in full_analysis().classes:
        told[row.class_name] += row.time_ns
    for text in full.texts("#view-kernels .parts-bar .legend li"):
        name, number = text.split(" ", 1)
        assert_reads(number, told.pop(name) / 3000)
    assert not any(told.values())


def test_eager_attention_is_told_with_its_layers(opened: Opener) -> None:
    """No fused attention, but a finding about single ops."""
    analysis = full_analysis()
    (finding,) = analysis.summary["findings"]
    eager = {**finding, "id": "attention-fallback", "title": "attention is made of single ops", "details": {}}
    bare = replace(
        analysis,
        attention=(),
        attention_calls=(),
        classes=tuple(row for row in analysis.classes if row.class_name != "attention"),
        summary={**analysis.summary, "findings": [eager]},
    )
    page = opened(bare, "kernels?by=attention")
    notice = page.text("#view-kernels .notice")
    assert "single ops (eager): no fused attention ran. Attention is made of single ops" in notice
    layers = {row.layer for row in bare.layers if row.kind == "attention"}
    assert set(table_of(page, "Layers of attention").texts("layer")) == layers


def test_figures_say_that_they_are_means(full: Page) -> None:
    show(full, "step")
    text = full.text("#view-step .figures")
    assert "median" not in text and text.count("mean of 3 steps") >= 2
    assert figures_of(full, "step")["Kernels run"] == "74.0 %"
    assert "mean of 3 steps" in full.text("#where h2")
    show(full, "layers")
    assert all("median " in text for text in full.texts("#view-layers .bars figcaption .quiet"))


def test_times_of_many_seconds_are_in_seconds(opened: Opener) -> None:
    analysis = full_analysis()
    assert analysis.overview is not None
    spans = (43_300_000 * US, 9_900_000 * US, 1500 * US)
    long = tuple(replace(row, span_ns=span) for row, span in zip(analysis.overview.steps, spans, strict=True))
    for kept, unit in ((long, "s"), (long[1:], "ms")):
        page = opened(replace(analysis, overview=replace(analysis.overview, steps=kept)))
        steps = table_of(page, "Steps")
        assert steps.units["wall_us"] == unit
        steps.assert_shows("wall_us", [None] * (3 - len(kept)) + [one.span_ns / 1000 for one in kept])


def test_phases_of_the_memory_curve_are_told(full: Page) -> None:
    show(full, "memory")
    curve = full_analysis().memory["curve"]
    lines = full.evaluate(
        "[...document.querySelectorAll('.memory-curve .unseen tbody tr')]"
        ".map(row => [row.cells[0].textContent, row.cells[1].textContent])"
    )
    for (time, phase), row in zip(lines, curve["phases"], strict=True):
        assert_reads(time, row["start_us"])
        assert phase.endswith(row["phase"])


def test_folded_tables_say_how_many_rows_there_are(full: Page) -> None:
    show(full, "layers")
    told, _ = read_number(full.text("#view-layers .shown"), "")
    assert told == full.evaluate("page.data.views.layers.total.length") > full.count(f"{LAYER_ROWS}")
