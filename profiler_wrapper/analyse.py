"""A recording in, everything the tables say out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from profiler_wrapper.advice.advise import summary_of
from profiler_wrapper.errors import attempt, first_few, in_a_line
from profiler_wrapper.place.classes import busiest_device_properties
from profiler_wrapper.place.launches import launches_kernels
from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.place.names import GRAPH_REPLAY
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.steps import Steps
from profiler_wrapper.tables import time_rows
from profiler_wrapper.tables.layer_calls import layer_calls
from profiler_wrapper.tables.memory.blocks import OwnedMemory, owned_memory
from profiler_wrapper.tables.memory.calls import call_memory
from profiler_wrapper.tables.memory.events import DeviceMemory, device_memory
from profiler_wrapper.tables.memory.use import memory_summary, memory_use
from profiler_wrapper.tables.model import Analysis, Summary
from profiler_wrapper.tables.timeline import timeline_or_why
from profiler_wrapper.tables.views.collectives import all_to_all_ns, collective_rows
from profiler_wrapper.tables.views.experts import adapter_rows, expert_layer_rows
from profiler_wrapper.tables.views.kernels import kernel_rows
from profiler_wrapper.tables.views.operators import allocation_rows, op_memory_rows, operator_rows
from profiler_wrapper.tables.views.overview import overview, part_rows
from profiler_wrapper.tables.views.products import ShapeRows
from profiler_wrapper.tables.views.waits import synchronisation_rows
from profiler_wrapper.tables.work.peaks import Given
from profiler_wrapper.tables.work.roofline import WorkCount, work_of_recording
from profiler_wrapper.trace.recording import Recording
from profiler_wrapper.trace.run_file import Holding, Run, read_holdings
from profiler_wrapper.trace.spans import ranges

# --- What a trace says of the run it is from: rank, device, versions, steps ---

_VERSIONS = {
    "cuda_runtime_version": "cuda",
    "cuda_driver_version": "cuda driver",
    "hip_runtime_version": "hip",
    "hip_driver_version": "hip driver",
    "cupti_version": "cupti",
}


def run_of_trace(recording: Recording, step_numbers: tuple[int, ...]) -> dict[str, Any]:
    """The keys of run.json that the trace itself can fill."""
    metadata = recording.metadata
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    return {
        "trace": recording.path,
        "rank": recording.rank or 0,
        "world_size": info.get("world_size", 1),
        "device": busiest_device_properties(recording).name,
        "versions": {short: metadata[key] for key, short in _VERSIONS.items() if key in metadata},
        "timed_steps": list(step_numbers),
        "full_steps": [],
    }


_MOST_NAMED = 3  # layers, in a warning
_UNEVEN = 1.5  # times the median step
_NO_DEVICE = "kernels were launched, and no event of the device that ran them is in the trace"
_CAPTURED = "{} kernels were captured into a graph, and did not run"
_UNSEEN = (
    "how busy the device was in all, and how long idle in each layer, is not known, because when the trace began it "
    "still did work that was launched before and is not shown; steps are timed from its end on: begin to record on an "
    "idle device (torch.cuda.synchronize()), or a step earlier"
)
_OF_USE_WITH_A_TRACE_ONLY = ("compiled", "held")  # of what is known of a run


def tables(
    placed: Placed,
    *,
    run: Mapping[str, Any],
    track: Sequence[time_rows.Track] = (),
    work: WorkCount | str | None = None,
    peaks: Given | None = None,
    timeline: bool = False,
) -> Analysis:
    """Make all tables of a placed recording, see `first_tables`. `timeline`: with single events."""
    _, make_all = first_tables(placed, run=run, track=track, work=work, peaks=peaks)
    analysis = make_all()
    return replace(analysis, timeline=timeline_or_why(placed, analysis.calls)) if timeline else analysis


_VIEWS = {  # what a warning calls each, where it fails
    "parts": "parts of steps are",
    "expert_layers": "experts are",
    "overview": "the overview is",
    "operators": "operators are",
    "kernels": "kernels are",
    "collectives": "collectives are",
    "synchronisations": "waits for the device are",
    "allocations": "allocations are",
    "op_memory": "memory of ops is",
}
MADE_LATER = (*_VIEWS, "calls", "adapters", "summary", "warnings")


def first_tables(
    placed: Placed,
    *,
    run: Mapping[str, Any],
    track: Sequence[time_rows.Track] = (),
    work: WorkCount | str | None = None,
    peaks: Given | None = None,
) -> tuple[Analysis, Callable[[], Analysis]]:
    """Make time, memory, FLOPs and bytes of every layer and step; and return what adds the tables of `MADE_LATER`.

    `run`: what is known of the run (run.json). `track`: names or patterns of ops, kernels and named blocks, and
    functions of a layer's events, to follow. `work`: FLOPs and bytes as another trace of the run tells them, or why it
    does not; None: as this one does. `peaks`: of the device, see `find_peaks`.

    Raises:
        WrongUse: `peaks` means none.
    """
    recording, charges, tree = placed.recording, placed.charges, placed.tree
    in_trace, versions = run_of_trace(recording, placed.steps.number), run.get("versions")
    versions = in_trace["versions"] | dict(versions if isinstance(versions, Mapping) else {})
    run = {**in_trace, **run, "versions": versions}
    holdings, memory_notes = _holdings(run)
    memory = device_memory(recording, holdings, cpu_frees_unsure=bool(run.get("cpu_frees_unsure")))
    owned = None if memory is None else owned_memory(placed, memory)
    use = None if owned is None else memory_use(placed, owned, frees_unseen=bool(run.get("frees_unseen")))
    per_call = {} if memory is None else call_memory(placed, memory)
    exposed, exposed_total = time_rows.exposed_communication(recording, charges)
    work = _work(placed) if work is None else work
    ran_elsewhere, work_notes = time_rows.keys_of_work(tree, work)
    memory_notes += _never_called(tree, holdings)
    notes = [*_notes(placed, memory), *memory_notes, *(use.notes if use is not None else ()), *work_notes]
    series = time_rows.tracked_series(placed, track, notes)
    shaped = ShapeRows() if isinstance(work, str) else work.shapes
    analysis = Analysis(
        time_basis=charges.basis,
        complete=recording.complete and bool(run.get("complete", True)) and not len(placed.lost_launches),
        warnings=(*_strings(run.get("warnings")), *recording.warnings, *placed.notes, *notes),
        run=cast(Run, {name: value for name, value in run.items() if name not in _OF_USE_WITH_A_TRACE_ONLY}),
        time=time_rows.totals(placed, exposed_total),
        unattributed=time_rows.unattributed_rows(placed),
        layers=time_rows.layer_rows(placed, exposed, per_call, ran_elsewhere),
        attention=time_rows.attention_rows(placed),
        classes=time_rows.class_rows(placed),
        steps=time_rows.step_rows(placed, memory),
        series=series,
        memory=memory_summary(use),
        products=shaped.products,
        attention_calls=shaped.attention_calls,
        experts=shaped.experts,
        memory_use=use,
    )
    flops = None if isinstance(work, str) else work.flops
    if not isinstance(work, str):
        analysis = time_rows.with_work(analysis, placed, work, peaks)

    def make_all() -> Analysis:
        failed: list[str] = []
        every = replace(
            analysis,
            calls=layer_calls(placed, per_call),
            adapters=adapter_rows(placed, flops),
            **_views(placed, shaped, owned, failed),
        )
        summary = attempt("the summary is", lambda: summary_of(every, placed, failed), Summary(), failed)
        return replace(every, summary=summary, warnings=(*analysis.warnings, *failed))

    return analysis, make_all


def _work(placed: Placed) -> WorkCount | str:
    """FLOPs and bytes as the recording tells them, or why it does not."""
    if placed.captured_kernels:
        return _CAPTURED.format(placed.captured_kernels)
    if _device_is_missing(placed):
        return _NO_DEVICE
    try:
        return work_of_recording(placed)
    except Exception as error:  # the times are known, and are worth more
        return f"that failed: {in_a_line(error)}"


def _views(placed: Placed, shaped: ShapeRows, owned: OwnedMemory | None, failed: list[str]) -> dict[str, Any]:
    """Make the tables beyond layers. One that fails is empty, and a warning in `failed` says so."""
    makers: dict[str, Callable[[], Any]] = {
        "parts": lambda: part_rows(placed),
        "expert_layers": lambda: expert_layer_rows(placed, shaped.experts, all_to_all_ns),
        "overview": lambda: overview(placed),
        "operators": lambda: operator_rows(placed, shaped.shapes_of_op),
        "kernels": lambda: kernel_rows(placed),
        "collectives": lambda: collective_rows(placed),
        "synchronisations": lambda: synchronisation_rows(placed),
        "allocations": lambda: allocation_rows(placed, owned),
        "op_memory": lambda: op_memory_rows(placed, owned),
    }
    return {
        name: attempt(_VIEWS[name], make, None if name == "overview" else (), failed) for name, make in makers.items()
    }


def _uneven_steps(steps: Steps) -> list[str]:
    """A warning where steps are so unlike that a mean says little."""
    spans = (steps.end_ns - steps.start_ns)[steps.end_ns < np.iinfo(np.int64).max]
    if len(spans) < 3 or spans.max() <= _UNEVEN * np.median(spans):
        return []
    slowest = steps.number[int(np.argmax(spans))]
    times = spans.max() / max(1.0, float(np.median(spans)))
    return [f"the steps are unlike: step {slowest} took {times:.1f} times the median, so means say little"]


def _uneven_calls(placed: Placed) -> list[str]:
    """A warning for each model that is not called as often in one step as in another."""
    steps, tree, spans = placed.steps, placed.tree, placed.recording.spans
    outermost = placed.calls.outermost
    place, layer = steps.place_of(spans.start_ns[outermost]), [tree.layer_of_span[i] for i in outermost.tolist()]
    notes = []
    for root in sorted({one.parent for one in tree.layers} & {*layer} if tree.source != "named blocks" else ()):
        times = np.bincount(place[(place >= 0) & (np.array(layer) == root)], minlength=len(steps))
        if len(steps) and times.min() < times.max():
            fewest, most = (f"{times[i]} in step {steps.number[i]}" for i in (times.argmin(), times.argmax()))
            name = tree.layers[root].name
            notes.append(f"the steps are unlike: calls of {name} were {fewest}, {most}, so means say little")
    return notes


def _strings(values: object) -> tuple[str, ...]:
    return tuple(str(value) for value in values) if isinstance(values, (list, tuple)) else ()


def _holdings(run: Mapping[str, Any]) -> tuple[tuple[Holding, ...], list[str]]:
    """What the run says of held memory, and a note where it cannot be read."""
    try:
        return read_holdings(run.get("held")), []
    except ValueError as error:
        return (), [f"what the model and its optimizers held is left out, because the run tells it wrongly: {error}"]


def _never_called(tree: LayerTree, holdings: Iterable[Holding]) -> list[str]:
    """A note on the layers that learn and have no row; inside of compiled code nobody sees calls."""
    held = (tensor for one in holdings for tensors in one.tensors.values() for tensor in tensors)
    learn = {tensor.name.rpartition(".")[0] for tensor in held if tensor.category == "grads"}
    found = [name for name in tree.not_entered if name in learn]
    if not found or any(layer.compiled for layer in tree.layers):
        return []
    return [
        f"never called, though their parameters have gradients: {first_few(found, 3)}. Where layer.forward(x) is "
        "called, or another layer uses the parameters, the time counts for the layer around it: call layer(x)"
    ]


def _notes(placed: Placed, memory: DeviceMemory | None) -> list[str]:
    """What is not known, and why."""
    notes = [_lost_kernels(placed)] if len(placed.lost_launches) else []
    if placed.tree.source == "none":
        notes.append(
            "layers are not available, because the trace has no layer marks, no nn.Module events and no named blocks: "
            "record it with ProfilerWrapper or mark(model), or with with_stack=True"
        )
    elif placed.tree.source == "named blocks":
        notes.append("layers are the blocks that the trace names: it has no layer marks and no nn.Module events")
    if memory is None:
        notes.append("memory is not available, because the trace has no allocation events (profile_memory=True)")
    if placed.unseen_until_ns is not None:
        notes.append(_UNSEEN)
    if len(placed.recording.python):
        notes.append("Python stacks were recorded, which slow the CPU: steps and idle times are shorter without")
    if any(place.reason == GRAPH_REPLAY for place in placed.attribution.places):
        notes.append(
            "kernels of graphs that were replayed outside all layers have none: the trace of the capture tells layers "
            "but no times; record without graphs (SGLang: --disable-cuda-graph, vLLM: --enforce-eager) for both"
        )
    if placed.captured_kernels:
        notes.append(f"times say nothing of the model: {_CAPTURED.format(placed.captured_kernels)}; record a replay")
    elif _device_is_missing(placed):
        notes.append(f"times are those of the CPU: {_NO_DEVICE}")
    if (np.diff(placed.steps.number) <= 0).any():
        notes.append("steps are numbered anew: the times are of several recordings, and maybe of several ranks")
    notes += [placed.steps.note] if placed.steps.note else []
    notes += [*_uneven_steps(placed.steps), *_uneven_calls(placed)]
    return notes


def _lost_kernels(placed: Placed) -> str:
    """How many kernels the trace lacks, and of which layers and steps."""
    lost, places, steps = placed.lost_launches, placed.attribution.places, placed.steps
    names = map(placed.layer_name, (places[i] for i in placed.attribution.place_of[lost].tolist()))
    layers = Counter(name or ("no layer known" if name is None else "code outside of all layers") for name in names)
    parts = first_few([f"{name} ({count})" for name, count in layers.most_common()], _MOST_NAMED)
    numbers = np.unique(steps.place_of(placed.recording.spans.start_ns[lost])).tolist()
    in_steps = ranges([steps.number[i] for i in numbers if i >= 0])
    calls = int(launches_kernels(placed.recording).sum()) - placed.captured_kernels
    where = f"{parts}{f', in step {in_steps}' if in_steps else ''}"
    return (
        f"{len(lost)} of {calls} launches have no kernel in the trace, of {where}: the profiler lost the kernels, or "
        "the trace ends before they ran. Their layers' times are lower bounds (≥), and idle times are not known: "
        "record fewer steps, and wait for the device (torch.cuda.synchronize()) before the recording ends"
    )


def _device_is_missing(placed: Placed) -> bool:
    """Kernels were launched, and what the device did is not in the trace, as where it is torn."""
    return placed.charges.basis == "cpu" and bool(launches_kernels(placed.recording).any())
