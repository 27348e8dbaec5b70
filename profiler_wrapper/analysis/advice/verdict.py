"""One sentence: where the time of a step goes, and what to do first."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.analysis.advice.wording import count, duration, share, where
from profiler_wrapper.analysis.classes import CLASSES
from profiler_wrapper.analysis.model import LAUNCHED_BEFORE, NO_LAYERS, LayerRow
from profiler_wrapper.analysis.numbered_names import split_number
from profiler_wrapper.analysis.view_model import Finding

_MUCH_WITHOUT_LAYER = 0.3  # of the time: said before all else
_IDLE = 0.5  # of a step with nothing running on the device: where the time goes, then
_LONGEST_NAME = 80
_LOSS = re.compile(r"loss|cross_entropy|log_softmax", re.IGNORECASE)
_CAUSE_OF_IDLENESS = {"launching": "launch-bound", "loading": "dataloader-bound", "waiting": "synchronisation"}


def verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    """Where the time goes and what to do first; says so where nothing stands out."""
    captured = facts.found.captured_kernels
    if captured > len(facts.found.charges):
        return (
            f"This is the capture of a graph: its {count(captured, 'kernel')} were recorded to be replayed and did not "
            "run. Profile a replay for times."
        )
    where_it_goes = _where_it_goes(facts)
    if not facts.analysis.complete:
        where_it_goes = f"of an incomplete recording, {where_it_goes}"
    if not findings:
        return f"Nothing stands out: {where_it_goes}."
    return f"{where_it_goes[0].upper()}{where_it_goes[1:]}; first: {_first(findings)}."


def _first(findings: Sequence[Finding]) -> str:
    """The largest; but why a device is idle says more than that it is, which was said, and so does what to do."""
    largest = findings[0]
    if largest.id != "low-utilization":
        return largest.title.rstrip(".")
    cause = _CAUSE_OF_IDLENESS.get(str(largest.details.get("mostly")))
    return next((finding.title.rstrip(".") for finding in findings if finding.id == cause), largest.fix)


def _where_it_goes(facts: Facts) -> str:
    analysis = facts.analysis
    step, total = facts.steps_text, facts.total_ns
    work = duration(facts.work_ns if step.startswith(facts.step_text) else total)
    if not total:
        return f"no op of {step} took time of its own"
    busy = _busy_share(facts)
    said, of = "", f"the {work} of {facts.time_name} in {step}"
    if facts.total_ns < analysis.time.total_ns:  # the table has what was launched before it too
        of = f"the {work} of {facts.time_name} that {step} launched"
    if busy is not None and busy < _IDLE:
        said, of = f"the device is idle for {share(1 - busy)} of {step}; ", f"its {work} of work"
    without_layer = [row for row in analysis.unattributed if row.reason != LAUNCHED_BEFORE]
    unknown = sum(row.time_ns for row in without_layer) / total
    if unknown >= _MUCH_WITHOUT_LAYER:
        reasons = ", ".join(row.reason for row in without_layer[:2])
        part = "" if unknown > 0.9995 else f"{share(unknown)} of "
        return f"{said}no layer is known for {part}{of} ({reasons}); {_largest_class(facts)}"
    name, time_ns = _largest_part(facts)
    return f"{said}{share(time_ns / total)} of {of} is in {name}"


def _busy_share(facts: Facts) -> float | None:
    """Of the steps' wall time, how much of it a device event runs; None on a CPU."""
    analysis = facts.analysis
    overview = analysis.overview
    if not facts.on_device:
        return None
    if overview is not None and overview.gaps_ns is not None and overview.steps:
        span = sum(step.span_ns for step in overview.steps)
        return 1 - overview.gaps_ns / span if span else None
    if analysis.time.busy_ns is None or not analysis.time.span_ns:
        return None
    return min(1.0, analysis.time.busy_ns / analysis.time.span_ns)


def _largest_class(facts: Facts) -> str:
    """Where layers are not known, kinds of work are."""
    charges, places = facts.found.charges, facts.found.attribution.places
    in_steps = np.array([place.reason != LAUNCHED_BEFORE for place in places], dtype=np.bool_)[charges.place]
    time_ns = np.zeros(len(CLASSES), dtype=np.int64)
    np.add.at(time_ns, charges.work[in_steps], charges.time_ns[in_steps])
    name = CLASSES[int(np.argmax(time_ns))]
    named = {"gemm": "matrix products", "other": "work of no known kind"}.get(name, name)
    return f"{share(int(time_ns.max()) / facts.total_ns)} is {named}"


def _largest_part(facts: Facts) -> tuple[str, int]:
    """The part with most time of its own: one kind of layer in all like blocks, a layer outside them, the optimizer.

    Each nanosecond with a layer belongs to one part.
    """
    time: Counter[tuple[str, str]] = Counter()
    blocks: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in facts.analysis.layers:
        key = _part(row)
        time[key] += row.self_time_ns
        if row.block and row.self_time_ns:
            blocks[key].add(row.block)
    if not time:
        return NO_LAYERS, 0
    (pattern, name), spent = max(time.items(), key=lambda entry: entry[1])
    members = blocks.get((pattern, name))
    if members is None:
        return _whole(facts, name), spent
    owner = f"the {len(members)} blocks'" if _one_kind_of_blocks(facts) else f"{_short(where(sorted(members)))}'s"
    if len(members) == 1:
        owner = f"the block {_short(next(iter(members)))}'s"
    return f"{owner} {_short(name)}", spent


def _whole(facts: Facts, name: str) -> str:
    """A layer outside of blocks; of one with layers below, what is its own."""
    if not any(row.parent == name for row in facts.analysis.layers):
        return _short(name)
    of_loss = any(_LOSS.search(row.op) and name in row.layers for row in facts.analysis.operators)
    return f"{_short(name)}'s own code (outside its layers{'; the loss' if of_loss else ''})"


def _part(row: LayerRow) -> tuple[str, str]:
    if row.block:
        below = row.layer[len(row.block) + 1 :].partition(".")[0]
        return split_number(row.block)[0], f"child {below}" if below.isdecimal() else below or "own code"
    if row.layer:
        return "", row.layer
    if row.phase == "optimizer":
        return "", "the optimizer"
    if 2 * row.communication_ns > row.self_time_ns:
        return "", "communication of several layers"
    return "", "code outside of all layers"


def _one_kind_of_blocks(facts: Facts) -> bool:
    return len({split_number(block)[0] for block in facts.blocks}) == 1


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
