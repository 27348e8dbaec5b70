"""The report on a job of many ranks, from its spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.ranks import times
from profiler_wrapper.ranks.account import KINDS, read_account, sync_each_step
from profiler_wrapper.ranks.clocks import fit, write_table
from profiler_wrapper.ranks.database import Database, LoadedSpans, to_rows
from profiler_wrapper.ranks.excess import LEAST_SHARE_OF_STEP, Job
from profiler_wrapper.ranks.graph import NoGraph, build
from profiler_wrapper.ranks.model import (
    Accounting,
    Arrivals,
    Basis,
    Bool,
    Clocks,
    CommunicationRow,
    Float,
    Int,
    LayerTimes,
    NamedSpan,
    Replay,
    Scores,
    SelfTimes,
    Verdict,
)
from profiler_wrapper.ranks.question import ask
from profiler_wrapper.ranks.replay import what_if
from profiler_wrapper.ranks.verdict import OUTSIDE, unknown, verdict_of
from profiler_wrapper.tables.statistics import MAD_TO_SIGMA, mean, median
from profiler_wrapper.trace.arrays import grouped
from profiler_wrapper.trace.atomic import finite
from profiler_wrapper.trace.rank_files import rank_of_directory
from profiler_wrapper.trace.run_directory import RESULT_FILE
from profiler_wrapper.trace.spans import Gap, ranges

_COORDINATES = ("dp", "tp", "cp", "ep", "pp")
_MOSTLY = 0.9  # of compute spans that have a device's time, so that it counts instead of the CPU's
_NO_STEPS = {
    True: "No name of a span comes again, which would tell them. Call `global_timer.step()` once a step.",
    False: "Record whole steps, with `step()` after each; a table of spans needs a column `step`.",
}
_UNTIMED = "what it does there has no span: time it too; `Timer(gc=True)` tells collections of garbage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RanksReport:
    """A job of many ranks: what reports draw and `--format json` prints."""

    run: str
    verdict: Verdict
    own: SelfTimes  # in all steps
    accounting: Accounting  # of `steady`, as are scores
    scores: Scores
    judged: SelfTimes | None = None  # in the steady-state steps; None: all steps are
    arrivals: Arrivals | None = None
    layers: LayerTimes | None = None
    replay: Replay | None = None
    clocks: Clocks | None = None
    coordinates: Mapping[str, Int] = field(default_factory=dict)  # "dp", "tp", "pp", ...: (R,), -1 where not known
    hosts: tuple[str, ...] = ()  # (R,)
    world_size: int | None = None
    communication: tuple[CommunicationRow, ...] = ()
    peak_bytes: Float | None = None  # (R,)
    mfu: Float | None = None  # (R,) 0 to 1
    peak_unknown: str | None = None  # why peaks of memory are not known, of all ranks or of which
    mfu_unknown: str | None = None
    replay_unknown: str | None = None  # why there is no replay, where it was tried
    missing: tuple[Gap, ...] = ()  # a rank without a file, a torn line, steps that not all ranks have
    named_spans: tuple[NamedSpan, ...] = ()  # that which differs most between ranks first
    spans: int = 0

    @property
    def steady(self) -> SelfTimes:
        """Times in the steady-state steps that the verdict and all averages are of, estimated waiting taken out."""
        return self.own if self.judged is None else self.judged

    told = steady  # its name before

    @property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that the verdict names: one, or those of a stage."""
        rank = self.verdict.rank
        return frozenset(self.verdict.named_ranks or (() if rank is None else (rank,)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not known is None. It grows with ranks, not with ranks times steps.

        Averages are over `judged_steps`; why a value is null stands in `unknown`.
        """
        source, why_no_waiting = times.waiting_source(self.steady)
        head = _verdict_dict(self) | {"world_size": self.world_size}
        found: dict[str, Any] = finite(
            {
                "schema_version": 1,
                "run": self.run,
                **head,
                "spans": self.spans,
                "steps": self.own.steps.tolist(),
                "judged_steps": self.steady.steps.tolist(),
                "waiting": source,
                "lost": _lost_dicts(self.accounting),
                "ranks": _rank_dicts(self, waiting_known=source != "unknown"),
                "stages": _stage_dicts(self),
                "communication": [asdict(row) for row in self.communication],
                "layers": [
                    {key: value for key, value in row.items() if key not in ("typical_ms", "beyond_ms")}
                    for row in layers_over_ranks(self.layers)
                ],
                "named_spans": [_per_step(asdict(row)) for row in self.named_spans],
                "clocks": None if self.clocks is None else _clock_dict(self.clocks),
                "missing": [gap._asdict() for gap in self.missing],
                "unknown": {
                    "peak_bytes": self.peak_unknown,
                    "mfu": self.mfu_unknown,
                    "waiting_ms_per_step": why_no_waiting,
                    **_why_null(self, head),
                },
            }
        )
        return found


def ranks_report(loaded: LoadedSpans) -> RanksReport:
    """Everything that is said of a job: who is slow, who waits for whom, what it costs, and what is missing.

    Raises:
        EmptyRecording: no span belongs to a step.
    """
    database = loaded.database
    times.prepare(database)
    clocks = fit(database) if loaded.has_clocks else None
    write_table(database, clocks)
    basis, arrived = _basis(loaded), times.match_collectives(database)
    account = read_account(database, clocks, on_device=basis == "device")
    if not len(account.steps):
        raise EmptyRecording(f"{loaded.run}: no span belongs to a step. {_NO_STEPS[loaded.from_timers]}")
    row_of = {row["rank"]: row for row in to_rows(database, "SELECT * FROM ranks")}
    about = [row_of.get(rank, {}) for rank in account.ranks.tolist()]
    hosts = tuple(str(rank.get("host") or "") for rank in about)
    coordinates = {name: [-1 if rank.get(name) is None else rank[name] for rank in about] for name in _COORDINATES}
    stages = np.array([rank.get("stage") or 0 for rank in about], dtype=np.int64)
    own = times.with_waiting_of_one(account.self_times(stages, basis=basis))
    steady, notes = times.steady_times(own), times.steady_steps(own)[1]
    layers = times.layer_times(database, basis=basis)
    found = database.execute('SELECT name, "group" FROM labels ORDER BY label').fetchall() or [("", "")]
    names, groups = zip(*found, strict=True)
    judged = np.isin(own.steps, steady.steps)
    measured = bool(account.syncs.waits.any())
    if not measured:
        account = sync_each_step(account, _without_waiting(own, judged, account.own_ns))
    try:
        graph = build(account)
        ordered = True
    except NoGraph as circle:
        notes.append(f"{circle}: ranks were taken to meet at the end of each step alone, so what is gained is not sure")
        ordered = False
        account = sync_each_step(account, account.own_ns)
        graph = build(account)
    job = Job(
        account,
        graph,
        judged,
        own.stages,
        hosts,
        names,
        groups,
        measured=measured or len(own.ranks) < 2,
        ordered=ordered,
        absent=loaded.world_size is not None and loaded.world_size > len(account.ranks),
        layers=layers,
        layer_means=partial(times.layer_means, database),
    )
    if len(account.jumped):
        notes.append(
            f"the clock of rank {ranges(account.jumped.tolist())} jumps in some steps: its times were moved back"
        )
    replay = what_if(job)
    verdict = _one_call(database, steady) if basis == "cpu" and loaded.from_timers else None
    verdict = verdict or verdict_of(job, ask(job), notes=notes)
    if isinstance(replay, Replay):
        verdict = replace(verdict, ms=replay.ms, mw=replay.mw)
    named = named_spans(database, steady)
    verdict = with_name(verdict, named)
    evidence = [*verdict.evidence, *loaded.notes]
    if OUTSIDE in verdict.sentence and loaded.from_timers and not steady.of("gc").any():
        evidence.append(_UNTIMED)
    return RanksReport(
        run=loaded.run,
        verdict=replace(verdict, evidence=tuple(evidence)),
        own=own,
        judged=steady,
        accounting=times.account(steady),
        scores=times.score(steady),
        arrivals=arrived,
        layers=layers,
        replay=replay if isinstance(replay, Replay) else None,
        replay_unknown=replay if isinstance(replay, str) else None,
        coordinates={name: np.array(of) for name, of in coordinates.items() if max(of) >= 0},
        hosts=hosts if any(hosts) else (),
        world_size=loaded.world_size,
        communication=times.communication(database),
        clocks=clocks,
        missing=(*loaded.missing, *steps_missing(own)),
        named_spans=named,
        spans=int(database.execute("SELECT count(*) FROM spans").fetchone()[0]),
        **results_of(loaded.root, own.ranks),
    )


def _without_waiting(own: SelfTimes, judged: Bool, own_ns: Float) -> Float:
    """Times of all steps (S, R, K), with what lies between them; without waiting where that is estimated."""
    found = own_ns.copy()
    found[:, :, : own.self_ns.shape[2]] = own.self_ns
    if not own.waiting_known:
        by_step = {name: getattr(own, name)[judged] for name in ("steps", "waiting_ns", "wall_ns")}
        steps = replace(own, self_ns=found[judged], kinds=KINDS, **by_step)
        found[judged] = times.subtract_estimated_waiting(steps).self_ns
    return np.asarray(found)


def _one_call(database: Database, steady: SelfTimes) -> Verdict | None:
    """The verdict where one call that is no phase is most of a step of timers that measure the CPU alone."""
    name, kind, taken_ns = database.execute(
        """SELECT name, any_value(kind), sum(duration_ns) / (SELECT count(DISTINCT (rank, step)) FROM spans) AS taken
        FROM spans WHERE depth = 0 AND kind <> 'step' AND step IS NOT NULL GROUP BY name ORDER BY taken DESC LIMIT 1"""
    ).fetchone() or ("", "", 0.0)
    known = max(1, np.isfinite(steady.wall_ns).sum())
    meets_ns, step_ns = (float(np.nansum(each)) / known for each in (steady.of("communication"), steady.wall_ns))
    if steady.waiting_known:
        meets_ns += float(np.nansum(steady.waiting_ns)) / known
    if kind not in ("optimizer", "other") or meets_ns > LEAST_SHARE_OF_STEP * step_ns:
        return None
    if not 0 < step_ns / 2 <= taken_ns:
        return None
    return unknown(name[:LONGEST_NAME], taken_ns, step_ns, len(steady.steps))


def _basis(loaded: LoadedSpans) -> Basis:
    """The device's time, where timers measured it; spans of a device's trace are its time already."""
    if not loaded.from_timers:
        return "cpu"
    share = loaded.database.execute(
        "SELECT avg((device_ns IS NOT NULL)::INTEGER) FROM spans WHERE kind IN ('forward', 'backward') AND depth = 0"
    ).fetchone()[0]
    return "device" if share is not None and share >= _MOSTLY else "cpu"


def steps_missing(own: SelfTimes) -> list[Gap]:
    """Steps that not all ranks have: those in which a rank is missing are named."""
    known = np.isfinite(own.wall_ns)
    places = np.flatnonzero(~known.all(axis=0))
    if len(places) > 8:  # that are named one by one
        worst = int((~known[:, places]).sum(axis=0).max())
        reason = f"others have steps that they lack, up to {worst}"
        return [Gap(f"steps of {len(places)} ranks: {ranges(own.ranks[places].tolist())}", reason)]
    gaps = []
    for rank, has in zip(own.ranks[places].tolist(), known[:, places].T, strict=True):
        steps = own.steps[~has].tolist()
        reason = "the others have them" if has.any() else "it has no step at all"
        if has.any() and steps[0] > (last := own.steps[has][-1]):
            reason = f"its spans end with step {last}: it did not finish, or lost its last lines"
        gaps.append(Gap(f"step{'s' if len(steps) > 1 else ''} {ranges(steps)} of rank {rank}", reason, rank))
    return gaps


# --- Peak memory and MFU of each rank, as its result.json has them; where they are not known, why ---

_NO_FILES = "no rank has a result.json: ProfilerWrapper writes them, timers and span tables alone do not"


class _Peak(msgspec.Struct):
    allocated_bytes: int | None = None


class _Memory(msgspec.Struct):
    peak: _Peak | None = None


class _Utilization(msgspec.Struct):
    mfu: float | None = None


class _Result(msgspec.Struct):
    memory: _Memory | None = None
    utilization: _Utilization | None = None
    warnings: list[str] = []


def results_of(root: Path, ranks: Int) -> dict[str, Any]:
    """`peak_bytes` and `mfu` (R,) of `rank<k>*/result.json` below `root`, and why some are not known.

    None where none says anything. What is wrong with a file is a reason, and no error.
    """
    files = {rank_of_directory(file.parent): file for file in root.glob(f"rank*/{RESULT_FILE}")}
    found: dict[str, Any] = {}
    of_ranks = zip(*(_read(files.get(rank)) for rank in ranks.tolist()), strict=True)
    for name, values in zip(("peak_bytes", "mfu"), of_ranks, strict=True):
        known = np.array([np.nan if isinstance(value, str) else value for value in values])
        pairs = zip(values, ranks.tolist(), strict=True)
        reasons = grouped((value, rank) for value, rank in pairs if isinstance(value, str))
        why = [
            reason if len(of) == len(ranks) else f"rank{'s' if len(of) > 1 else ''} {ranges(of)}: {reason}"
            for reason, of in reasons.items()
        ]
        found[name] = known if np.isfinite(known).any() else None
        found[f"{name.removesuffix('_bytes')}_unknown"] = ("; ".join(why) or None) if files else _NO_FILES
    return found


def _read(file: Path | None) -> tuple[float | str, float | str]:
    """The highest allocated, and the MFU; or why they are not known."""
    if file is None:
        return (f"no {RESULT_FILE}",) * 2
    try:
        result = msgspec.json.decode(file.read_bytes(), type=_Result)
    except (OSError, msgspec.MsgspecError) as error:
        return (f"{RESULT_FILE} cannot be read ({type(error).__name__})",) * 2
    peak = result.memory.peak if result.memory else None
    said = next((warning for warning in result.warnings if warning.startswith("MFU is not available")), "")
    mfu: float | str | None = result.utilization.mfu if result.utilization else None
    if mfu is None:
        mfu = said.partition("because ")[2] or said or "the FLOPs of a step, or the device's peak, are not known"
    return "no allocation was recorded" if peak is None or peak.allocated_bytes is None else peak.allocated_bytes, mfu


# --- The report as plain data, for JSON ---


_DEVIATIONS = 4.0  # beyond the median; less than among steps (`statistics.outliers`), as each value is a mean of steps
_SHARE = 0.1  # and at least this much longer than the median


def layers_over_ranks(layers: LayerTimes | None) -> list[dict[str, Any]]:
    """Each layer and phase over the ranks that have it, in the order of the layers; ms of the median step.

    `typical_ms` is the median, of two the quicker; `beyond_ms` what the slowest rank takes longer than that;
    `spread_ms` the standard deviation over ranks and `typical_deviation_ms` 1.48 times the median one; `outliers` are
    ranks far beyond the others, the slowest first. `slowest_rank` is None where all take equally long.
    """
    rows: list[dict[str, Any]] = []
    if layers is None:
        return rows
    for at, place in np.ndindex(*layers.self_ns.shape[1:]):
        known = np.isfinite(layers.self_ns[:, at, place])
        if not known.any():
            continue
        values, ranks = layers.self_ns[known, at, place] / 1e6, layers.ranks[known]
        usual, slowest = float(times.typical(values, axis=0)), int(values.argmax())
        spread = MAD_TO_SIGMA * float(np.median(np.abs(values - usual)))
        far = values > usual + max(_DEVIATIONS * spread, _SHARE * usual)
        by_time = np.argsort(-values[far], kind="stable")
        several = len(values) > 1
        rows.append(
            {
                "layer": layers.layers[at],
                "kind": layers.kinds[place],
                "ranks": len(values),
                "median_ms": float(np.median(values)),
                "slowest_ms": float(values[slowest]),
                "slowest_rank": None if several and values.min() == values[slowest] else int(ranks[slowest]),
                "spread_ms": float(np.std(values)),
                "quickest_ms": float(values.min()),
                "typical_deviation_ms": spread,
                "outliers": tuple(ranks[far][by_time].tolist()) if several else (),
                "typical_ms": usual,
                "beyond_ms": float(values[slowest]) - usual,
            }
        )
    return rows


def _why_null(report: RanksReport, head: Mapping[str, Any]) -> dict[str, str]:
    """Of keys of the report that are null, the reason."""
    no_verdict, too_few = "no straggler was found", "too few steps were judged"
    named = no_verdict if report.verdict.verdict == "none" else "the verdict names none"
    no_replay = report.replay_unknown or "no replay of dependencies was made"
    reasons = {
        **dict.fromkeys(("rank", "layer", "host", "group", "phase", "first_step", "last_step"), named),
        "stage": named if len(np.unique(report.own.stages)) > 1 else "the job has no stages, or one",
        **dict.fromkeys(("share", "lost_ms_per_step"), no_verdict),
        **dict.fromkeys(
            ("wall_ms_per_step", "step_ms_per_step", "ideal_ms_per_step", "differ_ms_per_step", "slowdown"), too_few
        ),
        **dict.fromkeys(("ms", "mw"), no_replay),
        "world_size": "no file tells it",
    }
    unknown = {key: why for key, why in reasons.items() if head.get(key) is None}
    if report.replay is None:
        unknown["ranks.share"] = unknown["stages.share"] = no_replay
    if report.arrivals is None:
        unknown["ranks.times_last"] = unknown["ranks.late_ms"] = "no two ranks tell of the same communication"
    if report.clocks is None:
        unknown["clocks"] = "starts say nothing of when other ranks started"
    return unknown


def _verdict_dict(report: RanksReport) -> dict[str, Any]:
    found = _per_step(asdict(report.verdict))
    step, ideal = found["step_ms_per_step"], found["ideal_ms_per_step"]
    known = step is not None and ideal is not None
    found["differ_ms_per_step"] = max(0.0, step - ideal) if known else None
    found["slowdown"] = report.replay.slowdown if report.replay else step / ideal if known and ideal else None
    for name in ("suspects", "causes"):
        for row, one in zip(found[name], getattr(report.verdict, name), strict=True):
            row["who"] = one.who
    if len(np.unique(report.own.stages)) < 2:
        for one in (found, *found["suspects"], *found["causes"]):
            one["stage"] = None
    return found


def _per_step(row: dict[str, Any]) -> dict[str, Any]:
    """With its times in milliseconds."""
    return {
        key.replace("_ns", "_ms_per_step"): value / 1e6 if key.endswith("_ns") and value is not None else value
        for key, value in row.items()
    }


def _lost_dicts(accounting: Accounting) -> list[dict[str, Any]]:
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


def _rank_dicts(report: RanksReport, *, waiting_known: bool) -> list[dict[str, Any]]:
    steady, arrivals, replay, scores = report.steady, report.arrivals, report.replay, report.scores
    own_ms, waiting_ms, wall_ms = (mean(values) / 1e6 for values in (steady.self_ns, steady.waiting_ns, steady.wall_ns))
    ranks, unknown = steady.ranks.tolist(), [None] * len(steady.ranks)
    late = dict[int, tuple[int, float, float]]()
    if arrivals is not None:
        late_ms, steps = arrivals.late_ns / 1e6, len(np.unique(arrivals.step))
        each = zip(arrivals.times_last.tolist(), late_ms.tolist(), (late_ms / steps).tolist(), strict=True)
        late = dict(zip(arrivals.ranks.tolist(), each, strict=True))
    came_last = zip(*(late.get(rank, (None, None, None)) for rank in ranks), strict=True)
    columns = {
        "rank": ranks,
        "stage": steady.stages.tolist(),
        "host": report.hosts or unknown,
        "own_ms_per_step": [
            {kind: value for kind, value in zip(steady.kinds, row, strict=True) if value} for row in own_ms.tolist()
        ],
        "waiting_ms_per_step": waiting_ms.tolist() if waiting_known else unknown,
        "wall_ms_per_step": wall_ms.tolist(),
        "relative_score": median(scores.relative).tolist(),
        "individual_score": median(scores.individual).tolist(),
        "flagged": (scores.flagged_relative | scores.flagged_individual).tolist(),
        "flagged_relative": scores.flagged_relative.tolist(),
        "flagged_individual": scores.flagged_individual.tolist(),
        **dict(zip(("times_last", "late_ms", "late_ms_per_step"), came_last, strict=True)),
        "share": unknown if replay is None else replay.share_of_rank.tolist(),
        "peak_bytes": unknown if report.peak_bytes is None else report.peak_bytes.tolist(),
        "mfu": unknown if report.mfu is None else report.mfu.tolist(),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for name, values in report.coordinates.items():
        for at in np.flatnonzero(values >= 0).tolist():
            rows[at][name] = int(values[at])
    return rows


def _stage_dicts(report: RanksReport) -> list[dict[str, Any]]:
    steady, replay = report.steady, report.replay
    stages, counts = np.unique(steady.stages, return_counts=True)
    work = steady.self_ns.sum(axis=2) / 1e6
    own_ms = [float(median(work[:, steady.stages == stage].ravel())) for stage in stages]
    shares = replay.share_of_stage.tolist() if replay else [None] * len(stages)
    rows = zip(stages.tolist(), counts.tolist(), own_ms, shares, strict=True)
    return [dict(zip(("stage", "ranks", "own_ms_per_step", "share"), row, strict=True)) for row in rows]


def _clock_dict(clocks: Clocks) -> dict[str, Any]:
    return {
        "source": clocks.source,
        "events": clocks.events,
        "largest_offset_ms": float(times.largest(np.abs(clocks.offset_ns))) / 1e6,
        "largest_drift_ppm": float(times.largest(np.abs(clocks.drift))) * 1e6,
        "residual_us": float(median(clocks.residual_ns)) / 1e3,
        "largest_residual_us": float(times.largest(clocks.residual_ns)) / 1e3,
        "notes": clocks.notes,
    }


# --- spans whose names tell no kind ---


_MOST_NAMES = 64  # those with the most time
_MOST_OF_IT = 0.6  # of what the job loses by a rank
LONGEST_NAME = 80  # letters of it, in a sentence


def named_spans(database: Database, own: SelfTimes) -> tuple[NamedSpan, ...]:
    """Names of kind "other" in the steps of `own`, that which differs most between ranks first.

    A rank without such a span took nothing for it. What lies within another of its name is in that one's time.
    """
    steps = np.isfinite(own.wall_ns).sum(axis=0)  # (R,)
    there = steps > 0
    rows = to_rows(
        database,
        f"""WITH named AS (
            SELECT name, rank, duration_ns, depth
            FROM spans SEMI JOIN (SELECT unnest({own.steps.tolist()}) AS step) USING (step)
            WHERE kind = 'other' AND name <> 'other' AND (parent IS NULL OR parent <> name)),
        most AS (SELECT name FROM named GROUP BY name ORDER BY sum(duration_ns) DESC, name LIMIT {_MOST_NAMES}),
        there AS (SELECT unnest({own.ranks[there].tolist()}) AS rank, unnest({steps[there].tolist()}) AS steps),
        taken AS (
            SELECT name, rank, steps, coalesce(sum(duration_ns), 0)::DOUBLE / steps AS ns, count(duration_ns) AS spans,
                min(depth) AS depth, row_number() OVER (PARTITION BY name ORDER BY ns DESC, rank) AS place
            FROM most CROSS JOIN there LEFT JOIN named USING (name, rank) GROUP BY name, rank, steps)
        SELECT name, any_value(rank) FILTER (place = 1) AS slowest_rank, max(ns) AS slowest_ns,
            median(ns) FILTER (place > 1) AS others_ns, sum(spans) / sum(steps) AS per_step, min(depth) > 0 AS nested
        FROM taken GROUP BY name""",
    )
    return tuple(sorted((NamedSpan(**row) for row in rows), key=lambda one: (-one.beyond_ns, one.name)))


def with_name(verdict: Verdict, spans: Sequence[NamedSpan]) -> Verdict:
    """The verdict on a rank that is late for no known reason, with the name of the span that takes it most of that."""
    if verdict.cause not in ("other", "late collective") or verdict.lost_ns is None:
        return verdict
    mine = [one for one in spans if one.slowest_rank == verdict.rank and not one.nested and one.others_ns is not None]
    most = max(mine, key=lambda one: one.beyond_ns, default=None)
    if most is None or most.beyond_ns < _MOST_OF_IT * verdict.lost_ns:
        return verdict
    return replace(verdict, sentence=verdict.sentence.replace(OUTSIDE, f"its {most.name[:LONGEST_NAME]}"))
