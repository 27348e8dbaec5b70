"""Analyses that are awkward to draw: names that are out to do harm, and a model as large as wanted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.model import Analysis
from sample_results import Layer, analysis_of
from sample_views import full_analysis, summary

# What stands in names that are out to do harm, or only hard to draw.
AWKWARD = (
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "<b>bold</b> & 'single' \"double\" `back`",
    "javascript:document.title='ran'",
    "emoji 🧠👩‍🔬",
    "right\u202eot tfel\u202c \u05d0\u05d1",
    "line\nbreak\ttab",
    "nul\x00bell\x07",
    "lone\ud800surrogate",
    "e" + "\u0301" * 60,
    "=cmd()|'/c calc'!A0",
    "{{ 7 * 7 }}${title}%{customdata}",
    "x" * (1 << 20),
)
_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "accumulate_grad")
_MODULES = (
    ("input_layernorm", "LlamaRMSNorm", "norm", 3.0),
    ("self_attn", "LlamaAttention", "attention", 40.0),
    ("self_attn.q_proj", "Linear", "other", 30.0),
    ("self_attn.k_proj", "Linear", "other", 15.0),
    ("self_attn.v_proj", "Linear", "other", 15.0),
    ("self_attn.o_proj", "Linear", "other", 30.0),
    ("post_attention_layernorm", "LlamaRMSNorm", "norm", 3.0),
    ("mlp", "LlamaMLP", "mlp", 12.0),
    ("mlp.gate_proj", "Linear", "other", 80.0),
    ("mlp.down_proj", "Linear", "other", 80.0),
)


def awkward_page(names: Sequence[str] = AWKWARD) -> Analysis:
    """A model whose layers have these names, with findings, warnings and versions that hold them too."""
    layers = [Layer("Model", names[0], self_us={"forward": 5.0})]
    layers += [
        Layer(f"Model.{name}", name, "mlp", {"forward": 10.0 + i, "backward": 20.0}, "flash", retained_mib=1.0)
        for i, name in enumerate(names)
    ]
    analysis = analysis_of(layers, unattributed_us={names[0]: 3.0})
    finding = {**summary()["findings"][0], "title": names[0], "fix": names[1], "layer": f"Model.{names[2]}"}
    more = [{**finding, "title": name, "evidence": [name], "source": name, "layers": [name]} for name in names]
    return replace(
        analysis,
        warnings=tuple(names),
        run={**analysis.run, "device": names[0], "versions": {name[:40]: name for name in names}},
        summary={"verdict": " ".join(names), "findings": [finding, *more][:10], "comparable": {}},
    )


def large_page(blocks: int = 100, *, steps: int = 10) -> Analysis:
    """`blocks` blocks of 10 modules in 4 phases over `steps` steps, with times as uneven as real ones."""
    chance = random.Random(0)
    layers = [Layer("LlamaForCausalLM", "LlamaForCausalLM", self_us=_times(2.0, steps, chance))]
    for number in range(blocks):
        block = f"model.layers.{number}"
        layers.append(Layer(block, "LlamaDecoderLayer", "block", _times(5.0, steps, chance), calls=steps))
        for name, class_name, kind, us in _MODULES:
            attention = "flash" if name == "self_attn" else None
            layers.append(
                Layer(
                    f"{block}.{name}", class_name, kind, _times(us, steps, chance), attention, steps, 1.5, False, block
                )
            )
    analysis = analysis_of(layers, steps=steps, outside_us={"optimizer": 900.0 * steps}, with_calls=False)
    rows = tuple(
        replace(
            row,
            flops_per_step=row.time_ns * 300,
            self_flops_per_step=row.self_time_ns * 300,
            bytes_moved_per_step=row.time_ns * 3,
            roof_time_per_step_ns=row.time_ns // 17,
            memory_roof_time_per_step_ns=row.time_ns // 31,
            cpu_time_ns=row.time_ns // 3,
            idle_ns=row.time_ns // 97,
            step_times_ns=tuple(row.time_ns // steps + chance.randrange(999) for _ in range(steps)),
        )
        for row in analysis.layers
    )
    full = full_analysis(4)
    return replace(analysis, layers=rows, overview=full.overview, summary=full.summary, utilization=full.utilization)


def _times(us: float, steps: int, chance: random.Random) -> dict[Phase, float]:
    return {
        phase: round(us * steps * chance.uniform(0.9, 1.1) * (2 if phase == "backward" else 1), 3) for phase in _PHASES
    }
