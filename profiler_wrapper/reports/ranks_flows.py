"""Arrows in a Chrome trace: from the rank that came last to a collective to those that waited for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from profiler_wrapper.analysis.ranks.model import RanksReport

MOST_ARROWS = 4_000  # more are a black page
_MOST_OF_ONE = 16  # of one collective, the longest waits
_LEAST_SHARE = 0.02  # of a step: who waited less gets none

Key = tuple[int, int, int]  # (label, step, sequence) of a collective, a send or a receive


class Flows:
    """Gathers communications as they are written; the arrows come last."""

    def __init__(self, report: RanksReport) -> None:
        known = report.own.wall_ns[np.isfinite(report.own.wall_ns)]
        self._least_us = _LEAST_SHARE * float(np.median(known)) / 1000 if len(known) else np.inf
        self._parts: dict[Key, list[tuple[float, float, int, int]]] = {}  # duration, start, pid, tid

    def add(self, key: Key, event: dict[str, Any]) -> None:
        """A rank's part in one communication, as the event that is written of it."""
        self._parts.setdefault(key, []).append((event["dur"], event["ts"], event["pid"], event["tid"]))

    def events(self) -> Iterator[dict[str, Any]]:
        """A start and a finish for each arrow: the longest waits of all."""
        waits = []
        for parts in self._parts.values():
            if len({pid for _, _, pid, _ in parts}) < 2:
                continue
            last = min(parts)
            waiting = sorted((part for part in parts if part[0] - last[0] >= self._least_us), reverse=True)
            waits += [(part[0] - last[0], last, part) for part in waiting[:_MOST_OF_ONE]]
        waits.sort(key=lambda wait: -wait[0])
        for number, (_, last, part) in enumerate(waits[:MOST_ARROWS], 1):
            yield from _arrow(number, last, part)


def _arrow(
    number: int, last: tuple[float, float, int, int], part: tuple[float, float, int, int]
) -> Iterator[dict[str, Any]]:
    """From the middle of the transfer of who came last to the same instant of who waited, within its span."""
    duration, start, pid, tid = last
    about = {"cat": "waiting", "name": "waited for", "id": number}
    begin = start + duration / 2
    yield {"ph": "s", **about, "pid": pid, "tid": tid, "ts": begin}
    there = min(max(begin, part[1]), part[1] + part[0])
    yield {"ph": "f", "bp": "e", **about, "pid": part[2], "tid": part[3], "ts": there}
