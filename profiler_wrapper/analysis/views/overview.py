"""How busy the machine is within the steps, and how the wall time of a step divides.

The figures are those of the TensorBoard profiler's overview, by its definitions: torch_tb_profiler 0.4.3,
`event_parser.py` (what counts as what), `overall_parser.py` (the order), `gpu_metrics_parser.py`. Where ours differ:
communication is known by what a kernel is and not by five names, and where there are device events it is kernels
only: what the CPU does to launch them is the CPU's; copies beside it do not hide it; annotations are no CPU time, for
they change with what a user names; nothing is counted between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.charges import Union, union
from profiler_wrapper.analysis.classes import busiest_device, device_properties, tensor_core_kernels
from profiler_wrapper.analysis.model import Overview, StepSplit
from profiler_wrapper.analysis.statistics import at, in_pieces
from profiler_wrapper.analysis.steps import StepWindows, step_windows
from profiler_wrapper.analysis.views.kernels import occupancy_of
from profiler_wrapper.trace.marks import parse_mark
from profiler_wrapper.trace.recording import Bool, Category, Float64, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


_COMMUNICATION = classes.CLASSES.index("communication")
_DATALOADER = "enumerate(DataLoader)#", "enumerate(DataPipe)#"
_NS_PER_S = 10**9
_PARTS = 10**9  # a share of a multiprocessor is counted in these, so that sums of shares stay exact


def overview(attributed: Attributed) -> Overview | None:
    """The overview of an attributed recording; None where nothing takes wall time."""
    windows = step_windows(attributed)
    if not windows.number:
        return None
    steps = _splits(attributed, windows)
    device = busiest_device(attributed.recording)
    if device is None:
        nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(Overview))
        return Overview(**nothing | {"steps": steps, "kernels": 0})
    properties = device_properties(attributed.recording, device)
    kernels = _Kernels(attributed.recording, device, windows)
    here = attributed.recording.spans.device[attributed.charges.span] == device
    is_kernel = attributed.recording.spans.category[attributed.charges.span] == Category.KERNEL
    launched = int((here & is_kernel & (windows.launched_in >= 0)).sum())
    busy = _covered(_union_of(attributed.recording, attributed.charges.span[here]), windows)
    cut = attributed.unseen_until_ns is not None and len(windows.number) == 1  # the one step is not seen whole
    return Overview(
        device=properties.name,
        device_memory_bytes=properties.memory_bytes,
        compute_capability=properties.capability_text or None,
        multiprocessors=properties.multiprocessors,
        steps=steps,
        utilization=None if cut else kernels.utilization(),
        sm_efficiency=None if cut else kernels.sm_efficiency(),
        occupancy=kernels.occupancy(),
        tensor_core_share=kernels.tensor_core_share(),
        kernels=launched,
        launches_per_s=None if cut else launched / (windows.length_ns / _NS_PER_S),
        gaps_ns=None if cut else windows.length_ns - busy,
    )


# --- the split ----------------------------------------------------------------------------------


def _splits(attributed: Attributed, windows: StepWindows) -> tuple[StepSplit, ...]:
    """Per step what each kind adds to the time that the kinds before it cover; of all devices and threads."""
    busy = _union_of(attributed.recording, np.empty(0, np.int64))
    spans_ns = windows.end_ns - windows.start_ns
    covered = [np.zeros_like(spans_ns)]
    for kind in _by_priority(attributed):
        of_kind = _union_of(attributed.recording, np.flatnonzero(kind))
        busy = union(*map(np.concatenate, zip(busy, of_kind, strict=True)))
        covered.append(busy.overlap(windows.start_ns, windows.end_ns))
    parts = np.diff([*covered, spans_ns], axis=0).tolist()
    columns = zip(windows.number, spans_ns.tolist(), *parts, strict=True)
    return tuple(StepSplit(number, *lengths) for number, *lengths in columns)


def _by_priority(attributed: Attributed) -> Iterator[Bool]:
    """Per span whether its time is of the kind: kernel, communication, memcpy, memset, runtime, data loader, CPU.

    Communication is kernels that move data between ranks; without device events, ops and annotations that do.
    """
    recording, charges = attributed.recording, attributed.charges
    category = recording.spans.category
    communicates = np.zeros(len(category), dtype=np.bool_)
    if charges.basis == "device":
        communicates[charges.span[charges.work == _COMMUNICATION]] = True
    communicates &= category == Category.KERNEL
    on_cpu: Bool = (category == Category.CPU_OP) | (category == Category.ANNOTATION)
    is_mark = recording.named(parse_mark)
    if charges.basis != "device":
        communicates |= on_cpu & recording.named(lambda text: classes.class_of_op(text) == "communication") & ~is_mark
    yield (category == Category.KERNEL) & ~communicates
    yield communicates
    for kind in (Category.MEMCPY, Category.MEMSET, Category.RUNTIME):
        yield category == kind
    yield on_cpu & recording.named(lambda text: text.startswith(_DATALOADER))
    yield (category == Category.CPU_OP) & ~is_mark


# --- the device ---------------------------------------------------------------------------------


class _Kernels:
    """The kernels of one device, communication included, as far as they lie within the steps."""

    def __init__(self, recording: Recording, device: int, windows: StepWindows) -> None:
        spans = recording.spans
        chosen = np.flatnonzero((spans.category == Category.KERNEL) & (spans.device == device))
        self.windows = windows
        inside = Union(windows.start_ns, windows.end_ns)
        self.time_ns = inside.overlap(spans.start_ns[chosen], spans.end_ns[chosen])
        self.span = chosen[self.time_ns > 0]
        self.time_ns = self.time_ns[self.time_ns > 0]
        self.recording = recording
        self.configuration = recording.details.configuration_of(self.span)

    def utilization(self) -> float:
        """The part of the wall time in which some kernel runs."""
        return _covered(_union_of(self.recording, self.span), self.windows) / self.windows.length_ns

    def sm_efficiency(self) -> float | None:
        """The part of the multiprocessors that have a block, over the wall time.

        A kernel with fewer blocks than there are multiprocessors takes that part of them; kernels beside one another
        add up, to all of them at most. None where some kernel does not tell its blocks.
        """
        blocks = self._of_configurations(self.recording.details.configurations.blocks_per_sm)
        if not len(blocks) or np.isnan(blocks).any():
            return None
        spans = self.recording.spans
        share = np.rint(np.minimum(blocks, 1.0) * _PARTS).astype(np.int64)
        times = np.concatenate([spans.start_ns[self.span], spans.end_ns[self.span]])
        order = np.argsort(times, kind="stable")
        taken = np.minimum(np.cumsum(np.concatenate([share, -share])[order]), _PARTS)[:-1]
        lasts = Union(self.windows.start_ns, self.windows.end_ns).overlap(times[order][:-1], times[order][1:])
        high, low = np.divmod(taken, 10**4)  # products of whole numbers, exact on any machine, none beyond 64 bits
        return (10**4 * int(high @ lasts) + int(low @ lasts)) / _PARTS / self.windows.length_ns

    def occupancy(self) -> float | None:
        """Mean by time over the kernels that tell; None where none does."""
        occupancy = self._of_configurations(occupancy_of(self.recording.details.configurations))
        known = ~np.isnan(occupancy)
        return float(np.average(occupancy[known], weights=self.time_ns[known])) if known.any() else None

    def tensor_core_share(self) -> float | None:
        """Of kernel time, in kernels that are known to use tensor cores; None where no kernel's name tells."""
        uses_cores = tensor_core_kernels(self.recording, self.span)
        if not (uses_cores >= 0).any():
            return None
        return int(self.time_ns[uses_cores == 1].sum()) / int(self.time_ns.sum())

    def _of_configurations(self, values: Float64) -> Float64:
        """Per kernel what its configuration tells."""
        return at(values, self.configuration, np.nan)


def _union_of(recording: Recording, span: Int64) -> Union:
    starts, durations = recording.spans.start_ns, recording.spans.duration_ns
    unions = (union(starts[piece], starts[piece] + durations[piece]) for piece in in_pieces(span))
    start_ns, end_ns = map(np.concatenate, zip(*unions, strict=True))
    return union(start_ns, end_ns)


def _covered(busy: Union, windows: StepWindows) -> int:
    """How much of the steps it covers."""
    return int(busy.overlap(windows.start_ns, windows.end_ns).sum())
