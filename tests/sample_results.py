"""Analyses made by hand, for the tests of the reports: times in microseconds, sizes in MiB.

A layer is given its self times only; what includes the layers below is added up here, so that a
test can check a report against numbers it can work out on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.call_rows import LayerCall
from profiler_wrapper.tables.model import (
    Analysis,
    AttentionRow,
    ClassRow,
    LayerRow,
    StepRow,
    TimeTotals,
    UnattributedRow,
)

US = 1000
MIB = 1 << 20


@dataclass(frozen=True)
class Layer:
    """One layer of a hand-made result."""

    name: str
    class_name: str
    kind: str = "other"
    self_us: Mapping[Phase, float] = field(default_factory=dict)
    attention: str | None = None  # the backend, if its self time is attention
    calls: int = 1
    retained_mib: float = 0.0
    compiled: bool = False
    block: str | None = None


def analysis_of(
    layers: Sequence[Layer],
    *,
    outside_us: Mapping[Phase, float] | None = None,
    unattributed_us: Mapping[str, float] | None = None,
    parents: Mapping[str, str | None] | None = None,
    steps: int = 1,
    first_step: int = 2,
    memory: bool = True,
    with_calls: bool = True,
    base_mib: float = 1000.0,
    **more: Any,
) -> Analysis:
    """The analysis of `layers` (in model order), `outside_us` by phase and `unattributed_us` by reason.

    The first layer without a parent is the root; the parent of others is the longest name that
    starts theirs, else the root. All given times are sums over all `steps`.
    """
    above = _parents([layer.name for layer in layers]) | dict(parents or {})
    rows = _rows(layers, above, memory, base_mib)
    rows += [
        _row(Layer("", ""), phase, round(us * US), None, len(rows), None) for phase, us in (outside_us or {}).items()
    ]
    unattributed = tuple(
        UnattributedRow(reason=reason, time_ns=round(us * US), count=7)
        for reason, us in (unattributed_us or {}).items()
    )
    placed = sum(row.self_time_ns for row in rows)
    missing = sum(row.time_ns for row in unattributed)
    total = placed + missing
    attention = _attention(layers)
    values: dict[str, Any] = {
        "time_basis": "device",
        "complete": True,
        "warnings": (),
        "run": {
            "device": "NVIDIA H200",
            "rank": 0,
            "timed_steps": [*range(first_step, first_step + steps)],
            "full_steps": [],
        },
        "time": TimeTotals(
            total_ns=total,
            attributed_ns=placed,
            unattributed_ns=missing,
            busy_ns=total,
            span_ns=round(total * 1.25),
            exposed_communication_ns=0,
        ),
        "unattributed": unattributed,
        "layers": tuple(rows),
        "attention": attention,
        "classes": (ClassRow(class_name="gemm", phase="forward", time_ns=total, count=12),),
        "steps": _steps(rows, total, sum(row.time_ns for row in attention), steps, first_step, memory),
        "series": {},
        "memory": {"allocated_bytes": 3 * MIB, "categories": {"params": 2 * MIB}} if memory else {},
        "calls": _calls(layers, rows, steps, first_step) if with_calls and memory else (),
    }
    return Analysis(**(values | more))


def _parents(names: Sequence[str]) -> dict[str, str | None]:
    known = set(names)
    found: dict[str, str | None] = {}
    for name in names:
        above = name.rpartition(".")[0]
        while above and above not in known:
            above = above.rpartition(".")[0]
        found[name] = above or (None if name == names[0] else names[0])
    return found


def _rows(layers: Sequence[Layer], above: Mapping[str, str | None], memory: bool, base_mib: float) -> list[LayerRow]:
    sums: dict[tuple[str, Phase], list[float]] = {}
    for layer in layers:
        for phase, us in layer.self_us.items():
            for name in _with_ancestors(layer.name, above):
                entry = sums.setdefault((name, phase), [0, 0])
                entry[0] += round(us * US)
                entry[1] += round(us * US) if layer.attention else 0
    by_name: dict[str, list[Phase]] = {}
    for name, phase in sums:
        by_name.setdefault(name, []).append(phase)
    rows: list[LayerRow] = []
    allocated = base_mib
    retained = {layer.name: 0.0 for layer in layers}
    for layer in layers:
        for name in _with_ancestors(layer.name, above):
            retained[name] += layer.retained_mib
    for order, layer in enumerate(layers):
        entry_mib, allocated = allocated, allocated + layer.retained_mib
        for phase in by_name.get(layer.name, ["forward"]):
            time_ns, attention_ns = sums.get((layer.name, phase), (0, 0))
            sizes = (entry_mib, entry_mib + retained[layer.name], retained[layer.name]) if memory else None
            row = _row(layer, phase, int(time_ns), above[layer.name], order, sizes, int(attention_ns))
            rows.append(row)
    return _with_depth(rows, above)


def _with_ancestors(name: str, above: Mapping[str, str | None]) -> list[str]:
    names: list[str] = []
    here: str | None = name
    while here is not None:
        names.append(here)
        here = above[here]
    return names


def _with_depth(rows: Sequence[LayerRow], above: Mapping[str, str | None]) -> list[LayerRow]:
    return [replace(row, depth=len(_with_ancestors(row.layer, above)) - 1) for row in rows]


def _row(
    layer: Layer,
    phase: Phase,
    time_ns: int,
    parent: str | None,
    order: int,
    sizes_mib: tuple[float, float, float] | None,
    attention_ns: int = 0,
) -> LayerRow:
    entered = phase in ("forward", "prefill", "decode", "recompute") and layer.name != ""
    forward = entered and phase != "recompute" and sizes_mib is not None
    entry, leave, retained = sizes_mib or (0.0, 0.0, 0.0)
    return LayerRow(
        layer=layer.name,
        raw_name=layer.name,
        class_name=layer.class_name,
        kind=layer.kind,
        block=layer.name if layer.kind == "block" else layer.block,
        parent=parent,
        depth=0,
        order=order,
        phase=phase,
        calls=layer.calls if entered else None,
        self_time_ns=round(layer.self_us.get(phase, 0) * US) if layer.name else time_ns,
        time_ns=time_ns,
        cpu_time_ns=None,
        attention_ns=attention_ns,
        communication_ns=0,
        exposed_communication_ns=None,
        idle_ns=None,
        flops_per_step=None,
        self_flops_per_step=None,
        allocated_bytes=leave * MIB if forward else None,
        reserved_bytes=(leave + 500) * MIB if forward else None,
        entry_allocated_bytes=entry * MIB if forward else None,
        entry_reserved_bytes=(entry + 500) * MIB if forward else None,
        peak_bytes=round((leave + 100) * MIB) if forward else None,
        retained_bytes=retained * MIB if forward else None,
        self_retained_bytes=layer.retained_mib * MIB if forward else None,
        shared=False,
        compiled=layer.compiled,
        graph=False,
    )


def _attention(layers: Sequence[Layer]) -> tuple[AttentionRow, ...]:
    return tuple(
        AttentionRow(
            layer=layer.name, phase=phase, backend=layer.attention, kernels=("fa_kernel",), time_ns=round(us * US)
        )
        for layer in layers
        if layer.attention
        for phase, us in layer.self_us.items()
    )


def _steps(
    rows: Sequence[LayerRow], total_ns: int, attention_ns: int, steps: int, first: int, memory: bool
) -> tuple[StepRow, ...]:
    phases: dict[str, int] = {}
    for row in rows:
        phases[row.phase] = phases.get(row.phase, 0) + row.self_time_ns
    shares = [total_ns // steps] * steps
    shares[0] += total_ns - sum(shares)
    return tuple(
        StepRow(
            step=first + i,
            time_ns=share,
            span_ns=round(share * (1.2 + 0.01 * i)),
            phases_ns={phase: time_ns // steps for phase, time_ns in phases.items()},
            attention_ns=attention_ns // steps,
            peak_bytes=3 * MIB if memory else None,
        )
        for i, share in enumerate(shares)
    )


def _calls(layers: Sequence[Layer], rows: Sequence[LayerRow], steps: int, first: int) -> tuple[LayerCall, ...]:
    """One call of each layer in each step, as its forward row has it."""
    entered = [row for row in rows if row.calls is not None and row.allocated_bytes is not None]
    entered.sort(key=lambda row: ("forward", "prefill", "decode").index(row.phase))  # else the model's order
    return tuple(
        LayerCall(
            layer=row.layer,
            phase=row.phase,
            step=first + step,
            index=step,
            start_ns=(step * len(entered) + i) * US,
            end_ns=(step * len(entered) + i + 1) * US,
            device_start_ns=None,
            device_end_ns=None,
            device=0,
            time_ns=row.time_ns // steps,
            entry_allocated_bytes=round(row.entry_allocated_bytes or 0),
            exit_allocated_bytes=round(row.allocated_bytes or 0),
            entry_reserved_bytes=round(row.entry_reserved_bytes or 0),
            exit_reserved_bytes=round(row.reserved_bytes or 0),
            peak_bytes=row.peak_bytes,
            retained_bytes=round(row.retained_bytes or 0),
        )
        for step in range(steps)
        for i, row in enumerate(entered)
    )


def llama(
    blocks: int = 4,
    *,
    steps: int = 3,
    recompute: bool = False,
    backend: str = "flash",
    odd: int | None = None,
    phases: Sequence[Phase] = ("forward", "backward"),
    **more: Any,
) -> Analysis:
    """A Llama of `blocks` blocks. Per step, each takes 100 us of attention and 200 us of MLP in each phase.

    Backward takes twice as long; block number `odd` takes twice the time of the others.
    """
    names: tuple[Phase, ...] = (*phases, *(("recompute",) if recompute else ()))
    scale = {phase: (2.0 if phase == "backward" else 1.0) * steps for phase in names}

    def times(us: float) -> dict[Phase, float]:
        return {phase: us * factor for phase, factor in scale.items()}

    layers = [
        Layer("LlamaForCausalLM", "LlamaForCausalLM", self_us=times(5), calls=steps),
        Layer("model", "LlamaModel", self_us=times(4), calls=steps),
        Layer("model.embed_tokens", "Embedding", "embedding", times(20), calls=steps, retained_mib=8),
    ]
    for i in range(blocks):
        block = f"model.layers.{i}"
        slow = 2.0 if i == odd else 1.0
        layers += [
            Layer(block, "LlamaDecoderLayer", "block", times(10 * slow), calls=steps, retained_mib=4),
            Layer(
                f"{block}.self_attn", "LlamaAttention", "attention", times(100 * slow), backend, steps, 16, False, block
            ),
            Layer(f"{block}.mlp", "LlamaMLP", "mlp", times(200 * slow), calls=steps, retained_mib=32, block=block),
            Layer(
                f"{block}.input_layernorm", "LlamaRMSNorm", "norm", times(3), calls=steps, retained_mib=2, block=block
            ),
        ]
    layers += [
        Layer("model.norm", "LlamaRMSNorm", "norm", times(3), calls=steps, retained_mib=2),
        Layer("lm_head", "Linear", "head", times(150), calls=steps, retained_mib=64),
    ]
    settings: dict[str, Any] = {"steps": steps, "outside_us": {"optimizer": 90.0 * steps}}
    return analysis_of(layers, **(settings | more))
