"""What the end of a recorded window costs the ranks of a job: by a child process beside the training, or at once.

Gloo ranks train a small Llama under DDP, so that each waits for the slowest in every step. Printed per rank: the step
before anything is recorded, the recorded ones, stop and export of the last session, the step in which the window ends,
the steps after it, and the longest of these against a recorded step and the export (of the slowest ranks, for which
all wait); beside it the same steps where nothing is recorded. Ranks that share cores disturb one another: a rank's last
step goes on beside another's export.

    python benchmarks/window_end.py [--ranks 4] [--rounds 3] [--layers 8] [--hidden 128] [--tokens 64] [--after 40]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measuring
from processes import run_in_processes

FIRST, LAST = 12, 14  # recorded; the one before is warm-up


MODES = {
    "a child process": {"background": True},
    "at once": {"background": False},
    "nothing recorded": {"ranks": [10**6]},
}


def train(options: argparse.Namespace, output_dir: str, mode: str) -> dict[str, Any]:
    """One rank: seconds of every step, and of the last stop and export."""
    import torch

    import models
    import profiler_wrapper as pw
    from profiler_wrapper.capture.session import SessionSequence

    warnings.simplefilter("ignore")
    case = models.build("llama", layers=options.layers, hidden=options.hidden, tokens=options.tokens)
    model = torch.nn.parallel.DistributedDataParallel(case.model)
    optimizer = models.optimizer_of(model)
    exports: list[float] = []
    stop = SessionSequence.stop

    def timed_stop(sessions: SessionSequence) -> None:
        begin = time.perf_counter()
        stop(sessions)
        exports.append(time.perf_counter() - begin)

    SessionSequence.stop = timed_stop  # type: ignore[method-assign]
    steps: list[float] = []
    profiler = pw.ProfilerWrapper(model, output_dir=output_dir, run_name="job", steps=f"{FIRST}-{LAST}", **MODES[mode])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        with profiler:
            for step in range(LAST + 1 + options.after):
                begin = time.perf_counter()
                models.train_step(case, model, optimizer, seed=step)
                profiler.step()
                steps.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        result = profiler.result
        waited = time.perf_counter() - begin
    assert result is not None or "ranks" in MODES[mode]
    return {"steps": steps, "export": exports[-1] if exports else 0.0, "waited": waited}


class OwnOfTorch:
    """Seconds in what torch's profiler does at the end of a recording, since `restart()`."""

    def __init__(self) -> None:
        from profiler_wrapper.capture import session

        self.wall_s = self.cpu_s = 0.0
        for owner, name in (
            (session._KinetoProfile, "stop_trace"),
            (session._KinetoProfile, "export_chrome_trace"),
            (session.Session, "close"),  # torch releases its events
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def restart(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.wall_s += time.perf_counter() - wall_s
                self.cpu_s += time.thread_time() - cpu_s

        return timed


def pauses() -> None:
    """One process: the call of `step()` that ends a window, for traces of about 1, 10 and 100 MB."""
    import models
    import profiler_wrapper as pw

    warnings.simplefilter("ignore")
    own = OwnOfTorch()
    for layers, steps in ((2, 1), (8, 3), (8, 27)):
        case = models.build("llama", layers=layers, hidden=64, tokens=16)
        optimizer = models.optimizer_of(case.model)
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
            with (
                contextlib.redirect_stdout(nowhere),
                pw.ProfilerWrapper(case.model, output_dir=folder, steps=f"2-{1 + steps}") as profiler,
            ):
                for step in range(2 + steps):
                    models.train_step(case, case.model, optimizer, seed=step)
                    own.restart()
                    wall_s, cpu_s = time.perf_counter(), time.thread_time()
                    profiler.step()
                    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
                size = max(path.stat().st_size for path in Path(folder).rglob("*_trace.json*"))
                begin = time.perf_counter()
            left_s = time.perf_counter() - begin
        print(
            f"trace of {size / 1e6:.0f} MB: stands still {wall_s:.2f} s, of it ours {wall_s - own.wall_s:.3f} s "
            f"({cpu_s - own.cpu_s:.3f} s of CPU time); leaving at once then takes {left_s:.1f} s"
        )


def main(options: argparse.Namespace) -> None:
    print(measuring.machine())
    pauses()
    print(
        f"{options.ranks} gloo ranks, DDP around a Llama of {options.layers} layers, hidden {options.hidden}, "
        f"2 x {options.tokens} tokens; steps {FIRST}-{LAST} are recorded, {options.after} follow"
    )
    for number in range(options.rounds):
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_in_processes(train, options, folder, mode, world_size=options.ranks)
                size = sum(path.stat().st_size for path in Path(folder).rglob("*_trace.json*")) / 2**20
            print(f"round {number + 1}, {mode}, {size:.0f} MiB of traces")
            expected = max(statistics.median(told["steps"][FIRST:LAST]) for told in ranks)
            expected += max(told["export"] for told in ranks)
            for rank, told in enumerate(ranks):
                show(rank, told, expected)


def show(rank: int, told: dict[str, Any], expected: float) -> None:
    """One line of a rank; `expected` are the seconds of a recorded step and the export."""
    steps = told["steps"]
    before, recorded, end, after = steps[4 : FIRST - 1], steps[FIRST:LAST], steps[LAST], steps[LAST + 1 :]
    print(
        f"  rank {rank}: a step {measuring.spread(before, unit=1e-3, digits=0)} ms, longest {1e3 * max(before):.0f}; "
        f"recorded {1e3 * statistics.median(recorded):.0f}; "
        f"export {1e3 * told['export']:.0f}; ends the window {1e3 * end:.0f}; "
        f"after it {measuring.spread(after, unit=1e-3, digits=0)}, longest {1e3 * max(after):.0f}; "
        f"longest / (recorded step + export) {max(end, *after) / expected:.2f}; "
        f"result after {told['waited']:.1f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--after", type=int, default=40)
    main(parser.parse_args())
