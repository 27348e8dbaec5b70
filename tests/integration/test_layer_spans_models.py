"""Layer spans of real models: each block has its own, nothing is changed, and other measurements say the same."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import variants
from layer_runs import rows_of
from processes import run_in_processes
from profiler_wrapper import ProfilerWrapper, TrainingMonitor
from profiler_wrapper.timer.layer_timer import LayerTimer
from unchanged import hooks_of, ours_in_the_way

CASES = [
    *((name, "plain") for name in ("llama", "mixtral")),
    *(("llama", variant) for variant in variants.VARIANTS if variant != "plain"),
    ("cogvideox", "gradient_checkpointing"),
    ("gpt2", "gradient_checkpointing_reentrant"),
    ("vit", "fsdp2"),
]
SLEEP_S = 0.15  # far longer than anything else takes here, so that a busy machine cannot hide it
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


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_sleep_in_one_block_is_in_that_block_alone(tmp_path: Path, kind: str) -> None:
    case = models.build("llama", models.Size(layers=4))
    slow = variants.blocks_of(case)[2].mlp
    asleep = (SLEEP_S, 0.0) if kind == "forward" else (0.0, SLEEP_S)
    slow.register_forward_hook(lambda module, args, output: Sleeps.apply(output, *asleep))
    with TrainingMonitor(tmp_path, model=case.model, layers=True, sinks=[], flops_profile_freq=0, peaks=1.0) as monitor:
        for step in range(8):
            with monitor.step():
                case.loss(case.model, case.batch(step)).backward()
    times: dict[tuple[str, str], list[float]] = {}
    for row in rows_of(tmp_path):
        if "layer" in row:
            times.setdefault((row["layer"], row["kind"]), []).append(row["duration_ns"] / 1e9)
    asleep_s = times.pop(("model.layers.2", kind))
    assert SLEEP_S <= min(asleep_s) < 2 * SLEEP_S
    quickest_s = {key: min(values) for key, values in times.items()}  # a busy machine can only add
    assert max(quickest_s.values()) < SLEEP_S / 2, quickest_s


def test_the_profilers_layer_table_says_the_same(tmp_path: Path) -> None:
    """Blocks that sleep 8 : 1 : 4 : 2 long; of each the quickest step, because a busy machine can only add."""

    class Sleeper(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.linear, self.seconds = nn.Linear(8, 8), seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sleeps.apply(self.linear(x), self.seconds, self.seconds)  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Sleeper(seconds) for seconds in planted_s.values())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    planted_s = {f"layers.{index}": 0.01 * times for index, times in enumerate((8, 1, 4, 2))}
    model = Model()
    x = torch.randn(2, 8)
    with LayerTimer(model, tmp_path / "live") as layers:
        for _ in range(6):
            model(x).sum().backward()
            layers.step()
    with ProfilerWrapper(model, output_dir=tmp_path / "profile", steps="2-6", enable_print_summary=False) as profile:
        for _ in range(7):
            model(x).sum().backward()
            profile.step()
    table = {(row.layer, row.phase): min(row.step_times_ns) / 1e9 for row in profile.result.layers if row.step_times_ns}
    times_s: dict[tuple[str, str], list[float]] = {}
    for row in rows_of(tmp_path / "live"):
        if row.get("layer", "").startswith("layers."):
            times_s.setdefault((row["layer"], row["kind"]), []).append(row["duration_ns"] / 1e9)
    for kind in ("forward", "backward"):
        live = {layer: min(times_s[layer, kind]) for layer in planted_s}
        theirs = {layer: table[layer, kind] for layer in planted_s}
        for found in (live, theirs):
            assert all(found[layer] >= least for layer, least in planted_s.items()), (kind, found)
            assert sorted(found, key=found.__getitem__) == sorted(planted_s, key=planted_s.__getitem__), (kind, found)
            assert found["layers.0"] > 3 * found["layers.1"], (kind, found)


# --- ranks ---


def rank_trains(directory: str, variant: str) -> tuple[str, str]:
    hashes = []
    for watched in (True, False):
        torch.manual_seed(0)
        case = models.build("llama")
        model = variants.VARIANTS[variant](case)
        if watched:
            if torch.distributed.get_rank() == 1:
                variants.blocks_of(case)[0].mlp.register_forward_hook(
                    lambda module, args, output: Sleeps.apply(output, 0.0, SLEEP_S)
                )
            with LayerTimer(model, directory, run_name="run") as layers:
                hashes.append(trained(case, model, 6, layers))
        else:
            hashes.append(trained(case, model, 6))
    return hashes[0], hashes[1]


@pytest.mark.parametrize("variant", ["ddp", "fsdp2"])
def test_two_ranks(tmp_path: Path, variant: str) -> None:
    for with_us, without in run_in_processes(rank_trains, str(tmp_path), variant, world_size=2):
        assert with_us == without
    ranks = [rows_of(tmp_path, rank=rank) for rank in range(2)]
    if variant == "ddp":
        tails = [[row for row in rows if row["kind"] == "communication"] for rows in ranks]
        for rows in tails:
            assert [(row["step"], row["sequence"], row["group"]) for row in rows] == [
                (step, 0, "0-1") for step in range(6)
            ]
        quick, slow = (statistics.median(row["duration_ns"] / 1e9 for row in rows[1:]) for rows in tails)
        assert quick > slow + SLEEP_S / 3  # the one that is late does not wait
        begins = [[row["start_ns"] / 1e9 for row in rows[1:]] for rows in tails]
        assert statistics.median(late - early for early, late in zip(*begins, strict=True)) > SLEEP_S / 3
    own = [
        statistics.median(
            (row["duration_ns"] - row.get("waiting_ns", 0)) / 1e9
            for row in rows
            if row.get("layer") == "model.layers.0" and row["kind"] == "backward" and row["step"] > 0
        )
        for rows in ranks
    ]
    assert own[1] >= SLEEP_S
    assert own[0] < own[1] - SLEEP_S / 3, "who waits for the slow rank looks as slow"
    waits = {row["name"] for row in ranks[0] if row["kind"] == "communication"}
    assert waits == ({"collectives after backward"} if variant == "ddp" else {"all_gather", "reduce_scatter"})
