"""Tables of the text on many ranks: suspects, who held a step, layers over ranks, communication."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from profiler_wrapper.ranks.model import CommunicationRow, Float
from profiler_wrapper.ranks.report import RanksReport, layers_over_ranks
from profiler_wrapper.ranks.times import SLOW, WINDOWS, largest, typical, waiting_source
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.tables.statistics import mean
from profiler_wrapper.units import file_size

# --- What texts on many ranks are made of: tables that fit, wrapped lines, numbers with few digits ---


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, notes: Iterable[str] = ()
) -> str:
    """A table below its title, with notes below it; its last columns are left out until it fits."""
    if not rows:
        return ""
    columns = {name: (at, [row[at] for row in rows]) for at, name in enumerate(header)}
    text, _ = fitting(columns, width, left_columns=2)
    return titled(title, "\n".join(shorten(line, width) for line in text.split("\n")), notes, width)


def titled(title: str, text: str, notes: Iterable[str], width: int) -> str:
    """A text below its title, with notes below it."""
    return "\n".join([*wrapped(title, width), text, *wrapped("; ".join(notes), width, first="  ")])


Columns = dict[str, tuple[int, list[str]]]  # name: (how soon it is left out, texts)


def fitting(columns: Columns, width: int, *, left_columns: int = 1) -> tuple[str, list[str]]:
    """The table of the columns that have texts and fit, and the names of those that do not."""
    kept, left_out = [name for name, (_, texts) in columns.items() if any(texts)], list[str]()
    while True:
        rows = list(zip(*(columns[name][1] for name in kept), strict=True))
        text = grid(kept, rows, left_columns=left_columns)
        if max(map(cells, text.split("\n"))) <= width or len(kept) <= left_columns:
            return text, left_out
        left_out.append(kept.pop(max(range(len(kept)), key=lambda at: (columns[kept[at]][0], at))))


def wrapped(text: str, width: int, *, first: str = "") -> list[str]:
    """`text` in lines that fit, all but the first as far in as `first` takes it."""
    if not text:
        return []
    return textwrap.wrap(
        clean(text), width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )


def bullets(title: str, texts: Iterable[str], width: int) -> str:
    """A list below its title; empty without texts."""
    lines = [line for one in texts for line in wrapped(one, width, first="  - ")]
    return "\n".join([*wrapped(title, width), *lines]) if lines else ""


def ms(value: float | None) -> str:
    """Milliseconds, with three digits or so."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def counted(count: int, what: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """`0.5` -> `50 %`."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else "-"


def memory_unit(sizes_bytes: Float) -> tuple[int, str]:
    """The bytes of a unit for all of these, and its name."""
    return (2**30, "GiB") if np.nanmax(sizes_bytes) >= 2**29 else (2**20, "MiB")


def few(ranks: Sequence[int]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(map(str, ranks[:3])) + (f" +{len(ranks) - 3}" if len(ranks) > 3 else "")


# --------------------------------------------------------------------------------------------------
# The table of ranks as text: what each did itself in a step, what it waited, its scores, memory and MFU.

_MOST_RANKS = 16
_MEANINGS = {
    "other": "other: in no span, or in one whose name tells no kind",
    "transfer": "transfer: communication without waiting",
    "own score": "own score: its own best over now",
    "late": "late: by how much it came last to collectives, in ms per step",
}


def ranks_table(report: RanksReport, width: int) -> str:
    """Those that are named, marked, and those with the most time of their own; what each column says is below."""
    data, named = report.to_dict(), report.named_ranks

    def own_ms(row: dict[str, Any]) -> float:
        return sum(value or 0.0 for value in row["own_ms_per_step"].values())

    shown = sorted(data["ranks"], key=lambda row: (row["rank"] not in named, -own_ms(row)))[:_MOST_RANKS]
    columns = _columns(report, data, sorted(shown, key=lambda row: int(row["rank"])))
    text, left_out = fitting(columns, width)
    names = [name for name, (_, texts) in columns.items() if any(texts) and name not in left_out]
    then = "" if data["waiting"] == "unknown" else ", then what it waited for others"
    count = len(report.steady.steps)
    title = (
        f"Ranks: what each did itself{then}, in ms per step "
        f"(mean of the {counted(count, 'step')} that {'was' if count == 1 else 'were'} judged)"
    )
    return titled(title, text, _notes(report, data, names, left_out, len(shown)), width)


def _columns(report: RanksReport, data: dict[str, Any], shown: Sequence[dict[str, Any]]) -> Columns:
    rows, measured = data["ranks"], data["waiting"] != "unknown"
    size, unit = (1, "") if report.peak_bytes is None else memory_unit(report.peak_bytes)
    columns: Columns = {
        "rank": (0, [f"{'> ' if row['rank'] in report.named_ranks else '  '}{row['rank']}" for row in shown]),
        "stage": (2, [str(row["stage"]) for row in shown] if len(data["stages"]) > 1 else []),
        "host": (9, [shorten(clean(row["host"] or ""), 16) for row in shown]),
    }
    for kind in report.own.kinds:
        if any(row["own_ms_per_step"].get(kind) for row in rows):
            soon = 1 if kind in ("data", "forward", "backward") else 6 if kind == "other" else 4
            texts = [ms(row["own_ms_per_step"].get(kind, 0.0)) for row in shown]
            columns["transfer" if kind == "communication" and measured else kind] = soon, texts
    return columns | {
        "waiting": (1, [ms(row["waiting_ms_per_step"]) for row in shown]),
        "step": (3, [ms(row["wall_ms_per_step"]) for row in shown]),
        "score": (2, [_scored(row, "relative") for row in shown]),
        "own score": (8, [_scored(row, "individual") for row in shown]),
        "late": (7, ["" if row["late_ms_per_step"] is None else ms(row["late_ms_per_step"]) for row in shown]),
        "times last": (4, ["" if row["times_last"] is None else str(row["times_last"]) for row in shown]),
        f"peak {unit}": (5, ["" if row["peak_bytes"] is None else f"{row['peak_bytes'] / size:.2f}" for row in shown]),
        "MFU": (5, ["" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %" for row in shown]),
    }


def _scored(row: dict[str, Any], which: str) -> str:
    score = row[f"{which}_score"]
    return "" if score is None else f"{score:.2f}" + ("!" if score < SLOW else "*" if row[f"flagged_{which}"] else "")


def _notes(
    report: RanksReport, data: dict[str, Any], names: Sequence[str], left_out: Sequence[str], shown: int
) -> Iterator[str]:
    """What the columns say, and what is not there."""
    count, window, waiting = len(data["ranks"]), report.scores.window, data["waiting"]
    if shown < count:
        yield f"{shown} of {count} ranks: those named (>), then those with the most time of their own"
    elif report.named_ranks:
        yield "> is named by the verdict"
    of_stage = " of its stage" if len(data["stages"]) > 1 else ""
    score = f"score: the quickest rank{of_stage} over this one, the median of windows of steps; ! below {SLOW}"
    if any("*" in _scored(row, which) for row in data["ranks"] for which in ("relative", "individual")):
        score += f", * below it in {WINDOWS} windows of {counted(window, 'step')} in a row"
    met = 0 if report.arrivals is None else len(report.arrivals.step)
    last = f"times last: to how many of {met:,} collectives it came last, in all steps"
    meanings = _MEANINGS | {"score": score, "times last": last}
    yield from (meanings[name] for name in names if name in meanings)
    if left_out:
        yield f"no room for {', '.join(left_out)}"
    if waiting == "measured" and report.arrivals is None:
        yield "waiting: transfer or waiting, as no two ranks tell of the same communication"
    if waiting == "estimated":
        yield "waiting is estimated: after a phase in which ranks meet, what it took beyond the quickest"
    if unknown := data["unknown"]["waiting_ms_per_step"]:
        yield f"waiting is not known: {unknown}"
    if report.own.basis == "device":
        yield "forward, backward and recompute are the device's time"


_MOST_SUSPECTS = 6
_MOST_ROWS = 12  # of layers, collectives or names
_LEAST_SHARE = 0.01  # of the lost time


def suspects_table(report: RanksReport, width: int) -> str:
    """Everything that was weighed and cost time."""
    found = [one for one in report.verdict.suspects if one.lost_ns > 0 and one.share >= _LEAST_SHARE][:_MOST_SUSPECTS]
    rows = [
        [shorten(clean(one.who), 40), clean(one.cause), ms(one.lost_ns / 1e6), percent(one.share), str(one.steps or "")]
        for one in found
    ]
    header = ["suspect", "cause", "ms per step", "of lost time", "steps"]
    notes = ["what the job gains without each; they overlap", "steps: in which it cost time"] if rows else []
    return table("Lost time, by suspect", header, rows, width, notes=notes)


def stages_table(report: RanksReport, width: int) -> str:
    """Whose time a step was: parts that add up to the longest rank's self time of the stage."""
    data = report.to_dict()
    staged, rows = len(data["stages"]) > 1, []
    for stage, parts in groupby(data["lost"], key=lambda row: row["stage"]):
        for part in sorted(parts, key=lambda row: -row["held_ms_per_step"])[: 4 if staged else 9]:
            is_transfer = part["kind"] == "communication" and data["waiting"] != "unknown"
            of, share = part["most_by_rank"], part["share_of_that_rank"]
            mostly_on = ["", ""] if of is None else [f"rank {of}", percent(share)]
            kind = "transfer" if is_transfer else part["kind"]
            rows.append([str(stage) if staged else "", kind, ms(part["held_ms_per_step"]), *mostly_on])
    kept, count = rows[:24], len(data["lost"])
    title = "What a step is made of, kind after kind: what each adds to the time of the rank slowest so far"
    notes = [
        f"the parts{' of a stage' if staged else ''} add up to the mean of the longest step, "
        "which is another rank's in each",
        "mostly on: the rank slowest up to the end of that kind, and its share of the part",
    ]
    if len(kept) < count:
        notes.append(f"{len(kept)} of {count} rows: the longest of each stage")
    return table(title, ["stage", "kind", "ms per step", "mostly on", "share"], kept, width, notes=notes)


def named_table(report: RanksReport, width: int) -> str:
    """Spans whose names tell no kind: what they take on the rank where they take longest, and on the others."""
    spans = report.named_spans
    rows = [
        [
            _name(one.name, width - 40),
            "-" if one.others_ns is None else ms(one.others_ns / 1e6),
            ms(one.slowest_ns / 1e6),
            f"rank {one.slowest_rank}",
            f"{one.per_step:.3g}",
            "within others" if one.nested else "",
        ]
        for one in spans[:_MOST_ROWS]
    ]
    title = f"Named spans of no known kind, in ms per step ({len(rows)} of {len(spans)}, those that differ most)"
    notes = [
        "their time is in other, or in the spans that they are within",
        "others: the median of the other ranks",
        "names that tell a kind: profiler-wrapper ranks --help",
    ]
    return table(title, ["span", "others", "slowest", "of", "per step", "place"], rows, width, notes=notes)


def layers_table(report: RanksReport, width: int) -> str:
    """Layers over the ranks that have them, those that differ most."""
    found = sorted(layers_over_ranks(report.layers), key=lambda row: -row["beyond_ms"])
    rows = [
        [
            _name(row["layer"], width - 62),
            row["kind"],
            ms(row["typical_ms"]),
            ms(row["quickest_ms"]),
            ms(row["typical_deviation_ms"]),
            ms(row["slowest_ms"]),
            "" if row["slowest_rank"] is None else f"rank {row['slowest_rank']}",
            f"rank {few(row['outliers'])}" if row["outliers"] else "",
        ]
        for row in found[:_MOST_ROWS]
    ]
    title = f"Layers over ranks, in ms of the median step ({len(rows)} of {len(found)}, those that differ most)"
    header = ["layer", "phase", "median", "quickest", "spread", "slowest", "of", "outliers"]
    notes = ["spread: typical deviation over ranks", "outliers: ranks 4 of these and a tenth beyond the median"]
    return table(title, header, rows, width, notes=notes)


def _name(name: str, room: int) -> str:
    return shorten(clean(name), max(12, min(40, room)))


def communication_table(report: RanksReport, width: int) -> str:
    """What each collective moves, how fast, and what of it is waiting."""
    staged = len(set(report.own.stages.tolist())) > 1
    shown = report.communication[:_MOST_ROWS]
    rows = [_of_one(row, staged=staged) for row in shown]
    header = ["communication", "group", "ranks", "times", "bytes", "GB/s", "transfer", "waiting", "waited", "hidden"]
    title = f"Communication of one rank, in all steps, in ms ({len(rows)} of {len(report.communication)}, the longest)"
    notes = ["transfer: the shortest over the ranks of each, as who came last did not wait"]
    if any(row.transfer_ns is None for row in shown):
        notes.append("?: transfer and waiting are one, as no two ranks tell of the same communication")
    if any(row.is_call for row in shown):
        notes.append("(call): what the calling thread takes to start the collectives of that name")
    if any(row.bytes is not None for row in shown):
        notes.append("GB/s: 10^9 bytes over transfer")
    if any(row.overlapped_ns for row in shown):
        hidden = "hidden: part of the time that ran beside compute, which is in no rank's transfer or waiting above"
        notes.append(hidden)
    return table(title, header, rows, width, notes=notes)


def _of_one(row: CommunicationRow, *, staged: bool) -> list[str]:
    ranks_ms = max(1, row.size) * 1e6  # in nanoseconds of all ranks
    group = row.group if staged or row.group != "stage 0" else "all"
    return [
        shorten(clean(row.name), 26) + " (call)" * row.is_call,
        shorten(clean(group), 16) or "-",
        str(row.size),
        f"{row.instances:,}",
        "" if row.bytes is None else file_size(row.bytes),
        "" if row.bandwidth_bytes_per_s is None else f"{row.bandwidth_bytes_per_s / 1e9:.3g}",
        ms((row.time_ns if row.transfer_ns is None else row.transfer_ns) / ranks_ms) + " ?" * (row.transfer_ns is None),
        "?" if row.waiting_ns is None else ms(row.waiting_ns / ranks_ms),
        "" if not row.time_ns or row.waiting_ns is None else percent(row.waiting_ns / row.time_ns),
        "" if not row.time_ns or not row.overlapped_ns else percent(row.overlapped_ns / row.time_ns),
    ]


# --- The report on many ranks as text: the verdict first, then what it stands on, then what is not known ---


def ranks_text(report: RanksReport, *, width: int = 100) -> str:
    """The verdict, its evidence, lost time, ranks, layers, communication, what is missing and the clocks.

    Every line fits into `width` columns; tables leave out what matters least.
    """
    width = max(width, 40)
    missing = [f"{row.what}: {row.reason}" for row in report.missing]
    if len(missing) > 20:
        missing[20:] = [f"and {len(missing) - 20} more"]
    parts = [
        _head(report, width),
        suspects_table(report, width),
        ranks_table(report, width),
        named_table(report, width),
        stages_table(report, width),
        layers_table(report, width),
        communication_table(report, width),
        bullets("Not known", _unknown(report), width),
        bullets("Missing", missing, width),
        "\n".join(line for one in _clocks(report) for line in wrapped(one, width)),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(report: RanksReport, width: int) -> str:
    verdict, own = report.verdict, report.own
    is_part = report.world_size is not None and report.world_size != len(own.ranks)
    about = [
        counted(len(own.ranks), "rank") + (f" of {report.world_size}" if is_part else ""),
        counted(len(own.steps), "step"),
        counted(report.spans, "span"),
    ]
    if verdict.wall_ns is not None:
        about.append(f"a step takes {ms(verdict.wall_ns / 1e6)} ms")
    if verdict.step_ns is not None and verdict.ideal_ns is not None and len(own.ranks) > 1:
        busy_ns = float(largest(mean(report.steady.self_ns.sum(axis=2))))
        about.append(f"the slowest rank is busy for {ms(busy_ns / 1e6)} ms")
        about.append(f"{ms(verdict.ideal_ns / 1e6)} ms if all were as quick as the typical one")
    about.append(f"confidence {verdict.confidence}")
    for name, value, of in (("Ms", verdict.ms, "the last stage"), ("Mw", verdict.mw, "the slowest few ranks")):
        if value is not None and len(set(own.stages.tolist())) > 1:
            about.append(f"{name} {value:.3f} (of the lost time, by {of})")
    said = bullets(verdict.sentence, verdict.evidence, width) or "\n".join(wrapped(verdict.sentence, width))
    return "\n".join([said, *wrapped("; ".join(about), width)])


def _unknown(report: RanksReport) -> Iterator[str]:
    """What could not be attributed or measured, and why."""
    own, rows = report.steady, report.communication
    if report.peak_unknown is not None:
        yield f"peak memory: {report.peak_unknown}"
    if report.mfu_unknown is not None:
        yield f"MFU: {report.mfu_unknown}"
    shares = mean(own.of("other")) / np.maximum(mean(own.wall_ns), 1.0)
    most = float(largest(shares))
    if most >= 0.01:  # less is left out
        rank, usual = own.ranks[np.nanargmax(shares)], percent(float(typical(shares, axis=0)))
        yield (
            f"time in no span{' of a known kind' if report.named_spans else ''}: "
            f"{usual} of a step of the typical rank, at most {percent(most)} (rank {rank})"
        )
    if report.layers is None:
        yield "layers: no span is of a layer: LayerTimer, or a trace, has them"
    if not rows:
        estimated = ": waiting was estimated" if waiting_source(own)[0] == "estimated" else ""
        yield f"communication: none was recorded{estimated}"
    counts = Counter(reason for row in rows for reason in row.unknown.split("; ") if reason)
    for reason, times in counts.items():
        yield reason if times == len(rows) else f"{reason} ({times} of {len(rows)})"


def _clocks(report: RanksReport) -> tuple[str, ...]:
    clocks = report.clocks
    if clocks is None:
        return ()
    if clocks.source == "none":
        return (f"Clocks: not aligned: {'; '.join(clocks.notes)}",)
    residual = clocks.residual_ns[np.isfinite(clocks.residual_ns)] / 1e3
    left = f"{np.median(residual):.1f} us, at most {residual.max():.1f} us" if len(residual) else "-"
    said = (
        f"Clocks: aligned by {clocks.events:,} ends of {clocks.source}; residual {left}; "
        f"they differ by up to {np.nanmax(np.abs(clocks.offset_ns)) / 1e6:.3f} ms"
    )
    return (said, *clocks.notes)
