"""`result.json`: the schema, and reading it back."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.tables.model import LayerRow
from sample_results import Layer, analysis_of, llama
from sample_work import worked

SCHEMA: dict[str, set[str]] = {
    "": {
        "schema_version", "summary", "time_basis", "complete", "warnings", "run", "time", "unattributed", "layers",
        "attention", "classes", "steps", "series", "memory",
    },
    "summary": {"verdict", "findings", "comparable"},
    "run": {"timed_steps", "full_steps"},
    "time": {
        "total_us", "attributed_us", "unattributed_us", "coverage", "busy_us", "span_us", "exposed_communication_us",
    },
    "unattributed": {"reason", "time_us", "count"},
    "layers": {
        "layer", "raw_name", "class_name", "kind", "block", "phase", "calls", "self_time_us", "time_us",
        "cpu_time_us", "attention_us", "communication_us", "exposed_communication_us", "idle_us", "flops_per_step",
        "self_flops_per_step", "allocated_bytes", "reserved_bytes", "peak_bytes", "retained_bytes",
        "self_retained_bytes", "shared", "graph",
    },
    "attention": {"layer", "phase", "backend", "kernels", "time_us"},
    "classes": {"class", "phase", "time_us", "count"},
    "steps": {"step", "time_us", "span_us"},
}  # fmt: skip


def result(**more: Any) -> dict[str, Any]:
    return to_dict(llama(2, unattributed_us={"no launch found": 4.0}, series={"mm": (1.5, None)}, **more))


@pytest.mark.parametrize("part", SCHEMA)
def test_has_every_key_of_the_schema(part: str) -> None:
    data: Any = result()[part] if part else result()
    for row in data if isinstance(data, list) else [data]:
        assert SCHEMA[part] <= row.keys()


def test_times_are_microseconds_with_three_decimals() -> None:
    analysis = llama(1)
    analysis = replace(analysis, time=replace(analysis.time, total_ns=1_234_567_890_123, busy_ns=None))
    data = to_dict(analysis)
    assert data["time"]["total_us"] == 1_234_567_890.123
    assert '"total_us": 1234567890.123' in json.dumps(data)
    assert data["time"]["busy_us"] is None


def test_self_times_and_the_unattributed_are_the_total() -> None:
    data = result()
    own = sum(row["self_time_us"] for row in data["layers"])
    assert round(own + data["time"]["unattributed_us"], 3) == data["time"]["total_us"]


def test_comes_back_as_it_was_without_its_calls() -> None:
    analysis = llama(3, unattributed_us={"no launch found": 4.0}, series={"mm": (1.5, None)})
    summary: dict[str, Any] = {"verdict": None, "findings": [], "comparable": {}}
    assert from_dict(to_dict(analysis)) == replace(analysis, calls=(), summary=summary)


def test_comes_back_through_a_file() -> None:
    data = result()
    assert to_dict(from_dict(json.loads(json.dumps(data, allow_nan=False)))) == data


@given(st.integers(0, 10**15))
def test_no_nanosecond_is_lost(time_ns: int) -> None:
    analysis = llama(1, steps=1)
    analysis = replace(analysis, time=replace(analysis.time, total_ns=time_ns))
    assert from_dict(json.loads(json.dumps(to_dict(analysis)))).time.total_ns == time_ns


def test_what_json_cannot_say() -> None:
    odd = {
        "nan": math.nan, "inf": [math.inf, -math.inf], "numpy": np.float32(0.5), "count": np.int64(3), "set": {2, 1},
        "tuple": (1, (2,)), 5: "number as key", "path": __import__("pathlib").PurePosixPath("/a"), "lone": "\ud800",
        "none": None, "yes": np.bool_(True),
    }  # fmt: skip
    data = to_dict(llama(1, memory=True, run=odd))
    text = json.dumps(data, allow_nan=False, ensure_ascii=False).encode()  # strictly JSON, strictly UTF-8
    run = json.loads(text)["run"]
    assert run == {
        "timed_steps": [2, 3, 4], "full_steps": [], "nan": None, "inf": [None, None], "numpy": 0.5, "count": 3,
        "set": [1, 2], "tuple": [1, [2]], "5": "number as key", "path": "/a", "lone": "\\ud800", "none": None,
        "yes": True,
    }  # fmt: skip


def test_surrogates_in_names_are_escaped() -> None:
    data = to_dict(analysis_of([Layer("a\ud800", "C\udfff", self_us={"forward": 1.0})], warnings=("\ud800",)))
    json.dumps(data, ensure_ascii=False).encode()
    assert from_dict(data).layers[0].layer == "a\\ud800"


def test_unknown_keys_are_ignored() -> None:
    data = result()
    data["later"] = 1
    data["schema_version"] = 7
    data["layers"][0]["later"] = [1]
    data["time"]["later"] = 2.5
    assert from_dict(data) == from_dict(result())


def test_missing_keys_are_not_known() -> None:
    data: dict[str, Any] = {
        "schema_version": 1,
        "time_basis": "cpu",
        "time": {"total_us": 1.5, "unattributed_us": 0.5},
        "layers": [{"layer": "m", "phase": "forward", "self_time_us": 1.0, "time_us": 1.0}],
    }
    analysis = from_dict(data)
    row = analysis.layers[0]
    assert (row.time_ns, row.calls, row.peak_bytes, row.kind, row.shared) == (1000, None, None, "", False)
    assert analysis.time.attributed_ns == 1000
    assert analysis.time.busy_ns is None
    assert not analysis.complete
    assert (analysis.steps, analysis.series, analysis.memory) == ((), {}, {})


def test_every_layer_field_is_written() -> None:
    names = {field.name.replace("_ns", "_us") for field in fields(LayerRow)}
    assert set(result()["layers"][0]) == names | {"bound"}


def test_the_share_of_the_peak_comes_back() -> None:
    analysis = worked(llama(2))
    data = json.loads(json.dumps(to_dict(analysis)))
    written = data["utilization"]
    assert written["step_time_us"] == 5000.0
    assert written["mfu"] == pytest.approx((2 * 200 + 60) * 3 / 5000)  # GFLOP of 5000
    assert written["peaks"] == {
        "device": "NVIDIA H200",
        "flops_per_s": {"bfloat16": 1e15},
        "bandwidth_bytes_per_s": 4e12,
        "source": "a document of the maker",
    }
    head = next(row for row in data["layers"] if (row["layer"], row["phase"]) == ("lm_head", "forward"))
    assert (head["bytes_moved_per_step"], head["roof_time_per_step_us"], head["bound"]) == (4 * 10**8, 100.0, "memory")
    assert from_dict(data).utilization == analysis.utilization
    assert from_dict(data).layers == analysis.layers
    assert to_dict(llama(2))["utilization"] is None


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"schema_version": "1"},
        {"schema_version": True},
        {"schema_version": 0},
        {"schema_version": 1},
        {"schema_version": 1, "time": {}, "time_basis": "device"},
        {"schema_version": 1, "time": {"total_us": "x", "unattributed_us": 0}, "time_basis": "device"},
        {"schema_version": 1, "time": {"total_us": math.nan, "unattributed_us": 0}, "time_basis": "device"},
        {"schema_version": 1, "time": {"total_us": 1, "unattributed_us": 0}, "time_basis": "moon"},
        {"schema_version": 1, "time": {"total_us": 1, "unattributed_us": 0}, "time_basis": "cpu", "layers": [1]},
        {"schema_version": 1, "time": {"total_us": 1, "unattributed_us": 0}, "time_basis": "cpu", "layers": [{}]},
        {"schema_version": 1, "time": {"total_us": 1, "unattributed_us": 0}, "time_basis": "cpu", "run": [1]},
        to_dict(llama(1)) | {"summary": {"findings": {"id": 1}}},
        to_dict(llama(1)) | {"summary": {"findings": [1]}},
        to_dict(llama(1)) | {"summary": {"comparable": [1]}},
        to_dict(llama(1)) | {"summary": {"comparable": {"coverage": "all"}}},
    ],
)
def test_what_is_no_result_is_refused(data: Any) -> None:
    with pytest.raises(BrokenTrace):
        from_dict(data)
