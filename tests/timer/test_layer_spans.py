"""Times of blocks, on a clock that the test moves: each has what it took, and nothing that others took."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from layer_runs import EXPECTED, Block, Spend, Stack, Time, milliseconds, rows_of, timing
from monitoring import Device
from profiler_wrapper import Timer, TrainingMonitor
from profiler_wrapper.errors import ProfilerWrapperWarning, WrongUse
from profiler_wrapper.timer import layer_spans
from profiler_wrapper.timer.layer_spans import TimedModules
from profiler_wrapper.timer.layer_timer import LayerTimer
from programs import warned
from unchanged import Boom, hooks_of

pytestmark = pytest.mark.usefixtures("nothing_in_the_way")


X = torch.ones(2, 4)


@pytest.fixture(params=["host", "device"])
def time(request: pytest.FixtureRequest) -> Time:
    return Time(Device() if request.param == "device" else None)


def test_each_block_has_what_it_took(tmp_path: Path, time: Time) -> None:
    model = Stack(time)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = hooks_of(model)
    with timing(model, tmp_path, time) as layers:
        for _ in range(2):
            time.spend(7.0)
            loss = model(X).sum()
            time.spend(0.25)
            loss.backward()
            optimizer.step()
            time.spend(0.125)
            layers.step()
        if time.device is not None:
            time.device.catch_up()
    assert hooks_of(model) == hooks
    rows = rows_of(tmp_path)
    assert all(row["thread"] for row in rows)
    for step in (0, 1):
        assert milliseconds(rows, step=step) == EXPECTED
        phases = {row["name"]: row for row in rows if row["depth"] == 0 and row["step"] == step}
        assert {name: row["duration_ns"] / 1e6 for name, row in phases.items()} == {
            "step": pytest.approx(7.0 + 10.5 + 0.25 + 105.0 + 0.125),
            "data": pytest.approx(7.0),
            "forward": pytest.approx(10.5),
            "backward": pytest.approx(105.0),
            "optimizer": pytest.approx(0.0),
        }
    if time.device is not None:
        assert milliseconds(rows, step=1, field="device_ns") == {key: 2 * value for key, value in EXPECTED.items()}
        assert all(row["device_ns"] == pytest.approx(2 * row["duration_ns"], abs=10) for row in rows)
    for row in rows:
        if "layer" in row:
            assert (row["depth"], row["parent"]) == (1, row["kind"])
            assert row["name"] == f"{row['layer']} {row['kind']}"
            around = next(one for one in rows if one["name"] == row["parent"] and one["step"] == row["step"])
            assert around["start_ns"] - 200 <= row["start_ns"]
            assert row["start_ns"] + row["duration_ns"] <= around["start_ns"] + around["duration_ns"] + 200


def test_what_lies_between_blocks_is_no_blocks(tmp_path: Path) -> None:
    time = Time()

    class Gapped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Spend.apply(self.embed(x), time, 100.0, 1000.0)
            x.mul_(1.0)  # in place: what made the tensor is another node now
            for layer in self.layers:
                x = layer(x)
                x = Spend.apply(x, time, 100.0, 1000.0)
            return Spend.apply(self.head(x), time, 100.0, 1000.0)  # type: ignore[no-any-return]

    model = Gapped(time)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    assert milliseconds(rows_of(tmp_path)) == EXPECTED


class SpendInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, time: Time) -> torch.Tensor:
        ctx.time = time
        ctx.mark_dirty(x)
        return x.mul_(1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.time.spend(1000.0)
        return grads[0], None


def test_a_blocks_output_that_is_changed_in_place(tmp_path: Path) -> None:
    time = Time()

    class InPlace(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                SpendInPlace.apply(x, time)
                x = layer(x)
            return self.head(x)  # type: ignore[no-any-return]

    model = InPlace(time)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    assert milliseconds(rows_of(tmp_path)) == EXPECTED


def test_an_embedding_ends_where_it_ends(tmp_path: Path) -> None:
    time = Time()

    class Embeds(Stack):
        def __init__(self) -> None:
            super().__init__(time, 1)
            self.embed = nn.Embedding(4, 4)  # type: ignore[assignment]
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = Spend.apply(self.shift, time, 100.0, 1000.0)  # the last in backward
            return self.head(self.layers[0](self.embed(x) + shift))  # type: ignore[no-any-return]

    model = Embeds()
    with timing(model, tmp_path, time) as layers:
        model(torch.ones(2, dtype=torch.long)).sum().backward()
        layers.step()
    found = milliseconds(rows_of(tmp_path))
    assert found["embed", "backward"] == 0.0 and found["layers.0", "backward"] == 20.0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["outside", "inside", "segments"])
def test_a_recompute_is_apart_from_backward(tmp_path: Path, way: str, reentrant: bool) -> None:
    time = Time()

    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            if way == "segments":
                x = checkpoint(
                    lambda x: functools.reduce(lambda x, layer: layer(x), self.layers, x), x, use_reentrant=reentrant
                )
            else:
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant) if way == "outside" else layer(x)
            return self.head(x)  # type: ignore[no-any-return]

    class ChecksItself(Block):  # as those of Hugging Face
        def __init__(self, *args: Any) -> None:
            super().__init__(time, 0.0, 0.0)
            self.inner = Block(*args)  # type: ignore[assignment]
            self.last = Block(time, 0.0, 0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if reentrant:
                x.requires_grad_()
            return checkpoint(lambda x: self.last(self.inner(x)), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Checkpointed(time, make=ChecksItself if way == "inside" else Block)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    recomputed = {(f"layers.{index}", "recompute"): 2.0 + index for index in range(3)}
    assert milliseconds(rows_of(tmp_path)) == EXPECTED | recomputed
    assert sum(row["kind"] == "recompute" for row in rows_of(tmp_path)) == 3
    spans = sorted((row["start_ns"], row["duration_ns"]) for row in rows_of(tmp_path) if "layer" in row)
    assert all(begin + lasted <= after for (begin, lasted), (after, _) in pairwise(spans))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_computes_two_segments_again_has_two_recomputes(tmp_path: Path, reentrant: bool) -> None:
    """Each is whole, however long the block takes between the modules in it, and without the backward after it."""
    time = Time()

    class TwoSegments(Block):
        def __init__(self, *times: Any) -> None:
            super().__init__(*times)
            self.first, self.second = Block(time, 1.0, 100.0), Block(time, 2.0, 100.0)

        def segment(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            time.spend(50.0)
            return self.second(x)  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.segment, x, use_reentrant=reentrant)
            return x

    model = Stack(time, 1, make=TwoSegments)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    recomputes = [row["duration_ns"] / 1e6 for row in rows_of(tmp_path) if row["kind"] == "recompute"]
    assert recomputes == [53.0, 53.0]
    assert milliseconds(rows_of(tmp_path))["layers.0", "backward"] == 400.0


def test_a_block_used_twice_has_both(tmp_path: Path) -> None:
    time = Time()

    class Shared(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.embed(x))
            return self.head(self.layers[1](self.layers[0](self.layers[0](x))))  # type: ignore[no-any-return]

    model = Shared(time, 2)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    found = milliseconds(rows_of(tmp_path))
    assert found["layers.0", "forward"] == 6.0 and found["layers.0", "backward"] == 60.0
    assert found["layers.1", "forward"] == 3.0 and found["layers.1", "backward"] == 30.0
    assert sum(row.get("layer") == "layers.0" for row in rows_of(tmp_path)) == 6


def test_outputs_of_every_form_and_inputs_that_all_blocks_take(tmp_path: Path) -> None:
    time = Time()

    class Output(dict):  # type: ignore[type-arg]
        pass

    class Odd(Block):
        def forward(self, x: Any, beside: torch.Tensor) -> Any:  # type: ignore[override]
            x = x["x"][0] if isinstance(x, dict) else x
            y = super().forward(x + beside)
            return Output(x=(y, None, "text"), aux=[y.mean()])

    class Model(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            beside = self.embed(x)
            auxiliary = torch.zeros(())
            x = x.clone()
            for layer in self.layers:
                out = layer(x, beside=beside)
                x, auxiliary = out["x"][0], auxiliary + out["aux"][0]
            return self.head(x).sum() + auxiliary  # type: ignore[no-any-return]

    model = Model(time, make=Odd)
    with timing(model, tmp_path, time) as layers:
        model(X).backward()
        layers.step()
    assert milliseconds(rows_of(tmp_path)) == EXPECTED


def test_a_unit_that_returns_what_it_was_given_takes_nothing(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time)
    model.layers.insert(1, nn.Sequential(nn.Identity()))
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    found = milliseconds(rows_of(tmp_path))
    assert found.pop(("layers.1", "forward")) == 0.0
    assert sorted(found.values()) == sorted(EXPECTED.values())


def test_micro_batches_are_numbered(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time, 1)
    with timing(model, tmp_path, time) as layers:
        losses = [model(X).sum() for _ in range(3)]  # as a pipeline's stage: all forwards come first
        for loss in losses:
            loss.backward()
        layers.step()
        model(X).sum().backward()
        layers.step()
    rows = rows_of(tmp_path)
    first = [row for row in rows if row["step"] == 0]
    for kind in ("forward", "backward"):
        assert [row["microbatch"] for row in first if row["name"] == kind] == [0, 1, 2]
        assert [row["microbatch"] for row in first if row.get("layer") == "layers.0" and row["kind"] == kind] == [
            0,
            1,
            2,
        ]
    assert not any("microbatch" in row for row in rows if row["step"] == 1)


def test_without_gradients_there_is_forward_only(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time)
    with timing(model, tmp_path, time) as layers:
        with torch.no_grad():
            model(X)
        with torch.inference_mode():
            model(X)
        layers.step()
    assert milliseconds(rows_of(tmp_path)) == {key: 2 * value for key, value in EXPECTED.items() if key[1] == "forward"}


def test_frozen_blocks_before_the_first_that_learns(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time)
    for module in (model.embed, model.layers[0]):
        module.requires_grad_(False)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
    frozen = {("embed", "backward"), ("layers.0", "backward")}
    assert milliseconds(rows_of(tmp_path)) == {key: value for key, value in EXPECTED.items() if key not in frozen}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_passes_and_the_next_step_is_whole(tmp_path: Path, where: str) -> None:
    time = Time()
    model = Stack(time)

    def raises(*_: Any) -> None:
        raise Boom

    with timing(model, tmp_path, time) as layers:
        with pytest.raises(Boom):
            if where == "forward":
                handle = model.layers[1].inner.register_forward_hook(raises)
                model(X)
            else:
                handle = model.layers[1].inner.weight.register_hook(raises)
                model(X).sum().backward()
        handle.remove()
        layers.start()
        model(X).sum().backward()
        layers.step()
        with pytest.raises(Boom):  # and within one step
            handle = model.layers[1].inner.weight.register_hook(raises)
            model(X).sum().backward()
        handle.remove()
        model(X).sum().backward()
        layers.step()
    assert milliseconds(rows_of(tmp_path), step=0) == EXPECTED
    found = milliseconds(rows_of(tmp_path), step=1)
    assert found["layers.0", "backward"] == 20.0  # of the second backward
    assert found["layers.2", "backward"] == 80.0


def test_hooks_hold_no_tensor_and_go_with_the_graph(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time)
    with timing(model, tmp_path, time) as layers:
        x = X.clone()
        loss = model(x).sum()
        held = weakref.ref(x)
        del x
        del loss
        assert held() is None  # without the garbage collector
        for _ in range(3):
            model(X).sum().backward()
            layers.step()
        gc.collect()
        spans = layers._watch
        assert not spans._calls and not spans._recorded and not spans._runs and not spans._here.outputs


def test_events_are_used_again(tmp_path: Path) -> None:
    device = Device()
    time = Time(device)
    model = Stack(time)
    with timing(model, tmp_path, time) as layers:
        counts = []
        for _ in range(6):
            model(X).sum().backward()
            layers.step()
            device.catch_up()
            layers.dump()
            counts.append(device.events)
    marks = 6  # of a step and its parts
    assert counts[-1] - counts[2] <= 3 * marks
    assert layers._watch._events_out == 0


def test_a_device_that_is_behind_is_not_waited_for(tmp_path: Path) -> None:
    device = Device()
    time = Time(device)
    model = Stack(time)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
        layers.dump()
        assert rows_of(tmp_path) == []
        device.catch_up()
        model(X).sum().backward()
        layers.step()
    rows = rows_of(tmp_path)
    assert all(row["device_ns"] is not None for row in rows if row["step"] == 0)
    assert all(row["device_ns"] is None for row in rows if row["step"] == 1 and row["name"] != "data")
    assert milliseconds(rows, step=1) == EXPECTED


def test_blocks_of_a_whole_compiled_model_are_not_seen_and_that_is_said_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with (
        pytest.warns(ProfilerWrapperWarning, match="compiled as a whole") as warned,
        timing(compiled, tmp_path) as layers,
    ):
        for _ in range(5):
            compiled(X).sum().backward()
            layers.step()
    assert len(warned) == 1
    assert {row["name"] for row in rows_of(tmp_path)} == {"step", "data", "forward", "backward"}
    torch._dynamo.reset()


def test_blocks_that_are_wrapped_later_are_found(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    time = Time()
    model = Stack(time)
    with timing(model, tmp_path, time) as layers:
        model(X).sum().backward()
        layers.step()
        for index in range(3):
            model.layers[index] = torch.compile(checkpoint_wrapper(Block(time, 2.0, 3.0)), backend="eager")
        for _ in range(2):
            model(X).sum().backward()
            layers.step()
    assert ("layers.0", "forward") in milliseconds(rows_of(tmp_path), step=2)
    torch._dynamo.reset()


def test_another_thread_has_its_own_calls(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time, 2)
    with timing(model, tmp_path, time) as layers:

        def run() -> None:
            with torch.no_grad():
                model.layers[1](X)

        handle = model.layers[0].inner.register_forward_hook(lambda *_: _joined(threading.Thread(target=run)))
        model(X).sum().backward()
        handle.remove()
        layers.step()
    found = milliseconds(rows_of(tmp_path))
    assert found["layers.1", "forward"] == 6.0 and found["layers.1", "backward"] == 30.0
    assert len({row["thread"] for row in rows_of(tmp_path)}) == 2


def _joined(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_so_many_spans_of_a_step_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_spans, "MOST_NOTED", 12)
    model = Stack(Time(), 1)
    with pytest.warns(ProfilerWrapperWarning, match="run 12 times in a step"), timing(model, tmp_path) as layers:
        for _ in range(10):
            model(X)
        layers.step()
    assert sum("layer" in row for row in rows_of(tmp_path)) == 12


@pytest.mark.parametrize("most", [11, 12])
def test_the_first_span_too_many_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(layer_spans, "MOST_NOTED", most)
    model = Stack(Time(), 1)

    def run() -> None:
        with torch.no_grad(), timing(model, tmp_path):
            for _ in range(4):  # three layers each
                model(X)

    assert len(warned(run)) == 12 - most


def test_a_failure_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(Time())
    with (
        pytest.warns(ProfilerWrapperWarning, match=r"timed no more.*ours") as warned,
        timing(model, tmp_path) as layers,
    ):
        model(X).sum().backward()

        def fails(*_: Any) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(layer_spans, "perf_counter_ns", fails)
        model(X).sum().backward()
        layers.step()
    assert len(warned) == 1


def test_the_monitor_writes_the_same(tmp_path: Path) -> None:
    model = Stack(Time())
    with TrainingMonitor(tmp_path, model=model, layers=True, sinks=[], flops_profile_freq=0, peaks=1.0) as monitor:
        for _ in range(2):
            with monitor.step():
                model(X).sum().backward()
        assert monitor.last is not None and monitor.last.breakdown_s is None
    rows = rows_of(tmp_path)
    assert {row["step"] for row in rows} == {0, 1}
    for step in (0, 1):
        assert milliseconds(rows, step=step).keys() == EXPECTED.keys()
        assert {row["name"] for row in rows if row["depth"] == 0} == {"step", "data", "forward", "backward"}


def test_steps_under_the_monitors_own_profiler_are_left_out(tmp_path: Path) -> None:
    model = Stack(Time())
    with TrainingMonitor(tmp_path, model=model, layers=True, sinks=[], flops_profile_freq=2, peaks=1.0) as monitor:
        for _ in range(4):
            with monitor.step():
                model(X).sum().backward()
    assert {row["step"] for row in rows_of(tmp_path)} == {1, 3}


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="give model="):
        TrainingMonitor(tmp_path, layers=True)
    with pytest.raises(WrongUse, match="True or False"):
        TrainingMonitor(tmp_path, layers="all")  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match=r"torch\.nn\.Module"):
        LayerTimer(None)  # type: ignore[arg-type]


def test_off_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER", "off")
    model = Stack(Time())
    with LayerTimer(model, tmp_path) as layers:
        model(X).sum().backward()
        layers.step()
        assert layers.dump() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Linear(2, 2), ["Linear#0"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["0", "1"]),
        (
            nn.Sequential(nn.Sequential(nn.ModuleList([Stack(Time(), 1), Stack(Time(), 1)])), nn.ReLU()),
            ["0.0.0", "0.0.1", "1"],
        ),
    ],
)
def test_timed_modules(model: nn.Module, names: list[str]) -> None:
    assert [timed.name for timed in TimedModules(model).all] == names


def test_a_model_that_its_user_let_go_of_is_gone(tmp_path: Path) -> None:
    model = Stack(Time())
    layers = LayerTimer(model, tmp_path)
    model(torch.ones(1, 4)).sum().backward()
    layers.step()
    model(torch.ones(1, 4)).sum().backward()
    layers.step()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None, "the timer holds the model"
    layers.close()


def test_a_timer_knows_its_place_by_the_mesh_of_the_models_parameters(tmp_path: Path) -> None:
    """Also where a timer without a model was there first: they share the files."""

    class Mesh:
        mesh_dim_names, shape = ("dp", "tp"), (2, 4)

        def get_coordinate(self) -> list[int]:
            return [1, 3]

        def get_rank(self) -> int:
            return 7

    model = Stack(Time())
    next(model.parameters()).device_mesh = Mesh()  # type: ignore[attr-defined]
    with Timer(tmp_path, run_name="run", rank=7)("load"):
        pass
    with timing(model, tmp_path, run_name="run", rank=7) as layers:
        model(torch.ones(1, 4)).sum().backward()
        layers.step()
    rows = rows_of(tmp_path, rank=7)
    assert [row.get("tp") for row in rows if row["name"] == "load"] == [None]
    assert {(row["dp"], row["tp"], row["pp"]) for row in rows if "layer" in row} == {(1, 3, 0)}
