"""What ops really moved: the bytes of the tensors that each was given and gave, seen as it ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.work.bytes import has_rule
from profiler_wrapper.tables.work.flops import FlopOps
from profiler_wrapper.tables.work.traffic import Traffic
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.reader import read_with_shapes

_MARK = "truth "

# Inputs whose numbers an op does not need, by their places: it looks at shapes, or overwrites.
_SHAPE_ALONE: dict[str, Callable[[Sequence[Any]], tuple[int, ...]]] = {
    "aten::bernoulli_": lambda args: (0,),
    "aten::convolution_backward": lambda args: tuple(
        place for place, asked in zip((2, 1), args[10], strict=False) if not asked
    ),
    "aten::copy_": lambda args: (0,),
    "aten::empty_like": lambda args: (0,),
    "aten::fill_": lambda args: (0,),
    "aten::index_put_": lambda args: () if len(args) > 3 and args[3] else (0,),
    "aten::max_pool2d_with_indices_backward": lambda args: (1,),
    "aten::native_batch_norm_backward": lambda args: (3, 4) if args[7] else (5, 6),
    "aten::native_layer_norm_backward": lambda args: (6,),
    "aten::new_zeros": lambda args: (0,),
    "aten::nll_loss_backward": lambda args: (1,),
    "aten::ones_like": lambda args: (0,),
    "aten::zero_": lambda args: (0,),
    "aten::zeros_like": lambda args: (0,),
}
# Of the first input they read as many numbers as they write, and at most all; or as there are targets.
_ROWS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index")
_ONE_OF_EACH_ROW = ("aten::nll_loss_forward",)
_WRITES_NOTHING_YET = ("aten::empty_like", "aten::empty", "aten::new_empty", "aten::new_empty_strided")


@dataclass(frozen=True)
class Call:
    """One op: what its tensors hold, and what the rules say of its event in the trace (None: nothing)."""

    op: str
    tensors: tuple[tuple[int, ...], ...]  # shapes, of inputs then outputs
    really: int
    told: int | None


def calls_of(run: Callable[[], object], path: Path) -> list[Call]:
    """Every op that `run` calls, in order."""
    seen = _Seen()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof, seen:
        run()
    prof.export_chrome_trace(str(path))
    recording, shapes = read_with_shapes(path, has_rule)
    found = place_events(recording, shapes=shapes)
    ops = FlopOps(found, shapes)
    ops.ran = np.ones(len(recording.spans), dtype=np.bool_)  # the blocks look like layers that are recomputed
    traffic = Traffic(found, shapes, ops)
    marks = {i: int(name.removeprefix(_MARK)) for i, name in enumerate(recording.names) if name.startswith(_MARK)}
    is_mark = np.isin(recording.spans.name, list(marks))
    numbers = {int(span): marks[int(recording.spans.name[span])] for span in np.flatnonzero(is_mark)}
    moved_by = dict(zip(traffic.units.tolist(), traffic.bytes_moved.tolist(), strict=True))
    inside = dict(zip(traffic.units.tolist(), nearest(found.enclosing, is_mark)[traffic.units].tolist(), strict=True))
    calls: dict[int, list[int]] = {}  # by the unit that they lie in, else by themselves
    for span, number in numbers.items():  # torch runs an op anew, in the block, inside its first event
        unit = int(traffic.unit_of[span])
        calls.setdefault(unit if unit >= 0 else span, []).append(number)
    told = {span: moved_by.get(span) for span in calls}
    for unit, mark in inside.items():
        if mark in calls:
            told[mark] = (told[mark] or 0) + moved_by[unit]
    found_calls = []
    for span, members in sorted(calls.items(), key=lambda item: item[1][0]):
        really = sum(seen.calls[number][2] for number in members)
        op, tensors, _ = seen.calls[members[0]]
        found_calls.append(Call(op, tensors, really, told[span] or (None if really else 0)))
    return [call for call in found_calls if not call.op.startswith("profiler::")]


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every op below autograd; each runs in a block with its number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number = len(self.calls)
        self.calls.append(("", (), 0))
        with record_function(f"{_MARK}{number}"):
            out = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        written = _tensors(
            [
                args[i] if i < len(args) else kwargs.get(argument.name)
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        )
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        results = _tensors(out)
        new = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
        is_view = bool(results) and not written and not new
        name = func.overloadpacket._qualified_op_name
        read = needed(name, args, kwargs, new)
        put = [] if name in _WRITES_NOTHING_YET else [*written, *new]
        really = 0 if is_view else read + sum(map(held, put))
        self.calls[number] = (
            name,
            tuple(tuple(tensor.shape) for tensor in [*given, *new]),
            really,
        )
        return out


def needed(name: str, args: Sequence[Any], kwargs: Any, new: Sequence[torch.Tensor]) -> int:
    """Bytes that the op has to read."""
    if name in _ROWS:
        return min(sum(map(held, new)), held(args[0])) + sum(map(held, _tensors((args[1:], kwargs))))
    if name in _ONE_OF_EACH_ROW:
        return int(args[1].numel() * args[0].element_size()) + sum(map(held, _tensors((args[1:], kwargs))))
    unread = _SHAPE_ALONE[name](args) if name in _SHAPE_ALONE else ()
    return sum(map(held, _tensors(([one for i, one in enumerate(args) if i not in unread], kwargs))))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def held(tensor: torch.Tensor) -> int:
    """Bytes of its different elements."""
    if not tensor.numel():
        return 0
    own = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    if all(stride * size <= above for (stride, size), (above, _) in pairwise(own)):  # none overlaps another
        return math.prod(size for _, size in own) * int(tensor.element_size())
    places = np.zeros((), dtype=np.int64)  # not by torch: that would be recorded
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size) * stride)
    return len(np.unique(places)) * int(tensor.element_size())
