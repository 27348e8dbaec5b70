"""Gives the commands what is broken, foreign or meant to harm: traces, runs, results, snapshots, logs, tables of spans.

Each input is a small real file with a few values replaced by hostile ones, or with bytes damaged, and all of them are
made from their numbers and the seed. A command may print its table or one sentence; a traceback, more than 2 GB of
memory, more than 60 seconds or a dead process is a fault. Warnings of numpy and Python are errors meanwhile.

    python benchmarks/fuzz_inputs.py [--inputs 25000] [--seed 0] [--processes 2] [--only 17]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import gzip
import io
import json
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measuring
from profiler_wrapper.__main__ import main as command_line
from profiler_wrapper.commands.common import WRONG_USE
from rank_spans import write_logs
from small_rank_jobs import rank_rows, write_job
from snapshots import snapshot, training, write

MEMORY_BYTES = 2 << 30  # beside what the interpreter and its libraries have
LONGEST_S = 60.0
CHUNK = 250  # inputs that one process is given
FAULTS = ("traceback", "memory", "time out", "died")
HOSTILE: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"),
    "", "x", "\0", "\ud800", "\u202e", "nan", "1e999", "0x10", "9" * 400, "ProfilerStep#99999999999999999999",
    "../" * 40, [], {}, [[]], [None], [1, "a", None], {"": None}, {"a": {"b": []}}, [[0] * 40] * 3,
    [2**62, 2**62], "y" * 5000,
)  # fmt: skip

Run = Callable[[random.Random, Path, Path], list[str]]  # makes an input from the samples; the command's arguments


def main() -> None:
    """Prints how the commands ended, by kind of input; exits with 1 after any fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="the number of one input, whose output is shown")
    parser.add_argument("--samples", help=argparse.SUPPRESS)  # of a child: where the real files are
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.samples is not None:
        _work(Path(options.samples), options.seed, options.begin, options.inputs)
        return
    with tempfile.TemporaryDirectory() as directory:
        samples = Path(directory)
        write_samples(samples)
        if options.only is not None:
            _limit_memory()
            print(*_one(options.only, options.seed, samples, shown=True))
            return
        print(measuring.machine())
        began = time.perf_counter()
        outcomes = _all(samples, options)
    _report(outcomes, time.perf_counter() - began)
    if any(outcome in FAULTS for _, _, outcome, _ in outcomes):
        sys.exit(1)


def _all(samples: Path, options: argparse.Namespace) -> list[tuple[int, str, str, str]]:
    def chunk(begin: int) -> list[tuple[int, str, str, str]]:
        end = min(begin + CHUNK, options.inputs)
        found: list[tuple[int, str, str, str]] = []
        while begin < end:  # where a process dies another one goes on behind the input that killed it
            arguments = ["--samples", str(samples), "--seed", str(options.seed), "--begin", str(begin)]
            child = subprocess.run(
                [sys.executable, __file__, *arguments, "--inputs", str(end)], stdout=subprocess.PIPE, text=True
            )
            found += [tuple(json.loads(line)) for line in child.stdout.splitlines()]
            begin = found[-1][0] + 1 if found else begin
            if begin < end:
                found.append((begin, _kind(begin, options.seed), "died", f"exit status {child.returncode}"))
                begin += 1
        return found

    with ThreadPoolExecutor(options.processes) as pool:
        chunks = pool.map(chunk, range(0, options.inputs, CHUNK))
        return [outcome for outcomes in chunks for outcome in outcomes]


def _report(outcomes: Sequence[tuple[int, str, str, str]], took_s: float) -> None:
    counts = Counter((kind, outcome) for _, kind, outcome, _ in outcomes)
    columns = ("table", "sentence", *FAULTS)
    print(f"{'':12}" + "".join(f"{name:>12}" for name in columns))
    for kind in (*KINDS, ""):
        of_kind = [sum(count for key, count in counts.items() if key == (kind or key[0], name)) for name in columns]
        print(f"{kind or 'all':12}" + "".join(f"{count:12,}" for count in of_kind))
    print(f"{len(outcomes):,} inputs in {took_s:.0f} s")
    faults: dict[str, list[int]] = {}
    for number, kind, outcome, said in outcomes:
        if outcome in FAULTS:
            faults.setdefault(f"{outcome}, {kind}: {said}", []).append(number)
    for said, numbers in sorted(faults.items(), key=lambda fault: -len(fault[1])):
        print(f"{len(numbers):5d}  {said}  (--only {numbers[0]})")


def _work(samples: Path, seed: int, begin: int, end: int) -> None:
    _limit_memory()
    for number in range(begin, end):
        print(json.dumps((number, _kind(number, seed), *_one(number, seed, samples))), flush=True)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, resource.RLIM_INFINITY))


class _TimeOut(BaseException):
    pass


def _time_out(*_: object) -> None:
    raise _TimeOut


def _one(number: int, seed: int, samples: Path, *, shown: bool = False) -> tuple[str, str]:
    """How the command ended, and what it said."""
    chance = random.Random(f"{seed} {number}")
    kind = _kind(number, seed)
    with tempfile.TemporaryDirectory() as directory:
        arguments = KINDS[kind][1](chance, samples, Path(directory))
        if shown:
            print(kind, arguments)
        out, errors = io.StringIO(), io.StringIO()
        signal.signal(signal.SIGALRM, _time_out)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
                warnings.simplefilter("error")
                code = command_line(arguments)
        except _TimeOut:
            return "time out", ""
        except MemoryError:
            return "memory", _place()
        except SystemExit as ended:
            return ("sentence", "") if ended.code == WRONG_USE else ("traceback", f"SystemExit({ended.code!r})")
        except Exception:
            if shown:
                traceback.print_exc()
            return "traceback", _place()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if shown:
            print(out.getvalue(), errors.getvalue())
    out.getvalue().encode()  # must be text that can be printed
    if code in (0, 3):
        return "table", ""
    said = errors.getvalue()
    return ("sentence", "") if said.startswith("error: ") else ("traceback", f"said {said[:100]!r}")


def _place() -> str:
    """The exception, and the last line of ours that it came through."""
    error = sys.exc_info()[1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "profiler_wrapper" in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}: {str(error)[:70]} at {where}"


def _kind(number: int, seed: int) -> str:
    weights = [weight for weight, _ in KINDS.values()]
    return random.Random(f"{seed} {number} kind").choices(list(KINDS), weights)[0]


# --- samples ------------------------------------------------------------------------------------


def write_samples(directory: Path) -> None:
    """A file of each kind, as small as can be: recorded here, but for those of a GPU and of many ranks."""
    import torch

    import profiler_wrapper as pw

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = ("trace", "full_trace", "result")
        with pw.ProfilerWrapper(
            model, steps="1", output_dir=directory, run_name="recorded", files=files, enable_print_summary=False
        ) as prof:
            for _ in range(3):
                step()
                prof.step()
        with pw.TrainingMonitor(directory / "monitor", model=model, batch_size=4, perf_log_interval=1) as monitor:
            for _ in range(4):
                monitor.start_step()
                step()
                monitor.end_step()
    recorded = prof.directory
    assert recorded is not None
    shutil.copytree(recorded, directory / "run")
    shutil.copy(directory / "run" / "profile_full_trace.json", directory / "cpu.json")
    (directory / "gpu.json").write_text(json.dumps(_gpu_trace()))
    (directory / "gpu_run").mkdir()
    _command("analyze", directory / "gpu.json", "-o", directory / "gpu_run" / "result.json")
    _command("guard", directory / "baseline.json", directory / "run", "--update")
    write(snapshot(training(layers=2, steps=2)), directory / "snapshot.pickle")
    rows = [row for rank in range(2) for row in rank_rows(rank, slow_rank=1)]
    write_logs(directory / "timers", rows, ranks=2)
    (directory / "spans.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write_job(directory / "spans.csv", ranks=2, slow_rank=1)
    ceiling = {"per_s": 7e14, "median_per_s": 6e14, "size": "8192 x 8192 x 8192"}
    measured = {"device": "NVIDIA H100 80GB HBM3", "threads": None, "torch": "2.13.0", "date": "2026-01-02T03:04:05"}
    peaks = {"measured_peaks_version": 1, **measured, "flops": {"bfloat16": ceiling}, "copy": ceiling}
    (directory / "peaks.json").write_text(json.dumps(peaks))


def _command(*arguments: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert command_line([str(argument) for argument in arguments]) == 0


def _gpu_trace() -> dict[str, Any]:
    """Two steps of two layers, with one event of every kind that is read."""
    events: list[dict[str, Any]] = []

    def add(name: str, cat: str, ts: float, dur: float, tid: object = 1, pid: object = 100, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        events.append(event)

    def kernel(name: str, ts: float, dur: float, launched: float, number: int, stream: int = 7, **more: Any) -> None:
        add("cudaLaunchKernel", "cuda_runtime", launched, 2, correlation=number, **{"External id": number})
        shape = {"grid": [4, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 1024}
        told = {"device": 0, "stream": stream, "correlation": number, "External id": number, **shape}
        add(name, "kernel", ts, dur, stream, 0, **told, **more)

    for step in range(2):
        begin, number = 1000.0 * step, 20 * step
        add(f"ProfilerStep#{step}", "user_annotation", begin, 900)
        add("layer: . [Net other @Net#0]", "cpu_op", begin + 5, 300)
        add("layer: layers.0 [Block block @Net#0]", "cpu_op", begin + 10, 100)
        add("nn.Module: Block_0", "python_function", begin + 10, 100, **{"Python id": 1, "Python module id": 0})
        add("train.py(12): forward", "python_function", begin + 10, 90, **{"Python id": 2, "Python parent id": 1})
        dims = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
        add("aten::mm", "cpu_op", begin + 20, 50, **dims, **{"Sequence number": number, "Fwd thread id": 0})
        kernel("sgemm_128x64", begin + 60, 80, begin + 30, number + 1)
        add("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", begin + 150, 9, 7, 0, device=0, stream=7, bytes=4096)
        add("c10d::allreduce_", "cpu_op", begin + 200, 30)
        told = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "Group size": 2}
        told |= {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        kernel("ncclDevKernel_AllReduce", begin + 220, 60, begin + 210, number + 2, 20, **told)
        add("MmBackward0", "cpu_op", begin + 400, 100, 2, **{"Sequence number": number, "Fwd thread id": 1})
        kernel("sgemm_64x64", begin + 450, 120, begin + 420, number + 3)
        add("cudaStreamSynchronize", "cuda_runtime", begin + 600, 50, correlation=number + 4)
        add("Stream Synchronize", "cuda_sync", begin + 600, 50, 7, 0, device=0, stream=7, correlation=number + 4)
        add("Optimizer.step#SGD.step", "user_annotation", begin + 700, 100)
        kernel("multi_tensor_apply_kernel", begin + 740, 30, begin + 720, number + 5, **{"graph node id": 3})
        for phase, ts, tid in (("s", begin + 20, 1), ("f", begin + 400, 2)):
            flow = {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "pid": 100, "tid": tid, "ts": ts, "id": number}
            events.append({**flow, "bp": "e"})
        for ts, size in ((begin + 25, 16384), (begin + 410, -16384)):
            args = {"Addr": 4096, "Bytes": size, "Device Type": 1, "Device Id": 0}
            args |= {"Total Allocated": max(size, 0), "Total Reserved": 1 << 21}
            instant = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 1}
            events.append({**instant, "ts": ts, "args": args})
    properties = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 8 << 30, "numSms": 132}]
    told = {"rank": 0, "world_size": 2, "backend": "nccl", "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    return {
        "schemaVersion": 1, "deviceProperties": properties, "distributedInfo": told, "with_flops": 0,
        "baseTimeNanoseconds": 10**18, "traceName": "gpu.json", "traceEvents": events,
    }  # fmt: skip


# --- inputs -------------------------------------------------------------------------------------


def _trace(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    path = _damaged(chance, samples / chance.choice(["cpu.json", "gpu.json"]), directory)
    return _of_result(chance, samples, path)


def _run_json(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    for name in ("profile_trace.json", "profile_full_trace.json"):
        shutil.copy(samples / "run" / name, directory)
    _damaged(chance, samples / "run" / "run.json", directory, may_be_zipped=False)
    return _of_result(chance, samples, directory)


def _result(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    _damaged(chance, samples / chance.choice(["run", "gpu_run"]) / "result.json", directory, may_be_zipped=False)
    return _of_result(chance, samples, directory)


def _of_result(chance: random.Random, samples: Path, path: Path) -> list[str]:
    other = str(samples / chance.choice(["run", "gpu_run"]))
    page = str(path.parent / "page.html")
    return chance.choices(
        [
            ["analyze", str(path)],
            ["analyze", str(path), "--format", "json"],
            ["analyze", str(path), "-o", str(path.parent / "table.txt")],
            ["compare", str(path), other],
            ["compare", other, str(path), "--format", "json"],
            ["guard", other, str(path)],
            ["ranks", str(path)],
            ["report", str(path), "-o", page],
        ],
        weights=[8, 4, 4, 3, 2, 2, 1, 1],
    )[0]


def _snapshot(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    path = directory / "snapshot.pickle"
    data = (samples / "snapshot.pickle").read_bytes()
    if chance.random() < 0.6:
        found = pickle.loads(data)
        _mutate(chance, found)
        data = pickle.dumps(found, protocol=chance.choice([2, 4, 5]))
    if chance.random() < 0.5:
        data = _bytes_changed(chance, data)
    path.write_bytes(data)
    return ["snapshot", str(path), "--format", chance.choice(["text", "json"])]


def _monitor(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    return ["monitor", str(_one_of(chance, samples / "monitor", directory)), *chance.choice([[], ["--format", "json"]])]


def _ranks(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    return ["ranks", str(_one_of(chance, samples / "timers", directory)), *chance.choice([[], ["--format", "json"]])]


def _spans(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    if chance.random() < 0.5:
        return ["ranks", "--spans", str(_damaged(chance, samples / "spans.jsonl", directory, may_be_zipped=False))]
    rows = [list(row) for row in csv.reader((samples / "spans.csv").open(encoding="utf-8", newline=""))]
    for _ in range(chance.randint(1, 4)):
        row = chance.choice(rows)
        row[chance.randrange(len(row))] = str(chance.choice(HOSTILE)).replace("\ud800", "?")
    path = directory / "spans.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    if chance.random() < 0.3:
        path.write_bytes(_bytes_changed(chance, path.read_bytes()))
    return ["ranks", "--spans", str(path)]


def _baseline(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    path = _damaged(chance, samples / "baseline.json", directory, may_be_zipped=False)
    return ["guard", str(path), str(samples / "run")]


def _peaks(chance: random.Random, samples: Path, directory: Path) -> list[str]:
    path = _damaged(chance, samples / "peaks.json", directory, may_be_zipped=False)
    return ["analyze", str(samples / "gpu.json"), "--peaks", str(path)]


KINDS: dict[str, tuple[int, Run]] = {  # and how often each is drawn: jobs of many ranks take the longest
    "trace": (7, _trace),
    "run.json": (5, _run_json),
    "result": (4, _result),
    "snapshot": (5, _snapshot),
    "monitor": (2, _monitor),
    "timers": (1, _ranks),
    "spans": (1, _spans),
    "baseline": (1, _baseline),
    "peaks": (1, _peaks),
}


def _one_of(chance: random.Random, samples: Path, directory: Path) -> Path:
    """A copy of a directory in which one file is damaged."""
    copied = directory / samples.name
    shutil.copytree(samples, copied)
    chosen = chance.choice(sorted(path for path in copied.rglob("*") if path.is_file()))
    _damaged(chance, chosen, chosen.parent, may_be_zipped=False)
    return copied


def _damaged(chance: random.Random, sample: Path, directory: Path, *, may_be_zipped: bool = True) -> Path:
    """A file of JSON, or of a JSON value on each line, with values replaced or bytes changed."""
    data = sample.read_bytes()
    if chance.random() < 0.8:
        with contextlib.suppress(ValueError):
            lines = sample.suffix == ".jsonl"
            found = [json.loads(line) for line in data.splitlines()] if lines else json.loads(data)
            _mutate(chance, found)
            data = b"\n".join(_json(value) for value in found) if lines and isinstance(found, list) else _json(found)
    if chance.random() < 0.3:
        data = _bytes_changed(chance, data)
    path = directory / sample.name
    if may_be_zipped and chance.random() < 0.2:
        path = path.with_name(f"{path.name}.gz")
        data = gzip.compress(data, 1)
        if chance.random() < 0.3:
            data = _bytes_changed(chance, data)
    path.write_bytes(data)
    return path


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _mutate(chance: random.Random, value: Any) -> None:
    """Changes one to four places, deep ones as often as those near the top."""
    for _ in range(chance.randint(1, 4)):
        places = list(_places(value, chance))
        if not places:
            return
        holder, key = chance.choice(places)
        what = chance.random()
        if what < 0.7:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))  # it may be changed in its turn
        elif what < 0.8:
            del holder[key]
        elif what < 0.9:
            other, its_key = chance.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                holder[key] = json.loads(json.dumps(other[its_key], default=str))
        elif isinstance(holder, dict):
            holder[str(chance.choice(HOSTILE))] = holder[key]
        else:
            holder.extend([holder[key]] * chance.choice([1, 3, 200]))


def _places(value: Any, chance: random.Random) -> Iterator[tuple[Any, Any]]:
    """One way down from the top: at each turn a container and one of its keys."""
    while isinstance(value, (dict, list)) and value:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        yield value, key
        value = value[key]


def _bytes_changed(chance: random.Random, data: bytes) -> bytes:
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(data) + 1)
        what = chance.random()
        if what < 0.3:
            data = data[:place]
        elif what < 0.6:
            data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        elif what < 0.8:
            data = data[:place] + data[place + chance.randint(1, 400) :]
        else:
            begin = chance.randrange(len(data) + 1)
            data = data[:place] + data[begin : begin + chance.randint(1, 400)] + data[place:]
    return data


if __name__ == "__main__":
    main()
