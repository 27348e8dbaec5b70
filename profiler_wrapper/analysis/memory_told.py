"""What the model and its optimizers are known to hold, as columns on the trace's clock; and who lay where, when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.memory_model import CATEGORIES
from profiler_wrapper.recording.columns import Int8, Int32, Int64, Recording
from profiler_wrapper.recording.holdings import Holding

_OTHER = CATEGORIES.index("other")


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

    def __len__(self) -> int:
        return len(self.address)

    @property
    def time_ns(self) -> Int64:
        """Per entry: when it was told."""
        return self.moment_ns[self.moment]


def told_of(recording: Recording, holdings: Sequence[Holding], device: str) -> Told:
    """What `holdings` tell of `device` ("cpu", "cuda:0"), on the clock of `recording`."""
    base = recording.metadata.get("baseTimeNanoseconds", 0)
    base_ns = int(base) if isinstance(base, (int, float, str)) and str(base).isdigit() else 0
    ordered = sorted(holdings, key=lambda holding: holding.time_ns)
    names: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    for i, holding in enumerate(ordered):
        for tensor in holding.tensors.get(device, ()):
            category = CATEGORIES.index(tensor.category) if tensor.category in CATEGORIES else _OTHER
            name = names.setdefault(tensor.name, len(names))
            rows.append((i, tensor.address, tensor.size_bytes, category, name))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Told(
        np.array([holding.time_ns - base_ns for holding in ordered], dtype=np.int64),
        columns[:, 0].astype(np.int32),
        columns[:, 1],
        columns[:, 2],
        columns[:, 3].astype(np.int8),
        columns[:, 4].astype(np.int32),
        tuple(names),
    )


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
