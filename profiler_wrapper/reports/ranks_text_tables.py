"""Tables of the text on many ranks: suspects, who held a step, layers over ranks, communication."""

from __future__ import annotations

from itertools import groupby

from profiler_wrapper.analysis.ranks.communication import is_call
from profiler_wrapper.analysis.ranks.model import CommunicationRow, RanksReport, Suspect
from profiler_wrapper.reports.ranks_rows import layers_over_ranks
from profiler_wrapper.reports.ranks_text_parts import byte_count, few, ms, percent, table
from profiler_wrapper.reports.text import clean, shorten

_MOST_SUSPECTS = 6
_LEAST_SHARE = 0.005  # of the lost time
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
    if suspect.rank is not None:
        name = f"rank {suspect.rank}"
    elif suspect.stage is not None:
        name = f"stage {suspect.stage}"
    else:
        name = {"data": "data loading", "gc": "garbage collection"}.get(suspect.verdict, suspect.verdict)
    return name if suspect.layer is None else f"{name}, {shorten(clean(suspect.layer), _LONGEST_SUSPECT)}"


def stages_table(report: RanksReport, width: int) -> str:
    """Whose time a step was: parts that add up to the longest rank's own time of the stage."""
    data = report.to_dict()
    shares = {row["stage"]: row for row in data["stages"]}
    rows = []
    for stage, parts in groupby(data["lost"], key=lambda row: row["stage"]):
        for part in sorted(parts, key=lambda row: -row["held_ms_per_step"]):
            rows.append(
                [
                    str(stage) if len(shares) > 1 else "",
                    "transfer" if part["kind"] == "communication" and data["waiting"] != "unknown" else part["kind"],
                    ms(part["held_ms_per_step"]),
                    "" if part["most_by_rank"] is None else f"rank {part['most_by_rank']}",
                    "" if part["most_by_rank"] is None else percent(part["share_of_that_rank"]),
                ]
            )
    most = 4 if len(shares) > 1 else 9
    kept = [row for _, group in groupby(rows, key=lambda row: row[0]) for row in list(group)[:most]][:24]
    title = "What a step is made of, kind after kind: what each adds to the time of the rank slowest so far"
    left_out = [f"{len(kept)} of {len(rows)} rows: the longest of each stage"] if len(kept) < len(rows) else []
    notes = [
        f"the parts{' of a stage' if len(shares) > 1 else ''} add up to the longest rank's step",
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
    found = layers_over_ranks(report)
    rows = [
        [
            shorten(clean(row.layer), max(12, min(_LONGEST_NAME, width - 62))),
            row.kind,
            ms(row.median_ms),
            ms(row.quickest_ms),
            ms(row.spread_ms),
            ms(row.slowest_ms),
            "" if row.slowest_rank is None else f"rank {row.slowest_rank}",
            f"rank {few(row.outliers)}" if row.outliers else "",
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
    rows = [
        _of_one(row, staged=staged, call=is_call(row, report.communication))
        for row in report.communication[:_MOST_COLLECTIVES]
    ]
    header = ["communication", "group", "ranks", "times", "bytes", "GB/s", "transfer", "waiting", "waited", "hidden"]
    title = f"Communication of one rank, in all steps, in ms ({len(rows)} of {len(report.communication)}, the longest)"
    notes = ["transfer: the shortest over the ranks of each, as who came last did not wait"]
    if any(row.transfer_ns is None for row in report.communication[:_MOST_COLLECTIVES]):
        notes.append("?: transfer and waiting are one, as no two ranks tell of the same communication")
    if any(row[0].endswith(_CALL) for row in rows):
        notes.append("(call): what the calling thread takes to start the collectives of that name")
    if any(row.bytes is not None for row in report.communication):
        notes.append("GB/s: 10^9 bytes over transfer")
    if any(row.overlapped_ns for row in report.communication):
        notes.append("hidden: part of the time that ran beside compute")
    return table(title, header, rows, width, notes=notes)


def _of_one(row: CommunicationRow, *, staged: bool, call: bool) -> list[str]:
    ranks = max(1, row.size)
    group = row.group if staged or row.group != "stage 0" else "all"
    return [
        shorten(clean(row.name), 26) + _CALL * call,
        shorten(clean(group), 16) or "-",
        str(row.size),
        f"{row.instances:,}",
        "" if row.bytes is None else byte_count(row.bytes),
        "" if row.bandwidth_bytes_per_s is None else f"{row.bandwidth_bytes_per_s / 1e9:.3g}",
        ms(row.time_ns / 1e6 / ranks) + " ?" if row.transfer_ns is None else ms(row.transfer_ns / 1e6 / ranks),
        "?" if row.waiting_ns is None else ms(row.waiting_ns / 1e6 / ranks),
        "" if not row.time_ns or row.waiting_ns is None else percent(row.waiting_ns / row.time_ns),
        "" if not row.time_ns or not row.overlapped_ns else percent(row.overlapped_ns / row.time_ns),
    ]
