"""Gathers, slice by slice, what device events, collectives and Python calls tell beside their time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from profiler_wrapper.recording.decoding import Args, CollectiveArgs
from profiler_wrapper.recording.growing import Numbers, PerName
from profiler_wrapper.recording.recording import (
    Bool,
    Category,
    CollectiveDetails,
    Configurations,
    DeviceDetails,
    Int8,
    Int32,
    Int64,
)

# Names of kernels, ops and annotations that may tell of a collective: of the backends, and of c10d itself.
_COLLECTIVE = re.compile(
    r"(?i)ccl|gloo|ucc:|mpi:|c10d|record_param_comms|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|"
    r"collective"
)
_SILENT_LAUNCH = re.compile(r"cu(da)?[A-Z]")  # of CUDA's runtime and driver: the kernel tells how it was launched

_KEPT_AT_ONCE = 1 << 16  # different configurations; past them a repeated one may be stored again
_TOLD = attrgetter(
    "grid",
    "block",
    "registers",
    "shared_memory",
    "copied_bytes",
    "blocks_per_sm",
    "occupancy_percent",
)
_GRID = attrgetter("grid")
_LARGEST = 1 << 62
_MOST_RANKS = 1 << 20

Configuration = tuple[Any, ...]  # what `_TOLD` gives


class _Numbered(dict[Configuration, int]):
    """Numbers configurations from `first` on, in the order in which they are first seen."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, key: Configuration) -> int:
        number = self[key] = self._first + len(self)
        return number


class DetailsCollector:
    """Takes the arguments of spans as they come; in the end gives what they tell.

    Attributes:
        met_collectives: whether some event told of a collective.
    """

    def __init__(self, names: Numbers) -> None:
        self.met_collectives = False
        self._names_a_collective = PerName(names, lambda name: _COLLECTIVE.search(name) is not None)
        self._may_tell = PerName(names, lambda name: _SILENT_LAUNCH.match(name) is None)
        self._spans: list[Int64] = []
        self._numbers: list[Int32] = []
        self._launch_spans: list[Int64] = []  # calls into a runtime that tell what they launch (ROCm)
        self._launch_numbers: list[Int32] = []
        self._numbered = _Numbered(0)
        self._tables: list[Configurations] = []
        self._collectives: list[CollectiveDetails] = []
        self._seen = 0

    def add(self, args: Sequence[Args], category: Int8, name: Int32) -> None:
        """The next spans, with their categories and the numbers of their names."""
        on_device = (category >= Category.KERNEL) & (category <= Category.MEMSET)
        self._add_to(self._spans, self._numbers, on_device, args)
        is_runtime = category == Category.RUNTIME
        may_tell = is_runtime & self._may_tell.answers()[name]
        if may_tell.any():
            grids = map(_GRID, compress(args, may_tell.tolist()))
            may_tell[may_tell] = [grid is not None for grid in grids]
            self._add_to(self._launch_spans, self._launch_numbers, may_tell, args)
        for index in np.flatnonzero(self._names_a_collective.answers()[name] & ~is_runtime).tolist():
            if args[index].collective is not None:
                self.met_collectives = True
                self._collectives.append(_collective(self._seen + index, args[index]))
        self._seen += len(args)

    def _add_to(self, spans: list[Int64], numbers: list[Int32], chosen: Bool, args: Sequence[Args]) -> None:
        members = list(compress(args, chosen.tolist()))
        if not members:
            return
        spans.append(np.flatnonzero(chosen) + self._seen)
        numbers.append(np.fromiter(map(self._numbered.__getitem__, map(_TOLD, members)), np.int32, len(members)))
        if len(self._numbered) > _KEPT_AT_ONCE:
            self._close_table()

    def _close_table(self) -> None:
        first = sum(map(len, self._tables))
        self._tables.append(_table(self._numbered))
        self._numbered = _Numbered(first + len(self._numbered))

    # --- the end ---

    def details(self, kept: Bool, correlation: Int64) -> DeviceDetails:
        """Of the spans that are `kept`, numbered as they are without the others.

        `correlation`: of the kept spans; a kernel that does not tell how it was launched has it from its launch.
        """
        self._close_table()
        table = _concatenated(self._tables)
        self._tables = []
        span, number = _kept(self._spans, self._numbers, kept)
        launch, launch_number = _kept(self._launch_spans, self._launch_numbers, kept)
        if len(launch):
            table, number = _with_launches(table, correlation[span], number, correlation[launch], launch_number)
        tells = _tells(table)[number]
        return DeviceDetails(span=span[tells], configuration=number[tells], configurations=table)

    def collectives(self, kept: Bool) -> tuple[CollectiveDetails, ...]:
        """As `details`."""
        if not self._collectives:
            return ()
        final = np.cumsum(kept) - 1
        return tuple(found._replace(span=int(final[found.span])) for found in self._collectives if kept[found.span])


def _kept(spans: list[Int64], numbers: list[Int32], kept: Bool) -> tuple[Int64, Int32]:
    if not spans:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    span, number = np.concatenate(spans), np.concatenate(numbers)
    if kept.all():
        return span, number
    stays = kept[span]
    return (np.cumsum(kept) - 1)[span[stays]], number[stays]


def _with_launches(
    table: Configurations, correlation: Int64, number: Int32, launched: Int64, launch_number: Int32
) -> tuple[Configurations, Int32]:
    """The configurations with what only the launches of the events tell, and the number of each event."""
    order = np.argsort(launched, kind="stable")
    place = np.minimum(np.searchsorted(launched[order], correlation), len(launched) - 1)
    joined = (launched[order][place] == correlation) & (correlation >= 0)
    by_launch = np.where(joined, launch_number[order][place], -1)
    pairs, inverse = np.unique(number * np.int64(len(table) + 1) + by_launch + 1, return_inverse=True)
    own, of_launch = pairs // (len(table) + 1), pairs % (len(table) + 1) - 1
    columns = {}
    for name in Configurations.__dataclass_fields__:
        values = getattr(table, name)
        mine, told = values[own], values[of_launch]
        # What a launch copies is told of a copy itself; the launch of a kernel has no such thing.
        missing = (np.isnan(mine) if mine.dtype.kind == "f" else mine < 0) & (name != "copied_bytes")
        from_launch = (of_launch >= 0).reshape(-1, *[1] * (mine.ndim - 1))
        columns[name] = np.where(missing & from_launch, told, mine)
    return Configurations(**columns), inverse.astype(np.int32)


def _concatenated(tables: Sequence[Configurations]) -> Configurations:
    if len(tables) == 1:
        return tables[0]
    fields = Configurations.__dataclass_fields__
    return Configurations(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in fields})


def _tells(table: Configurations) -> Bool:
    """Per configuration: whether it tells anything."""
    tells = np.zeros(len(table), dtype=np.bool_)
    for name in Configurations.__dataclass_fields__:
        values = getattr(table, name)
        known = ~np.isnan(values) if values.dtype.kind == "f" else values >= 0
        tells |= known.any(axis=1) if known.ndim > 1 else known
    return tells


# --- values as a trace has them, odd ones among them ---


def _table(configurations: Iterable[Configuration]) -> Configurations:
    if not (rows := list(configurations)):
        return Configurations()
    grid, block, registers, shared_memory, copied, blocks_per_sm, occupancy = zip(*rows, strict=True)
    return Configurations(
        grid=np.array([_three(value) for value in grid], dtype=np.int64),
        block=np.array([_three(value) for value in block], dtype=np.int64),
        registers=np.array([_count(value) for value in registers], dtype=np.int64),
        shared_memory_bytes=np.array([_count(value) for value in shared_memory], dtype=np.int64),
        copied_bytes=np.array([_count(value) for value in copied], dtype=np.int64),
        blocks_per_sm=np.array([_amount(value) for value in blocks_per_sm], dtype=np.float64),
        occupancy=np.array([_amount(value) / 100 for value in occupancy], dtype=np.float64),
    )


def _amount(value: object) -> float:
    """A number that is finite and not negative; else NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        amount = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return amount if 0 <= amount < math.inf else math.nan


def _count(value: object) -> int:
    """A whole number that is not negative; else -1."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < _LARGEST else -1
    amount = _amount(value)
    return int(amount) if amount == amount and amount < _LARGEST and amount == int(amount) else -1


def _three(value: object) -> tuple[int, int, int]:
    """Three sizes; fewer are filled up with 1, other things give -1."""
    if isinstance(value, str):
        value = tuple(re.findall(r"-?[\w.]+", value))
    if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= 3:
        return (-1, -1, -1)
    sizes = [_count(item) for item in value]
    if min(sizes) < 0:
        return (-1, -1, -1)
    x, y, z = (*sizes, 1, 1)[:3]
    return (x, y, z)


def _collective(span: int, args: Args) -> CollectiveDetails:
    name = _text(args.collective) or ""
    if not isinstance(args, CollectiveArgs):
        return CollectiveDetails(span, name)
    return CollectiveDetails(
        span=span,
        name=name,
        in_elements=_known(args.in_elements),
        out_elements=_known(args.out_elements),
        dtype=_text(args.dtype),
        group_size=_known(args.group_size),
        group_name=_text(args.group_name) or _text(args.group_id),
        ranks=_ranks(args.ranks),
        sequence=_known(args.collective_sequence),
    )


def _known(value: object) -> int | None:
    count = _count(value)
    return count if count >= 0 else None


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value)


def _ranks(raw: msgspec.Raw) -> tuple[int, ...] | None:
    """The ranks that are told; None where they are cut short (`[0, 1, 2, ..., 63]`) or are none."""
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, str):
            value = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_RANKS:
        return None
    ranks = tuple(map(_count, value))
    return None if min(ranks) < 0 else ranks
