"""How large the elements of tensors in lists are: the list itself does not tell, what else was recorded may.

The kernel that an op launched names the type that it works on; an op that gives one new tensor allocates it.
"""

from __future__ import annotations

import re
from math import prod

import numpy as np

from profiler_wrapper.analysis.bytes_operands import size_of_type
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Int32, Int64, Recording
from profiler_wrapper.recording.shapes import OpShapes

_TAKES_LISTS = re.compile(r"aten::(cat$|_foreach_|_fused_|_amp_foreach_)")
_OPAQUE = re.compile(r"CatArrayBatchedCopy\w*<[^<]*OpaqueType<(\d+)u?>")
_CAT = re.compile(r"CatArrayBatchedCopy\w*<(?P<type>[\w:]+(<\w+>)?),")
_FUNCTOR = re.compile(r"multi_tensor_apply_kernel<.*?\b\w*Functor\w*<(?P<type>[\w:]+(<\w+>)?)\b")
_ROUNDED_TO = 512  # bytes, by the allocator of a device
_CPU = 0


def takes_lists(name: str) -> bool:
    """Whether an op of this name takes lists of tensors whose types are wanted."""
    return _TAKES_LISTS.match(name) is not None


def element_size_of_kernel(name: str) -> int | None:
    """What the name of a kernel over lists tells; None where it tells nothing."""
    opaque = _OPAQUE.search(name)
    if opaque is not None:
        return int(opaque[1])
    told = _FUNCTOR.search(name) or _CAT.search(name)
    return None if told is None else size_of_type(told["type"])


class ElementSizes:
    """Sizes of the elements in the lists that the ops `spans` were given."""

    def __init__(self, recording: Recording, parent: Int32, charges: Charges, spans: Int64) -> None:
        self._recording = recording
        self._end_ns = recording.spans.end_ns
        self._by_kernel: dict[int, set[int]] = {}
        if charges.basis != "device":
            return
        chosen = np.zeros(len(parent), dtype=np.bool_)
        chosen[spans] = True
        launched = np.flatnonzero(charges.cpu_span >= 0)
        op = nearest(parent, chosen)[charges.cpu_span[launched]]
        kernel = recording.spans.name[charges.span[launched]]
        told: dict[int, int | None] = {}
        for span, name in zip(op[op >= 0].tolist(), kernel[op >= 0].tolist(), strict=True):
            if name not in told:
                told[name] = element_size_of_kernel(recording.names[name])
            size = told[name]
            if size is not None:
                self._by_kernel.setdefault(span, set()).add(size)

    def of(self, span: int, shapes: OpShapes) -> int:
        """Bytes of one element; 0 where nothing tells, or not all agree."""
        sizes = self._by_kernel.get(span, set())
        if sizes:
            return next(iter(sizes)) if len(sizes) == 1 else 0
        joined = self._recording.name_of(span) == "aten::cat" and shapes.types[:1] == ("TensorList",)
        sizes_of_list = shapes.dims[0] if joined and shapes.dims else []
        known = all(isinstance(size, list) for size in sizes_of_list)  # a trace may say anything
        return self._by_allocation(span, sum(map(prod, sizes_of_list))) if known else 0

    def _by_allocation(self, span: int, elements: int) -> int:
        """Of an op that allocated its output, and nothing else."""
        memory, spans = self._recording.memory, self._recording.spans
        first, last = np.searchsorted(memory.time_ns, [spans.start_ns[span], self._end_ns[span]])
        here = np.flatnonzero(memory.lane[first:last] == spans.lane[span]) + first
        if len(here) != 1 or elements < 1:
            return 0
        given = int(memory.size_bytes[here[0]])
        slack = 0 if memory.device_type[here[0]] == _CPU else _ROUNDED_TO - 1
        fitting = [size for size in (1, 2, 4, 8, 16) if given - slack <= elements * size <= given]
        return fitting[0] if len(fitting) == 1 else 0
