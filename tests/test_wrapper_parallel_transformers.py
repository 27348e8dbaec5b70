"""Hugging Face models divided among four ranks: each rank's table says what that rank does, worked out by hand.

All ranks of all kinds run in one job. FLOPs are of products: (tokens, k) with (k, n) is 2 * tokens * k * n forward and
twice that backward; fused attention has two products forward and five backward.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_transformers
import profiler_wrapper as pw
from once import Once
from parallel_models import hash_of
from parallel_transformers import LAYERS_WHEN_INTERLEAVED, MICROBATCHES, SIZE
from processes import run_in_processes
from profiling import result_of

pytestmark = pytest.mark.full
WORLD, STEPS, TIMED = 4, 2, 1
LLAMAS = ("llama", "qwen2")
CASES = (
    *((kind, "llama") for kind in parallel_transformers.KINDS if kind not in ("ddp", "gpipe")),
    ("ddp", "gpt2"),
    ("fsdp2", "gpt2"),
    ("tp", "qwen2"),
)
LIVE = ("fsdp2", "fsdp2 compiled", "hsdp", "tp", "1f1b")
SHARDED = ("fsdp2", "fsdp2 checkpointed", "fsdp2 compiled", "hsdp", "tp and fsdp2")
PIPELINES = tuple(parallel_transformers.PIPELINES)
MESHES: dict[str, Any] = {
    "hsdp": lambda rank: {"dp": rank, "tp": 0, "pp": 0},
    "tp": lambda rank: {"dp": 0, "tp": rank, "pp": 0},
    "tp and fsdp2": lambda rank: {"dp": rank // 2, "tp": rank % 2, "pp": 0},
    **dict.fromkeys(("fsdp2", "fsdp2 checkpointed", "fsdp2 compiled"), lambda rank: {"dp": rank, "tp": 0, "pp": 0}),
    **dict.fromkeys(("ddp", "ddp accumulated", "ddp compiled"), lambda rank: {}),
    **dict.fromkeys(PIPELINES, lambda rank: {"pp": rank}),
}


# --- what a rank does, by hand ---


def products_of_block(name: str) -> int:
    """Of one block's weights: keys and values of a Llama are half as wide; GPT-2's MLP is four times as wide."""
    per_token = (3 + 6 if name in LLAMAS else 4 + 8) * SIZE.hidden**2
    return 2 * SIZE.batch * SIZE.tokens * per_token


ATTENTION = 2 * 2 * SIZE.batch * SIZE.tokens**2 * SIZE.hidden  # queries with keys, that with values
HEAD = 2 * SIZE.batch * SIZE.tokens * SIZE.hidden * SIZE.vocabulary


def blocks_of(kind: str, rank: int) -> list[int]:
    if kind == "interleaved":
        return [rank, rank + WORLD]
    return [rank] if kind in PIPELINES else list(range(SIZE.layers))


def flops_of(kind: str, name: str, rank: int) -> dict[str, int]:
    """In a step of that rank, by phase."""
    share = parallel_transformers.TENSOR_PARALLEL.get(kind, 1)
    times = 2 if kind == "ddp accumulated" else 1
    blocks = len(blocks_of(kind, rank))
    weights, attention = products_of_block(name) * blocks // share, ATTENTION * blocks // share
    head = HEAD if kind not in PIPELINES or rank == WORLD - 1 else 0
    # A dropout of GPT-2 keeps attention in pieces: four products backward, not five.
    again = 4 if name == "gpt2" else 5
    found = {
        "forward": times * (weights + attention + head),
        "backward": times * (2 * weights + again * attention // 2 + 2 * head),
    }
    if kind == "fsdp2 checkpointed":  # but for each block's last product, of which torch only needs the inputs
        last = 2 * SIZE.batch * SIZE.tokens * 2 * SIZE.hidden**2 * blocks
        found["recompute"] = weights + attention - last
    return found


# --- the job ---


def train_all() -> dict[tuple[str, str], dict[str, Any]]:
    """Every case on this rank, without us and with us."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        return {case: train(*case, folder) for case in CASES}


def train(kind: str, name: str, folder: str) -> dict[str, Any]:
    torch._dynamo.reset()
    hashes = [trained(kind, name)]
    job = build(kind, name)
    profiler = pw.ProfilerWrapper(
        job.profiled,
        output_dir=folder,
        steps=f"{STEPS - TIMED}-{STEPS - 1}",
        record_shapes=True,
        files=("result",),
        background=False,
        enable_print_summary=False,
    )
    with profiler:
        for step in range(STEPS):
            job.step(step)
            profiler.step()
    hashes.append(hash_of(job.module))
    live: list[dict[str, Any]] = []
    if kind in LIVE:
        job = build(kind, name)
        run = f"{kind}-{name}".replace(" ", "-")
        with pw.LayerTimer(job.profiled, folder, run_name=run) as layers:
            for step in range(STEPS):
                job.step(step)
                layers.step()
        hashes.append(hash_of(job.module))
        file = next(Path(folder, run, "timers").glob(f"*rank{torch.distributed.get_rank()}.jsonl"))
        live = [json.loads(line) for line in file.read_text().splitlines()]
    result = result_of(profiler)
    calls: Counter[tuple[str, str | None, str]] = Counter()
    for row in result.collectives:
        calls[row.collective, row.layer, row.phase] += row.count
    flops: Counter[str] = Counter()
    of_blocks: Counter[str] = Counter()
    for flop_row in result.flops:
        flops[flop_row.phase] += flop_row.flops_per_step
    for row in result.layers:
        if row.kind == "block" and row.phase == "forward":
            of_blocks[row.layer] += row.flops_per_step or 0
    return {
        "hashes": hashes,
        "flops": dict(+flops),
        "uncounted": len(result.uncounted),
        "blocks": dict(of_blocks),
        "calls": {row.layer: row.calls for row in result.layers if row.phase == "forward"},
        "backward": {row.layer for row in result.layers if row.phase == "backward" and row.time_ns},
        "left over": sum(row.self_time_ns for row in result.layers)
        + result.time.unattributed_ns
        - result.time.total_ns,
        "unattributed": result.time.unattributed_ns,
        "collectives": +calls,
        "communication": {(row.layer, row.phase): row.communication_ns for row in result.layers},
        "coordinates": result.run["coordinates"],
        "live": live,
    }


def build(kind: str, name: str) -> Any:
    torch.manual_seed(0)
    return parallel_transformers.build(kind, name)


def trained(kind: str, name: str) -> str:
    job = build(kind, name)
    for step in range(STEPS):
        job.step(step)
    return hash_of(job.module)


@pytest.fixture(scope="module")
def ranks(once: Once) -> list[dict[tuple[str, str], dict[str, Any]]]:
    found: list[dict[tuple[str, str], dict[str, Any]]] = once(
        "parallel transformers", lambda _: run_in_processes(train_all, world_size=WORLD)
    )
    return found


def names_of(kind: str, name: str, rank: int) -> list[str]:
    above = "transformer.h" if name == "gpt2" else "model.layers"
    return [f"{above}.{number}" for number in blocks_of(kind, rank)]


# --- each rank's table ---


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_parameters_are_the_same_with_and_without_us(ranks: list[Any], kind: str, name: str) -> None:
    for number, rank in enumerate(ranks):
        hashes = rank[kind, name]["hashes"]
        assert len(hashes) == (3 if kind in LIVE else 2)
        assert len(set(hashes)) == 1, f"rank {number} trained something else"
    differs = kind in PIPELINES or kind in SHARDED or kind == "tp"
    assert (len({rank[kind, name]["hashes"][0] for rank in ranks}) > 1) == differs, "ranks hold the same, or do not"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_flops_of_each_rank_are_those_by_hand(ranks: list[Any], kind: str, name: str) -> None:
    for number, rank in enumerate(ranks):
        told = rank[kind, name]
        assert told["uncounted"] == 0
        assert told["flops"] == flops_of(kind, name, number), f"rank {number}"
        share = parallel_transformers.TENSOR_PARALLEL.get(kind, 1)
        times = 2 if kind == "ddp accumulated" else 1
        each = times * (products_of_block(name) + ATTENTION) // share
        assert told["blocks"] == dict.fromkeys(names_of(kind, name, number), each), f"rank {number}"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_layers_have_their_names_in_the_whole_model(ranks: list[Any], kind: str, name: str) -> None:
    for number, rank in enumerate(ranks):
        told = rank[kind, name]
        mine = names_of(kind, name, number)
        calls = TIMED * (MICROBATCHES if kind in PIPELINES else 2 if kind == "ddp accumulated" else 1)
        assert {layer: told["calls"].get(layer) for layer in mine} == dict.fromkeys(mine, calls)
        assert set(mine) <= told["backward"]
        assert not [layer for layer in told["calls"] if "_orig_mod" in layer or layer.startswith("module.")]
        ends = {"model.embed_tokens": 0, "model.norm": WORLD - 1, "lm_head": WORLD - 1}
        if kind in PIPELINES:
            assert {layer: layer in told["calls"] for layer in ends} == {
                layer: number == holder for layer, holder in ends.items()
            }
        assert told["coordinates"] == MESHES[kind](number)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_nanosecond_has_a_place(ranks: list[Any], kind: str, name: str) -> None:
    for rank in ranks:
        assert (rank[kind, name]["left over"], rank[kind, name]["unattributed"]) == (0, 0)


# --- collectives on the calling thread ---


def expected_collectives(kind: str, name: str, rank: int) -> dict[tuple[str, str, str], int]:
    """Without those of tensor parallel, which DTensor decides on, and without DDP's of buffers."""
    blocks, root = names_of(kind, name, rank), "GPT2LMHeadModel" if name == "gpt2" else "LlamaForCausalLM"
    found: dict[tuple[str, str, str], int] = {}
    if kind in SHARDED:
        found |= {("all_gather", layer, "forward"): TIMED for layer in (root, *blocks)}
        found |= {("all_gather", layer, "backward"): TIMED for layer in blocks}
        found |= {("reduce_scatter", layer, "backward"): TIMED for layer in (root, *blocks)}
    if kind == "hsdp":
        found |= {("all_reduce", layer, "backward"): TIMED for layer in (root, *blocks)}
    if kind.startswith("ddp"):  # once, however many micro-batches: of no one layer
        found["all_reduce", "", "backward"] = TIMED
    if kind in PIPELINES:
        stages = LAYERS_WHEN_INTERLEAVED if kind == "interleaved" else WORLD
        mine = blocks_of(kind, rank)
        ends = (0 in mine) + (stages - 1 in mine)  # where a stage has one neighbour
        across = TIMED * MICROBATCHES * (2 * len(mine) - ends)
        found |= {("send", "", "other"): across, ("recv", "", "other"): across}
    return found


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if not case[0].startswith("tp")])
def test_collectives_belong_to_the_layers_that_call_them(ranks: list[Any], kind: str, name: str) -> None:
    for number, rank in enumerate(ranks):
        found = {key: count for key, count in rank[kind, name]["collectives"].items() if key[0] != "broadcast"}
        assert found == expected_collectives(kind, name, number), f"rank {number}"


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[0] in parallel_transformers.TENSOR_PARALLEL])
def test_tensor_parallel_sums_in_attention_and_mlp(ranks: list[Any], kind: str, name: str) -> None:
    """Forward after the output of each; backward before the input of queries, keys and values, of gate and up."""
    for number, rank in enumerate(ranks):
        found = rank[kind, name]["collectives"]
        for layer in names_of(kind, name, number):
            assert found["all_reduce", f"{layer}.self_attn", "forward"] == TIMED
            assert found["all_reduce", f"{layer}.mlp", "forward"] == TIMED
            assert found["all_reduce", f"{layer}.self_attn", "backward"] == 3 * TIMED
            assert found["all_reduce", f"{layer}.mlp", "backward"] == 2 * TIMED
            assert found["wait", layer, "forward"] == 2 * TIMED  # where it is added to what came in
        assert sum(count for key, count in found.items() if key[0] == "all_reduce") == 7 * TIMED * SIZE.layers
        assert not [key for key in found if key[0] == "other"]


@pytest.mark.parametrize("kind", [*SHARDED, "tp"])
def test_communication_is_part_of_the_layers_times(ranks: list[Any], kind: str) -> None:
    for number, rank in enumerate(ranks):
        told = rank[kind, "llama"]["communication"]
        for layer in names_of(kind, "llama", number):
            assert told[layer, "forward"] > 0 and told[layer, "backward"] > 0, (number, layer)


# --- waits as live spans show them ---


def waits_of(told: dict[str, Any]) -> Counter[tuple[str, str | None, str | None, int | None]]:
    """By name, the span around it, group and bytes, in the last step."""
    return Counter(
        (row["name"], row["parent"], row.get("group"), row.get("bytes"))
        for row in told["live"]
        if row.get("kind") == "communication" and row["step"] == STEPS - 1
    )


def bytes_of_block() -> int:
    """9 products of 32 x 32 and two norms, of 4 bytes; padded, as all divide by 4."""
    return 4 * (9 * SIZE.hidden**2 + 2 * SIZE.hidden)


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
def test_live_spans_tell_what_fsdp_waits_for(ranks: list[Any], kind: str) -> None:
    for number, rank in enumerate(ranks):
        waits = waits_of(rank[kind, "llama"])
        group = "0-3" if kind == "fsdp2" else "0-1" if number < 2 else "2-3"
        size = bytes_of_block()
        for block in range(SIZE.layers):
            name = f"model.layers.{block} forward"
            assert waits["all_gather", name, group, size] == 1, (number, block)
        gathers = sum(count for key, count in waits.items() if key[0] == "all_gather" and key[3] == size)
        scatters = sum(count for key, count in waits.items() if key[0] == "reduce_scatter" and key[3] == size)
        assert (gathers, scatters) == (2 * SIZE.layers, SIZE.layers)
        sums = Counter(key[2:] for key in waits.elements() if key[0] == "all_reduce")
        # Of replicas: each rank's half of the gradients, with the one that has the same half.
        assert sums[f"{number % 2},{number % 2 + 2}", size // 2] == (SIZE.layers if kind == "hsdp" else 0)
        assert bool(sums) == (kind == "hsdp")


@pytest.mark.parametrize("kind", LIVE)
def test_spans_say_how_much_of_them_was_waiting(ranks: list[Any], kind: str) -> None:
    for rank in ranks:
        rows = [row for row in rank[kind, "llama"]["live"] if row.get("step") == STEPS - 1]
        waits = [row for row in rows if row["kind"] == "communication"]
        assert waits
        for row in rows:
            if row["kind"] in ("forward", "backward"):
                end = row["start_ns"] + row["duration_ns"]
                within = sum(
                    wait["duration_ns"]
                    for wait in waits
                    if row["start_ns"] <= wait["start_ns"] and wait["start_ns"] + wait["duration_ns"] <= end
                )
                assert row["waiting_ns"] == within <= row["duration_ns"], row["name"]


def test_live_spans_of_tensor_parallel_and_pipelines(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        waits = waits_of(rank["tp", "llama"])
        inside = {parent for _, parent, _, _ in waits}
        assert inside == {f"model.layers.{block} {phase}" for block in range(4) for phase in ("forward", "backward")}
        assert sum(waits.values()) == 7 * SIZE.layers
        told = rank["1f1b", "llama"]["live"]
        waits = waits_of(rank["1f1b", "llama"])
        across = MICROBATCHES * (2 - (number in (0, WORLD - 1)))
        assert {name: sum(count for key, count in waits.items() if key[0] == name) for name in ("send", "recv")} == {
            "send": across,
            "recv": across,
        }
        layers = {row["layer"] for row in told if row.get("layer", "").startswith("model.layers")}
        assert layers == {f"model.layers.{number}"}
        assert {row["pp"] for row in told if "name" in row} == {number}
