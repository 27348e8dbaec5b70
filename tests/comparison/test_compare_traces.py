"""`compare` on recorded traces of GPUs and on a run, and what it writes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

import models
import profiler_wrapper as pw
from browser import Browser
from gpu_traces import names_of_traces, result
from page_tables import table_of
from profiler_wrapper.__main__ import main
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.text import Comparison
from profiling import profiler, result_of
from sample_results import llama
from shared_traces import TRACES, needs_traces

BERT, VIT = TRACES / "h100_bert_small_inference.json.gz", TRACES / "h100_vit_inference.json.gz"


@needs_traces
@pytest.mark.parametrize("name", names_of_traces(largest=pytest.mark.full))
def test_a_trace_is_no_different_from_itself(name: str) -> None:
    once = twice = result(name)
    found = compare(once, twice)
    assert found.decision in ("no difference", "not certain") and (found.culprits, found.differences) == ((), ())
    own = sum(row.b.self_time_ns for row in found.rows if row.b is not None)
    assert own + sum(row.time_b_ns for row in found.unattributed) == twice.time.total_ns


@needs_traces
def test_unlike_models_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(BERT), str(VIT), "-o", f"{tmp_path}/out/"]) == 0
    written = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert written == {"compare.txt", "compare.json", "compare.csv", "compare.html"}
    text = (tmp_path / "out" / "compare.txt").read_text()
    assert text.startswith("not alike (model BertLMHeadModel -> ViTModel")
    assert max(map(len, text.splitlines())) <= 100
    told = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert "model" in {one["what"] for one in told["differences"]}
    assert any("% of the time is in layers and phases that both have" in note for note in told["notes"])


@pytest.mark.full
def test_eager_attention_against_sdpa_begins_with_a_step(tmp_path: Path) -> None:
    """Whatever a busy machine does to times, the peak is exact: no single layer comes before it."""
    results: list[pw.ProfileResult] = []
    for attention in ("eager", "sdpa"):
        case = models.build("llama", tokens=256, attention=attention)
        with profiler(case, tmp_path / attention, steps="2-6") as prof:
            models.train(case, steps=7)
        results.append(result_of(prof))
    found = compare(*results)
    memory = re.search(r"b needs (\d+\.\d) % less memory at its peak \(([\d.]+) -> ([\d.]+) MiB\)", found.verdict)
    assert memory is not None
    assert float(memory[3]) / float(memory[2]) - 1 == pytest.approx(-float(memory[1]) / 100, abs=0.005)
    surely = found.decision in ("faster", "slower") and "low confidence" not in found.verdict
    unlike, _, said = found.verdict.partition("): ")
    assert unlike == "not alike (attention implementation eager -> sdpa"
    assert re.match(r"b (is|takes) " if surely else "b needs ", said), found.verdict


def comparison() -> Comparison:
    return compare(llama(12, steps=3), llama(12, steps=3, odd=7, backend="math"), name_a="before", name_b="after")


def test_the_table_fits_and_adds_up() -> None:
    for width in (60, 100, 140):
        text = comparison().table(rows=8, width=width)
        assert max(map(len, text.splitlines())) <= max(width, 100)
        assert text.isascii()
    lines = comparison().table(rows=5).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("mean self time a step")) + 2
    last = next(i for i, line in enumerate(lines) if line.startswith("TOTAL"))
    difference = re.compile(r"[+-]\d+\.\d{3}(?!\d)")  # changes in percent have one decimal
    differences = [float(one) for line in lines[first:last] for one in difference.findall(line)]
    (total,) = map(float, difference.findall(lines[last]))
    assert sum(differences) == pytest.approx(total, abs=0.01)


def test_the_csv_has_every_row(tmp_path: Path) -> None:
    found = comparison()
    rows = list(csv.DictReader(found.to_csv(tmp_path / "c.csv").open(encoding="utf-8")))
    assert len(rows) == len(found.rows) + len(found.unattributed)
    own = sum(float(row["self_time_per_step_us_b"]) for row in rows if row["self_time_per_step_us_b"])
    assert own == pytest.approx(found.total("device time").b / 1000)  # type: ignore[operator]


def test_the_page_holds_names_as_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    one = llama(3)
    page = compare(one, one, name_a=evil, name_b="b").write_page(tmp_path / "page.html").read_text(encoding="utf-8")
    assert evil not in page
    assert "\\u003c/script\\u003e" in page


@pytest.mark.full
@pytest.mark.parametrize("width", [400, 1366])
def test_the_page_says_what_the_table_says(browser: Browser, tmp_path: Path, width: int) -> None:
    found = comparison()
    page = browser.open(found.write_page(tmp_path / "page.html"), width=width, dark=width == 400)
    page.wait("document.documentElement.dataset.ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for label in ("Totals", "Own time", "Layers that changed", "Layers on both sides", "Classes of work"):
        assert table_of(page, label).rows, label
    assert "model.layers.7" in page.text("#places")
    own = page.evaluate(
        "JSON.parse(document.getElementById('data').textContent).folded.map(row => [row.a_us, row.b_us])"
    )
    total = found.total("device time")
    for of_side, whole in zip(zip(*own, strict=True), (total.a, total.b), strict=True):
        assert sum(of_side) == pytest.approx(whole / 1000)  # type: ignore[operator]
    assert (page.problems, page.requests) == ([], [])
    page.close()


@needs_traces
def test_paths_are_loaded_and_named() -> None:
    found = compare(BERT, str(BERT))
    assert (found.name_a, found.name_b) == (str(BERT), str(BERT))
    assert str(found).startswith("no difference")


def test_the_command_refuses_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "gone"), str(tmp_path / "gone")]) == 1
    existing = tmp_path / "there.html"
    existing.write_text("x")
    assert main(["compare", "a", "b", "-o", str(existing)]) == 1
    assert "will not overwrite without --force" in capsys.readouterr().err
    assert main(["compare", "a", "b", "--top", "0"]) == 2
