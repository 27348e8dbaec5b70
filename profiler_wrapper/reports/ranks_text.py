"""The report on many ranks as text: the verdict first, then what it stands on."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from profiler_wrapper.analysis.ranks.model import RanksReport, Suspect
from profiler_wrapper.reports.ranks_rows import culprits, layers_over_ranks
from profiler_wrapper.reports.text import cells, clean, grid, shorten

_MOST_RANKS = 16
_MOST_SUSPECTS = 6
_LEAST_SHARE = 0.005  # of the lost time
_MOST_LAYERS = 12
_MOST_COLLECTIVES = 12
_MOST_MISSING = 20
_LONGEST_NAME = 40
_LONGEST_SUSPECT = 26
_NARROWEST = 40


def ranks_text(report: RanksReport, *, width: int = 100) -> str:
    """The verdict, its evidence, lost time, ranks, layers, communication, what is missing and the clocks.

    Every line fits into `width` columns; tables leave out what matters least.
    """
    width = max(width, _NARROWEST)
    parts = [
        _head(report, width),
        _suspects(report, width),
        _ranks(report, width),
        _stages(report, width),
        _layers(report, width),
        _communication(report, width),
        _missing(report, width),
        _clocks(report, width),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(report: RanksReport, width: int) -> str:
    verdict, own = report.verdict, report.own
    about = [
        f"{len(own.ranks)} ranks" + (f" of {report.world_size}" if _is_part(report) else ""),
        f"{len(own.steps)} steps",
        f"{report.spans:,} spans",
    ]
    if verdict.step_ns is not None:
        about.append(f"a step takes {_ms(verdict.step_ns / 1e6)} ms")
    if verdict.ideal_ns is not None:
        about.append(f"{_ms(verdict.ideal_ns / 1e6)} ms were all alike")
    about.append(f"confidence {verdict.confidence}")
    for name, value in (("Ms", verdict.ms), ("Mw", verdict.mw)):
        if value is not None and len(set(own.stages.tolist())) > 1:
            about.append(f"{name} {value:.3f}")
    lines = _wrapped(verdict.sentence, width)
    lines += [line for one in verdict.evidence for line in _wrapped(one, width, first="  - ")]
    return "\n".join([*lines, *_wrapped("; ".join(about), width)])


def _is_part(report: RanksReport) -> bool:
    return report.world_size is not None and report.world_size != len(report.own.ranks)


# --- suspects ---


def _suspects(report: RanksReport, width: int) -> str:
    found = [one for one in report.verdict.suspects if one.lost_ns > 0 and one.share >= _LEAST_SHARE][:_MOST_SUSPECTS]
    rows = [
        [_who(one), clean(one.cause), _ms(one.lost_ns / 1e6), _percent(one.share), str(one.steps or "")]
        for one in found
    ]
    header = ["suspect", "cause", "ms per step", "of the lost", "steps"]
    return _table("Lost time, by suspect (they overlap: each is what the job gains without it)", header, rows, width)


def _who(suspect: Suspect) -> str:
    if suspect.rank is not None:
        name = f"rank {suspect.rank}"
    elif suspect.stage is not None:
        name = f"stage {suspect.stage}"
    else:
        name = {"data": "data loading", "gc": "garbage collection"}.get(suspect.verdict, suspect.verdict)
    return name if suspect.layer is None else f"{name}, {shorten(clean(suspect.layer), _LONGEST_SUSPECT)}"


# --- ranks ---


def _ranks(report: RanksReport, width: int) -> str:
    rows = report.to_dict()["ranks"]
    if not rows:
        return ""
    kinds = [kind for kind in report.own.kinds if any(row["own_ms_per_step"].get(kind) for row in rows)]
    named = culprits(report)
    shown = _shown(rows, named)
    columns: dict[str, tuple[int, list[str]]] = {  # name: (how soon it is left out, texts)
        "rank": (0, [f"{'> ' if row['rank'] in named else '  '}{row['rank']}" for row in shown]),
        "stage": (2, [str(row["stage"]) for row in shown] if len({row["stage"] for row in rows}) > 1 else []),
        "host": (7, [shorten(clean(row["host"] or ""), 16) for row in shown]),
    }
    for kind in kinds:
        important = kind in ("data", "forward", "backward")
        texts = [_ms(row["own_ms_per_step"].get(kind, 0.0)) for row in shown]
        columns[kind] = (1 if important else 4, texts)
    columns |= {
        "waiting": (1, [_ms(row["waiting_ms_per_step"]) for row in shown]),
        "step": (3, [_ms(row["wall_ms_per_step"]) for row in shown]),
        "score": (2, [_number(row["relative_score"], 2) + ("!" if row["flagged"] else "") for row in shown]),
        "own score": (6, [_number(row["individual_score"], 2) for row in shown]),
        "last": (4, ["" if row["times_last"] is None else str(row["times_last"]) for row in shown]),
        "late ms": (5, ["" if row["late_ms"] is None else _ms(row["late_ms"]) for row in shown]),
        "peak GiB": (8, ["" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}" for row in shown]),
        "MFU": (8, ["" if row["mfu"] is None else _percent(row["mfu"]) for row in shown]),
    }
    names = [name for name, (_, texts) in columns.items() if any(texts)]
    text, left_out = _fitting(columns, names, width)
    lines = [*_wrapped("Ranks: own time in ms per step, then what they waited for others", width), text]
    notes = []
    if len(shown) < len(rows):
        notes.append(f"{len(shown)} of {len(rows)} ranks: those named, then those with the most own time")
    if left_out:
        notes.append(f"no room for {', '.join(left_out)}")
    if "score" not in left_out:
        notes.append("score: 1 is as quick as the quickest of its stage, ! below 0.75 throughout")
    if not report.own.waiting_known:
        notes.append("nothing tells waiting apart: phases may hold waiting for others")
    if report.own.basis == "device":
        notes.append("forward, backward and recompute are the device's time")
    return "\n".join([*lines, *_wrapped("; ".join(notes), width, first="  ")])


def _fitting(columns: dict[str, tuple[int, list[str]]], names: list[str], width: int) -> tuple[str, list[str]]:
    """The table of the columns that fit, and the names of the others."""
    left_out: list[str] = []
    while True:
        text = grid(names, list(zip(*(columns[name][1] for name in names), strict=True)))
        if _width(text) <= width or len(names) == 1:
            return text, left_out
        worst = max(range(len(names)), key=lambda at: (columns[names[at]][0], at))
        left_out.append(names.pop(worst))


def _shown(rows: Sequence[dict[str, Any]], named: Iterable[int]) -> list[dict[str, Any]]:
    if len(rows) <= _MOST_RANKS:
        return list(rows)
    chosen = set(named)
    order = sorted(rows, key=lambda row: (row["rank"] not in chosen, -sum(row["own_ms_per_step"].values())))
    return sorted(order[:_MOST_RANKS], key=lambda row: int(row["rank"]))


# --- stages, layers, communication ---


def _stages(report: RanksReport, width: int) -> str:
    """Whose time a step was: parts that add up to the longest rank's own time of the stage."""
    data = report.to_dict()
    shares = {row["stage"]: row for row in data["stages"]}
    rows = []
    for stage, parts in groupby(data["lost"], key=lambda row: row["stage"]):
        for part in sorted(parts, key=lambda row: -row["held_ms_per_step"]):
            rows.append(
                [
                    str(stage) if len(shares) > 1 else "",
                    part["kind"],
                    _ms(part["held_ms_per_step"]),
                    f"rank {part['most_by_rank']}",
                    _percent(part["share_of_that_rank"]),
                ]
            )
    most = 4 if len(shares) > 1 else 9
    kept = [row for _, group in groupby(rows, key=lambda row: row[0]) for row in list(group)[:most]][:24]
    title = "What held a step, in ms: each kind by the rank that was behind all others at its end"
    return _table(title, ["stage", "kind", "ms per step", "most by", "of it"], kept, width, left_columns=2)


def _layers(report: RanksReport, width: int) -> str:
    found = layers_over_ranks(report)
    rows = [
        [
            shorten(clean(row.layer), max(12, min(_LONGEST_NAME, width - 62))),
            row.kind,
            _ms(row.median_ms),
            _ms(row.spread_ms),
            _ms(row.slowest_ms),
            f"rank {row.slowest_rank}",
            _few(row.outliers),
        ]
        for row in found[:_MOST_LAYERS]
    ]
    title = f"Layers over ranks, in ms per step ({len(rows)} of {len(found)}, those that differ most)"
    header = ["layer", "phase", "median", "spread", "slowest", "of", "outliers"]
    return _table(title, header, rows, width, left_columns=2)


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:3])) + (f" +{len(ranks) - 3}" if len(ranks) > 3 else "")


def _communication(report: RanksReport, width: int) -> str:
    rows = [
        [
            shorten(clean(row.name), 28),
            shorten(clean(row.group), 18),
            str(row.size),
            f"{row.instances:,}",
            "" if row.bytes is None else _bytes(row.bytes),
            "" if row.bandwidth_bytes_per_s is None else f"{row.bandwidth_bytes_per_s / 1e9:.3g}",
            "" if row.transfer_ns is None else _ms(row.transfer_ns / 1e6 / max(1, row.size)),
            "" if row.waiting_ns is None else _ms(row.waiting_ns / 1e6 / max(1, row.size)),
            "" if not row.time_ns or row.waiting_ns is None else _percent(row.waiting_ns / row.time_ns),
        ]
        for row in report.communication[:_MOST_COLLECTIVES]
    ]
    header = ["communication", "group", "ranks", "times", "bytes", "GB/s", "transfer", "waiting", "waited"]
    title = f"Communication of a rank, in ms in all ({len(rows)} of {len(report.communication)}, the longest)"
    return _table(title, header, rows, width, left_columns=2)


# --- what is not known ---


def _missing(report: RanksReport, width: int) -> str:
    lines = [
        line
        for row in report.missing[:_MOST_MISSING]
        for line in _wrapped(f"{row.what}: {row.reason}", width, first="  - ")
    ]
    if len(report.missing) > _MOST_MISSING:
        lines.append(f"  - and {len(report.missing) - _MOST_MISSING} more")
    return "\n".join(["Missing", *lines]) if lines else ""


def _clocks(report: RanksReport, width: int) -> str:
    clocks = report.clocks
    if clocks is None:
        return ""
    if clocks.source == "none" or not len(clocks.ranks):
        said = "Clocks: nothing that ranks have in common, so starts of different ranks cannot be compared"
    else:
        events = {"collectives": "ends of collectives", "steps": "ends of steps"}[clocks.source]
        residual = clocks.residual_ns[np.isfinite(clocks.residual_ns)]
        said = (
            f"Clocks: aligned by {clocks.events:,} {events}; residual "
            + (f"{np.median(residual) / 1e3:.1f} us, at most {residual.max() / 1e3:.1f} us" if len(residual) else "-")
            + f"; offsets up to {np.nanmax(np.abs(clocks.offset_ns)) / 1e6:.3f} ms"
        )
    return "\n".join(line for one in (said, *clocks.notes) for line in _wrapped(one, width))


# --- text ---


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, left_columns: int = 2
) -> str:
    """A table with its title; its last columns are left out until it fits."""
    if not rows:
        return ""
    used = [at for at in range(len(header)) if any(row[at] for row in rows)]
    while True:
        text = grid([header[at] for at in used], [[row[at] for at in used] for row in rows], left_columns=left_columns)
        if _width(text) <= width or len(used) <= 2:
            break
        used.pop()
    lines = [shorten(line, width) for line in text.split("\n")]
    return "\n".join([*_wrapped(title, width), *lines])


def _width(text: str) -> int:
    return max(cells(line) for line in text.split("\n"))


def _wrapped(text: str, width: int, *, first: str = "") -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        clean(text), width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )


def _ms(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.{decimals}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "-"


def _bytes(value: int) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
