"""The JSON Schema that ships with the package: every result is valid under it, and every key of one is described."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import make_result_schema
from profiler_wrapper import ProfilerWrapper, demo
from profiler_wrapper.__main__ import main
from profiler_wrapper.reports.result_json import schema_text, to_dict
from profiler_wrapper.result import ProfileResult, load
from profiler_wrapper.tables.model import Analysis
from recordings import Trace, analyse
from sample_results import llama
from sample_work import worked
from shared_traces import TRACES

SCHEMA: dict[str, Any] = json.loads(schema_text())
VALIDATOR = Draft202012Validator(SCHEMA)
TINY = demo.DemoConfig(layers=2, hidden=32, heads=2, key_value_heads=1, intermediate=64, vocabulary=64, tokens=8)


def described_only(schema: Any) -> Any:
    """The schema with every key forbidden that it does not describe."""
    if isinstance(schema, list):
        return [described_only(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: described_only(value) for key, value in schema.items()}
    return strict | ({"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {})


STRICT = Draft202012Validator(described_only(SCHEMA))


def errors(data: Any, validator: Draft202012Validator = VALIDATOR) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in validator.iter_errors(data)]


def check(analysis: Analysis) -> None:
    """Valid as JSON brings it, and nothing in it is without a description."""
    data = json.loads(json.dumps(to_dict(analysis), allow_nan=False))
    assert errors(data) == []
    assert errors(data, STRICT) == []


def test_it_is_a_schema_and_as_the_rows_are_now() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert make_result_schema.build_schema() == SCHEMA, "run `python tests/make_result_schema.py`"


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["analyze", "--schema"])
    assert exit_.value.code == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def _properties(schema: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties":
                yield from ((f"{place}.{name}", inner) for name, inner in value.items())
            yield from _properties(value, f"{place}.{key}")


def test_every_key_is_described_with_its_unit() -> None:
    found = dict(_properties(SCHEMA))
    assert len(found) > 250
    assert [place for place, schema in found.items() if not schema.get("description")] == []
    times = {place: schema for place, schema in found.items() if place.endswith("_us")}
    assert [place for place, schema in times.items() if "microseconds" not in schema["description"]] == []
    assert {"time_us", "self_time_us"} <= {place.rpartition(".")[2] for place in times}


def test_what_is_a_sum_over_the_steps_says_so() -> None:
    """In a training of two like steps, a key that says it is a sum is twice that of one step; no other time is."""
    one, two = (to_dict(worked(llama(2, steps=steps))) for steps in (1, 2))
    row, both = one["layers"][0], two["layers"][0]
    described = SCHEMA["$defs"]["LayerRow"]["properties"]
    summed = {key for key in described if "divide by len(run.timed_steps)" in described[key]["description"]}
    assert {"time_us", "self_time_us", "cpu_time_us", "calls"} <= summed
    for key in summed:
        if row[key]:
            assert both[key] == pytest.approx(2 * row[key], rel=0.05), key
    for key in ("flops_per_step", "roof_time_per_step_us"):
        assert key not in summed
        assert both[key] == pytest.approx(row[key])


def test_the_span_on_the_cpu_is_not_called_what_a_step_takes() -> None:
    text = SCHEMA["$defs"]["StepRow"]["properties"]["span_us"]["description"]
    assert "CPU alone" in text
    assert "overview.steps" in text


def _odd_names() -> Analysis:
    odd = Trace().mark(".", 0, 9000).mark("</script>\ud800\n=cmd", 10, 8000).op("aten::mm", 20, 80)
    return analyse(odd.recording())


HAND_MADE: dict[str, Callable[[], Analysis]] = {
    "training": lambda: llama(2),
    "worked": lambda: worked(llama(2, recompute=True, odd=1)),
    "inference": lambda: llama(1, phases=("prefill", "decode"), steps=1),
    "without memory": lambda: llama(2, memory=False, steps=1),
    "unattributed": lambda: llama(1, unattributed_us={"launched before the trace": 30.0}),
    "odd names": _odd_names,
    "nothing known": lambda: replace(llama(1), run={}, memory={}, series={"a": (None, 1.5)}, summary={}),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_results_are_valid(name: str) -> None:
    check(HAND_MADE[name]())


def test_a_training_and_its_file_are_valid(tmp_path: Path) -> None:
    model = demo.DemoLlama(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    with ProfilerWrapper(model, output_dir=tmp_path, files=("result",), enable_print_summary=False) as prof:
        for step in range(6):
            model(demo.sequences(TINY, step, torch.device("cpu"))).backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    assert prof.result is not None
    assert prof.result.memory["peak"] is not None
    assert prof.result.flops
    check(prof.result)
    (path,) = tmp_path.rglob("result.json")
    assert errors(json.loads(path.read_bytes()), STRICT) == []


def test_a_generation_is_valid(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=64,
        eos_token_id=None,  # random weights: nothing ends a text but its length
    )
    model = LlamaForCausalLM(config)
    with ProfilerWrapper(
        model, output_dir=tmp_path, files=("result",), enable_print_summary=False, steps="all"
    ) as prof:
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, do_sample=False)
    assert prof.result is not None
    assert {row.phase for row in prof.result.layers} >= {"prefill", "decode"}
    check(prof.result)


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name)
def test_results_of_recorded_traces_are_valid(path: Path) -> None:
    result = load(path)
    assert isinstance(result, ProfileResult)
    check(result)


def test_keys_of_later_versions_are_allowed_everywhere() -> None:
    data = to_dict(worked(llama(2)))
    for place in (data, data["layers"][0], data["time"], data["summary"], data["run"], data["memory"]):
        place["later"] = {"anything": [1, "a", None]}
    assert errors(data) == []
    assert len(errors(data, STRICT)) >= 6
    data["schema_version"] = 2
    assert errors(data) == []


WRONG: dict[str, tuple[list[Any], Any]] = {
    "a time as text": (["time", "total_us"], "12"),
    "no time": (["layers", 0, "time_us"], None),
    "a phase that is none": (["layers", 0, "phase"], "sideways"),
    "a version before the first": (["schema_version"], 0),
    "a number for a name": (["layers", 0, "layer"], 3),
    "half a call": (["layers", 0, "calls"], 1.5),
    "a basis that is none": (["time_basis"], "gpu"),
    "a warning that is no text": (["warnings"], [1]),
    "findings that are no list": (["summary", "findings"], {}),
    "a sure finding": (["summary", "findings"], [{"id": "a", "confidence": "sure"}]),
    "a series of texts": (["series"], {"a": ["1"]}),
    "one row for a list": (["attention"], {"layer": "a"}),
    "a verdict that is a number": (["summary", "verdict"], 1),
    "bytes by halves": (["memory", "allocated_bytes"], 0.5),
    "a category that is none": (["memory", "categories"], {"cats": 1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_not_valid(name: str) -> None:
    data = copy.deepcopy(to_dict(worked(llama(2))))
    assert errors(data) == []
    (*way, last), value = WRONG[name]
    place: Any = data
    for key in way:
        place = place[key]
    place[last] = value
    assert len(errors(data)) >= 1


@pytest.mark.parametrize("key", ["layers", "time", "summary", "schema_version", "steps"])
def test_what_is_missing_is_not_valid(key: str) -> None:
    data = to_dict(llama(1))
    del data[key]
    assert errors(data) == [f": {key!r} is a required property"]
