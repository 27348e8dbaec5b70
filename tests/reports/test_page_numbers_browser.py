"""What the views of the page show of a result made by hand, read in a browser that has no network."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from browser import Page
from page_tables import Opener, show, table_named, table_of, tooltip_of_cell
from profiler_wrapper.analysis.model import Analysis, ClassRow, Phase, UnattributedRow
from sample_results import llama
from sample_views import US, full_analysis, overview, products

pytestmark = pytest.mark.full


def figures_of(page: Page) -> dict[str, str]:
    """The figures of the Summary by their names."""
    show(page, "summary")
    values = page.texts("#view-summary .figure .value")
    return dict(zip(page.texts("#view-summary .figure .label"), values, strict=True))


def test_figures_say_what_they_are_over(opened: Opener) -> None:
    """Steps of 10 ms by the overview; without it the spans on the CPU, under that name."""
    figures = figures_of(opened(full_analysis()))
    assert figures["Step time, per step"] == "10.00 ms"
    assert {"Device time, per step", "Attention, per step"} <= set(figures)
    assert figures["Attributed to layers"] == "99.8 %"  # 13.3 us of 5.335 ms have no layer: 99.75
    analysis = full_analysis(utilization=None, overview=None)
    page = opened(analysis)
    spans = [row.span_ns or 0 for row in analysis.steps]
    assert figures_of(page)["CPU span, per step"] == f"{fmean(spans) / 1e6:.3f} ms"
    show(page, "communication")
    assert "of a step's CPU span" in page.text("#view-communication .figures")
    show(page, "overview")
    steps = table_named(page, "overview", "Steps")
    assert "wall_us" not in steps.units
    steps.assert_shows("span_us", [span / 1000 for span in spans])


def test_steps_take_what_the_overview_says(full: Page) -> None:
    show(full, "overview")
    steps = table_named(full, "overview", "Steps")
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
    figures = figures_of(page)
    assert figures["Step time, all 3 steps"] == "30.00 ms"
    assert "Device time, over the whole trace" in figures
    assert (figures["Prefill, a call"], figures["Decode, a call"]) == ("808.0 µs", "808.0 µs")
    assert "over the whole trace" in page.text("#view-summary")
    show(page, "layers")
    assert any("summed over the whole trace" in text for text in page.texts("#view-layers .note"))
    show(page, "shapes")
    assert "in all 3 steps" in page.text("#view-shapes .note")
    table_of(page, "shapes").assert_shows("calls_per_step", [3, 6])


def test_operators_by_hand(full: Page) -> None:
    show(full, "operators")
    full.click("#view-operators .segments [data-id=op]")
    table = table_of(full, "operators")
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
    assert "not known" in tooltip_of_cell(full, "operators", "tensor_cores", 1)
    assert table.texts("phase")[0].split() == ["backward", "forward"]


def test_kernels_by_hand(full: Page) -> None:
    show(full, "kernels")
    assert "grid" not in table_of(full, "kernels").rows[0]
    full.click("#view-kernels .segments [data-id=all]")
    table = table_of(full, "kernels")
    first = table.rows[0]
    assert (first["name"], first["grid"], first["block"], first["tensor_cores"]) == (
        "sm90_xmma_gemm_bf16",
        "16×8×1",
        "384×1×1",
        "yes",
    )
    assert table.texts("name")[-1] == "mystery"
    assert [table.rows[-1][key] for key in ("tensor_cores", "grid", "occupancy")] == ["–", "–", "–"]
    assert full.texts("#view-kernels .figure .value") == [
        "3.200 ms",
        "177",
        "87.5 %",
        "51.4 %",
    ]  # 90 of 175, copies apart
    full.click("#view-kernels .segments [data-id=kernel]")
    merged = table_of(full, "kernels")
    assert len(merged.rows) == 5
    merged.assert_shows("time_us", [2000, 800, 500, 300, 100])
    assert (merged.rows[0]["grid"], merged.rows[0]["block"]) == ("", "384×1×1")  # what differs is left out
    full.click("#view-kernels .segments [data-id=launch]")
    full.click("#view-kernels .segments [data-id=main]")


def test_communication_by_hand(full: Page) -> None:
    show(full, "communication")
    table = table_of(full, "communication")
    assert table.texts("collective") == ["all reduce", "all gather"]
    table.assert_shows("exposed_us", [200, 400])
    table.assert_shows("overlapped_us", [800, 0])
    table.assert_shows("payload_bytes", [400 << 20, None])
    table.assert_shows("bus_bandwidth_bytes_per_s", [734e9, None])
    assert full.texts("#view-communication .figure .value")[:2] == ["1.400 ms", "600.0 µs"]


def test_shapes_and_attention_by_hand(full: Page) -> None:
    show(full, "shapes")
    shapes = table_of(full, "shapes")
    assert shapes.texts("n") == ["50,257", "8,192"]
    shapes.assert_shows("flops", [2.0 * 512 * 50257 * 2048, 2 * 2.0 * 512 * 8192 * 2048])
    full.click("#view-shapes .segments [data-id=odd]")
    assert table_of(full, "shapes").texts("layer") == ["lm_head"]
    show(full, "attention")
    calls = table_named(full, "attention", "Calls")
    assert len(calls.rows) == 1
    assert [calls.rows[0][key] for key in ("query_shape", "key_shape", "mask", "causal", "dropout", "grouped")] == [
        "1×32×512×64",
        "1×8×512×64",
        "no",
        "yes",
        "–",
        "yes",
    ]
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
    show(page, "shapes")
    shapes = table_of(page, "shapes")
    shapes.assert_shows("time_per_step_us", [180, 600])
    shapes.assert_shows("timed_us", [650, 150])  # 800 in the proportions of 180 and 600, but not more than the layer
    assert shapes.texts("layer") == [first.layer, second.layer]
    show(page, "attention")
    calls = table_named(page, "attention", "Calls")
    assert calls.texts("causal") == ["yes", "no", "yes"]
    calls.assert_shows("time_per_step_us", [300, 100, 300])
    calls.assert_shows("timed_us", [timed / steps / 1000 * 0.75, timed / steps / 1000 * 0.25, None])
    headings = page.evaluate("[...document.querySelectorAll('#view-attention th')].map(one => one.innerText)")
    assert any(text.startswith("Time with shapes") for text in headings)
    page = opened(with_own_times(analysis, {**own_us, first.layer: 7000}))  # most of it is other work
    show(page, "shapes")
    assert "timed_us" not in table_of(page, "shapes").rows[0]
    assert "is not known" in page.text("#view-shapes .note")
    comparable = {**analysis.summary.get("comparable", {}), "shapes_in_timed_steps": True}
    page = opened(replace(analysis, summary={**analysis.summary, "comparable": comparable}))
    show(page, "shapes")
    assert "timed_us" not in table_of(page, "shapes").rows[0]


def test_memory_by_hand(full: Page) -> None:
    show(full, "memory")
    words = full.text("#view-memory")
    assert "optimizer state" in words and "os state" not in words, "keys are for files"
    assert "Called as" not in words, "no layer has several callers"
    allocations = table_named(full, "memory", "Largest allocations")
    allocations.assert_shows("size_bytes", [64 << 20, 16 << 20])
    allocations.assert_shows("allocated_us", [2000, 2500])
    allocations.assert_shows("released_us", [None, 3750])
    ops = table_named(full, "memory", "Operators by what")
    assert ops.texts("op") == ["aten::mm", "aten::_foreach_sqrt", "(outside of all ops)"]
    ops.assert_shows("kept_bytes", [800 << 20, 0, None])
    changes = table_named(full, "memory", "What would lower")
    changes.assert_shows("saves_bytes", [150 << 20, 16 << 20])
    changes.assert_shows("costs_us", [12300, None])


def test_bytes_have_no_parts(full: Page) -> None:
    texts = full.evaluate("[4, 1000, 1536].map(page.format.bytes).concat(page.format.us(4))")
    assert texts == ["4 B", "1,000 B", "1.500 KiB", "4.000 µs"]


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
    shown = table_of(page, "kernels").texts("name")
    assert len(set(shown)) == len(names)
    assert ["CUDAFunctor_add" in shown[0], "MulFunctor" in shown[1]] == [True, True]
    assert not any("void" in text or "native::" in text for text in shown)
    assert page.evaluate("document.querySelector('#view-kernels tbody .name').closest('td, [title]').title != ''")


@pytest.mark.parametrize("view", ["operators", "kernels", "waits", "shapes", "attention"])
def test_tables_fit_a_usual_window(full: Page, view: str) -> None:
    show(full, view)
    over = f"[...document.querySelectorAll('#view-{view} .scroller')].map(one => one.scrollWidth - one.clientWidth)"
    assert set(full.evaluate(over)) == {0}


def texts_of_findings(page: Page) -> list[str]:
    show(page, "summary")
    return page.texts("#view-summary .card .savings")


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
    time, fragments, recompute, unknown = texts_of_findings(page)
    assert "313.0 µs a step" in time and "3.1 % of a step of 10.00 ms (mean)" in time
    assert "25.0 % of the 4.000 GiB reserved at the peak" in fragments
    assert "50.0 % of the 2.000 GiB allocated at the peak" in recompute
    assert "%" not in unknown
    page = opened(replace(analysis, overview=None, utilization=None, steps=()))
    span = page.evaluate("page.format.us(page.data.time.span_us)")
    assert f"of the trace's {span}" in texts_of_findings(page)[0]


def test_attention_without_a_layer_is_a_line_of_its_own(opened: Opener) -> None:
    """The total is that of the class in the Overview."""
    analysis = full_analysis()
    known = sum(row.time_ns for row in analysis.attention)
    of_class = sum(row.time_ns for row in analysis.classes if row.class_name == "attention")
    more = ClassRow(class_name="attention", phase="other", time_ns=known - of_class + 300 * US, count=3)
    before = (UnattributedRow(reason="launched before the trace", time_ns=300 * US, count=3),)
    page = opened(replace(analysis, classes=(*analysis.classes, more), unattributed=before))
    show(page, "summary")
    assert "launched before the trace: 100.0 µs" in page.text("#view-summary .figures")
    show(page, "attention")
    title = page.text("#view-attention figcaption")
    assert page.evaluate(f"page.format.us({(known + 300 * US) / 3000!r})") in title
    table = table_of(page, "attention")
    assert "launched before the trace" in table.texts("backend")
    assert sum(value or 0 for value in table.numbers("time_us")) == pytest.approx((known + 300 * US) / 3000, abs=0.01)


def test_classes_of_kernels_are_those_of_the_overview(opened: Opener) -> None:
    """The bar counts each event under its own class, as the Overview does."""
    page = opened(full_analysis())
    show(page, "overview")
    classes = table_named(page, "overview", "Classes of work")
    told = dict(zip(classes.texts("name"), classes.numbers("time"), strict=True))
    show(page, "kernels")
    for text in page.texts("#view-kernels .shares:nth-of-type(1) .legend button"):
        name, number, unit = text.rsplit("(", 1)[0].split()
        us = float(number.replace(",", "")) * {"ms": 1000, "µs": 1}[unit]
        assert us == pytest.approx(told.pop(name) or 0, rel=1e-3)
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
    page = opened(bare)
    show(page, "attention")
    notice = page.text("#view-attention .notice")
    assert "single ops (eager): no fused attention ran. Attention is made of single ops" in notice
    layers = {row.layer for row in bare.layers if row.kind == "attention"}
    assert set(table_of(page, "attention").texts("layer")) == layers


def test_figures_say_that_they_are_means(full: Page) -> None:
    show(full, "summary")
    text = full.text("#view-summary .figures")
    assert "median" not in text and text.count("mean of 3 steps") >= 2
    assert "kernels run in 74.0 % of the steps' wall time" in text  # as the Overview's utilisation
    show(full, "overview")
    assert "mean of 3 steps" in full.text("#view-overview")
    assert all(text.startswith("median ") for text in full.texts("#view-overview .bars figcaption .quiet"))


def test_phases_of_the_memory_curve_end_with_their_step(opened: Opener) -> None:
    """The trace of an optimizer's step that is open when the recording stops lasts until then."""
    analysis = full_analysis()
    curve = analysis.memory["curve"]
    last = curve["end_us"]
    phases = [{"phase": "optimizer", "start_us": at} for at in (100.0, last - 100.0)]
    steps = [{"step": 2, "start_us": 0.0, "end_us": 300.0}, {"step": 3, "start_us": 350.0, "end_us": last}]
    longer = {**curve, "end_us": last + 5000.0, "phases": phases, "steps": steps}
    page = opened(replace(analysis, memory={**analysis.memory, "curve": longer}))
    show(page, "memory")
    ends = page.evaluate(
        """document.querySelector("#view-memory .chart").data.filter(one => one.type === "bar")
             .flatMap(one => one.x.map((length, i) => one.base[i] + length))"""
    )
    (tick,) = page.evaluate(f"[page.timeUnit(Math.max(1000, {last + 5000.0}))[0]]")
    assert ends == pytest.approx([300 / tick, last / tick])


def test_folded_tables_say_how_many_rows_are_shown(full: Page) -> None:
    show(full, "layers")
    shown = full.count("#view-layers tbody tr")
    told = full.text("#view-layers .shown")
    full.wait("document.querySelector('#view-layers .shown')")
    assert told.startswith(f"{shown} shown of ") or told == f"{shown} rows"
    assert shown < full.evaluate("document.querySelector('#view-layers .table').table.options.rows.length")
