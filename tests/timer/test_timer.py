"""`Timer` on a CPU: which spans there are, what is said of each, and that nothing it is told ends a training."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.timer import log as span_log
from profiler_wrapper.timer import spans as span_recording
from profiler_wrapper.timer import timer as timer_module
from profiler_wrapper.timer.line_file import LineFile
from profiler_wrapper.timer.spans import SpanRecorder, _label
from profiler_wrapper.timer.timer import Timer
from profiler_wrapper.trace.spans import KINDS, RANK_COLUMNS, SPAN_COLUMNS, kind_of_span
from programs import warned
from timed_runs import files_of, header_of, span_rows, text_rows

MS = 1_000_000  # nanoseconds


class Clock:
    """The monotonic clock, which stands still but where the test moves it."""

    def __init__(self) -> None:
        self.now_ns = time.perf_counter_ns()

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * MS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (span_recording, timer_module):
        monkeypatch.setattr(module, "perf_counter_ns", clock)
    return clock


@pytest.fixture
def timer(tmp_path: Path) -> Iterator[Timer]:
    timer = Timer(tmp_path, device="cpu")
    yield timer
    timer.close()


def written(timer: Timer) -> list[dict[str, Any]]:
    """Its spans, each of which must be in the text, too."""
    path = timer.dump()
    assert path is not None
    spans, lines = span_rows(path), text_rows(path)
    assert [span["name"] for span in spans] == [line["name"] for line in lines]
    for span, line in zip(spans, lines, strict=True):
        assert float(line["start"]) == pytest.approx(span["start_ns"] / 1e9, abs=2e-6)
        assert float(line["end"]) == pytest.approx((span["start_ns"] + span["duration_ns"]) / 1e9, abs=2e-6)
        assert float(line["cpu_dur"]) == pytest.approx(span["duration_ns"] / 1e9, abs=2e-6)
        assert line["cuda_dur"] == "nan"
    return spans


def names(spans: list[dict[str, Any]]) -> list[str]:
    return [span["name"] for span in spans]


def places(spans: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(span["name"], span["depth"], span["parent"]) for span in spans]


# --- spans ---


def test_a_span_is_a_line_of_text_and_a_json_line(timer: Timer, clock: Clock, tmp_path: Path) -> None:
    begin_ns = clock.now_ns
    timer.start("forward")
    clock.sleep(10)
    timer.stop("forward")
    (span,) = written(timer)
    assert span["rank"] == 0
    assert span["kind"] == "forward"
    assert (span["step"], span["device_ns"], span["parent"], span["depth"]) == (None, None, None, 0)
    assert span["thread"] == threading.get_native_id()
    assert span["duration_ns"] == 10 * MS
    told = header_of(*files_of(tmp_path))["clock"]
    assert span["start_ns"] == begin_ns + told["start_ns"] - told["monotonic_ns"]
    assert set(span) <= {*SPAN_COLUMNS, *RANK_COLUMNS}
    assert [path.name for path in files_of(tmp_path, "*")] == ["timer_rank0.jsonl", "timer_rank0.log"]


def test_spans_nest_also_within_their_own_name(timer: Timer) -> None:
    with timer("outer"), timer("inner"), timer("inner"):
        pass
    assert places(written(timer)) == [("inner", 2, "inner"), ("inner", 1, "outer"), ("outer", 0, None)]


def test_recursion(timer: Timer) -> None:
    @timer("call")
    def call(depth: int) -> int:
        return depth if depth == 0 else call(depth - 1)

    call(20)
    assert [span["depth"] for span in written(timer)] == list(range(20, -1, -1))


def test_an_outer_span_lasts_as_long_as_all_within_it(timer: Timer, clock: Clock) -> None:
    with timer("outer"):
        for _ in range(3):
            with timer("inner"):
                clock.sleep(2)
    *inner, outer = written(timer)
    assert [span["duration_ns"] for span in inner] == [2 * MS] * 3 and outer["duration_ns"] == 6 * MS
    assert all(
        outer["start_ns"] <= span["start_ns"]
        and span["start_ns"] + span["duration_ns"] <= outer["start_ns"] + outer["duration_ns"]
        for span in inner
    )


def test_interleaved_names_end_when_they_are_stopped(timer: Timer, clock: Clock) -> None:
    timer.start("a")
    timer.start("b")
    timer.stop("a")
    clock.sleep(5)
    timer.stop("b")
    a, b = written(timer)
    assert (a["name"], b["name"], b["parent"]) == ("a", "b", "a")
    assert b["start_ns"] + b["duration_ns"] - a["start_ns"] - a["duration_ns"] == 5 * MS


def test_stop_without_a_name_ends_the_innermost(timer: Timer) -> None:
    timer.start("a")
    timer.start("b")
    timer.stop()
    timer.stop()
    assert names(written(timer)) == ["b", "a"]


def test_what_start_returns_stops_that_very_span(timer: Timer, clock: Clock) -> None:
    first = timer.start("same")
    clock.sleep(5)
    second = timer.start("same")
    timer.stop(first)
    timer.stop(second)
    one, other = written(timer)
    assert other["start_ns"] - one["start_ns"] == 5 * MS
    assert (one["depth"], other["depth"]) == (0, 1)


def test_a_span_over_the_end_of_a_second(timer: Timer, clock: Clock) -> None:
    for _ in range(3):
        with timer("long"):
            clock.sleep(400)
        with timer("short"):
            pass
    spans = written(timer)  # compares the text with the JSON lines
    assert names(spans) == ["long", "short"] * 3


# --- what goes wrong in the program ---


def test_stopping_what_was_not_started_is_one_warning(timer: Timer) -> None:
    def stop() -> None:
        timer.stop("never")
        timer.stop("nor this")
        timer.stop("")
        timer.stop()
        with timer("x"):
            timer.stop("y")

    (message,) = warned(stop)
    assert "'never'" in message
    assert names(written(timer)) == ["x"]


def test_an_exception_passes_and_ends_what_it_passes(timer: Timer) -> None:
    with pytest.raises(KeyError, match="mine"), timer("outer"):
        timer.start("left open")
        with timer("inner"):
            raise KeyError("mine")
    with timer("next"):
        pass
    assert places(written(timer)) == [
        ("inner", 2, "left open"),
        ("left open", 1, "outer"),
        ("outer", 0, None),
        ("next", 0, None),
    ]


def test_a_span_that_an_exception_left_open_is_forgotten_in_the_next_step(timer: Timer) -> None:
    def train() -> None:
        for step in range(4):
            timer.start("forward")
            if step != 1:
                timer.stop("forward")
            timer.step()

    assert len(warned(train)) == 1
    assert [(span["name"], span["step"], span["depth"]) for span in written(timer)] == [
        (name, step, 0) for step in range(4) for name in ("forward", "step") if (name, step) != ("forward", 1)
    ]


def test_spans_that_nobody_stops_do_not_pile_up(timer: Timer) -> None:
    def forget(count: int) -> None:
        for _ in range(count):
            timer.start("forgotten")

    assert warned(lambda: forget(1000)) == []
    assert len(warned(lambda: forget(1))) == 1
    assert warned(lambda: forget(4000)) == []  # it is said once
    stack = timer._recorder.here.stack
    assert stack is not None and len(stack) <= 1001


@pytest.mark.parametrize(
    "name",
    [
        *("", "a b", 'quo"te', "new\nline", "100 %d %s", "日本", "\ud800", "\0", "x" * 5000, "\\", "</script>"),
        *("a, start=1.0", '"step":null,"name":'),
    ],
)
def test_any_name(timer: Timer, name: str) -> None:
    for _ in range(2):
        timer.start(name)
        timer.stop(name)
    path = timer.dump()
    assert path is not None
    assert len(text_rows(path)) == 2
    wanted = name[:512].encode("utf-8", "replace").decode()
    assert names(span_rows(path)) == [wanted, wanted]


@pytest.mark.parametrize("name", [3, None, ("a", 1), ["list"], 2.5])
def test_a_name_that_is_no_text(timer: Timer, name: Any) -> None:
    timer.start(name)
    timer.stop(name)
    assert names(written(timer)) == [str(name)]


def test_what_means_nothing_of_a_span_is_left_out(timer: Timer) -> None:
    def use() -> None:
        with timer("x", kind="weather", microbatch="two", colour="red"):  # type: ignore[call-arg, typeddict-item]
            pass

    assert len(warned(use)) == 1
    (span,) = written(timer)
    assert span["kind"] == "other"
    assert "microbatch" not in span and "colour" not in span


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": -1}, {"rank": "0"}, {"rank": True}, {"world_size": 0}),
        *({"output_dir": 3}, {"run_name": 3}, {"prefix": ""}),
    ],
)
def test_wrong_arguments_are_said_at_once(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongUse, match=next(iter(wrong))):
        Timer(**{"output_dir": tmp_path, **wrong})


def test_a_failure_of_ours_is_one_warning_and_the_program_goes_on(
    timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []

    def fail(*_: object) -> None:
        failed.append(1)
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(SpanRecorder, "_end", fail)

    def use() -> None:
        for _ in range(3):
            with timer("x"):
                pass
            timer.start("y")
            timer.stop("y")
            timer.step()
            timer.dump()

    (message,) = warned(use)
    assert "the timer is off" in message and "ours" in message
    assert len(failed) == 1  # it is off


# --- blocks and functions ---


def test_functions_keep_what_they_are_and_return(timer: Timer) -> None:
    @timer("load")
    def load(x: int, *, y: int = 2) -> int:
        """Loads."""
        return x + y

    @timer.timed("fails")
    def fails() -> None:
        raise RuntimeError("mine")

    assert load(1, y=4) == 5
    assert (load.__name__, load.__doc__) == ("load", "Loads.")
    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert names(written(timer)) == ["load", "fails"]


def test_a_generator_is_timed_until_it_is_exhausted(timer: Timer, clock: Clock) -> None:
    @timer("batches")
    def batches() -> Iterator[int]:
        yield 1
        clock.sleep(5)
        yield 2

    assert list(batches()) == [1, 2]
    (span,) = written(timer)
    assert span["duration_ns"] == 5 * MS


def test_a_generator_that_is_closed_ends_no_span_of_its_caller(timer: Timer, clock: Clock) -> None:
    @timer("batches")
    def batches() -> Iterator[int]:
        yield from range(3)

    def use() -> None:
        source = batches()
        next(source)
        timer.start("work")
        source.close()  # as where a loop is left and its iterator let go of
        clock.sleep(5)
        timer.stop("work")

    assert warned(use) == []
    spans = {span["name"]: span["duration_ns"] for span in written(timer)}
    assert spans["work"] == 5 * MS, "it was ended with the generator"


def test_two_generators_in_turn_have_their_own_times(timer: Timer, clock: Clock) -> None:
    def wait(milliseconds: int) -> Iterator[None]:
        with timer("generator"):
            clock.sleep(milliseconds)
            yield

    long, short = wait(30), wait(1)
    next(long)
    next(short)
    for generator in (long, short):  # the first is not the innermost
        with pytest.raises(StopIteration):
            next(generator)
        clock.sleep(4)
    assert [span["duration_ns"] for span in written(timer)] == [31 * MS, 5 * MS]


def test_coroutines_in_turn_have_their_own_times(timer: Timer, clock: Clock) -> None:
    @timer("coroutine")
    async def wait(ended: asyncio.Event, *, fails: bool = False) -> None:
        await ended.wait()
        if fails:
            raise KeyError

    async def all_three() -> None:
        events = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(wait(event, fails=event is events[0])) for event in events]
        await asyncio.sleep(0)  # all of them begin
        for milliseconds, number in ((10, 0), (20, 2), (20, 1)):
            clock.sleep(milliseconds)
            events[number].set()
            await asyncio.wait([tasks[number]])
        assert isinstance(tasks[0].exception(), KeyError)

    assert warned(lambda: asyncio.run(all_three())) == []
    assert [span["duration_ns"] for span in written(timer)] == [10 * MS, 30 * MS, 50 * MS]


def test_a_block_can_be_entered_again_and_within_itself(timer: Timer) -> None:
    block = timer("block")
    with block, block, block:
        pass
    with block:
        pass
    assert [span["depth"] for span in written(timer)] == [2, 1, 0, 0]


def test_compiled_code_is_what_it_is_without_spans(timer: Timer) -> None:
    @timer("function")
    def double(x: torch.Tensor) -> torch.Tensor:
        with timer("block"):
            x = x * 2
        timer.start("pair")
        x = x + 1
        timer.stop("pair")
        return x

    compiled = torch.compile(double, backend="eager", fullgraph=True)  # raises where the graph is broken
    with timer("call"):
        assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    assert names(written(timer)) == ["call"]


# --- threads ---


def test_every_thread_has_its_own_nesting(timer: Timer) -> None:
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        for _ in range(200):
            with timer(f"outer {number}"), timer("inner"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    path = timer.dump()
    assert path is not None
    spans = span_rows(path)
    assert len(text_rows(path)) == len(spans) == 1600
    of_thread = {span["name"]: span["thread"] for span in spans if span["name"] != "inner"}
    assert len(set(of_thread.values())) == 4
    for span in spans:
        if span["name"] == "inner":
            assert of_thread[span["parent"]] == span["thread"]


def test_a_span_that_ends_while_another_thread_makes_the_files(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    made, go_on = threading.Event(), threading.Event()

    def claim(
        place: span_log.SpanPlace, owner: span_log.Owner, claim: Any = span_log.SpanPlace.claim
    ) -> span_log.TimerFiles:
        made.set()
        go_on.wait(100)
        return claim(place, owner)

    def ended(name: str) -> threading.Thread:
        def work() -> None:
            with timer(name):
                pass

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    monkeypatch.setattr(span_log.SpanPlace, "claim", claim)
    first = ended("first")
    assert made.wait(100)
    second = ended("second")
    second.join(0.2)  # it waits for the files, or comes to write before they are there: right in any order
    go_on.set()
    first.join()
    second.join()
    assert sorted(names(written(timer))) == ["first", "second"]


def test_another_thread_may_stop_a_span(timer: Timer) -> None:
    timer.start("backward")
    thread = threading.Thread(target=timer.stop, args=("backward",))
    assert warned(lambda: (thread.start(), thread.join())) == []
    with timer("next"):
        pass
    spans = written(timer)
    assert places(spans) == [("backward", 0, None), ("next", 0, None)]
    assert spans[0]["thread"] == threading.get_native_id()


# --- what is said of a span ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward", "forward"),
        ("Forward_3", "forward"),
        ("forward-compute", "forward"),
        ("backward", "backward"),
        ("optimizer.step", "optimizer"),
        ("data_loading", "data"),
        ("all_reduce", "communication"),
        ("save_checkpoint", "checkpoint"),
        ("step", "step"),
        ("attention", "other"),
        ("", "other"),
        ("forwarder", "other"),
    ],
)
def test_known_names_are_phases(name: str, kind: str) -> None:
    assert kind_of_span(name) == kind
    assert kind in KINDS


def test_more_can_be_said_of_a_span(timer: Timer) -> None:
    with timer("block", kind="forward", layer="model.layers.3", microbatch=2):
        timer.start("ring", kind="communication", group="tp", bytes=4096)
        timer.stop("ring")
    inner, outer = written(timer)
    assert (outer["kind"], outer["layer"], outer["microbatch"]) == ("forward", "model.layers.3", 2)
    assert (inner["kind"], inner["group"], inner["bytes"], inner["sequence"]) == ("communication", "tp", 4096, 0)


def test_waiting_is_the_communication_within_a_span(timer: Timer, clock: Clock) -> None:
    for _ in range(2):
        with timer("backward"):
            with timer("layer"), timer("all_reduce"):
                clock.sleep(2)
            with timer("all_reduce"):
                clock.sleep(1)
            clock.sleep(5)
        with timer("optimizer"):
            pass
    spans = written(timer)
    for first in (0, 5):
        ring, layer, second, backward, optimizer = spans[first : first + 5]
        assert layer["waiting_ns"] == ring["duration_ns"] == 2 * MS
        assert backward["waiting_ns"] == ring["duration_ns"] + second["duration_ns"]
        assert "waiting_ns" not in optimizer
    assert [span["sequence"] for span in spans if span["name"] == "all_reduce"] == [0, 1, 2, 3]


def test_communication_is_numbered_within_its_step(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_recording, "_MOST_SEQUENCES", 3)
    for step in range(2):
        for _ in range(3):
            timer.step(step)  # with every micro-batch
            with timer("all_reduce"):
                pass
    for step in (7, 8):  # of spans that say their step themselves, in no order
        for group in ("tp", "dp"):
            for of in (step, 7):
                with timer("ring", kind="communication", group=group, step=of):
                    pass
    numbered = [(span["name"], span["step"], span["sequence"]) for span in written(timer) if "sequence" in span]
    assert numbered[:6] == [("all_reduce", step, number) for step in range(2) for number in range(3)]
    assert [number for _, step, number in numbered[6:] if step == 7] == [0, 1, 0, 1, 2, 2]
    assert [number for _, step, number in numbered[6:] if step == 8] == [0, 0]


def test_steps(timer: Timer) -> None:
    for _ in range(3):
        with timer("forward"), timer("all_reduce"):
            pass
        timer.step()
    spans = written(timer)
    assert [(span["name"], span["step"]) for span in spans] == [
        (name, step) for step in range(3) for name in ("all_reduce", "forward", "step")
    ]
    assert [span["sequence"] for span in spans if span["name"] == "all_reduce"] == [0, 0, 0]
    steps = [span for span in spans if span["name"] == "step"]
    for step, after in itertools.pairwise(steps):
        assert step["start_ns"] + step["duration_ns"] == after["start_ns"]
    assert all(span["kind"] == "step" for span in steps)


def test_steps_by_number(timer: Timer) -> None:
    with timer("setup"):
        pass
    for number in (100, 101):
        timer.step(number)
        with timer("forward"):
            pass
    with timer("later", step=7):
        pass
    assert [(span["name"], span["step"]) for span in written(timer)] == [
        ("setup", None),
        ("forward", 100),
        ("step", 100),
        ("forward", 101),
        ("later", 7),
    ]


def test_a_span_named_step_is_one_and_takes_no_depth(timer: Timer) -> None:
    for _ in range(2):
        with timer("step"), timer("forward"):
            pass
    assert [(span["name"], span["step"], span["depth"], span["parent"]) for span in written(timer)] == [
        ("forward", 0, 0, "step"),
        ("step", 0, 0, None),
        ("forward", 1, 0, "step"),
        ("step", 1, 0, None),
    ]


def test_pauses_of_the_garbage_collector_are_spans(tmp_path: Path, clock: Clock) -> None:
    def last(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            clock.now_ns += lasts_ns[0]

    lasts_ns = [7 * MS]
    gc.callbacks.insert(0, last)  # before the timer hears that the collection has ended
    gc.disable()  # no other collection
    try:
        timer = Timer(tmp_path, device="cpu", gc=True)
        with timer("warm"):
            pass
        with timer("backward"):
            gc.collect()
            lasts_ns = [99_999]  # too short to be told
            gc.collect()
        timer.close()
    finally:
        gc.enable()
        gc.callbacks.remove(last)
    (path,) = files_of(tmp_path)
    pauses = [span for span in span_rows(path) if span["kind"] == "gc" and span["parent"] == "backward"]
    assert [(pause["depth"], pause["duration_ns"]) for pause in pauses] == [(1, 7 * MS)]
    assert not any("_pauses" in repr(callback) for callback in gc.callbacks)


# --- files ---


def test_a_program_that_ends_well_says_nothing_of_its_end(tmp_path: Path) -> None:
    timer = Timer(tmp_path, device="cpu")
    with timer("x"):
        pass
    timer.close()
    (path,) = files_of(tmp_path)
    assert "ended_by" not in path.with_suffix(".jsonl").read_text()


def test_the_header_says_whose_spans_they_are(timer: Timer) -> None:
    with timer("x"):
        pass
    path = timer.dump()
    assert path is not None
    header = header_of(path)
    assert (header["rank"], header["world_size"], header["coordinates"]) == (0, 1, {})
    assert (header["schema_version"], header["attempt"], header["worker"]) == (1, 0, False)
    assert header["run"] == path.parent.parent.name
    clock = header["clock"]
    minute = 60_000 * MS  # other epochs and units are far more than that from one another; a busy machine is not
    assert abs(clock["time_ns"] - clock["start_ns"]) < minute
    assert abs(time.time_ns() - clock["time_ns"] - (time.perf_counter_ns() - clock["monotonic_ns"])) < minute


def test_a_clock_that_is_set_breaks_no_duration(timer: Timer, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with timer("before"):
        clock.sleep(3)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600 * 10**9)
    with timer("after"):
        pass
    before, after = written(timer)
    assert after["start_ns"] - before["start_ns"] == 3 * MS
    path = timer.dump()
    assert path is not None
    assert '{"header":{"clock"' in path.with_suffix(".jsonl").read_text().splitlines()[-1]


def test_dump_and_go_on(timer: Timer) -> None:
    assert timer.dump() is None
    for count in range(1, 4):
        with timer("x"):
            pass
        assert len(written(timer)) == count


def test_timers_of_one_place_share_their_files(tmp_path: Path) -> None:
    first, second = Timer(tmp_path, device="cpu"), Timer(tmp_path, device="cpu")
    with first("a"), second("b"):
        pass
    first.close()
    with second("c"):
        pass
    second.close()
    (path,) = files_of(tmp_path)
    assert names(span_rows(path)) == ["b", "a", "c"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        timer = Timer(tmp_path, run_name="mine", device="cpu")
        with timer(name):
            pass
        timer.close()
    found = {path.parent.parent.name: names(span_rows(path)) for path in files_of(tmp_path)}
    assert found == {"mine": ["a"], "mine-2": ["b"], "mine-3": ["c"]}


def test_a_run_that_goes_elsewhere_since_its_name_is_taken_is_told_once(tmp_path: Path) -> None:
    def run(rank: int = 0, **named: str) -> list[str]:
        def train() -> None:
            timer = Timer(tmp_path, device="cpu", rank=rank, **named)
            for _ in range(2):
                with timer("x"):
                    pass
                timer.dump()
            timer.close()

        return warned(train)

    assert run(run_name="mine") == []
    (message,) = run(run_name="mine")
    assert str(tmp_path / "mine-2") in message and str(tmp_path / "mine") in message
    assert run(rank=1, run_name="mine") == [], "its files of this rank are not there yet"
    assert run(rank=1, run_name="mine") == [], "of several ranks the first says it"
    assert run() == run() == [], "a name that nobody told is nobody's"


def test_configure_sends_what_follows_elsewhere(tmp_path: Path) -> None:
    timer = Timer(tmp_path / "one", device="cpu")
    with timer("a"):
        pass
    timer.configure(output_dir=tmp_path / "two", rank=3)
    with timer("b"):
        pass
    timer.close()
    assert names(span_rows(*files_of(tmp_path / "one"))) == ["a"]
    (path,) = files_of(tmp_path / "two")
    assert path.name == "timer_rank3.log"
    assert [row["rank"] for row in text_rows(path)] == ["3"]
    with pytest.raises(WrongUse, match="colour"):
        timer.configure(colour="red")


def test_configure_tells_whose_spans_they_are(tmp_path: Path) -> None:
    timer = Timer(tmp_path, run_name="job", device="cpu")
    with timer("a"):
        pass
    timer.configure(rank=3, world_size=8)
    with timer("a"):  # whose lines are known
        pass
    timer.close()
    (path,) = files_of(tmp_path)
    assert path.relative_to(tmp_path) == Path("job/timers/timer_rank3.log")
    assert [(row["rank"], row["name"]) for row in text_rows(path)] == [("3", "a"), ("3", "a")]
    assert [span["rank"] for span in span_rows(path)] == [3, 3]
    assert header_of(path)["world_size"] == 8


def test_what_a_signal_or_a_collection_writes_while_a_line_is_written_is_not_lost(
    timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the lock of the log, on the same thread."""
    with timer("first"):
        pass
    append, inside = LineFile.append, []

    def append_and_write(self: LineFile, line: bytes) -> None:
        if not inside:
            inside.append(True)
            with timer("inside"):  # where it waits for the lock in vain, its line is lost
                pass
        append(self, line)

    monkeypatch.setattr(span_log, "_LOCK_S", 0.05)
    monkeypatch.setattr(LineFile, "append", append_and_write)
    with timer("outside"):
        pass
    monkeypatch.undo()
    assert inside == [True] and timer._recorder.log.lost == 0
    assert names(written(timer)) == ["first", "inside", "outside"]


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER", "off")
    timer = Timer(tmp_path, gc=True)

    @timer("f")
    def f() -> int:
        return 3

    def use() -> None:
        with timer("x"):
            timer.start("y")
            timer.stop("z")
            timer.step()
        assert f() == 3
        assert timer.dump() is None

    assert warned(use) == []
    timer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_holds_a_timer_can_be_copied_and_pickled(timer: Timer) -> None:
    held = {"timer": timer}
    with timer("x"):
        pass
    assert copy.deepcopy(held)["timer"] is timer
    assert copy.copy(timer) is timer
    other = pickle.loads(pickle.dumps(timer))
    assert isinstance(other, Timer) and other is not timer
    other.close()


def test_a_timer_that_nobody_holds_ends_its_files(tmp_path: Path) -> None:
    timer = Timer(tmp_path, device="cpu")
    with timer("x"):
        pass
    del timer
    gc.collect()
    (path,) = files_of(tmp_path)
    assert path.read_bytes().endswith(b"ms\n")


def test_ten_thousand_spans(timer: Timer) -> None:
    for _ in range(5_000):
        timer.start("outer")
        timer.start("inner")
        timer.stop("inner")
        timer.stop("outer")
    path = timer.dump()
    assert path is not None
    with path.open() as text:
        assert sum(1 for _ in text) == 10_000
    spans = span_rows(path)
    assert len(spans) == 10_000
    ends = [span["start_ns"] + span["duration_ns"] for span in spans]
    assert ends == sorted(ends)
    assert {(span["name"], span["depth"]) for span in spans} == {("outer", 0), ("inner", 1)}


def test_names_that_never_come_again_do_not_pile_up(timer: Timer) -> None:
    for number in range(4_500):
        with timer(f"{number}"):
            pass
    assert _label.cache_info().currsize <= 4096
    assert len(written(timer)) == 4_500


def test_a_name_that_cannot_even_be_printed(timer: Timer) -> None:
    class Name:
        __hash__ = None  # type: ignore[assignment]

        def __str__(self) -> str:
            raise ValueError("no text")

    (said,) = warned(lambda: timer.start(Name()))
    assert "start() failed" in said


def test_garbage_that_is_collected_while_the_files_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread that makes them: to wait there for itself is to wait in vain."""
    timer = Timer(tmp_path, device="cpu", gc=True)
    original, told = span_log.clock_reading, []

    def reading(offset_ns: int) -> dict[str, int]:
        if not told:
            told.append(True)
            timer._recorder._pause(0, 1_000_000)
        return original(offset_ns)

    monkeypatch.setattr(span_log, "_LOCK_S", 0.05)
    monkeypatch.setattr(span_log, "clock_reading", reading)

    def use() -> None:
        with timer("first"):
            pass

    assert warned(use) == [], "it waits for the lock that this thread holds"
    assert told and timer._recorder.log.lost == 0
    timer.close()
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1, "the files were made twice"


def test_a_program_that_goes_too_deep_and_comes_back(timer: Timer) -> None:
    def deeper() -> None:
        with timer("level"):
            deeper()

    def all_of_it() -> None:
        with pytest.raises(RecursionError):
            deeper()
        with timer("after"):
            pass

    assert not [message for message in warned(all_of_it) if "off" in message]
    assert names(written(timer))[-1] == "after", "the timer is off, and nobody was told"
