"""Where one step ends and the next begins."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.optimizer_calls import optimizer_calls
from profiler_wrapper.analysis.phase import is_server_step
from profiler_wrapper.recording.recording import Category, Int32, Int64, Recording

_PROFILER_STEP = re.compile(r"ProfilerStep#(\d+)")
_ITERATION = re.compile(r"iteration#(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps as intervals of CPU time, in order, without overlap."""

    number: tuple[int, ...]
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.number)

    def only(self, numbers: Collection[int]) -> Steps:
        """Without the steps whose number is not among `numbers`; all of them if there are none."""
        if not numbers:
            return self
        kept = [i for i, number in enumerate(self.number) if number in numbers]
        return Steps(tuple(self.number[i] for i in kept), self.start_ns[kept], self.end_ns[kept])

    def place_of(self, time_ns: Int64) -> Int64:
        """Per instant the place (not the number) of its step; -1 for none."""
        if not self.number:
            return np.full(len(time_ns), -1, dtype=np.int64)
        place = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        return np.where((place >= 0) & (time_ns < self.end_ns[place]), place, -1)


def find_iterations(recording: Recording) -> Steps:
    """Entries of a block that is entered again and again, as around each layer of a loop over layers."""
    spans = recording.spans
    numbered = {i: int(m.group(1)) for i, n in enumerate(recording.names) if (m := _ITERATION.fullmatch(n))}
    chosen = np.flatnonzero((spans.category == Category.ANNOTATION) & np.isin(spans.name, list(numbered)))
    chosen = chosen[np.argsort(spans.start_ns[chosen], kind="stable")]
    return _cut([numbered[n] for n in spans.name[chosen].tolist()], spans.start_ns[chosen], spans.end_ns[chosen])


def find_steps(recording: Recording, tree: LayerTree, node_of: Int32) -> Steps:
    """The steps: `ProfilerStep#N`, else steps of the first optimizer, of a server, else calls of the first root."""
    spans = recording.spans
    numbered = {i: int(m.group(1)) for i, n in enumerate(recording.names) if (m := _PROFILER_STEP.fullmatch(n))}
    annotations = np.flatnonzero(spans.category == Category.ANNOTATION)
    annotations = annotations[np.argsort(spans.start_ns[annotations], kind="stable")]
    marked: list[int] = []
    for i in annotations[np.isin(spans.name[annotations], list(numbered))].tolist():
        last = marked[-1] if marked else i
        seen_elsewhere = last != i and spans.name[last] == spans.name[i] and spans.start_ns[i] < spans.end_ns[last]
        if not seen_elsewhere:  # a second thread tells of the same step
            marked.append(i)
    if marked:
        return _cut([numbered[int(spans.name[i])] for i in marked], spans.start_ns[marked], spans.end_ns[marked])
    stepped = optimizer_calls(recording, "step")
    if len(stepped):
        first = stepped[spans.name[stepped] == spans.name[stepped[0]]]
        ends = spans.end_ns[first]
        begin = int(spans.start_ns.min())
        return _cut(list(range(len(first))), np.concatenate([[begin], ends[:-1]]), ends)
    served: list[int] = []  # of a step within a step, the outer one
    is_step = np.array([is_server_step(name) for name in recording.names], dtype=np.bool_)[spans.name]
    for i in annotations[is_step[annotations]].tolist():
        if not served or spans.start_ns[i] >= spans.end_ns[served[-1]]:
            served.append(i)
    if served:
        return _cut(list(range(len(served))), spans.start_ns[served], spans.end_ns[served])
    roots = {i for i, layer in enumerate(tree.layers) if layer.parent < 0}
    calls = sorted(
        (int(spans.start_ns[s]), s) for s, layer in tree.layer_of_span.items() if layer in roots and node_of[s] < 0
    )
    if not calls:
        return _cut([], np.empty(0, np.int64), np.empty(0, np.int64))
    first_root = tree.layer_of_span[calls[0][1]]
    starts = np.array([start for start, s in calls if tree.layer_of_span[s] == first_root], dtype=np.int64)
    ends = np.append(starts[1:], np.iinfo(np.int64).max)
    return _cut(list(range(len(starts))), starts, ends)


def _cut(numbers: list[int], start_ns: Int64, end_ns: Int64) -> Steps:
    """Steps that do not overlap: one that is still open when the next begins ends there."""
    starts, ends = start_ns.astype(np.int64), end_ns.astype(np.int64)
    if len(starts) > 1:
        ends = np.minimum(ends, np.append(starts[1:], ends[-1]))
    return Steps(tuple(numbers), starts, ends)
