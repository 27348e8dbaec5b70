"""Peak memory and MFU of each rank, as its result.json has them; where they are not known, why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from profiler_wrapper.analysis.ranks.model import Float, Int
from profiler_wrapper.recording.rank_numbers import ranges
from profiler_wrapper.recording.store import RESULT_FILE

_MOST_RESULTS = 4096  # that are read
_MOST_REASONS = 4
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


class RankResults(NamedTuple):
    """What the results of ranks say of them; None where none says anything."""

    peak_bytes: Float | None  # (R,) the highest allocated
    mfu: Float | None  # (R,) 0 to 1
    peak_unknown: str | None  # why it is not known, of all ranks or of which; None: it is, of all
    mfu_unknown: str | None


def results_of(root: Path, ranks: Int) -> RankResults:
    """Reads `rank<k>*/result.json` below `root`; what is wrong with one is a reason, and no error."""
    files = {_rank_of(file): file for file in root.glob(f"rank*/{RESULT_FILE}")}
    peak, mfu = np.full(len(ranks), np.nan), np.full(len(ranks), np.nan)
    why_peak: dict[str, list[int]] = {}
    why_mfu: dict[str, list[int]] = {}
    for place, rank in enumerate(ranks.tolist()):
        result = _read(files.get(rank)) if place < _MOST_RESULTS else f"only the first {_MOST_RESULTS} are read"
        if isinstance(result, str):
            why_peak.setdefault(result, []).append(rank)
            why_mfu.setdefault(result, []).append(rank)
            continue
        if result.memory and result.memory.peak and result.memory.peak.allocated_bytes is not None:
            peak[place] = result.memory.peak.allocated_bytes
        else:
            why_peak.setdefault("no allocation was recorded", []).append(rank)
        if result.utilization and result.utilization.mfu is not None:
            mfu[place] = result.utilization.mfu
        else:
            why_mfu.setdefault(_why_no_mfu(result), []).append(rank)
    if not files.keys() & set(ranks.tolist()):
        return RankResults(None, None, _NO_FILES, _NO_FILES)
    return RankResults(
        peak if np.isfinite(peak).any() else None,
        mfu if np.isfinite(mfu).any() else None,
        _in_words(why_peak, len(ranks)),
        _in_words(why_mfu, len(ranks)),
    )


def _rank_of(file: Path) -> int:
    digits = file.parent.name.removeprefix("rank").split("_")[0]
    return int(digits) if digits.isdecimal() else -1


def _read(file: Path | None) -> _Result | str:
    if file is None:
        return f"no {RESULT_FILE}"
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Result)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{RESULT_FILE} cannot be read ({type(error).__name__})"


def _why_no_mfu(result: _Result) -> str:
    """What the result itself says of it."""
    said = next((warning for warning in result.warnings if warning.startswith("MFU is not available")), None)
    if said is not None:
        return said.partition("because ")[2] or said
    if result.utilization is None:
        return "the FLOPs of a step are not known"
    return "no peak of the device is known: give peaks="


def _in_words(reasons: dict[str, list[int]], count: int) -> str | None:
    if not reasons:
        return None
    if len(reasons) == 1 and sum(map(len, reasons.values())) == count:
        return next(iter(reasons))
    told: Sequence[tuple[str, list[int]]] = sorted(reasons.items(), key=lambda item: -len(item[1]))
    words = [f"{_whose(ranks)}: {reason}" for reason, ranks in told[:_MOST_REASONS]]
    return "; ".join(words) + (f"; and {len(told) - _MOST_REASONS} more reasons" if len(told) > _MOST_REASONS else "")


def _whose(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
