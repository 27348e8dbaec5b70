"""The views of the page in a browser without network: they open, say what the rows say, and their tools work."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from browser import CHROMIUM, NO_CHROMIUM, Browser, Page
from page_tables import UNITS, VIEWS, assert_all_open, opened, show, table_named, table_of, tooltip_of_cell
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.describe import step_count
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.reports.roofline_points import roofline
from profiler_wrapper.result import load
from sample_results import llama
from sample_views import US, full_analysis
from shared_traces import TRACE_NAMES, TRACES, needs_traces

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Three steps of a small Llama on the CPU."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from profiler_wrapper import ProfilerWrapper

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=128
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 128, (2, 16))
    out = tmp_path_factory.mktemp("run")
    with ProfilerWrapper(model, output_dir=out, enable_print_summary=False, files=()) as profiler:
        for _ in range(5):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    result = profiler.result
    assert isinstance(result, Analysis)
    return result


# --- every view opens --------------------------------------------------------------------------------------------


def test_all_views_of_a_result_with_everything(full: Page) -> None:
    assert assert_all_open(full) == set(VIEWS)


def test_a_training_run_on_a_cpu(browser: Browser, trained: Analysis, tmp_path: Path) -> None:
    page = opened(browser, trained, tmp_path)
    assert_first_views(page, trained)
    assert "no device in this trace" in page.text("#view-overview")
    assert "In ops" in page.text("#view-overview .figures")
    drawn = assert_all_open(page)
    assert drawn >= {"operators", "memory", "attention", "roofline", "timeline"}
    assert not drawn & {"kernels", "waits"}
    assert_numbers(page, trained, drawn)
    page.close()


@needs_traces
@pytest.mark.parametrize("name", TRACE_NAMES)
def test_traces_of_other_machines(browser: Browser, name: str, tmp_path: Path) -> None:
    analysis = load(str(TRACES / name))
    page = opened(browser, analysis, tmp_path)
    assert_first_views(page, analysis)
    if not any(row.layer for row in analysis.layers):
        assert "This trace has no layers" in page.text("#view-layers")
        assert "ProfilerWrapper(model)" in page.text("#view-layers")
    drawn = assert_all_open(page)
    assert ("kernels" in drawn) == bool(analysis.kernels)
    assert_numbers(page, analysis, drawn)
    page.close()


def test_a_result_without_rows_of_views_says_why(browser: Browser, tmp_path: Path) -> None:
    """As an older version wrote it."""
    page = opened(browser, llama(2, memory=False), tmp_path)
    assert assert_all_open(page) == {"attention", "timeline"}
    page.close()


def test_a_result_that_was_written_and_read_again(browser: Browser, tmp_path: Path) -> None:
    analysis = full_analysis(leak=True)
    backward, forward, *others = analysis.operators
    analysis = replace(analysis, operators=(backward, replace(forward, tensor_core_time_ns=None), *others))
    again = from_dict(json.loads(json.dumps(to_dict(analysis))))
    page = opened(browser, again, tmp_path)
    assert assert_all_open(page) == set(VIEWS)
    show(page, "memory")
    leaks = table_named(page, "memory", "Leaks")
    assert leaks.texts("op") == ["aten::clone"]
    leaks.assert_shows("bytes_per_step", [2 << 20])
    show(page, "operators")
    assert table_of(page, "operators").texts("tensor_cores")[0] == "–"  # of one of its phases it is not told
    page.close()


# --- the numbers ---------------------------------------------------------------------------------------------------


def assert_first_views(page: Page, analysis: Analysis) -> None:
    """Summary, Layers and Overview open, fit the window, and say the same total as all else."""
    total = analysis.time.total_ns / 1000 / step_count(analysis)
    for view in ("summary", "overview", "layers"):
        show(page, view)
        assert "could not be shown" not in page.text(f"#view-{view}")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"
    figures = dict(zip(page.texts("#view-summary .label"), page.texts("#view-summary .value"), strict=False))
    shown = figures["Device time" if analysis.time_basis == "device" else "CPU time"]
    assert shown == page.evaluate(f"page.format.us({total!r})")
    assert "✓" in page.text("#view-layers .sum")
    layers = "#view-layers .table"
    assert page.evaluate(f"(t => t.scrollWidth <= t.clientWidth)(document.querySelector('{layers} .scroller'))")
    heads = page.evaluate(f"[...document.querySelectorAll('{layers} th')].map(one => one.dataset.key)")
    unit = UNITS[page.texts(f"{layers} th .unit")[0].strip()]
    foot = dict(zip(heads, page.texts(f"{layers} tfoot td"), strict=True))
    assert float(foot["time"].replace(",", "")) * unit == pytest.approx(total, rel=1e-3, abs=0.001)
    backward = sum(row.self_time_ns for row in analysis.layers if row.phase in ("backward", "accumulate_grad"))
    if backward:  # as the text table has it
        told = backward / 1000 / step_count(analysis)
        assert float(foot["backward"].replace(",", "")) * unit == pytest.approx(told, rel=1e-3, abs=0.001)
    if any(row.peak_bytes for row in analysis.layers):
        assert "peak" in heads
    classes = table_named(page, "overview", "Classes of work")
    by_class: dict[str, int] = {}
    for row in analysis.classes:
        by_class[row.class_name] = by_class.get(row.class_name, 0) + row.time_ns
    classes.assert_shows("time", [ns / 1000 / step_count(analysis) for ns in sorted(by_class.values(), reverse=True)])


def assert_numbers(page: Page, analysis: Analysis, drawn: set[str]) -> None:
    """What the tables say is what the rows say, of one step."""
    steps = step_count(analysis)
    show(page, "operators")
    page.click("#view-operators [data-choice=phase]")
    operators = table_of(page, "operators")
    rows = sorted(analysis.operators, key=lambda row: -row.self_time_ns)[: len(operators.rows)]
    assert len(operators.rows) == min(200, len(analysis.operators))
    operators.assert_shows("self_time_us", [row.self_time_ns / 1000 / steps for row in rows])
    operators.assert_shows("share", [row.self_time_ns / analysis.time.total_ns for row in rows])
    if "kernels" in drawn:
        show(page, "kernels")
        kernels = table_of(page, "kernels")
        dearest = sorted(analysis.kernels, key=lambda row: -row.time_ns)[: len(kernels.rows)]
        kernels.assert_shows("time_us", [row.time_ns / 1000 / steps for row in dearest])
        kernels.assert_shows("count", [row.count / steps for row in dearest])
        kernels.assert_shows("mean_us", [row.time_ns / 1000 / row.count for row in dearest])
    if "memory" in drawn:
        show(page, "memory")
        owners = table_named(page, "memory", "Who holds it")
        held = analysis.memory["peak"]["owners"]
        owners.assert_shows("bytes", [owner["bytes"] for owner in held[: len(owners.rows)]])
        assert owners.texts("category") == [owner["category"].replace("_", " ") for owner in held[: len(owners.rows)]]
        assert_curve(page, analysis)
    if "communication" in drawn:
        show(page, "communication")
        collectives = table_named(page, "communication", "By layer")
        slowest = sorted(analysis.collectives, key=lambda row: -row.time_ns)[: len(collectives.rows)]
        collectives.assert_shows("time_us", [row.time_ns / 1000 / steps for row in slowest])
        together = table_named(page, "communication", "Collectives")
        sums = [value or 0.0 for value in together.numbers("time_us")]
        assert math.isclose(sum(sums), sum(row.time_ns for row in analysis.collectives) / 1000 / steps, rel_tol=0.01)
    if "waits" in drawn:
        show(page, "waits")
        waits = table_of(page, "waits")
        longest = sorted(analysis.synchronisations, key=lambda row: -row.wait_ns)[: len(waits.rows)]
        waits.assert_shows("wait_us", [row.wait_ns / 1000 / steps for row in longest])
    if "roofline" in drawn:
        show(page, "roofline")
        parts = table_named(page, "roofline", "Parts of the model")
        points = roofline(analysis).points[: len(parts.rows)]
        assert parts.texts("name") == [point.name for point in points]
        parts.assert_shows("time_us", [point.time_ns / 1000 for point in points])
        parts.assert_shows("flops_per_s", [point.flop_per_s for point in points])
        if any(point.roof_ns is not None for point in points):
            parts.assert_shows("of_roof", [point.of_roof for point in points])


def assert_curve(page: Page, analysis: Analysis) -> None:
    """The areas of the chart make what is allocated, and its highest point is the peak."""
    areas, line = page.evaluate(
        """(() => {
          const traces = document.querySelector("#view-memory .chart").data;
          const stacked = traces.filter(one => one.stackgroup);
          return [stacked[0].x.map((_, i) => stacked.reduce((sum, one) => sum + one.y[i], 0)),
                  traces.find(one => one.name === "allocated in all").y];
        })()"""
    )
    assert areas == pytest.approx(line, rel=1e-9, abs=1e-9)
    peak = analysis.memory["peak"]["allocated_bytes"]
    assert max(line) * (1 << 30 if peak >= 4 << 30 else 1 << 20) == pytest.approx(peak)


def test_numbers_of_a_result_with_everything(full: Page) -> None:
    assert_numbers(full, full_analysis(), set(VIEWS))


def test_operators_by_hand(full: Page) -> None:
    show(full, "operators")
    full.click("#view-operators [data-choice=op]")
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
    assert "tells" in tooltip_of_cell(full, "operators", "tensor_cores", 1)
    assert table.texts("phase")[0].split() == ["backward", "forward"]


def test_kernels_by_hand(full: Page) -> None:
    show(full, "kernels")
    assert "grid" not in table_of(full, "kernels").rows[0]
    full.click("#view-kernels [data-choice=all]")
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
    assert full.texts("#view-kernels .figure .value")[:3] == ["3.200 ms", "177", "87.5 %"]
    full.click("#view-kernels [data-choice=kernel]")
    merged = table_of(full, "kernels")
    assert len(merged.rows) == 5
    merged.assert_shows("time_us", [2000, 800, 500, 300, 100])
    assert (merged.rows[0]["grid"], merged.rows[0]["block"]) == ("", "384×1×1")  # what differs is left out
    full.click("#view-kernels [data-choice=launch]")
    full.click("#view-kernels [data-choice=main]")


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
    full.click("#view-shapes [data-choice=odd]")
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


def test_calls_with_shapes_show_the_time_of_the_timed_steps_too(browser: Browser, tmp_path: Path) -> None:
    """Two sizes in one op, two calls of attention in one layer; each has its part of what the timed steps took."""
    analysis = full_analysis()
    first, second = analysis.products
    products = (first, replace(second, calls_per_step=26.0))  # with the first: the 28 calls of its op
    call = replace(analysis.attention_calls[0], time_per_step_ns=300 * US)
    other = replace(call, causal=False, time_per_step_ns=100 * US)
    backward = replace(call, phase="backward", backend="math")  # the timed steps have none
    timed = sum(row.time_ns for row in analysis.attention if (row.layer, row.phase) == (call.layer, call.phase))
    steps = len(analysis.steps)
    assert timed
    analysis = replace(analysis, products=products, attention_calls=(call, other, backward))
    write_page(analysis, tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html")
    show(page, "shapes")
    shapes = table_of(page, "shapes")
    shapes.assert_shows("time_per_step_us", [600, 180])
    shapes.assert_shows("timed_us", [800 * 600 / 780, 800 * 180 / 780])
    show(page, "attention")
    calls = table_named(page, "attention", "Calls")
    assert calls.texts("causal") == ["yes", "no", "yes"]
    calls.assert_shows("time_per_step_us", [300, 100, 300])
    calls.assert_shows("timed_us", [timed / steps / 1000 * 0.75, timed / steps / 1000 * 0.25, None])
    headings = page.evaluate("[...document.querySelectorAll('#view-attention th')].map(one => one.innerText)")
    assert any(text.startswith("Time with shapes") for text in headings)
    comparable = {**analysis.summary.get("comparable", {}), "shapes_in_timed_steps": True}
    write_page(replace(analysis, summary={**analysis.summary, "comparable": comparable}), tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html")
    show(page, "shapes")
    assert "timed_us" not in table_of(page, "shapes").rows[0]


def test_names_of_kernels_can_be_told_apart(browser: Browser, tmp_path: Path) -> None:
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
    write_page(replace(analysis, kernels=rows), tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html", width=1366)
    show(page, "kernels")
    shown = table_of(page, "kernels").texts("name")
    assert len(set(shown)) == len(names)
    assert ["CUDAFunctor_add" in shown[0], "MulFunctor" in shown[1]] == [True, True]
    assert not any("void" in text or "native::" in text for text in shown)
    assert page.evaluate("document.querySelector('#view-kernels tbody .name').closest('td, [title]').title != ''")


@pytest.mark.parametrize("view", ["kernels", "waits", "shapes", "attention"])
def test_tables_fit_a_usual_window(full: Page, view: str) -> None:
    show(full, view)
    over = f"[...document.querySelectorAll('#view-{view} .scroller')].map(one => one.scrollWidth - one.clientWidth)"
    assert set(full.evaluate(over)) == {0}


def test_the_address_of_a_view_without_rows_says_why(browser: Browser, tmp_path: Path) -> None:
    write_page(replace(full_analysis(), collectives=()), tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html", address="communication")
    assert page.texts("#view-communication .notice")[0].startswith("Communication: no collective was found")
    page.evaluate("page.goto('waits')")
    page.wait("document.querySelector('#view-communication').hidden")


def test_bytes_have_no_parts(full: Page) -> None:
    texts = full.evaluate("[4, 1000, 1536].map(page.format.bytes).concat(page.format.us(4))")
    assert texts == ["4 B", "1,000 B", "1.500 KiB", "4.000 µs"]


def test_memory_by_hand(full: Page) -> None:
    show(full, "memory")
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


# --- what fails and what is awkward ------------------------------------------------------------------------------


def test_one_failed_part_leaves_the_others(browser: Browser, tmp_path: Path) -> None:
    """A curve that is damaged, and a roofline that could not be made."""
    analysis = full_analysis()
    path = tmp_path / "report.html"
    write_page(replace(analysis, memory={**analysis.memory, "curve": {"time_us": None}}), path)
    page = browser.open(path, address="memory")
    page.wait("document.documentElement.dataset.ready")
    assert "could not be shown" in page.text("#view-memory")
    for view in VIEWS:
        if view != "memory":
            show(page, view)
            assert "could not be shown" not in page.text(f"#view-{view}"), view
    page.close()


AWKWARD = (
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=alert(1)>",
    "\"quotes' & 100 % %{x} 🦙\u202e\n\t",
    "=cmd|' /C calc'!A1",
    "x" * 1_000_000,
)


def test_names_are_inert_and_legible(browser: Browser, tmp_path: Path) -> None:
    analysis = full_analysis()
    names = [*AWKWARD, *AWKWARD]
    page = opened(
        browser,
        replace(
            analysis,
            operators=tuple(replace(row, op=name) for row, name in zip(analysis.operators, names, strict=False)),
            kernels=tuple(
                replace(row, name=name, ops=(name,)) for row, name in zip(analysis.kernels, names, strict=False)
            ),
            collectives=tuple(replace(row, group=AWKWARD[0], layer=AWKWARD[1]) for row in analysis.collectives),
            synchronisations=tuple(replace(row, op=AWKWARD[1], sources=AWKWARD) for row in analysis.synchronisations),
            products=tuple(replace(row, op=AWKWARD[0], layer=AWKWARD[1]) for row in analysis.products),
            attention_calls=tuple(replace(row, layer=AWKWARD[4], dtype=AWKWARD[0]) for row in analysis.attention_calls),
            allocations=tuple(replace(row, op=AWKWARD[0], layer=AWKWARD[1]) for row in analysis.allocations),
            op_memory=tuple(replace(row, op=name) for row, name in zip(analysis.op_memory, names, strict=False)),
        ),
        tmp_path,
        title="names",
    )
    assert assert_all_open(page) == set(VIEWS)
    assert page.dialogs == []
    assert page.evaluate("document.title") == "names"
    assert page.count("#views img") == 0
    show(page, "operators")
    shown = table_of(page, "operators").texts("op")
    assert "</script><script>document.title='ran'</script>" in shown
    assert any("…" in text for text in shown)
    assert all(len(text) <= 70 for text in shown)
    page.close()
