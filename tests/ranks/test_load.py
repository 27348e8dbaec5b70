"""What a report on many ranks says agrees with itself: one set of steps, one average, one way to name things."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.__main__ import main
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.text import ranks_text
from profiler_wrapper.trace.spans import KNOWN_NAMES, kind_of_span
from rank_spans import job, write_logs
from simulated_jobs import QUIET, report_of, simulated
from span_tables import span

MS = 1_000_000
FILES_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "files.md"


def timed(parts: Callable[[int, int], list[tuple[str, str, float]]], *, ranks: int = 4, steps: int = 12) -> list[Any]:
    """Spans without communication: of each rank and step (name, kind, ms) one after another, a step 300 ms long."""
    rows = []
    for rank in range(ranks):
        for step in range(steps):
            begin = at = step * 300 * MS
            for name, kind, lasts in parts(rank, step):
                rows.append(span(rank, step, kind, at, int(lasts * MS), name=name))
                at += int(lasts * MS)
            rows.append(span(rank, step, "step", begin, at - begin))
    return rows


def loaded(folder: Path, rows: list[Any], *, ranks: int = 4) -> RanksReport:
    write_logs(folder / "run", rows, ranks=ranks)
    return load_ranks(folder / "run")


def table(text: str, title: str) -> list[list[str]]:
    """Cells of a table's rows, by its title."""
    lines = text[text.index(title) :].split("\n\n")[0].split("\n")
    rule = next(at for at, line in enumerate(lines) if set(line) <= {"-", " "} and "-" in line)
    return [
        re.split(r"\s{2,}", line.strip()) for line in lines[rule + 1 :] if not line.startswith("  ") or "> " in line
    ]


# --- waiting and scores ---


def levelled(rank: int, step: int) -> list[tuple[str, str, float]]:
    """Rank 1 pauses for 100 ms before the backward in which all meet, so that no phase of it is longer."""
    pause = 100 if rank == 1 else 0
    forward = 20 + rank / 4
    return [("forward", "forward", forward), ("pause", "other", pause), ("backward", "backward", 150 - forward - pause)]


def test_scores_and_parts_of_a_step_are_those_of_the_verdict(tmp_path: Path) -> None:
    report = loaded(tmp_path, timed(levelled))
    assert (report.verdict.verdict, report.verdict.rank) == ("rank", 1), report.verdict.sentence
    found = report.to_dict()
    low = [row["rank"] for row in found["ranks"] if row["flagged_relative"]]
    assert low == [1], "the straggler alone scores low: what the others waited is no work of theirs"
    held = {row["kind"]: row for row in found["lost"]}
    assert held["other"]["most_by_rank"] == 1 and held["other"]["held_ms_per_step"] == pytest.approx(100, abs=1)
    assert max(held, key=lambda kind: held[kind]["held_ms_per_step"]) == "other", held
    total = sum(row["held_ms_per_step"] for row in found["lost"])
    assert total == pytest.approx(max(row["wall_ms_per_step"] for row in found["ranks"]), abs=0.1)


def test_waiting_says_how_it_is_known(tmp_path: Path) -> None:
    report = loaded(tmp_path, timed(levelled))
    found = report.to_dict()
    assert found["waiting"] == "estimated" and found["unknown"]["waiting_ms_per_step"] is None
    assert [row["waiting_ms_per_step"] > 95 for row in found["ranks"]] == [True, False, True, True]
    assert "waiting is estimated" in " ".join(ranks_text(report).split())


def test_waiting_that_is_not_known_is_no_number(tmp_path: Path) -> None:
    report = loaded(tmp_path, timed(lambda rank, step: [("forward", "forward", 20 + 50 * (rank == 1))]))
    found = report.to_dict()
    assert found["waiting"] == "unknown" and found["unknown"]["waiting_ms_per_step"]
    assert {row["waiting_ms_per_step"] for row in found["ranks"]} == {None}
    text = ranks_text(report, width=200)
    header = next(line for line in text.split("\n") if "forward" in line and "step" in line and "waiting" in line)
    (row,) = [line for line in text.split("\n") if line.startswith("> 1")]
    assert row.removeprefix("> ").split()[header.split().index("waiting")] == "-", row


def test_measured_waiting_is_said_to_be(tmp_path: Path) -> None:
    assert loaded(tmp_path, job(slow=2)).to_dict()["waiting"] == "measured"


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    write_logs(tmp_path / "run", job(slow=2))
    report = load_ranks(tmp_path / "run", ranks=[0])
    (row,) = report.to_dict()["ranks"]
    assert row["waiting_ms_per_step"] is None and report.to_dict()["unknown"]["waiting_ms_per_step"]
    assert row["own_ms_per_step"]["communication"] == pytest.approx(50)
    assert f"{row['wall_ms_per_step']:,.1f} ms a step" in report.verdict.sentence, report.verdict.sentence
    text = ranks_text(report)
    assert "1 rank of 4;" in text and "1 ranks" not in text and "if all were as quick" not in text


def test_marks_stand_by_the_score_that_is_low() -> None:
    report = report_of(simulated("forward", seed=0, rank=3, noise=QUIET))
    lines = ranks_text(report, width=250).split("\n")
    (slow,) = [line for line in lines if line.startswith("> 3")]
    assert sum("!" in cell for cell in slow.split()) == 1, slow
    assert sum("!" in line for line in lines if re.match(r"[> ] \d", line)) == 1
    words = " ".join(" ".join(lines).split())
    assert "of its stage over" not in words, "a job without stages has no word of them"
    assert "! below 0.75;" in words


def test_a_mark_agrees_with_the_number_beside_it() -> None:
    own = simulated("none", seed=0, steps=70, noise=QUIET)
    own.self_ns[40:, 3] *= 2  # for less than half of the steps
    report = report_of(own)
    lines = ranks_text(report, width=250).split("\n")
    (row,) = [line.split() for line in lines if re.match(r"[> ] 3 ", line)]
    marked = [cell for cell in row if cell[-1] in "!*"]
    assert marked and all((float(cell[:-1]) < 0.75) == (cell[-1] == "!") for cell in marked), row
    assert any(cell[-1] == "*" for cell in marked), f"it was slow for 30 steps in a row: {row}"
    assert "* below it in 3 windows of" in " ".join(" ".join(lines).split())


# --- averages ---


def test_averages_leave_out_the_warm_up_that_the_verdict_leaves_out(tmp_path: Path) -> None:
    rows = timed(lambda rank, step: [("forward", "forward", (250 if step == 0 else 20) + 30 * (rank == 1))])
    report = loaded(tmp_path, rows)
    found = report.to_dict()
    assert found["steps"] == list(range(12)) and found["judged_steps"] == list(range(1, 12))
    assert found["ranks"][1]["own_ms_per_step"]["forward"] == pytest.approx(50), "the first step took 280 ms"
    assert f"forward of rank 1: {50:.1f} ms a step" in "\n".join(report.verdict.evidence), report.verdict.evidence
    assert "mean of the 11 steps that were judged" in " ".join(ranks_text(report).split())


def test_evidence_and_table_have_one_average(tmp_path: Path) -> None:
    """Of times that vary much, so that a median would be another number."""
    rows = timed(lambda rank, step: [("forward", "forward", 20 + (40 + 10 * (step % 4 == 3) * 4) * (rank == 1))])
    report = loaded(tmp_path, rows)
    mean = 20 + 40 + 10
    assert report.to_dict()["ranks"][1]["own_ms_per_step"]["forward"] == pytest.approx(mean)
    assert f"forward of rank 1: {mean:.1f} ms a step, {mean - 20:.1f} ms more than typical" in report.verdict.evidence


def test_shares_of_suspects_are_of_one_whole() -> None:
    for seed in range(4):
        own = simulated("forward", seed=seed, rank=3)
        verdict = report_of(own).verdict
        assert verdict.step_ns is not None and verdict.ideal_ns is not None
        lost = verdict.step_ns - verdict.ideal_ns
        assert verdict.suspects
        for one in verdict.suspects:
            assert one.share == pytest.approx(one.lost_ns / lost, rel=1e-6), f"{one.verdict}, {one.cause}, seed {seed}"


def test_a_suspect_is_told_once() -> None:
    for cause in ("data", "gc of one"):
        suspects = report_of(simulated(cause, seed=0, rank=3, noise=QUIET)).verdict.suspects
        told = [
            (one.verdict, one.cause, one.named_ranks, one.stage, one.layer, one.host, one.group, one.phase)
            for one in suspects
        ]
        assert len(told) == len(set(told)), told


def test_lateness_is_per_step_as_its_table_says(tmp_path: Path) -> None:
    report = loaded(tmp_path, job(slow=2))
    row = report.to_dict()["ranks"][2]
    assert row["late_ms"] == pytest.approx(12 * 30) and row["late_ms_per_step"] == pytest.approx(30)
    text = ranks_text(report, width=200)
    assert "to how many of 12 collectives it came last" in " ".join(text.split())
    assert " 360" not in text


# --- names ---


def loads(rank: int, step: int) -> list[tuple[str, str, float]]:
    return [("my reader", "other", 32 if rank == 1 else 0.1), ("forward", "forward", 40)]


def test_names_of_users_stay(tmp_path: Path) -> None:
    report = loaded(tmp_path, timed(loads))
    (found,) = report.named_spans
    assert (found.name, found.slowest_rank, found.nested) == ("my reader", 1, False)
    assert (found.slowest_ns / MS, found.others_ns, found.per_step) == (pytest.approx(32), pytest.approx(0.1 * MS), 1)
    assert report.to_dict()["named_spans"][0]["slowest_ms_per_step"] == pytest.approx(32)
    assert report.verdict.sentence.startswith("Rank 1 is the straggler: its my reader takes longer;")
    assert table(ranks_text(report), "Named spans")[0][:4] == ["my reader", "0.10", "32.0", "rank 1"]


def test_a_name_within_others_and_within_itself_counts_once(tmp_path: Path) -> None:
    rows = []
    for rank in range(2):
        for step in range(6):
            begin = step * 100 * MS
            rows.append(span(rank, step, "forward", begin, 50 * MS))
            rows.append(span(rank, step, "other", begin, 20 * MS, name="fn", depth=1, parent="forward"))
            rows.append(span(rank, step, "other", begin, 10 * MS, name="fn", depth=2, parent="fn"))
    (found,) = loaded(tmp_path, rows, ranks=2).named_spans
    assert found.nested and found.slowest_ns == 20 * MS and found.per_step == 1


def test_known_names_are_known_and_on_their_page() -> None:
    said = FILES_PAGE.read_text(encoding="utf-8")
    for kind, names in KNOWN_NAMES.items():
        for name in names.split(", "):
            assert kind_of_span(name) == kind, f"{name} is said to be {kind}"
            assert f"`{name}`" in said, f"{name} is not in docs/reference/files.md"
    assert kind_of_span("load") == "data" and kind_of_span("opt") == "optimizer"
    assert kind_of_span("load_checkpoint") == "checkpoint" and kind_of_span("opt-350m forward") == "forward"


# --- JSON and words ---


def test_what_is_null_has_its_reason() -> None:
    for cause in ("none", "forward"):
        found = report_of(simulated(cause, seed=0, rank=3, noise=QUIET)).to_dict()
        null = {key for key, value in found.items() if value is None}
        assert null <= found["unknown"].keys(), cause
        assert all(found["unknown"][key] for key in null)
        assert found["stage"] is None and "no stages" in found["unknown"]["stage"]
        assert found["slowdown"] == pytest.approx(found["step_ms_per_step"] / found["ideal_ms_per_step"])
        lost = found["step_ms_per_step"] - found["ideal_ms_per_step"]
        assert found["differ_ms_per_step"] == pytest.approx(lost)
        assert {suspect["stage"] for suspect in found["suspects"]} <= {None}


def test_a_job_with_stages_names_them() -> None:
    found = report_of(simulated("stage", seed=0, stages=4, stage=3, noise=QUIET)).to_dict()
    assert found["stage"] == 3 and "stage" not in found["unknown"]


def test_outliers_are_ranks() -> None:
    own = simulated("forward", seed=0, rank=3, noise=QUIET)
    from simulated_jobs import layer_times

    text = ranks_text(report_of(own, layers=layer_times(own, slow=2, ranks=(5,))), width=200)
    row = next(cells for cells in table(text, "Layers over ranks") if cells[0] == "model.layers.2")
    assert row[-2:] == ["rank 5", "rank 5"]
    assert "in ms of the median step" in text


def test_the_calls_of_collectives_are_told_from_them(tmp_path: Path) -> None:
    rows = job(slow=2)
    calls = [
        {**row, "duration_ns": MS, "group": None, "sequence": None, "thread": 1, "depth": 1, "parent": "backward"}
        for row in rows
        if row["kind"] == "communication"
    ]
    report = loaded(tmp_path, [*rows, *calls])
    found = {row["group"]: row["is_call"] for row in report.to_dict()["communication"]}
    assert found == {"all": False, "": True}
    text = ranks_text(report, width=200)
    assert [cells[0] for cells in table(text, "Communication of one rank")] == ["all_reduce", "all_reduce (call)"]
    assert "(call): what the calling thread takes" in text and "(marked ?)" not in text


def test_what_no_span_covers_is_said_to_be_untimed(tmp_path: Path) -> None:
    def parts(rank: int, step: int) -> list[tuple[str, str, float]]:
        return [("forward", "forward", 20.0), ("backward", "backward", 40.0)]

    rows = timed(parts)
    late = [
        row | {"duration_ns": row["duration_ns"] + 90 * MS}
        for row in rows
        if row["kind"] == "step" and row["rank"] == 2
    ]
    rows = [row for row in rows if row["kind"] != "step" or row["rank"] != 2] + late
    verdict = loaded(tmp_path, rows).verdict
    assert (verdict.rank, verdict.cause) == (2, "other")
    assert any("has no span" in line and "gc=True" in line for line in verdict.evidence), verdict.evidence


def test_a_rank_that_ends_early_is_said_not_to_have_finished(tmp_path: Path) -> None:
    rows = [row for row in job() if row["rank"] != 1 or row["step"] < 11]
    (missing,) = loaded(tmp_path, rows).missing
    assert missing.what == "step 11 of rank 1" and missing.rank == 1
    assert "did not finish" in missing.reason and "step 10" in missing.reason


def test_two_sources_are_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_logs(tmp_path / "run", job())
    (tmp_path / "job.csv").write_text("rank\n")
    assert main(["ranks", str(tmp_path / "run"), "--spans", str(tmp_path / "job.csv")]) == 2
    assert "say either RUN or --spans" in capsys.readouterr().err


# --- steps that no one told ---


def without_steps(rows: list[Any]) -> list[Any]:
    return [{**row, "step": None} for row in rows if row["kind"] != "step"]


def test_steps_are_found_by_what_comes_again(tmp_path: Path) -> None:
    rows = [span(rank, None, "other", -500 * MS, 400 * MS, name="init") for rank in range(4)]
    rows += without_steps(job(slow=2))
    report = loaded(tmp_path, rows)
    assert any("steps were found by the repetition of forward" in line for line in report.verdict.evidence)
    assert report.verdict.rank == 2, report.verdict.sentence
    told = load_ranks(_told(tmp_path / "told"))
    assert report.own.steps.tolist() == told.own.steps.tolist() == list(range(12))
    np.testing.assert_allclose(report.own.wall_ns[:-1], 100 * MS)  # from one forward to the next
    np.testing.assert_allclose(report.own.of("forward"), told.own.of("forward"))
    assert not report.named_spans, "what is before the first step is in none"


def _told(folder: Path) -> Path:
    write_logs(folder, job(slow=2))
    return folder


def test_micro_batches_are_no_steps(tmp_path: Path) -> None:
    rows = []
    for rank in range(2):
        at = 0
        for _ in range(6):
            for name, times, lasts in (("forward", 4, 10), ("optimizer", 1, 5)):
                for _ in range(times):
                    rows.append(span(rank, None, name, at, lasts * MS))
                    at += lasts * MS
    report = loaded(tmp_path, rows, ranks=2)
    assert report.own.steps.tolist() == list(range(6))
    np.testing.assert_allclose(report.own.of("forward"), 40 * MS)
    assert any("the first one after optimizer" in line for line in report.verdict.evidence)


def test_where_nothing_comes_again_it_says_what_to_call(tmp_path: Path) -> None:
    rows = [span(rank, None, "forward", 0, 10 * MS) for rank in range(4)]
    with pytest.raises(EmptyRecording, match=r"global_timer\.step\(\)"):
        loaded(tmp_path, rows)


def test_steps_that_are_told_are_left_alone(tmp_path: Path) -> None:
    report = loaded(tmp_path, [row for row in job() if row["kind"] != "step"])
    assert not any("repetition" in line for line in report.verdict.evidence)
    assert np.all(report.own.wall_ns == 95 * MS), "from the first span of a step to its last"


def test_a_step_takes_what_the_clock_says(tmp_path: Path) -> None:
    """100 ms, of which the slow rank has spans for 95: 50, 20, 20 and 5; what comes after them is its own as well."""
    report = loaded(tmp_path, job(slow=2))
    assert "without it a step of 100.0 ms would be" in report.verdict.sentence
    step = report.to_dict()
    assert step["wall_ms_per_step"] == max(row["wall_ms_per_step"] for row in step["ranks"]) == pytest.approx(100)
    waits = [{**row, "duration_ns": row["duration_ns"] + 10 * MS * (row["kind"] == "step")} for row in job(slow=2)]
    waits = [{**row, "start_ns": row["start_ns"] + row["step"] * 10 * MS} for row in waits]
    for row in list(waits):  # all wait another 10 ms, where no rank is last
        if row["kind"] == "step":
            about = {"name": "barrier", "group": "all", "sequence": 0, "duration_ns": 10 * MS - row["rank"] % 2}
            waits.append({**row, "kind": "communication", "start_ns": row["start_ns"] + 100 * MS, **about})
    report = loaded(tmp_path / "waits", waits)
    text = " ".join(ranks_text(report).split())
    assert "a step takes 110.0 ms" in text and "the slowest rank is busy for 110.0 ms;" in text


def test_ranks_that_wait_in_turn_are_busy_for_less_than_a_step(tmp_path: Path) -> None:
    """Each waits for the other for 30 of 100 ms in every second step."""
    jobs = [job(ranks=2, slow=slow) for slow in (0, 1)]
    report = loaded(tmp_path, [row for rows in jobs for row in rows if row["step"] % 2 == jobs.index(rows)], ranks=2)
    text = " ".join(ranks_text(report).split())
    assert "a step takes 100.0 ms; the slowest rank is busy for 85.0 ms;" in text
