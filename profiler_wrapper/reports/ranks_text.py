"""The report on many ranks as text: the verdict first, then what it stands on, then what is not known."""

from __future__ import annotations

from collections import Counter

import numpy as np

from profiler_wrapper.analysis.ranks.communication import is_call
from profiler_wrapper.analysis.ranks.model import RanksReport
from profiler_wrapper.analysis.ranks.times import typical, waiting_source
from profiler_wrapper.reports.ranks_text_parts import counted, ms, percent, wrapped
from profiler_wrapper.reports.ranks_text_ranks import ranks_table
from profiler_wrapper.reports.ranks_text_tables import (
    communication_table,
    layers_table,
    named_table,
    stages_table,
    suspects_table,
)

_MOST_MISSING = 20
_NARROWEST = 40
_LEAST_OTHER = 0.01  # of a step, in no span: less is not told


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
    if verdict.step_ns is not None:
        about.append(f"a step takes {ms(verdict.step_ns / 1e6)} ms")
    if verdict.ideal_ns is not None and len(own.ranks) > 1:
        about.append(f"{ms(verdict.ideal_ns / 1e6)} ms if all were as quick as the typical one")
    about.append(f"confidence {verdict.confidence}")
    if len(set(own.stages.tolist())) > 1:
        for name, value, of in (("Ms", verdict.ms, "the last stage"), ("Mw", verdict.mw, "the slowest few ranks")):
            if value is not None:
                about.append(f"{name} {value:.3f} (of the lost time, by {of})")
    lines = wrapped(verdict.sentence, width)
    lines += [line for one in verdict.evidence for line in wrapped(one, width, first="  - ")]
    return "\n".join([*lines, *wrapped("; ".join(about), width)])


# --- what is not known ---


def _unknown(report: RanksReport, width: int) -> str:
    """What could not be attributed or measured, and why."""
    told = [
        f"{what}: {why}"
        for what, why in (
            ("peak memory", report.peak_unknown),
            ("MFU", report.mfu_unknown),
            ("time in no span" if not report.named_spans else "time in no span of a known kind", _in_no_span(report)),
            (
                "layers",
                None if report.layers is not None else "no span is of a layer: LayerTimer, or a trace, has them",
            ),
            ("communication", None if report.communication else f"none was recorded{_instead(report)}"),
            ("waiting", _waiting_unknown(report)),
        )
        if why is not None
    ]
    told += _communication_unknown(report)
    return (
        "\n".join(["Not known", *(line for one in told for line in wrapped(one, width, first="  - "))]) if told else ""
    )


def _instead(report: RanksReport) -> str:
    return ": waiting was estimated" if waiting_source(report.told)[0] == "estimated" else ""


def _in_no_span(report: RanksReport) -> str | None:
    own = report.told
    if "other" not in own.kinds or not len(own.ranks):
        return None
    other, wall = own.of("other"), own.wall_ns
    known = np.isfinite(other).all(axis=0) & np.isfinite(wall).all(axis=0) & (len(other) > 0)
    if not known.any():
        return None
    shares = other[:, known].mean(axis=0) / np.maximum(wall[:, known].mean(axis=0), 1.0)
    share, most = float(typical(shares, axis=0)), float(shares.max())
    if most < _LEAST_OTHER:
        return None
    if most == float(shares.min()):
        return f"{percent(share)} of a step of each rank"
    rank = int(own.ranks[known][shares.argmax()])
    return f"{percent(share)} of a step of the typical rank, at most {percent(most)} (rank {rank})"


def _waiting_unknown(report: RanksReport) -> str | None:
    rows = [row for row in report.communication if not is_call(row, report.communication)]
    alone = [row for row in rows if row.transfer_ns is None]
    if not alone:
        return None
    whose = f"{len(alone)} of {len(rows)} communications"
    return f"in {whose} (marked ?), no two ranks tell of the same one, so waiting and transfer are one"


def _communication_unknown(report: RanksReport) -> list[str]:
    """Each reason why overlap or bandwidth are not known, and of how many collectives."""
    counts = Counter(reason for row in report.communication for reason in row.unknown.split("; ") if reason)
    count = len(report.communication)
    return [reason if times == count else f"{reason} ({times} of {count})" for reason, times in counts.items()]


def _missing(report: RanksReport, width: int) -> str:
    lines = [
        line
        for row in report.missing[:_MOST_MISSING]
        for line in wrapped(f"{row.what}: {row.reason}", width, first="  - ")
    ]
    if len(report.missing) > _MOST_MISSING:
        lines.append(f"  - and {len(report.missing) - _MOST_MISSING} more")
    return "\n".join(["Missing", *lines]) if lines else ""


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
