"""What two results must have in common to be compared: machine, model, sizes, how it was recorded."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.recording.marks import ROOT_PATH

_MOST_DTYPES = 4
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})


def comparable(facts: Facts) -> dict[str, Any]:
    """As plain data; None for what is not known.

    `layers`: how many have a name, and `blocks` how many of them are blocks. `shapes`: see
    `input_shapes`. `attention_shape`: (batch, heads, tokens, head_dim) of the largest queries.
    """
    analysis, run = facts.analysis, facts.analysis.run
    versions = run.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    shapes = facts.found.shapes
    return {
        "device": run.get("device"),
        "device_count": _device_count(facts),
        "cpu_name": run.get("cpu_name"),
        "time_basis": analysis.time_basis,
        "torch": versions.get("torch"),
        "python": versions.get("python"),
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
    described = facts.analysis.run.get("layers")
    if not isinstance(described, (list, tuple)) or not described:
        return None
    roots = [layer for layer in described if isinstance(layer, Mapping) and layer.get("path") == ROOT_PATH]
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
