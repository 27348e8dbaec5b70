"""What only a machine with a GPU can tell, in one command: is what is said of it true, and what does it cost there?

    python benchmarks/gpu/run_all.py [--dry] [--output-dir gpu_benchmark] [--minutes 10] [--only planted_time]

Runs on CUDA and ROCm, with this package's own dependencies; other profilers are compared where they are installed
(HolisticTraceAnalysis, TraceLens, deepspeed, torchprof). It writes `gpu_benchmark.json` and `gpu_benchmark.html`, and
ends with 1 where a number is not the truth. `--dry` does what a CPU can do, in small sizes, in less than a minute;
what needs a device is then skipped with a reason. Missed goals of speed are said, and are no failure.

A check is a function that takes the machine and returns rows; to add one, write it and put it into `CHECKS`.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import logging
import math
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other benchmarks, which add the checkout and the tests

import analysis_speed
import measuring
import models
import overhead
import profiler_wrapper as pw
import truth
import truths
from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences

Status = Literal["ok", "off", "goal met", "goal missed", "told", "skipped"]


@dataclass(frozen=True)
class Row:
    """One number. `off`: it is not the truth."""

    what: str
    measured: str
    wanted: str = ""
    status: Status = "told"


@dataclass(frozen=True)
class Machine:
    """Where the checks run, and in which sizes."""

    device: torch.device
    dry: bool
    directory: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def config(self) -> DemoConfig:
        """Of the model that keeps the device busy."""
        if self.on_gpu and not self.dry:
            return DemoConfig(layers=8, hidden=2048, heads=16, key_value_heads=8, intermediate=5632, tokens=1024)
        return DemoConfig(layers=2, hidden=64, heads=4, key_value_heads=2, intermediate=128, batch=2, tokens=32)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


class Skipped(Exception):
    """A check cannot be made here; says why."""


def needs_gpu(machine: Machine, why: str) -> None:
    if not machine.on_gpu:
        raise Skipped(f"needs a CUDA or ROCm device: {why}")


def row(what: str, measured: float, wanted: float, *, share: float = 0.0, more: float = 0.0, unit: str = "") -> Row:
    """A number beside the truth: it may be off by this share of it, and by so much."""
    right = abs(measured - wanted) <= share * abs(wanted) + more
    return Row(what, f"{_text(measured)}{unit}", f"{_text(wanted)}{unit}", "ok" if right else "off")


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else measuring.number(value, 5)


def holds(what: str, found: bool, *, said: str = "") -> Row:
    return Row(what, said or ("yes" if found else "no"), "", "ok" if found else "off")


def goal(what: str, measured: float, at_most: float) -> Row:
    status: Status = "goal met" if measured <= at_most else "goal missed"
    return Row(what, f"{measured:.3f}", f"at most {at_most:.3f}", status)


# --- what is profiled -------------------------------------------------------------------------------


def demo_case(machine: Machine, config: DemoConfig) -> models.Case:
    """The demo's Llama-like model; on a GPU in bfloat16."""
    torch.manual_seed(0)
    model = DemoLlama(config).to(machine.device)

    def loss(model: nn.Module, batch: models.Batch) -> torch.Tensor:
        with torch.autocast(machine.device.type, dtype=torch.bfloat16, enabled=machine.on_gpu):
            found: torch.Tensor = model(**batch)
        return found

    return models.Case(
        "DemoLlama", model, lambda seed: {"tokens": sequences(config, seed, machine.device)}, loss, "layers"
    )


@contextlib.contextmanager
def recorded(model: nn.Module | None, **options: Any) -> Iterator[pw.ProfilerWrapper]:
    """A quiet profile of all steps, in a directory of its own; its trace is there until the end of the block."""
    given: dict[str, Any] = {"steps": "all", "record_shapes": True, "files": ("trace", "result"), **options}
    with tempfile.TemporaryDirectory() as folder:
        yield pw.ProfilerWrapper(model, output_dir=folder, enable_print_summary=False, background=False, **given)


def result_of(prof: pw.ProfilerWrapper) -> pw.ProfileResult:
    if prof.result is None:
        raise RuntimeError("nothing was recorded")
    return prof.result


def trace_of(prof: pw.ProfilerWrapper) -> Path:
    if prof.directory is None:
        raise RuntimeError("there are no files")
    (found,) = [path for path in prof.directory.rglob("*_trace.json") if "_full_" not in path.name]
    return found


def train(machine: Machine, case: models.Case, steps: int, after_step: Callable[[], object] | None = None) -> None:
    optimizer = models.optimizer_of(case.model)
    for number in range(steps):
        case.loss(case.model, case.batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        machine.synchronize()
        if after_step is not None:
            after_step()


def sums(machine: Machine, result: pw.ProfileResult, trace: Path) -> list[Row]:
    """Rows and what has no layer add up to the total, which other code sums from the trace; one that is off is kept."""
    total = truths.device_total_ns(trace) if result.time_basis == "device" else truths.cpu_total_ns(trace)
    layers = sum(one.self_time_ns for one in result.layers)
    if not layers + result.time.unattributed_ns == result.time.total_ns == total:
        machine.directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(trace, machine.directory / "off_trace.json")
    return [
        row("time of the trace, by other code", result.time.total_ns, total, unit=" ns"),
        row("layers + unattributed", layers + result.time.unattributed_ns, total, unit=" ns"),
    ]


# --- the checks -------------------------------------------------------------------------------------


def rows_add_up(machine: Machine) -> list[Row]:
    """A training step: every nanosecond has a row."""
    case = demo_case(machine, machine.config)
    train(machine, case, 2)
    with recorded(case.model) as prof:
        with prof:
            train(machine, case, 3, prof.step)
        result = result_of(prof)
        found = sums(machine, result, trace_of(prof))
    blocks = {(one.layer, one.phase) for one in result.layers if one.kind == "block" and one.time_ns}
    wanted = {(f"layers.{n}", phase) for n in range(machine.config.layers) for phase in ("forward", "backward")}
    found.append(holds("every block has forward and backward", wanted <= blocks))
    found.append(Row("share with a layer", f"{100 * result.time.coverage:.2f} %"))
    if machine.on_gpu:
        found.append(holds("times are the device's", result.time_basis == "device"))
    return found


def planted_time(machine: Machine) -> list[Row]:
    """Time planted in one layer's forward or backward is found there."""
    steps, seconds = 3, 0.005
    hold = truth.spin
    if machine.on_gpu:
        rate = _cycles_per_second()

        def hold(seconds: float) -> None:
            torch.cuda._sleep(int(seconds * rate))

    model = truth.WaitingModel(hold, seconds).to(machine.device)
    x = torch.ones(4, 8, device=machine.device)
    model(x).sum().backward()
    model.waited()
    with recorded(model) as prof:
        with prof:
            for _ in range(steps):
                model(x).sum().backward()
                machine.synchronize()
                prof.step()
        result = result_of(prof)
        wanted = model.waited()
        if machine.on_gpu:
            wanted = _planted_on_device(trace_of(prof), list(wanted), steps)
        else:
            del wanted["layers.4, forward"]  # on a CPU, time between ops is no op's
        found = sums(machine, result, trace_of(prof))
    for what, true in wanted.items():
        layer, phase = what.split(", ")
        said = sum(one.time_ns for one in result.rows(layer) if one.phase == phase) / 1e6
        if machine.on_gpu:
            found.append(row(what, said, true * 1e3, share=0.05, more=0.3, unit=" ms"))
        else:  # a busy machine may hold any layer up
            text = f"{measuring.number(said, 5)} ms of at least {measuring.number(true * 1e3, 5)} ms"
            found.append(holds(what, said > 0.95 * true * 1e3, said=text))
    return found


def _cycles_per_second() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10**8
    for _ in range(2):  # the first one wakes the device up
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))


def _planted_on_device(trace: Path, names: Sequence[str], steps: int) -> dict[str, float]:
    """Seconds of the planted kernels, which run in the order of the program."""
    order = ("layers.1, forward", "layers.3, forward", "layers.4, forward", "layers.3, backward", "layers.2, backward")
    events = json.loads(trace.read_text())["traceEvents"]
    spins = [one for one in events if one.get("cat") == "kernel" and "spin_kernel" in one["name"]]
    spins.sort(key=lambda one: one["ts"])
    if len(spins) != len(order) * steps:
        raise RuntimeError(f"{len(spins)} planted kernels in the trace, not {len(order) * steps}")
    found = dict.fromkeys(names, 0.0)
    for number, one in enumerate(spins):
        found[order[number % len(order)]] += one["dur"] / 1e6
    return found


_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient",
    SDPBackend.MATH: "math",
}


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def attention_backends(machine: Machine) -> list[Row]:
    """Each backend of scaled dot product attention is named, forward and backward."""
    dtype = torch.bfloat16 if machine.on_gpu else torch.float32
    x = torch.randn(2, 8, 256, 64, device=machine.device, dtype=dtype, requires_grad=True)
    model, found = _Attention(), []
    for backend, name in _BACKENDS.items():
        try:
            with sdpa_kernel([backend]):
                model(x).sum().backward()
        except RuntimeError as error:
            found.append(Row(name, f"not on this device: {str(error).splitlines()[0][:80]}", status="skipped"))
            continue
        with recorded(model) as prof:
            with sdpa_kernel([backend]), prof:
                model(x).sum().backward()
                machine.synchronize()
            said = {(one.phase, one.backend) for one in result_of(prof).attention}
        for phase in ("forward", "backward"):
            backends = sorted(one for of_phase, one in said if of_phase == phase)
            found.append(holds(f"{name}, {phase}", backends == [name], said=", ".join(backends) or "none"))
    return found


def memory_kept(machine: Machine) -> list[Row]:
    """What each layer keeps for backward, beside the tensors that autograd saves."""
    model = truth.KeepingModel(64 * 2**20).to(machine.device)
    x = torch.ones(4, 8, device=machine.device, requires_grad=True)
    layers = ["KeepingModel", "layers.0", "layers.1"]

    def run() -> torch.Tensor:
        return model(x).sum()

    run().backward()  # libraries get their workspaces
    said = truth.memory_of_ours(model, run, layers)
    wanted = truth.memory_truth(model, run, layers)
    # A device's allocator gives out multiples of 512 bytes.
    block = 512 * 8 if machine.on_gpu else 0
    return [row(name, float(said[name] or 0), true, more=block, unit=" bytes") for name, true in wanted.items()]


def memory_peak(machine: Machine) -> list[Row]:
    """The highest allocated in each step, beside torch's own counter."""
    needs_gpu(machine, "torch counts no peak of a CPU's memory")
    case = demo_case(machine, machine.config)
    train(machine, case, 2)
    peaks: list[int] = []
    with recorded(case.model) as prof:

        def step() -> None:
            peaks.append(torch.cuda.max_memory_allocated())
            prof.step()
            torch.cuda.reset_peak_memory_stats()

        with prof:
            torch.cuda.reset_peak_memory_stats()
            train(machine, case, 3, step)
        result = result_of(prof)
    said = [one.peak_bytes or 0 for one in result.steps if one.step is not None]
    found = [row(f"step {number}", *both, unit=" bytes") for number, both in enumerate(zip(said, peaks, strict=True))]
    peak = result.memory.get("peak")
    return [*found, row("highest", peak["allocated_bytes"] if peak else 0, max(peaks), unit=" bytes")]


def flops(machine: Machine) -> list[Row]:
    """FLOPs of a step, beside matrix products worked out by hand."""
    config = machine.config
    case = demo_case(machine, config)
    rows, hidden, keys = config.batch * config.tokens, config.hidden, config.key_value_heads * config.head_dim
    weights = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * config.intermediate
    attention = config.layers * 2 * truth.products(config.batch * config.tokens**2, hidden)
    forward = truth.products(rows, config.layers * weights + hidden * config.vocabulary) + attention
    with recorded(case.model) as prof:
        with prof:
            train(machine, case, 2, prof.step)
        said = result_of(prof).flops
    with FlopCounterMode(display=False) as counter:
        case.loss(case.model, case.batch(0))
    again = sum(one.repeated_flops_per_step for one in said)
    return [
        row("forward", sum(one.flops_per_step for one in said if one.phase == "forward"), forward),
        row("step", sum(one.flops_per_step for one in said) - again, 3 * forward),
        Row("what attention's backward computes again", _text(again)),
        Row("forward, torch's FlopCounterMode", _text(counter.get_total_flops()), _text(forward)),
    ]


def cost_of_a_step(machine: Machine) -> list[Row]:
    """A step, launch-bound and compute-bound: under ours, under torch.profiler with the same flags, and others."""
    small = DemoConfig(layers=12, hidden=64, heads=4, key_value_heads=2, intermediate=128, batch=2, tokens=16)
    sizes = {"launch-bound": small, "compute-bound": machine.config}
    rounds, steps, only = 3, 8, None
    if machine.dry:
        sizes = {"launch-bound": replace(small, layers=2)}
        rounds, steps = 1, 2
        both = [f"{who}: memory (our default)" for who in ("torch.profiler", "ours")]
        only = {overhead.UNPROFILED, "LayerTimer", *both}
    found = []
    for size, config in sizes.items():
        loop = overhead.Loop(demo_case(machine, config), machine.device, steps)
        seconds, left_out = overhead.measure(loop, rounds, only)
        base = seconds[overhead.UNPROFILED]
        for way, values in seconds.items():
            if values:
                said = f"{measuring.spread(values, unit=1e-3)} ms, {measuring.ratio(values, base)} x unprofiled"
                found.append(Row(f"{size}: {way}", said))
        found += [Row(f"{size}: {way}", why, status="skipped") for way, why in left_out.items()]
        for flags in overhead.FLAGS:
            ours, theirs = (seconds.get(f"{who}: {flags}") for who in ("ours", "torch.profiler"))
            if ours and theirs:
                what = f"{size}: ours / torch.profiler, {flags}"
                found.append(goal(what, measuring.median_ratio(ours, theirs), overhead.WANTED_SAME_FLAGS))
        if overhead.WINDOW in seconds:
            ratio = measuring.median_ratio(seconds[overhead.WINDOW], base)
            found.append(goal(f"{size}: a timed step / an unprofiled one", ratio, overhead.WANTED_TIMED_STEP[size]))
    return found


def compiled(machine: Machine) -> list[Row]:
    """A compiled model: its layers are found, and the rows add up."""
    case = demo_case(machine, machine.config)
    backend = "aot_eager" if machine.dry else "inductor"
    if backend == "inductor" and machine.on_gpu and measuring.peer("triton") is None:
        raise Skipped("torch.compile needs triton here")
    torch._dynamo.reset()
    compiled_case = replace(case, model=torch.compile(case.model, backend=backend))
    with recorded(compiled_case.model) as prof:
        optimizer = models.optimizer_of(case.model)
        case.loss(compiled_case.model, case.batch(0)).backward()  # compiles
        optimizer.zero_grad()
        with prof:
            train(machine, compiled_case, 3, prof.step)
        result = result_of(prof)
        found = sums(machine, result, trace_of(prof))
    blocks = {(one.layer, one.phase) for one in result.layers if one.kind == "block" and one.time_ns}
    wanted = {(f"layers.{n}", phase) for n in range(machine.config.layers) for phase in ("forward", "backward")}
    named = len(wanted & blocks) if backend == "inductor" else None
    if named is not None:
        found.append(row("blocks with time, forward and backward", named, len(wanted)))
    found.append(Row(f"share with a layer, {backend}", f"{100 * result.time.coverage:.2f} %"))
    torch._dynamo.reset()
    return found


def cuda_graph(machine: Machine) -> list[Row]:
    """Kernels of a replayed CUDA graph are in the total, and are said to be from a graph."""
    needs_gpu(machine, "a CPU has no graphs to capture")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(machine.device)
    x = torch.randn(64, 256, device=machine.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        model(x)

    class Replay(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            graph.replay()
            return x * 1.0

    found = []
    for inside in (False, True):
        replay = Replay()
        with recorded(replay) as prof:
            with prof:
                for _ in range(3):
                    if not inside:
                        graph.replay()
                    if inside:
                        replay(x)
                    machine.synchronize()
                    prof.step()
            result = result_of(prof)
            found += sums(machine, result, trace_of(prof))
        reasons = Counter({one.reason: one.count for one in result.unattributed})
        if inside:
            found.append(
                holds("replayed in a layer: its row says graph", any(one.graph for one in result.rows("Replay")))
            )
        else:
            found.append(
                holds(
                    "replayed outside: unattributed, graph replay", reasons["graph replay"] > 0, said=str(dict(reasons))
                )
            )
    return found


def speed_of_an_analysis(machine: Machine) -> list[Row]:
    """`load()` of a trace made here, beside `key_averages()` and other tools."""
    case = demo_case(machine, replace(machine.config, layers=2 if machine.dry else 16, tokens=32))
    train(machine, case, 1)
    rounds = 1 if machine.dry else 5
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for _ in range(rounds + 1):
            with pw.mark(case.model), profile(profile_memory=True, record_shapes=True) as prof:
                train(machine, case, 1 if machine.dry else 3, prof.step)
            times.append(analysis_speed.load_and_key_averages(prof, path))
        ours, theirs = zip(*times[1:], strict=True)
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        found = [
            Row(f"load(), {size}", f"{measuring.spread(ours)} s"),
            Row("key_averages()", f"{measuring.spread(theirs)} s"),
            goal("load() / key_averages()", measuring.median_ratio(ours, theirs), analysis_speed.WANTED_KEY_AVERAGES),
        ]
        for tool, values in {} if machine.dry else analysis_speed.of_a_trace(path, 3, 2).items():
            if "failed" in values:
                found.append(Row(f"{tool}, a fresh process", values["failed"], status="skipped"))
            else:
                peak = statistics.median(values["peak_kib"]) / 1024
                said = f"{measuring.spread(values['fresh'], digits=2)} s, {peak:.0f} MiB"
                found.append(Row(f"{tool}, a fresh process", said))
    return found


def device_time_of_others(machine: Machine) -> list[Row]:
    """Device time of a trace made here: sum and union, as others say them."""
    needs_gpu(machine, "a CPU's trace has no device time")
    case = demo_case(machine, machine.config)
    train(machine, case, 2)
    with recorded(case.model) as prof:
        with prof:
            train(machine, case, 3, prof.step)
        path = trace_of(prof)
        true = truth.device_truth(path)
        said = {
            truth.WRAPPER: truth.device_of_ours(result_of(prof)),
            truth.HTA: truth.from_peer("hta.trace_analysis", lambda module: truth.device_of_hta(module, path)),
            truth.TRACELENS: truth.from_peer("TraceLens", lambda module: truth.device_of_tracelens(module, path)),
        }
    found = []
    for what, seconds in true.items():
        for tool, claim in said.items():
            value = truth.said_of(claim, what)
            if isinstance(value, float) and tool == truth.WRAPPER:
                found.append(row(f"{what}: {tool}", value * 1e3, seconds * 1e3, more=1e-6))
            elif isinstance(value, float):
                found.append(Row(f"{what}: {tool}", _text(value * 1e3), _text(seconds * 1e3)))
            else:
                found.append(Row(f"{what}: {tool}", value or "has no such number", status="skipped"))
    return found


Check = Callable[[Machine], list[Row]]
CHECKS: list[Check] = [
    rows_add_up,
    planted_time,
    attention_backends,
    memory_kept,
    memory_peak,
    flops,
    compiled,
    cuda_graph,
    device_time_of_others,
    speed_of_an_analysis,
    cost_of_a_step,
]


# --- running them -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    skipped: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        return bool(self.failed) or any(one.status == "off" for one in self.rows)


def run_check(check: Check, machine: Machine, *, out_of_time: bool = False) -> Outcome:
    """Its rows; a check that raises has failed, and the others go on."""
    outcome = Outcome(check.__name__, (check.__doc__ or check.__name__).splitlines()[0])
    if out_of_time:
        return replace(outcome, skipped="no time was left (--minutes)")
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            outcome = replace(outcome, rows=tuple(check(machine)))
    except Skipped as reason:
        outcome = replace(outcome, skipped=str(reason))
    except Exception:
        outcome = replace(outcome, failed=traceback.format_exc(limit=-3))
    if machine.on_gpu:
        torch.cuda.empty_cache()
    return replace(outcome, seconds=round(time.perf_counter() - start, 1))


def page(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """All of it, in one file that loads nothing."""
    parts = [f"<h1>profiler_wrapper on {html.escape(facts['device'])}</h1><pre>{html.escape(facts['machine'])}</pre>"]
    for one in outcomes:
        parts.append(f"<h2>{html.escape(one.title)}</h2><p>{one.name}, {one.seconds:.1f} s</p>")
        if one.skipped:
            parts.append(f"<p>skipped: {html.escape(one.skipped)}</p>")
        if one.failed:
            parts.append(f"<p class=off>failed</p><pre>{html.escape(one.failed)}</pre>")
        if one.rows:
            cells = "".join(
                f"<tr class='{cell.status.split()[0]}'>"
                + "".join(f"<td>{html.escape(text)}</td>" for text in asdict(cell).values())
                for cell in one.rows
            )
            parts.append(f"<table><tr><th>what<th>measured<th>truth, or wanted<th>{cells}</table>")
    style = "body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}.off{background:#fbb}"
    return f"<!doctype html><meta charset=utf-8><title>GPU benchmark</title><style>{style}</style>{''.join(parts)}"


def say(outcome: Outcome) -> None:
    print(f"\n## {outcome.title} ({outcome.name}, {outcome.seconds:.1f} s)\n")
    if outcome.skipped or outcome.failed:
        print(f"skipped: {outcome.skipped}" if outcome.skipped else f"failed: {outcome.failed}")
    for one in outcome.rows:
        wanted = f" (wanted: {one.wanted})" if one.wanted else ""
        print(f"- {one.status:11s} {one.what}: {one.measured}{wanted}", flush=True)


def run(machine: Machine, checks: Sequence[Check], *, minutes: float) -> int:
    """Run the checks and write both files; 1 where a number is off or a check failed."""
    start = time.perf_counter()
    name = torch.cuda.get_device_name() if machine.on_gpu else f"a {machine.device.type}"
    facts = {"device": name, "machine": measuring.machine(), "dry": machine.dry, "argv": sys.argv[1:]}
    print(f"# GPU benchmark\n\n{facts['machine']}", flush=True)
    outcomes = []
    for check in checks:
        outcomes.append(run_check(check, machine, out_of_time=time.perf_counter() - start > 60 * minutes))
        say(outcomes[-1])
    directory = machine.directory
    directory.mkdir(parents=True, exist_ok=True)
    content = {**facts, "checks": [asdict(one) | {"wrong": one.wrong} for one in outcomes]}
    (directory / "gpu_benchmark.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (directory / "gpu_benchmark.html").write_text(page(facts, outcomes), encoding="utf-8")
    wrong = [one.name for one in outcomes if one.wrong]
    print(f"\n{math.ceil(time.perf_counter() - start)} s; wrong: {', '.join(wrong) or 'nothing'}")
    print(f"{directory / 'gpu_benchmark.html'}")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU")
    parser.add_argument("--output-dir", type=Path, default=Path("gpu_benchmark"))
    parser.add_argument("--minutes", type=float, default=10.0, help="after so many no further check begins")
    parser.add_argument("--only", choices=[check.__name__ for check in CHECKS], action="append")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA or ROCm device here; --dry does what a CPU can do")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    machine = Machine(torch.device("cpu" if options.dry else "cuda"), options.dry, options.output_dir)
    checks = [check for check in CHECKS if options.only is None or check.__name__ in options.only]
    return run(machine, checks, minutes=options.minutes)


if __name__ == "__main__":
    sys.exit(main())
