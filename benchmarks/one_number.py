"""Follow one backward time through the code: the files, functions and forms that it passes until it is printed.

A trace is made in which one backward kernel lasts a time that nothing else has. Each function that returns or yields
something which holds that time is on its way. A *form* is another record, field, unit or type of the same number. Then
`load` of that trace and a live run of a small Llama show which files call each other both ways (*pairs*), and the
sources which files import each other in a circle, imports inside functions and under `TYPE_CHECKING` counted.

    python benchmarks/one_number.py [--checkout DIR] [--no-live] [--verbose]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import measuring

DURATION_NS = 7_654_321
BEGIN_NS = 1_003_003
END_NS = BEGIN_NS + DURATION_NS
_UNITS = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TEXT = re.compile(r"\b7\.65(4(321)?)?\b|\b7654321\b|\b7654\.321\b")
_DEEPEST = 6  # records within records that are looked at
_LONGEST = 2_000  # items of a list or dict


# --- forms ---


def forms(value: Any) -> set[str]:
    """Return in which fields of which records a value holds the time, or that it does so elsewhere, and as what."""
    found: set[str] = set()
    _look(value, "no record", found, set(), _DEEPEST)
    return found


def _look(value: Any, place: str, found: set[str], seen: set[int], depth: int) -> None:
    unit = _unit(value)
    if unit is not None:
        found.add(f"{place}: {type(value).__name__} {unit}")
        return
    if depth == 0 or isinstance(value, (str, bytes, int, float, bool, type(None), type)) or id(value) in seen:
        return
    seen.add(id(value))
    if type(value).__name__ == "ndarray":
        for unit, size in _UNITS.items():
            if value.dtype.kind in "iuf" and value.size and _in_array(value, size):
                found.add(f"{place}: array of {value.dtype} {unit}")
        if value.dtype.kind == "O" and value.size <= _LONGEST:
            for item in value.ravel().tolist():
                _look(item, place, found, seen, depth - 1)
    elif isinstance(value, Mapping) and value is not os.environ:
        for item in list(value.values())[:_LONGEST]:
            _look(item, place, found, seen, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        for item in list(value)[:_LONGEST]:
            _look(item, place, found, seen, depth - 1)
    else:
        for name, item in _fields(value):
            _look(item, f"{type(value).__name__}.{name}", found, seen, depth - 1)


def _in_array(value: Any, size: int) -> bool:
    if value.dtype.kind == "f":
        return bool((abs(value - DURATION_NS / size) < 1e-6 * DURATION_NS / size).any())
    return size == 1 and bool((value == DURATION_NS).any())


def _unit(value: Any) -> str | None:
    kind = type(value).__name__
    if kind in ("int", "int64"):
        return "ns" if value == DURATION_NS else None
    if kind in ("float", "float64"):
        return next((unit for unit, size in _UNITS.items() if abs(value - DURATION_NS / size) < 1e-6 * value), None)
    if isinstance(value, str) and len(value) < 1_000_000 and _TEXT.search(value):
        return "text"
    return None


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a record holds that is already there: nothing lazy is computed."""
    if not type(value).__module__.startswith("profiler_wrapper"):
        if hasattr(value, "_fields") and isinstance(value, tuple):
            yield from zip(value._fields, value, strict=True)
        return
    names = list(getattr(type(value), "__struct_fields__", ()))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    for name in names:
        with contextlib.suppress(AttributeError):
            yield name, object.__getattribute__(value, name)


# --- what is called ---


class Calls:
    """Which functions of the package run, which call which, and which hand the time on. Use as a context."""

    def __init__(self, package: Path, *, follow: bool) -> None:
        self.package, self.follow = f"{package}{os.sep}", follow
        self.functions: set[CodeType] = set()
        self.edges: Counter[tuple[str, str]] = Counter()
        self.hands_on: dict[CodeType, set[str]] = {}

    def __enter__(self) -> Calls:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(self.package):
            return
        if event == "call":
            self.functions.add(code)
            back = frame.f_back
            if back is not None and back.f_code.co_filename.startswith(self.package):
                self.edges[back.f_code.co_filename, code.co_filename] += 1
        elif event == "return" and self.follow and value is not None:
            sys.setprofile(None)
            try:
                if (found := forms(value)) and not code.co_name.startswith("<"):  # else a part of its function
                    self.hands_on.setdefault(code, set()).update(found)
            finally:
                sys.setprofile(self._event)

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Files of which each calls the other."""
        return sorted((one, other) for one, other in self.edges if one < other and (other, one) in self.edges)


def short(path: str) -> str:
    return path.split("profiler_wrapper/", 1)[-1]


# --- what is run ---


def write_trace(path: Path) -> Path:
    """Write a step of two layers, one of which has one backward kernel, of the time that is followed.

    The other has a shorter and a longer one of the same op and the same kernel, so that no other sum, least or most is
    that time.
    """
    forward, backward = 1, 2  # threads
    events: list[dict[str, Any]] = []

    def span(category: str, name: str, begin_ns: int, end_ns: int, thread: int, process: int = 7, **args: Any) -> None:
        times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        events.append({"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, **times, "args": args})

    def kernel(name: str, launch_ns: int, begin_ns: int, end_ns: int, thread: int) -> None:
        span("cuda_runtime", "cudaLaunchKernel", launch_ns, launch_ns + 1_000, thread, correlation=launch_ns)
        span("kernel", name, begin_ns, end_ns, 3, 0, correlation=launch_ns, device=0, stream=3)

    node = "autograd::engine::evaluate_function: AddmmBackward0"
    span("user_annotation", "ProfilerStep#0", 0, END_NS + 31_000_000, forward)
    span("python_function", "nn.Module: Model_0", 5_000, 200_000, forward, **{"Python id": 1})
    last_ns = END_NS + 30_000_000
    times = {0: [(BEGIN_NS, END_NS)], 1: [(END_NS, END_NS + 1_111_111), (END_NS + 2_000_000, last_ns)]}
    for layer, kernels in times.items():
        at_ns = 10_000 + 90_000 * layer
        span(
            "python_function", f"nn.Module: Linear_{layer}", at_ns, at_ns + 80_000, forward, **{"Python id": 2 + layer}
        )
        order = {"Sequence number": 5 + layer}
        span("cpu_op", "aten::addmm", at_ns + 10_000, at_ns + 70_000, forward, **order, **{"Fwd thread id": 0})
        kernel("gemm_forward", at_ns + 20_000, at_ns + 30_000, at_ns + 60_000 + layer, forward)
        at_ns = 900_000 - 90_000 * layer
        span("cpu_op", node, at_ns, at_ns + 80_000, backward, **order, **{"Fwd thread id": forward})
        for number, (begin_ns, end_ns) in enumerate(kernels):
            op_ns = at_ns + 1_000 + 30_000 * number
            span("cpu_op", "aten::mm", op_ns, op_ns + 20_000, backward)
            kernel("gemm_backward", op_ns + 5_000, begin_ns, end_ns, backward)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    return path


def follow(trace: Path, package: Path) -> Calls:
    """Load and print a trace, and look at all that the functions return."""
    import profiler_wrapper

    with Calls(package, follow=True) as calls, contextlib.redirect_stdout(io.StringIO()) as printed:
        print(profiler_wrapper.load(trace).table())
    if not re.search(_TEXT, printed.getvalue()):
        raise RuntimeError(f"the time is not printed:\n{printed.getvalue()}")
    return calls


def load(trace: Path, package: Path) -> Calls:
    """Load a trace."""
    import profiler_wrapper

    with Calls(package, follow=False) as calls:
        profiler_wrapper.load(trace)
    return calls


def live(folder: Path, package: Path) -> Calls:
    """Train a small Llama for five steps, three of which are recorded, and write the reports."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 128, (2, 32))
    with Calls(package, follow=False) as calls, contextlib.redirect_stdout(io.StringIO()):
        from profiler_wrapper import ProfilerWrapper

        with ProfilerWrapper(model, output_dir=folder, background=False) as prof:
            for _ in range(5):
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                prof.step()
    return calls


def import_circles(package: Path) -> list[list[str]]:
    """Return the groups of files each of which needs all others of its group."""
    import house

    sources = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    return sorted(sorted(circle) for circle in house.circles(house.needed_modules(sources)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=measuring.ROOT, help="whose package is followed")
    parser.add_argument("--no-live", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="each file, function, form and pair")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.checkout))
    package = asked.checkout.resolve() / "profiler_wrapper"
    with tempfile.TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "trace.json")
        load(trace, package)  # what is imported once is not of a load
        way = follow(trace, package).hands_on
        loaded = load(trace, package)
        ran = None if asked.no_live else live(Path(folder) / "run", package)
    found = sorted({form for each in way.values() for form in each})
    files = Counter(short(code.co_filename) for code in way)
    print(f"one backward time: {len(files)} files, {len(way)} functions, {len(found)} forms")
    if asked.verbose:
        for code in way:
            print(f"  {short(code.co_filename)}  {code.co_qualname if sys.version_info >= (3, 11) else code.co_name}")
        print("forms", *found, sep="\n  ")
    for name, calls in (("load", loaded), ("live run", ran)):
        if calls is None:
            continue
        print(f"{name}: {len(calls.functions)} functions in {len(calls.files)} files, {len(calls.pairs)} pairs")
        if asked.verbose:
            print(*(f"  {short(one)} <-> {short(other)}" for one, other in calls.pairs), sep="\n")
    circles = import_circles(package)
    print(f"circles of imports: {', '.join(str(len(circle)) for circle in circles) or 'none'} files")
    if asked.verbose:
        print(*(f"  {' '.join(circle)}" for circle in circles), sep="\n")


if __name__ == "__main__":
    main()
