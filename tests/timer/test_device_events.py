"""`Timer` with a device that the test drives: times are read when it has come to them, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from monitoring import Device, DeviceEvent
from profiler_wrapper.timer import device_events
from profiler_wrapper.timer import spans as recording
from profiler_wrapper.timer.device_events import MOST_PENDING, nanoseconds_between
from profiler_wrapper.timer.timer import Timer
from programs import warned
from timed_runs import span_rows, text_rows


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(recording, "find_accelerator", lambda _: device)
    monkeypatch.setattr(recording, "_WAIT_S", 0.05)
    return device


@pytest.fixture
def timer(tmp_path: Path, device: Device) -> Iterator[Timer]:
    timer = Timer(tmp_path)
    yield timer
    timer.close()


def times(timer: Timer) -> tuple[dict[str, int | None], dict[str, str]]:
    """By name: the device's nanoseconds in the JSON lines, and what the text says."""
    path = timer.dump()
    assert path is not None
    spans = {span["name"]: span["device_ns"] for span in span_rows(path)}
    return spans, {row["name"]: row["cuda_dur"] for row in text_rows(path)}


def test_the_time_between_two_events(timer: Timer, device: Device) -> None:
    with timer("forward"):
        device.work(830.512)
        with timer("inner"):
            device.work(0.25)
    device.catch_up()
    assert times(timer) == (
        {"forward": 830_762_000, "inner": 250_000},
        {"forward": "830.762", "inner": "0.250"},
    )


def test_json_lines_do_not_wait_for_the_device_and_text_does(timer: Timer, device: Device, tmp_path: Path) -> None:
    with timer("slow"):
        device.work(5.0)
    (text,) = tmp_path.rglob("*.log")
    lines = text.with_suffix(".jsonl")
    assert '"slow"' in lines.read_text() and '"device_ns":null' in lines.read_text()
    assert text.read_text() == ""
    device.catch_up()
    with timer("next"):
        pass
    assert '"device_ns":5000000 ' in lines.read_text()
    assert "] slow, " in text.read_text() and "cuda_dur=5.000ms\n" in text.read_text()


def test_spans_are_read_in_order_however_far_the_device_is_behind(timer: Timer, device: Device) -> None:
    for number in range(300):
        with timer(f"{number}"):
            device.work(number)
        if number > 100:
            device.catch_up(number - 100)
    device.catch_up()
    spans, text = times(timer)
    assert spans == {f"{number}": number * 1_000_000 for number in range(300)}
    assert list(text) == list(spans)
    assert device.events < 450  # they are used again


def test_events_are_used_again(timer: Timer, device: Device) -> None:
    for _ in range(1000):
        with timer("outer"), timer("inner"):
            device.work(1)
        device.catch_up()
    assert device.events <= 8


@pytest.mark.parametrize("failing", ["query", "elapsed_time"])
def test_a_device_that_has_failed_tells_no_time(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = Device()
    begin, end = device.event(), device.event()
    begin.record()
    end.record()
    assert nanoseconds_between(begin, end) == 0
    monkeypatch.setattr(DeviceEvent, failing, fails)
    assert nanoseconds_between(begin, end) is None


def test_dump_waits_for_the_device_and_not_for_ever(
    timer: Timer, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with timer("done"):
        device.work(1)
    device.catch_up()
    with timer("hangs"):
        device.work(1)
    now_s, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(device_events, "time", clock)
    assert times(timer) == ({"done": 1_000_000, "hangs": None}, {"done": "1.000", "hangs": "nan"})
    assert 0.05 <= sum(slept) < 0.05 + 2 * slept[0]


def test_a_device_that_never_comes_back_holds_a_bounded_number_of_spans(
    timer: Timer, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> None:
        for _ in range(MOST_PENDING + 500):
            with timer("x"):
                device.work(1)

    (message,) = warned(hang)
    assert "behind" in message
    assert timer._recorder.events is not None
    assert len(timer._recorder.events._pending) == MOST_PENDING
    assert device.events <= 2 * MOST_PENDING + 2
    path = timer.dump()
    assert path is not None
    assert len(span_rows(path)) == len(text_rows(path)) == MOST_PENDING + 500


@pytest.mark.parametrize("at", ["start", "stop"])
def test_no_event_where_the_device_may_not_be_given_one(timer: Timer, device: Device, at: str) -> None:
    device.in_use = at == "stop"
    timer.start("x")
    device.in_use = not device.in_use
    timer.stop("x")
    device.catch_up()
    assert times(timer) == ({"x": None}, {"x": "nan"})


def test_what_is_left_open_gives_its_event_back(timer: Timer, device: Device) -> None:
    def forget() -> None:
        for _ in range(2500):
            timer.start("forgotten")

    assert len(warned(forget)) == 1
    assert device.events <= 1002


def test_communication_within_a_span_on_a_device(timer: Timer, device: Device) -> None:
    with timer("backward"), timer("all_reduce"):
        device.work(2)
    device.catch_up()
    path = timer.dump()
    assert path is not None
    ring, backward = span_rows(path)
    assert ring["device_ns"] == backward["device_ns"] == 2_000_000
    assert backward["waiting_ns"] == ring["duration_ns"]


def test_a_device_that_fails_turns_the_timer_off_and_nothing_else(
    timer: Timer, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with timer("x"):
        pass
    monkeypatch.setattr(device, "ready", fail)

    def use() -> None:
        for _ in range(3):
            with timer("y"):
                pass

    (message,) = warned(use)
    assert "illegal memory access" in message
