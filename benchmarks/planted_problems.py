"""Problems planted in small trainings, each looked for as an agent would: the summary, then the commands that it names.

Nobody reads a trace. The script runs `analyze RUN --format json --select summary`, then, as they stand, `ranks` if it
is there, the `next` command of each finding in order, `memory` and `rest`: five commands at most. A problem counts as
found once its kind and its place (a layer, an op, a rank) stand in what was printed. Two need a GPU: they are looked
for in traces recorded by others, which are in ../shared/traces, and are skipped where they are not there.

    python benchmarks/planted_problems.py [--only NAME ...] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.utils.data import DataLoader

import measuring
import models
import profiler_wrapper as pw
import straggler_jobs
from models import Case, Size
from processes import run_in_processes
from profiler_wrapper.__main__ import main as run_main
from straggler_jobs import Plan

MOST_COMMANDS = 5
TRACES = measuring.ROOT.parent / "shared" / "traces"
SMALL = Size(layers=6, hidden=64, tokens=64, batch=4)
_FILES = ("trace", "full_trace", "result")
_STEPS = 9


@dataclass(frozen=True)
class Problem:
    """Something planted, and what has to stand in the answers: its kind and its place.

    Attributes:
        record: makes the recording in a directory; what the commands are about. None where it cannot be made.
        kind, place: texts, both of which have to be printed.
    """

    name: str
    record: Callable[[Path], Path | None]
    kind: str
    place: str


@dataclass(frozen=True)
class Search:
    """How a problem was looked for: the commands, and after how many of them it was found."""

    commands: tuple[str, ...]
    found_after: int | None
    summary_bytes: int
    printed: str


def search(run: Path, problem: Problem) -> Search:
    """Follows the commands from the summary on, until the kind and the place of the problem have been printed."""
    waiting, done, printed = [f"profiler-wrapper analyze {run} --format json --select summary"], [], ""
    length = 0
    while waiting and len(done) < MOST_COMMANDS:
        command = waiting.pop(0)
        done.append(command)
        said = printed_by(command)
        printed += said
        if len(done) == 1:
            length = len(said.encode())
            waiting += _next_commands(json.loads(said)["summary"])
        if is_told(problem, printed):
            return Search(tuple(done), len(done), length, printed)
    return Search(tuple(done), None, length, printed)


def is_told(problem: Problem, printed: str) -> bool:
    """Whether its kind and its place stand there."""
    return problem.kind in printed and problem.place in printed


def _next_commands(summary: dict[str, Any]) -> Iterator[str]:
    """In the order in which SKILL.md says to run them."""
    if "ranks" in summary:
        yield summary["ranks"]
    yield from dict.fromkeys(finding["next"] for finding in summary["findings"])
    yield from (summary[key] for key in ("memory", "rest") if key in summary)


def printed_by(command: str) -> str:
    """What one command prints; here, without starting Python anew."""
    program, *arguments = shlex.split(command)
    assert program == "profiler-wrapper", command
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run_main(arguments)
    assert code == 0, f"{command} ended with {code}"
    return out.getvalue()


# --- the trainings ---------------------------------------------------------------------------------


def recorded(
    directory: Path,
    model: nn.Module,
    step: Callable[[Any], Any],
    batches: Iterable[Any] | None = None,
    *,
    steps: str = "auto",
) -> Path:
    """Some steps of a loop, recorded; the directory of the run."""
    with pw.ProfilerWrapper(
        model, output_dir=directory, run_name="run", steps=steps, files=_FILES, enable_print_summary=False
    ) as prof:
        for batch in range(_STEPS) if batches is None else batches:
            step(batch)
            prof.step()
    return directory / "run"


def training(
    directory: Path, case: Case, *, optimizer: torch.optim.Optimizer | None = None, keep: list[Any] | None = None,
    steps: str = "auto",
) -> Path:  # fmt: skip
    """Of one of the tests' Transformers, with an optimizer that is fused if none is given."""
    optimizer = optimizer or torch.optim.AdamW(case.model.parameters(), lr=1e-3, fused=True)

    def step(seed: int) -> None:
        output = case.model(**case.batch(seed))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if keep is not None:
            keep.append(output.logits)

    return recorded(directory, case.model, step, steps=steps)


def nothing(directory: Path) -> Path:
    return training(directory, models.build("llama", SMALL))


def slow_layer(directory: Path) -> Path:
    case = models.build("llama", SMALL)
    mlp = case.model.get_submodule("model.layers.3.mlp")
    forward = mlp.forward
    # More than what a busy machine takes from another block in a step.
    mlp.forward = lambda x: sum(forward(x) for _ in range(64)) / 64
    return training(directory, case)


def eager_attention(directory: Path) -> Path:
    return training(directory, models.build("llama", Size(layers=3, tokens=256, attention="eager")))


def graph_breaks(directory: Path) -> Path:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.up(x))
            return self.down(x + 1 if x.sum() > 1e9 else x)  # no compiler follows this

    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))})
    for block in model["layers"]:
        block.compile()

    def step(_: int) -> None:
        x = torch.ones(256, 64)
        for block in model["layers"]:
            x = block(x)
        x.sum().backward()

    return recorded(directory, model, step, steps="4-8")


def memory_leak(directory: Path) -> Path:
    kept: list[Any] = []
    return training(directory, models.build("llama", SMALL), keep=kept, steps="1-7")


def slow_optimizer(directory: Path) -> Path:
    case = models.build("llama", SMALL)
    return training(directory, case, optimizer=torch.optim.AdamW(case.model.parameters(), foreach=False))


def slow_data(directory: Path) -> Path:
    case = models.build("llama", SMALL)

    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return _STEPS

        def __getitem__(self, at: int) -> Any:
            time.sleep(0.05)
            return case.batch(at)

    optimizer = torch.optim.AdamW(case.model.parameters(), fused=True)

    def step(batch: Any) -> None:
        case.loss(case.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return recorded(directory, case.model, step, DataLoader(Slow(), batch_size=None))


def needless_checkpointing(directory: Path) -> Path:
    case = models.build("llama", SMALL)
    case.model.train()
    case.model.gradient_checkpointing_enable()
    return training(directory, case)


def large_vocabulary(directory: Path) -> Path:
    return training(directory, models.build("llama", Size(layers=2, vocabulary=20_000, tokens=64, batch=4)))


def float64(directory: Path) -> Path:
    case = models.build("llama", SMALL)
    case.model.double()
    return training(directory, case)


def recompilations(directory: Path) -> Path:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    model = Net()
    model.compile(dynamic=False, backend="aot_eager")
    return recorded(directory, model, lambda at: model(torch.ones(32 + at, 64)).backward(), steps="4-6")


def ranks(cause: str, **about: Any) -> Callable[[Path], Path]:
    """A data-parallel job of two processes; the second is the culprit."""

    def record(directory: Path) -> Path:
        plan = Plan(cause, rank=1, block=1, steps=10, **about)
        run_in_processes(straggler_jobs.record_traces, [plan], str(directory), world_size=2)
        return directory / "job0"

    return record


def trace(name: str) -> Callable[[Path], Path | None]:
    """Recorded on a GPU by others."""
    path = TRACES / name
    return lambda _: path if path.is_file() else None


PROBLEMS = (
    Problem("one slow layer", slow_layer, "odd-block", "model.layers.3"),
    Problem("attention in single ops", eager_attention, "attention-fallback", "self_attn"),
    Problem("graph breaks", graph_breaks, "graph-break", "layers."),
    Problem("a memory leak", memory_leak, "memory-leak", "lm_head"),
    Problem("an optimizer with a loop", slow_optimizer, "slow-optimizer", "AdamW"),
    Problem("slow data loading", slow_data, "dataloader-bound", "DataLoader"),
    Problem("needless checkpointing", needless_checkpointing, "recompute-not-needed", "model.layers.{0..5}"),
    Problem("a large vocabulary", large_vocabulary, "compute head and loss in", "chunks"),
    Problem("a slow rank", ranks("forward"), "Rank 1 is the straggler", "its forward"),
    Problem("uneven data", ranks("imbalance"), "load is uneven", "another rank gets the long input"),
    Problem("garbage collection", ranks("gc"), "Garbage collection holds", "2 ranks"),
    Problem("waiting for the GPU", trace("h100_timesformer_inference.json.gz"), "synchronisation", "aten::to"),
    Problem("no autocast", trace("v100_ddp_resnet.pt.trace.json.gz"), "tensor-cores-unused", "float32"),
    Problem(
        "exposed all-reduce", trace("mi300_resnet_checkpointing_training.json.gz"), "communication-bound", "all_re"
    ),
    Problem("float64 by mistake", float64, "dtypes", '["float64"]'),
    Problem("recompilations", recompilations, "was still compiling in the timed step", "step 6"),
)
CONTROL = Problem("(nothing planted)", nothing, "\0", "\0")


def look_for(problem: Problem, directory: Path) -> Search | None:
    """Records the problem and looks for it; None where it cannot be recorded here."""
    torch.manual_seed(0)
    directory.mkdir(parents=True)
    with contextlib.redirect_stdout(sys.stderr):
        run = problem.record(directory)
    return None if run is None else search(run, problem)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="problems with these words in their name")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the recordings go, and stay")
    options = parser.parse_args()
    print(measuring.machine())
    print(f"\n{'planted':26} {'found after':>12} {'summary':>8}  by")
    with tempfile.TemporaryDirectory() as folder:
        found, looked = 0, 0
        for at, problem in enumerate((*PROBLEMS, CONTROL)):
            if options.only and not any(word in problem.name for word in options.only):
                continue
            searched = look_for(problem, (options.keep or Path(folder)) / str(at))
            if searched is None:
                print(f"{problem.name:26} {'no trace':>12}")
                continue
            after = searched.found_after
            if problem is CONTROL:
                wrong = [one.name for one in PROBLEMS if is_told(one, searched.printed)]
                print(f"{problem.name:26} {', '.join(wrong) or 'nothing found':>20}")
                continue
            looked, found = looked + 1, found + (after is not None)
            words = shlex.split(searched.commands[-1])
            by = " ".join([words[1], *words[words.index("--select") :]] if "--select" in words else words[1:2])
            number = f"{after} of {len(searched.commands)}" if after else "not found"
            print(f"{problem.name:26} {number:>12} {searched.summary_bytes:>6} B  {by if after else ''}", flush=True)
    print(f"\n{found} of {looked} found in at most {MOST_COMMANDS} commands")


if __name__ == "__main__":
    main()
