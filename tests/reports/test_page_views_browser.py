"""The places of the page in a browser without a network: all open, of every kind of run, and say what the rows say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from browser import Browser, Page
from page_numbers import assert_first_places, assert_numbers
from page_tables import GROUPS, LOOKS, PLACES, Opener, assert_all_open, open_page, show, table_of
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.result import load
from profiler_wrapper.tables.model import Analysis
from sample_page import AWKWARD
from sample_results import llama
from sample_views import full_analysis
from shared_traces import TRACE_NAMES, TRACES, needs_traces

# A browser takes seconds for a trace; these have the same kinds of rows as h100_qwen1.5_0.5b_inference, and fewer.
ALIKE = ("h100_bert_small_inference", "h100_vit_inference")

ALL = {*GROUPS, *LOOKS}

pytestmark = pytest.mark.full


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


def test_all_of_a_result_with_everything(full: Page) -> None:
    assert assert_all_open(full) == ALL - {"stream"}, "a result without events knows no streams"


def test_a_training_run_on_a_cpu(opened: Opener, trained: Analysis) -> None:
    page = opened(trained)
    assert_first_places(page, trained)
    show(page, "step")
    assert "There is no device in this trace" in page.evaluate("document.querySelector('#view-step').textContent")
    assert "In ops" in page.texts("#view-step .figure .label")
    drawn = assert_all_open(page)
    assert drawn >= {"op", "layer", "phase", "attention", "roofline"}
    assert not drawn & {"kernel", "stream", "cores", "waits"}
    assert_numbers(page, trained, drawn)


@needs_traces
@pytest.mark.parametrize("name", [name for name in TRACE_NAMES if not name.startswith(ALIKE)])
def test_traces_of_other_machines(opened: Opener, name: str) -> None:
    analysis = load(str(TRACES / name))
    page = opened(analysis)
    assert_first_places(page, analysis)
    if not any(row.layer for row in analysis.layers):
        show(page, "layers")
        assert "This trace has no layers" in page.text("#view-layers")
        assert "ProfilerWrapper(model)" in page.text("#view-layers")
    drawn = assert_all_open(page)
    assert ("kernel" in drawn) == bool(analysis.kernels)
    assert_numbers(page, analysis, drawn)


def test_a_result_without_rows_says_why(opened: Opener) -> None:
    """As an older version wrote it."""
    page = opened(llama(2, memory=False))
    assert assert_all_open(page) == {"layer", "phase", "attention"}
    show(page, "memory")
    assert "No allocation was recorded" in page.text("#view-memory")


def test_a_result_that_was_written_and_read_again(opened: Opener) -> None:
    analysis = full_analysis(leak=True)
    backward, forward, *others = analysis.operators
    analysis = replace(analysis, operators=(backward, replace(forward, tensor_core_time_ns=None), *others))
    again = from_dict(json.loads(json.dumps(to_dict(analysis))))
    page = opened(again)
    assert assert_all_open(page) == ALL - {"stream"}
    show(page, "memory")
    leaks = table_of(page, "Leaks")
    assert leaks.texts("op") == ["aten::clone"]
    leaks.assert_shows("bytes_per_step", [2 << 20])
    show(page, "kernels", "op")
    page.resize(2600, 768)
    page.wait("document.querySelector('th[data-key=tensor_cores]')")
    assert table_of(page, "Operators").texts("tensor_cores")[0] == "–"  # of one of its phases it is not told


def test_numbers_of_a_result_with_everything(full: Page) -> None:
    assert_numbers(full, full_analysis(), ALL)


def test_the_address_of_what_has_no_rows_says_why(opened: Opener) -> None:
    page = opened(replace(full_analysis(), collectives=()), "kernels?by=communication")
    assert page.text("#view-kernels > .notice").startswith("Communication: no collective was found")
    show(page, "kernels", "waits")
    assert page.count("#view-kernels > .notice") == 0


def test_waiting_for_data_is_among_the_waits(opened: Opener) -> None:
    page = opened(replace(full_analysis(), synchronisations=()), "kernels?by=waits")
    assert "The CPU waits for the DataLoader, per step\n300.0 µs" in page.text("#view-kernels")


def test_one_failed_part_leaves_the_others(browser: Browser, tmp_path: Path) -> None:
    """A curve that is damaged, and a roofline that could not be made."""
    analysis = full_analysis()
    broken = replace(analysis, memory={**analysis.memory, "curve": {"time_us": None}})
    page = open_page(browser, broken, tmp_path, "memory")
    assert "could not be shown" in page.text("#view-memory")
    for place in PLACES:
        show(page, place)
        assert ("could not be shown" in page.text(f"#view-{place}")) == (place == "memory")
    page.close()


def test_names_are_inert_and_legible(opened: Opener) -> None:
    analysis = full_analysis()
    names = [AWKWARD[-1], *AWKWARD]  # the long one is the operators' too
    page = opened(
        replace(
            analysis,
            operators=tuple(replace(row, op=name) for row, name in zip(analysis.operators, names, strict=False)),
            kernels=tuple(
                replace(row, name=name, ops=(name,)) for row, name in zip(analysis.kernels, names, strict=False)
            ),
            collectives=tuple(replace(row, group=AWKWARD[0], layer=AWKWARD[1]) for row in analysis.collectives),
            synchronisations=tuple(
                replace(row, op=AWKWARD[1], sources=AWKWARD[:5]) for row in analysis.synchronisations
            ),
            products=tuple(replace(row, op=AWKWARD[0], layer=AWKWARD[1]) for row in analysis.products),
            attention_calls=tuple(
                replace(row, layer=AWKWARD[-1], dtype=AWKWARD[0]) for row in analysis.attention_calls
            ),
            allocations=tuple(replace(row, op=AWKWARD[0], layer=AWKWARD[1]) for row in analysis.allocations),
            op_memory=tuple(replace(row, op=name) for row, name in zip(analysis.op_memory, names, strict=False)),
        ),
        title="names",
    )
    assert assert_all_open(page) == ALL - {"stream"}
    assert page.dialogs == []
    assert page.evaluate("document.title") == "names"
    assert page.count("#root img") == 0
    show(page, "kernels", "op")
    shown = table_of(page, "Operators").texts("op")
    assert "</script><script>document.title='ran'</script>" in shown
    assert any("…" in text for text in shown)
    assert all(len(text) <= 70 for text in shown)
