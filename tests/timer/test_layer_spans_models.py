"""Layer spans of real models: each block has its own, nothing is changed, and other measurements say the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import models
import variants
from job_clock import TRANSFER_NS, PlannedTime, RealTime, Sleeps
from layer_runs import rows_of
from processes import run_in_processes
from profiler_wrapper import ProfilerWrapper, TrainingMonitor
from profiler_wrapper.timer.layer_timer import LayerTimer
from profiler_wrapper.timer.steps import WAITS
from unchanged import hooks_of, ours_in_the_way

CASES = [
    ("llama", "plain"),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("mixtral", "plain"),
            *(("llama", variant) for variant in variants.VARIANTS if variant != "plain"),
            ("cogvideox", "gradient_checkpointing"),
            ("gpt2", "gradient_checkpointing_reentrant"),
            ("vit", "fsdp2"),
        )
    ),
]
SLEEP_S = 0.15  # of a clock that nothing else moves
STEPS = 3  # of ranks
RECOMPUTES = {"checkpoint_wrapped", "gradient_checkpointing", "gradient_checkpointing_reentrant"}


def trained(case: models.Case, model: nn.Module, steps: int, layers: LayerTimer | None = None) -> str:
    """A hash of losses, gradients, parameters and random numbers."""
    found = hashlib.sha256()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        torch.manual_seed(step)
        loss = case.loss(model, case.batch(step))
        loss.backward()
        _add(found, loss, *(parameter.grad for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if layers is not None:
            layers.step()
    _add(found, *model.parameters(), torch.get_rng_state())
    return found.hexdigest()


def _add(found: Any, *tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().numpy().tobytes())


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_block_has_its_spans_and_nothing_changes(tmp_path: Path, name: str, variant: str) -> None:
    hashes, hooks, before = [], [], ours_in_the_way()
    with variants.process_group():
        for watched in (True, False):
            torch.manual_seed(0)
            case = models.build(name)
            options = {"backend": "aot_eager"} if variant.startswith("compiled") else {}
            model = variants.VARIANTS[variant](case, **options)
            if watched:
                with LayerTimer(model, tmp_path) as layers:
                    hashes.append(trained(case, model, 3, layers))
                assert ours_in_the_way() == before
            else:
                hashes.append(trained(case, model, 3))
            hooks.append(hooks_of(case.model))
    assert hashes[0] == hashes[1]
    assert hooks[0] == hooks[1]
    rows = [row for row in rows_of(tmp_path) if row["step"] == 2]
    count = len(variants.blocks_of(case))
    blocks = [f"{case.blocks}.{index}" for index in range(count)]
    kinds = ["forward", "backward", "recompute"] if variant in RECOMPUTES else ["forward", "backward"]
    counts = Counter((row["layer"], row["kind"]) for row in rows if "layer" in row and row["layer"] in blocks)
    assert counts.keys() == {(block, kind) for block in blocks for kind in kinds}
    assert all(
        number == (2 if kind == "backward" and "recompute" in kinds else 1) for (_, kind), number in counts.items()
    )
    order = [row["layer"] for row in rows if row.get("layer") in blocks and row["kind"] == "forward"]
    assert order == blocks
    back = [row["layer"] for row in rows if row.get("layer") in blocks and row["kind"] == "backward"]
    assert list(dict.fromkeys(back)) == blocks[::-1]
    for kind in ("forward", "backward"):
        phase = next(row["duration_ns"] for row in rows if row["name"] == kind)
        inside = sum(row["duration_ns"] for row in rows if row["parent"] == kind)
        assert 0 < inside <= phase + 1000 * len(rows), kind  # the sleep below says that a block's span is all of it
    spans = sorted((row["start_ns"], row["duration_ns"]) for row in rows if "layer" in row)
    assert all(begin + lasted <= after for (begin, lasted), (after, _) in pairwise(spans))


@pytest.mark.full
@pytest.mark.parametrize("how", ["compiled_blocks", "compiled_in_place", "compiled_whole"])
def test_compiled_graphs_are_those_without_us(tmp_path: Path, how: str) -> None:
    seen = []
    for watched in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        case = models.build("llama")
        model = getattr(variants, how)(case, backend="aot_eager")
        if watched:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("profiler_wrapper.errors.Notices.warn_once", lambda *_: None)
                with LayerTimer(model, tmp_path) as layers:
                    trained(case, model, 3, layers)
        trained(case, model, 3)  # and what was compiled before is used again
        counters = torch._dynamo.utils.counters
        seen.append((dict(counters["stats"]), dict(counters["frames"]), dict(counters["graph_break"])))
    assert seen[0] == seen[1]
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_sleep_in_one_block_is_in_that_block_alone(tmp_path: Path, kind: str) -> None:
    case, clock = models.build("llama", models.Size(layers=4)), PlannedTime()
    slow = variants.blocks_of(case)[2].mlp
    asleep = (SLEEP_S, 0.0) if kind == "forward" else (0.0, SLEEP_S)
    slow.register_forward_hook(lambda module, args, output: Sleeps.apply(output, *asleep, clock))
    options: dict[str, Any] = {"layers": True, "sinks": [], "flops_profile_freq": 0, "peaks": 1.0}
    with clock.shown(), TrainingMonitor(tmp_path, model=case.model, **options) as monitor:
        for step in range(3):
            with monitor.step():
                case.loss(case.model, case.batch(step)).backward()
    times_s: dict[tuple[str, str], set[float]] = {}
    for row in rows_of(tmp_path):
        if "layer" in row:
            times_s.setdefault((row["layer"], row["kind"]), set()).add(row["duration_ns"] / 1e9)
    assert times_s.pop(("model.layers.2", kind)) == {SLEEP_S}
    assert len(times_s) > 7 and set.union(*times_s.values()) == {0.0}


PLANTED_S = {f"layers.{index}": 0.002 * times for index, times in enumerate((8, 1, 4, 2))}


class Sleeper(nn.Module):
    def __init__(self, seconds: float, clock: RealTime) -> None:
        super().__init__()
        self.linear, self.seconds, self.clock = nn.Linear(8, 8), seconds, clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(self.linear(x), self.seconds, self.seconds, self.clock)  # type: ignore[no-any-return]


class Sleepers(nn.Module):
    def __init__(self, clock: RealTime) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(seconds, clock) for seconds in PLANTED_S.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_blocks_that_sleep_8_to_1_to_4_to_2_long(tmp_path: Path, kind: str) -> None:
    clock = PlannedTime()
    model = Sleepers(clock)
    with clock.shown(), LayerTimer(model, tmp_path) as layers:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            layers.step()
    rows = [row for row in rows_of(tmp_path) if row.get("layer") in PLANTED_S and row["kind"] == kind]
    found = [(row["layer"], row["duration_ns"] / 1e9) for row in sorted(rows, key=lambda row: row["layer"])]
    assert found == [(layer, seconds) for layer, seconds in PLANTED_S.items() for _ in range(3)]


def test_the_profilers_layer_table_says_the_same(tmp_path: Path) -> None:
    """By the machine's time, to which a busy one can only add."""
    model = Sleepers(RealTime())
    options: dict[str, Any] = {"steps": "1-3", "enable_print_summary": False, "background": False}
    with ProfilerWrapper(model, output_dir=tmp_path, files=("result",), **options) as profile:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            profile.step()
    table = {(row.layer, row.phase): min(row.step_times_ns) / 1e9 for row in profile.result.layers if row.step_times_ns}
    for kind in ("forward", "backward"):
        found = {layer: table[layer, kind] for layer in PLANTED_S}
        assert all(found[layer] >= least for layer, least in PLANTED_S.items()), (kind, found)


# --- ranks ---


def rank_trains(directory: str) -> dict[str, tuple[str, str]]:
    return {variant: rank_trains_a_variant(directory, variant) for variant in ("ddp", "fsdp2")}


def rank_trains_a_variant(directory: str, variant: str) -> tuple[str, str]:
    hashes = []
    for watched in (True, False):
        torch.manual_seed(0)
        case, clock = models.build("llama"), PlannedTime()
        model = variants.VARIANTS[variant](case)
        if watched:
            mlp = variants.blocks_of(case)[0].mlp
            if torch.distributed.get_rank() == 1:
                mlp.register_forward_hook(partial(sleeps_in_backward, clock))
            if variant == "ddp":
                mlp.register_forward_hook(partial(meets_after_backward, clock))
            with clock.shown(), LayerTimer(model, directory, run_name=variant) as layers:
                hashes.append(trained(case, model, STEPS, layers))
        else:
            hashes.append(trained(case, model, STEPS))
    return hashes[0], hashes[1]


def sleeps_in_backward(clock: RealTime, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return Sleeps.apply(output, 0.0, SLEEP_S, clock)  # type: ignore[no-any-return]


def meets_after_backward(clock: RealTime, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Where DDP waits for its all-reduce, the ranks' clocks do."""

    def meet() -> None:
        with mock.patch.object(WAITS, "listeners", ()):  # it is no collective of the training's
            clock.meet()

    engine = torch.autograd.Variable._execution_engine
    output.register_hook(lambda grad: engine.queue_callback(meet))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return folder, run_in_processes(rank_trains, str(folder))


@pytest.mark.full
@pytest.mark.parametrize("variant", ["ddp", "fsdp2"])
def test_two_ranks(two_ranks: tuple[Path, list[dict[str, tuple[str, str]]]], variant: str) -> None:
    folder, hashes = two_ranks
    assert all(rank[variant][0] == rank[variant][1] for rank in hashes)
    ranks = [rows_of(folder / variant, rank=rank) for rank in range(2)]
    if variant == "ddp":
        tails = [[row for row in rows if row["kind"] == "communication"] for rows in ranks]
        for rows in tails:
            assert [(row["step"], row["sequence"], row["group"]) for row in rows] == [
                (step, 0, "0-1") for step in range(STEPS)
            ]
        quick, slow = ([row["duration_ns"] for row in rows] for rows in tails)
        assert quick == [SLEEP_S * 1e9 + TRANSFER_NS] * STEPS
        assert slow == [TRANSFER_NS] * STEPS  # the one that is late does not wait
        begins = [[row["start_ns"] for row in rows] for rows in tails]
        assert [late - early for early, late in zip(*begins, strict=True)] == [SLEEP_S * 1e9] * STEPS
    own = [
        [
            (row["duration_ns"] - row.get("waiting_ns", 0)) / 1e9
            for row in rows
            if row.get("layer") == "model.layers.0" and row["kind"] == "backward"
        ]
        for rows in ranks
    ]
    assert own == [[0.0] * STEPS, [SLEEP_S] * STEPS], "who waits for the slow rank looks as slow"
    waits = {row["name"] for row in ranks[0] if row["kind"] == "communication"}
    assert waits == ({"collectives after backward"} if variant == "ddp" else {"all_gather", "reduce_scatter"})
