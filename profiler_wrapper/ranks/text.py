"""Tables of the text on many ranks: suspects, who held a step, layers over ranks, communication."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from profiler_wrapper.analysis.statistics import mean
from profiler_wrapper.ranks.model import CommunicationRow, Float, Suspect
from profiler_wrapper.ranks.report import RanksReport, layers_over_ranks
from profiler_wrapper.ranks.times import SLOW, WINDOWS, is_call, largest, typical, waiting_source
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.trace.spans import ranges
from profiler_wrapper.units import file_size

# --------------------------------------------------------------------------------------------------
# What texts on many ranks are made of: tables that fit, wrapped lines, numbers with few digits.


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, notes: Sequence[str] = ()
) -> str:
    """A table below its title, with notes below it; its last columns are left out until it fits."""
    if not rows:
        return ""
    columns = {name: (at, [row[at] for row in rows]) for at, name in enumerate(header)}
    text, _ = fitting(columns, width, left_columns=2)
    return titled(title, "\n".join(shorten(line, width) for line in text.split("\n")), notes, width)


def titled(title: str, text: str, notes: Sequence[str], width: int) -> str:
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
_SCORES = ("relative", "individual")


def ranks_table(report: RanksReport, width: int) -> str:
    """Those that are named, marked, and those with the most time of their own; what each column says is below."""
    data = report.to_dict()
    rows = data["ranks"]
    if not rows:
        return ""
    named = report.named_ranks
    shown = _shown(rows, named)
    columns = _columns(report, data, shown, named)
    text, left_out = fitting(columns, width)
    names = [name for name, (_, texts) in columns.items() if any(texts) and name not in left_out]
    count = len(report.steady.steps)
    then = "" if data["waiting"] == "unknown" else ", then what it waited for others"
    title = (
        f"Ranks: what each did itself{then}, in ms per step "
        f"(mean of the {count} step{'' if count == 1 else 's'} that {'was' if count == 1 else 'were'} judged)"
    )
    return titled(title, text, _notes(report, data, names, left_out, len(shown)), width)


def _columns(
    report: RanksReport, data: dict[str, Any], shown: Sequence[dict[str, Any]], named: frozenset[int]
) -> Columns:
    rows = data["ranks"]
    size, unit = (1, "") if report.peak_bytes is None else memory_unit(report.peak_bytes)
    kinds = [kind for kind in report.own.kinds if any(row["own_ms_per_step"].get(kind) for row in rows)]
    columns: Columns = {
        "rank": (0, [f"{'> ' if row['rank'] in named else '  '}{row['rank']}" for row in shown]),
        "stage": (2, [str(row["stage"]) for row in shown] if len({row["stage"] for row in rows}) > 1 else []),
        "host": (9, [shorten(clean(row["host"] or ""), 16) for row in shown]),
    }
    for kind in kinds:
        name = "transfer" if kind == "communication" and data["waiting"] != "unknown" else kind
        soon = 1 if kind in ("data", "forward", "backward") else 6 if kind == "other" else 4
        columns[name] = soon, [ms(row["own_ms_per_step"].get(kind, 0.0)) for row in shown]
    return columns | {
        "waiting": (1, [ms(row["waiting_ms_per_step"]) for row in shown]),
        "step": (3, [ms(row["wall_ms_per_step"]) for row in shown]),
        "score": (2, [_scored(row["relative_score"], row["flagged_relative"]) for row in shown]),
        "own score": (8, [_scored(row["individual_score"], row["flagged_individual"]) for row in shown]),
        "late": (7, ["" if row["late_ms_per_step"] is None else ms(row["late_ms_per_step"]) for row in shown]),
        "times last": (4, ["" if row["times_last"] is None else str(row["times_last"]) for row in shown]),
        f"peak {unit}": (5, ["" if row["peak_bytes"] is None else f"{row['peak_bytes'] / size:.2f}" for row in shown]),
        "MFU": (5, ["" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %" for row in shown]),
    }


def _scored(score: float | None, flagged: bool) -> str:
    if score is None:
        return ""
    return f"{score:.2f}" + ("!" if score < SLOW else "*" if flagged else "")


_MEANINGS = {
    "other": "other: in no span, or in one whose name tells no kind",
    "transfer": "transfer: communication without waiting",
    "own score": "own score: its own best over now",
    "late": "late: by how much it came last to collectives, in ms per step",
}


def _notes(
    report: RanksReport, data: dict[str, Any], names: Sequence[str], left_out: Sequence[str], shown: int
) -> list[str]:
    """What the columns say, and what is not there."""
    count, window = len(data["ranks"]), report.scores.window
    of_stage = " of its stage" if len(data["stages"]) > 1 else ""
    score = f"score: the quickest rank{of_stage} over this one, the median of windows of steps; ! below {SLOW}"
    if any(
        row[f"flagged_{which}"] and (row[f"{which}_score"] or 0) >= SLOW for row in data["ranks"] for which in _SCORES
    ):
        score += f", * below it in {WINDOWS} windows of {counted(window, 'step')} in a row"
    met = 0 if report.arrivals is None else len(report.arrivals.step)
    last = f"times last: to how many of {met:,} collectives it came last, in all steps"
    meanings = _MEANINGS | {"score": score, "times last": last}
    unknown = data["unknown"]["waiting_ms_per_step"]
    notes = {
        f"{shown} of {count} ranks: those named (>), then those with the most time of their own": shown < count,
        "> is named by the verdict": shown == count and report.named_ranks,
        **{meanings[name]: True for name in names if name in meanings},
        f"no room for {', '.join(left_out)}": left_out,
        "waiting: transfer or waiting, as no two ranks tell of the same communication": (
            data["waiting"] == "measured" and report.arrivals is None
        ),
        "waiting is estimated: after a phase in which ranks meet, what it took beyond the quickest": (
            data["waiting"] == "estimated"
        ),
        f"waiting is not known: {unknown}": unknown,
        "forward, backward and recompute are the device's time": report.own.basis == "device",
    }
    return [note for note, is_said in notes.items() if is_said]


def _shown(rows: list[dict[str, Any]], named: frozenset[int]) -> list[dict[str, Any]]:
    if len(rows) <= _MOST_RANKS:
        return rows
    order = sorted(rows, key=lambda row: (row["rank"] not in named, -sum(row["own_ms_per_step"].values())))
    return sorted(order[:_MOST_RANKS], key=lambda row: int(row["rank"]))


_MOST_SUSPECTS = 6
_LEAST_SHARE = 0.01  # of the lost time
_MOST_LAYERS = 12
_MOST_COLLECTIVES = 12
_MOST_NAMES = 12
_CALL = " (call)"
_LONGEST_NAME = 40
_LONGEST_SUSPECT = 26


def suspects_table(report: RanksReport, width: int) -> str:
    """Everything that was weighed and cost time."""
    found = [one for one in report.verdict.suspects if one.lost_ns > 0 and one.share >= _LEAST_SHARE][:_MOST_SUSPECTS]
    rows = [
        [_who(one), clean(one.cause), ms(one.lost_ns / 1e6), percent(one.share), str(one.steps or "")] for one in found
    ]
    header = ["suspect", "cause", "ms per step", "of lost time", "steps"]
    notes = ["what the job gains without each; they overlap", "steps: in which it cost time"] if rows else []
    return table("Lost time, by suspect", header, rows, width, notes=notes)


def _who(suspect: Suspect) -> str:
    if suspect.host is not None:
        name = f"host {suspect.host}"
    elif suspect.verdict == "stage" and suspect.stage is not None and suspect.layer is None:
        name = f"stage {suspect.stage}"
    elif suspect.named_ranks:
        name = f"rank{'s' if len(suspect.named_ranks) > 1 else ''} {ranges(suspect.named_ranks)}"
    else:
        name = "all ranks"
    return name if suspect.layer is None else f"{name}, {shorten(clean(suspect.layer), _LONGEST_SUSPECT)}"


def stages_table(report: RanksReport, width: int) -> str:
    """Whose time a step was: parts that add up to the longest rank's self time of the stage."""
    data = report.to_dict()
    staged, rows = len(data["stages"]) > 1, []
    for stage, parts in groupby(data["lost"], key=lambda row: row["stage"]):
        for part in sorted(parts, key=lambda row: -row["held_ms_per_step"])[: 4 if staged else 9]:
            rows.append(
                [
                    str(stage) if staged else "",
                    "transfer" if part["kind"] == "communication" and data["waiting"] != "unknown" else part["kind"],
                    ms(part["held_ms_per_step"]),
                    "" if part["most_by_rank"] is None else f"rank {part['most_by_rank']}",
                    "" if part["most_by_rank"] is None else percent(part["share_of_that_rank"]),
                ]
            )
    kept, count = rows[:24], len(data["lost"])
    title = "What a step is made of, kind after kind: what each adds to the time of the rank slowest so far"
    left_out = [f"{len(kept)} of {count} rows: the longest of each stage"] if len(kept) < count else []
    notes = [
        f"the parts{' of a stage' if staged else ''} add up to the mean of the longest step, "
        "which is another rank's in each",
        "mostly on: the rank slowest up to the end of that kind, and its share of the part",
        *left_out,
    ]
    return table(title, ["stage", "kind", "ms per step", "mostly on", "share"], kept, width, notes=notes)


def named_table(report: RanksReport, width: int) -> str:
    """Spans whose names tell no kind: what they take on the rank where they take longest, and on the others."""
    spans = report.named_spans
    rows = [
        [
            shorten(clean(one.name), max(12, min(_LONGEST_NAME, width - 40))),
            "-" if one.others_ns is None else ms(one.others_ns / 1e6),
            ms(one.slowest_ns / 1e6),
            f"rank {one.slowest_rank}",
            f"{one.per_step:.3g}",
            "within others" if one.nested else "",
        ]
        for one in spans[:_MOST_NAMES]
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
            shorten(clean(row["layer"]), max(12, min(_LONGEST_NAME, width - 62))),
            row["kind"],
            ms(row["typical_ms"]),
            ms(row["quickest_ms"]),
            ms(row["typical_deviation_ms"]),
            ms(row["slowest_ms"]),
            "" if row["slowest_rank"] is None else f"rank {row['slowest_rank']}",
            f"rank {few(row['outliers'])}" if row["outliers"] else "",
        ]
        for row in found[:_MOST_LAYERS]
    ]
    title = f"Layers over ranks, in ms of the median step ({len(rows)} of {len(found)}, those that differ most)"
    header = ["layer", "phase", "median", "quickest", "spread", "slowest", "of", "outliers"]
    notes = ["spread: typical deviation over ranks", "outliers: ranks 4 of these and a tenth beyond the median"]
    return table(title, header, rows, width, notes=notes)


def communication_table(report: RanksReport, width: int) -> str:
    """What each collective moves, how fast, and what of it is waiting."""
    staged = len(set(report.own.stages.tolist())) > 1
    shown = report.communication[:_MOST_COLLECTIVES]
    rows = [_of_one(row, staged=staged, call=is_call(row, report.communication)) for row in shown]
    header = ["communication", "group", "ranks", "times", "bytes", "GB/s", "transfer", "waiting", "waited", "hidden"]
    title = f"Communication of one rank, in all steps, in ms ({len(rows)} of {len(report.communication)}, the longest)"
    notes = {
        "transfer: the shortest over the ranks of each, as who came last did not wait": True,
        "?: transfer and waiting are one, as no two ranks tell of the same communication": any(
            row.transfer_ns is None for row in shown
        ),
        "(call): what the calling thread takes to start the collectives of that name": any(
            row[0].endswith(_CALL) for row in rows
        ),
        "GB/s: 10^9 bytes over transfer": any(row.bytes is not None for row in shown),
        "hidden: part of the time that ran beside compute, which is in no rank's transfer or waiting above": any(
            row.overlapped_ns for row in shown
        ),
    }
    return table(title, header, rows, width, notes=[note for note, is_said in notes.items() if is_said])


def _of_one(row: CommunicationRow, *, staged: bool, call: bool) -> list[str]:
    ranks = max(1, row.size)
    group = row.group if staged or row.group != "stage 0" else "all"
    return [
        shorten(clean(row.name), 26) + _CALL * call,
        shorten(clean(group), 16) or "-",
        str(row.size),
        f"{row.instances:,}",
        "" if row.bytes is None else file_size(row.bytes),
        "" if row.bandwidth_bytes_per_s is None else f"{row.bandwidth_bytes_per_s / 1e9:.3g}",
        ms(row.time_ns / 1e6 / ranks) + " ?" if row.transfer_ns is None else ms(row.transfer_ns / 1e6 / ranks),
        "?" if row.waiting_ns is None else ms(row.waiting_ns / 1e6 / ranks),
        "" if not row.time_ns or row.waiting_ns is None else percent(row.waiting_ns / row.time_ns),
        "" if not row.time_ns or not row.overlapped_ns else percent(row.overlapped_ns / row.time_ns),
    ]


# --------------------------------------------------------------------------------------------------
# The report on many ranks as text: the verdict first, then what it stands on, then what is not known.

_MOST_MISSING = 20
_NARROWEST = 40
_LEAST_OTHER = 0.01  # of a step, in no span: less is left out


def ranks_text(report: RanksReport, *, width: int = 100) -> str:
    """The verdict, its evidence, lost time, ranks, layers, communication, what is missing and the clocks.

    Every line fits into `width` columns; tables leave out what matters least.
    """
    width = max(width, _NARROWEST)
    parts = [
        _head(report, width),
        suspects_table(report, width),
        ranks_table(report, width),
        named_table(report, width),
        stages_table(report, width),
        layers_table(report, width),
        communication_table(report, width),
        _unknown(report, width),
        _missing(report, width),
        _clocks(report, width),
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
    staged = len(set(own.stages.tolist())) > 1
    if verdict.wall_ns is not None:
        about.append(f"a step takes {ms(verdict.wall_ns / 1e6)} ms")
    if verdict.step_ns is not None and verdict.ideal_ns is not None and len(own.ranks) > 1:
        busy_ns = float(largest(mean(report.steady.self_ns.sum(axis=2))))
        about.append(f"the slowest rank is busy for {ms(busy_ns / 1e6)} ms")
        about.append(f"{ms(verdict.ideal_ns / 1e6)} ms if all were as quick as the typical one")
    about.append(f"confidence {verdict.confidence}")
    if staged:
        for name, value, of in (("Ms", verdict.ms, "the last stage"), ("Mw", verdict.mw, "the slowest few ranks")):
            if value is not None:
                about.append(f"{name} {value:.3f} (of the lost time, by {of})")
    said = bullets(verdict.sentence, verdict.evidence, width) or "\n".join(wrapped(verdict.sentence, width))
    return "\n".join([said, *wrapped("; ".join(about), width)])


# --- what is not known ---


def _unknown(report: RanksReport, width: int) -> str:
    """What could not be attributed or measured, and why."""
    estimated = ": waiting was estimated" if waiting_source(report.steady)[0] == "estimated" else ""
    no_layers = "no span is of a layer: LayerTimer, or a trace, has them"
    unknown = {
        "peak memory": report.peak_unknown,
        "MFU": report.mfu_unknown,
        f"time in no span{' of a known kind' if report.named_spans else ''}": _in_no_span(report),
        "layers": None if report.layers is not None else no_layers,
        "communication": None if report.communication else f"none was recorded{estimated}",
    }
    texts = [f"{what}: {why}" for what, why in unknown.items() if why is not None]
    return bullets("Not known", [*texts, *_communication_unknown(report)], width)


def _in_no_span(report: RanksReport) -> str | None:
    own = report.steady
    shares = mean(own.of("other")) / np.maximum(mean(own.wall_ns), 1.0)
    if not np.isfinite(shares).any() or np.nanmax(shares) < _LEAST_OTHER:
        return None
    rank = int(own.ranks[np.nanargmax(shares)])
    share, most = float(typical(shares, axis=0)), float(np.nanmax(shares))
    return f"{percent(share)} of a step of the typical rank, at most {percent(most)} (rank {rank})"


def _communication_unknown(report: RanksReport) -> list[str]:
    """Each reason why overlap or bandwidth are not known, and of how many collectives."""
    counts = Counter(reason for row in report.communication for reason in row.unknown.split("; ") if reason)
    count = len(report.communication)
    return [reason if times == count else f"{reason} ({times} of {count})" for reason, times in counts.items()]


def _missing(report: RanksReport, width: int) -> str:
    texts = [f"{row.what}: {row.reason}" for row in report.missing[:_MOST_MISSING]]
    more = len(report.missing) - _MOST_MISSING
    return bullets("Missing", texts + [f"and {more} more"] * (more > 0), width)


def _clocks(report: RanksReport, width: int) -> str:
    clocks = report.clocks
    if clocks is None:
        return ""
    if clocks.source == "none" or not len(clocks.ranks):
        why = "; ".join(clocks.notes) or "the ranks have nothing in common"
        return "\n".join(wrapped(f"Clocks: not aligned: {why}", width))
    events = {"collectives": "ends of collectives", "steps": "ends of steps"}[clocks.source]
    residual = clocks.residual_ns[np.isfinite(clocks.residual_ns)]
    said = (
        f"Clocks: aligned by {clocks.events:,} {events}; residual "
        + (f"{np.median(residual) / 1e3:.1f} us, at most {residual.max() / 1e3:.1f} us" if len(residual) else "-")
        + f"; they differ by up to {np.nanmax(np.abs(clocks.offset_ns)) / 1e6:.3f} ms"
    )
    return "\n".join(line for one in (said, *clocks.notes) for line in wrapped(one, width))
