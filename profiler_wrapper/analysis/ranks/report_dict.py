"""A report on many ranks as plain data, for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.statistics import median

if TYPE_CHECKING:
    from profiler_wrapper.analysis.ranks.model import (
        Accounting,
        Clocks,
        CommunicationRow,
        LayerTimes,
        NamedSpan,
        RanksReport,
    )

Float = npt.NDArray[np.float64]


def report_dict(report: RanksReport) -> dict[str, Any]:
    """What `RanksReport.to_dict` gives. Averages are over `judged_steps`; why a value is null stands in `unknown`."""
    from profiler_wrapper.analysis.ranks.times import waiting_source  # needs what this module is part of

    source, why_no_waiting = waiting_source(report.told)
    verdict = _verdict_dict(report)
    slowdown = _slowdown(report)
    return {
        "schema_version": 1,
        "run": report.run,
        **verdict,
        "slowdown": slowdown,
        "world_size": report.world_size,
        "spans": report.spans,
        "steps": [int(step) for step in report.own.steps],
        "judged_steps": [int(step) for step in report.told.steps],
        "waiting": source,
        "lost": _lost_dict(report.accounting),
        "ranks": _rank_dicts(report),
        "stages": _stage_dicts(report),
        "communication": _communication_dicts(report.communication),
        "layers": _layer_dicts(report.layers),
        "named_spans": [_named_dict(row) for row in report.named_spans],
        "clocks": _clock_dict(report.clocks),
        "missing": [_row_dict(row) for row in report.missing],
        "unknown": {
            "peak_bytes": report.peak_unknown,
            "mfu": report.mfu_unknown,
            "waiting_ms_per_step": why_no_waiting,
            **_why_null(report, {**verdict, "slowdown": slowdown, "world_size": report.world_size}),
        },
    }


_NO_VERDICT = "no straggler was found"
_OF_ANOTHER_KIND = "the verdict names none"
_NO_REPLAY = "no replay of dependencies was made"


def _why_null(report: RanksReport, found: Mapping[str, Any]) -> dict[str, str]:
    """Of keys of the report that are null, the reason."""
    none = report.verdict.verdict == "none"
    named = _NO_VERDICT if none else _OF_ANOTHER_KIND
    too_few = "too few steps were judged"
    reasons = {
        "rank": named,
        "stage": named if _has_stages(report) else "the job has no stages, or one",
        "layer": named,
        "share": _NO_VERDICT,
        "lost_ms_per_step": _NO_VERDICT,
        "step_ms_per_step": too_few,
        "ideal_ms_per_step": too_few,
        "differ_ms_per_step": too_few,
        "slowdown": too_few,
        "ms": report.replay_unknown or _NO_REPLAY,
        "mw": report.replay_unknown or _NO_REPLAY,
        "world_size": "no file tells it",
    }
    told = {key: why for key, why in reasons.items() if found.get(key) is None}
    if report.replay is None:
        told["ranks.share"] = told["stages.share"] = report.replay_unknown or _NO_REPLAY
    if report.arrivals is None:
        told["ranks.times_last"] = told["ranks.late_ms"] = "no two ranks tell of the same communication"
    if report.clocks is None:
        told["clocks"] = "starts say nothing of when other ranks started"
    return told


def _has_stages(report: RanksReport) -> bool:
    return len(np.unique(report.own.stages)) > 1


def _slowdown(report: RanksReport) -> float | None:
    """T / T ideal: replayed where there is a replay, else of the step that is judged."""
    if report.replay is not None:
        return _number(report.replay.slowdown)
    step_ns, ideal_ns = report.verdict.step_ns, report.verdict.ideal_ns
    return _number(step_ns / ideal_ns) if step_ns is not None and ideal_ns else None


def _verdict_dict(report: RanksReport) -> dict[str, Any]:
    verdict, staged = report.verdict, _has_stages(report)
    found = _row_dict(verdict)
    for key in ("lost_ns", "step_ns", "ideal_ns"):
        value = found.pop(key)
        found[key.replace("_ns", "_ms_per_step")] = None if value is None else value / 1e6
    step, ideal = found["step_ms_per_step"], found["ideal_ms_per_step"]
    found["differ_ms_per_step"] = None if step is None or ideal is None else max(0.0, step - ideal)
    found["stage"] = verdict.stage if staged else None
    found["evidence"] = list(verdict.evidence)
    found["suspects"] = [
        _row_dict(suspect) | {"stage": suspect.stage if staged else None, "evidence": list(suspect.evidence)}
        for suspect in verdict.suspects
    ]
    return found


def _communication_dicts(rows: Sequence[CommunicationRow]) -> list[dict[str, Any]]:
    from profiler_wrapper.analysis.ranks.communication import is_call  # needs what this module is part of

    return [_row_dict(row) | {"is_call": is_call(row, rows)} for row in rows]


def _named_dict(row: NamedSpan) -> dict[str, Any]:
    return {
        "name": row.name,
        "slowest_rank": row.slowest_rank,
        "slowest_ms_per_step": row.slowest_ns / 1e6,
        "others_ms_per_step": None if row.others_ns is None else row.others_ns / 1e6,
        "per_step": row.per_step,
        "nested": row.nested,
    }


def _lost_dict(accounting: Accounting) -> list[dict[str, Any]]:
    """Per stage and kind: the mean time a step was held by it, and the rank that held it most."""
    rows = []
    for place, stage in enumerate(accounting.stages):
        for kind, name in enumerate(accounting.kinds):
            held = accounting.held_ns[:, place, kind]
            if not held.any():
                continue
            holders, at = np.unique(accounting.holder[:, place, kind][held > 0], return_inverse=True)
            by_rank = np.bincount(at, weights=held[held > 0])
            most = int(holders[by_rank.argmax()])
            rows.append(
                {
                    "stage": int(stage),
                    "kind": name,
                    "held_ms_per_step": float(held.mean()) / 1e6,
                    "most_by_rank": most if most >= 0 else None,  # None: the ranks are equally long
                    "share_of_that_rank": float(by_rank.max() / by_rank.sum()) if most >= 0 else None,
                }
            )
    return rows


def _rank_dicts(report: RanksReport) -> list[dict[str, Any]]:
    from profiler_wrapper.analysis.ranks.times import waiting_source  # needs what this module is part of

    own, arrivals, replay = report.told, report.arrivals, report.replay
    source, _ = waiting_source(own)
    met_steps = len(np.unique(arrivals.step)) if arrivals else 0
    means = _means(own.own_ns)  # (R, K)
    waiting, wall = _means(own.waiting_ns), _means(own.wall_ns)
    arrived = {int(rank): at for at, rank in enumerate(arrivals.ranks)} if arrivals else {}
    replayed = {int(rank): at for at, rank in enumerate(replay.ranks)} if replay else {}
    rows = []
    for at, rank in enumerate(own.ranks.tolist()):
        last = arrived.get(rank)
        worker = replayed.get(rank)
        rows.append(
            {
                "rank": rank,
                "stage": int(own.stages[at]),
                **{name: int(values[at]) for name, values in report.coordinates.items() if values[at] >= 0},
                "host": report.hosts[at] if report.hosts else None,
                "own_ms_per_step": {
                    kind: _number(means[at, place] / 1e6) for place, kind in enumerate(own.kinds) if means[at, place]
                },
                "waiting_ms_per_step": None if source == "unknown" else _number(waiting[at] / 1e6),
                "wall_ms_per_step": _number(wall[at] / 1e6),
                "relative_score": _number(float(median(report.scores.relative[:, at]))),
                "individual_score": _number(float(median(report.scores.individual[:, at]))),
                "flagged": bool(report.scores.flagged_relative[at] or report.scores.flagged_individual[at]),
                "flagged_relative": bool(report.scores.flagged_relative[at]),
                "flagged_individual": bool(report.scores.flagged_individual[at]),
                "times_last": None if last is None or arrivals is None else int(arrivals.times_last[last]),
                "late_ms": None if last is None or arrivals is None else _number(arrivals.late_ns[last] / 1e6),
                "late_ms_per_step": (
                    None if last is None or arrivals is None else _number(arrivals.late_ns[last] / 1e6 / met_steps)
                ),
                "share": None if worker is None or replay is None else _number(replay.share_of_rank[worker]),
                "peak_bytes": None if report.peak_bytes is None else _number(report.peak_bytes[at]),
                "mfu": None if report.mfu is None else _number(report.mfu[at]),
            }
        )
    return rows


def _stage_dicts(report: RanksReport) -> list[dict[str, Any]]:
    replay = report.replay
    shares = {int(stage): at for at, stage in enumerate(replay.stages)} if replay else {}
    own = report.told.own_ns.sum(axis=2)
    rows = []
    for stage in np.unique(report.told.stages).tolist():
        members = own[:, report.told.stages == stage]
        at = shares.get(stage)
        rows.append(
            {
                "stage": stage,
                "ranks": int(members.shape[1]),
                "own_ms_per_step": _number(float(median(members.ravel())) / 1e6),
                "share": None if at is None or replay is None else _number(replay.share_of_stage[at]),
            }
        )
    return rows


def _layer_dicts(layers: LayerTimes | None) -> list[dict[str, Any]]:
    """Each layer over its ranks: the typical time, the widest, whose it is, and who is far beyond the others."""
    from profiler_wrapper.analysis.ranks.times import over_ranks  # needs what this module is part of

    rows = []
    for at, layer in enumerate(layers.layers if layers else ()):
        assert layers is not None
        for place, kind in enumerate(layers.kinds):
            times = layers.own_ns[:, at, place]
            known = np.isfinite(times)
            if not known.any():
                continue
            slowest = int(np.nanargmax(times))
            equal = known.sum() > 1 and times[known].min() == times[slowest]
            found = over_ranks(times[known], layers.ranks[known])
            rows.append(
                {
                    "layer": layer,
                    "kind": kind,
                    "ranks": int(known.sum()),
                    "median_ms": float(np.median(times[known])) / 1e6,
                    "slowest_ms": float(times[slowest]) / 1e6,
                    "slowest_rank": None if equal else int(layers.ranks[slowest]),
                    "spread_ms": float(np.std(times[known])) / 1e6,
                    "quickest_ms": float(times[known].min()) / 1e6,
                    "typical_deviation_ms": found.spread / 1e6,
                    "outliers": list(found.outliers),
                }
            )
    return rows


def _clock_dict(clocks: Clocks | None) -> dict[str, Any] | None:
    if clocks is None:
        return None
    return {
        "source": clocks.source,
        "events": clocks.events,
        "largest_offset_ms": _number(_largest(np.abs(clocks.offset_ns)) / 1e6),
        "largest_drift_ppm": _number(_largest(np.abs(clocks.drift)) * 1e6),
        "residual_us": _number(float(median(clocks.residual_ns)) / 1e3),
        "largest_residual_us": _number(_largest(clocks.residual_ns) / 1e3),
        "notes": list(clocks.notes),
    }


def _row_dict(row: Any) -> dict[str, Any]:
    """A frozen row as a dict, floats that are not finite as None."""
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {name: _number(value) if isinstance(value, float) else value for name, value in values.items()}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _means(values: Float) -> Float:
    """Over steps, what is not known left out; nan where nothing is known."""
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))


def _largest(values: Float) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else math.nan
