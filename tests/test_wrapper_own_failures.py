"""What of ours fails is one warning and an artefact marked incomplete."""

from __future__ import annotations

import io
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.capture import scopes, session
from profiling import directory_of, profiler, result_of
from programs import run_script
from torch_versions import TORCH, since_torch
from unchanged import fails, nothing_left

NEVER_STARTED = since_torch(2, 11, "after a profiler that was prepared and never started none can be")


# --- failures of ours ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "where"),
    [
        pytest.param(session.Session, "start", marks=NEVER_STARTED),
        (session.Session, "begin_step"),
        (session.Session, "end_step"),
        (session.Session, "export"),
        (session._KinetoProfile, "stop_trace"),
        (session._KinetoProfile, "prepare_trace"),
        pytest.param(session._KinetoProfile, "start_trace", marks=NEVER_STARTED),
        (session._KinetoProfile, "export_chrome_trace"),
    ],
)
def test_what_of_ours_fails_is_one_warning(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, where: str
) -> None:
    monkeypatch.setattr(owner, where, fails)
    with nothing_left(case), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with profiler(case, tmp_path) as prof:
            losses = models.train(case, steps=8)
        assert len(losses) == 8
    ours = [warning for warning in said if warning.category is pw.ProfilerWrapperWarning]
    assert len(ours) == 1
    assert "ours" in str(ours[0].message)
    assert prof.result is None or not prof.result.complete


@pytest.mark.parametrize("ends", [lambda prof: None, pw.ProfilerWrapper.step, pw.ProfilerWrapper.leave])
def test_our_hooks_go_without_a_trace_though_the_user_has_some_of_the_same_kind(
    case: Case, tmp_path: Path, ends: Callable[[pw.ProfilerWrapper], None]
) -> None:
    """torch raises in the user's step where a hook is removed while it goes through them."""
    with nothing_left(case):
        with profiler(case, tmp_path, steps="0-1") as prof:
            theirs = [
                register(lambda *_, act=act: act(prof))
                for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
                for act in (ends, lambda prof: None)
            ]
            assert len(models.train(case, steps=4)) == 4
        for hook in theirs:
            hook.remove()
    assert result_of(prof).complete


def test_a_name_in_sys_path_that_is_no_utf8(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's tracer of stacks, which starts once in a process, cannot read such a one."""
    monkeypatch.setattr(scopes, "_seen_by_tracer", False)
    monkeypatch.setattr(sys, "path", [*sys.path, "/caf\udce9"])
    with nothing_left(case), profiler(case, tmp_path, steps="0") as prof:
        models.train(case, steps=2)
    assert result_of(prof).complete


def test_a_report_that_fails_takes_no_other_with_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiler_wrapper.run.files.splice_lanes", fails)
    with pytest.warns(pw.ProfilerWrapperWarning, match="lanes"), profiler(case, tmp_path) as prof:
        models.train(case, steps=1)
    assert (directory_of(prof) / "profile_trace.json").is_file()
    assert (directory_of(prof) / "result.json").is_file()
    assert json.loads((directory_of(prof) / "run.json").read_text())["complete"] is False


def test_an_analysis_that_fails_keeps_the_trace(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler_wrapper.run.window.tables", fails)
    with pytest.warns(pw.ProfilerWrapperWarning, match="could not be analysed"), profiler(case, tmp_path) as prof:
        models.train(case, steps=6)
    assert prof.result is None
    assert {path.name for path in directory_of(prof).iterdir()} == {
        "profile_trace.json",
        "profile_full_trace.json",
        "run.json",
    }
    assert json.loads((directory_of(prof) / "run.json").read_text())["complete"] is False


@pytest.mark.parametrize("stderr", ["there", "closed", "none"])
@pytest.mark.parametrize("warnings_are", ["errors", "refused", "printed"])
def test_a_warning_that_cannot_be_printed_does_not_reach_the_loop(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_are: str, stderr: str
) -> None:
    monkeypatch.setattr(session.Session, "start", fails)
    written = io.BytesIO()
    printed = None if stderr == "none" else io.TextIOWrapper(written, encoding="ascii")
    if printed is not None and stderr == "closed":
        printed.close()
    monkeypatch.setattr("sys.stderr", printed)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if warnings_are == "errors" else "always", pw.ProfilerWrapperWarning)
        show = partial(print, file=printed, flush=True)
        warnings.showwarning = fails if warnings_are == "refused" else show  # type: ignore[assignment]
        with profiler(case, tmp_path):
            assert len(models.train(case, steps=3)) == 3
    if stderr == "there":
        assert b"profiling ended, because starting the profile failed" in written.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("stdout", [None, "closed", "broken"])
def test_a_table_that_cannot_be_printed_costs_nothing_else(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: str | None
) -> None:
    printed = io.StringIO() if stdout else None
    if printed is not None:
        printed.close()
        if stdout == "broken":
            printed = io.StringIO()
            monkeypatch.setattr(printed, "write", fails)
    monkeypatch.setattr("sys.stdout", printed)
    with profiler(case, tmp_path, steps="1,3", enable_print_summary=True, files=("result", "log")) as prof:
        models.train(case, steps=5)
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [3]]
    for directory in (directory_of(prof), directory_of(prof) / "steps_3-3"):
        assert json.loads((directory / "run.json").read_text())["complete"] is True
        assert (directory / "profile_rank_0.log").is_file() and (directory / "result.json").is_file()


@pytest.mark.full
def test_nothing_that_torch_prints_gets_into_our_files_where_stderr_is_closed(tmp_path: Path) -> None:
    program = """
        import os, sys, torch
        import profiler_wrapper as pw

        os.close(2)
        model, output_dir = torch.nn.Linear(4, 4), sys.argv[1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            pw.ProfilerWrapper(model, output_dir=output_dir, run_name="run", steps="1,4", files="result") as profiler,
            pw.LayerTimer(model, output_dir=output_dir, run_name="timer") as timer,
            pw.TrainingMonitor(output_dir + "/monitor", model=model) as monitor,
        ):
            for number in range(9):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                timer.step()
                monitor.log_step(number)
                try:
                    os.write(2, b"a warning of torch's C++")
                except OSError:
                    pass
        sys.stdout.write(f"{len(profiler.results)} results")
    """
    assert run_script(program, tmp_path).endswith("2 results")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run", "monitor", "timer"} <= {path.relative_to(tmp_path).parts[0] for path in written}
    assert [path for path in written if b"a warning of torch" in path.read_bytes()] == []


@pytest.mark.full
def test_what_fails_later_takes_nothing_back(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(pw.ProfilerWrapperWarning, match="ours"), profiler(case, tmp_path, steps="1,5") as prof:
        models.train(case, steps=4)
        monkeypatch.setattr(session.Session, "export", fails)
        models.train(case, steps=5)
    assert result_of(prof).run["timed_steps"] == [1]
    assert json.loads((directory_of(prof) / "run.json").read_text())["complete"] is True


@pytest.mark.full
def test_a_directory_that_cannot_be_used_costs_the_files_only(case: Case, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with (
        pytest.warns(pw.ProfilerWrapperWarning, match="cannot be used") as said,
        profiler(case, tmp_path / "taken") as prof,
    ):
        models.train(case, steps=6)
    assert len(said) == 1
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]
    assert prof.directory is None


@pytest.mark.full
def test_a_directory_that_vanishes_meanwhile(case: Case, tmp_path: Path) -> None:

    with nothing_left(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profiler(case, tmp_path) as prof:
            models.train(case, steps=3)
            shutil.rmtree(tmp_path)
            models.train(case, steps=3)
    assert prof.result is None or not prof.result.complete or prof.result.run["timed_steps"]


def test_an_export_that_the_disk_cut_leaves_nothing_behind(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: object, path: str, **options: bool) -> None:
        Path(f"{path}.tmp").write_text('{"traceEvents": [')

    monkeypatch.setattr(session._KinetoProfile, "export_chrome_trace", cut)
    with pytest.warns(pw.ProfilerWrapperWarning, match="is the disk full"), profiler(case, tmp_path):
        models.train(case, steps=3)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run.json"]


@since_torch(2, 11, "there is no exporter in Python")
def test_a_quote_in_an_annotation_costs_the_allocations_and_that_is_said(case: Case, tmp_path: Path) -> None:
    if TORCH >= (2, 15):
        pytest.skip(f"torch {torch.__version__} writes another quote, and all is there")
    with profiler(case, tmp_path) as prof, torch.profiler.record_function('a "quoted" name'):
        models.train(case, steps=1)
    assert any("has a quote in its name" in warning for warning in result_of(prof).warnings)
