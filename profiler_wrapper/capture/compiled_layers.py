"""For which modules of a model the compiled graphs were made: what run.json says of compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from profiler_wrapper.capture.compiled import OWN, Kernel, Module, known_graphs, traced_modules, why_unavailable
from profiler_wrapper.capture.layers import Root, module_paths
from profiler_wrapper.trace.marks import ROOT_PATH
from profiler_wrapper.trace.owned import ALL_GRAPHS

NO_SUCH_MODULES = "they were compiled for modules that are not in this model"


class MarkedModule(NamedTuple):
    """A module that marks a layer when it is called: the plain one or one of its wrappers."""

    root: str  # as marks have them
    path: str
    module: nn.Module
    compiled: bool  # some call of the layer ran compiled code
    in_pipeline: bool = False  # its root is a stage of a pipeline


def describe_compiled(modules: Iterable[MarkedModule]) -> dict[str, Any]:
    """The compiled graphs that were made for `modules`, as `recording.owned` has them.

    A graph may run in a layer if all its modules are there, with their classes: caches know nothing of names.
    """
    unavailable = why_unavailable()
    if unavailable is not None:
        return {ALL_GRAPHS: unavailable}
    graphs = known_graphs()
    modules = list(modules) if graphs else []
    names = {place: _names_below(place, full_names) for place, full_names in _compiled_places(modules)}
    return {key: _describe(kernels, traced_modules(key), names) for key, kernels in graphs.items()}


def _compiled_places(modules: list[MarkedModule]) -> Iterable[tuple[MarkedModule, dict[int, str]]]:
    full_names: dict[str, dict[int, str]] = {}
    for marked in modules:
        if marked.path == ROOT_PATH:
            root = Root(marked.root, marked.module, named="#" not in marked.root, in_pipeline=marked.in_pipeline)
            full_names.setdefault(marked.root, {}).update(module_paths(root))
    for marked in modules:
        if marked.compiled:
            yield marked, full_names.get(marked.root, {})


def _names_below(place: MarkedModule, full_names: dict[int, str]) -> dict[tuple[str, str], str]:
    """Full name of each module below, by the path and the class that Dynamo knows."""
    found = {OWN[:2]: place.path}
    for path, module in place.module.named_modules(remove_duplicate=False):
        relative = ".".join(step for step in path.split(".") if step != "_orig_mod")
        if relative and id(module) in full_names:
            found[relative, type(module).__name__] = full_names[id(module)]
    return found


def _describe(
    kernels: tuple[Kernel, ...] | str,
    traced: frozenset[Module],
    names: dict[MarkedModule, dict[tuple[str, str], str]],
) -> dict[str, Any] | str:
    if isinstance(kernels, str):
        return kernels
    working = dict.fromkeys(m[:2] for k in kernels for m in k.modules)
    fitting = {place: below for place, below in names.items() if all(module in below for module in working)}
    if not fitting and working.keys() <= {OWN[:2]}:  # a function: its kernels belong where it is called
        return {"kernels": [[k.name, k.is_extern, k.phase, []] for k in kernels], "inside": []}
    if not fitting:
        return NO_SUCH_MODULES
    idle = sorted({m[:2] for m in traced}.difference(working))
    idle = [module for module in idle if all(module in below for below in fitting.values())]
    modules = {module: i for i, module in enumerate([*working, *idle])}
    inside = {(place.root, place.path): [below[module] for module in modules] for place, below in fitting.items()}
    return {
        "kernels": [[k.name, k.is_extern, k.phase, [modules[module[:2]] for module in k.modules]] for k in kernels],
        "inside": [[root, path, full_names] for (root, path), full_names in inside.items()],
    }
