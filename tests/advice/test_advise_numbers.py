"""Each number that verdict and findings state stands in a table of the same result, on every recorded trace."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

import gpu_traces
from advice_facts import facts_of_gpu
from profiler_wrapper.advice.advise import summary_of
from profiler_wrapper.advice.facts import duration, share
from profiler_wrapper.reports.result_json import to_dict
from shared_traces import needs_traces

pytestmark = needs_traces


def summed(rows: Any, key: str) -> float:
    return float(sum(row[key] for row in rows))


def steps_of(data: Mapping[str, Any]) -> int:
    return max(1, sum(row["step"] is not None for row in data["steps"]))


def wall_us(data: Mapping[str, Any]) -> float:
    """The mean step, as the overview has it."""
    rows = data["overview"]["steps"]
    return summed(rows, "span_us") / len(rows)


def idle_us(data: Mapping[str, Any]) -> float:
    return float(data["overview"]["gaps_us"]) / len(data["overview"]["steps"])


def in_verdict(data: Mapping[str, Any]) -> list[str]:
    """What the headline may say of shares and lengths, from the tables alone."""
    total = data["time"]["total_us"]
    lengths = [row["span_us"] for row in data["overview"]["steps"]]
    parts = {
        share(us / total) for us in (summed(rows, "self_time_us") for rows in parts_of(data["layers"]) if rows) if us
    }
    unknown = [row for row in data["unattributed"] if row["reason"] != "launched before the trace"]
    classes = [summed([row for row in data["classes"] if row["class"] == name], "time_us") for name in classes_of(data)]
    idle = [share(idle_us(data) / wall_us(data))] if data["overview"]["gaps_us"] is not None else []
    return [
        *parts,
        *idle,
        share(summed(unknown, "time_us") / total),
        *(share(us / total) for us in classes),
        *(duration(1000 * us) for us in (wall_us(data), min(lengths), max(lengths))),
    ]


def classes_of(data: Mapping[str, Any]) -> set[str]:
    return {row["class"] for row in data["classes"]}


def parts_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Layers by name, what has none by phase, and one child of all blocks."""
    groups: dict[object, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["layer"] or row["phase"]), []).append(row)
        if row["block"]:
            below = row["layer"][len(row["block"]) + 1 :].partition(".")[0]
            groups.setdefault((re.sub(r"\d+", "#", row["block"]), below, "in blocks"), []).append(row)
    outside = [row for row in rows if not row["layer"] and row["phase"] != "optimizer"]
    moving = [row for row in outside if 2 * row["communication_us"] > row["self_time_us"]]
    return [*groups.values(), moving, [row for row in outside if row not in moving]]


def both(finding: Mapping[str, Any], data: Mapping[str, Any]) -> list[tuple[float, float]]:
    """What a finding says, and what its table has."""
    details = finding["details"]
    match finding["id"]:
        case "low-utilization":
            return [(details["idle_us"], idle_us(data))]
        case "synchronisation":
            waits = summed(data["synchronisations"], "wait_us") / steps_of(data)
            return [(details["wait_us"], waits), (finding["share"] * wall_us(data), waits)]
        case "fragmentation":
            return [(details["reserved_bytes"], data["memory"]["peak"]["reserved"]["reserved_bytes"])]
        case "communication-bound":
            steps = data["overview"]["steps"]
            return [(finding["saves_at_most_us"], summed(steps, "communication_us") / len(steps))]
    return []


@pytest.mark.parametrize("name", gpu_traces.names_of_traces(largest=pytest.mark.full))
def test_each_number_of_the_summary_is_that_of_a_table(name: str) -> None:
    facts = facts_of_gpu(name.removesuffix(".json.gz"))
    data = json.loads(json.dumps(to_dict(facts.analysis)))
    summary = json.loads(json.dumps(summary_of(facts.analysis, facts.found, [])))
    sentence = summary["verdict"].partition("Most to gain")[0].partition("First fix")[0]
    told = re.findall(r"(?:over|under )?\d[\d.]* (?:%|ms|s|µs|ns)", sentence) if data["overview"] else []
    assert all(any(number in one for one in in_verdict(data)) for number in told), (told, in_verdict(data))
    for finding in summary["findings"]:
        saves_us = finding["saves_at_most_us"]
        assert (finding["share"] is None) is (finding["share_of"] is None)
        wall = "the wall time of " in (finding["share_of"] or "")
        for said, in_table in both(finding, data):
            assert said == pytest.approx(in_table, rel=0.02), finding["id"]
        if wall and saves_us is not None and finding["id"] not in ("synchronisation", "dataloader-bound"):
            assert finding["share"] * wall_us(data) == pytest.approx(saves_us, rel=0.01), finding["id"]
    parts = [one for one in summary["findings"] if any("part of the" in line for line in one["evidence"])]
    wholes = [
        one for one in summary["findings"] if one not in parts and one["id"] in ("launch-bound", "low-utilization")
    ]
    assert len(wholes) <= 1
