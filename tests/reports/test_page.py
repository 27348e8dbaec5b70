"""What stands in the page: the same as in result.json, compact, and never as markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from profiler_wrapper.reports.page import columns_of, page_data, page_html, script_json
from profiler_wrapper.reports.result_json import LISTS, from_dict, to_dict
from sample_page import AWKWARD, awkward_page, large_page
from sample_results import llama
from sample_views import full_analysis


def rows_of(table: dict[str, Any], texts: list[str]) -> list[dict[str, Any]]:
    """Columns as rows again, as the page does it."""

    def value(column: dict[str, Any], i: int) -> Any:
        if "all" in column:
            return column["all"]
        if "text" in column:
            number = column["text"][i]
            return None if number is None else texts[number]
        if "texts" in column:
            return [texts[number] for number in column["texts"][i]]
        return column["values"][i]

    return [{name: value(column, i) for name, column in table["columns"].items()} for i in range(table["count"])]


@pytest.mark.parametrize("analysis", [llama(), full_analysis(), awkward_page()], ids=["llama", "full", "awkward"])
def test_lists_are_those_of_result_json(analysis: Any) -> None:
    data, expected = page_data(analysis), to_dict(analysis)
    for name in LISTS:
        assert rows_of(data[name], data["texts"]) == expected[name], name
    assert {name: data[name] for name in expected if name not in LISTS and name != "run"} == {
        name: value for name, value in expected.items() if name not in LISTS and name != "run"
    }


def test_columns_by_hand() -> None:
    texts: dict[str, int] = {}
    rows = [{"a": "x", "b": None, "c": 1, "d": ["x", "y"], "e": True}, {"a": "y", "b": None, "c": 1.5, "d": [], "e": 1}]
    assert columns_of(rows, texts) == {
        "count": 2,
        "columns": {
            "a": {"text": [0, 1]},
            "b": {"all": None},
            "c": {"values": [1, 1.5]},
            "d": {"texts": [[0, 1], []]},
            "e": {"values": [True, 1]},  # equal, and yet not the same
        },
    }
    assert list(texts) == ["x", "y"]
    assert columns_of([], texts) == {"count": 0, "columns": {}}


def test_a_long_name_stands_in_the_page_once() -> None:
    name = "layer" * 10_000
    html = page_html(awkward_page([name, "b", "c"]))
    in_titles = html.count(name) - 1  # whose texts are no rows: the verdict, findings, warnings, the run
    assert page_data(awkward_page([name, "b", "c"]))["texts"].count(name) == 1
    assert in_titles < 20


def test_a_lone_surrogate_can_be_written_and_stays_what_it_was() -> None:
    text = script_json({"layers.\udc80": "<\ud800>"})
    assert "<" not in text
    assert json.loads(text.encode()) == {"layers.\udc80": "<\ud800>"}


def test_json_in_a_script_stays_json() -> None:
    value = {"</script>": "<!-- & \u2028 \u2029 > \x00 \U0001f9e0", "n": [1, 2.5, None, True]}
    text = script_json(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029\x00]", text)


class _Tags(HTMLParser):
    """Counts the elements of a page, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        assert not [name for name, _ in attrs if name.startswith("on")]


def tags(html: str) -> dict[str, int]:
    found = _Tags()
    found.feed(html)
    return found.tags


def test_names_add_no_element() -> None:
    assert tags(page_html(awkward_page())) == tags(page_html(llama()))
    for name in AWKWARD:
        assert tags(page_html(llama(), title=name, trace_href=name)) == tags(page_html(llama()))


@pytest.mark.parametrize("href", ["javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", " javascript:x"])
def test_a_link_that_would_run_is_none(href: str) -> None:
    assert page_data(llama(), trace_href=href)["page"]["trace_href"] is None


@pytest.mark.parametrize("href", ["rank0/trace.json", "../a b/trace.json.gz", "file:///tmp/trace.json", "./c:d.json"])
def test_a_link_to_a_file_is_kept(href: str) -> None:
    assert page_data(llama(), trace_href=href)["page"]["trace_href"] == href


def test_like_layers_are_a_group_with_the_odd_one() -> None:
    data = page_data(llama(6, odd=4))
    (group,) = rows_of(data["views"]["layers"]["groups"], data["texts"])
    assert (group["label"], group["parent"]) == ("layers.{0..5}", "model")
    assert group["layers"] == [f"model.layers.{i}" for i in range(6)]
    # 3 times 310 us and 9 of its norm against 6 times 310 and 9.
    assert group["outliers"] == [{"layer": "model.layers.4", "what": "time", "excess": pytest.approx(1869 / 939 - 1)}]


def test_a_hundred_layers_are_a_megabyte() -> None:
    analysis = large_page(100, steps=10)
    assert len(analysis.layers) > 4000
    assert len(script_json(page_data(analysis)).encode()) < 1.5e6


def test_work_stands_beside_times_only_where_steps_are_alike() -> None:
    assert page_data(llama(steps=3))["page"]["work_scale"] == 1.0
    assert page_data(llama(phases=("prefill", "decode")))["page"]["work_scale"] == 1.0  # a step is a request
    prefill, decode = llama(phases=("prefill",)).steps[0], llama(phases=("decode",)).steps[0]
    tokens = replace(llama(phases=("prefill", "decode")), steps=(prefill, replace(decode, step=prefill.step + 1)))
    assert page_data(tokens)["page"]["work_scale"] is None
    rest = replace(llama(steps=2).steps[0], step=None)
    outside = replace(llama(steps=2), steps=(*llama(steps=2).steps, rest))
    assert page_data(outside)["page"]["like_steps"] is False


def test_a_result_of_json_alone_draws_the_same() -> None:
    analysis = full_analysis()
    again = from_dict(json.loads(json.dumps(to_dict(analysis))))
    assert page_data(again) == page_data(analysis)


def test_awkward_titles_stay_text() -> None:
    for name in AWKWARD:
        html = page_html(full_analysis(), title=name)
        assert "<script>document.title='ran'" not in html
        assert "<img src=x" not in html
        title = html.split("<title>", 1)[1].split("</title>", 1)[0]
        assert len(title) < 200 and "<" not in title and "\n" not in title


@pytest.mark.parametrize("href", ["javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "vbscript:x"])
def test_a_link_to_the_trace_runs_nothing(href: str) -> None:
    assert href not in page_html(full_analysis(), trace_href=href)
