"""Results: what `load` finds in files and directories, and what a result answers."""

from __future__ import annotations

import gzip
import json
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.errors import BrokenTrace, EmptyRecording, ProfilerWrapperWarning, UnknownLayer, WrongUse
from profiler_wrapper.result import ProfileResult, analyse_trace, as_result, load
from recordings import Trace, analyse
from unchanged import fails


def trace(own_ns: int = 50) -> Trace:
    return Trace().mark(".", 0, 9000).mark("layers.0", 1000, 8000).op("aten::mm", 2000, 2000 + own_ns)


def time_of(path: Path) -> int:
    return load(path).time.total_ns


def test_load_gives_what_analyse_gives(tmp_path: Path) -> None:
    found = load(trace().write(tmp_path / "any.json"))
    assert isinstance(found, ProfileResult)
    assert found.layers == analyse(trace().recording()).layers
    assert {row.layer: row.self_time_ns for row in found.layers} == {"Net": 0, "layers.0": 50}


def test_a_gzipped_trace(tmp_path: Path) -> None:
    plain = trace().write(tmp_path / "plain.json")
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load(packed).layers == load(plain).layers


def test_what_may_not_fit_into_memory_is_said_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace().write(tmp_path / "any.json")
    monkeypatch.setattr("profiler_wrapper.result.free_bytes", lambda: path.stat().st_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path)
    monkeypatch.setattr("profiler_wrapper.result.free_bytes", lambda: path.stat().st_size - 1)
    with pytest.warns(ProfilerWrapperWarning, match=r"any.json: reading it may take up to .* are free"):
        load(path)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(b"x" * 1000))
    with pytest.warns(ProfilerWrapperWarning, match="may take up to"), pytest.raises(BrokenTrace):
        load(packed)  # said before anything is read


def test_the_description_beside_a_trace_is_used(tmp_path: Path) -> None:
    layers = [{"root": "Net#0", "path": "layers.0", "raw_name": "module.layers.0"}]
    (tmp_path / "run.json").write_text(json.dumps({"layers": layers, "rank": 3, "complete": False}))
    found = load(trace().write(tmp_path / "x_trace.json"))
    assert found.rows("layers.0")[0].raw_name == "module.layers.0"
    assert (found.run["rank"], found.complete) == (3, False)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    found = as_result(analyse(trace().recording()))
    (tmp_path / "result.json").write_text(json.dumps(found.to_dict()))
    again = load(tmp_path / "result.json")
    assert again.to_dict() == found.to_dict()
    assert again.time.total_ns == found.time.total_ns


def test_versions_of_drivers_are_numbers(tmp_path: Path) -> None:
    run = {"versions": {"cuda runtime": 12040, "torch": "2.13.0"}}
    found = analyse_trace(trace().write(tmp_path / "any.json"), run=run)
    (tmp_path / "result.json").write_text(json.dumps(found.to_dict()))
    assert load(tmp_path / "result.json").run["versions"] == run["versions"]


def test_what_a_trace_tells_of_versions_stays_beside_what_its_run_tells() -> None:
    told = replace(trace().recording(), metadata={"cuda_runtime_version": 12040, "cuda_driver_version": 12090})
    found = analyse(told, run={"versions": {"cuda": "12.8", "torch": "2.13.0"}})
    assert found.run["versions"] == {"cuda": "12.8", "cuda driver": 12090, "torch": "2.13.0"}


def test_views_are_made_when_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace(10).write(tmp_path / "x_trace.json")
    whole = load(path).to_dict()
    monkeypatch.setattr("profiler_wrapper.analyse.overview", fails)
    found = load(path)
    assert found.layers and found.steps is not None and found.time.total_ns == 10
    assert found.operators and found.overview is None
    failed = [warning for warning in found.warnings if warning.startswith("the overview is")]
    assert len(failed) == 1 and len(load(path).warnings) == len(found.warnings)
    monkeypatch.undo()
    assert pickle.loads(pickle.dumps(load(path))).to_dict() == whole


def test_a_directory_gives_its_result_before_its_trace(tmp_path: Path) -> None:
    trace(10).write(tmp_path / "x_trace.json")
    assert time_of(tmp_path) == 10
    (tmp_path / "result.json").write_text(json.dumps(as_result(analyse(trace(20).recording())).to_dict()))
    assert time_of(tmp_path) == 20


@pytest.mark.parametrize("asked", [{"peaks": 989}, {"process": 1}])
def test_with_peaks_or_a_process_a_directory_gives_its_trace(tmp_path: Path, asked: dict[str, Any]) -> None:
    trace(10).write(tmp_path / "x_trace.json")
    (tmp_path / "result.json").write_text(json.dumps(as_result(analyse(trace(20).recording())).to_dict()))
    assert load(tmp_path, **asked).time.total_ns == 10
    (tmp_path / "x_trace.json").unlink()
    with pytest.raises(WrongUse, match=f"{next(iter(asked))}= needs the trace"):
        load(tmp_path, **asked)


def test_a_directory_gives_the_timed_trace_before_the_one_with_shapes(tmp_path: Path) -> None:
    trace(10).write(tmp_path / "a_full_trace.json")
    trace(20).write(tmp_path / "b_trace.json")
    assert time_of(tmp_path) == 20


def test_a_run_gives_its_first_rank(tmp_path: Path) -> None:
    for rank in (10, 2):
        (tmp_path / f"rank{rank}_dp{rank}").mkdir()
        trace(rank).write(tmp_path / f"rank{rank}_dp{rank}" / "x_trace.json")
    assert time_of(tmp_path) == 2


def test_a_rank_is_asked_for_by_its_number(tmp_path: Path) -> None:
    for rank in (0, 3, 13):
        (tmp_path / f"rank{rank}_dp{rank}").mkdir()
        trace(10 + rank).write(tmp_path / f"rank{rank}_dp{rank}" / "x_trace.json")
    assert load(tmp_path, rank=3).time.total_ns == 13
    assert load(tmp_path / "rank13_dp13", rank=13).time.total_ns == 23
    with pytest.raises(WrongUse, match="nothing of rank 1 is in it; ranks: 0, 3, 13"):
        load(tmp_path, rank=1)
    with pytest.raises(WrongUse, match="is no directory"):
        load(tmp_path / "rank3_dp3" / "x_trace.json", rank=3)


def test_a_directory_without_any(tmp_path: Path) -> None:
    with pytest.raises(BrokenTrace, match=r"no result\.json and no trace in it"):
        load(tmp_path)


def test_a_run_of_timers_alone_says_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / "timers").mkdir()
    (tmp_path / "timers" / "timer_rank0.jsonl").write_text("")
    with pytest.raises(BrokenTrace, match="profiler-wrapper ranks"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", f'{{"schema_version": {10**400}}}'])
def test_a_broken_result_names_itself(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(BrokenTrace, match=r"result\.json"):
        load(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.json")


def test_a_trace_without_time(tmp_path: Path) -> None:
    with pytest.raises(EmptyRecording, match=r"empty\.json"):
        load(Trace().annotation("ProfilerStep#1", 0, 10).write(tmp_path / "empty.json"))


def test_rows_of_a_layer() -> None:
    found = as_result(analyse(trace().recording()))
    assert [row.phase for row in found.layer("layers.0")] == ["forward"]
    with pytest.raises(UnknownLayer) as caught:
        found.layer("layer.0")
    assert str(caught.value) == "no layer 'layer.0' among the 2 recorded.\nDid you mean 'layers.0'?"
    with pytest.raises(UnknownLayer) as caught:
        found.layer("something else entirely")
    assert "Did you mean" not in str(caught.value)


def test_a_result_prints_its_layers() -> None:
    found = as_result(analyse(trace().recording()))
    assert "layers.0" in str(found)
    assert max(map(len, str(found).splitlines())) <= 100
    assert str(found).isascii()
    assert "layers.0" in found.table()
    assert "layers.0" in found.table(order="model", rows=12, width=80)


def test_a_directory_of_several_runs_must_be_narrowed(tmp_path: Path) -> None:
    for run in ("a", "b"):
        Trace().op("aten::mm", 0, 5).write(_made(tmp_path / run / "rank0") / "x_trace.json")
    with pytest.raises(BrokenTrace, match="2 runs are in it; name one: a, b"):
        load(tmp_path)
    assert load(tmp_path / "a").time.total_ns == 5


def test_what_is_tracked_in_vain_has_no_number(tmp_path: Path) -> None:
    path = Trace().op("aten::mm", 0, 5).write(tmp_path / "x_trace.json")
    result = analyse_trace(path, track=["aten::nosuch"])
    assert result.series == {"aten::nosuch": (None,)}
    assert any("aten::nosuch" in warning for warning in result.warnings)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


@pytest.mark.parametrize("run", ['{"layers": 5}', '{"layers": [3]}', '{"compiled": [1]}', "[" * 100_000])
def test_a_description_of_something_else_names_itself(tmp_path: Path, run: str) -> None:
    trace().write(tmp_path / "x_trace.json")
    (tmp_path / "run.json").write_text(run)
    with pytest.raises(BrokenTrace, match=r"run\.json"):
        load(tmp_path / "x_trace.json")
