"""Where one step ends and the next begins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.statistics import in_order
from profiler_wrapper.trace.marks import is_server_step
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.analysis.attribution import Attribution


# --- Where a recording says that an optimizer was called ---


def optimizer_calls(recording: Recording, method: Literal["step", "zero_grad"]) -> Int64:
    """The spans, on CPUs, of one method of any optimizer, in the order in which they begin."""
    spans = recording.spans
    names = [i for i, name in enumerate(recording.names) if name.startswith(f"Optimizer.{method}#")]
    is_call = np.isin(spans.name, names) & (spans.category <= Category.ANNOTATION)
    return in_order(np.flatnonzero(is_call), spans.start_ns)


def closure_ops(recording: Recording, parent: Int32, optimizing: Bool, made_nodes: Int32) -> Bool:
    """Of events that belong to an optimizer, those of the forward that it lets its closure compute.

    They have the number of a node that was made in the same call. What an optimizer computes itself makes no
    node, and has no number or that of the next.

    `made_nodes`: the forward ops of the nodes that ran.
    """
    spans = recording.spans
    found = np.zeros_like(optimizing)
    made_nodes = made_nodes[optimizing[made_nodes]]
    if not len(made_nodes):  # same (early return dropped): only slower
        return found
    is_call = recording.named(lambda name: name.startswith("Optimizer."))
    call = nearest(parent, is_call & (spans.category < Category.RUNTIME))
    is_op = spans.category == Category.CPU_OP
    numbered = nearest(parent, optimizing & is_op & (spans.sequence >= 0) & (spans.forward_thread <= 0))
    nodes = set(zip(call[made_nodes].tolist(), spans.sequence[made_nodes].tolist(), strict=True))
    members = np.flatnonzero(optimizing & (numbered >= 0))
    numbers = spans.sequence[numbered[members]].tolist()
    found[members] = [node in nodes for node in zip(call[members].tolist(), numbers, strict=True)]
    return found


# --- Wall time of each step, on CPU and devices together, as intervals that do not overlap ---

_NO_END = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, eq=False)
class StepWindows:
    """Disjoint intervals in order; a number of None: a trace without whole steps, taken as one."""

    number: tuple[int | None, ...]
    start_ns: Int64
    end_ns: Int64
    launched_in: Int64  # per charge: the window whose step launched it, -1 for none
    place: Int64  # of its step among those of the recording

    @property
    def length_ns(self) -> int:
        """Wall time of all of them."""
        return int((self.end_ns - self.start_ns).sum())

    @property
    def step_times_ns(self) -> tuple[int, ...]:
        """What each step took; empty of a trace without whole steps."""
        return () if None in self.number else tuple((self.end_ns - self.start_ns).tolist())


def step_windows(attributed: Attributed) -> StepWindows:
    """From the end of the step before, or a step's own begin on the CPU if that is later, to its end.

    A step ends when both the CPU and the devices are done with it: the CPU runs ahead of a busy device, and
    behind an idle one. Before the first step ends what was launched before it, also what of it is not seen. Their
    lengths are what a step takes in every report. A trace without a step that has an end is one, from its first event
    on the CPU to the last that runs.
    """
    steps = attributed.steps
    bounded = steps.end_ns < _NO_END
    ends = np.where(bounded, steps.end_ns, np.int64(-1))
    windows = _windows(attributed, steps.number, steps.start_ns, ends, steps.place_of(attributed.charges.launch_ns))
    if windows.number:
        return windows
    spans = attributed.recording.spans
    on_cpu = spans.category <= Category.RUNTIME
    chosen = on_cpu if on_cpu.any() else np.ones(len(spans), dtype=np.bool_)
    start, end = spans.start_ns[chosen].min(keepdims=True), spans.end_ns[chosen].max(keepdims=True)
    return _windows(attributed, (None,), start, end, np.zeros(len(attributed.charges), dtype=np.int64))


def step_times_ns(analysis: Analysis) -> tuple[int, ...]:
    """`StepWindows.step_times_ns`, as a result holds them; empty where it does not tell."""
    if analysis.overview is None:
        return ()
    return tuple(split.span_ns for split in analysis.overview.steps if split.step is not None)


def _windows(
    attributed: Attributed, numbers: tuple[int | None, ...], start_ns: Int64, end_ns: Int64, place: Int64
) -> StepWindows:
    """Of steps on the CPU; `place`: per charge the step it was launched in, an end of -1 stands for none."""
    charges, spans = attributed.charges, attributed.recording.spans
    ends, before = end_ns.astype(np.int64), int(np.iinfo(np.int64).min)
    if charges.basis == "device" and len(numbers):
        device_end = spans.end_ns[charges.span]
        launched: Bool = charges.cpu_span >= 0
        inside = launched & (place >= 0)
        place = np.where(inside, place, -1)
        np.maximum.at(ends, place[inside], device_end[inside])
        earlier = ~launched | (charges.launch_ns < start_ns[0])
        first = device_end[inside].min() if inside.any() else 0
        ahead = device_end[earlier & (spans.start_ns[charges.span] < first)]
        before = int(ahead.max(initial=attributed.unseen_until_ns or before))
    starts = np.maximum(start_ns, np.maximum.accumulate(np.append(np.int64(before), ends))[:-1])
    kept = np.flatnonzero(starts < ends)
    renumbered = np.full(len(numbers) + 1, -1, dtype=np.int64)  # the last one is for "none"
    renumbered[kept] = np.arange(len(kept))
    return StepWindows(tuple(numbers[i] for i in kept.tolist()), starts[kept], ends[kept], renumbered[place], kept)


_PROFILER_STEP = re.compile(r"ProfilerStep#(\d+)")
_ITERATION = re.compile(r"iteration#(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps as intervals of CPU time, in order, without overlap."""

    number: tuple[int, ...]
    start_ns: Int64
    end_ns: Int64
    note: str = ""  # what is not known of them

    def __len__(self) -> int:
        return len(self.number)

    def only(self, numbers: Collection[int]) -> Steps:
        """Without the steps whose number is not among `numbers`; all of them if there are none."""
        if not numbers:
            return self
        kept = [i for i, number in enumerate(self.number) if number in numbers]
        kept_numbers = tuple(self.number[i] for i in kept)
        return replace(self, number=kept_numbers, start_ns=self.start_ns[kept], end_ns=self.end_ns[kept])

    def place_of(self, time_ns: Int64) -> Int64:
        """Per instant the place (not the number) of its step; -1 for none."""
        if not self.number:
            return np.full(len(time_ns), -1, dtype=np.int64)
        place = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        return np.where((place >= 0) & (time_ns < self.end_ns[place]), place, -1)  # same (0 -> -1): -1 is none

    def number_at(self, time_ns: int) -> int | None:
        """The number of the step that an instant is in; None for none."""
        (place,) = self.place_of(np.array([time_ns], dtype=np.int64)).tolist()
        return self.number[place] if place >= 0 else None


def find_iterations(recording: Recording) -> Steps:
    """Entries of a block that is entered again and again, as around each layer of a loop over layers."""
    spans = recording.spans
    numbered = {i: int(m.group(1)) for i, n in enumerate(recording.names) if (m := _ITERATION.fullmatch(n))}
    is_entry = (spans.category == Category.ANNOTATION) & np.isin(spans.name, list(numbered))
    chosen = in_order(np.flatnonzero(is_entry), spans.start_ns)
    return _cut([numbered[n] for n in spans.name[chosen].tolist()], spans.start_ns[chosen], spans.end_ns[chosen])


def find_steps(recording: Recording, tree: LayerTree, attribution: Attribution, outermost: Int32) -> Steps:
    """The steps: `ProfilerStep#N`, else steps of the first optimizer, of a server, else calls of the first root."""
    spans = recording.spans
    numbered = {i: int(m.group(1)) for i, n in enumerate(recording.names) if (m := _PROFILER_STEP.fullmatch(n))}
    annotations = in_order(np.flatnonzero(spans.category == Category.ANNOTATION), spans.start_ns)
    marked: list[int] = []
    ended_ns: list[int] = []
    for i in annotations[np.isin(spans.name[annotations], list(numbered))].tolist():
        if not marked or spans.name[marked[-1]] != spans.name[i]:
            marked.append(i)
            ended_ns.append(int(spans.end_ns[i]))
        elif spans.start_ns[i] >= ended_ns[-1]:  # recording paused in the midst of it
            ended_ns[-1] = int(spans.end_ns[i])  # else a second thread tells of the same step
    if marked:
        return _cut(
            [numbered[int(spans.name[i])] for i in marked], spans.start_ns[marked], np.array(ended_ns, np.int64)
        )
    optimized = _optimized(recording, tree, attribution, outermost)
    if len(optimized):
        return optimized
    served: list[int] = []  # of a step within a step, the outer one
    is_step = recording.named(is_server_step)
    for i in annotations[is_step[annotations]].tolist():
        if not served or spans.start_ns[i] >= spans.end_ns[served[-1]]:
            served.append(i)
    if served:
        return _cut(list(range(len(served))), spans.start_ns[served], spans.end_ns[served])
    roots = [i for i in outermost.tolist() if tree.layers[tree.layer_of_span[i]].parent < 0]
    first_root = [i for i in roots if tree.layer_of_span[i] == tree.layer_of_span[roots[0]]]
    starts = spans.start_ns[np.array(first_root, dtype=np.int64)]
    return _cut(list(range(len(starts))), starts, np.append(starts[1:], _NO_END)[: len(starts)])


def _optimized(recording: Recording, tree: LayerTree, attribution: Attribution, outermost: Int32) -> Steps:
    """Steps of the first optimizer; none where no optimizer steps.

    What optimizers step, and the update of a gradient scaler, which may have skipped one, is of one step until there
    was a forward and a backward again. That ends with the first of them outside of backward, else with the backward.
    An optimizer is known by its class and the roots whose parameters got gradients: the first that come again are its.
    Without layers by its class, what forward called and how many parameters got gradients, if both differ in turn.
    """
    spans, node_of = recording.spans, attribution.node_of
    calls = optimizer_calls(recording, "step")
    calls = calls[np.append(-1, np.maximum.accumulate(spans.end_ns[calls]))[:-1] < spans.end_ns[calls]]  # no inner ones
    updates = np.flatnonzero(recording.named(lambda name: name.startswith("aten::_amp_update_scale")))
    found = in_order(np.concatenate([calls, updates]), spans.end_ns)
    made = attribution.forward_op[attribution.forward_op >= 0]
    forwards = np.sort(spans.start_ns[np.concatenate([made[node_of[made] < 0], outermost])])
    nodes = in_order(np.flatnonzero(attribution.is_node), spans.start_ns)
    begun_ns, ended_ns = spans.start_ns[nodes], np.maximum.accumulate(spans.end_ns[nodes])
    is_whole = np.ones(len(found), dtype=np.bool_)  # there was a forward and a backward since the one before it
    for starts in (forwards, begun_ns):
        if len(starts):
            is_whole &= np.diff(np.searchsorted(starts, spans.end_ns[found]), prepend=0) > 0
    learning = [place.layer if place.phase == "accumulate_grad" else -1 for place in attribution.places]
    roots = np.array([tree.layers[layer].ancestors[-1] if layer >= 0 else -1 for layer in learning])
    owners = roots[attribution.place_of[nodes]]
    learns = np.array([place.phase == "accumulate_grad" for place in attribution.places])[attribution.place_of[nodes]]
    differentiable = (spans.sequence >= 0) & (spans.forward_thread <= 0) & (node_of < 0)
    called = in_order(np.flatnonzero(differentiable & np.isin(spans.name, spans.name[made])), spans.start_ns)
    partial, *groups = np.split(found, np.flatnonzero(is_whole))
    begin_ns = last_ns = int(spans.end_ns[partial[-1]] if len(partial) else spans.start_ns.min())
    steps: list[tuple[str, frozenset[int], tuple[frozenset[int], int], int]] = []
    for group in groups:
        first, last = np.searchsorted(begun_ns, [last_ns, spans.end_ns[group[-1]]])
        ops = spans.name[called[slice(*np.searchsorted(spans.start_ns[called], [last_ns, spans.end_ns[group[-1]]]))]]
        last_ns, outside = int(spans.end_ns[group[-1]]), group[node_of[group] < 0]
        upcoming = np.append(forwards, _NO_END)[np.searchsorted(forwards, last_ns)]
        end_ns = spans.end_ns[outside[0]] if len(outside) else ended_ns[np.searchsorted(begun_ns, upcoming) - 1]
        name = next((recording.name_of(span) for span in group.tolist() if span not in updates), "")
        backward = np.searchsorted(begun_ns, forwards[: np.searchsorted(forwards, last_ns)].max(initial=0))  # the last
        kind = (frozenset(np.unique(ops).tolist()), int(learns[backward:last].sum()))
        steps.append((name, frozenset(owners[first:last].tolist()) - {-1}, kind, int(end_ns)))
    for known in (0, 1):  # "", or no roots: it does not tell
        again = next((key for key, times in Counter(step[known] for step in steps).items() if key and times > 1), None)
        steps = [step for step in steps if again is None or step[known] in ("", frozenset(), again)]
    kinds, note = [step[2] for step in steps], ""
    in_turn = any(kinds[period:] == kinds[:-period] for period in range(1, len(kinds) // 2 + 1))
    if in_turn and (count := len(set(kinds))) > 1 and not any(step[1] for step in steps):
        those = "one optimizer"
        if all(len(set(parts)) == count for parts in zip(*kinds, strict=True)):
            steps = [step for step in steps if step[2] == kinds[0]]
            those = f"{count} optimizers, of which only the first ends a step"
        note = f"optimizer steps of {count} kinds take turns, and count as those of {those}: prof.step() would tell"
    ends = np.array([step[3] for step in steps], dtype=np.int64)
    return replace(_cut(list(range(len(ends))), np.append(np.int64(begin_ns), ends)[:-1], ends), note=note)


def _cut(numbers: list[int], start_ns: Int64, end_ns: Int64) -> Steps:
    """Steps that do not overlap: one that is still open when the next begins ends there."""
    starts, ends = start_ns.astype(np.int64), end_ns.astype(np.int64)
    if len(starts) > 1:
        ends = np.minimum(ends, np.append(starts[1:], ends[-1]))
    return Steps(tuple(numbers), starts, ends)
