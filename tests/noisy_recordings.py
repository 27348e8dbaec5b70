"""Recordings of a model of like blocks, with the noise that steps on real machines have.

A kernel takes base x factor of the step (clock) x its own noise, and now and then much longer. What is planted is
known, so that a comparison has an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from comparables import comparable
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.marks import ROOT_PATH
from profiler_wrapper.trace.recording import Recording
from recordings import AUTOGRAD, Trace, analyse

US = 1000
PARTS: Mapping[str, int] = {"attn": 90, "mlp": 180, "norm": 12}  # us of a forward; backward takes twice as long
Factor = Callable[[str, str, int], float]  # layer, phase, step -> how much longer


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviations of logarithms, and how often something takes much longer."""

    common: float = 0.04  # of a step, the same for all
    own: float = 0.025
    outliers: float = 0.01  # of kernels: up to twice as long
    slow_step: bool = False  # one step in which all takes half as long again


def noisy_recording(
    seed: int,
    *,
    blocks: int = 24,
    steps: int = 5,
    noise: Noise = Noise(),  # frozen
    slower: Factor | None = None,
    prefix: str = "layers.",
) -> Recording:
    """Steps of forward and backward of `blocks` blocks with the parts of `PARTS`."""
    random = np.random.default_rng(seed)
    trace, now, sequence = Trace(), 1_000_000, 0
    for step in range(steps):
        begin = now
        clock = float(np.exp(random.normal(0, noise.common))) * (1.5 if noise.slow_step and step == 1 else 1.0)

        def time_ns(layer: str, phase: str, part: str) -> int:
            own = float(np.exp(random.normal(0, noise.own)))
            odd = 1 + float(random.random()) if random.random() < noise.outliers else 1.0
            planted = slower(layer, phase, step) if slower is not None else 1.0  # noqa: B023
            base = PARTS[part] * US * (2 if phase == "backward" else 1)
            return max(1, round(base * clock * own * odd * planted))  # noqa: B023

        forward = []
        for block in range(blocks):
            block_begin = now
            for part in PARTS:
                layer, sequence, start = f"{prefix}{block}.{part}", sequence + 1, now
                took = time_ns(layer, "forward", part)
                now += took + 2000
                trace.mark(layer, start, now, class_name=part.title())
                trace.op("aten::mm", start + 100, now - 100, sequence=sequence)
                trace.kernel("gemm_kernel", start + 500, start + 500 + took, launched=start + 200)
                forward.append((layer, part, sequence))
            trace.mark(f"{prefix}{block}", block_begin, now, kind="block", class_name="Block")
        trace.mark(ROOT_PATH, begin, now, class_name="Net")
        for layer, part, number in reversed(forward):
            took, start = time_ns(layer, "backward", part), now
            now += took + 2000
            trace.node("MmBackward0", start, now, number=number)
            trace.kernel("gemm_kernel", start + 500, start + 500 + took, launched=start + 200, thread=AUTOGRAD)
        trace.annotation(f"ProfilerStep#{step}", begin, now)
        now += 5000
    return trace.recording()


@cache
def noisy_run(seed: int, **options: object) -> Analysis:
    """The analysis of `noisy_recording`, as a run without shapes and allocations."""
    steps = options.get("steps", 5)
    run = {"device": "NVIDIA H200", "timed_steps": list(range(int(str(steps)))), "versions": {"torch": "2.13.0"}}
    return comparable(analyse(noisy_recording(seed, **options), run=run))  # type: ignore[arg-type]
