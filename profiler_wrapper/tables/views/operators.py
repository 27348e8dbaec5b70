"""Ops, one row per op and phase; what each allocates; which line of Python each comes from.

A device event belongs to the innermost op around its launch. CPU time is that of `charges.cpu_time`: what
a layer's mark inside an op takes, the op takes. What lies in no op is the row `NO_OP`, so that the rows add up:
`self_time_ns` to the total time, `self_cpu_time_ns` to all CPU time, on a CPU-only trace both to the same.

A row has one class, that of most of its time, so sums by class are only near those of `Analysis.classes`:
`aten::copy_` is a copy, a cast within an attention and an optimizer's work.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.classes import main_classes, tensor_core_eligible, tensor_core_kernels
from profiler_wrapper.place.names import PHASES
from profiler_wrapper.place.phases import Attribution
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.timed_events import optimizer_work
from profiler_wrapper.tables.memory.blocks import OwnedMemory
from profiler_wrapper.tables.memory.use import begin_of
from profiler_wrapper.tables.model import CATEGORIES, AllocationRow, OperatorRow, OpMemoryRow
from profiler_wrapper.tables.ops import called_by_same_key, find_ops, levels_of_calls, with_called
from profiler_wrapper.tables.statistics import largest_by_key
from profiler_wrapper.trace.arrays import at, in_pieces, sum_by_key
from profiler_wrapper.trace.nesting import innermost_around, nest_chosen
from profiler_wrapper.trace.recording import Int32, Int64, Recording

NO_OP = "(no op)"
_MOST = 5  # layers and sources of a row


def operator_rows(placed: Placed, shapes_of_op: Mapping[str, tuple[str, ...]]) -> tuple[OperatorRow, ...]:
    """Return the ops of a recording, the most expensive first; `shapes_of_op`: the most frequent of each."""
    return _Table(placed).rows(shapes_of_op)


class _Table:
    """Sums per key. A key is a name and a phase; behind those of the ops there is one a phase for `NO_OP`."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        recording, attribution = placed.recording, placed.attribution
        # A large trace has millions of ops: numbers of 32 bits, and no column longer than it is needed.
        self.ops = find_ops(recording, placed.nesting.parent, placed.tree)
        phase_of_place = attribution.phase_of_place.astype(np.int32)
        number = recording.spans.name[self.ops.span] * np.int64(len(PHASES))
        number += phase_of_place[attribution.place_of[self.ops.span]]
        self.keys = np.flatnonzero(np.bincount(number))
        self.key_of_op = np.searchsorted(self.keys, number).astype(np.int32)
        del number
        self.count = len(self.keys) + len(PHASES)
        self.outermost = ~called_by_same_key(self.ops.around, self.key_of_op)
        levels = levels_of_calls(self.ops)
        charges, cpu_ns = placed.charges, placed.cpu_ns
        op_of_charge = at(self.ops.op_of, charges.cpu_span, -1)
        self.key_of_charge = self._keys(op_of_charge, phase_of_place[charges.place])
        self.self_cpu_ns = np.zeros(self.count, dtype=np.int64)
        op_cpu_ns = np.zeros(len(self.ops) + 1, dtype=np.int64)  # the last one is for "none"
        for takes in in_pieces(np.flatnonzero(cpu_ns)):
            op = self.ops.op_of[takes]
            np.add.at(op_cpu_ns, op, cpu_ns[takes])
            np.add.at(self.self_cpu_ns, self._keys(op, phase_of_place[attribution.place_of[takes]]), cpu_ns[takes])
        op_cpu_ns = with_called(self.ops, levels, op_cpu_ns[:-1])
        self.cpu_ns = self._inclusive(op_cpu_ns, self.self_cpu_ns)
        self.on_device = charges.basis == "device"
        if self.on_device:
            self.self_ns = sum_by_key(self.key_of_charge, charges.time_ns, self.count)
            op_ns = sum_by_key(op_of_charge, charges.time_ns, len(op_cpu_ns) + 1)[:-1]
            op_ns = with_called(self.ops, levels, op_ns)
            self.ns = self._inclusive(op_ns, self.self_ns)
        else:
            self.self_ns, op_ns, self.ns = self.self_cpu_ns, op_cpu_ns, self.cpu_ns
        # What makes one op of a key weigh more than another: device time, of a key without any CPU time.
        self.weight_ns = op_ns
        np.copyto(self.weight_ns, op_cpu_ns, where=(self.ns <= 0)[self.key_of_op])

    def rows(self, shapes_of_op: Mapping[str, tuple[str, ...]]) -> tuple[OperatorRow, ...]:
        names = self.placed.recording.names
        left_out = self.placed.left_out
        ended = slice(None) if left_out is None else ~left_out[self.ops.span]
        calls = np.bincount(self.key_of_op[ended], minlength=self.count)
        launched = np.bincount(self.key_of_charge, minlength=self.count) if self.on_device else np.zeros_like(calls)
        work, multiplied = self._class_of_key(), self._tensor_core_ns()
        layers, sources = self._layers(), self._sources()
        named = [(names[key // len(PHASES)], PHASES[key % len(PHASES)]) for key in self.keys.tolist()]
        named += [(NO_OP, phase) for phase in PHASES]
        rows = []
        for key in np.flatnonzero((calls > 0) | (self.self_ns > 0) | (self.self_cpu_ns > 0) | (launched > 0)).tolist():
            name, phase = named[key]
            rows.append(
                OperatorRow(
                    op=name,
                    class_name=classes.CLASSES[work[key]],
                    phase=phase,
                    calls=int(calls[key]),
                    self_time_ns=int(self.self_ns[key]),
                    time_ns=int(self.ns[key]),
                    self_cpu_time_ns=int(self.self_cpu_ns[key]),
                    cpu_time_ns=int(self.cpu_ns[key]),
                    device_events=int(launched[key]),
                    tensor_core_eligible=tensor_core_eligible(name),
                    tensor_core_time_ns=multiplied.get(key),
                    layers=layers.get(key, ())[:_MOST],
                    layer_count=len(layers.get(key, ())),
                    shapes=shapes_of_op.get(name, ()),
                    sources=sources.get(key, ()),
                )
            )
        rows.sort(key=lambda row: (-row.self_time_ns, -row.self_cpu_time_ns, -row.time_ns, row.op, row.phase))
        return tuple(rows)

    def _keys(self, op: Int32, phase: Int32) -> Int32:
        """Return per entry the key of its op; for an entry without an op, the key of `NO_OP` in its phase."""
        return np.where(op >= 0, at(self.key_of_op, op, -1), phase + np.int32(len(self.keys)))

    def _inclusive(self, per_op: Int64, own: Int64) -> Int64:
        """Sum whole ops per key; an op that is called by one of the same key is part of that one."""
        sums = np.zeros(self.count, dtype=np.int64)
        for chosen in in_pieces(np.flatnonzero(self.outermost)):
            np.add.at(sums, self.key_of_op[chosen], per_op[chosen])
        sums[len(self.keys) :] = own[len(self.keys) :]
        return sums

    def _class_of_key(self) -> Int64:
        """Return the class of most of a key's self time; without any, that of most of its calls.

        What has no op has none, and views and allocations compute nothing, whatever they are made for.
        """
        placed, charges = self.placed, self.placed.charges
        work, _ = placed.work_of.ops(self.ops.span)
        work = optimizer_work(placed.attribution, placed.attribution.place_of[self.ops.span], work)
        timed = (self.key_of_charge, charges.work, charges.time_ns)
        best = main_classes(self.count, timed, (self.key_of_op, work, 1))
        names = [self.placed.recording.names[key // len(PHASES)] for key in self.keys.tolist()]
        computes_nothing = [classes.class_of_op(name) == "other" for name in names]
        best[[*computes_nothing, *[True] * len(PHASES)]] = classes.CLASSES.index("other")
        return best

    def _tensor_core_ns(self) -> dict[int, int]:
        """Return the time in kernels that use tensor cores, of the keys whose kernels tell."""
        if not self.on_device:
            return {}
        charges = self.placed.charges
        uses_cores = tensor_core_kernels(self.placed.recording, charges.span)
        known, uses = uses_cores >= 0, uses_cores == 1
        spent = sum_by_key(self.key_of_charge[uses], charges.time_ns[uses], self.count)
        return {key: int(spent[key]) for key in np.unique(self.key_of_charge[known]).tolist()}

    def _layers(self) -> dict[int, tuple[str, ...]]:
        attribution, layers = self.placed.attribution, self.placed.tree.layers
        layer = self._largest(attribution.layer_of_place[attribution.place_of[self.ops.span]], len(layers))
        return {key: tuple(layers[i].name for i in chosen) for key, chosen in layer.items()}

    def _sources(self) -> dict[int, tuple[str, ...]]:
        sources = PythonSources(self.placed.recording, self.placed.attribution)
        if not sources:
            return {}
        lines = map(np.concatenate, zip(*map(sources.of, in_pieces(self.ops.span)), strict=True))
        user, library = map(self._largest, lines)
        return {key: sources.most_expensive(user.get(key, ()), library.get(key, ())) for key in {*user, *library}}

    def _largest(self, value: Int32 | Int64, most: int = _MOST) -> dict[int, tuple[int, ...]]:
        """Return per key the values (of ops, -1 for none) with most of its time; without device time, of CPU time."""
        return largest_by_key(self.key_of_op, np.where(self.outermost, value, -1), self.weight_ns, most)


# --- The largest allocations, and what each op allocates ---

_MOST_ALLOCATIONS = 500
_NEVER = np.iinfo(np.int64).max


def allocation_rows(placed: Placed, owned: OwnedMemory | None) -> tuple[AllocationRow, ...]:
    """Return the 500 largest allocations, the largest first, of equal ones the earliest."""
    if owned is None:
        return ()
    blocks, memory = owned.blocks, owned.memory
    begin_ns = begin_of(placed.recording)
    made = np.flatnonzero(~blocks.before)  # in order of time
    largest = made[np.argsort(-blocks.size_bytes[made], kind="stable")[:_MOST_ALLOCATIONS]]
    freed_ns = np.append(memory.time_ns, -1)[blocks.freed[largest]]  # the last for what stays
    return tuple(
        AllocationRow(
            size_bytes=int(blocks.size_bytes[block]),
            allocated_ns=int(memory.time_ns[blocks.made[block]]) - begin_ns,
            released_ns=released - begin_ns if blocks.freed[block] < blocks.events else None,
            layer=owned.layers[owned.layer[block]],
            op=blocks.ops[blocks.op[block]],
            phase=owned.phases[blocks.place[block]],
            category=CATEGORIES[owned.category[block]],
        )
        for block, released in zip(largest.tolist(), freed_ns.tolist(), strict=True)
    )


def op_memory_rows(placed: Placed, owned: OwnedMemory | None) -> tuple[OpMemoryRow, ...]:
    """Return what each op allocated, most bytes first; the sums over them are those of all allocation events."""
    if owned is None:
        return ()
    blocks = owned.blocks
    made = np.flatnonzero(~blocks.before)
    op, sizes = blocks.op[made], blocks.size_bytes[made]
    freed_ns = np.append(owned.memory.time_ns, _NEVER)[blocks.freed[made]]
    ends_ns = np.append(placed.recording.spans.end_ns, _NEVER)  # the last for what no op made
    kept = freed_ns > ends_ns[blocks.maker[made]]
    count = np.bincount(op, minlength=len(blocks.ops))
    allocated, kept_bytes = (sum_by_key(op[those], sizes[those], len(count)) for those in (slice(None), kept))
    largest = np.zeros(len(count), dtype=np.int64)
    np.maximum.at(largest, op, sizes)
    rows = [
        OpMemoryRow(
            op=blocks.ops[i],
            allocations=int(count[i]),
            allocated_bytes=int(allocated[i]),
            kept_bytes=int(kept_bytes[i]) if blocks.ops[i] else None,
            largest_bytes=int(largest[i]),
        )
        for i in np.flatnonzero(count).tolist()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.allocated_bytes, row.op)))


# --------------------------------------------------------------------------------------------------
# Which line of Python an op comes from, where the recording has Python's stacks.
#
# The profiler tells of a function the file and the line where it begins, as Python finds the file: a script
# and its own modules relative to where it was started, installed packages by their name.

_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): ")
_INSTALLED = re.compile(r"(?:.*/)?(?:site|dist)-packages/")
_PYTHONS_OWN = re.compile(r"/lib/python3\.\d+/")
_GENERATED = re.compile(r"^<|/torchinductor_")  # `<string>` of a dataclass, what Inductor wrote
_CELL = re.compile(r"^<ipython-input|/ipykernel_\d+/")
_PLUMBING = ("torch", "torchgen", "functorch", "triton", "torch_xla", "profiler_wrapper")
_LIBRARIES = frozenset({
    "accelerate", "apex", "bitsandbytes", "colossalai", "datasets", "deepspeed", "diffusers", "einops",
    "fairscale", "fbgemm_gpu", "flash_attn", "flashinfer", "fla", "fsspec", "huggingface_hub", "ignite",
    "IPython", "ipykernel", "jax", "kornia", "lightning", "lightning_fabric", "lightning_utilities",
    "liger_kernel", "megablocks", "monai", "numpy", "open_clip", "optimum", "packaging", "pandas", "peft", "PIL",
    "pydantic", "pytorch_lightning", "ray", "safetensors", "scipy", "sentence_transformers",
    "sglang", "sklearn", "timm", "tokenizers", "torchao", "torchaudio", "torchmetrics", "torchtune",
    "torchvision", "tqdm", "transformer_engine", "transformers", "trl", "typing_extensions", "unsloth", "vllm",
    "wandb", "xformers",
})  # fmt: skip


_OF_LIBRARIES = 2


class Origin(IntEnum):
    """Whose a line is."""

    NOBODY = 0  # torch's, Python's, our own, or generated
    LIBRARY = 1
    USER = 2


def origin_of(file: str) -> Origin:
    """Return whose a file is, by its path as the profiler tells it."""
    file = file.replace("\\", "/")
    if _CELL.search(file):
        return Origin.USER
    if _GENERATED.search(file):
        return Origin.NOBODY
    installed = _INSTALLED.match(file)
    package = file[installed.end() if installed else 0 :].partition("/")[0].removesuffix(".py")  # "" of a full path
    if package in _PLUMBING or package in sys.stdlib_module_names or (not installed and _PYTHONS_OWN.search(file)):
        return Origin.NOBODY
    return Origin.LIBRARY if installed or package in _LIBRARIES else Origin.USER


class Lines(NamedTuple):
    """Per span numbers for `PythonSources.text`, -1 for none."""

    user: Int32  # the innermost line of the user's
    library: Int32  # the innermost line of a library other than torch, inside of that


class PythonSources:
    """Finds `file:line` of ops: those of the user's, and within them those of libraries."""

    def __init__(self, recording: Recording, attribution: Attribution) -> None:
        self._recording, self._attribution = recording, attribution
        self._texts: dict[int, str] = {}  # `file:line` by name index
        origin = np.zeros(len(recording.names) if len(recording.python) else 0, dtype=np.int8)
        for name in np.unique(recording.python.name).tolist():
            if (match := _FRAME.match(recording.names[name])) is not None:
                self._texts[name] = f"{match['file']}:{match['line']}"
                origin[name] = origin_of(match["file"])
        origin = origin[recording.python.name]
        self._frames = [nest_chosen(recording.python, origin == wanted) for wanted in (Origin.USER, Origin.LIBRARY)]

    def __bool__(self) -> bool:
        return any(len(each.order) for each in self._frames)

    def text(self, source: int) -> str:
        """Write `file:line` of what `of` found."""
        return self._texts[source]

    def of(self, span: Int64 | Int32, around: Int32 | None = None) -> Lines:
        """Find the lines of each CPU span.

        What an autograd node runs comes from the lines whose forward made the node, unless Python runs within the
        node. `around`: per span the CPU event around it, or itself, for spans that are not nested; -1 for none.
        """
        node = at(self._attribution.node_of, span if around is None else around, -1)
        made_by = at(self._attribution.forward_op, node, -1)
        lines, began_ns = self._innermost(span)
        in_the_node = (node >= 0) & (began_ns >= self._recording.spans.start_ns[node])
        from_forward = np.flatnonzero((made_by >= 0) & ~in_the_node)
        forward, began_ns = self._innermost(made_by[from_forward])
        known = began_ns >= 0
        lines.user[from_forward[known]] = forward.user[known]
        lines.library[from_forward[known]] = forward.library[known]
        return lines

    def most_expensive(self, user: Iterable[int], library: Iterable[int]) -> tuple[str, ...]:
        """Write at most five lines, each once: first the user's, and at least two of libraries if there are."""
        users, libraries = (list(dict.fromkeys(map(self.text, lines))) for lines in (user, library))
        users = users[: _MOST - min(len(libraries), _OF_LIBRARIES)]
        return (*users, *libraries[: _MOST - len(users)])

    def _innermost(self, span: Int64 | Int32) -> tuple[Lines, Int64]:
        """Find the lines around each span, and when the outer one of the two began; -1 for none."""
        spans, calls = self._recording.spans, self._recording.python
        lane, start, end = spans.lane[span], spans.start_ns[span], spans.end_ns[span]
        user, library = (innermost_around(each, calls, lane, start, end) for each in self._frames)
        user_ns = at(calls.start_ns, user, -1)
        library = np.where(at(calls.start_ns, library, -1) >= user_ns, library, -1)
        lines = Lines(at(calls.name, user, -1), at(calls.name, library, -1))
        return lines, np.where(user >= 0, user_ns, at(calls.start_ns, library, -1))
