"""What the ranks of jobs do in a step, as programs of `rank_jobs`: data parallel, tensor x data, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import pipeline_jobs
from rank_jobs import Int, Program

LAYOUTS = ("data", "hosts", "ddp", "fsdp", "tensor", "pipeline", "interleaved", "pipeline_data")
SAVE, BACKGROUND_SAVE = "save_checkpoint", "save_in_background"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a job is laid out. Ranks are numbered by stage, then replica, then place among tensor parallel ones."""

    layout: str
    replicas: int
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    microbatches: int = 1
    layers: int = 4
    ranks_of_host: int = 8
    prefetch: int = 2  # gathers that may run ahead of the layer that computes
    phases: bool = True  # forward and backward have a span each, around their layers

    @property
    def ranks(self) -> int:
        return self.replicas * self.tensor * self.stages

    def place(self, rank: int) -> dict[str, int]:
        """stage, dp, tp."""
        inner = self.replicas * self.tensor
        return {"stage": rank // inner, "dp": rank % inner // self.tensor, "tp": rank % self.tensor}

    def host(self, rank: int) -> int:
        return rank // self.ranks_of_host

    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        return list(_by(range(self.ranks), self.host).values())

    def groups(self, *same: str) -> dict[str, list[int]]:
        """Ranks that have the same place in these dimensions; named by it."""

        def name(rank: int) -> str:
            return " ".join(f"{key}{self.place(rank)[key]}" for key in same)

        return _by(range(self.ranks), name)


def _by(ranks: Iterable[int], key: Callable[[int], Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def build(shape: Shape, scale: float = 1.0) -> Program:
    """A step of such a job; `scale`: how large its model is."""
    inner = shape.replicas * shape.tensor
    program = Program([np.arange(inner) + stage * inner for stage in range(shape.stages)])
    for role in range(shape.stages):
        begin = program.add(role, "between steps", "other", 0.6, recorded=False)
        program.add(role, BACKGROUND_SAVE, "checkpoint", line="background", after=[begin])
        program.add(role, "data", "data", DATA_MS * scale)
    if shape.stages > 1:
        _pipeline(program, shape, scale)
    else:
        {"fsdp": _sharded, "tensor": _tensor}.get(shape.layout, _replicated)(program, shape, scale)
    for role in range(shape.stages):
        program.add(role, SAVE, "checkpoint")
    return program


def _world(shape: Shape) -> dict[str, list[int]]:
    return {"world": list(range(shape.ranks))}


# Of a model in a step of one rank; batches are loaded ahead.
DATA_MS, FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS = 0.3, 24.0, 48.0, 5.0


def _layer(program: Program, shape: Shape, layer: int, kind: str, scale: float, **about: Any) -> int:
    """Forward or backward of one layer."""
    base_ms = scale * (FORWARD_MS if kind == "forward" else BACKWARD_MS) / shape.layers
    name = f"model.layers.{layer}"
    parent = kind if shape.phases else ""
    return program.add(0, name if parent else kind, kind, base_ms, parent=parent, layer=name, **about)


def _replicated(program: Program, shape: Shape, scale: float) -> None:
    """The whole model on each rank; gradients meet at the end, or bucket by bucket beside the backward."""
    for layer in range(shape.layers):
        _layer(program, shape, layer, "forward", scale)
    program.add(0, "gc", "gc")
    bucket = None
    for layer in reversed(range(shape.layers)):
        computed = _layer(program, shape, layer, "backward", scale)
        if shape.layout == "ddp":
            transfer = 40.0 * scale / shape.layers
            bucket = program.collective(
                [0], "all_reduce", _world(shape), transfer, line="communication", after=[computed], bytes=25 << 20
            )
    if shape.layout == "data":
        program.collective([0], "all_reduce", _world(shape), 9.0 * scale, bytes=100 << 20)
    if shape.layout == "hosts":
        nodes = {f"node{host}": ranks for host, ranks in enumerate(shape.hosts())}
        across = {f"across{place}": list(ranks) for place, ranks in enumerate(zip(*nodes.values(), strict=True))}
        program.collective([0], "reduce_scatter", nodes, 4.0 * scale, bytes=100 << 20)
        program.collective([0], "all_reduce", across, 9.0 * scale, bytes=25 << 20)
    program.add(0, "optimizer", "optimizer", OPTIMIZER_MS * scale, after=[bucket])


def _sharded(program: Program, shape: Shape, scale: float) -> None:
    """FSDP: a layer's parameters are gathered ahead of it, and its gradients reduced behind it, each on a stream."""
    gather_ms = 0.6 * scale * FORWARD_MS / shape.layers
    computes: list[int] = []
    last = None
    order = [("forward", layer) for layer in range(shape.layers)]
    order += [("backward", layer) for layer in reversed(range(shape.layers))]
    for place, (kind, layer) in enumerate(order):
        if place == shape.layers:
            program.add(0, "gc", "gc")
        limit = computes[place - shape.prefetch] if place >= shape.prefetch else 0  # where the step begins
        gathered = program.collective(
            [0], "all_gather", _world(shape), gather_ms, line="gathers", after=[limit], bytes=20 << 20
        )
        computes.append(_layer(program, shape, layer, kind, scale, after=[gathered]))
        if kind == "backward":
            last = program.collective(
                [0],
                "reduce_scatter",
                _world(shape),
                gather_ms,
                line="reductions",
                after=[computes[-1]],
                bytes=20 << 20,
            )
    program.add(0, "optimizer", "optimizer", OPTIMIZER_MS * scale, after=[last])


def _tensor(program: Program, shape: Shape, scale: float) -> None:
    """Ranks of a tensor parallel group reduce in each layer; then gradients of equal places are reduced."""
    for kind in ("forward", "backward"):
        layers = range(shape.layers)
        for layer in layers if kind == "forward" else reversed(layers):
            _layer(program, shape, layer, kind, scale)
            parent = kind if shape.phases else ""
            program.collective([0], "all_reduce", shape.groups("dp"), 0.8 * scale, parent=parent, bytes=8 << 20)
        if kind == "forward":
            program.add(0, "gc", "gc")
    program.collective([0], "grads_reduce_scatter", shape.groups("tp"), 7.0 * scale, bytes=50 << 20)
    program.add(0, "optimizer", "optimizer", OPTIMIZER_MS * scale)


def _pipeline(program: Program, shape: Shape, scale: float) -> None:
    """1F1B, interleaved where stages have several chunks; receives are posted ahead, sends are not waited for."""
    plan = pipeline_jobs.Job(stages=shape.stages, chunks=shape.chunks, microbatches=shape.microbatches)
    parts = shape.stages * shape.chunks
    base_ms = {"forward": FORWARD_MS / 4 / shape.chunks, "backward": BACKWARD_MS / 4 / shape.chunks}
    ends: dict[tuple[str, str, int, int], int] = {}  # (verb, kind, microbatch, part of the model): its operation
    for stage in range(shape.stages):
        begin = next(number for number, each in enumerate(program.operations) if each.role == stage)
        computes: list[tuple[str, int]] = []
        collected = False
        for kind, microbatch, chunk in pipeline_jobs.schedule(plan, stage):
            part, about = chunk * shape.stages + stage, {"microbatch": microbatch}
            if shape.chunks > 1:
                about["chunk"] = chunk
            if kind == "backward" and not collected:
                program.add(stage, "gc", "gc")
                collected = True
            step = 1 if kind == "forward" else -1
            received = None
            if 0 <= part - step < parts:
                same = [number for other, number in computes if other == kind]
                posted = same[-1] if same else computes[-2][1] if kind == "backward" and len(computes) > 1 else begin
                received = ends["recv", kind, microbatch, part] = program.add(
                    stage, f"{kind}-recv", "communication", line=f"{kind} recv", after=[posted], bytes=8 << 20, **about
                )
            done = program.add(stage, f"{kind}-compute", kind, base_ms[kind] * scale, after=[received], **about)
            computes.append((kind, done))
            if 0 <= part + step < parts:
                ends["send", kind, microbatch, part + step] = program.add(
                    stage, f"{kind}-send", "communication", line=f"{kind} send", after=[done], bytes=8 << 20, **about
                )
    for verb, kind, microbatch, part in ends:
        if verb == "send":
            sender, receiver = (ends[each, kind, microbatch, part] for each in ("send", "recv"))
            pairs = _pairs(program, sender, receiver)
            program.meet((sender, receiver), pairs, 0.8 * scale, f"{kind} send and receive")
    stages = range(shape.stages)
    if shape.replicas * shape.tensor > 1:
        program.collective(stages, "grads-reduce-scatter", shape.groups("stage"), 6.0 * scale, bytes=50 << 20)
    program.collective(stages, "optimizer-clip-main-grad", _world(shape), 0.5 * scale, bytes=8)
    for stage in stages:
        program.add(stage, "optimizer", "optimizer", OPTIMIZER_MS * scale)


def _pairs(program: Program, sender: int, receiver: int) -> Mapping[str, Sequence[int]]:
    """Who sends to whom."""
    ends: list[Int] = [program.roles[program.operations[number].role] for number in (sender, receiver)]
    return {f"p2p {one}-{other}": (one, other) for one, other in zip(*(ranks.tolist() for ranks in ends), strict=True)}
