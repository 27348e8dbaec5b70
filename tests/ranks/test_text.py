"""What is printed of many ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from profiler_wrapper.ranks.figures import beyond_typical, binned, blocks, heat_maps
from profiler_wrapper.ranks.model import Clocks, CommunicationRow, LayerTimes
from profiler_wrapper.ranks.report import RanksReport, layers_over_ranks
from profiler_wrapper.ranks.text import ranks_text
from profiler_wrapper.ranks.timeline import chosen_ranks
from profiler_wrapper.ranks.times import typical
from profiler_wrapper.trace.spans import Gap
from simulated_jobs import QUIET, layer_times, report_of, simulated

MS = 1e6


def slow_rank(**more: Any) -> RanksReport:
    return report_of(simulated("forward", seed=0, rank=3, noise=QUIET), **more)


def test_the_first_two_lines_say_who_and_why() -> None:
    lines = ranks_text(slow_rank(), width=100).split("\n")
    assert lines[0].startswith("Rank 3 is the straggler: its forward takes longer")
    assert "without it a step of" in " ".join(lines[:2]) and "of the lost time" in " ".join(lines[:2])


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_every_line_fits(width: int) -> None:
    clocks = Clocks(
        ranks=np.arange(8),
        reference_ns=0.0,
        offset_ns=np.full(8, 2e6),
        drift=np.zeros(8),
        residual_ns=np.full(8, 5_000.0),
        source="collectives",
        events=1234,
        notes=("a note " * 30,),
    )
    row = CommunicationRow(
        name="all_reduce" * 9,
        group="group" * 20,
        size=8,
        instances=20,
        bytes=2**30,
        time_ns=10**9,
        transfer_ns=4 * 10**8,
        waiting_ns=6 * 10**8,
        overlapped_ns=None,
        bandwidth_bytes_per_s=2e9,
    )
    missing = (Gap(what="rank 9", reason="no file " * 30, rank=9),)
    hosts = tuple(f"a-host-with-a-very-long-name-{rank}" for rank in range(8))
    text = ranks_text(slow_rank(clocks=clocks, communication=(row,), missing=missing, hosts=hosts), width=width)
    assert max(map(len, text.split("\n"))) <= width
    words = " ".join(text.split())
    assert "residual 5.0 us" in words and "Missing" in words and "rank 9: no file" in words


def test_numbers_of_the_table_of_ranks() -> None:
    found = slow_rank()
    lines = ranks_text(found, width=200).split("\n")
    header = next(line for line in lines if line.startswith("rank  "))
    marked = next(line for line in lines if line.startswith("> 3"))
    cell = dict(zip(header.split(), marked.removeprefix(">").split(), strict=False))
    expected = float(np.mean(found.own.of("forward")[:, 3])) / MS
    assert float(cell["forward"]) == pytest.approx(expected, abs=0.06)
    assert "!" in marked and sum(line.startswith("> ") for line in lines) == 1


def test_communication_is_of_one_rank() -> None:
    row = CommunicationRow(
        name="all_reduce",
        group="dp",
        size=4,
        instances=20,
        bytes=3 * 2**20,
        time_ns=4 * 10**9,
        transfer_ns=10**9,
        waiting_ns=3 * 10**9,
        overlapped_ns=None,
        bandwidth_bytes_per_s=2e9,
    )
    line = next(
        one for one in ranks_text(slow_rank(communication=(row,)), width=120).split("\n") if "all_reduce" in one
    )
    assert line.split() == ["all_reduce", "dp", "4", "20", "3.0", "MiB", "2", "250.0", "750.0", "75", "%"]


def test_of_many_ranks_those_that_are_named_are_shown() -> None:
    text = ranks_text(report_of(simulated("forward", seed=0, ranks=64, rank=41, noise=QUIET)), width=100)
    assert "\n> 41 " in text and "16 of 64 ranks" in text


def test_of_many_ranks_one_without_a_step_that_was_judged_comes_last() -> None:
    found = report_of(simulated("forward", seed=0, ranks=20, rank=19, noise=QUIET))
    times, wall = found.own.self_ns.copy(), found.own.wall_ns.copy()
    times[:, 7], wall[:, 7] = np.nan, np.nan
    lines = ranks_text(replace(found, own=replace(found.own, self_ns=times, wall_ns=wall))).split("\n")
    assert not any(line.startswith("  7 ") for line in lines) and any(line.startswith("> 19") for line in lines)


def test_no_straggler_marks_nobody() -> None:
    found = report_of(simulated(seed=0, noise=QUIET))
    text = ranks_text(found)
    assert text.startswith("No straggler") and not found.named_ranks and "\n> " not in text


def test_names_cannot_speak_to_the_terminal() -> None:
    own = simulated("forward", seed=0, rank=1, noise=QUIET)
    name = "blocks.0\x1b[31m\n\u202e"
    times = np.full((8, 1, 3), 5 * MS)
    times[1, 0, 0] = 65 * MS
    layers = LayerTimes(
        ranks=own.ranks,
        layers=(name,),
        kinds=("forward", "recompute", "backward"),
        self_ns=times,
    )
    text = ranks_text(report_of(own, layers=layers, hosts=("\x1b[2J",) * 8), width=200)
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b[31m" in text


def test_nothing_known_is_still_a_report() -> None:
    own = simulated(seed=0, steps=3)
    own = replace(own, self_ns=np.full_like(own.self_ns, np.nan), wall_ns=np.full_like(own.wall_ns, np.nan))
    assert "ranks" in ranks_text(report_of(own))


# --- rows ---


def test_typical_is_the_median_and_of_two_the_quicker() -> None:
    assert typical(np.array([1.0, 2.0, 9.0]), axis=0) == 2.0
    assert typical(np.array([9.0, 2.0]), axis=0) == 2.0
    assert typical(np.array([9.0, np.nan, 2.0]), axis=0) == 2.0
    assert math.isnan(typical(np.array([np.nan, np.nan]), axis=0))


def test_beyond_typical_is_the_delay() -> None:
    found = slow_rank()
    beyond = beyond_typical(found)
    assert beyond[3, found.own.kinds.index("forward")] == pytest.approx(60.0, abs=1.0)
    assert np.abs(np.delete(beyond, 3, axis=0)).max() < 1.0


def test_a_slow_stage_is_beyond_the_typical_rank() -> None:
    found = report_of(simulated("stage", seed=0, stages=4, stage=3, noise=QUIET))
    assert found.verdict.verdict == "stage"
    beyond = beyond_typical(found).sum(axis=1)
    assert found.named_ranks == {6, 7} and set(np.argsort(-beyond)[:2].tolist()) == {6, 7}
    mesh = heat_maps(found)[-1]
    assert mesh.across == "stage" and mesh.values_ms.shape == (2, 4)
    assert mesh.values_ms.argmax(axis=1).tolist() == [3, 3]
    work = found.own.self_ns.sum(axis=2)[:, 5].mean() / MS  # rank 5 is the second of stage 2
    assert mesh.values_ms[1, 2] == pytest.approx(work)


def test_blocks_count_nothing_twice() -> None:
    names = ("Net", "embed", "layers", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "head.norm", "head.out")
    times = np.ones((1, len(names), 3))
    times[:, 0] = 7.0  # all of them together
    layers = LayerTimes(
        ranks=np.arange(1),
        layers=names,
        kinds=("forward",) * 3,
        self_ns=times,
    )
    assert [names[at] for at in blocks(layers)] == ["embed", "layers.0", "layers.1", "head.norm", "head.out"]


def test_layers_over_ranks_by_hand() -> None:
    own = simulated(seed=0, noise=QUIET)
    times = np.full((8, 2, 3), np.nan)
    times[:, 0, 0] = np.array([10, 10, 11, 11, 12, 12, 13, 90]) * MS
    times[:4, 1, 0] = 5 * MS
    layers = LayerTimes(
        ranks=own.ranks,
        layers=("a.0", "a.1"),
        kinds=("forward", "recompute", "backward"),
        self_ns=times,
    )
    first, second = layers_over_ranks(layers)
    assert (first["layer"], first["median_ms"], first["slowest_ms"], first["slowest_rank"]) == ("a.0", 11.5, 90.0, 7)
    assert first["typical_deviation_ms"] == pytest.approx(1.4826) and first["outliers"] == (7,) and first["ranks"] == 8
    assert (second["ranks"], second["median_ms"], second["outliers"]) == (4, 5.0, ())
    assert second["slowest_rank"] is None, "all take equally long"


def test_one_of_many_still_shows_when_binned() -> None:
    values = np.zeros((1024, 2))
    values[700, 1], values[3, 0], values[4, 0] = 9.0, -7.0, 5.0
    firsts, cells = binned(values, 256)
    assert len(firsts) == 256 and cells[700 // 4, 1] == 9.0 and cells[0, 0] == -7.0 and cells[1, 0] == 5.0
    assert np.count_nonzero(cells) == 3


def test_chosen_ranks_hold_the_named_one() -> None:
    found = report_of(simulated("forward", seed=0, ranks=64, rank=41, noise=QUIET))
    chosen = chosen_ranks(found, 8)
    assert 41 in chosen and len(chosen) == 8 and chosen == sorted(set(chosen))


def test_chosen_ranks_are_spread_over_all() -> None:
    found = report_of(simulated("forward", seed=0, ranks=64, rank=41, noise=QUIET))
    assert chosen_ranks(found, 16)[-1] == 63, "those left are spread over all"


# --- what is not known ---


def test_what_is_not_known_says_why() -> None:
    own = simulated("forward", seed=0, rank=3, noise=QUIET)
    row = CommunicationRow(
        name="all_reduce",
        group="dp",
        size=8,
        instances=20,
        bytes=None,
        time_ns=10**9,
        transfer_ns=None,
        waiting_ns=None,
        overlapped_ns=None,
        bandwidth_bytes_per_s=None,
        unknown="overlap: nothing tells it; bandwidth: no bytes",
    )
    found = replace(report_of(own, communication=(row,)), layers=None, peak_unknown="no files", mfu_unknown="no peak")
    text = ranks_text(found, width=200)
    told = text[text.index("Not known") :].split("\n\n")[0].split("\n")[1:]
    assert told[:2] == ["  - peak memory: no files", "  - MFU: no peak"]
    assert "  - layers: no span is of a layer: LayerTimer, or a trace, has them" in told
    assert "  - overlap: nothing tells it" in told and "  - bandwidth: no bytes" in told
    known = replace(row, transfer_ns=10**8, waiting_ns=9 * 10**8, unknown="")
    found = replace(found, layers=layer_times(own), peak_unknown=None, mfu_unknown=None, communication=(known,))
    text = ranks_text(found, width=200)
    assert not any(what in text for what in ("peak memory:", "MFU:", "layers:", "overlap:", "bandwidth:", "(marked ?)"))


def test_time_in_no_span_is_told() -> None:
    own = simulated(seed=0, noise=QUIET)
    other, wall = own.of("other"), own.wall_ns
    shares = (other.mean(axis=0) / wall.mean(axis=0)).tolist()
    text = ranks_text(report_of(own))
    said = f"time in no span: {100 * np.median(shares):.0f} % of a step of the typical rank"
    assert said in " ".join(text.split()), f"shares are {shares}"


def test_memory_and_mfu_stand_in_the_table() -> None:
    peak, mfu = np.full(8, 3.5 * 2**30), np.full(8, 0.412)
    lines = ranks_text(replace(slow_rank(), peak_bytes=peak, mfu=mfu), width=200).split("\n")
    header = next(line for line in lines if line.startswith("rank  "))
    assert "peak GiB" in header and "MFU" in header
    assert next(line for line in lines if line.startswith("> 3")).rstrip().endswith("3.50  41.2 %")
    lines = ranks_text(replace(slow_rank(), peak_bytes=peak / 1024), width=200).split("\n")
    assert "peak MiB" in next(line for line in lines if line.startswith("rank  "))


def test_clocks_of_one_host_are_not_called_unknown() -> None:
    nothing, unknown = np.zeros(8), np.full(8, np.nan)
    note = "all ranks are on one host, whose clock they share"
    clocks = Clocks(
        ranks=np.arange(8), reference_ns=0.0, offset_ns=nothing, drift=nothing, residual_ns=unknown, source="none",
        notes=(note,),
    )  # fmt: skip
    assert ranks_text(slow_rank(clocks=clocks)).endswith(f"Clocks: not aligned: {note}")
