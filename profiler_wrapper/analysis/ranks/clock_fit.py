"""Lines of all clocks against one common time, found from group to group."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import Final, Literal

import numpy as np

from profiler_wrapper.analysis.ranks.clock_events import Common, Float, Int, middle
from profiler_wrapper.analysis.ranks.clock_lines import Line, ahead_by, fit_lines, straight, through
from profiler_wrapper.analysis.ranks.model import Clocks

ONE_CLOCK_NS: Final = 50e6  # ranks that differ by more have no clock in common, whatever their host is called
NO_LINE: Final = Line(-np.inf, 0.0, 0.0, 0.0)


class ClockFit:
    """Lines of units, which are ranks or hosts with one clock, against a common time: found group after group."""

    def __init__(self, ranks: Int, host_of: dict[int, str]) -> None:
        self.ranks = ranks
        self.host_of = host_of
        self.unit: dict[int, int] = {}
        first: dict[str, int] = {}
        for rank in ranks.tolist():
            host = host_of.get(rank)
            self.unit[rank] = rank if host is None else first.setdefault(host, rank)
        self.lines: dict[int, list[Line]] = {}
        self.part: dict[int, int] = {}  # of unit: the group that its part of the job was begun with
        self.errors: dict[int, list[Float]] = {}
        self.events = 0
        self.notes: list[str] = []

    def use(self, groups: list[Common]) -> None:
        """Fit all units that groups connect with one another; each connected part by a time of its own."""
        self._check_hosts(groups)
        by_unit = [self._of_units(group) for group in groups]
        of_unit: dict[int, list[int]] = {}
        for place, group in enumerate(by_unit):
            for unit in group.ranks.tolist():
                of_unit.setdefault(unit, []).append(place)
        done: set[int] = set()
        for start in sorted(range(len(by_unit)), key=lambda place: -by_unit[place].ends.size):
            if any(unit in self.lines for unit in by_unit[start].ranks.tolist()):
                continue
            waiting = [(-by_unit[start].ends.size, start)]
            while waiting:  # the largest group that has somebody known
                _, place = heappop(waiting)
                if place in done:
                    continue
                done.add(place)
                for unit in self._fit_group(by_unit[place]):
                    self.part[unit] = start
                    for other in of_unit[unit]:
                        heappush(waiting, (-by_unit[other].ends.size, other))

    def parts(self) -> int:
        """Parts of the job that have no event in common, those of a single unit among them."""
        alone = sum(unit not in self.lines for unit in set(self.unit.values()))
        return len(set(self.part.values())) + alone

    def join(self, steps: Common | None) -> None:
        """Compare parts with the greatest of them by the ends of steps."""
        if steps is None:
            return
        group = self._of_units(steps)
        if not self.lines:
            self._fit_group(group)
            return
        sizes = Counter(self.part.values())
        main = sizes.most_common(1)[0][0]
        units = group.ranks.tolist()
        aligned = np.stack(
            [_aligned(self.lines.get(unit, [NO_LINE]), group.ends[:, place]) for place, unit in enumerate(units)],
            axis=1,
        )
        part = np.array([self.part.get(unit, -1 - place) for place, unit in enumerate(units)])
        common = middle(aligned[:, part == main], axis=1) if (part == main).any() else aligned[:, 0] * np.nan
        joined = 0
        for other in np.unique(part[part != main]):
            own = middle(aligned[:, part == other], axis=1)
            told = ~np.isnan(own) & ~np.isnan(common)
            if not told.any():
                continue
            reference, offset, drift = straight(own[told], (own - common)[told])
            line = Line(-np.inf, reference, offset, drift)
            members = [unit for unit in set(self.unit.values()) if self.part.get(unit) == other]
            members = members or [unit for unit, each in zip(units, part, strict=True) if each == other]
            for unit in members:
                self.lines[unit] = [through(each, line) for each in self.lines.get(unit, [NO_LINE])]
                self.errors[unit] = [own[told] - line.ahead(own[told]) - common[told]]
                joined += sum(each == unit for each in self.unit.values())
        self.notes.append(f"{joined} ranks share no collective with the others: compared by the ends of steps")

    def _of_units(self, group: Common) -> Common:
        """The earliest end on each clock: nobody leaves before the end."""
        units = np.array([self.unit[rank] for rank in group.ranks.tolist()], dtype=np.int64)
        found = np.unique(units)
        if len(found) == len(units):
            order = np.argsort(units)
            return Common(units[order], group.ends[:, order])
        ends = np.stack([np.fmin.reduce(group.ends[:, units == unit], axis=1) for unit in found], axis=1)
        return Common(found, ends)

    def _fit_group(self, group: Common) -> list[int]:
        """Fit the units of a group that are not known yet; which these are."""
        units = group.ranks.tolist()
        known = [place for place, unit in enumerate(units) if unit in self.lines]
        if known:
            aligned = [_aligned(self.lines[units[place]], group.ends[:, place]) for place in known]
            common = middle(np.stack(aligned, axis=1), axis=1)
        else:
            common = consensus(group.ends)
        self.events += len(common)
        fresh = []
        for place, unit in enumerate(units):
            own = group.ends[:, place]
            told = ~np.isnan(own) & ~np.isnan(common)
            if not told.any():
                continue
            if unit not in self.lines:
                self.lines[unit] = fit_lines(own[told], (own - common)[told])
                fresh.append(unit)
            self.errors.setdefault(unit, []).append(_aligned(self.lines[unit], own[told]) - common[told])
        return fresh

    def _check_hosts(self, groups: list[Common]) -> None:
        for group in groups:
            units = np.array([self.unit[rank] for rank in group.ranks.tolist()])
            for unit in np.unique(units):
                ends = group.ends[:, units == unit]
                if ends.shape[1] < 2 or not len(ends):
                    continue
                apart = middle(ends - np.fmin.reduce(ends, axis=1)[:, None], axis=0)
                if np.nanmax(apart) > ONE_CLOCK_NS:
                    self.unit = {rank: rank for rank in self.ranks.tolist()}
                    self.notes.append(
                        f"ranks of host {self.host_of[int(unit)]} do not share a clock: one for each rank"
                    )
                    return

    def clocks(self, base: int, source: Literal["collectives", "steps"]) -> Clocks:
        """All lines, relative to the first rank's first one."""
        first = next(self.unit[rank] for rank in self.ranks.tolist() if self.unit[rank] in self.lines)
        self._relative_to(self.lines[first][0])
        if len(set(self.unit.values())) == 1:
            self.notes.append("all ranks are on one host and share its clock")
        pieces, jumps, unknown = [], [], 0
        offset, drift, residual, worst = (np.full(len(self.ranks), np.nan) for _ in range(4))
        for place, rank in enumerate(self.ranks.tolist()):
            lines = self.lines.get(self.unit[rank])
            if lines is None:
                unknown += 1
                lines = [NO_LINE]
            else:
                offset[place] = lines[0].ahead(np.zeros(1))[0]
                drift[place] = lines[0].drift
                errors = np.abs(np.concatenate(self.errors[self.unit[rank]]))
                residual[place], worst[place] = np.median(errors), np.quantile(errors, 0.95)
                if len(lines) > 1:
                    jumps.append(rank)
            pieces += [(rank, *line) for line in lines]
        if jumps:
            shown = ", ".join(map(str, jumps[:10])) + (" ..." if len(jumps) > 10 else "")
            self.notes.append(f"clocks that were set or changed their rate: rank {shown}")
        if unknown:
            self.notes.append(f"{unknown} ranks share nothing with the others: their clocks are taken as they are")
        table = np.array(pieces, dtype=np.float64)
        return Clocks(
            ranks=self.ranks,
            reference_ns=float(base),
            offset_ns=offset,
            drift=drift,
            residual_ns=residual,
            residual_p95_ns=worst,
            source=source,
            events=self.events,
            notes=tuple(self.notes),
            piece_rank=table[:, 0].astype(np.int64),
            piece_from_ns=table[:, 1] + base,
            piece_reference_ns=table[:, 2] + base,
            piece_offset_ns=table[:, 3],
            piece_drift=table[:, 4],
        )

    def _relative_to(self, reference: Line) -> None:
        """The common time becomes what one clock shows: all others are compared with that."""
        rate = 1 - reference.drift
        shown = (reference.offset_ns - reference.drift * reference.reference_ns) / rate  # at 0 of the common time
        for unit, lines in self.lines.items():
            self.lines[unit] = [
                line._replace(
                    offset_ns=line.reference_ns - (line.reference_ns - line.offset_ns) / rate - shown,
                    drift=1 - (1 - line.drift) / rate,
                )
                for line in lines
            ]


def _aligned(lines: list[Line], own: Float) -> Float:
    found = own - ahead_by(lines, own)
    found[np.isnan(own)] = np.nan
    return np.asarray(found)


def consensus(ends: Float) -> Float:
    """When events ended, by most of the clocks; of two the first one's.

    Clocks of different rates pass one another, and the middle one of them is no clock of an even rate. So their lines
    are taken off first.
    """
    if ends.shape[1] == 2:
        return np.array(ends[:, 0])
    most = int((~np.isnan(ends)).sum(axis=0).argmax())
    common = middle(ends - np.nan_to_num(middle(ends - ends[:, most : most + 1], axis=0)), axis=1)
    half = len(ends) // 2
    if half < 2:
        return common
    for _ in range(2):
        ahead = ends - common[:, None]
        apart = ends[-half:] - ends[:half]
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes = (ahead[-half:] - ahead[:half]) / apart
        slopes[~(apart > 0)] = np.nan
        flat = ends - np.nan_to_num(middle(slopes, axis=0)) * (ends - ends[:1])
        common = middle(flat - middle(flat - common[:, None], axis=0), axis=1)
    return common
