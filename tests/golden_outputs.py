"""Every output of the package for fixed inputs: made through its public surface, kept exact, compared key by key.

    python tests/golden_outputs.py make DIR [GROUP ...]    write them in full: `diff -r` of two trees' shows all
    python tests/golden_outputs.py check [GROUP ...]       compare with those kept in tests/golden/outputs
    python tests/golden_outputs.py update [GROUP ...]      keep these from now on

Two kinds, apart: *numbers* (JSON, CSV, exit codes, names, signatures) stay as they are; *texts* (tables, help,
messages) may be written anew, by `update`, where a change means to. To make those of another tree, put it before
this one: `PYTHONPATH=OTHER python tests/golden_outputs.py make DIR`. A group whose input is not there is skipped.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import importlib
import inspect
import io
import json
import os
import random
import re
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import checkout  # noqa: F401
import pipeline_jobs
import profiler_wrapper as pw
import rank_traces
import small_rank_jobs
import snapshots
from profiler_wrapper.__main__ import main as run_main

TESTS = Path(__file__).resolve().parent
KEPT = TESTS / "golden" / "outputs"
RUNS = TESTS / "data" / "llama_runs.tar.xz"
SHARED = TESTS.parents[1] / "shared"
TRACES = SHARED / "traces"
STRAGGLERS = SHARED / "stragglers" / "trace-ST.parquet"

KINDS = ("numbers", "texts")
PAGE_DATA = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
KEPT_CHARACTERS = 160  # of JSON that is kept as it is; of more a digest
KEPT_LINES = 40  # of a text that is kept as it is; of more a digest of each line

Tree = Any  # of JSON types
Row = dict[str, Any]
Group = Callable[["Outputs"], None]
GROUPS: dict[str, Group] = {}
LONG = {"adapters", "compare traces", "guard traces"}  # groups that the suite leaves out


class Missing(Exception):
    """An input of a group is not on this machine."""


class Outputs:
    """What a group has made, and how it makes it. The current directory is the group's own, and empty at first."""

    def __init__(self) -> None:
        self.made: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

    def numbers(self, name: str, value: Any) -> None:
        """JSON types, or a text that is as exact; numbers with 12 digits, as the last ones go by the processor."""
        plain = self._plain(json.dumps(value, default=str))
        self._keep("numbers", name, json.loads(plain, parse_float=lambda text: float(f"{float(text):.12g}")))

    def text(self, name: str, text: str) -> None:
        self._keep("texts", name, self._plain(text))

    def csv(self, name: str, text: str) -> None:
        """By column, so that a difference names it."""
        head, *rows = csv.reader(io.StringIO(text))
        self.numbers(name, {"columns": head, **{column: [row[at] for row in rows] for at, column in enumerate(head)}})

    def file(self, path: str | Path) -> None:
        """A file that the package wrote: a page's data, JSON and CSV are numbers, text is text, pictures are there."""
        path = Path(path)
        name, ending = path.as_posix(), path.suffix
        if ending in (".html", ".htm"):
            self.numbers(f"{name} data", [json.loads(data) for data in PAGE_DATA.findall(_text(path))])
        elif ending == ".gz":
            self.numbers(name, json.loads(gzip.decompress(path.read_bytes())))
        elif ending == ".json":
            self.numbers(name, json.loads(_text(path)))
        elif ending == ".csv":
            self.csv(name, _text(path))
        elif ending in (".txt", ".log"):
            self.text(name, _text(path))
        else:
            self.numbers(name, "written" if path.stat().st_size else "empty")

    def files(self, folder: str) -> None:
        """All files of a directory."""
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        self.numbers(f"{folder} files", [path.as_posix() for path in paths])
        for path in paths:
            self.file(path)

    def command(self, *arguments: str, name: str = "") -> None:
        """Runs `profiler-wrapper ARGUMENTS`: the exit code and printed JSON or CSV are numbers, the rest is text."""
        name = name or " ".join(arguments)
        code, printed, said = run_command(arguments)
        self.numbers(f"{name}: exit code", code)
        if code in (0, 3) and printed.startswith(("{", "[")):
            self.numbers(name, json.loads(printed))
        elif "csv" in arguments and code == 0 and "-o" not in arguments:
            self.csv(name, printed)
        elif printed:
            self.text(name, printed)
        if said:
            self.text(f"{name}: stderr", said)

    def _keep(self, kind: str, name: str, value: Any) -> None:
        assert name not in self.made[kind], f"two outputs are called {name!r}"
        self.made[kind][name] = value

    @staticmethod
    def _plain(text: str) -> str:
        """Without what is of this machine, this run or this version."""
        text = text.replace(str(Path.cwd().resolve()), "HERE").replace(str(Path.cwd()), "HERE")
        text = text.replace(str(Path(pw.__file__).parents[1]), "PACKAGE")
        text = re.sub(rf"(?<![\d.]){re.escape(pw.__version__)}(?![\d.])", "VERSION", text)
        return re.sub(r" at 0x[0-9a-f]+", " at ADDRESS", text)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def run_command(arguments: Sequence[str]) -> tuple[int, str, str]:
    """The exit code of the command line, what it printed, and what it said on stderr; warnings of ours among it."""
    printed, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with warnings.catch_warnings(record=True) as told, redirect_stdout(printed), redirect_stderr(said):
        warnings.simplefilter("always")
        try:
            code = run_main(list(arguments))
        except SystemExit as end:
            code = 0 if end.code is None else int(end.code)
    texts = [one.buffer.getvalue().decode() for one in (printed, said)]  # type: ignore[attr-defined]
    ours = [one.message for one in told if issubclass(one.category, pw.ProfilerWrapperWarning)]
    texts[1] += "".join(f"warning: {message}\n" for message in ours)
    return code, texts[0], texts[1]


def group(make: Group) -> Group:
    GROUPS[make.__name__.strip("_").replace("_", " ")] = make
    return make


@contextmanager
def quiet_place() -> Iterator[None]:
    """An empty current directory, the environment that outputs depend on, and UTC."""
    environment, before = dict(os.environ), Path.cwd()
    for name in [one for one in os.environ if one.startswith("PROFILER_WRAPPER")]:
        del os.environ[name]
    os.environ.update(COLUMNS="100", TZ="UTC")
    time.tzset()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            time.tzset()


def make(name: str) -> dict[str, dict[str, Any]]:
    """The outputs of a group: by kind, by name.

    Raises:
        Missing: an input is not there.
    """
    found = Outputs()
    with quiet_place():
        GROUPS[name](found)
    return found.made


# --- what is kept of an output ---


def digest(value: Tree) -> Tree:
    """Small values as they are; of large ones a hash for each key, and of lists of rows for each column."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= KEPT_CHARACTERS:
        return value
    if isinstance(value, dict):
        return {key: digest(one) for key, one in value.items()}
    if isinstance(value, list):
        if all(isinstance(row, dict) for row in value):
            keys = {key: None for row in value for key in row}
            return {"rows": len(value)} | {f"[].{key}": _hash([row.get(key, "-") for row in value]) for key in keys}
        return f"{len(value)} values {_hash(value)}"
    return _hash(value)


def line_digest(text: str) -> Tree:
    """The lines of a short text; of a long one their hashes."""
    lines = text.splitlines()
    if len(lines) <= KEPT_LINES:
        return lines
    hashes = [_hash(line)[:4] for line in lines]
    return {"hashes of 10 lines each": [" ".join(hashes[at : at + 10]) for at in range(0, len(hashes), 10)]}


def _hash(value: Tree) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def kept_form(kind: str, value: Tree) -> Tree:
    return digest(value) if kind == "numbers" else line_digest(value)


def differences(was: Tree, now: Tree, place: str = "") -> Iterator[str]:
    """Where two kept forms differ: the key, and both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            there = f"{place} > {key}" if place else key
            if key not in now:
                yield f"{there}: is gone"
            elif key not in was:
                yield f"{there}: is new"
            else:
                yield from differences(was[key], now[key], there)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for at, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from differences(one, other, f"{place}[{at}]")
    elif was != now or type(was) is not type(now):
        yield f"{place}: was {_short(was)}, is {_short(now)}"


def _short(value: Tree) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}..."


def versions() -> dict[str, str]:
    """What the outputs also depend on, in their last digits and in argparse's words."""
    import numpy as np

    return {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "numpy": np.__version__}


def kept_versions() -> dict[str, str]:
    found: dict[str, str] = json.loads(_text(KEPT / "versions.json"))
    return found


def kept_file(kind: str, name: str) -> Path:
    return KEPT / kind / f"{name.replace(' ', '_')}.json"


def check(name: str) -> list[str]:
    """What is otherwise in a group than what is kept.

    Raises:
        Missing: an input is not there.
    """
    found = make(name)
    told = []
    for kind in KINDS:
        path = kept_file(kind, name)
        was = json.loads(_text(path)) if path.exists() else {}
        now = {key: kept_form(kind, value) for key, value in found[kind].items()}
        told += [f"{kind}: {name}: {one}" for one in differences(was, now)]
    return told


def update(name: str) -> None:
    """Keep what a group makes from now on."""
    (KEPT / "versions.json").write_text(json.dumps(versions()) + "\n", encoding="utf-8")
    for kind, outputs in make(name).items():
        path = kept_file(kind, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if outputs:
            kept = {key: kept_form(kind, value) for key, value in sorted(outputs.items())}
            path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def write_all(folder: Path, name: str) -> None:
    """The outputs of a group in full, a file each."""
    for kind, outputs in make(name).items():
        for key, value in outputs.items():
            ending = "json" if kind == "numbers" else "txt"
            path = folder / kind / name.replace(" ", "_") / f"{re.sub(r'[^A-Za-z0-9._=,-]+', '_', key)[:180]}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(value, indent=1, ensure_ascii=False) if kind == "numbers" else value
            path.write_text(text + "\n", encoding="utf-8")


# --- inputs ---


def shared(path: Path) -> Path:
    if not path.exists():
        raise Missing(f"no {path}")
    return path


def unpack_runs() -> None:
    """`before` and `after`: two recorded runs of a Llama of 2 layers on a CPU, 3 timed steps, memory and shapes; in
    `after` the second block's MLP makes a tensor eight times as large."""
    with tarfile.open(RUNS) as runs:
        runs.extractall(filter="data")


def write_table(path: str, rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    columns = {name: None for row in rows for name in row}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    return path


CAUSES = ("none", "rank forward", "rank data", "stage", "imbalance", "layer", "gc", "communication")
MS = 1_000_000


def simulated_rows(cause: str, *, seed: int, ranks: int = 8, stages: int = 1, steps: int = 16) -> Iterator[Row]:
    """Spans of a job with noise as machines have it and a cause planted: all wait for the last in an all-reduce."""
    draw = random.Random(seed)
    begin = 1_750_000_000_000 * MS
    for step in range(steps):
        longest, parts = 0, {}
        for rank in range(ranks):
            stage = rank * stages // ranks
            lengths = {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0}
            lengths = {kind: length * draw.lognormvariate(0, 0.03) for kind, length in lengths.items()}
            blocks = [lengths["forward"] / 4 * draw.lognormvariate(0, 0.03) for _ in range(4)]
            if (cause == "rank forward" and rank == 3) or (cause == "stage" and stage == stages - 1):
                blocks = [block + 8 for block in blocks]
            elif cause == "layer" and rank == 1:
                blocks[2] += 30
            elif cause == "imbalance":
                factor = 1 + draw.expovariate(1.0)
                blocks, lengths["backward"] = [block * factor for block in blocks], lengths["backward"] * factor
            elif cause == "rank data" and rank == 5:
                lengths["data"] += 30
            lengths["gc"] = 30.0 if cause == "gc" and (step + rank) % 4 == 0 else 0.0
            lengths["forward"] = sum(blocks)
            parts[rank] = lengths, blocks, stage
            longest = max(longest, round(MS * (sum(lengths.values()) - lengths["optimizer"])))
        transfer = round(MS * 3 * draw.lognormvariate(0, 0.05) * (6 if cause == "communication" and step > 8 else 1))
        for rank, (lengths, blocks, stage) in parts.items():
            about = {"rank": rank, "step": step, "stage": stage, "dp": rank % (ranks // stages)}

            def row(name: str, kind: str, start: int, length: int, about: Row = about, **more: Any) -> Row:
                more = {"layer": "", "depth": 0, "group": "", "sequence": "", "bytes": "", **more}
                return {**about, "name": name, "kind": kind, "start_ns": start, "duration_ns": length, **more}

            now = begin
            for kind in ("data", "forward", "backward", "gc"):
                length = round(MS * lengths[kind])
                if not length:
                    continue
                yield row(kind, kind, now, length)
                at = now
                for block, took in enumerate(blocks if kind == "forward" else ()):
                    layer = f"blocks.{4 * stage + block}"
                    yield row(layer, "forward", at, round(MS * took), layer=layer, depth=1)
                    at += round(MS * took)
                now += length
            together, optimizer = begin + longest + transfer, round(MS * lengths["optimizer"])
            yield row("all_reduce", "communication", now, together - now, group="world", sequence=0, bytes=1 << 24)
            yield row("optimizer", "optimizer", together, optimizer)
            yield row("step", "step", begin, together + optimizer - begin)
        begin += longest + transfer + 8 * MS


def pipeline_rows(job: pipeline_jobs.Job, steps: int, slow: tuple[int, float] | None) -> list[dict[str, Any]]:
    """The span table of a job of `pipeline_jobs`, its places in it; `slow`: a stage, and how many times as long."""
    draw = random.Random(1)

    def length(op: pipeline_jobs.Op) -> float:
        usual = {"forward-compute": 10.0, "backward-compute": 20.0, "optimizer": 4.0}.get(op.name, 1.0)
        return usual * draw.lognormvariate(0, 0.02) * (slow[1] if slow and op.stage == slow[0] else 1)

    names = list(pipeline_jobs.COLUMNS)
    rows = [dict(zip(names, row, strict=True)) for row in pipeline_jobs.span_rows(job, [length] * steps)]
    for row in rows:
        row |= {"stage": row["rank"] % job.stages, "dp": row["rank"] // job.stages}
    return rows


def write_timer_logs(run: str, *, ranks: int = 4, steps: int = 8) -> str:
    """What the timers of a job with one slow rank write, as JSON lines."""
    for rank in range(ranks):
        path = Path(run, "timers", f"timer_rank{rank}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in small_rank_jobs.rank_rows(rank) if row["step"] < steps]
        rows = [{key: None if value == "" else value for key, value in row.items()} for row in rows]
        lines = [{"header": {"schema_version": 1, "rank": rank, "world_size": ranks}}, *rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run


def monitor_steps(steps: int, **about: Any) -> Iterator[dict[str, Any]]:
    """Rows of a monitored run's step log: some slow, memory growing, one profiled, one without a number."""
    draw = random.Random(2)
    for step in range(1, steps + 1):
        ms = 100 * draw.lognormvariate(0, 0.02) * (2.0 if 61 <= step <= 75 else 1.0)
        flops = 2e12
        yield {
            "iteration": step,
            "timestamp": f"2024-01-29T10:{30 + step // 60:02}:{step % 60:02}.000",
            "TFLOPS_per_GPU": None if step == 7 else flops / ms / 1e9,
            "TFLOPS_total": None if step == 7 else 4 * flops / ms / 1e9,
            "samples_per_sec": 8 / ms * 1e3,
            "tokens_per_sec": 8192 / ms * 1e3,
            "step_time_ms": ms,
            "memory_GB": 10 + step * 0.05,
            "peak_memory_GB": 14 + step * 0.05,
            "mfu": 0.4 * 100 / ms,
            "hfu": None,
            "tokens": 8192,
            "samples": 8,
            "model_flops": 4 * flops,
            "hardware_flops": None,
            "flops_source": "formula",
            "flops_step": None,
            "convention": "full",
            "breakdown_ms": {"data": 3.0, "forward": ms * 0.3, "backward": ms * 0.6, "optimizer": 4.0},
            "profiled": step == 20,
            "epoch": 0,
            "loss": 3 / step,
            "grad_norm": 1.0 + 0.01 * step,
            "learning_rate": 1e-4,
            **about,
        }


def write_monitor_log(folder: str, steps: int, **about: Any) -> None:
    """A step log of a run that was killed: there is no summary of it."""
    Path(folder).mkdir()
    session = {
        "schema_version": 1, "start_time": "20240129_103000", "started": 1706524200.0, "log_interval": 10, "rank": 0,
        "world_size": 4, "device_name": "NVIDIA H100 80GB HBM3", "peak_flops_per_s": 989e12, "peak_source": "a table",
        "convention": "full", "memory_kind": "of the device", "versions": {}, "host": "host", "pid": 1,
        "units": {"GB": "2^30 bytes", "TFLOPS": "10^12 model FLOPs per second"},
    }  # fmt: skip
    lines = [{"session": session}, *monitor_steps(steps, **about)]
    path = Path(folder, "perf_steps_20240129_103000.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


# --- the groups ---


def _signature(value: Any) -> str:
    """Parameters and defaults; annotations are left out, for they name types that are nobody's business."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "no signature"
    kept = []
    for one in found.parameters.values():
        if not one.name.startswith("_"):
            name = {one.VAR_POSITIONAL: "_args", one.VAR_KEYWORD: "_kwargs"}.get(one.kind, one.name)
            kept.append(one.replace(name=name, annotation=inspect.Parameter.empty))
    return str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _surface(value: Any) -> Tree:
    """Names and signatures of what a user can call or read."""
    if not inspect.isclass(value):
        return _signature(value) if callable(value) else "value"
    members = {}
    ours = [base for base in value.__mro__ if base.__module__.startswith("profiler_wrapper")]
    for name in sorted({name for base in ours for name in vars(base)}):
        if not name.startswith("_"):
            member = inspect.getattr_static(value, name)
            plain = getattr(member, "__func__", member)
            members[name] = _signature(plain) if callable(plain) else "value"
    known = [base.__name__ for base in value.__mro__ if base.__module__ == "builtins" or base.__name__ in pw.__all__]
    return {"()": _signature(value), "is": known, **members}


@group
def names(out: Outputs) -> None:
    out.numbers("__all__", sorted(pw.__all__))
    for name in pw.__all__:
        out.numbers(name, _surface(getattr(pw, name)))


@group
def adapters(out: Outputs) -> None:
    """Names under which others' programs find us; importing transformers and Lightning takes seconds."""
    for module, known in ADAPTERS.items():
        for name in known:
            found = getattr(importlib.import_module(f"profiler_wrapper.{module}"), name)
            out.numbers(f"{module}.{name}", _surface(found))


ADAPTERS = {
    "compat": (
        "SimpleMemoryProfiler", "calculate_mfu_with_profiler", "FLOPSMeasurementCallback", "initialize_perf_monitor",
        "get_perf_monitor", "perf_monitor_start_iteration", "perf_monitor_end_iteration", "perf_monitor_end_training",
        "add_perf_monitor_to_model_provider", "wrap_forward_step_with_perf_monitor",
    ),
    "integrations.transformers": ("ProfilerCallback", "MonitorCallback"),
    "integrations.lightning": ("ProfilerCallback", "MonitorCallback", "LayerProfiler"),
}  # fmt: skip
COMMANDS = ("demo", "analyze", "report", "compare", "guard", "ranks", "snapshot", "monitor", "peaks")
WRONG_USES = (
    "", "nothing", "analyze", "analyze no_such.json", "analyze x.json --top 0", "analyze x.json --select time",
    "analyze x.json --format yaml", "analyze x.json -o x.png", "analyze x.json --peaks nonsense", "report no_such.json",
    "report x.json -o x.csv", "compare a.json", "compare a.json b.json --top 0", "compare no_a.json no_b.json",
    "guard a.json", "guard --update base.json run -o x.json", "guard --update folder/ run", "ranks",
    "ranks run --spans x.csv", "ranks run --lanes 3", "ranks run --ranks x", "ranks run --columns nonsense",
    "ranks --spans no_such.csv", "ranks no_such", "snapshot no_such.pickle", "snapshot x.pickle -o x.csv",
    "monitor no_such", "monitor no_such -o x.csv", "peaks --seconds 3", "peaks --all --device cpu",
    "peaks --all --measure", "--version",
)  # fmt: skip


@group
def help_(out: Outputs) -> None:
    out.command("--help")
    for name in COMMANDS:
        out.command(name, "--help")
    out.command("analyze", "--schema")


@group
def wrong_use(out: Outputs) -> None:
    for line in WRONG_USES:
        out.command(*line.split(), name=f"profiler-wrapper {line}".strip())


@group
def broken_files(out: Outputs) -> None:
    op = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1}'
    texts = {
        "empty.json": "",
        "no_events.json": '{"traceEvents": []}',
        "no_trace.json": '{"a": 1}',
        "no_json.json": "hello",
        "torn.json": f'{{"traceEvents": [{op},\n{{"ph": "X", "ca',
        "one_op.json": f'{{"traceEvents": [{op}]}}',
        "list.json": f"[{op}]",
        "no_spans.csv": "a,b\n1,2\n",
        "no_pickle.pickle": "hello",
    }
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
        if name.endswith(".json"):
            out.command("analyze", name)
            out.command("analyze", name, "--format", "json")
    Path("half.json.gz").write_bytes(gzip.compress(texts["one_op.json"].encode())[:-20])
    out.command("analyze", "half.json.gz")
    out.command("ranks", "--spans", "no_spans.csv")
    out.command("snapshot", "no_pickle.pickle")
    Path("empty").mkdir()
    for command in ("analyze", "report", "ranks", "monitor"):
        out.command(command, "empty")
    out.command("analyze", "one_op.json", "-o", "list.json")  # is there already


def _of_result(out: Outputs, result: Any, name: str = "") -> None:
    """All that a ProfileResult gives."""
    name = f"{name} " if name else ""
    out.numbers(f"{name}to_dict()", result.to_dict())
    out.text(f"{name}print", str(result))
    out.text(f"{name}table()", result.table())
    out.text(f"{name}table(order=cost)", result.table(order="cost", rows=12, width=140))
    out.text(f"{name}table(order=model)", result.table(order="model", rows=40, width=80))
    for path in result.to_csv(f"{name}csv".replace(" ", "_")):
        out.file(path)


def _of_trace(name: str) -> Group:
    def make_trace(out: Outputs) -> None:
        shutil.copy(shared(TRACES / name), "trace.json.gz")
        _of_result(out, pw.load("trace.json.gz"))
        out.command("report", "trace.json.gz", "-o", "page.html")
        out.file("page.html")

    return make_trace


for _trace in (
    "alexnet_forward.pt", "b200_vllm_eager_inference", "ddp_training_with_memory.pt", "h100_bert_small_inference",
    "h100_qwen1.5_0.5b_inference", "h100_timesformer_inference", "h100_vit_inference",
    "mi300_resnet_checkpointing_training", "mi300_sglang_qwen3_8b_decode_graph_replay",
    "mi300_sglang_qwen3_8b_graph_capture", "mi300_torch_compile", "v100_ddp_resnet.pt",
):  # fmt: skip
    _file = f"{_trace.removesuffix('.pt')}.pt.trace.json.gz" if _trace.endswith(".pt") else f"{_trace}.json.gz"
    GROUPS[f"trace {_trace.removesuffix('.pt')}"] = _of_trace(_file)


@group
def analyze(out: Outputs) -> None:
    """The command on one trace of a GPU: each option."""
    shutil.copy(shared(TRACES / "h100_bert_small_inference.json.gz"), "bert.json.gz")
    for line in (
        "bert.json.gz",
        "bert.json.gz --top 3",
        "bert.json.gz --format json",
        "bert.json.gz --format json --top 2",
        "bert.json.gz --format json --select summary,time",
        "bert.json.gz --format json --select layers.layer,layers.self_time_us --top 5",
        "bert.json.gz --format csv",
        "bert.json.gz --format csv --select kernels --top 4",
        "bert.json.gz --format json --select nothing",
        "bert.json.gz --format json --peaks 989 --select layers,summary,peaks",
        "bert.json.gz --format json --peaks bfloat16=500,bandwidth=2000",
        "bert.json.gz -o table.txt",
        "bert.json.gz -o table.txt --rank 0",
        "bert.json.gz -o table.txt --force --top 2",
        "bert.json.gz -o layers.csv",
        "bert.json.gz -o csv/ --format csv",
        "bert.json.gz -o out.json --select time",
    ):
        out.command("analyze", *line.split())
    for path in ("table.txt", "layers.csv", "out.json"):
        out.file(path)
    out.files("csv")


@group
def recorded_run(out: Outputs) -> None:
    """A run on a CPU with its description: all files that are made of it."""
    unpack_runs()
    _of_result(out, pw.load("before"), "before")
    _of_result(out, pw.load("after"), "after")
    out.command("analyze", "before", "-o", "reports/")
    out.files("reports")
    out.command("report", "before")
    out.file("before/report.html")
    out.command("analyze", "before", "--rank", "3")
    peaks_given = ("--peaks", "float32=0.1,bandwidth=20")
    out.command("analyze", "before", *peaks_given, "--format", "json", "--select", "layers,summary,warnings")
    shutil.copy("reports/result.json", "before/result.json")
    out.numbers("result.json read again", pw.load("before").to_dict() == json.loads(_text(Path("reports/result.json"))))
    for layer in ("model.layers.1.mlp", "model.layers.1.mpl"):
        try:
            rows = pw.load("before").layer(layer)
            out.numbers(f"layer({layer})", [[row.layer, row.phase, row.calls, row.self_time_ns] for row in rows])
        except pw.UnknownLayer as error:
            out.text(f"layer({layer})", str(error))


def _read_once() -> None:
    """The results of the runs beside their traces, so that a trace is read once."""
    for run in ("before", "after"):
        Path(run, "result.json").write_text(json.dumps(pw.load(run).to_dict()), encoding="utf-8")


@group
def compare(out: Outputs) -> None:
    unpack_runs()
    out.command("compare", "before", "after", "--format", "json", name="compare traces")
    _read_once()
    for line in ("before after", "after before", "before before", "before after --top 3", "before after --format json"):
        out.command("compare", *line.split())
    out.command("compare", "before", "after", "-o", "both/")
    out.files("both")
    found = pw.compare("before", pw.load("after"), name_a="one", name_b="two")
    out.numbers("pw.compare", found.to_dict())
    out.text("pw.compare print", str(found))


@group
def compare_traces(out: Outputs) -> None:
    """Traces of GPUs: other models, other devices, other bases."""
    pairs = {
        "bert vit": ("h100_bert_small_inference", "h100_vit_inference"),
        "vit timesformer": ("h100_vit_inference", "h100_timesformer_inference"),
        "ddp resnet": ("v100_ddp_resnet.pt.trace", "mi300_resnet_checkpointing_training"),
        "capture replay": ("mi300_sglang_qwen3_8b_graph_capture", "mi300_sglang_qwen3_8b_decode_graph_replay"),
    }
    for name, (a, b) in pairs.items():
        for place, trace in (("a.json.gz", a), ("b.json.gz", b)):
            shutil.copy(shared(TRACES / f"{trace}.json.gz"), place)
        out.command("compare", "a.json.gz", "b.json.gz", "-o", f"{name.replace(' ', '_')}/")
        for ending in ("txt", "json", "csv"):
            out.file(f"{name.replace(' ', '_')}/compare.{ending}")


@group
def guard(out: Outputs) -> None:
    unpack_runs()
    out.command("guard", "before", "after", "--format", "json", name="guard traces")
    _read_once()
    out.command("guard", "before", "before")
    out.command("guard", "before", "after")
    out.command("guard", "after", "before")
    out.command("guard", "before", "after", "--format", "json")
    out.command("guard", "before", "before", "--format", "json")
    out.command("guard", "before", "after", "-o", "guard.txt")
    out.file("guard.txt")
    out.command("guard", "--update", "base.json", "before")
    out.command("guard", "--update", "base.json", "before", name="guard --update (again)")
    out.file("base.json")
    out.command("guard", "--update", "both.json", "before", "after")
    out.file("both.json")
    out.command("guard", "base.json", "after", "before")
    out.command("guard", "both.json", "after", "--format", "json")
    report = pw.guard("before", "after")
    out.numbers("pw.guard", report.to_dict())
    out.text("pw.guard print", str(report))


@group
def guard_traces(out: Outputs) -> None:
    names = ("h100_bert_small_inference", "h100_vit_inference", "v100_ddp_resnet.pt.trace")
    for name, place in zip(names, ("bert.json.gz", "vit.json.gz", "v100.json.gz"), strict=True):
        shutil.copy(shared(TRACES / f"{name}.json.gz"), place)
    out.command("guard", "--update", "base.json", "v100.json.gz")
    out.file("base.json")
    for line in ("base.json v100.json.gz", "base.json vit.json.gz", "vit.json.gz bert.json.gz"):
        out.command("guard", *line.split())
        out.command("guard", *line.split(), "--format", "json")


def _of_job(out: Outputs, *arguments: str, name: str, text: bool = True) -> None:
    """A job's report as JSON, and as text."""
    out.command("ranks", *arguments, "--format", "json", name=f"{name} json")
    if text:
        out.command("ranks", *arguments, name=f"{name} text")


@group
def ranks_small(out: Outputs) -> None:
    """A job of four ranks whose every time is known: all files."""
    small_rank_jobs.write_job(Path("job.csv"))
    _of_job(out, "job.csv", name="job")
    _of_job(out, "job.csv", "--ranks", "0-2", name="three ranks")
    _of_job(out, write_timer_logs("run"), name="timers")
    out.command("ranks", "job.csv", "-o", "page.html")
    out.file("page.html")
    out.numbers("pw.load_ranks", pw.load_ranks("run").to_dict())
    rows = [row for rank in range(4) for row in small_rank_jobs.rank_rows(rank)]
    for row in rows:
        row |= {"t0": row.pop("start_ns") / 1e9, "took": row.pop("duration_ns") / 1e6}
        row |= {"worker": row.pop("rank"), "it": row.pop("step"), "what": row.pop("name")}
    columns = "worker=rank,it=step,what=name,t0=start_s,took=duration_ms"
    _of_job(out, "--spans", write_table("named.csv", rows), "--columns", columns, name="other names")
    ahead = {1: 7 * MS, 2: -900 * MS}
    rows = [row for rank in range(4) for row in small_rank_jobs.rank_rows(rank, ahead_ns=ahead)]
    _of_job(out, "--spans", write_table("clocks.csv", ({**row, "sequence": 0} for row in rows)), name="wrong clocks")


@group
def ranks_files(out: Outputs) -> None:
    """Everything that `ranks -o` writes, pictures too."""
    small_rank_jobs.write_job(Path("job.csv"))
    out.command("ranks", "job.csv", "-o", "all/")
    out.files("all")


@group
def ranks_simulated(out: Outputs) -> None:
    for at, cause in enumerate(CAUSES):
        stages = 2 if cause in ("stage", "none") else 1
        table = write_table(f"{cause.replace(' ', '_')}.csv", simulated_rows(cause, seed=at, stages=stages))
        _of_job(out, "--spans", table, name=cause, text=cause in ("none", "stage", "imbalance", "gc"))


@group
def ranks_pipelines(out: Outputs) -> None:
    Job = pipeline_jobs.Job
    jobs = {
        "1f1b": (Job(stages=4, microbatches=8, replicas=2), None),
        "1f1b last stage slow": (Job(stages=4, microbatches=8, replicas=2), (3, 1.4)),
        "interleaved": (Job(stages=2, chunks=2, microbatches=4, replicas=2), (0, 1.3)),
        "idle transfers": (Job(stages=3, microbatches=6, idle_transfers=True), (1, 1.3)),
    }
    for name, (job, slow) in jobs.items():
        table = write_table(f"{name.replace(' ', '_')}.csv", pipeline_rows(job, 6, slow))
        _of_job(out, "--spans", table, name=name, text=bool(slow))


@group
def ranks_published(out: Outputs) -> None:
    """The published straggler job."""
    shutil.copy(shared(STRAGGLERS), "job.parquet")
    _of_job(out, "--spans", "job.parquet", name="job")
    _of_job(out, "--spans", "job.parquet", "--ranks", "0,2,4", name="three ranks", text=False)
    out.command("ranks", "--spans", "job.parquet", "-o", "page.html")
    out.file("page.html")


@group
def ranks_traces(out: Outputs) -> None:
    """Traces of ranks, reduced by child processes."""
    for rank in range(3):
        folder = Path(f"run/rank{rank}")
        folder.mkdir(parents=True)
        rank_traces.write_trace(folder / "trace.json", rank, 1 + (rank == 2), world_size=3, steps=8)
    _of_job(out, "run", name="run")


@group
def snapshot(out: Outputs) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "leak": {},
        "no_leak": {"leak": False},
        "out_of_memory": {"total_mib": 48},
        "large": {"layers": 12, "steps": 4, "total_mib": 4096},
    }
    for name, options in kinds.items():
        gpu = snapshots.training(**options)
        end = snapshots.snapshot(gpu, max_entries=30, settings="expandable_segments:True")
        snapshots.write(snapshots.snapshot(gpu), Path(f"{name}.pickle"))
        snapshots.write(end, Path(f"{name}_end.pickle"))
        for path in (f"{name}.pickle", f"{name}_end.pickle"):
            out.command("snapshot", path)
            out.command("snapshot", path, "--format", "json")
    two = [snapshots.FakeAllocator(device=device, expandable=bool(device)) for device in range(2)]
    for gpu in two:
        kept = [gpu.malloc(snapshots.MIB * (at + 1), snapshots.MLP_STACK) for at in range(5)]
        gpu.free(kept[1])
        gpu.free(kept[2], complete=False)
    snapshots.write(snapshots.snapshot(*two), Path("two_devices.pickle"))
    out.command("snapshot", "two_devices.pickle")
    out.command("snapshot", "two_devices.pickle", "--format", "json")
    out.command("snapshot", "leak.pickle", "-o", "reports/")
    out.files("reports")


@group
def monitor(out: Outputs) -> None:
    """Logs of monitored trainings: killed runs, whole ones, other people's."""
    unknown = {"TFLOPS_per_GPU": None, "TFLOPS_total": None, "mfu": None}
    for folder, steps, about in (("long", 100, {}), ("short", 3, {}), ("no_flops", 40, unknown)):
        write_monitor_log(folder, steps, **about)
        out.command("monitor", folder, name=f"{folder} first")
        out.command("monitor", folder)
        out.command("monitor", folder, "--format", "json")
        out.files(folder)
    Path("foreign").mkdir()
    example = (TESTS / "data" / "flagscale_example.log").read_text(encoding="utf-8")
    unknown = "2024-01-29 10:30:45  30       -            -          -            -            -          -\n"
    Path("foreign/perf_metrics_20240129_103000.log").write_text(example + unknown, encoding="utf-8")
    out.command("monitor", "foreign")
    out.command("monitor", "foreign", "--format", "json")
    out.command("monitor", "long", "-o", "report/")
    out.files("report")


@group
def peaks(out: Outputs) -> None:
    out.command("peaks", "--all")
    out.command("peaks", "--all", "--format", "json")
    out.command("peaks", "--device", "cpu", "--format", "json")


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "vocab_size": 128256},
    "mixtral": {"num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "mistral": {"num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 1024},
}
USUAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


@group
def model_flops(out: Outputs) -> None:
    for family, own in CONFIGS.items():
        config = {"model_type": family, **({} if "n_embd" in own else USUAL), **own}
        for convention in ("full", "causal"):
            for about in ({"batch_size": 2, "seq_length": 4096}, {"sequence_lengths": [100, 2000, 4096]}):
                found = pw.model_flops(config, convention=convention, **about)  # type: ignore[arg-type]
                numbers = {"parts": dict(found.parts), "backward_parts": dict(found.backward_parts)}
                numbers |= {"forward": found.forward, "backward": found.backward, "total": found.total}
                out.numbers(f"{family} {convention} {about}", {**numbers, "sequences": found.sequences})
    for line, config in {"no family": {"model_type": "nothing"}, "no field": {"model_type": "llama"}}.items():
        try:
            pw.model_flops(config, batch_size=1, seq_length=8)
        except pw.WrongUse as error:
            out.text(line, str(error))


def _types(value: Tree) -> Tree:
    """The keys of JSON whose numbers vary from run to run."""
    if isinstance(value, dict):
        return {key: "dict" if key == "versions" else _types(one) for key, one in value.items()}  # of what is imported
    if isinstance(value, list):
        rows = {json.dumps(_types(one), sort_keys=True) for one in value}
        return [json.loads(row) for row in sorted(rows)]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


@group
def live(out: Outputs) -> None:
    """A training recorded now: what does not vary from run to run."""
    import torch

    from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences

    config = DemoConfig(layers=2, hidden=32, heads=4, key_value_heads=2, intermediate=64, vocabulary=64, tokens=16)
    model = DemoLlama(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    quiet = {"files": ("trace", "full_trace", "result"), "enable_print_summary": False, "background": False}
    timer = pw.Timer("timed", run_name="run", device="cpu")
    options: dict[str, Any] = {"perf_log_interval": 2, "flops_profile_freq": 0, "peaks": 1.0, "log_rank": 0}
    with (
        pw.ProfilerWrapper(model, output_dir="profiled", run_name="run", steps="2-4", **quiet) as prof,
        pw.TrainingMonitor("monitored", model=model, optimizer=optimizer, **options) as monitor,
    ):
        for number in range(6):
            with monitor.step(samples=config.batch, tokens=config.batch * config.tokens) as step:
                timer.step(number)
                with timer("forward"):
                    loss = model(sequences(config, number, torch.device("cpu")))
                timer.start("bwd", kind="backward")
                loss.backward()
                timer.stop()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=1.0)
            prof.step()
    timer.close()
    data = prof.result.to_dict()
    layers = ("layer", "raw_name", "class_name", "kind", "block", "phase", "calls", "flops_per_step", "parent")
    out.numbers("layers", [{key: row.get(key) for key in layers} for row in data["layers"]])
    out.numbers("keys of result.json", sorted(data))
    out.numbers("keys of its run", sorted(data["run"]))
    for key in ("timed_steps", "full_steps", "parameters", "optimizers"):
        out.numbers(f"run {key}", data["run"].get(key))
    files = [path.relative_to(Path.cwd()).as_posix() for path in Path.cwd().rglob("*") if path.is_file()]
    out.numbers("files", sorted(re.sub(r"\d{8}_\d{6}", "TIME", path) for path in files))
    spans = [json.loads(line) for path in sorted(Path("timed").rglob("*.jsonl")) for line in _text(path).splitlines()]
    out.numbers("spans", [{key: row.get(key) for key in ("name", "kind", "step", "depth", "parent")} for row in spans])
    out.numbers("keys of spans", _types(spans))
    for path in sorted(Path("monitored").rglob("perf_s*.json*")):
        rows = (
            [json.loads(line) for line in _text(path).splitlines()]
            if path.suffix == ".jsonl"
            else json.loads(_text(path))
        )
        out.numbers(f"keys of {path.name[:10]}", _types(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "check", "update", "list"))
    parser.add_argument("rest", nargs="*", metavar="DIR, GROUP")
    given = parser.parse_args()
    folder = Path(given.rest.pop(0)).resolve() if given.what == "make" else None
    chosen = given.rest or list(GROUPS)
    if unknown := [name for name in chosen if name not in GROUPS]:
        parser.error(f"no group {unknown[0]!r}; there are: {', '.join(GROUPS)}")
    if given.what == "list":
        print("\n".join(GROUPS))
        return 0
    failed = 0
    if given.what == "check" and versions() != kept_versions():
        print(f"kept with {kept_versions()}, here are {versions()}: last digits and help may differ")
    for name in chosen:
        begin, told = time.perf_counter(), []
        try:
            if folder is not None:
                write_all(folder, name)
            elif given.what == "update":
                update(name)
            else:
                told = check(name)
        except Missing as error:
            print(f"{name}: skipped: {error}", flush=True)
            continue
        except Exception:
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
            failed += 1
            continue
        how = f"{len(told)} differences" if told else "done"
        print(f"{name}: {how}, {time.perf_counter() - begin:.1f} s", flush=True)
        print("".join(f"  {line}\n" for line in told), end="")
        failed += len(told)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
