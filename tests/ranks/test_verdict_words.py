"""What the verdict says of each kind, with its evidence and steps; jobs whose truth is known by hand, from files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.load import load_ranks
from rank_accounts import MS, meet, row
from span_tables import write_parquet

RANKS, STEPS = 8, 24
PHASES = {"data": 5.0, "forward": 20.0, "backward": 40.0}
Extra = Callable[[int, int], Mapping[str, float]]
Row = dict[str, Any]
NODES = {"node0": range(4), "node1": range(4, 8)}
PAIRS = {f"pair{rank}": (rank, rank + 4) for rank in range(4)}


def rows_of(
    extra: Extra = lambda rank, step: {},
    *,
    ranks: int = RANKS,
    groups: Mapping[str, Iterable[int]] | None = None,
    transfer_ms: Callable[[str], float] = lambda group: 8.0,
    noise: float = 0.01,
) -> list[Row]:
    """A step: data 5 ms, forward 20, backward 40, an all-reduce of each group, an optimizer of 5 ms: 78 ms in all."""
    chance, now = np.random.default_rng(0), [0.0] * ranks
    groups = groups or {"world": range(ranks)}
    rows: list[Row] = []

    def does(rank: int, step: int, kind: str, length: float, **more: Any) -> None:
        rows.append(row(rank, step, kind, now[rank], now[rank] + length, **more))
        now[rank] += length

    for step in range(STEPS):
        begin = list(now)
        for rank in range(ranks):
            more = extra(rank, step)
            for kind in (*PHASES, "gc"):
                length = PHASES.get(kind, 0.0) * chance.lognormal(0, noise) + more.get(kind, 0.0)
                if length:
                    does(rank, step, kind, length)
            now[rank] += more.get("between", 0.0)
        for group, members in groups.items():
            met = max(now[rank] for rank in members) + transfer_ms(group)
            for rank in members:
                rows.append(meet(rank, step, now[rank], met, group=group))
                now[rank] = met
        for rank in range(ranks):
            does(rank, step, "optimizer", 5.0)
            if more_ms := extra(rank, step).get("checkpoint"):
                does(rank, step, "checkpoint", more_ms)
            rows.append(row(rank, step, "step", begin[rank], now[rank]))
    return rows


def step_ms(rows: list[Row]) -> float:
    begin = min(one["start_ns"] for one in rows)
    return (max(one["start_ns"] + one["duration_ns"] for one in rows) - begin) / MS / STEPS


def report_of(rows: list[Row], folder: Path, hosts: Mapping[int, str] | None = None) -> dict[str, Any]:
    """What is said of a table of these spans."""
    if hosts is None:
        path = write_parquet(rows, folder / "spans.parquet")
    else:
        path = folder / "spans.jsonl"
        path.write_text("".join(json.dumps({**one, "host": hosts[one["rank"]]}) + "\n" for one in rows))
    return load_ranks(path, spans=path).to_dict()


def logs_of(rows: list[Row], folder: Path, *, world_size: int, device: str = "cpu") -> dict[str, Any]:
    """What is said of the same as timers write it."""
    (folder / "timers").mkdir(parents=True)
    for rank in sorted({one["rank"] for one in rows}):
        header = {"schema_version": 1, "rank": rank, "world_size": world_size, "device": device}
        lines = [{"header": header}, *(one for one in rows if one["rank"] == rank)]
        (folder / "timers" / f"timer_rank{rank}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return load_ranks(folder).to_dict()


def only(ranks: Iterable[int], kind: str, more: float, steps: Iterable[int] = range(STEPS)) -> Extra:
    ranks, steps = set(ranks), set(steps)
    return lambda rank, step: {kind: more} if rank in ranks and step in steps else {}


def gains(report: Mapping[str, Any], expected_ms: float) -> None:
    near = pytest.approx(expected_ms, abs=max(1.0, 0.05 * expected_ms))
    assert report["lost_ms_per_step"] == near, report["sentence"]


# --- ranks ---


def test_a_phase_of_a_rank(tmp_path: Path) -> None:
    found = report_of(rows_of(only([5], "backward", 30)), tmp_path)
    assert found["sentence"].startswith("Rank 5 is the straggler: its backward takes longer; without it a step of ")
    assert found["sentence"].endswith("100 % of the lost time.")
    assert (found["verdict"], found["cause"], found["rank"], found["phase"]) == ("rank", "backward", 5, "backward")
    assert (found["named_ranks"], found["host"], found["group"]) == ([5], None, None)
    assert (found["first_step"], found["last_step"], found["confidence"]) == (0, STEPS - 1, "high")
    (evidence,) = found["evidence"]
    assert re.fullmatch(r"backward of rank 5: (69|70)\.\d ms a step, (29|30)\.\d ms more than typical", evidence)
    gains(found, 30)


@pytest.mark.parametrize(("more", "named"), [(20, [2]), (30, [2, 5]), (45, [5])])
def test_of_two_slow_ranks_that_which_holds_the_job(tmp_path: Path, more: float, named: list[int]) -> None:
    """Rank 2 has 30 ms more forward, rank 5 more backward: its own time is that of its spans, whoever waits."""
    rows = rows_of(lambda rank, step: {2: {"forward": 30.0}, 5: {"backward": more}}.get(rank, {}))
    found = report_of(rows, tmp_path)
    assert found["named_ranks"] == named
    gains(found, abs(30 - more) or 30)
    assert found["ranks"][5]["own_ms_per_step"]["backward"] == pytest.approx(40 + more, abs=0.5)


def test_four_of_sixteen_ranks_of_one_host(tmp_path: Path) -> None:
    rows = rows_of(only(range(8, 12), "forward", 40), ranks=16)
    found = report_of(rows, tmp_path, {rank: f"node-{rank // 4}" for rank in range(16)})
    assert (found["verdict"], found["host"], found["rank"]) == ("host", "node-2", None)
    assert found["named_ranks"] == [8, 9, 10, 11]
    assert found["sentence"].startswith("Host node-2 is slow (ranks 8, 9, 10, 11): its forward takes longer;")
    gains(found, 40)


def test_ranks_that_are_as_slow(tmp_path: Path) -> None:
    found = report_of(rows_of(only([1, 6], "forward", 30)), tmp_path)
    assert found["sentence"].startswith("Ranks 1, 6 are the stragglers, equally slow: their forward takes longer;")
    assert (found["verdict"], found["named_ranks"], found["rank"]) == ("rank", [1, 6], 1)


def test_data_and_garbage_of_a_rank(tmp_path: Path) -> None:
    found = report_of(rows_of(only([3], "data", 30)), tmp_path)
    assert found["sentence"].startswith("Data loading of rank 3 holds the others up;")
    found = report_of(rows_of(only([3], "gc", 60, range(1, STEPS, 2))), tmp_path)
    assert found["sentence"].startswith("Garbage collection of rank 3 holds the others up, in 12 of 24 steps;")
    gains(found, 30)


# --- steps ---


def test_slow_since_a_step_and_still_so(tmp_path: Path) -> None:
    found = report_of(rows_of(only([6], "forward", 30, range(12, STEPS))), tmp_path)
    assert "Rank 6 is the straggler: its forward takes longer, since step 12, still so at the end;" in found["sentence"]
    assert (found["first_step"], found["last_step"]) == (12, 23)
    assert any(line == "in 12 of 24 steps: 12-23" for line in found["evidence"])
    gains(found, 15)


def test_slow_in_a_few_steps(tmp_path: Path) -> None:
    found = report_of(rows_of(only([6], "forward", 80, (5, 6, 12))), tmp_path)
    assert "Rank 6 is the straggler: its forward takes longer, in 3 of 24 steps;" in found["sentence"]
    gains(found, 10)


def test_all_ranks_slow_in_some_steps(tmp_path: Path) -> None:
    found = report_of(rows_of(only(range(RANKS), "backward", 40, range(8, 14))), tmp_path)
    assert found["sentence"].startswith("All ranks take longer for backward, in 6 of 24 steps;")
    assert (found["verdict"], found["named_ranks"], found["first_step"], found["last_step"]) == ("steps", [], 8, 13)
    gains(found, 10)


def test_a_save_now_and_then(tmp_path: Path) -> None:
    rows = rows_of(only([0], "checkpoint", 300, (9, 19)))
    found = report_of(rows, tmp_path)
    assert found["sentence"].startswith("Rank 0 is the straggler: its saving takes longer, in 2 of 24 steps;")
    assert (found["verdict"], found["cause"]) == ("save", "checkpoint")
    gains(found, step_ms(rows) - step_ms(rows_of()))


def test_a_save_in_the_background_that_slows_the_steps_beside_it(tmp_path: Path) -> None:
    """It lasts for two of each eight steps, in which all ranks compute longer."""
    beside = [step for step in range(STEPS) if step % 8 in (5, 6)]
    rows = rows_of(lambda rank, step: {"forward": 20.0, "backward": 40.0} if step in beside else {})
    begins = {one["step"]: one["start_ns"] for one in rows if one["kind"] == "step" and one["rank"] == 0}
    for step in beside[::2]:
        length = begins[step + 2] - begins[step] - 20 * MS
        saved = row(0, step, "checkpoint", 0, 0, name="save", thread=9)
        rows.append({**saved, "start_ns": begins[step] + 10 * MS, "duration_ns": length})
    found = report_of(rows, tmp_path)
    assert (found["verdict"], found["cause"]) == ("save", "checkpoint")
    assert "while something runs beside it, as a save in the background" in found["sentence"]
    assert "in 6 of 24 steps (coincides)" in found["sentence"]
    gains(found, 15)


# --- links and groups ---


def test_one_slow_link_of_four(tmp_path: Path) -> None:
    transfers = {"pair1": 48.0, "node0": 3.0, "node1": 3.0}
    rows = rows_of(groups=NODES | PAIRS, transfer_ms=lambda group: transfers.get(group, 8.0))
    found = report_of(rows, tmp_path)
    assert found["sentence"].startswith("The all_reduce of ranks 1, 5 (pair1) is slow; without it")
    assert (found["verdict"], found["cause"], found["group"]) == ("link", "communication", "pair1")
    assert found["named_ranks"] == [1, 5] and found["rank"] is None
    assert "its transfer takes 48.0 ms a step, 8.0 ms is typical" in found["evidence"]
    gains(found, 40)


def test_one_slow_group_of_a_node(tmp_path: Path) -> None:
    """Before all reduce, each node does."""
    world = {"world": range(RANKS)}
    rows = rows_of(groups=NODES | world, transfer_ms=lambda group: 30.0 if group == "node1" else 8.0)
    found = report_of(rows, tmp_path)
    assert (found["verdict"], found["group"], found["named_ranks"]) == ("group", "node1", [4, 5, 6, 7])
    gains(found, 22)


def test_one_slow_send_of_a_pipeline(tmp_path: Path) -> None:
    """Four stages; a send from the second to the third takes 25 ms, the others 2."""
    rows: list[Row] = []
    now = [0.0] * 4
    for step in range(STEPS):
        begin = list(now)
        for stage in range(4):
            if stage:
                sent = now[stage - 1]
                got = max(now[stage], sent) + (25.0 if stage == 2 else 2.0)
                about = {"group": f"{stage - 1}-{stage}"}
                rows.append(meet(stage - 1, step, sent, got, name="forward-send", **about))
                rows.append(meet(stage, step, now[stage], got, name="forward-recv", **about))
                now[stage - 1] = now[stage] = got
            rows.append(row(stage, step, "forward", now[stage], now[stage] + 20))
            now[stage] += 20
        end = max(now) + 3
        for stage in range(4):
            rows.append(meet(stage, step, now[stage], end))
            rows.append(row(stage, step, "step", begin[stage], end))
            now[stage] = end
    found = report_of(rows, tmp_path)
    assert (found["verdict"], found["group"], found["named_ranks"]) == ("link", "1-2", [1, 2])
    assert found["sentence"].startswith("The forward-send/recv of ranks 1, 2 (1-2) is slow;")
    gains(found, 23)


# --- what is not known ---


def test_timers_that_tell_launches_alone_cannot_tell(tmp_path: Path) -> None:
    """Of 100 ms a step the optimizer, which waits for the device, takes 90."""
    rows = []
    for rank in range(4):
        for step in range(STEPS):
            begin = 100 * step
            rows += [
                row(rank, step, "step", begin, begin + 100),
                row(rank, step, "forward", begin, begin + 3),
                row(rank, step, "backward", begin + 3, begin + 10),
                row(rank, step, "optimizer", begin + 10, begin + 100),
            ]
    found = logs_of(rows, tmp_path / "run", world_size=4, device="cuda")
    assert (found["verdict"], found["rank"], found["confidence"]) == ("unknown", None, "low")
    assert found["sentence"] == (
        "Cannot tell: 90.0 ms of a step's 100.0 ms are in optimizer, which waits for the device, and the other phases "
        "are launches; let the timers use device events."
    )


@pytest.mark.parametrize("kept", [10, 4])
def test_a_rank_whose_log_ends_early_is_measured_by_its_own_steps(tmp_path: Path, kept: int) -> None:
    rows = rows_of(only([4], "forward", 30))
    found = logs_of([one for one in rows if one["rank"] != 4 or one["step"] < kept], tmp_path / "run", world_size=RANKS)
    assert found["named_ranks"] == [4] and f"in {kept} of 24 steps" in found["sentence"]
    gains(found, 30)
    assert any(gap["what"].endswith("of rank 4") for gap in found["missing"])


def test_ranks_without_a_log_lower_the_confidence(tmp_path: Path) -> None:
    rows = rows_of(only([6], "forward", 30))
    found = logs_of([one for one in rows if one["rank"] not in (3, 6)], tmp_path / "run", world_size=RANKS)
    assert found["confidence"] == "low" and 6 not in found["named_ranks"]
    assert "not recorded" in found["sentence"]


def test_a_clock_that_jumps_blames_nobody(tmp_path: Path) -> None:
    rows = rows_of()
    for one in rows:
        if one["rank"] == 2 and one["step"] % 3 == 2:
            one["start_ns"] += 40 * MS
    found = report_of(rows, tmp_path)
    assert found["verdict"] == "none" and found["sentence"].startswith("No straggler:")
    assert "the clock of rank 2 jumps in some steps: its times were moved back" in found["evidence"]


def test_nobody(tmp_path: Path) -> None:
    found = report_of(rows_of(), tmp_path)
    assert (found["verdict"], found["confidence"], found["named_ranks"]) == ("none", "high", [])
    assert found["sentence"].startswith("No straggler: ranks differ by ") and "which is little" in found["sentence"]


def test_a_circle_of_dependencies_is_said_and_no_error(tmp_path: Path) -> None:
    """Rank 0 has its two syncs of a step in one order, rank 1 in the other."""
    rows = []
    for step in range(12):
        for rank, order in enumerate((("one", "other"), ("other", "one"))):
            rows.append(row(rank, step, "step", 50 * step, 50 * step + 40))
            for at, name in enumerate(order):
                begin = 50 * step + 20 * at
                rows.append(meet(rank, step, begin, begin + 20, name=name))
    found = report_of(rows, tmp_path)
    assert any("depend on one another in a circle" in line for line in found["evidence"])
    assert found["confidence"] != "high"
