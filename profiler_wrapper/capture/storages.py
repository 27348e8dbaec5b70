"""Where a tensor's memory lies. Nothing here runs an op, waits for a device or keeps a tensor alive."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiler_wrapper.recording.holdings import HeldTensor, Holding

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_DEEPEST = 4  # of what is wrapped in each other, and of containers in containers


class Listing:
    """Storages at one moment, each once: the first name and category told of it stay.

    Kept as columns: an object for each would make Python's garbage collector run in the user's loop.
    """

    def __init__(self) -> None:
        self.time_ns = time.time_ns()
        self._columns: dict[torch.device, _Columns] = {}

    def __len__(self) -> int:
        return sum(len(columns.rows) for columns in self._columns.values())

    def add(self, tensor: torch.Tensor, category: str, name: str) -> None:
        """List what a tensor's memory is; nothing for one that has none."""
        if type(tensor) not in _PLAIN:
            for part in plain_parts(tensor):
                self._add_plain(part, category, name)
        else:
            self._add_plain(tensor, category, name)

    def _add_plain(self, tensor: torch.Tensor, category: str, name: str) -> None:
        try:
            storage = tensor.untyped_storage()
            address, size_bytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
            return
        if not address or not size_bytes:  # on no device, or emptied by FSDP or DeepSpeed
            return
        device = tensor.device
        columns = self._columns.get(device)
        if columns is None:
            columns = self._columns[device] = _Columns()
        rows = columns.rows
        if address not in rows:
            rows[address] = len(rows)
            columns.size_bytes.append(size_bytes)
            columns.category.append(category)
            columns.name.append(name)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name under which a tensor's memory is listed; None if it is not."""
        one = Listing()
        one.add(tensor, "", "")
        for device, columns in one._columns.items():
            if device in self._columns:
                listed = self._columns[device]
                for address in columns.rows:
                    if address in listed.rows:
                        return listed.name[listed.rows[address]]
        return None

    def leave_out(self, places: dict[int, int]) -> Listing:
        """Without what begins where `places` says, and is as long."""
        left = Listing()
        left.time_ns = self.time_ns
        for device, columns in self._columns.items():
            kept = _Columns()
            for address, row in columns.rows.items():
                if places.get(address) != columns.size_bytes[row]:
                    kept.rows[address] = len(kept.rows)
                    kept.size_bytes.append(columns.size_bytes[row])
                    kept.category.append(columns.category[row])
                    kept.name.append(columns.name[row])
            if kept.rows:
                left._columns[device] = kept
        return left

    def add_places(self, places: dict[int, int]) -> None:
        """Write into `places` where each storage begins and how long it is."""
        for columns in self._columns.values():
            places.update(zip(columns.rows, columns.size_bytes, strict=True))

    def holding(self) -> Holding:
        """What was listed, in order."""
        return Holding(
            self.time_ns,
            {
                str(device): tuple(map(HeldTensor, columns.rows, columns.size_bytes, columns.category, columns.name))
                for device, columns in self._columns.items()
            },
        )


class _Columns:
    """The storages of one device."""

    __slots__ = ("category", "name", "rows", "size_bytes")

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}  # by address
        self.size_bytes: list[int] = []
        self.category: list[str] = []
        self.name: list[str] = []


def plain_parts(tensor: torch.Tensor, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The plain tensors behind one: the local shard of a DTensor, data and scale of a quantized one."""
    if type(tensor) in _PLAIN:
        yield tensor
        return
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if depth == 0 or (fake is not None and isinstance(tensor, fake.FakeTensor)):
        return
    if not hasattr(tensor, "__tensor_flatten__"):  # a subclass that adds behaviour only
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name, None)
        if isinstance(part, torch.Tensor):
            yield from plain_parts(part, depth - 1)


def tensors_in(value: Any, name: str, depth: int = _DEEPEST) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor in nested dicts and lists, with the keys that lead to it: `exp_avg`, `old_dirs.3`."""
    if isinstance(value, torch.Tensor):
        yield value, name
    elif depth and isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(entry, f"{name}.{key}" if name else str(key), depth - 1)
