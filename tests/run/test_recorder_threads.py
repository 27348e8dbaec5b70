"""The model at work on another thread than the block's: that thread is recorded, as if the block were there."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.capture.torch_state import profiler_is_on, profiler_is_on_somewhere
from profiling import directory_of, profiler, result_of
from programs import LONGEST_S, warned
from ticks import by_ticks
from unchanged import CPU, nothing_left

BLOCK = "model.layers.1"


def on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def counted(case: Case) -> list[int]:
    """The tokens of query of each call of a block, by a hook of its own."""
    calls: list[int] = []
    case.model.get_submodule(BLOCK).register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    return calls


def calls(result: pw.ProfileResult) -> dict[str, int | None]:
    return {row.phase: row.calls for row in result.rows(BLOCK) if row.calls}


def calls_of(result: pw.ProfileResult, layer: str) -> int | None:
    return next(row.calls for row in result.rows(layer))


def place_events(prof: pw.ProfilerWrapper) -> float:
    """The share that belongs to layers, by a clock that ticks with the events."""
    result = by_ticks(directory_of(prof), directory_of(prof).parent / "ticks")
    return sum(row.self_time_ns for row in result.layers) / result.time.total_ns


class Server:
    """Calls the model for each request, on a thread of its own."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._requests: queue.Queue[int | None] = queue.Queue()
        self._answers: queue.Queue[torch.Tensor] = queue.Queue()
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            with torch.no_grad():
                self._answers.put(self._case.loss(self._case.model, self._case.batch(request)))

    def ask(self, request: int) -> torch.Tensor:
        self._requests.put(request)
        return self._answers.get(timeout=LONGEST_S)

    def end(self) -> None:
        self._requests.put(None)
        self.thread.join()


# --- what runs there -----------------------------------------------------------------------------


def test_training_on_a_thread_is_recorded_and_unchanged(case: Case, tmp_path: Path) -> None:
    plain = models.train(models.build("llama"), steps=8)
    losses: list[float] = []
    with nothing_left(case), profiler(case, tmp_path) as prof:
        on_a_thread(lambda: losses.extend(models.train(case, steps=8)))
    result = result_of(prof)
    assert losses == plain
    assert result.complete
    assert (result.run["full_steps"], result.run["timed_steps"]) == ([0, 1], [2, 3, 4])
    assert calls(result) == {"forward": 3}
    assert place_events(prof) > 0.95
    assert {row.phase for row in result.layers if row.time_ns} >= {"forward", "backward", "optimizer"}
    assert result.memory is not None and result.rows(BLOCK)[0].retained_bytes
    assert any("on another thread than the block's" in warning for warning in result.warnings)


@pytest.mark.full
def test_as_many_layers_operations_and_bytes_as_on_the_block_s_thread(tmp_path: Path) -> None:
    found = []
    for where in (lambda function: function(), on_a_thread):
        case = models.build("llama")
        with profiler(case, tmp_path) as prof:
            where(lambda case=case: models.train(case, steps=5))
        rows = result_of(prof).layers
        found.append([(row.layer, row.phase, row.calls, row.flops_per_step, row.retained_bytes) for row in rows])
    assert found[0] == found[1]


@pytest.mark.full
def test_a_streamer_shows_its_prefill_and_each_token(tmp_path: Path) -> None:
    import transformers

    class Tokenizer:
        def decode(self, tokens: Any, **options: Any) -> str:
            return " ".join(map(str, tokens)) + " "

    def generate(case: Case) -> str:
        stream = transformers.TextIteratorStreamer(Tokenizer())
        ids = torch.arange(3, 12)[None]
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "use_cache": True, "streamer": stream}
        thread = threading.Thread(target=case.model.generate, args=(ids,), kwargs=options)
        thread.start()
        text = "".join(stream)
        thread.join()
        return text

    plain = generate(models.build("llama"))
    case = models.build("llama")
    seen = counted(case)
    with nothing_left(case), profiler(case, tmp_path, steps="all") as prof:
        assert generate(case) == plain
    result = result_of(prof)
    assert seen == [9, 1, 1, 1, 1, 1]
    assert calls(result) == {"prefill": 1, "decode": 5}
    assert place_events(prof) > 0.95


@pytest.mark.full
def test_continuous_batching_shows_its_layers(case: Case, tmp_path: Path) -> None:
    import transformers

    batching = getattr(transformers, "ContinuousBatchingConfig", None)
    if batching is None:
        pytest.skip("this Transformers has another continuous batching")
    generation = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seen = counted(case)
    with nothing_left(case), profiler(case, tmp_path, steps="all") as prof:
        case.model.generate_batch(
            [list(range(3, 30)), list(range(3, 20))],
            generation_config=generation,
            continuous_batching_config=batching(num_blocks=16, max_batch_tokens=64),
        )
    result = result_of(prof)
    assert seen
    assert sum(count or 0 for count in calls(result).values()) >= len(seen) - 2  # the warm-up steps are another trace
    assert place_events(prof) > 0.95


@pytest.mark.full
def test_a_thread_pool_and_steps_by_number(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path, steps="3-4") as prof, ThreadPoolExecutor(1) as pool:
        pool.submit(models.train, case, steps=6).result()
    assert result_of(prof).run["timed_steps"] == [3, 4]
    assert calls(result_of(prof)) == {"forward": 2}


# --- which thread it is --------------------------------------------------------------------------


@pytest.mark.full
def test_a_thread_that_ran_before_the_block(case: Case, tmp_path: Path) -> None:
    server = Server(case)
    server.thread.start()
    with nothing_left(case), profiler(case, tmp_path) as prof:
        for request in range(8):
            server.ask(request)
    server.end()
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]
    assert calls(result_of(prof)) == {"forward": 3}


@pytest.mark.full
def test_each_thread_is_a_result_of_its_own(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path) as prof:
        on_a_thread(lambda: case.loss(case.model, case.batch(0)))
        on_a_thread(lambda: case.loss(case.model, case.batch(1)))
        models.train(case, steps=4)
    assert [result.run["full_steps"] for result in prof.results] == [[0], [1], []]
    assert [result.run["timed_steps"] for result in prof.results] == [[0], [1], [2, 3, 4]]
    assert [calls(result) for result in prof.results] == [{"forward": 1}, {"forward": 1}, {"forward": 3}]
    assert ["on another thread than" in " ".join(result.warnings) for result in prof.results] == [True, True, False]


@pytest.mark.full
def test_the_block_s_thread_calls_first_though_another_one_may(case: Case, tmp_path: Path) -> None:
    server = Server(case)
    with nothing_left(case), profiler(case, tmp_path) as prof:
        server.thread.start()
        models.train(case, steps=6)
    server.end()
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]
    assert not any("thread" in warning for warning in result_of(prof).warnings)


@pytest.mark.full
def test_a_thread_without_the_model_changes_nothing(case: Case, tmp_path: Path) -> None:
    other = torch.nn.Linear(3, 3)
    with profiler(case, tmp_path) as prof:
        torch.ones(3).cumsum(0)
        on_a_thread(lambda: other(torch.ones(3)))
        models.train(case, steps=1)
    assert any(row.op == "aten::cumsum" for row in result_of(prof).operators)


@pytest.mark.full
def test_the_block_s_thread_goes_before_one_that_called_first(case: Case, tmp_path: Path) -> None:
    for asked in (1, 8):  # its plan goes on, or is over
        server = Server(case)
        with nothing_left(case):
            with profiler(case, tmp_path / str(asked)) as prof:
                server.thread.start()
                for request in range(asked):
                    server.ask(request)
                models.train(case, steps=1)
                server.ask(0)
                models.train(case, steps=6)
            server.end()
        assert len(prof.results) == (2 if asked == 8 else 1)
        assert result_of(prof).run["timed_steps"] == [2, 3, 4]
        assert {row.phase for row in result_of(prof).layers if row.time_ns} >= {"forward", "backward", "optimizer"}


@pytest.mark.full
def test_steps_by_number_that_a_thread_made_are_not_missed(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, steps="3-4") as prof:
        on_a_thread(lambda: models.train(case, steps=6))
        torch.ones(3).cumsum(0)
    assert [result.run["timed_steps"] for result in prof.results] == [[3, 4]]
    assert not any("never came" in warning for warning in result_of(prof).warnings)


# --- steps and ends ------------------------------------------------------------------------------


@pytest.mark.full
def test_a_step_said_on_the_block_s_thread_ends_with_the_next_call(case: Case, tmp_path: Path) -> None:
    server = Server(case)
    with profiler(case, tmp_path) as prof:
        server.thread.start()
        for step in range(6):
            server.ask(step)
            server.ask(step)
            prof.step()
        server.end()
    assert result_of(prof).run["timed_steps"] == [3, 4, 5]  # the first call of prof.step() begins the window anew
    assert calls(result_of(prof)) == {"forward": 6}


@pytest.mark.full
def test_a_thread_that_runs_on_ends_the_recording_with_its_next_call(case: Case, tmp_path: Path) -> None:
    server = Server(case)
    prof = profiler(case, tmp_path, steps="all")
    with nothing_left(case):
        with prof:
            server.thread.start()
            for request in range(4):
                server.ask(request)
            said = warned(lambda: prof.__exit__(None, None, None))
        assert len(said) == 1 and "on a thread that runs on" in said[0]
        server.ask(4)
        server.end()
    assert calls(result_of(prof)) == {"forward": 4}


@pytest.mark.full
def test_a_busy_thread_ends_the_recording_before_the_block_is_left(case: Case, tmp_path: Path) -> None:
    ended, began = threading.Event(), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with torch.no_grad():
                case.loss(case.model, case.batch(0))
            began.set()

    thread = threading.Thread(target=serve)
    with nothing_left(case):
        with profiler(case, tmp_path, steps="all") as prof:
            thread.start()
            began.wait()
        assert prof.result is not None
        ended.set()
        thread.join()
    assert place_events(prof) > 0.95


@pytest.mark.full
def test_a_block_that_first_hears_of_a_part_is_not_held_open_for_a_thread(tmp_path: Path) -> None:
    gate, inside = threading.Semaphore(0), threading.Semaphore(0)

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.release()
            assert gate.acquire(timeout=LONGEST_S)
            return x

    model = torch.nn.Sequential(Gate(), torch.nn.Linear(2, 2))
    thread = threading.Thread(target=lambda: [model(torch.ones(1, 2)) for _ in range(3)])
    thread.start()
    inside.acquire()
    prof = pw.ProfilerWrapper(model, output_dir=tmp_path, files=("result",), background=False, steps="all")
    with pytest.warns(pw.ProfilerWrapperWarning, match="on a thread that runs on"), prof:
        gate.release()  # the next call heard is of the part behind it
        inside.acquire()
    gate.release(2)
    thread.join()
    assert calls_of(result_of(prof), "0") == 1
    assert not profiler_is_on_somewhere()


@pytest.mark.full
def test_somebody_else_s_profiler_on_the_block_s_thread_goes_first(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path) as prof:
        server = Server(case)
        server.thread.start()
        with torch.profiler.profile(activities=CPU) as theirs:
            server.ask(0)
            torch.ones(3).cumsum(0)
    server.end()
    assert any(event.key == "aten::cumsum" for event in theirs.key_averages())
    assert prof.result is None
    assert not profiler_is_on()


@pytest.mark.full
def test_a_thread_may_call_what_the_block_s_thread_trains_unheard(case: Case, tmp_path: Path) -> None:
    server = Server(case)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    with nothing_left(case), profiler(case, tmp_path) as prof:
        server.thread.start()
        for step in range(6):
            case.model.forward(**case.batch(step)).loss.backward()
            optimizer.step()
    server.end()
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


def test_nobody_called_the_model(case: Case, tmp_path: Path) -> None:
    server = Server(case)
    said = pytest.warns(pw.ProfilerWrapperWarning, match="nothing was recorded")
    with nothing_left(case), said, profiler(case, tmp_path) as prof:
        server.thread.start()
    server.end()
    assert prof.result is None


@pytest.mark.full
def test_a_process_ends_as_usual_while_the_thread_runs_on(tmp_path: Path) -> None:
    program = """if True:
    import queue, threading, torch, profiler_wrapper as pw
    model, requests, answers = torch.nn.Linear(8, 8), queue.Queue(), queue.Queue()
    def serve():
        while True:
            answers.put(model(requests.get()))
    with pw.ProfilerWrapper(model, steps="all", files=("result",)):
        threading.Thread(target=serve, daemon=True).start()
        for _ in range(4):
            requests.put(torch.ones(2, 8))
            answers.get()
    print("end")
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "end" in done.stdout.splitlines()
