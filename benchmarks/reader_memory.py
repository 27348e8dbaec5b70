"""Loads large traces: seconds and peak memory, each in a process of its own.

    python benchmarks/reader_memory.py [TRACE ...] [--megabytes 1000]

Each TRACE is repeated until it has that size (see big_trace.py). Without one, a synthetic trace is loaded, plain and
gzipped: it repeats what one layer of a training step leaves behind, written as Kineto writes it.
"""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import measuring  # noqa: F401
from big_trace import write as repeat

HEAD = '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA H100 80GB HBM3"\n    }\n  ],\n  "traceEvents": [\n'
TAIL = '\n  ],\n  "traceName": "synthetic.json",\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": 1751410836000000000\n}\n'
EVENTS = """\
  {
    "ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 4242, "tid": 4242,
    "ts": %(a).3f, "dur": 41.203,
    "args": {
      "External id": %(n)d,"Record function id": 0, "Sequence number": %(n)d, "Fwd thread id": 0, "Ev Idx": %(n)d
    }
  },
  {
    "ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 4242, "tid": 4242,
    "ts": %(b).3f, "dur": 33.910,
    "args": {
      "External id": %(n)d,"Record function id": 0, "Concrete Inputs": ["", "", "", "1", "1"], "Input type": ["float", "float", "float", "Scalar", "Scalar"], "Input Strides": [[1], [768, 1], [1, 768], [], []], "Input Dims": [[2304], [4096, 768], [768, 2304], [], []], "Sequence number": %(n)d, "Fwd thread id": 0, "Ev Idx": %(n)d
    }
  },
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": 4242,
    "ts": %(c).3f, "dur": 5.021,
    "args": {
      "External id": %(n)d, "cbid": 211, "correlation": %(n)d
    }
  },
  {
    "ph": "s", "id": %(n)d, "pid": 4242, "tid": 4242, "ts": %(c).3f,
    "cat": "ac2g", "name": "ac2g"
  },
  {
    "ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas", "pid": 0, "tid": 7,
    "ts": %(d).3f, "dur": 63.487,
    "args": {
      "External id": %(n)d, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": %(n)d, "registers per thread": 168, "shared memory": 132096, "blocks per SM": 1.0, "warps per SM": 12.0, "grid": [18, 32, 1], "block": [384, 1, 1], "est. achieved occupancy %%": 18
    }
  },
  {
    "ph": "f", "id": %(n)d, "pid": 0, "tid": 7, "ts": %(d).3f,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  },
  {
    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 4242, "tid": 4242,
    "ts": %(b).3f,
    "args": {
      "Total Reserved": 8589934592, "Total Allocated": 4294967296, "Bytes": 37748736, "Addr": 140234567890944, "Device Id": 0, "Device Type": 1, "Ev Idx": %(n)d
    }
  }"""


def pieces(size: int) -> Iterator[bytes]:
    """The trace, about `size` bytes of it."""
    written = len(HEAD)
    yield HEAD.encode()
    count, batch = 0, 2000
    while written < size:
        start = ",\n" if count else ""
        numbers = range(count + 1, count + batch + 1)
        times = (
            {"n": n, "a": 50.125 * n, "b": 50.125 * n + 4.5, "c": 50.125 * n + 20, "d": 64.25 * n} for n in numbers
        )
        piece = (start + ",\n".join(EVENTS % values for values in times)).encode()
        count += batch
        written += len(piece)
        yield piece
    yield TAIL.encode()


def measure(path: str) -> None:
    """Loads `path` and prints what it took, as JSON."""
    import profiler_wrapper as pw

    before = _peak_kib()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = pw.load(path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = _peak_kib()
    counts = {"steps": len(result.steps), "complete": result.complete}
    print(
        json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_kib": peak, "before_kib": before, **counts})
    )


def _peak_kib() -> int:
    """The largest size of this process so far; `ru_maxrss` would begin with that of the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measured(path: Path, megabytes: float, source: str) -> str:
    """A line about loading `path`, which holds `megabytes` of JSON."""
    run = subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True, capture_output=True, text=True)
    result = json.loads(run.stdout)
    return (
        f"{source}: {megabytes:.0f} MB of JSON in {result['seconds']:.1f} s ({result['cpu_seconds']:.1f} s of CPU "
        f"time), peak {result['peak_kib'] / 2**10:.0f} MiB (of it {result['before_kib'] / 2**10:.0f} before reading): "
        f"{result['peak_kib'] * 1024 / 1e6 / megabytes:.2f} MB a MB; {result['steps']} steps, "
        f"complete: {result['complete']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", metavar="TRACE", type=Path, nargs="*")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    print(f"Python {platform.python_version()}, msgspec {version('msgspec')}, {platform.machine()} {platform.system()}")
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
        for trace in arguments.traces:
            repeat(trace, plain, arguments.megabytes * 1e6)
            print(measured(plain, plain.stat().st_size / 1e6, trace.name), flush=True)
        if not arguments.traces:
            with plain.open("wb") as file, gzip.open(packed, "wb", compresslevel=1) as compressed:
                for piece in pieces(arguments.megabytes * 10**6):
                    file.write(piece)
                    compressed.write(piece)
            for path in (plain, packed):
                print(measured(path, plain.stat().st_size / 1e6, path.name), flush=True)


if __name__ == "__main__":
    main()
