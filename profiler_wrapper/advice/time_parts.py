"""The time of a step by part of the model: a kind of layer in all like blocks, a layer outside them, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from profiler_wrapper.advice.facts import cut, where
from profiler_wrapper.place.names import NO_LAYERS
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.tables.statistics import split_number
from profiler_wrapper.trace.arrays import grouped

_LONGEST_NAME = 80
_LOSS = re.compile(r"loss|cross_entropy|log_softmax", re.IGNORECASE)

_About = Literal["layers", "optimizer", "communication", "outside"]


class TimePart(NamedTuple):
    """A part of the model; each nanosecond with a layer, or with none by nature, is in one."""

    name: str  # in a sentence
    time_ns: int
    about: _About
    layers: Sequence[str] = ()  # whose time it is, with that of the layers below them


def time_parts(analysis: Analysis) -> tuple[TimePart, ...]:
    """Return all parts of the model, at least one, the one with most time first."""
    kinds_of_block = {split_number(row.layer)[0] for row in analysis.layers if row.kind == "block"}
    parents = {row.parent for row in analysis.layers}
    with_loss = {layer for row in analysis.operators if _LOSS.search(row.op) for layer in row.layers}
    parts = []
    for (about, _, part_name), rows in grouped((_part_of(row), row) for row in analysis.layers).items():
        name, timed = _readable(cut(part_name, _LONGEST_NAME)), [row for row in rows if row.self_time_ns]
        layers = dict.fromkeys(".".join(filter(None, (row.block, _below_block(row)))) for row in timed if row.layer)
        if blocks := sorted({row.block for row in timed if row.block}):
            like = len(kinds_of_block) == 1 and len(blocks) > 1
            owner = f"The {len(blocks)} blocks'" if like else f"{_readable(where(blocks))}'s"
            name = f"{cut(owner, _LONGEST_NAME)} {name}"
        elif part_name in parents:  # of one with layers below, what is its own
            name += f"'s own code (outside its layers{'; the loss' if part_name in with_loss else ''})"
        parts.append(TimePart(name, sum(row.self_time_ns for row in rows), about, tuple(layers)))
    return tuple(sorted(parts, key=lambda part: -part.time_ns)) or (TimePart(NO_LAYERS, 0, "outside"),)


def _part_of(row: LayerRow) -> tuple[_About, str, str]:
    if row.block:
        below = _below_block(row)
        name = f"child {below}" if below.isdecimal() else below or "own code"
        return "layers", split_number(row.block)[0], name
    if row.layer:
        return "layers", "", row.layer
    if row.phase == "optimizer":
        return "optimizer", "", "The optimizer"
    if 2 * row.communication_ns > row.self_time_ns:
        return "communication", "", "Communication of several layers"
    return "outside", "", "Code outside of all layers"


def _readable(name: str) -> str:
    """Write a layer's name in a sentence; one of numbers alone, as `nn.Sequential` gives them, as `Layer 0`."""
    return name if any(map(str.isalpha, name)) else f"Layer {name}"


def _below_block(row: LayerRow) -> str:
    """Return the name of the child of its block that a layer is or is in; "" for the block itself."""
    return row.layer.removeprefix(row.block).removeprefix(".").partition(".")[0] if row.block else row.layer
