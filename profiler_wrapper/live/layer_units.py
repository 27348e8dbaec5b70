"""The parts of a model that are timed one by one: its blocks, and what lies beside them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from profiler_wrapper.capture.layers import Layer, RootLabels, find_roots, name_layers
from profiler_wrapper.capture.pipeline import is_in_pipeline
from profiler_wrapper.capture.wrappers import all_modules
from profiler_wrapper.recording.marks import ROOT_PATH


class Unit:
    """A block, or a module beside the blocks, as an embedding, a norm, the head.

    Attributes:
        name: as the plain model has it.
        calls: in this step, recomputed ones left out.
        spans: what its spans are called, by their kind.
    """

    __slots__ = ("calls", "name", "spans")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.spans = {kind: f"{name} {kind}" for kind in ("forward", "backward", "recompute")}


class Units:
    """Those of a model, by the modules through which they are entered: the plain ones, and what wraps them.

    Holds no module.

    Args:
        model: a module, several, or a pipeline's schedule or stage, as `ProfilerWrapper` takes them.
    """

    def __init__(self, model: object) -> None:
        in_pipeline = is_in_pipeline(model, None, None)
        self._entries: dict[int, tuple[weakref.ref[nn.Module], Unit]] = {}
        self._inside: dict[int, tuple[weakref.ref[nn.Module], Unit]] = {}
        self.all: list[Unit] = []
        roots = find_roots(model, RootLabels())
        named = len(roots) > 1
        taken: set[str] = set()
        for root in roots:
            if in_pipeline and not root.in_pipeline:
                root = replace(root, in_pipeline=True)
            for layer in _units_of(name_layers(root)):
                name = layer.mark.path
                if name == ROOT_PATH or (named and name in taken):
                    name = root.label if name == ROOT_PATH else f"{root.label}.{name}"
                taken.add(name)
                self._add(name, layer)

    def get(self, module: nn.Module) -> Unit | None:
        """The unit that a call of this module enters."""
        entry = self._entries.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def around(self, module: nn.Module) -> Unit | None:
        """The unit that this module lies in."""
        entry = self._inside.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _add(self, name: str, layer: Layer) -> None:
        if id(layer.module) in self._entries:  # two roots share it
            return
        unit = Unit(name)
        self.all.append(unit)
        for holder in layer.holders:
            self._entries[id(holder)] = weakref.ref(holder), unit
        for module in all_modules(layer.module):
            if module is not layer.module:
                self._inside.setdefault(id(module), (weakref.ref(module), unit))


def _units_of(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    """The outermost blocks, and the outermost modules that hold none; the model itself where nothing is in it."""
    above: set[str] = set()  # names that something with a block in it has, lists of modules too
    for layer in layers:
        if layer.mark.kind == "block":
            above.update(_names_above(layer.mark.path))
    if len(layers) == 1:
        yield layers[0]
        return
    units: set[str] = set()
    for layer in layers:
        path = layer.mark.path
        if path == ROOT_PATH or path in above or not units.isdisjoint(_names_above(path)):
            continue
        units.add(path)
        yield layer


def _names_above(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))
