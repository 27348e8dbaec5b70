"""Traces reduced by a pool: what a killed worker costs, what is made again, what fails alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from dying_workers import dies_of_deadly, raises, says_who_and_sleeps
from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.ranks import reduce as workers
from profiler_wrapper.ranks.load import load_ranks, open_ranks
from profiler_wrapper.ranks.reduce import Reduced, Task, read_summary, reduce_trace, reduce_traces
from programs import run_program
from rank_traces import reduced_here, write_trace


def task(trace: Path, folder: Path) -> Task:
    return Task(str(trace), str(trace.with_suffix(".parquet")), str(folder / f"{trace.stem}.parquet"))


def plain(reduced: Reduced) -> tuple[str, int | None, tuple[int, ...], str]:
    return Path(reduced.trace).name, reduced.rank, reduced.steps, reduced.failure


def is_made_anew(one: Task) -> bool:
    """Whether to reduce a trace writes its table."""
    made = os.stat(one.target).st_mtime_ns if Path(one.target).exists() else 0
    return os.stat(reduce_trace(one).spans).st_mtime_ns != made


def test_rows_of_a_small_trace(tmp_path: Path) -> None:
    import pyarrow.parquet

    reduced = reduce_trace(task(write_trace(tmp_path / "a.json", rank=1), tmp_path))
    assert (reduced.rank, reduced.world_size, reduced.steps, reduced.failure) == (1, 2, (3, 4), "")
    rows = pyarrow.parquet.read_table(reduced.spans).to_pylist()
    told = [
        (r["rank"], r["step"], r["kind"], r["start_ns"] - 10**18, r["duration_ns"]) for r in rows if r["layer"] is None
    ]
    assert sorted(told) == [
        (1, 3, "forward", 10_000, 100_000),
        (1, 3, "optimizer", 200_000, 50_000),
        (1, 3, "step", 0, 300_000),
        (1, 4, "forward", 410_000, 100_000),
        (1, 4, "optimizer", 600_000, 50_000),
        (1, 4, "step", 400_000, 300_000),
    ]
    layers = [(r["step"], r["layer"], r["kind"], r["duration_ns"], r["depth"]) for r in rows if r["layer"] is not None]
    assert layers == [(3, "Net", "forward", 100_000, 1), (4, "Net", "forward", 100_000, 1)]


def test_a_table_is_made_once_and_anew_when_its_trace_changes(tmp_path: Path) -> None:
    one = task(write_trace(tmp_path / "a.json"), tmp_path)
    assert is_made_anew(one)
    assert not is_made_anew(one)
    write_trace(tmp_path / "a.json", scale=2)
    assert is_made_anew(one)
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert is_made_anew(one)  # it tells of the layers
    assert read_summary(tmp_path / "a.json") is None


def test_a_table_torn_within_is_a_gap_of_its_rank(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    import pyarrow.parquet

    for rank in range(3):
        (tmp_path / f"rank{rank}").mkdir()
        write_trace(tmp_path / f"rank{rank}" / "a_trace.json", rank=rank)
    with reduced_here():
        assert load_ranks(tmp_path).own.ranks.tolist() == [0, 1, 2]
    torn = tmp_path / "rank1" / "spans.parquet"
    group = pyarrow.parquet.read_metadata(torn).row_group(0)
    data = bytearray(torn.read_bytes())
    for column in map(group.column, range(group.num_columns)):
        begin = column.dictionary_page_offset or column.data_page_offset
        data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    torn.write_bytes(data)
    report = load_ranks(tmp_path)
    assert report.own.ranks.tolist() == [0, 2]
    assert [(gap.what, gap.rank) for gap in report.missing] == [("spans of rank 1", 1)]
    with pytest.raises(BrokenTrace, match="cannot be read: "), open_ranks(tmp_path) as (loaded, _):
        loaded.database.execute("SELECT * FROM nothing")  # as a picture may


def test_where_nothing_can_be_written_beside_the_trace(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.json")
    (tmp_path / "closed").write_text("no directory", encoding="utf-8")
    reduced = reduce_trace(
        Task(str(trace), str(tmp_path / "closed" / "spans.parquet"), str(tmp_path / "o" / "a.parquet"))
    )
    assert Path(reduced.spans) == tmp_path / "o" / "a.parquet"
    assert Path(reduced.spans).is_file()


@pytest.mark.full
def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["flaky", "a", "deadly", "b", "c"]
    tasks = [task(write_trace(tmp_path / f"{name}.json", rank=i), tmp_path) for i, name in enumerate(names)]
    broken = tmp_path / "broken.json"
    broken.write_text("no trace", encoding="utf-8")
    tasks.append(task(broken, tmp_path))
    counts: list[tuple[int, int]] = []
    monkeypatch.setenv("PROFILER_WRAPPER_WORKERS", "2")
    found = reduce_traces(tasks, done=lambda done, total: counts.append((done, total)), reduce=dies_of_deadly)
    assert [Path(one.trace).stem for one in found] == [*names, "broken"]
    failures = {Path(one.trace).stem: one.failure for one in found if one.failure}
    assert set(failures) == {"deadly", "broken"}
    assert "was killed, twice" in failures["deadly"]
    assert "BrokenTrace" in failures["broken"]
    assert all(Path(one.spans).is_file() for one in found if not one.failure)
    assert counts == [(i + 1, 6) for i in range(6)]


def pid_of(one: Task) -> int:
    """Of the process that reduces it, once there is one."""
    path = Path(one.trace).with_suffix(".pid")
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text(encoding="ascii")):
        assert time.monotonic() < end, f"nobody reduces {one.trace}"
        time.sleep(0.02)
    return int(path.read_text(encoding="ascii"))


def ends(pid: int) -> bool:
    """Whether a process has ended after a while."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.full
def test_who_stops_waiting_leaves_no_process_behind(tmp_path: Path) -> None:
    tasks = [task(tmp_path / f"{name}.json", tmp_path) for name in ("quick", "slow", "slow2", "slow3")]
    asked = workers.reduce_in_workers(tasks, 2, says_who_and_sleeps)
    assert next(asked)[0] == 0
    pids = [pid_of(one) for one in tasks[:2]]
    asked.close()
    assert not Path(tasks[1].trace).with_suffix(".slept").exists(), "it waited for what nobody wants"
    assert all(ends(pid) for pid in pids)


@pytest.mark.full
def test_workers_end_when_who_started_them_is_killed(tmp_path: Path) -> None:
    tasks = [task(tmp_path / f"{name}.json", tmp_path) for name in ("a", "b")]
    code = f"""
import os, sys
sys.path[:] = {sys.path!r}
from dying_workers import says_who_and_sleeps
from profiler_wrapper.ranks.reduce import Task
from profiler_wrapper.ranks.reduce import reduce_in_workers
for done, _ in enumerate(reduce_in_workers([Task(*one) for one in {[tuple(one) for one in tasks]!r}], 2,
                                           says_who_and_sleeps)):
    if done:
        os.kill(os.getpid(), 9)  # both workers are there, and nobody tells them that it is over
"""
    assert run_program("-c", code).returncode == -9
    assert all(ends(pid_of(one)) for one in tasks)


def test_where_no_process_can_be_started_this_one_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task(write_trace(tmp_path / f"{i}.json", rank=i), tmp_path) for i in range(3)]
    monkeypatch.setattr(workers.sys, "executable", str(tmp_path / "nowhere"))
    assert [(one.rank, one.failure) for one in reduce_traces(tasks)] == [(0, ""), (1, ""), (2, "")]


@pytest.mark.full
def test_a_worker_that_never_begins_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task(write_trace(tmp_path / f"{i}.json", rank=i), tmp_path) for i in range(2)]
    monkeypatch.setattr(workers, "_REDUCE", "raise SystemExit(3)")
    why = {one.failure for one in reduce_traces(tasks)}
    assert why == {"the process that should reduce it ended with 3"}


@pytest.mark.full
def test_what_a_worker_raises_is_a_failure_of_its_trace(tmp_path: Path) -> None:
    tasks = [task(tmp_path / f"{name}.json", tmp_path) for name in ("large", "small")]
    found = reduce_traces(tasks, reduce=raises)
    assert [one.failure for one in found] == ["there is not enough memory for it", "RuntimeError: a mistake"]


def test_what_is_there_needs_no_worker(tmp_path: Path) -> None:
    tasks = [task(write_trace(tmp_path / f"{i}.json", rank=i), tmp_path) for i in range(2)]
    alone = [reduce_trace(one) for one in tasks]
    assert list(map(plain, reduce_traces(tasks, reduce=raises))) == list(map(plain, alone))


@pytest.mark.full
def test_a_cluster_says_the_same_as_the_pool(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    found = {}
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, scheduler_port=0, protocol="tcp"
    ) as cluster:
        for where, scheduler in (("pool", None), ("cluster", cluster.scheduler_address)):
            folder = tmp_path / where
            folder.mkdir()
            tasks = [task(write_trace(folder / f"{i}.json", rank=i, scale=i + 1), folder) for i in range(3)]
            tasks.append(task(folder / "gone.json", folder))
            found[where] = reduce_traces(tasks, scheduler=scheduler)
    names = [[one._replace(trace="", spans="", failure=one.failure[:17]) for one in found[where]] for where in found]
    assert names[0] == names[1]
    assert [bool(one.failure) for one in found["cluster"]] == [False, False, False, True]
    tables = [[Path(one.spans).read_bytes()[:4] for one in found[where] if one.spans] for where in found]
    assert tables[0] == tables[1] == [b"PAR1"] * 3


def test_a_scheduler_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    from profiler_wrapper.errors import WrongUse
    from profiler_wrapper.ranks import reduce as pool

    monkeypatch.setattr(pool, "_PATIENCE_S", 0.2)
    with pytest.raises(WrongUse, match="no Dask scheduler answers there"):
        reduce_traces([task(write_trace(tmp_path / "a.json"), tmp_path)], scheduler="tcp://127.0.0.1:1")
