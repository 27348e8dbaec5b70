"""DDP, FSDP2, tensor and pipeline parallel: each rank's layer table is right, and nothing that is trained changes."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from typing import Any

import pytest

import parallel_models
import profiler_wrapper as pw
from once import Once
from parallel_models import LAYERS, hash_of
from processes import run_in_processes
from profiling import directory_of, result_of

pytestmark = pytest.mark.full
STEPS, TIMED = 6, 3
BLOCKS = [f"layers.{number}{part}" for number in range(LAYERS) for part in ("", ".norm", ".mlp")]


def train_all() -> dict[str, dict[str, Any]]:
    """Every kind on this rank, without the wrapper and with it."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        return {kind: train(kind, folder) for kind in parallel_models.KINDS}


def train(kind: str, folder: str) -> dict[str, Any]:
    plain = parallel_models.build(kind)
    for step in range(STEPS):
        plain.step(step)
    job = parallel_models.build(kind)
    profiler = pw.ProfilerWrapper(
        job.profiled, output_dir=folder, files=("result",), background=False, enable_print_summary=False
    )
    with profiler:
        for step in range(STEPS):
            job.step(step)
            profiler.step()
    result = result_of(profiler)
    calls: Counter[tuple[str, str | None, str]] = Counter()
    for row in result.collectives:
        calls[row.collective, row.layer, row.phase] += row.count
    return {
        "hashes": (hash_of(plain.module), hash_of(job.module)),
        "forward": {row.layer: row.calls for row in result.layers if row.phase == "forward" and row.layer},
        "backward": {row.layer for row in result.layers if row.phase == "backward" and row.time_ns and row.layer},
        "blocks": [row.layer for row in result.layers if row.kind == "block" and row.phase == "forward"],
        "raw": {row.layer: row.raw_name for row in result.layers},
        "adds up": sum(row.self_time_ns for row in result.layers) + result.time.unattributed_ns == result.time.total_ns,
        "coverage": result.time.coverage,
        "collectives": +calls,
        "compute in communication": {
            row.op for row in result.operators if row.class_name == "communication" and row.op.startswith("aten::")
        },
        "directory": directory_of(profiler).name,
        "run": result.run,
    }


@pytest.fixture(scope="module")
def ranks(once: Once) -> list[dict[str, dict[str, Any]]]:
    found: list[dict[str, dict[str, Any]]] = once("parallel kinds", lambda _: run_in_processes(train_all))
    return found


@pytest.mark.parametrize("kind", parallel_models.KINDS)
def test_what_is_trained_is_the_same_with_and_without_us(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        plain, profiled = rank[kind]["hashes"]
        assert plain == profiled
    if kind in ("fsdp2", "pipeline parallel"):  # these ranks hold other parameters
        assert ranks[0][kind]["hashes"] != ranks[1][kind]["hashes"]


@pytest.mark.parametrize("kind", parallel_models.KINDS)
def test_every_nanosecond_has_a_place(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        assert rank[kind]["adds up"]
        assert rank[kind]["coverage"] == 1.0


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tensor parallel"])
def test_layers_are_those_of_the_plain_model(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        told = rank[kind]
        assert set(told["forward"]) == {"Net", "embed", *BLOCKS, "head"}
        assert set(told["forward"].values()) == {TIMED}
        assert told["backward"] == set(told["forward"])
        assert told["blocks"] == [f"layers.{number}" for number in range(LAYERS)]
        assert told["raw"]["layers.3.mlp"] == ("module." if kind == "ddp" else "") + "layers.3.mlp"


def test_layers_of_a_stage_have_their_number_in_the_whole_model(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        told = rank["pipeline parallel"]
        mine = [name for name in BLOCKS if int(name.split(".")[1]) // 2 == number]
        assert set(told["forward"]) == {"Net", "embed" if number == 0 else "head", *mine}
        assert set(told["forward"].values()) == {2 * TIMED}  # microbatches
        assert told["backward"] == set(told["forward"])
        assert told["raw"][mine[0]] == "layers.0"
        assert (told["directory"], told["run"]["stages"]) == (f"rank{number}_pp{number}", [number])


def test_places_in_the_mesh(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        found = {kind: told["run"]["coordinates"] for kind, told in rank.items()}
        assert found == {
            "ddp": {},
            "fsdp2": {"dp": number, "tp": 0, "pp": 0},
            "tensor parallel": {"dp": 0, "tp": number, "pp": 0},
            "pipeline parallel": {"pp": number},
        }
        assert {told["run"]["rank"] for told in rank.values()} == {number}
        assert {told["run"]["world_size"] for told in rank.values()} == {2}


def test_ddp_reduces_in_backward_and_of_no_one_layer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["ddp"]["collectives"] == {("all_reduce", "", "backward"): TIMED}


def test_fsdp_gathers_and_scatters_block_by_block(ranks: list[dict[str, Any]]) -> None:
    blocks = [f"layers.{number}" for number in range(LAYERS)]
    expected = {("all_gather", name, "forward"): TIMED for name in ("Net", *blocks)}
    expected |= {("all_gather", name, "backward"): TIMED for name in blocks}
    expected |= {("reduce_scatter", name, "backward"): TIMED for name in ("Net", *blocks)}
    for rank in ranks:
        assert rank["fsdp2"]["collectives"] == expected


def test_tensor_parallel_sums_in_each_mlp_and_waits_where_the_sum_is_used(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["tensor parallel"]["collectives"]
        for number in range(LAYERS):
            assert found["all_reduce", f"layers.{number}.mlp", "forward"] == TIMED
            assert found["all_reduce", f"layers.{number}.mlp", "backward"] == TIMED
            assert found["wait", f"layers.{number}", "forward"] == TIMED  # the block adds what it was given
        assert sum(count for (name, _, _), count in found.items() if name == "all_reduce") == 2 * LAYERS * TIMED
        assert all(layer.startswith("layers.") for _, layer, _ in found)


def test_a_pipeline_sends_and_receives_between_its_layers(ranks: list[dict[str, Any]]) -> None:
    """Two microbatches: activations one way, gradients the other. What runs while a send goes on is no part of it."""
    for rank in ranks:
        told = rank["pipeline parallel"]
        assert told["collectives"] == {("send", "", "other"): 2 * TIMED, ("recv", "", "other"): 2 * TIMED}
        assert told["compute in communication"] == set()
