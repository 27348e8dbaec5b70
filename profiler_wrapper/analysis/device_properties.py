"""Which device of a trace is meant where one stands for all, and what the trace tells of each (`deviceProperties`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.trace.recording import DEVICE_CATEGORIES, Category, Recording

FIRST_WITH_TENSOR_CORES = (7, 0)  # compute capability: Volta
FIRST_WITH_TF32 = (8, 0)  # Ampere


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """One device; None for what the trace does not tell."""

    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None  # of AMD devices, of the gfx number: (9, 4) for gfx942
    multiprocessors: int | None = None
    warp_size: int | None = None

    @property
    def is_amd(self) -> bool | None:
        """Whether AMD made it; None where neither the name nor the size of a warp is told."""
        if self.name is not None:
            return self.name.startswith(("AMD", "Radeon", "gfx"))
        return None if self.warp_size is None else self.warp_size == 64  # 64 threads: AMD's data-centre devices

    @property
    def capability_text(self) -> str:
        """`"9.0"`; "" where it is not known."""
        return ".".join(map(str, self.compute_capability or ()))

    @property
    def has_tensor_cores(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= FIRST_WITH_TENSOR_CORES

    @property
    def has_tf32(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= FIRST_WITH_TF32


def busiest_device(recording: Recording) -> int | None:
    """The index of the device with most kernel time; without kernels, with most time of copies and sets.

    None without device events.
    """
    spans = recording.spans
    for categories in ((Category.KERNEL,), DEVICE_CATEGORIES):
        chosen = np.isin(spans.category, categories)
        if chosen.any():
            device, inverse = np.unique(spans.device[chosen], return_inverse=True)
            spent = np.zeros(len(device), dtype=np.int64)
            np.add.at(spent, inverse, spans.duration_ns[chosen])
            return int(device[np.argmax(spent)])
    return None


def busiest_device_properties(recording: Recording) -> DeviceProperties:
    """What the trace tells of that device; of none, nothing."""
    device = busiest_device(recording)
    return DeviceProperties() if device is None else device_properties(recording, device)


def device_properties(recording: Recording, device: int) -> DeviceProperties:
    """What the trace tells of the device of that index; where it lists only others, alike, what it tells of them."""
    listed = recording.metadata.get("deviceProperties")
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    of_index = [_properties(entry) for entry in entries if entry.get("id") == device]
    if of_index:
        return of_index[0]
    kinds = {_properties(entry) for entry in entries}
    return kinds.pop() if len(kinds) == 1 else DeviceProperties()


def _properties(entry: Mapping[str, Any]) -> DeviceProperties:
    major, minor, name = _positive(entry, "computeMajor"), entry.get("computeMinor"), entry.get("name")
    return DeviceProperties(
        name=name if isinstance(name, str) and name else None,
        memory_bytes=_positive(entry, "totalGlobalMem"),
        compute_capability=(major, minor) if major and isinstance(minor, int) else None,
        multiprocessors=_positive(entry, "numSms"),
        warp_size=_positive(entry, "warpSize"),
    )


def _positive(entry: Mapping[str, Any], key: str) -> int | None:
    value = entry.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
