"""Waits for other ranks, on functions that take the place of torch's, and as rows of a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from monitoring import Device
from profiler_wrapper.errors import Notices
from profiler_wrapper.timer import layer_spans
from profiler_wrapper.timer import steps as listening
from profiler_wrapper.timer.device_events import Mark
from profiler_wrapper.timer.layer_spans import LayerSpans, SeenStep, Span
from profiler_wrapper.timer.layer_timer import spans_of
from profiler_wrapper.timer.steps import Patch, Patches, WaitInfo

MAIN, OTHER_THREAD = 7, 8
MS = 1_000_000


class Heard:
    """Keeps what it is told, and when by a count of calls."""

    def __init__(self) -> None:
        self.open = 0
        self.infos: list[WaitInfo] = []

    def open_wait(self) -> object | None:
        self.open += 1
        return self

    def close_wait(self, opened: Any, info: WaitInfo) -> None:
        assert opened is self
        self.open -= 1
        self.infos.append(info)


class Work:
    """As torch's: a collective of that number, that waits or fails."""

    def __init__(self, operation: int, error: Exception | None = None) -> None:
        self.operation, self.error, self.waited = operation, error, 0

    def _get_op_type(self) -> int:
        return self.operation

    def wait(self, timeout: float = 1.0) -> bool:
        if self.error is not None:
            raise self.error
        self.waited += 1
        return True


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """Somebody who listens to `Work` above in the place of torch's."""
    module = ModuleType("made_up_for_waits")
    module.Work = Work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = Patch(module.__name__, "Work", "wait", listening._work_wait)
    monkeypatch.setattr(listening, "WAITS", Patches([patch]))
    monkeypatch.setattr(listening, "_only_group", lambda: "0-3")
    listener, before = Heard(), Work.wait
    listening.WAITS.listen(listener)
    yield listener
    listening.WAITS.stop_listening(listener)
    assert Work.wait is before, "torch's function is not back"


def test_a_wait_is_told_with_its_name_and_returns_what_it_returned(heard: Heard) -> None:
    work = Work(1)
    assert work.wait() is True and work.wait(timeout=2.0) is True
    assert work.waited == 2
    assert heard.infos == [WaitInfo("all_reduce", "0-3")] * 2


def test_sends_go_to_one_rank_only_so_that_their_group_is_not_known(heard: Heard) -> None:
    for operation in (12, 13, 100):
        Work(operation).wait()
    assert heard.infos == [WaitInfo("send"), WaitInfo("recv"), WaitInfo("wait", "0-3")]


def test_an_error_passes_and_ends_the_wait(heard: Heard) -> None:
    with pytest.raises(RuntimeError, match="a rank is gone"):
        Work(1, RuntimeError("a rank is gone")).wait()
    assert (heard.open, len(heard.infos)) == (0, 1)
    Work(1).wait()
    assert len(heard.infos) == 2, "the next wait is not seen"


def test_a_wait_within_a_wait_is_part_of_it(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    class Outer(Work):
        def wait(self, timeout: float = 1.0) -> bool:
            return bool(listening._waiting(Work.wait, (self,), {}, lambda: WaitInfo("outer")))

    Outer(1).wait()
    assert heard.infos == [WaitInfo("outer")]


def test_two_listen_and_the_last_puts_everything_back(heard: Heard) -> None:
    second = Heard()
    listening.WAITS.listen(second)
    listening.WAITS.listen(second)
    Work(1).wait()
    listening.WAITS.stop_listening(second)
    Work(1).wait()
    assert (len(heard.infos), len(second.infos)) == (2, 1)


def test_what_somebody_put_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_up_for_waits")

    class Own(Work):
        def wait(self, timeout: float = 1.0) -> bool:
            return super().wait(timeout)

    module.Work = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = Patch(module.__name__, "Work", "wait", listening._work_wait)
    monkeypatch.setattr(listening, "WAITS", Patches([patch]))
    listener = Heard()
    listening.WAITS.listen(listener)
    ours = Own.wait

    def theirs(self: Any, *args: Any) -> bool:
        return ours(self, *args)

    Own.wait = theirs  # type: ignore[assignment,method-assign]
    listening.WAITS.stop_listening(listener)
    assert Own.wait is theirs
    assert Own(1).wait() is True and listener.infos == []
    listening.WAITS.listen(listener)
    Own(1).wait()
    assert len(listener.infos) == 1, "told twice, or not at all"
    listening.WAITS.stop_listening(listener)


def test_torch_has_what_is_wrapped() -> None:
    """What of it this version does not have is not seen, and the list has to change."""
    pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    import torch.distributed._functional_collectives  # noqa: F401

    for patch in listening.WAITS.patches:
        owner: Any = sys.modules[patch.module]
        owner = getattr(owner, patch.owner) if patch.owner else owner
        assert callable(vars(owner).get(patch.name)) or hasattr(owner, patch.name), patch


def test_collectives_have_the_names_that_torch_has_for_their_numbers() -> None:
    kinds = torch._C._distributed_c10d.OpType.__members__  # type: ignore[attr-defined]
    ours = {kind: listening._OPERATIONS.get(int(number)) for kind, number in kinds.items()}
    assert [kind for kind, name in ours.items() if name is None] == ["COALESCED", "UNKNOWN"]
    for kind, name in ours.items():
        assert name is None or kind.replace("_", "").lower().startswith(name.replace("_", "")), kind


# --- FSDP on an accelerator: its stream waits, not the process ---


class Group:
    """As FSDP's group of parameters on a device."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self._all_gather_result: object | None = None

    def unshard(self) -> None:
        Work(4).wait()
        self._all_gather_result = object()

    def wait_for_unshard(self) -> None:
        self._all_gather_result = None


def test_with_an_accelerator_the_stream_waits_where_parameters_are_needed(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_gather_of", lambda group: WaitInfo("all_gather", "0-1", 64))
    unshard = listening._unshard(Group.unshard)
    wait_for_unshard = listening._wait_for_unshard(Group.wait_for_unshard)
    group = Group()
    wait_for_unshard(group)  # it was gathered before
    assert heard.infos == []
    unshard(group)  # only begins it, on another stream
    assert heard.infos == []
    wait_for_unshard(group)
    assert heard.infos == [WaitInfo("all_gather", "0-1", 64)]


def test_bytes_of_what_is_gathered_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_ranks_of", lambda group: group.name)
    shard = SimpleNamespace(size=lambda: 4, name="0-3")
    parameters = [
        SimpleNamespace(_sharded_param_data=torch.zeros(count), param_dtype=torch.bfloat16, orig_dtype=torch.float32)
        for count in (10, 6)
    ]
    mesh = SimpleNamespace(shard_mesh_size=4)
    group = SimpleNamespace(_all_gather_process_group=shard, fsdp_params=parameters, mesh_info=mesh)
    assert listening._gather_of(group) == WaitInfo("all_gather", "0-3", 16 * 4 * 2)
    replicas = SimpleNamespace(size=lambda: 2, name="0,4")
    given = {
        "fsdp_params": parameters,
        "reduce_scatter_group": shard,
        "reduce_dtype": torch.float32,
        "all_reduce_group": replicas,
    }
    assert listening._reduction_of(given, "wait") == WaitInfo("reduce_scatter", "0-3", 16 * 4 * 4)
    assert listening._reduction_of(given, "all_reduce") == WaitInfo("all_reduce", "0,4", 16 * 4)
    assert listening._reduction_of({}, "wait") == WaitInfo("wait")
    assert listening._gather_of(SimpleNamespace()) == WaitInfo("all_gather")  # of another version


def test_what_fsdp_reduces_is_known_however_it_is_given(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """By place or by name, and wherever a version of torch has the device among them."""
    monkeypatch.setattr(listening, "_reduction_of", lambda given, name: WaitInfo(given["reduce_scatter_group"]))

    def foreach_reduce(fsdp_params: Any, reduce_scatter_group: Any, device: torch.device, more: int = 0) -> int:
        Work(100).wait()
        return more

    wrapped = listening._reduction(foreach_reduce)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert wrapped([], "by place", cpu, 1) == 1
    assert wrapped(fsdp_params=[], reduce_scatter_group="by name", device=cpu) == 0
    assert wrapped([], "in a stream", device=cuda, more=2) == 2
    assert [info.name for info in heard.infos] == ["by place", "by name"]
    assert "device" in listening._parameters_of(_foreach_reduce()), "torch calls it otherwise now"


def _foreach_reduce() -> Any:
    module = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    names = {"fsdp_params", "reduce_scatter_group", "reduce_dtype", "all_reduce_group"}
    assert names <= set(listening._parameters_of(module.foreach_reduce)), "torch calls them otherwise now"
    return module.foreach_reduce


# --- a step's waits as rows ---


def seen(*waits: Span, device: Device | None = None) -> SeenStep:
    """Forward 10-30 ms with a block from 12 to 20, backward 30-60 with the same block from 35 to 50."""
    spans = [
        Span("forward", "layers.0 forward", moment(12, device), moment(20, device), MAIN, "layers.0"),
        Span("backward", "layers.0 backward", moment(35, device), moment(50, device), 0, "layers.0"),
    ]
    parts = (("data", 0), ("forward", 10), ("other", 30), ("backward", 30), ("other", 60))
    boundaries = tuple((part, Mark(round(at * 1e6), None)) for part, at in parts)
    return SeenStep(5, Mark(0, None), Mark(70_000_000, None), boundaries, spans, list(waits), [], [], MAIN)


def moment(at_ms: float, device: Device | None = None) -> tuple[int, Any]:
    if device is None:
        return round(at_ms * MS), None
    event = device.event()
    event.at_ms = 2 * at_ms
    return round(at_ms * MS), event


def wait(begin: float, end: float, *, thread: int = MAIN, in_graph: bool = False, info: WaitInfo | None = None) -> Span:
    info = WaitInfo("all_gather", "0-3", 64) if info is None else info
    made = Span("communication", info.name, moment(begin), moment(end), thread, group=info.group, bytes=info.bytes)
    made.in_graph = in_graph
    return made


def by_name(rows: list[Span]) -> dict[str, Span]:
    return {row.name: row for row in rows if row.kind != "communication"}


def waiting_ms(row: Span) -> float | None:
    return None if row.waiting_ns is None else row.waiting_ns / MS


def test_waits_lie_in_the_innermost_span_of_their_thread() -> None:
    rows = spans_of(
        seen(
            wait(13, 15),
            wait(16, 17),
            wait(22, 25),
            wait(36, 40, in_graph=True),
            wait(52, 53, in_graph=True),
            wait(62, 64, info=WaitInfo("send")),
            wait(14, 18, thread=OTHER_THREAD),
        )
    )
    found = by_name(rows)
    assert {name: waiting_ms(row) for name, row in found.items()} == {
        "step": None,
        "data": 0,
        "forward": 6,
        "layers.0 forward": 3,
        "backward": 5,
        "layers.0 backward": 4,
    }
    waits = [row for row in rows if row.kind == "communication"]
    assert [(row.name, row.parent, row.depth, row.thread) for row in waits] == [
        ("all_gather", "layers.0 forward", 2, MAIN),
        ("all_gather", "layers.0 forward", 2, MAIN),
        ("all_gather", "forward", 1, MAIN),
        ("all_gather", "layers.0 backward", 2, MAIN),
        ("all_gather", "backward", 1, MAIN),
        ("send", None, 0, MAIN),
        ("all_gather", None, 0, OTHER_THREAD),
    ]
    assert [row.sequence for row in waits] == [0, 1, 2, 3, 4, None, 5]


def test_a_step_without_waits_does_not_say_that_there_were_none() -> None:
    """DDP, or what is compiled, may have waited where nobody looks."""
    assert {waiting_ms(row) for row in spans_of(seen())} == {None}


def test_the_time_on_the_device_is_without_its_waits() -> None:
    device = Device()
    device.given_ms = device.done_ms = 1000.0
    gather = Span("communication", "all_gather", moment(13, device), moment(15, device), MAIN, group="0-1")
    found = by_name(spans_of(seen(gather, device=device)))
    assert found["layers.0 forward"].device_waiting_ns == 4 * MS  # the device takes twice as long here
    assert found["layers.0 backward"].device_waiting_ns == 0


def test_outside_of_a_step_nothing_is_kept_and_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Exception] = []
    clock = iter((1, 2, 3))
    monkeypatch.setattr(layer_spans, "perf_counter_ns", lambda: next(clock))
    model = torch.nn.Linear(2, 2)
    now = Mark(0, None)
    spans = LayerSpans(
        model,
        (),
        None,
        mark=lambda: now,
        on_failure=lambda _, error: failures.append(error),
        optimizers=(),
        notices=Notices(),
    )
    assert spans.open_wait() is None
    spans.begin_step(now)
    opened = spans.open_wait()
    assert opened is not None
    spans.end_step()
    spans.close_wait(opened, WaitInfo())  # the step has ended in between
    spans.begin_step(now)
    opened = spans.open_wait()
    assert opened is not None
    spans.close_wait(opened, WaitInfo("send"))
    waits = spans.take(0, now, now).waits
    assert [(one.begin, one.end, one.name) for one in waits] == [((2, None), (3, None), "send")]
    assert spans.open_wait() is None and len(failures) == 1  # the clock has failed
