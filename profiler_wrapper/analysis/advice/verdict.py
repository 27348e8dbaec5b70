"""One sentence: where the time of a step goes, and what to do first."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts, count, duration, share, where
from profiler_wrapper.analysis.classes import CLASSES
from profiler_wrapper.analysis.model import LAUNCHED_BEFORE, NO_LAYERS, Analysis, Comparable, Finding, LayerRow
from profiler_wrapper.analysis.statistics import split_number
from profiler_wrapper.trace.marks import ROOT_PATH

# --------------------------------------------------------------------------------------------------
# What two results must have in common to be compared: machine, model, sizes, how it was recorded.

_MOST_DTYPES = 4
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})


def comparable(facts: Facts) -> Comparable:
    """As plain data; None for what is not known.

    `layers`: how many have a name, and `blocks` how many of them are blocks. `shapes`: see
    `input_shapes`. `attention_shape`: (batch, heads, tokens, head_dim) of the largest queries.
    """
    analysis, run = facts.analysis, facts.analysis.run
    versions = run.get("versions") or {}
    shapes = facts.found.shapes
    return {
        "device": run.get("device"),
        "device_count": _device_count(facts),
        "cpu_name": run.get("cpu_name"),
        "time_basis": analysis.time_basis,
        "torch": str(versions["torch"]) if "torch" in versions else None,
        "python": str(versions["python"]) if "python" in versions else None,
        "world_size": run.get("world_size"),
        "coordinates": run.get("coordinates") or {},
        "dtypes": _dtypes(facts),
        "model": _model(facts),
        "layers": sum(1 for layer in facts.rows_of if layer),
        "blocks": len(facts.blocks),
        "parameters": _parameters(facts),
        "shapes": input_shapes(analysis),
        "attention_shape": _attention_shape(facts),
        "flops_per_step": analysis.utilization.hardware_flops_per_step if analysis.utilization is not None else None,
        "phases": sorted({row.phase for row in analysis.layers if row.time_ns}),
        "steps": facts.steps if facts.has_steps else 0,
        "step_us": round(facts.step_ns / 1000, 1),
        "coverage": round(analysis.time.coverage, 4),
        "shapes_in_timed_steps": bool(shapes is not None and shapes.recorded),
        "memory_in_timed_steps": bool(len(facts.found.recording.memory)),
        "complete": analysis.complete,
    }


def _device_count(facts: Facts) -> int | None:
    """Devices that ran something; None on a CPU."""
    if not facts.on_device:
        return None
    charges = facts.found.charges
    return len(np.unique(facts.found.recording.spans.device[charges.span]))


def _dtypes(facts: Facts) -> list[str]:
    """Of what has FLOPs, those with most of them first; where there are none, of the products."""
    flops: Counter[str] = Counter()
    for row in facts.analysis.flops:
        flops[row.dtype] += row.flops_per_step
    return [dtype for dtype, _ in flops.most_common(_MOST_DTYPES) if dtype]


def _model(facts: Facts) -> str | None:
    """The classes of the roots."""
    roots = [rows[0].class_name for layer, rows in facts.rows_of.items() if layer and rows[0].parent is None]
    return ", ".join(dict.fromkeys(roots))[:120] or None


def _parameters(facts: Facts) -> int | None:
    """Of all roots; None where the run does not tell."""
    roots = [layer for layer in facts.analysis.run.get("layers") or () if layer.get("path") == ROOT_PATH]
    numbers = [number for layer in roots if isinstance(number := layer.get("parameters"), int)]
    return sum(numbers) if numbers and len(numbers) == len(roots) else None


def input_shapes(analysis: Analysis) -> str | None:
    """A short digest of what the model is given: sizes of the products of its linear layers and convolutions.

    Of forward where there is one, without types. Batched products are left out unless there are no others: they
    are those of attention, which each of its backends does otherwise. None where no shapes were recorded.
    """
    known = [product for product in analysis.products if product.phase == "forward"] or analysis.products
    linear = [product for product in known if product.op not in _BATCHED] or known
    products = Counter[tuple[int, ...]]()
    for product in linear:
        products[product.m, product.n, product.k, product.batch] += round(1000 * product.calls_per_step)
    if not products:
        return None
    return hashlib.sha256(repr(sorted(products.items())).encode()).hexdigest()[:12]


def _attention_shape(facts: Facts) -> list[int] | None:
    calls = facts.analysis.attention_calls
    return list(max(calls, key=lambda call: (prod(call.query_shape), call.query_shape)).query_shape) if calls else None


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
