"""What a run says of its compiled graphs, read: the kernels of each in order, and where it may run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from profiler_wrapper.recording.owned import ALL_GRAPHS
from profiler_wrapper.recording.recording import Recording

_CALL = re.compile(r"## Call CompiledFxGraph (\S+) ##")
_LIBRARY = re.compile(r"(?:torch\.ops\.)?(?P<space>\w+)\.(?P<op>\w+)(\.\w+)?")
_GENERATED_FOR_CPU = "cpp_"
# Calls of a library under a name of Inductor's own.
_CALLED_AS = {"aten::bias_addmm": "aten::addmm"}

DAMAGED = "what the run says of them is damaged"


class Kernel(NamedTuple):
    """One call of a kernel in a graph."""

    name: str
    event: str  # what its event is called
    silent: bool  # on a CPU it may have no event
    phase: str
    modules: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph, as the run describes it."""

    kernels: tuple[Kernel, ...]
    inside: Mapping[tuple[str, str], Sequence[str]]  # (root, path) of a layer it may run in -> names of modules


def only_called(compiled: Mapping[str, Any], recording: Recording) -> dict[str, Any]:
    """Of what a run says of its compiled graphs, what concerns those that `recording` calls."""
    called = graph_keys(recording.names) | {ALL_GRAPHS}
    return {key: told for key, told in compiled.items() if key in called}


def graph_key(name: str) -> str | None:
    """The cache key of the graph whose call has this name; None for other events."""
    match = _CALL.fullmatch(name)
    return match[1] if match else None


def graph_keys(names: Iterable[str]) -> set[str]:
    """The cache keys of the graphs whose calls have these names."""
    return {key for name in names if (key := graph_key(name)) is not None}


def read_graphs(compiled: object) -> dict[str, Graph | str] | None:
    """What a run says of its compiled graphs, by cache key; None if it says nothing of any.

    A text says why nothing is known of a graph, under `ALL_GRAPHS` why of any that is not listed.
    """
    if not isinstance(compiled, Mapping):
        return None
    return {key: told if isinstance(told, str) else _read_graph(told) for key, told in compiled.items()}


def _read_graph(told: Mapping[str, Any]) -> Graph | str:
    try:
        return _graph(told)
    except (KeyError, TypeError, ValueError):
        return DAMAGED


def _graph(told: Mapping[str, Any]) -> Graph:
    kernels = []
    for name, is_extern, phase, modules in told["kernels"]:
        event = _event_of_library(name) if is_extern else name
        silent = not is_extern and name.startswith(_GENERATED_FOR_CPU)
        kernels.append(Kernel(name, event, silent, phase, tuple(modules)))
    inside = {(str(root), str(path)): [str(name) for name in names] for root, path, names in told["inside"]}
    numbers = {number for kernel in kernels for number in kernel.modules}
    if any(not 0 <= number < len(names) for names in inside.values() for number in numbers):
        raise ValueError("a module without a name")
    return Graph(tuple(kernels), inside)


def _event_of_library(name: str) -> str:
    """`extern_kernels.mm` -> `aten::mm`, `torch.ops.aten.cumsum.default` -> `aten::cumsum`."""
    match = _LIBRARY.fullmatch(name)
    if match is None:
        return name
    space = "aten" if match["space"] == "extern_kernels" else match["space"]
    event = f"{space}::{match['op']}"
    return _CALLED_AS.get(event, event)
