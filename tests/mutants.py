"""Which small changes of the code no test notices: `python tests/mutants.py [ROOM ...] [--seed N] [--count N]`.

Draws mutants of each room's files (a comparison, a sign, a constant, a condition, an early return changed), applies
each alone to a copy of the package, runs the room's fast tests until the first fails, and prints those that
survive. A survivor is a case no test tells from the right one, or an equivalent mutant: `equivalent_mutants.py` lists
these by function and line of source, so that files can be moved.

The draw goes by function and source text too: the same seed draws the same mutants wherever a file lies.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from equivalent_mutants import EQUIVALENT
from shared_traces import TRACES

REPOSITORY = Path(__file__).resolve().parents[1]


class Room(NamedTuple):
    """What is mutated (patterns below `profiler_wrapper/`), and the tests that should notice, the fastest first."""

    files: str
    tests: str  # tests/unit/test_<name>.py, or in tests/integration
    goldens: tuple[str, ...] = ()  # groups of golden_outputs.py, after these


ROOMS = {
    "attribution": Room(
        "analysis/attribution.py analysis/layer_tree.py analysis/steps.py",
        "layer_tree attribution find_steps handed_ops layer_time compare_clock",
    ),
    "charges": Room(
        "analysis/charges.py analysis/classes.py",
        "classes tensor_cores charges intervals device_properties overview idle",
    ),
    "memory": Room(
        "analysis/memory/*.py",
        "memory_categories memory_changes memory_growth layer_memory memory_curve memory_before memory_moments"
        " memory_log allocation_rows memory_advice memory_text",
    ),
    "work": Room(
        "analysis/work/*.py analysis/attention_ops.py",
        "flop_formulas op_bytes traffic flop_counts handed_ops roofline utilization attention_backends product_sizes"
        " peaks peak_table precision_advice ceilings",
    ),
    "capture": Room(
        "capture/recorder.py capture/steps.py capture/scopes.py capture/owned_tensors.py capture/layers.py"
        " capture/torch_state.py",
        "phases scopes scopes_roots scopes_harmless layers steps garbage_marks holdings session saved_tensors recorder"
        " pipeline_layers marking held_memory own_failures other_profilers unusual_loops",
    ),
    "timer": Room(
        "timer/*.py",
        "engine_calls rank_waits span_log timer_device timer_files timer layer_spans layer_spans_odd_steps"
        " monitor_times monitor_breakdown monitor_odd_uses",
    ),
    "monitor": Room(
        "monitor/*.py",
        "monitor_statistics monitor_gaps monitor_config monitor_parallelism monitor_times monitor_copies"
        " monitor_breakdown monitor_odd_uses monitor_rates monitor_logs monitor_carried_flops monitor_shared_files"
        " monitor_trackers sinks monitor_command monitor_beside_profilers",
        ("monitor",),
    ),
    "compare": Room(
        "comparison/*.py",
        "compare_names noise compare_clock compare_work compare compare_load guard",
        ("compare", "guard"),
    ),
    "ranks": Room(
        "ranks/*.py",
        "rank_scores rank_overlap step_accounting shared_transfers imbalance what_if slow_layers rank_clocks rank_waits"
        " hidden_waiting rank_results replay_roles straggler_verdicts replay trace_spans ranks_queries"
        " span_columns span_files ranks_figures ranks_told ranks_text ranks_report_dict ranks_trace",
        ("ranks small", "ranks simulated", "ranks pipelines", "ranks traces"),
    ),
}


class Key(NamedTuple):
    """What a mutant changes, wherever its file lies."""

    function: str  # qualified name; "" for the module's own lines
    line: str  # its line of source
    change: str


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    key: Key
    path: Path
    lineno: int
    source: bytes  # of the whole file, with the change


_SWAPPED_OPS: dict[type[ast.AST], tuple[str, type[ast.AST], str]] = {
    ast.Gt: (">", ast.GtE, ">="), ast.GtE: (">=", ast.Gt, ">"), ast.Lt: ("<", ast.LtE, "<="),
    ast.LtE: ("<=", ast.Lt, "<"), ast.Eq: ("==", ast.NotEq, "!="), ast.NotEq: ("!=", ast.Eq, "=="),
    ast.Add: ("+", ast.Sub, "-"), ast.Sub: ("-", ast.Add, "+"),
    ast.And: ("and", ast.Or, "or"), ast.Or: ("or", ast.And, "and"),
}  # fmt: skip
_SWAPPED_NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_SMALL = (
    100  # whole numbers up to here by one; larger ones and fractions are thresholds, which nothing sits on: doubled
)


class _Finder(ast.NodeVisitor):
    """All changes of a module: (function, node, its text after the change, what changes).

    Nothing in annotations, decorators, texts, what is raised, and what only a type checker or an assertion reads.
    """

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.found: list[tuple[str, ast.expr, str, str]] = []

    def _add(self, node: ast.expr, after: ast.expr, change: str) -> None:
        self.found.append((".".join(self.functions), node, f"({ast.unparse(after)})", change))

    def _definition(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.functions.append(node.name)
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.functions.pop()

    visit_ClassDef = visit_FunctionDef = _definition

    def _nothing(self, node: ast.AST) -> None:
        """Not looked into."""

    visit_JoinedStr = visit_Raise = visit_Assert = visit_Import = visit_ImportFrom = _nothing

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "slots", "frozen", "kw_only"):
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if len(node.body) == 1 and not node.orelse and isinstance(node.body[0], ast.Return | ast.Continue):
            kind = type(node.body[0]).__name__.lower()
            self._add(node.test, ast.Constant(False), f"early {kind} dropped")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            if type(op) in _SWAPPED_OPS:
                before, swapped, after = _SWAPPED_OPS[type(op)]
                ops = [*node.ops[:i], swapped(), *node.ops[i + 1 :]]
                self._add(node, ast.Compare(node.left, ops, node.comparators), f"{before} -> {after}")  # type: ignore[arg-type]
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes))
            for part in ast.walk(node)
        )
        if type(node.op) in _SWAPPED_OPS and not is_text:
            before, swapped, after = _SWAPPED_OPS[type(node.op)]
            self._add(node, ast.BinOp(node.left, swapped(), node.right), f"{before} -> {after}")  # type: ignore[arg-type]
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, swapped, after = _SWAPPED_OPS[type(node.op)]
        self._add(node, ast.BoolOp(swapped(), node.values), f"{before} -> {after}")  # type: ignore[arg-type]
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert):
            self._add(node, node.operand, "not dropped")
        if ast.unparse(node) == "-1":  # the last one, or what stands for none: -2 often says the same
            self._add(node, ast.Constant(0), "-1 -> 0")
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _SWAPPED_NAMES:
            after = _SWAPPED_NAMES[name]
            if isinstance(node.func, ast.Name):
                self._add(node.func, ast.Name(after), f"{name} -> {after}")
            elif isinstance(node.func, ast.Attribute):
                self._add(node.func, ast.Attribute(node.func.value, after), f"{name} -> {after}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, ast.Constant(not value), f"{value} -> {not value}")
        elif isinstance(value, int | float):
            others = (value + 1, value - 1) if isinstance(value, int) and value <= _SMALL else (value * 2 or 1.0,)
            for other in others:
                self._add(node, ast.Constant(other), f"{value} -> {other}")


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    finder = _Finder()
    finder.visit(ast.parse(source))
    for function, node, after, change in finder.found:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        key = Key(function, lines[node.lineno - 1].decode().strip(), change)
        yield Mutant(key, path, node.lineno, source[:begin] + after.encode() + source[end:])


def draw(files: list[Path], *, seed: int, count: int) -> list[Mutant]:
    """`count` mutants, each of another line."""
    by_line: dict[tuple[str, str, int], list[Mutant]] = {}
    for path in files:
        for mutant in mutants_of(path):
            by_line.setdefault((mutant.key.function, mutant.key.line, mutant.lineno), []).append(mutant)
    rng = random.Random(seed)
    lines = sorted(by_line, key=lambda line: line[:2])
    rng.shuffle(lines)
    return [rng.choice(by_line[line]) for line in lines[:count]]


def _import_what_is_slow() -> None:
    """Libraries that every run needs, once: runs are forks of this process. Nothing of the package itself."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis.extra.numpy
    import msgspec
    import pandas
    import pytest
    import torch.profiler
    import torch.utils.checkpoint

    del hypothesis, msgspec, pandas, pytest, torch


def _pytest(copy: Path, tests: list[str], log: Path) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["PYTHONPATH"] = str(copy)
    # As a program of its own: in what multiprocessing has started, a timer writes as a worker of its rank.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    import pytest

    code = pytest.main([
        "-x", "-q", "-n0", "--tb=line", "-p", "no:cacheprovider", "-c", str(copy / "setup.cfg"), *tests
    ])  # fmt: skip
    os._exit(int(code))


def run_tests(copy: Path, tests: list[str], *, limit_s: float, log: Path) -> tuple[str, float]:
    """("passed", "failed" or "timed out", seconds) of the tests against the copy."""
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(copy, tests, log))
    process.start()
    process.join(limit_s)
    outcome = "timed out" if process.is_alive() else "passed" if process.exitcode == 0 else "failed"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # and what the tests started
    process.join()
    return outcome, time.monotonic() - began


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The mutant in its file, with a time of its own so that no compiled file is taken for it."""
    path = mutant.path
    before, stat = path.read_bytes(), path.stat()
    path.write_bytes(mutant.source)
    os.utime(path, (stat.st_atime + 10, stat.st_mtime + 10))
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _difference(mutant: Mutant) -> str:
    function, line, change = mutant.key
    after = mutant.source.decode().splitlines()[mutant.lineno - 1].strip()
    return f"{mutant.path.name}:{mutant.lineno} {function} [{change}]\n    - {line}\n    + {after}"


def check_room(name: str, copy: Path, *, seed: int, count: int, files: str | None, tests: str | None) -> str:
    """Runs a room's mutants; its row of the table."""
    room = ROOMS[name]
    package = copy / "profiler_wrapper"
    paths = sorted({path for pattern in (files or room.files).split() for path in package.glob(pattern)})
    there = [
        str(path)
        for test in (tests or room.tests).split()
        for folder in ("unit", "integration")
        if (path := copy / "tests" / folder / f"test_{test}.py").exists()
    ]
    golden = copy / "tests" / "integration" / "test_golden_outputs.py"
    there += [f"{golden}::test_outputs_are_as_they_were[{group}]" for group in room.goldens if tests is None]
    log = copy.parent / f"{name}.log"
    outcome, seconds = run_tests(copy, there, limit_s=600, log=log)
    if outcome != "passed":
        raise SystemExit(f"{name}: the tests fail without a mutant:\n{log.read_text()[-3000:]}")
    print(f"\n{name}: {len(paths)} files, {len(there)} test files, {seconds:.0f} s without a mutant", flush=True)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    counts = dict.fromkeys(("killed", "survived", "timed out", "equivalent"), 0)
    for number, mutant in enumerate(draw(paths, seed=seed, count=count), start=1):
        if mutant.key in EQUIVALENT:
            counts["equivalent"] += 1
            continue
        with applied(mutant):
            outcome, _ = run_tests(copy, there, limit_s=3 * seconds + 30, log=log)
        result = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
        counts[result] += 1
        if result != "killed":
            print(f"  {number}. {result}: {_difference(mutant)}", flush=True)
    judged = sum(counts.values()) - counts["equivalent"]
    share = 100 * counts["survived"] / judged if judged else 0
    return f"{name:<12}" + "".join(f"{counts[column]:>11}" for column in counts) + f"{share:>14.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; all unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="mutants of each room")
    parser.add_argument("--files", help="in place of the room's: patterns below profiler_wrapper/")
    parser.add_argument("--tests", help="in place of the room's: names of tests, as in the table of rooms")
    asked = parser.parse_args()
    unknown = set(asked.rooms) - set(ROOMS)
    if unknown:
        parser.error(f"no room {', '.join(sorted(unknown))}; there are {', '.join(ROOMS)}")
    os.nice(5)
    _import_what_is_slow()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        if TRACES.is_dir():
            (copy.parent / TRACES.parent.name).symlink_to(TRACES.parent)
        compileall.compile_dir(copy / "profiler_wrapper", quiet=1)
        for name in asked.rooms or ROOMS:
            rows.append(
                check_room(name, copy, seed=asked.seed, count=asked.count, files=asked.files, tests=asked.tests)
            )
    print(f"\n{'room':<12}{'killed':>11}{'survived':>11}{'timed out':>11}{'equivalent':>11}   survived of them")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
