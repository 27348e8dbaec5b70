"""What is true of a model or a trace, found without any code of the package.

Truths, each obtained another way than the package obtains it; `saved_tensors.py` has one more:

- `NodeTruth`: which layer made each autograd node. The package reads a trace: marks, times, flows and
  sequence numbers of ops. This truth has no profiler: it wraps the modules' `_call_impl` and `forward`
  and notes autograd's own counter whenever the innermost module changes, so each number handed out in
  between belongs to that module. Which nodes really run is read from the graphs given to
  `torch.autograd.backward`.
- `device_total_ns` and `cpu_total_ns`: totals of a trace from the plain `json` module, decimals and a
  sweep line.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from module_stack import OUTSIDE, ModuleStack, layer_names

MARK_PREFIX = "layer: "  # spelled out here on purpose: the truths import nothing of the package
GARBAGE = "garbage collection"


# --- autograd nodes -------------------------------------------------------------------------------


def next_number() -> int:
    """The number that autograd gives the next node made on this thread; reading it uses none up."""
    return int(torch._C._autograd._get_sequence_nr())


class Node(NamedTuple):
    """An autograd node: its number counted from where the recording began, and its name."""

    number: int
    name: str


class NodeTruth:
    """Records which layer makes each autograd node while the `with` lasts.

    names: from `layer_names` of the plain model, where `model` is wrapped.

    `nodes` then has every node that a backward ran, numbered from `begin`, so that the same program run
    again gives the same keys: subtract `next_number()`, read before its first step, from its numbers.
    """

    def __init__(self, model: nn.Module, names: dict[int, str] | None = None) -> None:
        self._model = model
        self._names = layer_names(model) if names is None else names
        self._layer_of_number: dict[int, str] = {}
        self._ran: dict[int, str] = {}
        self.begin = 0
        self.nodes: dict[Node, str] = {}

    def __enter__(self) -> NodeTruth:
        self._thread = threading.get_ident()
        self.begin = self._seen = next_number()
        self._stack = ModuleStack(self._model, self._names, self._advance)
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._record_graph
        return self

    def __exit__(self, *exception: object) -> None:
        torch.autograd.backward = self._backward
        self._stack.close()
        self._advance()
        self.nodes = {
            Node(number - self.begin, name): self._layer_of_number.get(number, OUTSIDE)
            for number, name in self._ran.items()
        }

    def _advance(self) -> None:
        """Every number handed out since the last change belongs to the module innermost until now."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a module ran on a second thread, whose numbers this truth does not follow")
        number = next_number()
        for issued in range(self._seen, number):
            self._layer_of_number[issued] = self._stack.innermost
        self._seen = number

    def _record_graph(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        todo = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
        visited = set()
        while todo:
            node = todo.pop()
            if node in visited:
                continue
            visited.add(node)
            if not node.name().endswith("AccumulateGrad"):  # has no number
                self._ran[node._sequence_nr()] = node.name()
            todo.extend(following for following, _ in node.next_functions if following is not None)
        self._backward(tensors, *args, **kwargs)


class BackwardEvent(NamedTuple):
    """A backward op in a trace that carries a number: `Node(number - begin, name)` is its key in `NodeTruth.nodes`."""

    number: int
    name: str
    tid: int
    start_ns: int


def numbered_backward_events(path: Path | str) -> list[BackwardEvent]:
    """The ops of a trace that ran a numbered autograd node: those with a `Fwd thread id` that is not 0."""
    found = []
    for event in _events(path):
        args = event.get("args", {})
        name = event.get("name", "")
        if event.get("cat") == "cpu_op" and args.get("Fwd thread id", 0) != 0 and "Sequence number" in args:
            if name.startswith("autograd::engine::evaluate_function: "):
                name = name.split(": ", 1)[1]
            found.append(BackwardEvent(args["Sequence number"], name, event["tid"], _ns(event["ts"])))
    return found


# --- totals of a trace ----------------------------------------------------------------------------


def _events(path: Path | str) -> list[dict[str, Any]]:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        trace = json.load(file, parse_float=Decimal)
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def _ns(microseconds: int | Decimal) -> int:
    return int((Decimal(microseconds) * 1000).to_integral_value())


def device_total_ns(path: Path | str) -> int:
    """Sum of `dur` over kernels, copies and sets."""
    return device_total_of(_events(path))


def device_total_of(events: list[dict[str, Any]]) -> int:
    """The same of events whose times are decimals."""
    device = {"kernel", "gpu_memcpy", "gpu_memset"}
    return sum(_ns(event["dur"]) for event in events if event.get("cat") in device)


def cpu_total_ns(path: Path | str) -> int:
    """Union of the ops of each thread, summed over threads; marks of layers and garbage collections are none."""
    edges: dict[tuple[Any, Any], list[tuple[int, int]]] = defaultdict(list)
    for event in _events(path):
        if (
            event.get("cat") == "cpu_op"
            and event.get("ph") == "X"
            and not event["name"].startswith((MARK_PREFIX, GARBAGE))
        ):
            start = _ns(event["ts"])
            edges[event["pid"], event["tid"]] += [(start, 1), (start + _ns(event["dur"]), -1)]
    return sum(_covered(thread) for thread in edges.values())


def _covered(edges: list[tuple[int, int]]) -> int:
    total = depth = since = 0
    for time, change in sorted(edges):
        if depth > 0:
            total += time - since
        since = time
        depth += change
    return total
