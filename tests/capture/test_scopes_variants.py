"""The same layers come out of a model however it is wrapped; the marks of a real run say so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import variants
from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.trace.marks import Mark, parse_mark

pytestmark = pytest.mark.full

# Compiled blocks hide what is in them.
INSIDE_COMPILED = {"compiled_blocks", "compiled_in_place"}
CHECKPOINTED = {"checkpoint_wrapped", "gradient_checkpointing", "gradient_checkpointing_reentrant"}


def record(model: object, run: Any, folder: Path) -> tuple[LayerScopes, list[dict[str, Any]]]:
    """The scopes, and the complete events of a trace of `run`, in order."""
    scopes = LayerScopes(model)
    scopes.attach()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    scopes.detach()
    assert scopes.warnings == []
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return scopes, sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])


def marks_in(events: list[dict[str, Any]]) -> list[Mark]:
    return [mark for event in events if (mark := parse_mark(event["name"]))]


def rows(scopes: LayerScopes) -> list[tuple[str, ...]]:
    return [(row["path"], row["class_name"], row["kind"]) for row in scopes.describe()]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("variant", [name for name in variants.VARIANTS if name != "plain"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_and_calls_are_those_of_the_plain_model(name: str, variant: str, tmp_path: Path) -> None:
    case = models.build(name)
    plain, events = record(case.model, lambda: models.train(case, steps=1), tmp_path)
    plain_calls = Counter(mark.path for mark in marks_in(events))

    case = models.build(name)
    if variant in INSIDE_COMPILED:
        model = getattr(variants, variant)(case, backend="eager")
    else:
        model = variants.VARIANTS[variant](case)
    wrapped, events = record(model, lambda: models.train(case, steps=1, model=model), tmp_path)

    known = {row["path"] for row in plain.describe()}  # an adapter has rows of its own beside them
    assert [row for row in rows(wrapped) if row[0] in known] == rows(plain)
    assert variant == "lora" or len(rows(wrapped)) == len(known)
    calls = Counter(mark.path for mark in marks_in(events) if mark.path in known)
    blocks = tuple(row["path"] for row in wrapped.describe() if row["kind"] == "block")
    if variant in INSIDE_COMPILED:
        inside = {path for path in plain_calls if path.startswith(blocks)} - set(blocks)
        plain_calls = Counter({path: n for path, n in plain_calls.items() if path not in inside})
    if variant in CHECKPOINTED:  # what is in a block runs again in backward
        again = {path for path in plain_calls if path.startswith(blocks)}
        assert all(calls[path] == 2 for path in again - set(blocks))
        calls = Counter({path: 1 if path in again else n for path, n in calls.items()})
    assert calls == plain_calls


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "mixtral", "qwen2", "cogvideox"])
def test_real_models_have_blocks_attention_and_mlp(name: str) -> None:
    case = models.build(name)
    scopes = LayerScopes(case.model)
    scopes.attach()
    scopes.detach()
    kinds = Counter(row["kind"] for row in scopes.describe() if row["path"].startswith(f"{case.blocks}."))
    assert kinds["block"] == kinds["attention"] == len(variants.blocks_of(case))
    assert kinds["mlp"] >= kinds["block"]


@pytest.mark.usefixtures("process_group")
def test_an_all_gather_lies_in_the_block_it_is_for(tmp_path: Path) -> None:
    case = models.build("llama")
    model = variants.fsdp2(case)
    _, events = record(model, lambda: models.train(case, steps=1, model=model), tmp_path)
    blocks = {mark.path: event for event in events if (mark := parse_mark(event["name"])) and mark.kind == "block"}
    gathers = {event["name"]: event for event in events if event["name"].startswith("FSDP::pre_forward")}
    assert len(blocks) == 2
    for path, block in blocks.items():
        inside = [name for name, gather in gathers.items() if path in name and _lies_in(gather, block)]
        assert inside, (path, list(gathers))


def _lies_in(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def test_generation_marks_prefill_and_decode(tmp_path: Path) -> None:
    case = models.build("llama")
    options = {"max_new_tokens": 4, "use_cache": True, "do_sample": False, "pad_token_id": 0}
    prompt = torch.ones(1, 5, dtype=torch.long)
    _, events = record(case.model, lambda: case.model.generate(prompt, **options), tmp_path)
    assert [mark.flags for mark in marks_in(events) if mark.path == "."] == [("prefill",), *[("decode",)] * 3]


def test_a_pipeline_of_named_parts(tmp_path: Path) -> None:
    class Pipeline:
        components = {"vae": nn.Sequential(nn.Conv2d(1, 1, 1), nn.SiLU()), "scheduler": None}  # noqa: RUF012

    pipeline = Pipeline()
    _, events = record(pipeline, lambda: pipeline.components["vae"](torch.ones(1, 1, 2, 2)), tmp_path)
    assert [(mark.root, mark.path) for mark in marks_in(events)] == [("vae", "."), ("vae", "vae.0"), ("vae", "vae.1")]
