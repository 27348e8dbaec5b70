"""What `--format json` gives of many ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.trace.spans import Gap
from simulated_jobs import QUIET, layer_times, report_of, simulated
from small_rank_jobs import write_job


def test_the_keys_that_are_promised() -> None:
    found = report_of(simulated("forward", seed=0, rank=3, noise=QUIET)).to_dict()
    assert found["verdict"] == "rank" and found["rank"] == 3
    assert found["stage"] is None and found["unknown"]["stage"], "the job has no stages"
    assert found["cause"] == "forward" and found["share"] > 0.9
    assert found["ms"] is None and found["mw"] is None and found["evidence"]
    assert 59 < found["lost_ms_per_step"] < 62
    assert found["suspects"][0]["rank"] == 3


def test_numbers_of_ranks() -> None:
    found = report_of(simulated("forward", seed=0, rank=3, noise=QUIET)).to_dict()
    slow, other = found["ranks"][3], found["ranks"][0]
    assert 79 < slow["own_ms_per_step"]["forward"] < 82 and 19 < other["own_ms_per_step"]["forward"] < 22
    assert slow["flagged"] and not other["flagged"]
    assert slow["relative_score"] < 0.6 < other["relative_score"]
    assert other["waiting_ms_per_step"] > 55 > slow["waiting_ms_per_step"]
    held = {row["kind"]: row for row in found["lost"]}
    assert held["forward"]["most_by_rank"] == 3 and held["forward"]["share_of_that_rank"] > 0.9
    total = sum(row["held_ms_per_step"] for row in found["lost"])
    assert abs(total - slow["wall_ms_per_step"]) < 0.1


def test_of_equal_ranks_none_is_named(tmp_path: Path) -> None:
    found = load_ranks(write_job(tmp_path / "spans.csv", slow_rank=-1)).to_dict()
    assert {row["most_by_rank"] for row in found["lost"]} == {None}
    assert {row["slowest_rank"] for row in found["layers"]} == {None}
    assert {row["times_last"] for row in found["ranks"]} == {0}


def test_layers_tell_who_stands_out() -> None:
    own = simulated("forward", seed=0, rank=3, noise=QUIET)
    layers = layer_times(own, slow=2, ranks=(5,), delay_ms=60.0)
    rows = {(row["layer"], row["kind"]): row for row in replace(report_of(own), layers=layers).to_dict()["layers"]}
    slow, other = rows["model.layers.2", "forward"], rows["model.layers.3", "forward"]
    assert slow["outliers"] == [5] == [slow["slowest_rank"]] and other["outliers"] == []
    times = layers.self_ns[:, layers.layers.index("model.layers.2"), 0] / 1e6
    deviation = 1.4826 * np.median(np.abs(times - np.median(times)))
    assert np.isclose(slow["typical_deviation_ms"], deviation) and np.isclose(slow["quickest_ms"], times.min())


def test_what_is_unknown_says_why() -> None:
    found = report_of(simulated(seed=0, noise=QUIET), mfu_unknown="no peak").to_dict()
    assert found["unknown"]["peak_bytes"] is None and found["unknown"]["mfu"] == "no peak"


def test_it_is_json_though_nothing_is_known() -> None:
    own = simulated(seed=0, steps=3)
    own = replace(own, self_ns=np.full_like(own.self_ns, np.nan), wall_ns=np.full_like(own.wall_ns, np.nan))
    found = report_of(own, missing=(Gap(what="rank 1", reason="no file", rank=1),)).to_dict()
    text = json.dumps(found, allow_nan=False)
    assert "no file" in text and found["ranks"][0]["wall_ms_per_step"] is None
    assert found["verdict"] == "none"


def test_it_grows_with_ranks_alone() -> None:
    short = len(json.dumps(report_of(simulated(seed=0, steps=20, noise=QUIET)).to_dict()))
    long = len(json.dumps(report_of(simulated(seed=0, steps=400, noise=QUIET)).to_dict()))
    assert long < short + 400 * 10  # the numbers of the steps
