"""The table of ranks as text: what each did itself in a step, what it waited, its scores, memory and MFU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from profiler_wrapper.analysis.ranks.model import RanksReport
from profiler_wrapper.analysis.ranks.times import SLOW, WINDOWS
from profiler_wrapper.reports.ranks_rows import culprits
from profiler_wrapper.reports.ranks_text_parts import ms, number, width_of, wrapped
from profiler_wrapper.reports.text import clean, grid, shorten

_MOST_RANKS = 16
_SCORES = ("relative", "individual")

Columns = dict[str, tuple[int, list[str]]]  # name: (how soon it is left out, texts)


def ranks_table(report: RanksReport, width: int) -> str:
    """Those that are named, marked, and those with the most time of their own; what each column says is below."""
    data = report.to_dict()
    rows = data["ranks"]
    if not rows:
        return ""
    named = culprits(report)
    shown = _shown(rows, named)
    columns = _columns(report, data, shown, named)
    names = [name for name, (_, texts) in columns.items() if any(texts)]
    text, left_out = _fitting(columns, names, width)
    count = len(report.told.steps)
    then = "" if data["waiting"] == "unknown" else ", then what it waited for others"
    title = (
        f"Ranks: what each did itself{then}, in ms per step "
        f"(mean of the {count} step{'' if count == 1 else 's'} that {'was' if count == 1 else 'were'} judged)"
    )
    notes = _notes(report, data, [name for name in names if name not in left_out], left_out, len(shown))
    return "\n".join([*wrapped(title, width), text, *wrapped("; ".join(notes), width, first="  ")])


def _columns(
    report: RanksReport, data: dict[str, Any], shown: Sequence[dict[str, Any]], named: Iterable[int]
) -> Columns:
    rows, chosen = data["ranks"], set(named)
    largest = max((row["peak_bytes"] or 0 for row in rows), default=0)
    size, unit = (2**30, "GiB") if largest >= 2**29 else (2**20, "MiB")
    kinds = [kind for kind in report.own.kinds if any(row["own_ms_per_step"].get(kind) for row in rows)]
    columns: Columns = {
        "rank": (0, [f"{'> ' if row['rank'] in chosen else '  '}{row['rank']}" for row in shown]),
        "stage": (2, [str(row["stage"]) for row in shown] if len({row["stage"] for row in rows}) > 1 else []),
        "host": (9, [shorten(clean(row["host"] or ""), 16) for row in shown]),
    }
    for kind in kinds:
        important = kind in ("data", "forward", "backward")
        texts = [ms(row["own_ms_per_step"].get(kind, 0.0)) for row in shown]
        columns["transfer" if kind == "communication" and data["waiting"] != "unknown" else kind] = (
            1 if important else 6 if kind == "other" else 4,
            texts,
        )
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
    return number(score, 2) + ("!" if score < SLOW else "*" if flagged else "")


def _notes(
    report: RanksReport, data: dict[str, Any], names: Sequence[str], left_out: Sequence[str], shown: int
) -> list[str]:
    """What the columns say, and what is not there."""
    notes = []
    count, window = len(data["ranks"]), report.scores.window
    of_stage = " of its stage" if len(data["stages"]) > 1 else ""
    low = f"! below {SLOW}"
    if any(
        row[f"flagged_{which}"] and (row[f"{which}_score"] or 0) >= SLOW for row in data["ranks"] for which in _SCORES
    ):
        low += f", * below it in {WINDOWS} windows of {window} step{'' if window == 1 else 's'} in a row"
    met = 0 if report.arrivals is None else len(report.arrivals.step)
    if shown < count:
        notes.append(f"{shown} of {count} ranks: those named (>), then those with the most time of their own")
    elif culprits(report):
        notes.append("> is named by the verdict")
    for name, meaning in (
        ("other", "other: in no span, or in one whose name tells no kind"),
        ("transfer", "transfer: communication without waiting"),
        ("score", f"score: the quickest rank{of_stage} over this one, the median of windows of steps; {low}"),
        ("own score", "own score: its own best over now"),
        ("late", "late: by how much it came last to collectives, in ms per step"),
        ("times last", f"times last: to how many of {met:,} collectives it came last, in all steps"),
    ):
        if name in names:
            notes.append(meaning)
    if left_out:
        notes.append(f"no room for {', '.join(left_out)}")
    if data["waiting"] == "estimated":
        notes.append("waiting is estimated: after a phase in which ranks meet, what it took beyond the quickest")
    if data["unknown"]["waiting_ms_per_step"] is not None:
        notes.append(f"waiting is not known: {data['unknown']['waiting_ms_per_step']}")
    if report.own.basis == "device":
        notes.append("forward, backward and recompute are the device's time")
    return notes


def _fitting(columns: Columns, names: Sequence[str], width: int) -> tuple[str, list[str]]:
    """The table of the columns that fit, and the names of the others."""
    kept, left_out = list(names), list[str]()
    while True:
        text = grid(kept, list(zip(*(columns[name][1] for name in kept), strict=True)))
        if width_of(text) <= width or len(kept) == 1:
            return text, left_out
        worst = max(range(len(kept)), key=lambda at: (columns[kept[at]][0], at))
        left_out.append(kept.pop(worst))


def _shown(rows: Sequence[dict[str, Any]], named: Iterable[int]) -> list[dict[str, Any]]:
    if len(rows) <= _MOST_RANKS:
        return list(rows)
    chosen = set(named)
    order = sorted(rows, key=lambda row: (row["rank"] not in chosen, -sum(row["own_ms_per_step"].values())))
    return sorted(order[:_MOST_RANKS], key=lambda row: int(row["rank"]))
