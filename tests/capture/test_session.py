"""One session of torch.profiler, and the watch for other ones."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

import models
from profiler_wrapper.capture.session import (
    Annotation,
    Session,
    SessionLost,
    core_waits_ns,
    ends_whole,
    machine_activities,
    safe_name,
)
from profiler_wrapper.capture.torch_state import Watch, profiler_is_on, profiler_is_waiting
from profiling import event_names, profiler, result_of

_CORE_WAITS_NS = core_waits_ns  # which no other test asks
CPU = torch.profiler.ProfilerActivity.CPU


def new_session(**options: bool) -> Session:
    return Session(activities=[CPU], **options)


def test_a_session_records_between_start_and_stop(tmp_path: Path) -> None:
    session = new_session()
    torch.ones(2) * 2
    session.start()
    session.begin_step(7)
    torch.ones(2) + 1
    session.begin_step(8)
    torch.ones(2) - 1
    session.stop()
    torch.ones(2) / 2
    session.stop()
    session.export(tmp_path / "trace.json")
    assert event_names(tmp_path / "trace.json", "user_annotation") == ["ProfilerStep#7", "ProfilerStep#8"]
    ops = event_names(tmp_path / "trace.json", "cpu_op")
    assert [op for op in ops if op in ("aten::mul", "aten::add", "aten::sub", "aten::div")] == [
        "aten::add",
        "aten::sub",
    ]
    assert session.problem is None
    assert not profiler_is_on()


@pytest.mark.parametrize("shapes", [True, False])
def test_the_flags_of_a_session(tmp_path: Path, shapes: bool) -> None:
    session = new_session(record_shapes=shapes, profile_memory=not shapes)
    session.start()
    torch.ones(2) + 1
    session.stop()
    session.export(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert ("Input Dims" in text) == shapes
    assert ("[memory]" in text) == (not shapes)


def test_two_sessions_one_after_another_lose_nothing(tmp_path: Path) -> None:
    for number in range(2):
        session = new_session()
        session.start()
        torch.ones(2) + 1
        session.stop()
        session.export(tmp_path / f"{number}.json")
        assert event_names(tmp_path / f"{number}.json", "cpu_op").count("aten::add") == 1


def test_what_another_profiler_ended_is_lost_and_does_not_crash(tmp_path: Path) -> None:
    session = new_session()
    session.start()
    with torch.profiler.profile(activities=[CPU]):
        pass
    with pytest.raises(SessionLost, match="another profiler ended it"):
        session.stop()
    with pytest.raises(SessionLost):
        session.export(tmp_path / "trace.json")
    session.close()


def test_a_session_belongs_to_its_thread() -> None:
    session = new_session()
    session.start()
    caught: list[BaseException] = []

    def stop() -> None:
        try:
            session.stop()
        except SessionLost as lost:
            caught.append(lost)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert "another thread" in str(caught[0])
    session.close()
    torch.autograd._disable_profiler()  # type: ignore[attr-defined]


def test_an_export_that_is_cut_short_is_noticed(tmp_path: Path) -> None:
    session = new_session()
    session.start()
    session.stop()
    with pytest.raises(SessionLost, match="not written to its end"):
        session.export(tmp_path / "missing" / "trace.json")
    (tmp_path / "whole.json").write_text('{"traceEvents": []}\n')
    (tmp_path / "cut.json").write_text('{"traceEvents": [{"na')
    assert ends_whole(tmp_path / "whole.json")
    assert not ends_whole(tmp_path / "cut.json")
    assert not ends_whole(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("spatial block", "spatial block"),
        ('a "quoted" name', "a 'quoted' name"),
        ("back\\slash\nnewline\ttab", "back/slash newline tab"),
        ("nul\0 emoji\U0001f600 surrogate\ud800", "nul<U+0000> emoji<U+1F600> surrogate<U+D800>"),
        ("", "(no name)"),
    ],
)
def test_any_name_survives_the_export(name: str, safe: str, tmp_path: Path) -> None:
    assert safe_name(name) == safe
    session = new_session()
    session.start()
    annotation = Annotation(name).begin()
    annotation.end()
    annotation.end()
    session.stop()
    session.export(tmp_path / "trace.json")
    assert event_names(tmp_path / "trace.json", "user_annotation") == [safe]


def test_a_quote_in_somebody_elses_name_is_exported_right_or_said(tmp_path: Path) -> None:
    session = new_session()
    session.start()
    with torch.profiler.record_function('their "name"'):
        torch.ones(2) + 1
    session.stop()
    session.export(tmp_path / "trace.json")
    if session.problem is None:
        written = event_names(tmp_path / "trace.json", "user_annotation")
        assert set(written) & {'their "name"', "their 'name'"}  # torch 2.15 writes another quote
    else:
        assert "quote" in session.problem


def test_a_megabyte_of_a_name_is_cut() -> None:
    assert len(safe_name("x" * 1_000_000)) == 1000


def test_the_machine_has_a_cpu() -> None:
    assert CPU in machine_activities()


def test_the_watch_sees_another_profiler_before_it_takes_over(tmp_path: Path) -> None:
    session = new_session()
    session.start()
    seen: list[bool] = []

    def end_ours() -> None:
        seen.append(profiler_is_on())
        session.stop()

    before = vars(torch.autograd.profiler.profile)["_prepare_trace"]
    watch = Watch(is_another=session.is_taken_by, before_another=end_ours)
    watch.install()
    torch.ones(2) + 1
    with torch.profiler.profile(activities=[CPU]) as theirs:
        torch.ones(2) - 1
    watch.remove()
    assert seen == [True]
    assert vars(torch.autograd.profiler.profile)["_prepare_trace"] is before
    session.export(tmp_path / "ours.json")
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    assert event_names(tmp_path / "ours.json", "cpu_op").count("aten::add") == 1
    assert event_names(tmp_path / "theirs.json", "cpu_op").count("aten::sub") == 1


def test_a_profiler_in_its_warm_up_is_noticed() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(activities=[CPU], schedule=schedule) as theirs:
        assert not profiler_is_waiting()
        theirs.step()
        assert profiler_is_waiting()
        assert not profiler_is_on()
        theirs.step()
        assert profiler_is_on()
    assert not profiler_is_waiting()


def test_scopes_that_are_open_end_with_the_session(tmp_path: Path) -> None:
    """Else torch writes their end into what it has freed."""
    before = torch.profiler.record_function("before")
    outer, inner, closed = (torch.profiler.record_function(name) for name in ("outer", "inner", "closed"))
    original = torch.profiler.record_function.__enter__
    session, following = new_session(), new_session()
    with before:
        session.start()
        with closed:
            outer.__enter__()
            inner.__enter__()
            torch.ones(2) + 1
        session.begin_step(0)
        session.stop()
    assert torch.profiler.record_function.__enter__ is original
    following.start()
    inner.__exit__(None, None, None)
    torch.ones(2) + 1
    outer.__exit__(None, None, None)
    following.stop()
    for one, expected in ((session, {"closed", "outer", "inner", "ProfilerStep#0"}), (following, set[str]())):
        one.export(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        ends = {e["name"]: e["ts"] + e["dur"] for e in events if e.get("cat") == "user_annotation"}
        assert set(ends) == expected
        if expected:
            assert ends["closed"] <= ends["ProfilerStep#0"] <= ends["inner"] <= ends["outer"]


def test_torchscript_compiles_a_scope_while_a_session_watches_it() -> None:
    def scoped(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function("scoped"):
            return x + 1

    session = new_session()
    session.start()
    try:
        assert torch.jit.script(scoped)(torch.ones(1)).item() == 2
    finally:
        session.stop()


@pytest.mark.parametrize(("per_mille", "told"), [(150, False), (250, True)])
def test_a_thread_that_waits_for_a_core_over_a_fifth_of_the_timed_steps_is_told_once(
    per_mille: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of waits runs at a part of that of time; of two threads the one that waits longer counts."""
    monkeypatch.setattr(
        "profiler_wrapper.capture.session.core_waits_ns",
        lambda: {"first": time.monotonic_ns() // 100, "second": time.monotonic_ns() * per_mille // 1000},
    )
    case = models.build("llama", layers=1, hidden=16)
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=5)
    warnings = [one for one in result_of(prof).warnings if "waited for a CPU core" in one]
    assert len(warnings) == told
    assert all("25 % of the timed steps" in one and "OMP_NUM_THREADS" in one for one in warnings)
    assert result_of(prof).run["overloaded"] is told


def test_how_long_threads_waited_for_a_core_is_what_linux_tells() -> None:
    here = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not here.is_file():
        pytest.skip("the system does not tell")
    assert str(here) in _CORE_WAITS_NS()
