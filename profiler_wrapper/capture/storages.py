"""Where a tensor's memory lies. Nothing here runs an op, waits for a device or keeps a tensor alive.

Copy-on-write tensors are left out: to ask where one lies is to make the copy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler_wrapper.recording.owned import HeldTensor, Holding

Places = list[int]  # of storages: where the first begins, how long it is, where the second begins, ...

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
        for part in plain_parts(tensor):
            places = places_of((part,))
            if places is not None:
                self._add(part.device, places[0], places[1], category, name)

    def add_all(self, tensors: Sequence[torch.Tensor], categories: Sequence[str], names: Sequence[str]) -> None:
        """The same for many; faster than one by one where all are plain."""
        places = places_of(tensors) if all_plain(tensors) else None
        if places is not None:
            self.add_at(places[::2], places[1::2], tensors, categories, names)
        else:
            for tensor, category, name in zip(tensors, categories, names, strict=True):
                self.add(tensor, category, name)

    def add_at(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        tensors: Sequence[torch.Tensor],
        categories: Sequence[str],
        names: Sequence[str],
    ) -> None:
        """The same for many of which it is known where their storages begin and how long they are."""
        devices = [tensor.device for tensor in tensors]
        rows = dict(zip(addresses, range(len(addresses)), strict=True))
        if self._columns or len(rows) < len(addresses) or 0 in rows or 0 in sizes or len(set(devices)) != 1:
            for one in zip(devices, addresses, sizes, categories, names, strict=True):
                self._add(*one)
        else:
            self._columns[devices[0]] = _Columns(rows, list(sizes), list(categories), list(names))

    def again(self) -> Listing:
        """The same storages at this moment. Neither may be added to from then on."""
        same = Listing()
        same._columns = self._columns
        return same

    def _add(self, device: torch.device, address: int, size_bytes: int, category: str, name: str) -> None:
        if not address or not size_bytes:  # on no device, or emptied by FSDP or DeepSpeed
            return
        columns = self._columns.get(device)
        if columns is None:
            columns = self._columns[device] = _Columns({}, [], [], [])
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
            kept = _Columns({}, [], [], [])
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

    def __init__(self, rows: dict[int, int], size_bytes: list[int], category: list[str], name: list[str]) -> None:
        self.rows = rows  # by address
        self.size_bytes, self.category, self.name = size_bytes, category, name


class Repeated:
    """Lists the same tensors again and again, as a loop makes them anew.

    How long a storage is only Python's object of it tells, of which each would be one more for the garbage
    collector. So it is not asked where all tensors lie where they lay, nor where each had a storage of its own
    and lies and is as long in that of now as it was.
    """

    def __init__(self) -> None:
        self._last: _Layout | None = None

    def listing(self, tensors: Sequence[torch.Tensor], category: str, names: list[str]) -> Listing:
        """All of them, none of which wraps others."""
        categories = [category] * len(tensors)
        listing, last, found = Listing(), self._last, _addresses_of(tensors)
        self._last = None
        if found is None:
            listing.add_all(tensors, categories, names)
            return listing
        addresses, parts = found
        same_parts = last is not None and last.parts == parts and last.names == names
        if last is not None and same_parts and last.addresses == addresses:
            self._last = last
            return last.listing.again()
        if last is not None and same_parts and last.sizes == parts[1::2]:
            sizes = last.sizes
        else:
            sizes = (places_of(tensors) or [])[1::2]
        listing.add_at(addresses, sizes, tensors, categories, names)
        if 0 not in sizes:
            self._last = _Layout(addresses, parts, sizes, names, listing)
        return listing


@dataclass(frozen=True, slots=True)
class _Layout:
    """Tensors in storages."""

    addresses: list[int]  # where the storage of each begins
    parts: list[int]  # of it: where the first tensor begins, how many bytes it has, where the second begins, ...
    sizes: list[int]  # bytes of the storages
    names: list[str]
    listing: Listing


def _addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Where their storages begin, and which parts of them they are; None where that cannot be told so."""
    is_copy_on_write = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    addresses: list[int] = []
    parts: list[int] = []
    try:
        for tensor in tensors:
            if is_copy_on_write(tensor) or not tensor.numel():
                return None
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
            addresses.append(tensor.data_ptr() - offset_bytes)
            parts.append(offset_bytes)
            parts.append(tensor.numel() * tensor.element_size())
    except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
        return None
    return addresses, parts


def places_of(tensors: Iterable[torch.Tensor]) -> Places | None:
    """Where tensors lie that wrap no others; None if one has no storage, or shares it by copy-on-write."""
    is_copy_on_write = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    places: Places = []
    try:
        for tensor in tensors:
            if is_copy_on_write(tensor):
                return None
            storage = tensor.untyped_storage()
            places.append(storage.data_ptr())
            places.append(storage.nbytes())
    except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
        return None
    return places


def all_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of them is of a subclass."""
    return _PLAIN.issuperset(map(type, tensors))


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
