"""Where one step ends and the next begins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.place.optimizer_calls import optimizer_calls
from profiler_wrapper.place.phases import Attribution
from profiler_wrapper.trace.arrays import in_order
from profiler_wrapper.trace.marks import is_server_step
from profiler_wrapper.trace.recording import Category, Int32, Int64, Recording

NO_END_NS = int(np.iinfo(np.int64).max)


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
    return _cut(list(range(len(starts))), starts, np.append(starts[1:], NO_END_NS)[: len(starts)])


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
        upcoming = np.append(forwards, NO_END_NS)[np.searchsorted(forwards, last_ns)]
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
