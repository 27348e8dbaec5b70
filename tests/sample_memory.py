"""Memory of a training run, acted out: a Llama whose every byte is known by hand, as an analysis tells it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.model import (
    BEFORE_PROFILING,
    CATEGORIES,
    Analysis,
    Change,
    Leak,
    MemoryCategory,
    MemoryMoment,
    MemoryTimeline,
    MemoryUse,
    Owner,
    Slope,
)
from sample_results import llama

MIB = 1 << 20
EVENT_NS = 100_000
SEGMENT = 20 * MIB  # what the allocator reserves at a time

Key = tuple[MemoryCategory, str, str, str, "Phase | None"]


@dataclass
class Training:
    """Allocations one after another, and what is held of each kind."""

    times_ns: list[int] = field(default_factory=list)
    changes: list[tuple[Key, int]] = field(default_factory=list)
    phase_starts: list[tuple[int, Phase]] = field(default_factory=list)
    points: list[tuple[str, int | None, int]] = field(default_factory=list)  # label, step, event

    def hold(
        self, category: MemoryCategory, layer: str, name: str, op: str, phase: Phase | None, size_bytes: int
    ) -> Key:
        """Allocate; gives what `free` takes."""
        key: Key = (category, layer, name, op, phase)
        self._change(key, size_bytes)
        return key

    def free(self, key: Key, size_bytes: int) -> None:
        self._change(key, -size_bytes)

    def brief(self, category: MemoryCategory, layer: str, op: str, phase: Phase, size_bytes: int) -> None:
        """What is gone again at once."""
        self.free(self.hold(category, layer, "", op, phase, size_bytes), size_bytes)

    def phase(self, phase: Phase) -> None:
        self.phase_starts.append((self._next_ns(), phase))

    def point(self, label: str, step: int | None) -> None:
        self.points.append((label, step, len(self.changes) - 1))

    def _next_ns(self) -> int:
        return (self.times_ns[-1] if self.times_ns else 5_000_000_000) + EVENT_NS

    def _change(self, key: Key, size_bytes: int) -> None:
        self.times_ns.append(self._next_ns())
        self.changes.append((key, size_bytes))

    def owners(self, event: int) -> tuple[Owner, ...]:
        """Who holds what after an event, the largest first."""
        held: dict[Key, list[int]] = {}
        for key, size_bytes in self.changes[: event + 1]:
            entry = held.setdefault(key, [0, 0])
            entry[0] += size_bytes
            entry[1] += 1 if size_bytes > 0 else -1
        rows = [
            Owner(category=key[0], layer=key[1], name=key[2], op=key[3], phase=key[4], size_bytes=size, count=count)
            for key, (size, count) in held.items()
            if size
        ]
        return tuple(sorted(rows, key=lambda owner: -owner.size_bytes))


def training(blocks: int = 12, *, steps: int = 3, hidden: int = 512, leak: bool = False) -> Training:
    """Steps of a Llama with AdamW: its sizes follow from `hidden`, 512 tokens and 4 bytes a number."""
    run = Training()
    square, tokens = hidden * hidden * 4, 512 * hidden * 4
    parameters = {"model.embed_tokens.weight": 8 * square}
    for i in range(blocks):
        block = f"model.layers.{i}"
        parameters |= {f"{block}.self_attn.{name}_proj.weight": square for name in "qkvo"}
        parameters |= {f"{block}.mlp.{name}_proj.weight": 3 * square for name in ("gate", "up", "down")}
        parameters |= {f"{block}.{name}_layernorm.weight": 4 * hidden for name in ("input", "post_attention")}
    parameters |= {"model.norm.weight": 4 * hidden, "lm_head.weight": 8 * square}
    for name, size in parameters.items():
        run.hold("params", name.rpartition(".")[0], name, BEFORE_PROFILING, None, size)
    run.hold("other", "", "", BEFORE_PROFILING, None, 3 * MIB + 17)
    for step in range(2, 2 + steps):
        _step(run, step, blocks, tokens, parameters, leak)
    return run


def _step(run: Training, step: int, blocks: int, tokens: int, parameters: dict[str, int], leak: bool) -> None:
    kept: list[tuple[Key, int]] = []
    run.phase("forward")
    for i in range(blocks):
        for layer, ops in _OPS.items():
            for op, times in ops:
                name = f"model.layers.{i}.{layer}"
                run.brief("workspace", name, op, "forward", tokens // 2)
                kept.append((run.hold("activation", name, "", op, "forward", times * tokens), times * tokens))
        if leak and i == 3:
            run.hold("other", "model.layers.3.mlp", "", "aten::clone", "forward", 2 * MIB)
    kept.append((run.hold("activation", "lm_head", "", "aten::mm", "forward", 16 * tokens), 16 * tokens))
    run.point("after forward", step)
    run.phase("backward")
    grads = []
    for name, size in reversed(parameters.items()):
        run.brief("activation", name.rpartition(".")[0], "MmBackward0", "backward", 2 * tokens)
        grads.append((run.hold("grads", name.rpartition(".")[0], name, "aten::mm", "backward", size), size))
        for _ in range(-(-len(kept) // len(parameters))):
            if kept:
                run.free(*kept.pop())
    while kept:
        run.free(*kept.pop())
    run.point("after backward", step)
    run.phase("optimizer")
    for name, size in parameters.items():
        if step == 2:
            for state in ("exp_avg", "exp_avg_sq"):
                run.hold(
                    "os_state", name.rpartition(".")[0], f"{state} of {name}", "aten::zeros_like", "optimizer", size
                )
        run.brief("workspace", "", "aten::_foreach_sqrt", "optimizer", size)
    for grad in grads:
        run.free(*grad)
    run.point("after optimizer", step)


_OPS = {
    "input_layernorm": (("aten::mul", 1),),
    "self_attn.q_proj": (("aten::mm", 1),),
    "self_attn": (("aten::_scaled_dot_product_flash_attention", 1), ("aten::cat", 2)),
    "mlp.gate_proj": (("aten::mm", 3),),
    "mlp": (("aten::silu", 3), ("aten::mul", 3)),
}


def memory_of(run: Training, *, device: str = "cuda:0", **more: object) -> MemoryUse:
    """What an analysis says of it; on `cpu` nothing is reserved."""
    by_category = np.zeros((len(CATEGORIES), len(run.changes)), dtype=np.int64)
    for event, (key, size_bytes) in enumerate(run.changes):
        by_category[CATEGORIES.index(key[0]), event] = size_bytes
    by_category = by_category.cumsum(axis=1)
    total = by_category.sum(axis=0)
    reserved = None
    if device != "cpu":
        reserved = -(-np.maximum.accumulate(total) // SEGMENT) * SEGMENT
    timeline = MemoryTimeline(
        time_ns=np.array(run.times_ns, dtype=np.int64),
        bytes_by_category=by_category,
        total_bytes=total,
        reserved_bytes=reserved,
        phase_starts=tuple(run.phase_starts),
    )

    def moment(label: str, step: int | None, event: int) -> MemoryMoment:
        return MemoryMoment(
            label=label,
            step=step,
            time_ns=run.times_ns[event],
            total_bytes=int(total[event]),
            reserved_bytes=None if reserved is None else int(reserved[event]),
            categories={name: int(by_category[i, event]) for i, name in enumerate(CATEGORIES)},
        )

    peak, last = int(total.argmax()), len(total) - 1
    peak_step = next((step for _, step, event in run.points if event >= peak), None)
    reserved_peak = None if reserved is None else moment("highest reserved", peak_step, int(reserved.argmax()))
    use = MemoryUse(
        device=device,
        known_owners=True,
        timeline=timeline,
        peak=moment("highest allocated", peak_step, peak),
        peak_owners=run.owners(peak),
        reserved_peak=reserved_peak,
        moments=tuple(moment(*point) for point in run.points),
        last=moment("last allocation", None, last),
        last_owners=run.owners(last),
        slope=Slope(bytes_per_step=0.0, error_bytes_per_step=0.0, steps=3),
        begin_ns=run.times_ns[0],
        end_ns=run.times_ns[-1],
    )
    return replace(use, **more)  # type: ignore[arg-type]


def llama_memory(blocks: int = 12, *, device: str = "cuda:0", **more: object) -> MemoryUse:
    """Three steps without a leak."""
    changes = (
        Change(
            kind="checkpoint",
            text="checkpoint model.layers.{0..11}",
            layers=tuple(f"model.layers.{i}" for i in range(blocks)),
            saves_bytes=150 * MIB,
            costs_ns=12_300_000,
        ),
        Change(
            kind="chunk_loss",
            text="compute the loss in chunks",
            layers=("lm_head",),
            saves_bytes=16 * MIB,
            costs_ns=None,
        ),
    )
    return memory_of(training(blocks), device=device, **({"changes": changes} | more))


def leaking_memory(blocks: int = 12, *, steps: int = 6) -> MemoryUse:
    """2 MiB more after each step."""
    leak = Leak(
        layer="model.layers.3.mlp",
        op="aten::clone",
        phase="forward",
        category="other",
        bytes_per_step=2.0 * MIB,
        count_per_step=1.0,
        steps=steps,
    )
    slope = Slope(bytes_per_step=2.0 * MIB, error_bytes_per_step=0.01 * MIB, steps=steps)
    return memory_of(training(blocks, steps=steps, leak=True), leaks=(leak,), slope=slope)


def owner(
    category: MemoryCategory,
    size_bytes: int,
    *,
    layer: str = "",
    name: str = "",
    op: str = "",
    phase: Phase | None = None,
) -> Owner:
    """One allocation."""
    return Owner(category=category, layer=layer, name=name, op=op, phase=phase, size_bytes=size_bytes, count=1)


def memory_at_peak(owners: tuple[Owner, ...], *, device: str = "cpu") -> MemoryUse:
    """A recording of `owners` alone, allocated one after another in step 2 and all held at its end."""
    run = Training()
    run.phase("forward")
    for one in owners:
        run.hold(one.category, one.layer, one.name, one.op, one.phase, one.size_bytes)
    run.point("after forward", 2)
    return memory_of(run, device=device, slope=None)


def with_memory(use: MemoryUse, analysis: Analysis | None = None) -> Analysis:
    """The analysis, of a Llama if none is given, with that memory."""
    return replace(analysis or llama(12), memory_use=use)
