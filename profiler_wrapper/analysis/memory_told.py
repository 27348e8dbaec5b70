"""What the model and its optimizers are known to hold, as columns on the trace's clock; and who lay where, when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.memory_model import CATEGORIES
from profiler_wrapper.recording.owned import Holding
from profiler_wrapper.recording.recording import Int8, Int32, Int64, Recording

_OTHER = CATEGORIES.index("other")
_NUMBER = re.compile(r"[0-9]{1,19}")  # as many digits as 64 bits hold


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """The tensors of one device that holdings tell: one entry per moment and tensor, in order of time."""

    moment_ns: Int64  # shape (moments,)
    moment: Int32  # per entry: index of its moment
    address: Int64
    size_bytes: Int64
    category: Int8  # index into CATEGORIES
    name: Int32  # index into `names`
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what is not known, and why

    def __len__(self) -> int:
        return len(self.address)

    @property
    def time_ns(self) -> Int64:
        """Per entry: when it was told."""
        return self.moment_ns[self.moment]


def told_of(recording: Recording, holdings: Sequence[Holding], device: str) -> Told:
    """What `holdings` tell of `device` ("cpu", "cuda:0"), on the clock of `recording`."""
    base_ns = _clock_base_ns(recording.metadata.get("baseTimeNanoseconds", 0))
    notes: tuple[str, ...] = ()
    if base_ns is None and holdings:
        notes = (
            "what the model and its optimizers held is left out, because the trace does not tell when its clock "
            "begins: its baseTimeNanoseconds is no number of nanoseconds",
        )
    ordered = sorted(holdings, key=lambda holding: holding.time_ns) if base_ns is not None else []
    names: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    for i, holding in enumerate(ordered):
        for tensor in holding.tensors.get(device, ()):
            category = CATEGORIES.index(tensor.category) if tensor.category in CATEGORIES else _OTHER
            name = names.setdefault(tensor.name, len(names))
            rows.append((i, tensor.address, tensor.size_bytes, category, name))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Told(
        np.array([holding.time_ns - (base_ns or 0) for holding in ordered], dtype=np.int64),
        columns[:, 0].astype(np.int32),
        columns[:, 1],
        columns[:, 2],
        columns[:, 3].astype(np.int8),
        columns[:, 4].astype(np.int32),
        tuple(names),
        notes,
    )


def _clock_base_ns(told: object) -> int | None:
    """The unix time at which a trace's clock begins; None for what is none."""
    if isinstance(told, str):
        told = int(told) if _NUMBER.fullmatch(told) else None
    if isinstance(told, float):
        told = int(told) if told.is_integer() else None
    if not isinstance(told, int) or isinstance(told, bool):
        return None
    return told if 0 <= told <= np.iinfo(np.int64).max else None


class EventsByAddress:
    """Which event was the last at an address before some event. Events are given by their place in time."""

    def __init__(self, address: Int64) -> None:
        self._events = len(address)
        self._addresses, rank = np.unique(address, return_inverse=True)
        self._order = np.argsort(rank, kind="stable")
        self._keys = rank[self._order] * (self._events + 1) + self._order

    def last_before(self, address: Int64, event: Int64) -> Int64:
        """Per query: the last event at `address` whose place is below `event`; -1 for none."""
        return self._at(address, event, -1)

    def first_from(self, address: Int64, event: Int64) -> Int64:
        """Per query: the first event at `address` whose place is `event` or above; -1 for none."""
        return self._at(address, event, 0)

    def _at(self, address: Int64, event: Int64, step: int) -> Int64:
        found = np.full(len(address), -1, dtype=np.int64)
        if not self._events or not len(address):
            return found
        rank = np.minimum(np.searchsorted(self._addresses, address), len(self._addresses) - 1)
        place = np.searchsorted(self._keys, rank * (self._events + 1) + event) + step
        inside = (place >= 0) & (place < self._events)
        event_found = self._order[np.where(inside, place, 0)]
        same = inside & (self._addresses[rank] == address)
        same &= self._keys[np.where(inside, place, 0)] // (self._events + 1) == rank
        found[same] = event_found[same]
        return found
