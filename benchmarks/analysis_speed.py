"""How long an analysis takes and how much memory, against the size of the trace: `load()` beside other tools.

- `load()`, reading and analysis together, against HolisticTraceAnalysis (`TraceAnalysis(trace_dir=...)`, which only
  reads) and TraceLens (`TreePerfAnalyzer.from_file`, then its GPU timeline and its table of ops), on traces of GPUs.
  Each TRACE is repeated until it has the wanted sizes (see big_trace.py); those smaller than one copy are left out.
  Without one: some of those beside this checkout, if there are any.
- `load()` against `prof.key_averages()`: each round profiles the same steps of a Llama anew and exports them.

Each number is of a process of its own: its first call with interpreter start and imports ("fresh"), and the median of
those after it ("warm"); rounds are interleaved. Memory is the highest resident size after the first call, imports
included. A tool that is not installed is left out with a word; HTA 0.5 fails on some traces with
pandas 3, so give it pandas 2.

    python benchmarks/analysis_speed.py [TRACE ...] [--sizes 1,10,100] [--large] [--rounds 3] [--layers 12]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OURS, HTA, TRACELENS, KEY_AVERAGES = "load()", "HTA", "TraceLens", "key_averages()"
MODULES = {HTA: "hta", TRACELENS: "TraceLens"}
WANTED_KEY_AVERAGES = 1 / 12
WANTED_HTA, WANTED_HTA_SMALL, SMALL_MB = 1 / 8, 1.0, 10
TOO_LONG_S = 1800
# Of those beside this checkout: inference and training, NVIDIA and AMD, of 1 to 54 MB.
BY_DEFAULT = ("h100_bert_small_inference.json.gz", "mi300_resnet_checkpointing_training.json.gz")


# --- in a process of its own; imports of tools are part of what is measured -------------------------


def _load(path: str) -> object:
    import profiler_wrapper

    return profiler_wrapper.load(path)


def _hta(path: str) -> object:
    import logging

    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.WARNING)
    return TraceAnalysis(trace_files={0: path}, trace_dir=str(Path(path).parent))


def _tracelens(path: str) -> object:
    import logging

    from TraceLens import TreePerfAnalyzer

    logging.disable(logging.WARNING)
    analyzer = TreePerfAnalyzer.from_file(path)
    return analyzer.get_df_gpu_timeline(), analyzer.get_df_kernel_launchers()


TOOLS: dict[str, Callable[[str], object]] = {OURS: _load, HTA: _hta, TRACELENS: _tracelens}


def measure_tool(tool: str, path: str, started: float, warm: int) -> dict[str, Any]:
    """Seconds since `started` until the first result is there, what the process held then, seconds of `warm` more."""
    found = TOOLS[tool](path)
    seconds = time.time() - started
    cpu = time.process_time()
    peak = peak_kib()
    again = []
    for _ in range(warm):
        found = None
        start = time.perf_counter()
        found = TOOLS[tool](path)
        again.append(time.perf_counter() - start)
    del found
    return {"fresh": seconds, "fresh_cpu": cpu, "peak_kib": peak, "warm": again}


def load_and_key_averages(prof: Any, path: Path) -> tuple[float, float]:
    """Seconds that `load()` of a profile's trace, written to `path`, and its `key_averages()` take."""
    import profiler_wrapper as pw

    prof.export_chrome_trace(str(path))
    start = time.perf_counter()
    pw.load(path)
    middle = time.perf_counter()
    prof.key_averages()
    return middle - start, time.perf_counter() - middle


def measure_key_averages(layers: int, steps: int, rounds: int, folder: str) -> dict[str, Any]:
    """Profiles, and times both on that profile, once to warm up and `rounds` times."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import models
    import profiler_wrapper as pw

    torch.set_num_threads(1)
    case = models.build("llama", layers=layers)
    optimizer = models.optimizer_of(case.model)
    path = Path(folder) / "trace.json"
    times = []
    for _ in range(rounds + 1):
        with (
            pw.mark(case.model),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as prof,
        ):
            for step in range(steps):
                models.train_step(case, case.model, optimizer, seed=step)
                prof.step()
        times.append(load_and_key_averages(prof, path))
    ours, theirs = map(list, zip(*times[1:], strict=True))
    return {"ours": ours, "theirs": theirs, "bytes": path.stat().st_size, "events": events_in(path)}


def peak_kib() -> int | None:
    """The largest size of this process so far; `ru_maxrss` would begin with that of the process that started it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


# --- the process that asks them ---------------------------------------------------------------------


def events_in(path: Path) -> int:
    """How many events a trace has, by its `"ph":` keys."""
    with path.open("rb") as file:
        return sum(piece.count(b'"ph":') for piece in iter(lambda: file.read(1 << 24), b""))


def ask(arguments: Sequence[str]) -> dict[str, Any]:
    """What this script says in a process of its own; `{"failed": why}` where it fails."""
    command = [sys.executable, __file__, "--child", *arguments]
    # Installed packages come as byte code; this checkout's is written by the first process, which counts for nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TOO_LONG_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"took over {TOO_LONG_S} s"}
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1][:100]}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


_warmed_up: set[str] = set()


def of_a_trace(path: Path, rounds: int, warm: int) -> dict[str, dict[str, Any]]:
    """What each tool took for this trace: fresh in a process a round, warm in the last of them."""
    import measuring

    found: dict[str, dict[str, Any]] = {}
    for tool in TOOLS:
        absent = tool in MODULES and measuring.peer(MODULES[tool]) is None
        found[tool] = {"failed": measuring.NOT_INSTALLED} if absent else {"fresh": [], "peak_kib": [], "fresh_cpu": []}
    for number in range(rounds):
        for tool, values in found.items():
            if "failed" in values:
                continue
            if tool not in _warmed_up:
                ask([tool, str(path), str(time.time()), "0"])
                _warmed_up.add(tool)
            said = ask([tool, str(path), str(time.time()), str(warm if number == rounds - 1 else 0)])
            if "failed" in said:
                values["failed"] = said["failed"]
                continue
            for key in ("fresh", "peak_kib", "fresh_cpu"):
                values[key].append(said[key])
            values["warm"] = said["warm"]
    return found


def trace_rows(report: Any, traces: Sequence[Path], sizes: Sequence[float], rounds: int) -> None:
    """A table for each trace: a row for each size."""
    import measuring
    from big_trace import write as repeat

    for trace in traces:
        rows, data = [], []
        with tempfile.TemporaryDirectory() as folder:
            for size in sizes:
                path = Path(folder) / "trace.json"
                copies = repeat(trace, path, size * 1e6)
                megabytes = path.stat().st_size / 1e6
                if copies == 1 and megabytes > 3 * size:
                    continue  # it has no copy that is so small
                few = 1 if size > 300 else rounds
                found = of_a_trace(path, few, warm=few)
                data.append({"bytes": path.stat().st_size, "events": events_in(path), "copies": copies, **found})
                rows += _rows(measuring, data[-1], found)
                _goals(report, trace.name, megabytes, found)
                print(".", end="", flush=True, file=sys.stderr)
        if not rows:
            print(f"\n{trace.name}: one copy is larger than all sizes asked for")
            continue
        growth = _growth(data)
        report.table(
            f"{trace.name}: seconds, and memory",
            rows,
            note="fresh: wall time of processes of their own, median (quartiles); CPU: CPU time of the same; "
            f"warm: median of more calls in one. {growth}",
            data=data,
        )


def _rows(measuring: Any, entry: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """A row a tool, for one size."""
    rows = []
    for tool, values in found.items():
        row = {"MB": measuring.number(entry["bytes"] / 1e6), "events": f"{entry['events']:,}", "tool": tool}
        if "failed" in values:
            rows.append(row | dict.fromkeys(("fresh, s", "CPU, s", "warm, s", "MiB", "load() / it"), "-"))
            rows[-1]["fresh, s"] = values["failed"]
            continue
        peaks = [peak for peak in values["peak_kib"] if peak is not None]
        known = "failed" not in found[OURS]
        rows.append(
            row
            | {
                "fresh, s": measuring.spread(values["fresh"], digits=2),
                "CPU, s": measuring.number(statistics.median(values["fresh_cpu"])),
                "warm, s": measuring.number(statistics.median(values["warm"])) if values["warm"] else "-",
                "MiB": measuring.number(statistics.median(peaks) / 1024) if peaks else "-",
                "load() / it": measuring.ratio(found[OURS]["fresh"], values["fresh"]) if known else "-",
            }
        )
    return rows


def _goals(report: Any, name: str, megabytes: float, found: dict[str, dict[str, Any]]) -> None:
    import measuring

    wanted = WANTED_HTA if megabytes >= SMALL_MB else WANTED_HTA_SMALL
    known = "failed" not in found[HTA] and "failed" not in found[OURS]
    measured = measuring.median_ratio(found[OURS]["fresh"], found[HTA]["fresh"]) if known else None
    report.goal(f"{name} of {megabytes:.0f} MB, fresh: load() / HTA", measured, wanted)


def _growth(data: Sequence[dict[str, Any]]) -> str:
    """What a million events more cost in CPU time, between the smallest and the largest."""
    first, last = data[0], data[-1]
    millions = (last["events"] - first["events"]) / 1e6
    if not millions:
        return ""
    said = []
    for tool in TOOLS:
        if "failed" not in first[tool] and "failed" not in last[tool]:
            one, other = (statistics.median(entry[tool]["fresh_cpu"]) for entry in (first, last))
            said.append(f"{tool} {(other - one) / millions:.1f} s")
    return "A million events more take, in CPU time: " + ", ".join(said) + "." if said else ""


def key_average_rows(report: Any, layers: int, steps: Sequence[int], rounds: int) -> None:
    """A row for each number of steps."""
    import measuring

    rows, data = [], []
    for number in steps:
        with tempfile.TemporaryDirectory() as folder:
            found = ask([KEY_AVERAGES, str(layers), str(number), str(rounds), folder])
        if "failed" in found:
            raise RuntimeError(found["failed"])
        data.append(found)
        rows.append(
            {
                "steps": str(number),
                "MB": measuring.number(found["bytes"] / 1e6),
                "events": f"{found['events']:,}",
                "load(), s": measuring.spread(found["ours"]),
                "key_averages(), s": measuring.spread(found["theirs"]),
                "load() / key_averages()": measuring.ratio(found["ours"], found["theirs"]),
            }
        )
        report.goal(
            f"load() / key_averages(), {found['bytes'] / 1e6:.0f} MB",
            measuring.median_ratio(found["ours"], found["theirs"]),
            WANTED_KEY_AVERAGES,
        )
    report.table(
        f"A profile of a Llama of {layers} layers, made on the spot: load() of its trace beside prof.key_averages()",
        rows,
        note=f"Warm, over {rounds} rounds: median (quartiles); ratios are of the same round.",
        data=data,
    )


def main(options: argparse.Namespace) -> None:
    import measuring
    import shared_traces

    report = measuring.Report("analysis_speed", ("HolisticTraceAnalysis", "TraceLens", "pandas"))
    traces = options.traces or [shared_traces.TRACES / name for name in BY_DEFAULT]
    there = [trace for trace in traces if trace.is_file()]
    for trace in traces:
        if trace not in there:
            print(f"\n{trace.name} is not there: left out")
    sizes = [float(size) for size in options.sizes.split(",")] + ([1000.0] if options.large else [])
    if options.steps:
        key_average_rows(report, options.layers, [int(steps) for steps in options.steps.split(",")], options.rounds)
    trace_rows(report, there, sizes, options.rounds)
    report.end(options.json)


def child(arguments: Sequence[str]) -> None:
    """One measurement: a tool on a trace, or both on a profile made on the spot."""
    tool, *rest = arguments
    said = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = nowhere  # some tools print
        if tool == KEY_AVERAGES:
            import measuring  # noqa: F401  # so that the tests' models are found

            found = measure_key_averages(int(rest[0]), int(rest[1]), int(rest[2]), rest[3])
        else:
            found = measure_tool(tool, rest[0], float(rest[1]), int(rest[2]))
        sys.stdout = said
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("traces", metavar="TRACE", type=Path, nargs="*")
        parser.add_argument("--sizes", default="1,10,100", help="MB of JSON")
        parser.add_argument("--large", action="store_true", help="1,000 MB, too: gigabytes of memory, many minutes")
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--layers", type=int, default=12, help="of the Llama that is profiled on the spot")
        parser.add_argument("--steps", default="1,5,10", help="of it; nothing: no profile is made")
        parser.add_argument("--json", type=Path, help="write the numbers here, too")
        main(parser.parse_args())
