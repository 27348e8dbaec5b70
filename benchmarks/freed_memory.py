"""Does torch write to memory that it has freed, because a session changed while a scope was open?

The end of a scope that began under one session of torch's profiler is written into that session's memory, be it
freed by then. Each case below makes sessions end and begin, scopes of one kind around that. All run in one process,
with an allocator that lets nobody touch a freed block of the profiler's size: one wrong access ends it by SIGSEGV
(or under valgrind, which names them). Then they run in many processes as users have them, whose crashes are counted.
`bare` is torch's profiler switched inside a scope: the check that this finds anything.

    python benchmarks/freed_memory.py [--case NAME] [--processes 200] [--valgrind]
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import io
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring  # noqa: F401

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Blocks of 16 KiB to 1 MiB, of which the profiler keeps its events in (76 KiB in torch 2.13), are never given twice.
ALLOCATOR = """
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#define PAGE 4096ul
#define REGION (1ul << 40)
static char *region;
static uint64_t used;
__attribute__((constructor)) static void reserve(void) {
    region = mmap(0, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
void *_Znwm(size_t size) { /* operator new */
    if (size < 4 * PAGE || size > 256 * PAGE || region == MAP_FAILED) return malloc(size ? size : 1);
    size_t whole = PAGE + (size + PAGE - 1) / PAGE * PAGE;
    char *block = region + __atomic_fetch_add(&used, whole, __ATOMIC_RELAXED);
    if (mprotect(block, whole, PROT_READ | PROT_WRITE)) abort();
    *(size_t *)block = whole;
    return block + PAGE;
}
void _ZdlPv(void *pointer) { /* operator delete */
    char *block = (char *)pointer - PAGE;
    if (region == MAP_FAILED || block < region || block >= region + REGION) { free(pointer); return; }
    size_t whole = *(size_t *)block;
    madvise(block, whole, MADV_DONTNEED);
    mprotect(block, whole, PROT_NONE);
}
void _ZdlPvm(void *pointer, size_t size) { _ZdlPv(pointer); }
"""
CASES: dict[str, Callable[[], object]] = {}
MANY = ",".join(str(step) for step in range(2, 20, 3))  # windows: each begins and ends a session or two


def case(function: Callable[[], object]) -> Callable[[], object]:
    CASES[function.__name__] = function
    return function


def run_cases(names: list[str], times: int) -> None:
    """In this process; what the wrapper prints is kept back."""
    global torch, pw, record_function
    import torch
    from torch.profiler import record_function

    import profiler_wrapper as pw

    faulthandler.enable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in names * times:
            print(name, file=sys.stderr, flush=True)
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                CASES[name]()
        os.chdir("/")


# -- what the cases share -----------------------------------------------------------------------------


def two_layers() -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), 0.01)


def wrapper(model: Any, **options: Any) -> Any:
    return pw.ProfilerWrapper(model, **{"files": ("result",), "steps": MANY, "background": False, **options})


def train(model: Any, optimizer: Any) -> None:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def another_session() -> Iterator[None]:
    """Scopes of the session before that end in this one write where they should not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield
        torch.ones(3) + 1


# -- the cases ----------------------------------------------------------------------------------------


@case
def bare() -> None:
    session = torch.profiler.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])
    session.start()
    with record_function("scope"):
        torch.ones(3) + 1
        session.stop()
        session.start()
    session.stop()


@case
def defaults() -> None:
    for _ in range(4):
        model, optimizer = two_layers()
        with wrapper(model, steps="auto"):
            for _ in range(8):
                train(model, optimizer)


@case
def optimizer_steps() -> None:
    model, optimizer = two_layers()
    with wrapper(model):
        for _ in range(22):
            train(model, optimizer)


@case
def optimizer_with_closure() -> None:
    model, optimizer = two_layers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        return loss

    with wrapper(model):
        for _ in range(22):
            optimizer.step(closure)


@case
def named_blocks() -> None:
    model, _ = two_layers()
    with wrapper(model) as prof, torch.no_grad():
        for _ in range(22):
            prof.record_function("block", lambda: model(torch.ones(4, 8)))


@case
def written_out_in_the_midst() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from profiler_wrapper.run import recorder

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, eos_token_id=None, **sizes)).eval()  # all 20 tokens
    before, recorder.CALLS_WRITTEN_OUT = recorder.CALLS_WRITTEN_OUT, 50
    try:
        with wrapper(model, steps="all") as prof:
            for number in range(12):
                with record_function("mine") if number % 3 == 0 else contextlib.nullcontext():
                    prof.record_function("block", lambda: model.generate(torch.ones(1, 3, dtype=torch.long)))
        with another_session():
            torch.ones(3) + 1
        assert any("recording paused" in warning for warning in prof.result.warnings)
    finally:
        recorder.CALLS_WRITTEN_OUT = before


@case
def prof_step_in_a_scope() -> None:
    model, optimizer = two_layers()
    with wrapper(model) as prof:
        for _ in range(22):
            with record_function("body"), record_function("of the loop"):
                train(model, optimizer)
                prof.step()


@case
def scope_around_the_loop() -> None:
    model, optimizer = two_layers()
    with wrapper(model, steps="all") as prof, record_function("epoch"):
        for _ in range(22):
            train(model, optimizer)
        prof.leave()
        with another_session():
            model(torch.ones(4, 8))


@case
def scope_around_many_windows() -> None:
    model, optimizer = two_layers()
    with wrapper(model, steps=f"0,{MANY}"):
        train(model, optimizer)
        with record_function("epoch"):
            for _ in range(22):
                train(model, optimizer)


@case
def decorated_loop() -> None:
    model, optimizer = two_layers()

    @torch.autograd.profiler.record_function("step")
    def step() -> None:
        train(model, optimizer)

    with wrapper(model):
        for _ in range(22):
            step()


@case
def scope_of_a_generator() -> None:
    model, optimizer = two_layers()

    def batches() -> Iterator[int]:
        with record_function("loader"):
            yield from range(11)

    with wrapper(model):
        for left in (batches(), batches()):
            for _ in left:
                train(model, optimizer)


@case
def exit_in_a_scope() -> None:
    for end in ("exit", "leave", "result"):
        model, optimizer = two_layers()
        prof = wrapper(model, steps="all")
        prof.__enter__()
        train(model, optimizer)
        with record_function("outer"), record_function("inner"):
            train(model, optimizer)
            if end == "leave":
                prof.leave()
            prof.__exit__(None, None, None)
            if end == "result":
                assert prof.result is not None
            with another_session():
                torch.ones(3) + 1


@case
def exit_by_an_exception() -> None:
    model, optimizer = two_layers()
    with contextlib.suppress(MemoryError), record_function("outer"), wrapper(model), record_function("inner"):
        train(model, optimizer)
        raise MemoryError
    with another_session():
        train(model, optimizer)


@case
def entered_again() -> None:
    model, _ = two_layers()
    prof = wrapper(model[0], steps="auto")
    for _ in range(6):
        with record_function("layer"):
            with prof:
                model[0](torch.ones(4, 8))
            torch.ones(3) + 1
    with record_function("end"):
        prof.leave()
        with another_session():
            torch.ones(3) + 1


@case
def growth_bound_in_a_scope() -> None:
    from profiler_wrapper.capture.growth import GrowthBound

    model, optimizer = two_layers()
    original = GrowthBound.exceeded
    GrowthBound.exceeded = lambda bound: "of this case"  # type: ignore[method-assign]
    try:
        with wrapper(model, steps="all"), record_function("epoch"):
            train(model, optimizer)
            with another_session():
                train(model, optimizer)
    finally:
        GrowthBound.exceeded = original  # type: ignore[method-assign]


@case
def another_profiler_in_a_scope() -> None:
    model, optimizer = two_layers()
    with wrapper(model, steps="all"), record_function("epoch"):
        train(model, optimizer)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
        with torch.profiler.profile(schedule=schedule) as other, record_function("theirs"):
            train(model, optimizer)
        del other


class Calls:
    """A Python function inside of an op, as torch.library and autograd have them."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return function(x)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                return gradient

        self.apply = Op.apply


@case
def model_in_an_autograd_function() -> None:
    model, _ = two_layers()
    op = Calls(model)
    with wrapper(model):
        for _ in range(22):
            op.apply(torch.ones(4, 8, requires_grad=True))


@case
def prof_step_in_an_autograd_function() -> None:
    model, _ = two_layers()
    with wrapper(model) as prof:
        op = Calls(lambda x: (model(x), prof.step())[0])
        for _ in range(22):
            op.apply(torch.ones(4, 8, requires_grad=True))


@case
def model_in_a_custom_op() -> None:
    model, _ = two_layers()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x) + 0

    call.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    name = f"freed_memory::call_{id(model)}"
    op = torch.library.custom_op(name, call, mutates_args=())
    with wrapper(model):
        for _ in range(22):
            op(torch.ones(4, 8))


@case
def reentrant_checkpoint_of_the_model() -> None:
    from torch.utils.checkpoint import checkpoint

    for with_optimizer in (False, True):
        model, optimizer = two_layers()
        with wrapper(model):
            for _ in range(22):
                checkpoint(model, torch.ones(4, 8, requires_grad=True), use_reentrant=True).sum().backward()
                if with_optimizer:
                    optimizer.step()


@case
def model_in_a_data_loader() -> None:
    model, _ = two_layers()

    class Encoded(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __getitem__(self, index: int) -> Any:
            with torch.no_grad():
                return model(torch.ones(4, 8))

        def __len__(self) -> int:
            return 22

    with wrapper(model):
        for _ in torch.utils.data.DataLoader(Encoded()):
            pass


@case
def loop_inside_of_a_forward() -> None:
    class Trainer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = two_layers()

        def forward(self) -> None:
            for _ in range(22):
                train(self.model, self.optimizer)
                done()

    for with_prof_step in (False, True):
        trainer = Trainer()
        with wrapper(trainer) as prof:
            done = prof.step if with_prof_step else (lambda: None)
            trainer()
    with pw.mark(trainer):
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
        with torch.profiler.profile(schedule=schedule) as theirs:
            done = theirs.step
            trainer()


@case
def marks_around_the_model() -> None:
    """Marks of somebody else of us are open when the model's call counts a step."""
    model, _ = two_layers()
    outer = torch.nn.Sequential(model)
    with pw.mark(outer), wrapper(model), torch.no_grad():
        for _ in range(22):
            outer(torch.ones(4, 8))


@case
def collector_of_garbage() -> None:
    """A block that the garbage collector leaves, inside the mark of its own collection."""
    import gc

    model, optimizer = two_layers()

    def steps() -> Iterator[None]:
        with wrapper(model, steps="all"):
            while True:
                train(model, optimizer)
                yield

    loop = [steps()]
    next(loop[0])
    loop.append(loop)  # type: ignore[arg-type]
    del loop
    gc.collect()
    with another_session():
        train(model, optimizer)


def on_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@case
def training_on_threads() -> None:
    """On a thread, then on the next, then on the block's; all begin and end windows inside of scopes of the block's."""
    model, optimizer = two_layers()

    def steps(count: int) -> None:
        for _ in range(count):
            with record_function("of the loop"):
                train(model, optimizer)

    with wrapper(model), record_function("block"):
        on_a_thread(lambda: steps(7))
        on_a_thread(lambda: steps(7))
        steps(8)
    with wrapper(model, steps="all") as prof, prof.record_function("named"):
        on_a_thread(lambda: steps(4))
    with another_session():
        train(model, optimizer)


@case
def served_on_a_thread() -> None:
    """A request is in work when the block is left, and when the plan ends."""
    for options in ({"steps": "all"}, {"steps": "auto"}, {}):
        for runs_already in (False, True):
            model, _ = two_layers()
            ended, began = threading.Event(), threading.Semaphore(0)

            def serve(model: Any = model, ended: Any = ended, began: Any = began) -> None:
                while not ended.is_set():
                    with torch.no_grad(), record_function("request"):
                        model(torch.ones(4, 8))
                    began.release()

            thread = threading.Thread(target=serve)
            if runs_already:
                thread.start()
            with wrapper(model, **options):
                if not runs_already:
                    thread.start()
                for _ in range(22):
                    began.acquire()
                    torch.ones(3) + 1
            with another_session():
                model(torch.ones(4, 8))
            ended.set()
            thread.join()


@case
def streamer() -> None:
    """As `TextIteratorStreamer` has it: each request is generated on a thread of its own, the block's reads tokens."""
    model, _ = two_layers()

    def generate(tokens: queue.Queue[Any]) -> None:
        with torch.no_grad():
            for _ in range(9):
                tokens.put(model(torch.ones(4, 8)))
        tokens.put(None)

    for steps in ("all", "auto"):
        with wrapper(model, steps=steps):
            for _ in range(3):
                tokens: queue.Queue[Any] = queue.Queue()
                thread = threading.Thread(target=generate, args=(tokens,))
                thread.start()
                while tokens.get() is not None:
                    torch.ones(3) + 1
                thread.join()


@case
def lightning() -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = two_layers()[0]

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    from lightning.pytorch.profilers import PyTorchProfiler  # its actions are scopes of record_function

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(22, 4, 8)), batch_size=1)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    for profiler in (None, PyTorchProfiler(filename="lightning")):
        module = Module()
        trainer = Trainer(max_epochs=1, accelerator="cpu", profiler=profiler, enable_model_summary=False, **quiet)
        with wrapper(module.model):
            trainer.fit(module, data)


# -- the processes ------------------------------------------------------------------------------------


def allocator(folder: str) -> Path:
    """The debug allocator, compiled.

    Raises:
        SystemExit: there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("no C compiler: install one, or use --valgrind")
    source, library = Path(folder, "allocator.c"), Path(folder, "allocator.so")
    source.write_text(ALLOCATOR, encoding="utf-8")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def in_child(names: list[str], *, times: int = 1, prefix: tuple[str, ...] = (), **environment: str) -> Any:
    """This script again, running those cases."""
    command = [*prefix, sys.executable, __file__, "--run", *names, "--times", str(times)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"signal {code - 128}" if code > 128 else f"exit {code}"


def main(names: list[str], processes: int, valgrind: bool) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        preload = {} if valgrind else {"LD_PRELOAD": str(allocator(folder))}
        prefix = ("valgrind", "--error-limit=no", "--num-callers=20") if valgrind else ()
        if valgrind:
            preload["PYTHONMALLOC"] = "malloc"
        left = [name for name in names if name != "bare"]
        for batch in (["bare"], left):
            done = in_child(batch, times=1 if valgrind else 2, prefix=prefix, **preload)
            accesses = invalid_accesses(done.stderr)
            for name in batch:
                print(f"{name}: {accesses[name]} invalid accesses" if valgrind else f"{name}: {ended(done.returncode)}")
            found = sum(accesses.values()) if valgrind else done.returncode
            wrong += bool(found) is (batch != ["bare"])
            if batch == left and done.returncode:
                print(done.stderr[-3000:])
    ends = Counter(ended(in_child(left, MALLOC_PERTURB_="165").returncode) for _ in range(processes))
    if processes:
        print(f"{processes} processes of {len(left)} cases: {dict(ends)}")
    return int(bool(wrong) or set(ends) - {"exit 0"} != set())


def invalid_accesses(log: str) -> Counter[str]:
    """By case: what valgrind found in the recording of functions."""
    found: Counter[str] = Counter()
    name = "import"
    for part in re.split(r"\n(?=\S*==\d+== Invalid|[a-z_]+\n)", log):
        head = part.split("\n", 1)[0]
        if head in CASES:
            name = head
        elif "Invalid" in head and re.search(r"RecordFunction|profiler|[Kk]ineto", part):
            found[name] += 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    if importlib.util.find_spec("lightning") is None:
        print("lightning is not installed: its case is left out")
        del CASES["lightning"]
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--valgrind", action="store_true")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run_cases(given.run, given.times)
        sys.exit(0)
    sys.exit(main(given.case or list(CASES), given.processes, given.valgrind))
