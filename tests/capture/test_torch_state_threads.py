"""Which threads may call a model, from what they were given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
from torch import nn

from profiler_wrapper.capture.torch_state import ThreadStarts, may_call

MODEL, OTHER = nn.Linear(2, 2), nn.Linear(2, 2)


class Manager:
    def __init__(self, model: nn.Module) -> None:
        self.engine = {"models": [model]}

    def run(self) -> None: ...


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Worker(threading.Thread):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Proxy:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("bound to nothing")


def names_it() -> None:
    MODEL.eval()


def calls_what_names_it() -> None:
    def inner() -> None:
        names_it()

    inner()


def queued(model: nn.Module) -> SimpleQueue[Any]:
    waiting: SimpleQueue[Any] = SimpleQueue()
    waiting.put((model, ()))
    return waiting


def closure(model: nn.Module) -> Callable[[], object]:
    return lambda: model


def of(target: Callable[..., object], *args: object, **options: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, kwargs=options)


@pytest.mark.parametrize(
    "thread",
    [
        of(MODEL.forward),
        of(print, MODEL),
        of(print, model=[Proxy(), MODEL]),
        of(closure(MODEL)),
        of(partial(print, MODEL)),
        of(Manager(MODEL).run),
        of(print, Slotted(MODEL)),
        of(names_it),
        of(calls_what_names_it),
        of(print, queued(MODEL)),
        Worker(MODEL),
        threading.Timer(1, closure(MODEL)),
    ],
    ids=lambda thread: type(thread).__name__,
)
def test_leads_to_the_model(thread: threading.Thread) -> None:
    assert may_call(thread, [MODEL])
    assert may_call(thread, [])
    assert not may_call(thread, [OTHER])


@pytest.mark.parametrize(
    "thread",
    [of(print), of(print, weakref.ref(MODEL)), of(print, nn.Linear, nn), of(print, MODEL.weight), of(print, [1] * 99)],
)
def test_leads_to_no_model(thread: threading.Thread) -> None:
    assert not may_call(thread, [MODEL])
    assert not may_call(thread, [])


def test_what_is_too_large_to_look_through_is_left() -> None:
    assert not may_call(of(print, MODEL, *([] for _ in range(30_000))), [MODEL])


def test_starts_and_ends_are_told_and_nothing_stays() -> None:
    original, told = threading.Thread.start, []

    def before(thread: threading.Thread) -> bool:
        told.append(f"before {thread.name}")
        return thread.name != "unheard"

    starts = ThreadStarts(before=before, at_end=lambda: told.append(f"end of {threading.current_thread().name}"))
    starts.install()
    for name in ("heard", "unheard"):
        thread = threading.Thread(name=name, target=lambda: told.append(f"in {threading.current_thread().name}"))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="only be started once"):
            thread.start()
        assert "run" not in vars(thread)
    starts.remove()
    assert threading.Thread.start is original
    assert told == ["before heard", "in heard", "end of heard", "before unheard", "in unheard"]


def test_what_was_put_over_ours_stays_and_ours_is_silent() -> None:
    original, told = threading.Thread.start, []
    starts = ThreadStarts(before=lambda thread: bool(told.append(thread)), at_end=lambda: None)
    starts.install()
    ours = threading.Thread.start
    theirs = lambda thread: ours(thread)  # noqa: E731
    threading.Thread.start = theirs  # type: ignore[method-assign, assignment]
    try:
        starts.remove()
        assert threading.Thread.start is theirs
        of(int).start()
        assert not told
        starts.install()
        of(int).start()
        assert len(told) == 1
        starts.remove()
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]
