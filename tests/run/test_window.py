"""Finishing a window where this process cannot, and answers to an out-of-memory that must not cost anything."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

import models
import profiler_wrapper as pw
from profiler_wrapper import load
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.run import window
from profiler_wrapper.tables.views.overview import overview
from profiling import files_below

OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"


def train(
    directory: Path, name: str, *, steps: int = 5, error: Exception | None = None, **options: Any
) -> pw.ProfilerWrapper:
    """Profile a small Llama; `error` ends the block after its steps."""
    case = models.build("llama", layers=1, hidden=16)
    optimizer = models.optimizer_of(case.model)
    options = {"background": False, "enable_print_summary": False, **options}
    prof = pw.ProfilerWrapper(case.model, output_dir=directory, run_name=name, **options)
    with prof:
        for seed in range(steps):
            models.train_step(case, case.model, optimizer, seed=seed)
            prof.step()
        if error is not None:
            raise error
    return prof


def rows(result: pw.ProfileResult) -> set[tuple[str, str]]:
    return {(row.layer, row.phase) for row in result.layers}


@pytest.mark.full
def test_a_child_writes_and_gives_back_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = train(tmp_path, "here").result
    monkeypatch.setattr(window, "free_bytes_below_own_limit", lambda: 1)
    there = train(tmp_path, "there").result
    assert here is not None and there is not None and there.memory_use is not None
    again = load(tmp_path / "there" / "rank0" / "profile_trace.json")  # the same recording, analysed in this process
    assert again.layers == there.layers and len(again.calls) == len(there.calls) > 0
    assert files_below(tmp_path / "there") == files_below(tmp_path / "here")
    assert rows(load(tmp_path / "there")) == rows(there)
    assert json.loads((tmp_path / "there" / "rank0" / "run.json").read_text())["complete"] is True


def test_analysing_does_not_look_for_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = []

    def looks(*given: Any) -> Any:
        enabled.append(gc.isenabled())
        return overview(*given)

    monkeypatch.setattr("profiler_wrapper.analyse.overview", looks)
    train(tmp_path, "run", files=("trace", "result"))
    assert load(tmp_path / "run" / "rank0" / "profile_trace.json").overview is not None
    assert enabled == [False, False] and gc.isenabled()


def test_a_child_that_fails_costs_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "free_bytes_below_own_limit", lambda: 1)
    monkeypatch.setattr(window, "_CHILD", "raise SystemExit(3)")
    with pytest.warns(ProfilerWrapperWarning, match="could not be analysed .*ended with 3"):
        prof = train(tmp_path, "run")
    assert prof.result is None
    assert {"rank0/profile_trace.json", "rank0/profile_full_trace.json"} <= {*files_below(tmp_path / "run")}
    assert json.loads((tmp_path / "run" / "rank0" / "run.json").read_text())["complete"] is False
    assert load(tmp_path / "run").layers


def test_an_explanation_that_fails_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("profiler_wrapper.run.out_of_memory.out_of_memory_text", fails)
    with (
        pytest.raises(RuntimeError, match="4096 bytes"),
        pytest.warns(ProfilerWrapperWarning, match="could not be explained"),
    ):
        train(tmp_path, "run", steps=1, error=RuntimeError(OUT_OF_MEMORY), files=("trace", "result"))
    assert {"rank0/profile_trace.json", "rank0/result.json"} <= {*files_below(tmp_path / "run")}


def test_a_failure_is_explained_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = models.build("llama", layers=2, hidden=32)
    optimizer = models.optimizer_of(case.model)
    prof = pw.ProfilerWrapper(
        case.model, output_dir=tmp_path, run_name="run", files="result", enable_print_summary=False
    )
    for error in (RuntimeError(OUT_OF_MEMORY), None):
        try:
            with prof:
                models.train_step(case, case.model, optimizer, seed=0)
                if error is not None:
                    raise error
        except RuntimeError as raised:
            assert raised is error
    prof.leave()
    assert capfd.readouterr().err.count("profiler_wrapper: out of memory on cpu: requested 4.0 KiB") == 1


def test_an_exception_that_cannot_say_what_it_is_costs_no_result(tmp_path: Path) -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    case = models.build("llama", layers=1, hidden=32)
    prof = pw.ProfilerWrapper(
        case.model, output_dir=tmp_path, run_name="run", files="result", enable_print_summary=False
    )
    with pytest.raises(Mute), prof:
        models.train_step(case, case.model, models.optimizer_of(case.model), seed=0)
        raise Mute
    assert prof.result is not None
