"""What single views of the page need beside the rows: the numbers of the pictures, as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler_wrapper.reports import page
from profiler_wrapper.reports.page import page_data
from profiler_wrapper.tables.model import CATEGORIES
from sample_results import llama
from sample_views import full_analysis

SOURCES = Path(__file__).parents[2] / "page" / "src"


def test_the_roofline_by_hand() -> None:
    """Of a step of a Llama of 4 blocks: forward 200 us of MLP and 100 us of attention a block, backward twice that."""
    data = page_data(full_analysis(4, odd=None))["views"]["roofline"]
    points = {(point["name"], point["phase"]): point for point in data["points"]}
    mlp = points["mlp", "backward"]
    assert (mlp["time_us"], mlp["roof_us"], mlp["of_roof"], mlp["bound"]) == (1600, 800, 0.5, "memory")
    assert (mlp["flops"], mlp["bytes_moved"]) == (300_000 * 1_600_000, 500 * 1_600_000)
    assert (mlp["flops_per_s"], mlp["flops_per_byte"]) == (300e12, 600)
    attention = points["self_attn", "forward"]
    assert (attention["time_us"], attention["flops_per_byte"], attention["kind"]) == (400, 200, "attention")
    optimizer = points["optimizer", "optimizer"]
    assert (optimizer["flops"], optimizer["of_roof"], optimizer["why"]) == (None, None, "FLOPs and bytes not known")
    assert (data["flops_per_s"], data["bytes_per_s"], data["how"]) == ({"bfloat16": 989e12}, 4.8e12, "")
    assert data["not_shown"].startswith("not shown: optimizer")
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_without_flops_there_are_points_that_say_why() -> None:
    data = page_data(llama(2))["views"]["roofline"]
    assert all(point["flops_per_byte"] is None and point["why"] for point in data["points"])
    assert "peaks --measure" in data["how"]


def test_what_cannot_be_made_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(analysis: object) -> dict[str, object]:
        raise ZeroDivisionError("no steps")

    monkeypatch.setattr(page, "roofline_data", broken)
    monkeypatch.setattr(page, "layer_view", broken)
    monkeypatch.setattr(page, "time_shares", broken)
    failed = {"failed": "ZeroDivisionError: no steps"}
    assert page_data(llama(2))["views"] == {"layers": failed, "roofline": failed, "shares": failed}


def test_what_times_are_is_written_once_and_so_are_names_of_categories() -> None:
    """The page asks for them: its own sources hold no word for either."""
    data = page_data(full_analysis(4, odd=None))["page"]
    assert data["time_name"] == "device time"
    assert set(data["category_names"]) == set(CATEGORIES) and data["category_names"]["os_state"] == "optimizer state"
    sources = [path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.ts*")]
    assert len(sources) > 20
    assert [word for word in ("CPU time", '"CPU"} time', 'optimizer state"') for text in sources if word in text] == []
