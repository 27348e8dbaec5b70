"""Traces reduced by the pool and by a Dask cluster on this machine: seconds, and that both say the same.

    python benchmarks/ranks_reduce.py [--traces 64] [--megabytes 20]

The traces are synthetic (see reader_memory.py), with steps; each has a rank of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from measuring import machine
from reader_memory import pieces

STEP = (
    '  {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#%d", "pid": 4242, "tid": 4242, '
    '"ts": %.3f, "dur": %.3f}'
)
STEPS = 4


def write_traces(folder: Path, count: int, megabytes: float) -> None:
    """Synthetic traces, each with a few steps and the rank that wrote it."""
    body = b"".join(pieces(int(megabytes * 1e6)))
    events = body.count(b'"name": "aten::linear"')
    length = 64.25 * events / STEPS
    steps = ",\n".join(STEP % (number, number * length, length) for number in range(STEPS)).encode()
    head, bracket, tail = body.rpartition(b"\n  ],\n")
    for rank in range(count):
        info = f'"distributedInfo": {{"rank": {rank}, "world_size": {count}}}, '.encode()
        data = head + b",\n" + steps + bracket + tail.replace(b'"traceName"', info + b'"traceName"', 1)
        (folder / f"rank{rank}.json").write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=20)
    arguments = parser.parse_args()
    print(machine())
    import distributed
    import pyarrow.parquet

    from profiler_wrapper.ranks.database import available_cores
    from profiler_wrapper.ranks.reduce import Task, reduce_traces

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_traces(folder, arguments.traces, arguments.megabytes)
        size = sum(path.stat().st_size for path in folder.glob("*.json"))
        tables = {}
        for where in ("pool", "cluster"):
            target = folder / where
            tasks = [
                Task(str(trace), str(target / f"{trace.stem}.parquet"), str(target / f"{trace.stem}_2.parquet"))
                for trace in sorted(folder.glob("*.json"))
            ]
            start = time.perf_counter()
            if where == "pool":
                found = reduce_traces(tasks)
            else:
                with distributed.LocalCluster(
                    n_workers=available_cores(), threads_per_worker=1, dashboard_address=":0"
                ) as cluster:
                    found = reduce_traces(tasks, scheduler=cluster.scheduler_address)
            seconds = time.perf_counter() - start
            failures = [one.failure for one in found if one.failure]
            tables[where] = [pyarrow.parquet.read_table(one.spans) for one in found]
            rows = sum(map(len, tables[where]))
            print(
                f"{where:8} {len(found)} traces of {size / len(found) / 1e6:.1f} MB: {seconds:6.1f} s, "
                f"{size / seconds / 1e6:.0f} MB/s, {rows} rows, {len(failures)} failures {failures[:1]}"
            )
        same = all(one.equals(other) for one, other in zip(*tables.values(), strict=True))
        print("the tables are the same" if same else "THE TABLES DIFFER")


if __name__ == "__main__":
    main()
